"""The nearest thing that would fit where nothing does, found by searching."""

from dataclasses import replace

from passes.ir.errors import ConstraintError, InfeasibleError
from passes.ir.mesh import Mesh
from passes.search.best_first import Progress
from passes.search.configurations import configuration_text
from passes.search.refinement import best_choice
from passes.search.space import Space
from passes.search.subproblems import Choice, Subproblems

# Factors of the number of devices that are tried.
_MORE = (2, 4, 8, 16, 32, 64)


def with_hint(subproblems: Subproblems, error: InfeasibleError) -> InfeasibleError:
    """The error with the nearest thing that fits: another configuration on the same devices, or more devices."""
    space = subproblems.space
    free = replace(space, micro_batches=None, recompute=None)
    if (space.micro_batches, space.recompute) != (None, None) and space.trains:
        found = _choice_in(subproblems, free)
        if found is not None:
            how = configuration_text(found.solution.configuration) or "no recompute, and one micro-batch"
            return InfeasibleError(f"{error}; it would fit with {how}", error.missing)
    sizes = space.mesh.sizes
    for factor in _MORE:
        wider = replace(free, mesh=Mesh(space.mesh.names, (sizes[0] * factor, *sizes[1:])))
        found = _choice_in(subproblems, wider)
        if found is not None:
            mesh, how = found.subproblem.mesh, configuration_text(found.solution.configuration)
            return InfeasibleError(
                f"{error}; it would fit on {mesh.size} devices ({mesh})" + (f" with {how}" if how else ""),
                error.missing,
            )
    return InfeasibleError(
        f"{error}; nor does any fit with up to {space.mesh.size * _MORE[-1]} devices: take a smaller batch, "
        "shorter sequences, or a smaller model",
        error.missing,
    )


def _choice_in(subproblems: Subproblems, space: Space) -> Choice | None:
    try:
        return best_choice(subproblems.over(space), Progress()).best
    except ConstraintError:
        # The user's constraints cannot be met there.
        return None
