"""Decisions that were made before, applied to a planning problem."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from passes.ir.choices import Node, Problem, Solution
from passes.ir.decisions import Decided, Decisions
from passes.ir.errors import PlanMismatchError
from passes.ir.folded import Folded
from passes.ir.layout import Layout, Placement, Shape
from passes.ir.mesh import Mesh
from passes.rules.strategies import AllowedMethods, method_token

# --- the methods of a plan -------------------------------------------------------------------------------------------


def planned_methods(folded: Folded, methods: Mapping[str, Sequence[str]]) -> dict[str, AllowedMethods]:
    """The methods that a plan has for each node, but for the digits at which splits begin.

    Raises PlanMismatchError for a method of a tensor that is no layout.
    """
    ops = {op.key for op in folded.ops}

    def allowed(key: str, method: str) -> frozenset[str]:
        try:
            return frozenset({method_token(method, key in ops)})
        except ValueError as error:
            raise PlanMismatchError(f"the plan does not fit the model as it is traced now: {key!r}: {error}") from None

    return {key: tuple(allowed(key, method) for method in each) for key, each in methods.items()}


def planned_solution(problem: Problem, decisions: Decisions) -> Solution | str:
    """The solution with the methods of a plan, or the first key for which the problem or the plan has none. Its seconds
    are not known."""
    methods, uses = decisions.methods, decisions.regathered
    assert methods is not None
    assert uses is not None
    assert decisions.configuration is not None
    picks = []
    for node in problem.nodes:
        wanted = methods.get(node.key)
        pick = next((index for index, strategy in enumerate(node.strategies) if strategy.methods == wanted), None)
        if pick is None:
            return node.key
        picks.append(pick)
    unknown = set(methods) - set(problem.index)
    if unknown:
        return min(unknown)
    existing = {(problem.nodes[edge.consumer].key, edge.operand) for edge in problem.edges}
    missing = [use for use in uses if use not in existing]
    if missing:
        return missing[0][0]
    return Solution(tuple(picks), regathered(problem, picks, uses), 0.0, 0.0, decisions.configuration)


def regathered(
    problem: Problem, picks: Sequence[int], uses: Iterable[tuple[str, int]]
) -> frozenset[tuple[int, Layout]]:
    """The redistributions that run again in the backward pass, from uses (node key, operand); unknown uses name
    none."""
    wanted = set(uses)
    return frozenset(
        (edge.group, problem.nodes[edge.consumer].strategies[picks[edge.consumer]].operands[edge.operand])
        for edge in problem.edges
        if (problem.nodes[edge.consumer].key, edge.operand) in wanted
    )


def gathered_again(problem: Problem, solution: Solution) -> frozenset[tuple[int, Layout]]:
    """The gathers of the parameters of copies that are not recomputed anyway, which ZeRO stage 3 runs again in the
    backward pass."""
    found, configuration = set(), solution.configuration
    by_stage = configuration.pipeline.recompute
    for edge in problem.edges:
        group = problem.groups[edge.group]
        source = solution.strategy(problem, edge.producer).results[edge.result]
        target = solution.strategy(problem, edge.consumer).operands[edge.operand]
        full = configuration.recompute.get(problem.blocks[group.block]) == "full" and not by_stage
        if group.parameter and group.inside and not full and source != target:
            found.add((edge.group, target))
    return frozenset(found)


@dataclass(frozen=True)
class Unsplit:
    """An op that other sizes leave whole on an axis of the mesh where it was split, and the `size` of a dim that does
    not divide."""

    axis: int
    key: str
    size: int


def unsplit(
    before: Mapping[str, Decided], after: Mapping[str, Decided], ops: Iterable[str], mesh: Mesh
) -> Iterator[Unsplit]:
    """The ops of the keys `ops` that are split on an axis of `mesh` in `before` and whole in `after`, because a dim
    that was split does not divide any more."""
    for key in ops:
        if key not in before or key not in after:
            continue
        was, now = before[key], after[key]
        layouts, shapes = (*was.strategy.operands, *was.strategy.results), (*now.operands, *now.results)
        if list(map(len, (*was.operands, *was.results))) != list(map(len, shapes)):
            continue
        for axis, method in enumerate(now.strategy.methods):
            if method not in ("R", "I"):
                continue
            split = ((layout[axis], shape) for layout, shape in zip(layouts, shapes, strict=True))
            sizes = (shape[placement.dim] for placement, shape in split if placement.kind == "S")
            size = next((size for size in sizes if size % mesh.sizes[axis]), None)
            if size is not None:
                yield Unsplit(axis, key, size)


# --- the strategies of another program -------------------------------------------------------------------------------


def decided(folded: Folded, problem: Problem, solution: Solution) -> Mapping[str, Decided]:
    """The strategies that `solution` has, by the key of the node."""
    shapes = _shapes(folded)
    nodes = enumerate(problem.nodes)
    return {node.key: Decided(solution.strategy(problem, index), *shapes(node)) for index, node in nodes}


def restricted(folded: Folded, problem: Problem, decisions: Mapping[str, Decided]) -> Problem:
    """`problem` with only those strategies that do what was decided at other sizes.

    Where sizes do not allow what a node does on some axis, it is free on that axis; a node that is not among the
    decisions is free. A split at the same place of a dim whose size is another may lie at another digit.
    """
    shapes = _shapes(folded)
    nodes = [
        _restricted(node, decisions[node.key], *shapes(node)) if node.key in decisions else node
        for node in problem.nodes
    ]
    return replace(problem, nodes=nodes)


Shapes = tuple[Shape, ...]


def _shapes(folded: Folded) -> Callable[[Node], tuple[Shapes, Shapes]]:
    """For every node the shapes of its operands and of its results."""
    ops = {op.key: op for op in folded.ops}

    def shapes(node: Node) -> tuple[Shapes, Shapes]:
        strategy = node.strategies[0]
        if node.kind == "op":
            operands, results = ops[node.key].operands, ops[node.key].results
        else:
            operands, results = (node.name,) * len(strategy.operands), (node.name,) * len(strategy.results)
        return tuple(folded.types[name].shape for name in operands), tuple(folded.types[name].shape for name in results)

    return shapes


def _restricted(node: Node, before: Decided, operands: Shapes, results: Shapes) -> Node:
    """`node` with only the strategies that do what was decided, on as many axes as some strategy does it on."""
    shapes, planned = (*operands, *results), (*before.operands, *before.results)
    if [len(shape) for shape in shapes] != [len(shape) for shape in planned]:
        return node
    wanted = (*before.strategy.operands, *before.strategy.results)
    for axes in _most_first(len(before.strategy.methods)):
        exact, moved = [], []
        for index, strategy in enumerate(node.strategies):
            layouts = (*strategy.operands, *strategy.results)
            if _on(layouts, axes) == _on(wanted, axes):
                exact.append(index)
            if all(
                _alike(layout[axis], placements[axis], now, then)
                for layout, placements, now, then in zip(layouts, wanted, shapes, planned, strict=True)
                for axis in axes
            ):
                moved.append(index)
        # Inputs and outputs lie as planned if they can: users cut their batches so.
        possible = exact if exact and node.kind != "op" else moved
        if possible:
            return node.only(possible)
    return node


def _most_first(count: int) -> Iterator[tuple[int, ...]]:
    """All choices of some of `count` axes, those of most axes first."""
    for size in range(count, 0, -1):
        yield from combinations(range(count), size)


def _on(layouts: Sequence[Layout], axes: Sequence[int]) -> list[list[Placement]]:
    return [[layout[axis] for axis in axes] for layout in layouts]


def _alike(placement: Placement, before: Placement, shape: Shape, planned: Shape) -> bool:
    """Whether a placement does at one size what another does at the planned one: which digit of a dim that is may be
    told by a size."""
    if placement.kind != "S" or before.kind != "S":
        return placement == before
    return placement.dim == before.dim and (
        placement.major == before.major or shape[placement.dim] != planned[placement.dim]
    )
