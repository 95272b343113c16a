"""Bytes on one device at the points of a step that can be its peak.

What lies there throughout: parameters and optimizer states as they are stored, buffers, inputs, outputs. What autograd
keeps from the forward pass goes in the backward pass, block by block, while gradients come. A tensor that is kept
counts once per layout, whoever keeps it; one that the backward pass gathers again counts as what it is gathered from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from passes.ir.choices import Group, Problem, Solution
from passes.ir.layout import I, Layout, R, local_shape
from passes.ir.mesh import Mesh


@dataclass(frozen=True)
class Moment:
    """A point of the step: how much of what each block keeps is there, how much of its gradients, and whose backward
    pass is running (None: the optimizer's, which needs no room of its own)."""

    name: str
    kept: Sequence[float]
    gradients: Sequence[float]
    running: int | None


def moments(blocks: Sequence[str], counts: Sequence[int]) -> list[Moment]:
    """The points of a step over `blocks`, of which each stands `counts` times."""
    found = []
    size = len(blocks)
    for block, (name, count) in enumerate(zip(blocks, counts, strict=True)):
        before, after = [1.0] * block, [1.0] * (size - block - 1)
        none_before, none_after = [0.0] * block, [0.0] * (size - block - 1)
        found.append(
            Moment(f"backward of {name} begins", [*before, 1.0, *none_after], [*none_before, 0.0, *after], block)
        )
        if count > 1:
            found.append(
                Moment(
                    f"backward of {name} ends", [*before, 1 / count, *none_after], [*none_before, 1.0, *after], block
                )
            )
    found.append(Moment("optimizer step", [0.0] * size, [1.0] * size, None))
    return found


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


def layout_bytes(group: Group, layout: Layout, mesh: Mesh) -> float:
    """Bytes of all occurrences of a group's tensor in one layout on one device."""
    return float(prod(local_shape(group.type.shape, layout, mesh)) * group.type.dtype.itemsize * group.count)


def same_tensor(source: Layout, target: Layout) -> bool:
    """Whether the change runs nothing forward: letters differ between R and I only."""
    return all(
        before == after or (before in (R, I) and after in (R, I)) for before, after in zip(source, target, strict=True)
    )


def kept_bytes(problem: Problem, solution: Solution, mesh: Mesh) -> list[float]:
    """What autograd keeps, by block."""
    kept = [0.0] * len(problem.blocks)
    whole: dict[int, set[Layout]] = {}
    for index, node in enumerate(problem.nodes):
        if node.copies:
            kept[node.block] += node.copies[solution.picks[index]]
        if node.saves_result:
            kept[node.block] += node.results[solution.picks[index]]
    sources: set[int] = set()
    for edge in problem.edges:
        if not edge.saved:
            continue
        group, producer = problem.groups[edge.group], problem.nodes[edge.producer]
        before = solution.strategy(problem, edge.producer).results[edge.result]
        after = solution.strategy(problem, edge.consumer).operands[edge.operand]
        if same_tensor(before, after) or (edge.group, after) in solution.again:
            resident = producer.kind in ("parameter", "input", "buffer") or producer.saves_result
            if not resident and edge.group not in sources:
                sources.add(edge.group)
                kept[group.block] += layout_bytes(group, before, mesh)
        elif after not in whole.setdefault(edge.group, set()):
            whole[edge.group].add(after)
            kept[group.block] += layout_bytes(group, after, mesh)
    return kept


def memory_use(problem: Problem, solution: Solution, states: int, mesh: Mesh) -> MemoryUse:
    """The bytes of `solution` at its peak; `states` is how many tensors the optimizer keeps per parameter."""
    held: dict[str, float] = {}
    gradients = [0.0] * len(problem.blocks)
    transient = [0.0] * len(problem.blocks)
    for index, node in enumerate(problem.nodes):
        memory = node.memory[solution.picks[index]]
        held[node.kind] = held.get(node.kind, 0.0) + memory.held
        gradients[node.block] += memory.gradient
        transient[node.block] = max(transient[node.block], memory.transient)
    kept = kept_bytes(problem, solution, mesh)
    best: MemoryUse | None = None
    optimizer = sum(gradients) * states
    for moment in moments(problem.blocks, problem.counts):
        use = MemoryUse(
            held.get("parameter", 0.0) - optimizer,
            optimizer,
            held.get("buffer", 0.0),
            held.get("input", 0.0),
            held.get("output", 0.0),
            sum(part * size for part, size in zip(moment.gradients, gradients, strict=True)),
            sum(part * size for part, size in zip(moment.kept, kept, strict=True)),
            0.0 if moment.running is None else transient[moment.running],
            moment.name,
        )
        if best is None or use.peak > best.peak:
            best = use
    assert best is not None
    return best


def largest_terms(use: MemoryUse, count: int = 3) -> list[tuple[str, float]]:
    """The kinds that take most, largest first."""
    return sorted(use.kinds().items(), key=lambda item: -item[1])[:count]
