"""Recurrent layers, of which only samples are split, and the scans of linear attention and of state spaces."""

from collections.abc import Mapping
from math import prod

import torch

from passes.ir.program import Op, TensorType
from passes.ir.rule import Dims, Factor, Role, Rule, Saved
from passes.rules.parts import factors, is_tensor, one, rule_for
from passes.rules.scan_forms import selective_kernels


@rule_for("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """steps batch in, layers batch hidden, … -> steps batch out, layers batch hidden, …"""
    if "batch_first" not in op.arguments:
        return None
    first = bool(op.arguments["batch_first"])
    states = op.arguments["hx"]
    count = len(states) if isinstance(states, tuple) else 1
    shape = types[op.operands[0]].shape
    if len(shape) != 3:
        return None
    batch = one("batch", shape[0 if first else 1])
    roles: dict[str, Role] = {}

    def dims(name: str, prefix: str, place: int | None) -> Dims:
        found = []
        for dim, size in enumerate(types[name].shape):
            found.append(batch if dim == place else one(f"{prefix}{dim}", size))
            roles[f"{prefix}{dim}"] = Role.WHOLE
        return tuple(found)

    operands = (
        dims(op.operands[0], "input", 0 if first else 1),
        *(dims(name, f"state{slot}_", 1) for slot, name in enumerate(op.operands[1 : 1 + count])),
        *(dims(name, f"weight{slot}_", None) for slot, name in enumerate(op.operands[1 + count :])),
    )
    lasts = (dims(name, f"last{slot}_", 1) for slot, name in enumerate(op.results[1:]))
    results = (dims(op.results[0], "result", 0 if first else 1), *lasts)
    multiplications = 2.0 * types[op.operands[0]].size // shape[2] * sum(
        types[name].size for name in op.operands[1 + count :] if len(types[name].shape) == 2
    )  # fmt: skip
    saved = (Saved(0), Saved(0, result=True), *(Saved(slot) for slot in range(1 + count, len(operands))))
    return Rule(
        factors(*operands, *results, roles=roles),
        operands,
        results,
        multiplications=multiplications,
        backward=(1.0,) * len(operands),
        saved=saved,
    )


# Kernels of `delta_scan` for each chunk, forward and backward (see `passes/scans.py`).
_SCAN_KERNELS = (9, 20)


@rule_for("delta_scan")
def delta_scan(op: Op, types: Mapping[str, TensorType]) -> Rule:
    """batch heads chunks places width, the same, batch heads chunks places out, … -> batch heads chunks places out,
    batch heads chunks width out, batch heads width out: one chunk after the other. Decays are those of heads, or of
    heads and width.

    Of split chunks each rank computes what they do to any state, too (`passes.scans.delta.carry`)."""
    query, _, values, _, _, decay = (types[name].shape for name in op.operands[:6])
    batch, heads, chunks, places, width = (
        one(name, size) for name, size in zip(("batch", "heads", "chunks", "places", "width"), query, strict=True)
    )
    out, others = one("out", values[-1]), one("others", query[3])
    above = (batch, heads, chunks)
    state: Dims = (batch, heads, width, out)
    operands: tuple[Dims, ...] = (
        *((*above, places, width),) * 2,
        (*above, places, out),
        (*above, places, width),
        (*above, places, others),
        (*above, width if decay[-1] == query[-1] else one("all", decay[-1])),
        *((state,) if is_tensor(op, "state") else ()),
    )
    results: tuple[Dims, ...] = ((*above, places, out), (*above, width, out), state)
    # The products of a chunk with a state, and those of its places with each other: three and one forward.
    count = 2.0 * prod(query[:4]) * values[-1]
    with_state, within = count * query[4], count * query[3]
    forward = 3 * with_state + within
    # The gradient of the state takes two more, which are counted with those of the decay.
    backward = (with_state, with_state, with_state + within, with_state, with_state + within, 2 * with_state, 0.0)
    found = factors(*operands, *results, roles=dict.fromkeys(("places", "width", "others"), Role.WHOLE))
    forms = {}
    if "chunks" in found:
        found["chunks"] = Factor(query[2], Role.INSIDE, ordered=True)
        forms["chunks"] = "delta_scan"
    return Rule(
        found,
        operands,
        results,
        forms=forms,
        multiplications=forward,
        backward=tuple(each / forward for each in backward[: len(operands)]),
        saved=(*(Saved(slot) for slot in range(6)), Saved(1, result=True)),
        kernels=(_SCAN_KERNELS[0] * query[2], _SCAN_KERNELS[1] * query[2]),
        launched_for="chunks",
    )


# Passes over the states of all places (see `passes/scans/selective.py`), forward and backward.
_SELECTIVE_PASSES = (20, 62)


@rule_for("selective_scan")
def selective_scan(op: Op, types: Mapping[str, TensorType]) -> Rule:
    """batch channels places, the same, channels width, batch width places, the same -> batch channels places, batch
    channels width: one block of places after the other.

    Of split places each rank computes what they do to any state, as it does of blocks."""
    x, size = types[op.operands[0]], types[op.operands[2]].shape[1]
    batch, channels, places = (
        one(name, extent) for name, extent in zip(("batch", "channels", "places"), x.shape, strict=True)
    )
    width = one("width", size)
    operands: tuple[Dims, ...] = (*((batch, channels, places),) * 2, (channels, width), *((batch, width, places),) * 2)
    results: tuple[Dims, ...] = ((batch, channels, places), (batch, channels, width))
    found = factors(*operands, *results, roles={"width": Role.WHOLE})
    forms = {}
    if "places" in found:
        found["places"] = Factor(x.shape[2], Role.INSIDE, ordered=True)
        forms["places"] = "selective_scan"
    states = max(torch.float32.itemsize, x.dtype.itemsize) / x.dtype.itemsize * size
    return Rule(
        found,
        operands,
        results,
        linear=(frozenset({0}), frozenset({3})),
        forms=forms,
        kernels=selective_kernels(x.shape[2]),
        launched_for="places",
        passes=(_SELECTIVE_PASSES[0] * states, _SELECTIVE_PASSES[1] * states),
        saved=tuple(Saved(slot) for slot in range(5)),
    )
