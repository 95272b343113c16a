"""What no single integer program decides: the shape of the mesh, and what is looked at where it has many axes.

On two axes everything is looked at, in all ways to run (`autopar.ways`). On more there are too many strategies for that
at first: axes are taken together, and the best choice is cut up axis by axis.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from autopar.meshes import Axes, cut_one, finer, merged, partitions, shapes
from autopar.regimes import regime_text
from autopar.request import Request
from autopar.ways import Tried, Ways
from passes.ir.choices import Solution
from passes.ir.errors import ConstraintError, InfeasibleError
from passes.ir.mesh import Mesh
from passes.recompute import check_patterns
from passes.solve import PROVEN

logger = logging.getLogger("autopar")

# A searched mesh has at most so many axes.
_AXES = 4
# On so many axes everything is looked at; on more only what is near to the best choice.
_WHOLLY = 3
# Units of effort for closing the gap to what is near, each time, at least.
_BRIEFLY = 700.0
# How many times as many devices are tried when no plan fits.
_MORE = (2, 4, 8, 16, 32, 64)

Found = tuple[Tried, Solution]


def best(ways: Ways) -> Found:
    """The best choice on the mesh that is given, or on any shape of it.

    Raises InfeasibleError where none fits, which says what would.
    """
    request = ways.request
    if request.recompute is not None:
        part = ways.pieces.of(1, is_asked=True)
        assert part is not None
        check_patterns(part.folded.regions, request.recompute)
        if not part.folded.regions and set(request.recompute.values()) != {"none"}:
            logger.warning("no layers repeat in the model, so nothing is computed again in the backward pass")
    found = on_all(ways)
    if found is None:
        raise with_hint(ways, min(ways.errors, key=lambda error: error.missing))
    seconds, bound = found[1].seconds, found[1].bound
    if bound < seconds * (1 - PROVEN):
        logger.warning("the plan may be up to %.2g%% slower than the best", 100 * (1 - bound / seconds))
    return found


def on_all(ways: Ways) -> Found | None:
    """The best choice on the mesh that is asked for, or on any of as many devices where its shape is to be found; None
    where none fits."""
    mesh = ways.request.mesh
    if ways.request.any_shape:
        _on_any_shape(ways, mesh.size)
        return ways.closed()
    several = sum(size > 1 for size in mesh.sizes)
    if several > 2 and ways.closed() is None:
        # Otherwise it was found with a little more memory.
        _cut_up(ways, mesh)
    if several <= _WHOLLY:
        # All that was looked at before is among this.
        ways.least, ways.errors = float("inf"), []
        ways.on([mesh])
    elif ways.found is not None:
        logger.info("on %s the plan is the best of what is near to it; not everything was looked at", mesh)
    return ways.closed()


def _on_any_shape(ways: Ways, devices: int) -> None:
    """Look at meshes of so many devices.

    Shapes of up to two axes are tried first. The axes of the best one are then cut in two as long as that helps, up to
    four; for that nodes may do anything on the new axes, and on the others what they did before, in the best choice or
    in those that its bound mixes.
    """
    node_size = ways.request.cluster.node_size
    ways.on(shapes(devices, node_size))
    while ways.found is not None:
        parent = ways.found
        for mesh, origins in finer(parent[0].mesh, node_size, _AXES):
            ways.offered(*parent, mesh, origins)
        ways.go_on()
        if ways.found is parent:
            break


# --- many axes ---


def _cut_up(ways: Ways, mesh: Mesh) -> None:
    """Look for a good choice on a mesh of more than two axes.

    Neighbouring axes are taken for one until there are two (or, where nothing fits, three). What is best there is cut
    up, axis by axis: nodes may do anything on both new axes, and on the others what they did before. In the end they
    may do anything on any two axes, as long as that helps.
    """
    for groups, found in _coarse(ways, mesh):
        try:
            _cut_from(ways, mesh, groups, found)
        except ConstraintError as error:
            # What is demanded needs more than a choice without it offers.
            logger.debug("not cut up: %s", error)
        if ways.found is not None:
            _go_round(ways, mesh)
            return


def _coarse(ways: Ways, mesh: Mesh) -> Iterator[tuple[Sequence[Axes], Found]]:
    """The best choices where neighbouring axes of `mesh` are one, the best first."""
    for count in range(2, len(mesh.sizes)):
        found = []
        for groups in partitions(len(mesh.sizes), count):
            coarse = ways.anew(_with_axes_together(ways.request, groups))
            choice = on_all(coarse)
            ways.errors += coarse.errors
            if choice is not None:
                found.append((groups, choice))
        yield from sorted(found, key=lambda item: item[1][1].seconds)


def _with_axes_together(request: Request, groups: Sequence[Axes]) -> Request:
    """What is asked for where the axes in each group are one; what is demanded on one of several is left out."""
    mesh = merged(request.mesh, groups)
    alone = {request.mesh.names[group[0]] for group in groups if len(group) == 1}
    constraints = {
        pattern: {what: {axis: text for axis, text in axes.items() if axis in alone} for what, axes in whats.items()}
        for pattern, whats in request.constraints.items()
    }
    return replace(request, mesh=mesh, constraints=constraints)


def _cut_from(ways: Ways, mesh: Mesh, groups: Sequence[Axes], found: Found) -> None:
    """Cut groups of axes up until each is one, from the best choice on what they make."""
    while len(groups) < len(mesh.sizes):
        groups, origins = cut_one(groups)
        step = ways
        if len(groups) < len(mesh.sizes):
            step = ways.anew(_with_axes_together(ways.request, groups))
        step.offered(*found, step.request.mesh, origins)
        step.go_on()
        choice = step.closed()
        if choice is None:
            ways.errors += step.errors if step is not ways else []
            return
        found = choice


def _go_round(ways: Ways, mesh: Mesh) -> None:
    """Let nodes do anything on any two axes, and on the others what they do in the best choice, as long as that
    helps."""
    several = [axis for axis, size in enumerate(mesh.sizes) if size > 1]
    while True:
        parent = ways.found
        assert parent is not None
        for pair in combinations(several, 2):
            ways.offered(*parent, mesh, [None if axis in pair else axis for axis in mesh.dimensions])
        ways.go_on()
        if ways.found is parent:
            ways.closed(_BRIEFLY)
            if ways.found is parent:
                return


# --- what would fit ---


def with_hint(ways: Ways, error: InfeasibleError) -> InfeasibleError:
    """The error with the nearest thing that fits, found by solving."""
    request = ways.request
    freed = replace(request, micro_batches=None, recompute=None)
    if (request.micro_batches, request.recompute) != (None, None) and request.objective == "train":
        found = _would_fit(ways, freed)
        if found is not None:
            how = regime_text(found[1].regime) or "nothing computed again, and one micro-batch"
            return InfeasibleError(f"{error}; it would fit with {how}", error.missing)
    sizes = request.mesh.sizes
    for factor in _MORE:
        wider = replace(freed, mesh=Mesh(request.mesh.names, (sizes[0] * factor, *sizes[1:])))
        found = _would_fit(ways, wider)
        if found is not None:
            how = regime_text(found[1].regime)
            return InfeasibleError(
                f"{error}; it would fit on {found[0].mesh.size} devices ({found[0].mesh})"
                + (f" with {how}" if how else ""),
                error.missing,
            )
    return InfeasibleError(
        f"{error}; nor does any fit with up to {request.mesh.size * _MORE[-1]} devices: take a smaller batch, "
        "shorter sequences, or a smaller model",
        error.missing,
    )


def _would_fit(ways: Ways, request: Request) -> Found | None:
    """What fits where something else is asked for; parts of the batch are the same for all meshes of these axes."""
    try:
        return on_all(ways.anew(request))
    except ConstraintError:
        # The user's constraints cannot be met there.
        return None
