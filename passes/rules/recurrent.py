"""Recurrent layers: only samples are split."""

from collections.abc import Mapping

from passes.ir.program import Op, TensorType
from passes.ir.rule import Dims, Role, Rule, Saved
from passes.rules.parts import factors, one, rule_for


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
