"""Meshes of many axes: from the best choice on a coarse mesh to choices near it on finer ones.

On up to three axes all strategies are searched. On more there are too many at first: neighbouring axes are merged, the
best choice there is found, and merged axes are cut again one by one. The shape of a mesh is found in the same way, from
shapes of two axes.
"""

import logging
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

from passes.ir.configuration import Configuration
from passes.ir.errors import ConstraintError
from passes.ir.folded import Folded
from passes.ir.mesh import Mesh
from passes.search.best_first import BRIEFLY, OnMesh, SearchNode, Unlimited, close, explore, under
from passes.search.configurations import (
    any_number,
    chooses_recompute_apart,
    is_undecided,
    limited_configurations,
    micro_batch_counts,
)
from passes.search.meshes import Axes, cut_one, finer, is_searched_wholly, merged, partitions, shapes, shifted
from passes.search.progress import Progress
from passes.search.space import Space
from passes.search.subproblems import Choice, Subproblem, Subproblems

logger = logging.getLogger("autopar")


# Pairs of strategies, over all edges, of the subproblems that wait to be closed while more are made.
_MOST_OPEN = 1e7

# Most axes of a searched mesh.
_AXES = 4
# Most axes on which all strategies are searched; on more only those near the best choice.
_SEARCHED_WHOLLY = 3
# What is next to a choice helps where it makes the step faster by more than this part of it. As collectives over
# adjacent axes run as one, a finer mesh is never slower than a coarser one, and mostly a very little faster.
_HELPS = 5e-3
# Units of effort of a search. After each such many, what is near to a choice must make the step faster by `_HELPS` more
# to be of interest.
_THOROUGHLY = 10_000.0


def best_choice(subproblems: Subproblems, progress: Progress) -> Progress:
    """Search the given mesh, or all shapes of as many devices. `best` of the progress is None where nothing fits."""
    begun = first_choice(subproblems, progress)
    return all_choices(subproblems, begun) if progress.incumbent is None else _rest(subproblems, begun)


def first_choice(subproblems: Subproblems, progress: Progress) -> Progress:
    """Begin to search the given mesh, or all shapes of as many devices, until there is a good choice: on shapes of up
    to two axes, whose gaps are left open, and on a given mesh of more from coarser ones."""
    mesh = subproblems.space.mesh
    if subproblems.space.any_shape:
        return _search_shapes(subproblems, progress)
    if _axes(mesh) <= 2:
        return _search_wholly(subproblems, progress)
    progress = close(subproblems, progress)
    return _refine(subproblems, mesh, progress) if progress.incumbent is None else progress


def all_choices(subproblems: Subproblems, progress: Progress) -> Progress:
    """Search what `first_choice` has left out, and close all gaps."""
    space = subproblems.space
    if not space.any_shape and _axes(space.mesh) > 2 and progress.incumbent is not None:
        progress = _exchange(subproblems, space.mesh, progress)
    return _rest(subproblems, progress)


def same_layouts(subproblems: Subproblems, progress: Progress) -> Progress:
    """Search the layouts of the incumbent under all other configurations of the space with as many micro-batches,
    whatever effort was spent before."""
    choice = progress.incumbent
    if choice is None:
        return progress
    subproblems, before = subproblems.apart(), choice.subproblem
    others = _other_configurations(subproblems, choice, before.configuration.micro_batches)
    only = subproblems.subproblem(
        before.program, before.problem.only(choice.solution.picks), choice.solution.configuration
    )
    return close(subproblems, explore(_nodes(lambda: only, tuple(others), subproblems), subproblems, progress))


def _rest(subproblems: Subproblems, progress: Progress) -> Progress:
    """Search what was not begun, and close all gaps."""
    mesh = subproblems.space.mesh
    if subproblems.space.any_shape:
        return _near_to_best(subproblems, progress)
    if _SEARCHED_WHOLLY >= _axes(mesh) > 2:
        progress = _search_wholly(subproblems, progress)
    elif _axes(mesh) > 2 and progress.incumbent is not None:
        logger.info("on %s the plan is the best of those near to it; not all plans were searched", mesh)
    return close(subproblems, progress)


def _axes(mesh: Mesh) -> int:
    """The number of axes of several devices."""
    return sum(size > 1 for size in mesh.sizes)


def _search_wholly(subproblems: Subproblems, progress: Progress) -> Progress:
    """Search all strategies on the given mesh, of which all that was searched before is part."""
    progress = replace(progress, closed_bound=float("inf"), errors=())
    return _search(subproblems, [subproblems.space.mesh], progress)


def covers_all(space: Space, folded: Folded) -> bool:
    """Whether `best_choice` searches everything that `space` offers: all shapes of the devices, on them all strategies,
    and all levels of recompute of the regions of `folded`. Stripes over several axes together are searched wholly on
    meshes of two axes alone."""
    if not chooses_recompute_apart(space, folded):
        return False
    if space.any_shape:
        return is_searched_wholly(space.mesh.size)
    return _axes(space.mesh) <= (2 if space.together else _SEARCHED_WHOLLY)


def _search(subproblems: Subproblems, meshes: Sequence[Mesh], progress: Progress) -> Progress:
    """Search all configurations on these meshes."""
    counts = tuple(micro_batch_counts(subproblems.space, subproblems.programs.program))
    return explore([OnMesh(0.0, mesh, counts) for mesh in meshes], subproblems, progress)


def _search_shapes(subproblems: Subproblems, progress: Progress) -> Progress:
    """Search shapes of up to two axes of the space, which has any shape. Gaps are left open."""
    space = subproblems.space
    meshes = shapes(space.mesh.size, space.cluster.node_size)
    # Meshes of two axes offer what that of one does. It is searched in no time, and its best choice excludes much.
    for some in ([mesh for mesh in meshes if len(mesh.sizes) == count] for count in (1, 2)):
        progress = _search(subproblems, some, _tolerant(subproblems, progress))
    return progress


def _near_to_best(subproblems: Subproblems, progress: Progress) -> Progress:
    """Close the gaps of a search of shapes, and search, if the space says so, what is next to the best choice as long
    as that helps."""
    if not subproblems.space.near:
        return _close(subproblems, progress)
    seen: set[Hashable] = set()
    while True:
        progress = _climb(subproblems, progress, seen)
        before = progress.cutoff
        progress = _close(subproblems, progress)
        if not _is_faster(progress, before):
            return progress


def _close(subproblems: Subproblems, progress: Progress) -> Progress:
    """Close the gaps of what is open, briefly if something is known and much effort was spent before, and hardly if all
    of it was."""
    tolerant = _tolerant(subproblems, progress)
    if not tolerant.tolerance or progress.incumbent is None:
        return close(subproblems, tolerant)
    return close(subproblems, tolerant, 0.0 if subproblems.is_spent else BRIEFLY, BRIEFLY)


def _tolerant(subproblems: Subproblems, progress: Progress) -> Progress:
    """The progress with the tolerance for the effort spent so far."""
    return replace(progress, tolerance=_HELPS * int(subproblems.memo.effort.spent / _THOROUGHLY))


def _keeps_copies(subproblems: Subproblems) -> bool:
    """Whether so much effort was spent that changed layouts keep the number of copies that are recomputed fully, which
    is searched with the layouts of the best choice alone."""
    return subproblems.memo.effort.spent >= _THOROUGHLY


def _climb(subproblems: Subproblems, progress: Progress, seen: set[Hashable]) -> Progress:
    """Search what is next to the best choice and was not `seen`, the smallest changes first, until none helps. Nodes
    that share arrays are explored together, and then others, so that few arrays are held."""
    changes, before = iter(_CHANGES), progress.cutoff
    while progress.incumbent is not None:
        change = next(changes, None)
        if change is None:
            break
        if change is _CHANGES[-1]:
            # These are the most choices by far: the better the best one is, the fewer of them are searched.
            progress = _close(subproblems, progress)
        parent = progress.incumbent
        assert parent is not None
        for near in () if _is_faster(progress, before) else change(subproblems, parent):
            if subproblems.is_spent:
                return progress
            new = near.without(seen)
            seen.update(new.keys)
            progress = explore(new.nodes(subproblems), subproblems, _tolerant(subproblems, progress))
            if sum(each.pairs for each in progress.open) > _MOST_OPEN:
                progress = close(subproblems, _tolerant(subproblems, progress), BRIEFLY, BRIEFLY)
        if _is_faster(progress, before):
            changes, before = iter(_CHANGES), progress.cutoff
    return progress


def _is_faster(progress: Progress, before: float) -> bool:
    """Whether the step of the incumbent takes so much less than `before` (seconds) that it helps."""
    return progress.cutoff < before * (1 - _HELPS)


@dataclass(frozen=True)
class Near:
    """The choices of layouts of the subproblem that `make` gives, which are near to a choice, under each of some
    `configurations`. The axes `free` may differ from those of that choice."""

    make: Callable[[], Subproblem]
    configurations: tuple[Configuration, ...]
    free: Axes

    @property
    def keys(self) -> set[Hashable]:
        """A key of what is searched under each configuration."""
        return {(each.key, self.free) for each in self.configurations}

    def without(self, seen: Container[Hashable]) -> "Near":
        """Those that were not `seen`, by their keys."""
        new = tuple(each for each in self.configurations if (each.key, self.free) not in seen)
        return replace(self, configurations=new)

    def nodes(self, subproblems: Subproblems) -> Iterator[SearchNode]:
        """The nodes of the search for them: one configuration as it is, several from a bound on all of them."""
        return _nodes(self.make, self.configurations, subproblems)


def _nodes(
    make: Callable[[], Subproblem], configurations: tuple[Configuration, ...], subproblems: Subproblems
) -> Iterator[SearchNode]:
    """The nodes of the search for the choices of the subproblem that `make` gives, under each configuration."""
    if len(configurations) == 1:
        yield under(0.0, make, configurations[0], subproblems)
    elif configurations:
        yield Unlimited(0.0, make, configurations)


def _on_other_meshes(subproblems: Subproblems, parent: Choice) -> Iterator[Near]:
    """Meshes with one axis cut in two, or with a factor shifted from one axis to the next."""
    mesh, node_size = parent.subproblem.mesh, subproblems.space.cluster.node_size
    near, searched = [*finer(mesh, node_size, _AXES), *shifted(mesh, node_size)], shapes(mesh.size, node_size)
    yield from _near(subproblems, parent, [(other, origins) for other, origins in near if other not in searched])


def _in_other_configurations(subproblems: Subproblems, parent: Choice) -> Iterator[Near]:
    """Other levels of recompute and ZeRO stages, with the layouts that `parent` was chosen from."""
    before = parent.subproblem
    if before.has_all_strategies:
        return
    others = _other_configurations(subproblems, parent, before.configuration.micro_batches)
    yield Near(lambda: before, tuple(others), ())


def _on_free_axes(subproblems: Subproblems, parent: Choice) -> Iterator[Near]:
    """Anything on two of the axes."""
    if not parent.subproblem.has_all_strategies:
        mesh = parent.subproblem.mesh
        yield from _near(subproblems, parent, [(mesh, each) for each in _pairs_free(mesh)])


def _on_free_axes_in_other_configurations(subproblems: Subproblems, parent: Choice) -> Iterator[Near]:
    """Other levels of recompute and ZeRO stages, with anything on two of the axes; and the next fewer and the next more
    micro-batches."""
    before = parent.subproblem
    if before.has_all_strategies:
        return
    own = before.configuration
    others = _configurations_of_changed(subproblems, parent, own.micro_batches)
    for origins in _pairs_free(own.mesh):
        yield Near(partial(subproblems.refined, parent, own, origins), others, _free(origins))
    counts = list(micro_batch_counts(subproblems.space, subproblems.programs.program))
    at = counts.index(own.micro_batches)
    for count in {*counts[max(0, at - 1) : at + 2]} - {own.micro_batches}:
        every = _configurations_of_changed(subproblems, parent, count)
        if every:
            yield Near(partial(subproblems.refined, parent, every[0], tuple(own.mesh.dimensions)), every, ())


# The changes of a choice that are searched, those with the fewest choices first.
_CHANGES: tuple[Callable[[Subproblems, Choice], Iterator[Near]], ...] = (
    _in_other_configurations,
    _on_free_axes,
    _on_other_meshes,
    _on_free_axes_in_other_configurations,
)


def _near(
    subproblems: Subproblems, parent: Choice, meshes: Iterable[tuple[Mesh, Sequence[int | None]]]
) -> Iterator[Near]:
    """The choices near to `parent` on `meshes`, whose axes have origins in that of the parent or are free."""
    for mesh, origins in meshes:
        configuration = replace(parent.subproblem.configuration, mesh=mesh)
        make = partial(subproblems.refined, parent, configuration, tuple(origins))
        numbers = any_number(configuration, parent.subproblem.program.folded)
        yield Near(make, (configuration,) if _keeps_copies(subproblems) else numbers, _free(origins))


def _free(origins: Sequence[int | None]) -> tuple[int, ...]:
    return tuple(axis for axis, origin in enumerate(origins) if origin is None)


def _other_configurations(subproblems: Subproblems, parent: Choice, count: int) -> Iterator[Configuration]:
    """The configurations of `count` micro-batches on the mesh of `parent`, but its own."""
    before = parent.subproblem
    program = subproblems.programs.of(count, is_given=subproblems.space.micro_batches is not None)
    if program is not None:
        every = limited_configurations(subproblems.space, before.mesh, count, program.folded)
        yield from (each for each in every if each != before.configuration)


def _configurations_of_changed(subproblems: Subproblems, parent: Choice, count: int) -> tuple[Configuration, ...]:
    """The other configurations of `count` micro-batches that layouts near to those of `parent` are searched under."""
    every = _other_configurations(subproblems, parent, count)
    keeps = _keeps_copies(subproblems)
    return tuple(each for each in every if not (keeps and is_undecided(each)))


def _pairs_free(mesh: Mesh) -> Iterator[tuple[int | None, ...]]:
    """For each axis of `mesh` itself, but None for two of them: for all pairs of axes of several devices."""
    several = [axis for axis, size in enumerate(mesh.sizes) if size > 1]
    for pair in combinations(several, 2):
        yield tuple(None if axis in pair else axis for axis in mesh.dimensions)


def _refine(subproblems: Subproblems, mesh: Mesh, progress: Progress) -> Progress:
    """Find a choice on a mesh of more than two axes, from the best ones on coarse meshes: of two axes, or where
    nothing fits there, of more."""
    for count in range(2, len(mesh.sizes)):
        choices, progress = _coarse(subproblems, mesh, count, progress)
        for groups, choice in choices:
            try:
                progress = _cut(subproblems, mesh, groups, choice, progress)
            except ConstraintError as error:
                # The constraints need more than a choice without them offers.
                logger.debug("no refinement: %s", error)
            if progress.incumbent is not None:
                return progress
    return progress


def _coarse(
    subproblems: Subproblems, mesh: Mesh, count: int, progress: Progress
) -> tuple[list[tuple[Sequence[Axes], Choice]], Progress]:
    """The best choices on `mesh` with neighbouring axes merged into `count`, fastest first."""
    found = []
    for groups in partitions(len(mesh.sizes), count):
        coarse = best_choice(subproblems.over(_with_merged_axes(subproblems.space, groups)), Progress())
        progress = progress.failing(coarse.errors)
        if coarse.best is not None:
            found.append((groups, coarse.best))
    return sorted(found, key=lambda item: item[1].seconds), progress


def _with_merged_axes(space: Space, groups: Sequence[Axes]) -> Space:
    """The space where the axes of each group are one. Constraints on one of several merged axes are left out."""
    mesh = merged(space.mesh, groups)
    alone = {space.mesh.names[group[0]] for group in groups if len(group) == 1}
    constraints = {
        pattern: {what: {axis: text for axis, text in axes.items() if axis in alone} for what, axes in whats.items()}
        for pattern, whats in space.constraints.items()
    }
    return replace(space, mesh=mesh, constraints=constraints)


def _cut(subproblems: Subproblems, mesh: Mesh, groups: Sequence[Axes], choice: Choice, progress: Progress) -> Progress:
    """Cut merged axes until each is one of `mesh`, from the best choice on what they make."""
    while len(groups) < len(mesh.sizes):
        groups, origins = cut_one(groups)
        if len(groups) == len(mesh.sizes):
            nodes = _refining(subproblems, choice, mesh, origins)
            return close(subproblems, explore(nodes, subproblems, progress))
        coarse = subproblems.over(_with_merged_axes(subproblems.space, groups))
        nodes = _refining(coarse, choice, coarse.space.mesh, origins)
        found = close(coarse, explore(nodes, coarse, Progress()))
        if found.best is None:
            return progress.failing(found.errors)
        choice = found.best
    return progress


def _refining(
    subproblems: Subproblems, parent: Choice, mesh: Mesh, origins: Sequence[int | None]
) -> Iterator[SearchNode]:
    configuration = replace(parent.solution.configuration, mesh=mesh)
    make = partial(subproblems.refined, parent, configuration, tuple(origins))
    return _nodes(make, any_number(configuration, parent.subproblem.program.folded), subproblems)


def _exchange(subproblems: Subproblems, mesh: Mesh, progress: Progress) -> Progress:
    """Let nodes do anything on any two axes, and on the others what they do in the best choice, as long as that
    helps."""
    while True:
        parent = progress.incumbent
        assert parent is not None
        nodes = [node for each in _pairs_free(mesh) for node in _refining(subproblems, parent, mesh, each)]
        progress = explore(nodes, subproblems, progress)
        if progress.incumbent is parent:
            progress = close(subproblems, progress, BRIEFLY)
            if progress.incumbent is parent:
                return progress
