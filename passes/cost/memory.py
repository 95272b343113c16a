"""Bytes on one device at the points of a step that can be its peak.

What lies there throughout: parameters and optimizer states as they are stored, buffers, inputs, outputs. What autograd
keeps from the forward pass goes in the backward pass, block by block, while gradients come. A tensor that is kept
counts once per layout, whoever keeps it; one that the backward pass gathers again counts as what it is gathered from
(and twice, if that is kept for another reason too: the figures are never too low).

Of a region that is recomputed its copies keep what they are given, and the copy whose backward pass runs has all that
its forward pass makes anew. So what is kept has a *place*: block b, where it lies from forward to backward, or, with n
blocks, n + b, where one copy's part lies while b runs backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from passes.ir.choices import Edge, Group, Node, Problem, Solution
from passes.ir.figures import as_float, largest
from passes.ir.layout import I, Layout, R, local_shape
from passes.ir.mesh import Mesh
from passes.ir.regime import PLAIN, Regime


@dataclass(frozen=True)
class Moment:
    """A point of the step: how much of what each place keeps is there, how much of the gradients of each block, and
    whose backward pass is running (None: the optimizer's, which needs no room of its own)."""

    name: str
    kept: Sequence[float]
    gradients: Sequence[float]
    running: int | None


def moments(blocks: Sequence[str], counts: Sequence[int], regime: Regime = PLAIN) -> list[Moment]:
    """The points of a step over `blocks`, of which each stands `counts` times.

    With several micro-batches all gradients are there from the second one on.
    """
    found = []
    size = len(blocks)

    def moment(name: str, kept: list[float], gradients: list[float], running: int | None) -> Moment:
        again = [1 / counts[block] if block == running else 0.0 for block in range(size)]
        return Moment(name, kept + again, gradients if regime.micro_batches == 1 else [1.0] * size, running)

    for block, (name, count) in enumerate(zip(blocks, counts, strict=True)):
        before, after = [1.0] * block, [1.0] * (size - block - 1)
        none_before, none_after = [0.0] * block, [0.0] * (size - block - 1)
        begins, ends = f"backward of {name} begins", f"backward of {name} ends"
        found.append(moment(begins, [*before, 1.0, *none_after], [*none_before, 0.0, *after], block))
        if count > 1:
            found.append(moment(ends, [*before, 1 / count, *none_after], [*none_before, 1.0, *after], block))
    found.append(moment("optimizer step", [0.0] * size, [1.0] * size, None))
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
    return as_float(prod(local_shape(group.type.shape, layout, mesh)) * group.type.dtype.itemsize * group.count)


def same_tensor(source: Layout, target: Layout) -> bool:
    """Whether the change runs nothing forward: letters differ between R and I only."""
    return all(
        before == after or (before in (R, I) and after in (R, I)) for before, after in zip(source, target, strict=True)
    )


def recompute_of(problem: Problem, regime: Regime, block: int) -> str:
    """What is computed again of a block."""
    return regime.of(problem.blocks[block])


def node_place(problem: Problem, regime: Regime, node: Node) -> int:
    """Where it lies what autograd keeps for an op: where some strategies run again and others do not, it stays."""
    recompute = recompute_of(problem, regime, node.block)
    again = node.kind == "op" and (recompute == "full" or (recompute == "selective" and all(node.light)))
    return node.block + again * len(problem.blocks)


def target_place(problem: Problem, regime: Regime, group: Group) -> int:
    """Where the tensors lie that are kept after a redistribution in `group`."""
    again = group.inside and recompute_of(problem, regime, group.block) == "full"
    return group.block + again * len(problem.blocks)


def is_resident(problem: Problem, regime: Regime, producer: Node) -> bool:
    """Whether a node's result is in memory whoever keeps it: what copies that are computed again are given, too."""
    if producer.kind == "carry":
        return recompute_of(problem, regime, producer.block) != "none"
    return producer.kind in ("parameter", "input", "buffer") or producer.saves_result


def is_kept(problem: Problem, regime: Regime, edge: Edge) -> bool:
    """Whether the operand of a use has to be there in the backward pass."""
    group = problem.groups[edge.group]
    return edge.saved or (edge.remade and recompute_of(problem, regime, group.block) == "selective")


def unsharded_bytes(group: Group, layout: Layout, mesh: Mesh, regime: Regime) -> float:
    """Bytes that lie there from the first micro-batch to the last where a parameter is used in `layout` but stored
    otherwise: the gathered parameter, its gradient that is still to be reduced."""
    size = prod(local_shape(group.type.shape, layout, mesh)) * group.count
    held = size * group.type.dtype.itemsize * regime.gather_once
    return as_float(held + size * group.gradient_itemsize * (regime.reduce_once and group.gradient))


def unsharded(problem: Problem, solution: Solution, mesh: Mesh) -> float:
    """Bytes of all parameters and gradients that lie there whole from the first micro-batch to the last."""
    total = 0.0
    for edge in problem.edges:
        group = problem.groups[edge.group]
        before = solution.strategy(problem, edge.producer).results[edge.result]
        after = solution.strategy(problem, edge.consumer).operands[edge.operand]
        if group.parameter and not same_tensor(before, after):
            total += unsharded_bytes(group, after, mesh, solution.regime)
    return total


def kept_bytes(problem: Problem, solution: Solution, mesh: Mesh) -> list[float]:
    """What autograd keeps, by place."""
    regime = solution.regime
    kept = [0.0] * (2 * len(problem.blocks))
    whole: dict[int, set[Layout]] = {}
    for index, node in enumerate(problem.nodes):
        place = node_place(problem, regime, node)
        if node.copies:
            kept[place] += node.copies[solution.picks[index]]
        if node.saves_result:
            kept[place] += node.results[solution.picks[index]]
        if node.kind == "carry" and is_resident(problem, regime, node):
            kept[node.block] += node.results[solution.picks[index]]
    for edge in problem.edges:
        if not is_kept(problem, regime, edge):
            continue
        group, producer = problem.groups[edge.group], problem.nodes[edge.producer]
        before = solution.strategy(problem, edge.producer).results[edge.result]
        after = solution.strategy(problem, edge.consumer).operands[edge.operand]
        if after in whole.setdefault(edge.group, set()):
            continue
        whole[edge.group].add(after)
        if same_tensor(before, after) or (edge.group, after) in solution.again:
            if not is_resident(problem, regime, producer):
                kept[source_place(problem, regime, group, producer)] += layout_bytes(group, before, mesh)
        elif not (group.parameter and regime.gather_once):
            kept[target_place(problem, regime, group)] += layout_bytes(group, after, mesh)
    return kept


def source_place(problem: Problem, regime: Regime, group: Group, producer: Node) -> int:
    """Where a tensor that `producer` gives lies when the uses of `group` keep it as it is."""
    return node_place(problem, regime, producer) if producer.block == group.block else group.block


def memory_use(
    problem: Problem, solution: Solution, states: int, mesh: Mesh, among: Sequence[Moment] | None = None
) -> MemoryUse:
    """The bytes of `solution` at its peak (`among` these moments, or all); `states` is how many tensors the optimizer
    keeps per parameter."""
    regime = solution.regime
    held: dict[str, float] = {}
    gradients = [0.0] * len(problem.blocks)
    transient = [0.0] * len(problem.blocks)
    for index, node in enumerate(problem.nodes):
        memory = node.memory[solution.picks[index]]
        times = regime.micro_batches if node.kind in ("input", "output") else 1
        held[node.kind] = held.get(node.kind, 0.0) + times * memory.held
        gradients[node.block] += memory.gradient
        transient[node.block] = largest(transient[node.block], memory.transient)
    kept = kept_bytes(problem, solution, mesh)
    between = unsharded(problem, solution, mesh)
    best: MemoryUse | None = None
    optimizer = sum(gradients) * states
    for moment in moments(problem.blocks, problem.counts, regime) if among is None else among:
        use = MemoryUse(
            held.get("parameter", 0.0) - optimizer + between,
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
