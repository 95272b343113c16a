"""Relations between plans: random pairs of calls of which one has at least the freedom, or the means, of the other.

A `Case` is one call of `autopar.plan`. A relation draws a `restricted` case and makes a `relaxed` one from it; a seed
gives the same pair every time. Whatever costs are, the relaxed plan is not slower, up to its gap, and is not refused
where the restricted one fits.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from unittest import mock

import torch
from torch import nn

import autopar
from autopar import Cluster, ConstraintError, InfeasibleError, MicroBatchError
from passes.capture import capture
from passes.cost.cluster import CLUSTERS, Link
from passes.ir.program import Program
from passes.search.subproblems import Subproblems
from tests.models import MODELS

# Printed steps agree with the objective of the search up to this.
TOLERANCE = 1e-6
# Bytes that never decide anything.
PLENTY = 1e15

# Gives one of several values.
Draw = random.Random


@dataclass(frozen=True)
class Model:
    """A stock architecture with the sizes of its config, and the batch that it is traced with: [batch, length]."""

    architecture: str
    config: tuple[tuple[str, int], ...]
    batch: int
    length: int

    def make(self) -> nn.Module:
        """The model in bfloat16, without values."""
        with torch.device("meta"):
            return MODELS[self.architecture](**dict(self.config)).to(torch.bfloat16)

    def inputs(self) -> dict[str, torch.Tensor]:
        """A batch with labels, without values."""
        ids = torch.empty(self.batch, self.length, dtype=torch.long, device="meta")
        return {"input_ids": ids, "labels": ids}


@dataclass(frozen=True)
class Case:
    """One call of `autopar.plan`. `mesh` are sizes by axis or a number of devices; `memory_limit` is in bytes."""

    model: Model
    mesh: Mapping[str, int] | int
    cluster: Cluster = field(repr=False)
    memory_limit: float = PLENTY
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.mesh if isinstance(self.mesh, int) else prod(self.mesh.values())

    def __str__(self) -> str:
        links = "; ".join(
            f"{name} {link.bandwidth:.3g} B/s {link.latency:.2g} s"
            for name, link in (("inside", self.cluster.inside), ("between", self.cluster.between))
        )
        cluster = f"{self.cluster.name} (nodes of {self.cluster.node_size}; {links})"
        return f"{self.model}, mesh {self.mesh}, {cluster}, limit {self.memory_limit!r}, {dict(self.options)}"


@dataclass(frozen=True)
class Outcome:
    """The plan of a case: the seconds of its step, its gap and its bytes; or the error by which it was `refused`."""

    step_s: float = float("inf")
    gap: float = 0.0
    memory_bytes: float = 0.0
    refused: str = ""
    choice: str = ""

    def __str__(self) -> str:
        return self.refused or f"{self.step_s:.6g} s (gap {self.gap:.2g}, {self.memory_bytes:.4g} B): {self.choice}"


_traces: dict[object, Program] = {}


def outcome(case: Case) -> Outcome:
    """Plan a case. A program that was traced before is not traced again, and nothing is looked for that would fit where
    nothing does."""

    def traced(*given: object) -> Program:
        key = case.model, case.options.get("objective")
        if key not in _traces:
            _traces[key] = capture(*given)  # type: ignore[arg-type]
        return _traces[key]

    def unchanged(_: Subproblems, error: InfeasibleError) -> InfeasibleError:
        return error

    with mock.patch("autopar.models.info.capture", traced), mock.patch("passes.search.choosing.with_hint", unchanged):
        try:
            found = autopar.plan(
                case.model.make(),
                case.mesh,
                case.model.inputs(),
                cluster=case.cluster,
                memory_limit=case.memory_limit,
                **case.options,  # type: ignore[arg-type]
            )
        except (ConstraintError, InfeasibleError, MicroBatchError) as error:
            return Outcome(refused=f"{type(error).__name__}: {error}")
    program = found.programs[found.objective]
    levels = {name: level for name, level in program.recompute.items() if level != "none"}
    zero = f"gather once {program.gather_once}, reduce once {program.reduce_once}"
    choice = f"{dict(found.mesh)}, {program.micro_batches} micro-batches, {levels}, {zero}"
    return Outcome(program.step_s, program.gap, sum(program.memory.values()), choice=choice)


def violation(restricted: Outcome, relaxed: Outcome) -> str:
    """The relation that does not hold between two plans; empty if all do."""
    if restricted.refused:
        return ""
    if relaxed.refused:
        return "refused with more"
    if relaxed.step_s > restricted.step_s * (1 + relaxed.gap) * (1 + TOLERANCE):
        return f"slower by {relaxed.step_s / restricted.step_s - 1:.3%}"
    return ""


# --- random cases ---


@dataclass(frozen=True)
class Scope:
    """The sizes of cases: `devices` and the most `axes` of a given mesh, and the `architectures`."""

    devices: Sequence[int]
    axes: int
    architectures: Sequence[str]


SMALL = Scope((2, 4, 6, 8, 16), 2, ("llama", "gpt2", "qwen3"))
LARGE = Scope((2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64), 3, tuple(MODELS))

_BATCHES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 24, 32, 64)
_CLUSTERS = ("h100", "h100", "a100", "a100-pcie", "ideal")
_LAYERS = (2, 4, 8, 24)


def _model(draw: Draw, scope: Scope) -> Model:
    """An architecture at ratios that are trained: heads of 32 to 128, a feed-forward part of 2 to 4 widths."""
    architecture = draw.choice(scope.architectures)
    heads, width, layers = draw.choice((4, 6, 8, 16)), draw.choice((32, 64, 128)), draw.choice(_LAYERS)
    vocabulary, length = draw.choice((1000, 4096, 32000)), draw.choice((128, 512, 1024, 4096))
    hidden = heads * width
    config = {"vocab_size": vocabulary}
    if architecture == "gpt2":
        config |= {"n_embd": hidden, "n_head": heads, "n_layer": layers, "n_positions": length}
    else:
        config |= {"hidden_size": hidden, "num_attention_heads": heads, "num_hidden_layers": layers}
        config |= {"num_key_value_heads": heads // draw.choice((1, 2)), "max_position_embeddings": length}
        config |= {"head_dim": width, "intermediate_size": hidden * draw.choice((4, 7, 8)) // 2}
    if architecture in ("mistral", "gemma2"):
        config["sliding_window"] = length // 4
    return Model(architecture, tuple(config.items()), draw.choice(_BATCHES), length)


def _link(link: Link, bandwidth: float, latency: float) -> Link:
    """A link with these factors on its rates, and on all of its latencies."""
    protocols = tuple(
        replace(each, start=each.start * latency, latency=each.latency * latency) for each in link.protocols
    )
    return replace(
        link,
        bandwidth=link.bandwidth * bandwidth,
        pair=None if link.pair is None else link.pair * bandwidth,
        latency=link.latency * latency,
        start=link.start * latency,
        switch_latency=link.switch_latency * latency,
        protocols=protocols,
    )


def _cluster(draw: Draw) -> Cluster:
    """A known cluster, or one with other nodes and links."""
    name = draw.choice(_CLUSTERS)
    known = CLUSTERS[name]
    if name == "ideal" or draw.random() < 0.5:
        return known

    def other(link: Link) -> Link:
        return _link(link, draw.choice((0.1, 0.5, 2.0)), draw.choice((0.2, 1.0, 4.0)))

    inside, between = other(known.inside), other(known.between)
    return replace(known, name=f"{name}, changed", node_size=draw.choice((2, 4, 8)), inside=inside, between=between)


def _factorizations(size: int, axes: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a size as an ordered product of so many factors of at least 2."""
    if axes == 1:
        yield (size,)
        return
    for first in range(2, size):
        if size % first == 0:
            yield from ((first, *rest) for rest in _factorizations(size // first, axes - 1) if 1 not in rest)


def _mesh_of(sizes: Sequence[int]) -> dict[str, int]:
    return dict(zip("abcd", sizes, strict=False))


def _sizes(case: Case) -> tuple[int, ...]:
    return (case.mesh,) if isinstance(case.mesh, int) else tuple(case.mesh.values())


def _case(draw: Draw, scope: Scope, axes: int) -> Case:
    """A case of a given mesh of up to so many axes, mostly for training, with all memory; sometimes with micro-batches
    or recompute."""
    model, devices = _model(draw, scope), draw.choice(scope.devices)
    shapes = [sizes for count in range(1, axes + 1) for sizes in _factorizations(devices, count)]
    case = Case(model, _mesh_of(draw.choice(shapes)), _cluster(draw))
    if draw.random() < 0.1:
        return replace(case, options={"objective": "infer"})
    options: dict[str, object] = {"objective": "train"}
    if draw.random() < 0.2:
        options["micro_batches"] = _micro_batches(draw, model)
    if draw.random() < 0.2:
        options["recompute"] = draw.choice(("none", "selective", "full"))
    return replace(case, options=options)


def _micro_batches(draw: Draw, model: Model) -> int:
    return draw.choice([count for count in range(1, model.batch + 1) if model.batch % count == 0])


def _with_limit(draw: Draw, case: Case, least: float = 0.3) -> Case:
    """The case with a memory limit, of `least` of the bytes that its fastest plan takes to a little more than these."""
    plenty = outcome(case)
    if plenty.refused:
        return case
    return replace(case, memory_limit=float(int(plenty.memory_bytes * draw.uniform(least, 1.1))))


# --- relations ---


def _more_memory(draw: Draw, case: Case) -> tuple[Case, Case]:
    case = _with_limit(draw, case)
    return case, replace(case, memory_limit=float(int(case.memory_limit * draw.choice((1.003, 1.05, 1.3, 2.0)))))


def _searched_mesh(draw: Draw, case: Case) -> tuple[Case, Case]:
    case = _with_limit(draw, case)
    return case, replace(case, mesh=case.devices)


def _finer_mesh(draw: Draw, case: Case) -> tuple[Case, Case]:
    sizes = list(_sizes(case))
    at = draw.randrange(len(sizes))
    cuts = list(_factorizations(sizes[at], 2)) or [(2, 2)]
    outer, inner = draw.choice(cuts)
    finer = [*sizes[:at], outer, inner, *sizes[at + 1 :]]
    sizes[at] = outer * inner
    case = _with_limit(draw, replace(case, mesh=_mesh_of(sizes)))
    return case, replace(case, mesh=_mesh_of(finer))


def _free_micro_batches(draw: Draw, case: Case) -> tuple[Case, Case]:
    options = {**case.options, "objective": "train", "micro_batches": _micro_batches(draw, case.model)}
    case = _with_limit(draw, replace(case, options=options))
    return case, replace(case, options={**case.options, "micro_batches": None})


def _free_recompute(draw: Draw, case: Case) -> tuple[Case, Case]:
    levels = ("none", "selective", "full", "full:1", "full:1, selective")
    options = {**case.options, "objective": "train", "recompute": draw.choice(levels)}
    case = _with_limit(draw, replace(case, options=options))
    return case, replace(case, options={**case.options, "recompute": None})


def _constraint_less(draw: Draw, case: Case) -> tuple[Case, Case]:
    axis = draw.choice("abcd"[: len(_sizes(case))])
    offered: tuple[tuple[str, str, str], ...] = (
        ("*", "stored", "I"),
        ("*", "used", "R"),
        ("@linear", "out", "S(0)"),
        ("@linear", "out", "S(2)"),
        ("@scaled_dot_product_attention", "out", "S(1)"),
        ("@embedding", "out", "R"),
    )
    some = draw.sample(offered, draw.choice((1, 2)))

    def constraints(chosen: Sequence[tuple[str, str, str]]) -> dict[str, dict[str, dict[str, str]]]:
        found: dict[str, dict[str, dict[str, str]]] = {}
        for pattern, what, placement in chosen:
            found.setdefault(pattern, {})[what] = {axis: placement}
        return found

    case = _with_limit(draw, replace(case, options={**case.options, "constraints": constraints(some)}))
    return case, replace(case, options={**case.options, "constraints": constraints(some[1:])})


def _more_devices(draw: Draw, case: Case) -> tuple[Case, Case]:
    """On devices that overlap nothing: the overlap budget is that of one of all devices, so idle ones make it less."""
    case = replace(case, cluster=replace(case.cluster, device=replace(case.cluster.device, overlaps=False)))
    times = draw.choice((2, 3, 4))
    if draw.random() < 0.5:
        case = _with_limit(draw, replace(case, mesh=case.devices))
        return case, replace(case, mesh=times * case.devices)
    case = _with_limit(draw, case)
    return case, replace(case, mesh=_mesh_of([times, *_sizes(case)]))


def _faster_links(draw: Draw, case: Case) -> tuple[Case, Case]:
    case = _with_limit(draw, case)
    faster = draw.choice((1.01, 1.5, 4.0))
    cluster = replace(
        case.cluster,
        name=f"{case.cluster.name}, faster",
        inside=_link(case.cluster.inside, faster, 1 / faster),
        between=_link(case.cluster.between, faster, 1 / faster),
    )
    return case, replace(case, cluster=cluster)


def _fewer_layers(draw: Draw, case: Case) -> tuple[Case, Case]:
    case = _with_limit(draw, case)
    (name,) = (name for name, _ in case.model.config if name in ("n_layer", "num_hidden_layers"))
    config = dict(case.model.config)
    config[name] = draw.choice([count for count in (*_LAYERS, 3, 6) if count <= config[name]])
    return case, replace(case, model=replace(case.model, config=tuple(config.items())))


RELATIONS: Mapping[str, Callable[[Draw, Case], tuple[Case, Case]]] = {
    "more_memory": _more_memory,
    "finer_mesh": _finer_mesh,
    "searched_mesh": _searched_mesh,
    "free_micro_batches": _free_micro_batches,
    "free_recompute": _free_recompute,
    "constraint_less": _constraint_less,
    "more_devices": _more_devices,
    "faster_links": _faster_links,
    "fewer_layers": _fewer_layers,
}


def pair(name: str, seed: int, scope: Scope) -> tuple[Case, Case]:
    """The restricted and the relaxed case of a relation and a seed."""
    draw = random.Random(f"{name} {seed}")
    axes = scope.axes - (name in ("finer_mesh", "more_devices"))
    return RELATIONS[name](draw, _case(draw, scope, axes))


@contextmanager
def clean_traces() -> Iterator[None]:
    """Forget the traces of all models afterwards."""
    try:
        yield
    finally:
        _traces.clear()
