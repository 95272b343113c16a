"""Bytes on one device at the points of a step that can be its peak, for one choice.

What lies there throughout: parameters and optimizer states as they are stored, buffers, inputs, outputs. The rest comes
and goes: what autograd keeps from the forward pass, gradients of tensors on their way and of parameters, what is
gathered (`cost.account` says where each lies, `cost.moments` what of that is there at which point).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from passes.cost.account import (
    Account,
    account,
    is_kept,
    layout_bytes,
    reduced_bytes,
    runs_again,
    same_tensor,
    unsharded_bytes,
)
from passes.cost.moments import Moment, Place, Span, moments, parts
from passes.ir.choices import Edge, Problem, Solution
from passes.ir.figures import Figure
from passes.ir.layout import Layout
from passes.ir.mesh import Mesh
from passes.ir.regime import Regime


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one device, by kind: `peak` at the moment called `moment`, of which the other figures are the parts."""

    parameters: float
    optimizer: float
    buffers: float
    inputs: float
    outputs: float
    gradients: float
    activations: float
    transient: float
    moment: str

    @property
    def peak(self) -> float:
        """All of it."""
        return sum(self.kinds().values())

    def kinds(self) -> dict[str, float]:
        """The bytes by kind, under names for people."""
        return {
            "parameters": self.parameters,
            "optimizer states": self.optimizer,
            "buffers": self.buffers,
            "inputs": self.inputs,
            "outputs": self.outputs,
            "gradients": self.gradients,
            "activations": self.activations,
            "transient tensors": self.transient,
        }


@dataclass(frozen=True)
class Timetable:
    """What lies where in a problem under a regime, all places of it by number, and which part of what is in each is
    there at each moment: `parts[moment, place]`."""

    account: Account
    numbers: dict[Place, int]
    moments: Sequence[Moment]
    parts: NDArray[np.float64]


@dataclass(frozen=True)
class Lying:
    """Bytes of one kind in one place."""

    kind: str
    place: Place
    size: float


def timetable(problem: Problem, regime: Regime) -> Timetable:
    """When what lies where in `problem`."""
    found, points = account(problem, regime), moments(problem)
    numbers: dict[Place, int] = {}
    for place in found.places():
        numbers.setdefault(place, len(numbers))
    return Timetable(found, numbers, points, parts(points, list(numbers), regime))


def lying(problem: Problem, solution: Solution, mesh: Mesh, found: Account) -> list[Lying]:
    """All that lies anywhere for one choice."""
    regime = solution.regime
    result = [
        Lying(item.kind, item.place, item.sizes[pick])
        for items, pick in zip(found.nodes, solution.picks, strict=True)
        for item in items
    ]
    seen: set[tuple[int, Layout, bool]] = set()
    for edge in problem.edges:
        before = solution.strategy(problem, edge.producer).results[edge.result]
        after = solution.strategy(problem, edge.consumer).operands[edge.operand]
        for kept in (False, True):
            if (edge.group, after, kept) not in seen and (not kept or is_kept(problem, regime, edge)):
                seen.add((edge.group, after, kept))
                of = _kept if kept else _on_the_way
                result += of(problem, solution, mesh, found, edge, before, after)
    for item in found.edges:
        edge = problem.edges[item.edge]
        after = solution.strategy(problem, edge.consumer).operands[edge.operand]
        result.append(
            Lying("transient", item.place, item.times * layout_bytes(problem.groups[edge.group], after, mesh))
        )
    return result


def _kept(
    problem: Problem, solution: Solution, mesh: Mesh, found: Account, edge: Edge, before: Layout, after: Layout
) -> list[Lying]:
    """What lies there because the operand of a use is kept."""
    group, item, regime = problem.groups[edge.group], found.groups[edge.group], solution.regime
    again = (edge.group, after) in solution.again
    result = []
    if (same_tensor(before, after) or again) and item.sources is not None:
        source = item.sources[runs_again(problem.nodes[edge.producer], solution.picks[edge.producer])]
        result.append(Lying("kept", source, layout_bytes(group, before, mesh)))
    if not same_tensor(before, after) and not (group.parameter and regime.gather_once):
        places = item.again if again else item.target
        result += [Lying("kept", place, layout_bytes(group, after, mesh)) for place in places]
    return result


def _on_the_way(
    problem: Problem, solution: Solution, mesh: Mesh, found: Account, edge: Edge, before: Layout, after: Layout
) -> list[Lying]:
    """Gradients of the tensors of a group, and what of parameters lies there between micro-batches."""
    group, item, regime = problem.groups[edge.group], found.groups[edge.group], solution.regime
    if group.parameter:
        result = []
        if not same_tensor(before, after):
            result.append(Lying("parameter", Place(Span.STEP), unsharded_bytes(group, after, mesh, regime)))
        if item.gathered is not None:
            ways = reduced_bytes(group, item.gathered, before, after, mesh, regime)
            result += [Lying("transient", place, size) for place, size in ways]
        return result
    if item.flow is None or item.before is None or item.after is None:
        return []
    if same_tensor(before, after):
        return [Lying("transient", item.flow, layout_bytes(group, before, mesh))]
    return [
        Lying("transient", item.before, layout_bytes(group, before, mesh)),
        Lying("transient", item.after, layout_bytes(group, after, mesh)),
    ]


def totals(table: Timetable, found: Sequence[Lying]) -> NDArray[np.float64]:
    """Bytes at each moment."""
    sizes = np.zeros(len(table.numbers))
    for item in found:
        sizes[table.numbers[item.place]] += item.size.value if isinstance(item.size, Figure) else item.size
    result: NDArray[np.float64] = table.parts @ sizes
    return result


def peaks(table: Timetable, found: Sequence[Lying]) -> list[int]:
    """The moment of each block, and of the optimizer, at which most lies there, by number."""
    most = totals(table, found)
    best: dict[int | None, int] = {}
    for number, moment in enumerate(table.moments):
        if moment.block not in best or most[number] > most[best[moment.block]]:
            best[moment.block] = number
    return list(best.values())


def memory_use(problem: Problem, solution: Solution, states: int, mesh: Mesh) -> MemoryUse:
    """The bytes of `solution` at its peak; `states` is how many tensors the optimizer keeps per parameter."""
    table = timetable(problem, solution.regime)
    found = lying(problem, solution, mesh, table.account)
    uses = [use_at(table, moment, found, states) for moment in peaks(table, found)]
    return max(uses, key=lambda use: use.peak)


def use_at(table: Timetable, moment: int, found: Sequence[Lying], states: int) -> MemoryUse:
    """The bytes of all that is there at a moment, given by its number."""
    there: dict[str, float] = {}
    optimizer: float = 0.0
    for item in found:
        if item.place.span is Span.SUM:
            optimizer += states * item.size
        part = float(table.parts[moment, table.numbers[item.place]])
        if part:
            there[item.kind] = there.get(item.kind, 0.0) + part * item.size
    return MemoryUse(
        there.get("parameter", 0.0) - optimizer,
        optimizer,
        there.get("buffer", 0.0),
        there.get("input", 0.0),
        there.get("output", 0.0),
        there.get("gradient", 0.0),
        there.get("kept", 0.0),
        there.get("transient", 0.0),
        table.moments[moment].name,
    )


def largest_terms(use: MemoryUse, count: int = 3) -> list[tuple[str, float]]:
    """The kinds that take most, largest first."""
    return sorted(use.kinds().items(), key=lambda item: -item[1])[:count]
