"""Attention in stripes: where it may pay, and choices that are in stripes where another one is in order.

In order, the rank with the last queries of causal attention computes most; in stripes all compute the same. Stripes
over one axis are a further layout of most tensors, and are searched as such. Stripes over several axes together are one
more for each of these; on meshes of more than two axes they are searched with the methods of a choice that was found.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod

from passes.ir.choices import Node
from passes.rules.following import ranks_by_start
from passes.rules.strategies import AllowedMethods, axes_for_stripes, is_uneven, method_token
from passes.search.best_first import Unbounded, close, explore
from passes.search.meshes import is_searched_wholly
from passes.search.progress import Progress
from passes.search.subproblems import MOST_EFFORT, Choice, Memo, MicroBatchProgram, Subproblem, Subproblems
from passes.search.uneven import may_be_in_stripes, rules_in_choice
from passes.solve.limits import Effort

# The methods of an axis on which every rank computes the same.
_WHOLE = ("R", "I")


def offering(subproblems: Subproblems) -> Subproblems:
    """The subproblems with stripes offered on each axis by itself; on a mesh of two axes over both together, too, and
    where the shapes of up to two axes are all. At least half of the effort of a search is left for them."""
    space = subproblems.space
    axes = sum(size > 1 for size in space.mesh.sizes)
    is_small = is_searched_wholly(space.mesh.size) if space.any_shape else axes == 2
    space = replace(space, in_stripes=True, together=(space.mesh.size,) if is_small else ())
    before = subproblems.memo.effort
    effort = Effort(min(before.spent, MOST_EFFORT / 2), whole=before)
    return replace(subproblems, space=space, memo=Memo(costs=subproblems.memo.costs, effort=effort))


def together(subproblems: Subproblems, choices: Sequence[Choice], progress: Progress) -> tuple[Subproblems, Progress]:
    """Search these `choices` in stripes over all axes together that split in order, or leave whole, what another axis
    splits and may be in stripes; and the subproblems that offer these."""
    for choice in choices:
        sizes = choice.subproblem.mesh.sizes
        for rule, methods in rules_in_choice(choice):
            split = axes_for_stripes(rule, methods)
            idle = tuple(axis for axis, name in enumerate(methods) if name in _WHOLE and sizes[axis] > 1)
            ranks = prod(sizes[axis] for axis in (*split, *idle))
            may_pay = len(split) + len(idle) > 1 and (idle or is_uneven(rule, methods))
            if split and may_pay and ranks not in subproblems.space.together:
                space = replace(subproblems.space, together=(*subproblems.space.together, ranks))
                subproblems = replace(subproblems, space=space)
                progress = in_stripes(subproblems, choice, progress, idle)
    return subproblems, progress


def in_stripes(subproblems: Subproblems, choice: Choice, progress: Progress, free: Collection[int] = ()) -> Progress:
    """Search the choices that do what `choice` does, under its configuration, but at the digits that are offered now,
    in order or in stripes, and on the axes `free` anything, whatever effort was spent before."""
    subproblems = subproblems.apart()
    node = Unbounded(0.0, partial(_at_other_digits, subproblems, choice, free))
    return close(subproblems, explore([node], subproblems, progress), 0.0)


def decided_together(
    program: MicroBatchProgram, methods: Mapping[str, Sequence[str]], sizes: Sequence[int]
) -> Iterator[int]:
    """The numbers of ranks of several axes of these `sizes` that are in stripes together by the decided `methods` of
    nodes."""
    for op, rule in may_be_in_stripes(program):
        if op in methods and len(methods[op]) == len(sizes):
            axes = axes_for_stripes(rule, methods[op])
            for start, ranks in ranks_by_start(methods[op], sizes, axes).items():
                if start > 1 and ranks not in sizes:
                    yield ranks


def _at_other_digits(subproblems: Subproblems, parent: Choice, free: Collection[int]) -> Subproblem:
    """The choices with the methods that nodes have in `parent` on each axis, at any digits, and all on the axes
    `free`."""
    before, configuration = parent.subproblem, parent.solution.configuration

    def allowed(node: Node, pick: int) -> AllowedMethods:
        tokens = (frozenset({method_token(name, node.kind == "op")}) for name in node.strategies[pick].methods)
        return [None if axis in free else token for axis, token in enumerate(tokens)]

    nodes = zip(before.problem.nodes, parent.solution.picks, strict=True)
    problem = subproblems.problem(
        configuration.mesh, before.program, {node.key: allowed(node, pick) for node, pick in nodes}
    )
    return subproblems.subproblem(before.program, problem, configuration)
