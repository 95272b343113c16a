"""The best choice of a space, as the solver counts seconds and bytes."""

from dataclasses import replace

from passes.ir.errors import ConstraintError, InfeasibleError
from passes.ir.log import logger
from passes.ir.mesh import Mesh
from passes.lower.recompute import check_patterns
from passes.search.configurations import configuration_text
from passes.search.progress import Progress
from passes.search.refinement import all_choices, best_choice, first_choice, same_layouts
from passes.search.space import Space
from passes.search.stripes import in_stripes, offering, together
from passes.search.subproblems import Choice, Subproblems
from passes.search.uneven import has_uneven_work
from passes.solve.gap import PROVEN


def choose(subproblems: Subproblems, *, hints: bool = True) -> tuple[Subproblems, Choice]:
    """The best choice of the space, as the solver counts memory, and the subproblems that it is the best of.

    Raises InfeasibleError where nothing fits, which with `hints` says what would: that is searched.
    """
    check_recompute(subproblems)
    subproblems, progress = searched(subproblems)
    best = progress.best
    if best is None:
        nearest = min(progress.errors, key=lambda error: error.missing)
        raise with_hint(subproblems, nearest) if hints else nearest
    seconds, bound = best.solution.seconds, best.solution.bound
    if bound < seconds * (1 - PROVEN):
        logger.warning("the plan may be up to %.2g%% slower than the best", 100 * (1 - bound / seconds))
    return subproblems, best


def searched(subproblems: Subproblems, limit_s: float = float("inf")) -> tuple[Subproblems, Progress]:
    """The search of all subproblems for choices of less than `limit_s` seconds, and these.

    Full recompute of some copies means many more configurations, which pay where full recompute of all copies would be
    the best. Only there they are searched, too: for the layouts of the best choice, and then, unless the effort is
    spent, for all.
    """
    subproblems, progress = _searched(subproblems, Progress(limit_s=limit_s))
    best, space = progress.incumbent, subproblems.space
    if best is None or not space.some_copies or space.recompute is not None:
        return subproblems, progress
    if "full" not in best.solution.configuration.recompute.values():
        return subproblems, progress
    wider = replace(subproblems, space=replace(space, divides_copies=True))
    progress = same_layouts(wider, progress)
    if wider.is_spent:
        return wider, progress
    wider, found = _searched(wider, Progress(progress.incumbent, limit_s))
    return wider, _with_bound_of(progress, found, wider)


def _with_bound_of(before: Progress, progress: Progress, subproblems: Subproblems) -> Progress:
    """The progress of a search that covers an earlier one unless its effort is spent: then the bound `before` holds for
    choices that were not searched again."""
    if not subproblems.is_spent:
        return progress
    return replace(progress, closed_bound=min(before.closed_bound, progress.closed_bound))


def _searched(subproblems: Subproblems, progress: Progress) -> tuple[Subproblems, Progress]:
    """The search of all subproblems for better choices than those so far.

    Stripes are one layout more for most ops, which only uneven work pays for. Where the first good choice without them
    has that, or the best one, or an earlier one which is better than the best in stripes, all is searched with them,
    first of all that choice. At last come stripes over several axes together, where these have uneven work.
    """
    limit_s, seen, before = progress.limit_s, list[Choice](), Progress()
    if not subproblems.space.in_stripes:
        progress = first_choice(subproblems, progress)
        if not _is_uneven(progress):
            progress = all_choices(subproblems, progress)
        uneven = progress.incumbent if _is_uneven(progress) else progress.uneven
        if uneven is None:
            return subproblems, progress
        wider = offering(subproblems)
        striped = in_stripes(wider, uneven, Progress(progress.incumbent, limit_s))
        if uneven is not progress.incumbent and striped.incumbent is progress.incumbent:
            return subproblems, progress
        before = progress
        seen.append(uneven)
        subproblems, progress = wider, striped
    progress = replace(progress, closed_bound=float("inf"))
    progress = all_choices(subproblems, first_choice(subproblems, progress))
    progress = _with_bound_of(before, progress, subproblems)
    if progress.incumbent is not None:
        seen.append(progress.incumbent)
    return together(subproblems, seen, progress)


def _is_uneven(progress: Progress) -> bool:
    return progress.incumbent is not None and has_uneven_work(progress.incumbent)


def check_recompute(subproblems: Subproblems) -> None:
    """Raise ConstraintError for levels of recompute that name no region; warn where there is none."""
    asked = subproblems.space.recompute
    if asked is None:
        return
    regions = subproblems.programs.given(1).folded.regions
    check_patterns(regions, asked)
    if not regions and set(asked.values()) != {"none"}:
        logger.warning("no layers repeat in the model, so nothing is computed again in the backward pass")


# Factors of the number of devices that are tried where nothing fits.
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
