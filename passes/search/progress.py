"""The progress of a search: the best choice so far, and what may hold a better one."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from passes.ir.errors import InfeasibleError
from passes.search.subproblems import Choice, Subproblem, Subproblems
from passes.search.uneven import has_uneven_work
from passes.solve.gap import PROVEN


@dataclass(frozen=True)
class Progress:
    """The state of a search between two expansions.

    `incumbent` is the best choice so far that fits; choices of `limit_s` seconds or more are of no interest, nor are
    those that are faster than the incumbent by a part of it below `tolerance`. `open` are the subproblems whose bound
    is below that and whose gap is not closed; `closed_bound` is a lower bound (seconds) on all that were closed or left
    out. `effort` was spent on closing gaps. `errors` say why subproblems have no choice that fits. `uneven` is the last
    incumbent that splits in order what stripes would split evenly, where stripes are not offered.
    """

    incumbent: Choice | None = None
    limit_s: float = float("inf")
    tolerance: float = 0.0
    open: tuple[Subproblem, ...] = ()
    closed_bound: float = float("inf")
    effort: float = 0.0
    errors: tuple[InfeasibleError, ...] = ()
    uneven: Choice | None = None

    @property
    def cutoff(self) -> float:
        """Step time of the incumbent, or the limit (seconds)."""
        return self.limit_s if self.incumbent is None else min(self.limit_s, self.incumbent.seconds)

    @property
    def goal(self) -> float:
        """Seconds below which a step is of interest."""
        return self.cutoff if self.incumbent is None else self.cutoff * (1 - self.tolerance)

    @property
    def best(self) -> Choice | None:
        """The incumbent, whose bound is that of all subproblems that were closed."""
        if self.incumbent is None:
            return None
        solution = self.incumbent.solution
        return replace(self.incumbent, solution=replace(solution, bound=min(self.closed_bound, solution.seconds)))

    def may_improve(self, bound: float) -> bool:
        """Whether a choice of at least `bound` seconds may be better than the incumbent, by more than the tolerance."""
        return bound < self.goal * (1 - PROVEN)

    def leaving_out(self, bound: float) -> "Progress":
        """The progress where choices of at least `bound` seconds are left out."""
        if bound >= self.cutoff * (1 - PROVEN):
            return self
        return replace(self, closed_bound=min(self.closed_bound, bound))

    def considering(self, subproblem: Subproblem, subproblems: Subproblems) -> "Progress":
        """The progress with the best choice that the solver of a subproblem has found, if it is better and fits."""
        best = subproblem.solver.gap.best
        if best is None or best.seconds >= self.cutoff or not subproblems.fits(subproblem):
            return self
        incumbent = Choice(subproblem, best)
        is_uneven = not subproblems.space.in_stripes and has_uneven_work(incumbent)
        return replace(self, incumbent=incumbent, uneven=incumbent if is_uneven else self.uneven)

    def opening(self, subproblem: Subproblem, subproblems: Subproblems) -> "Progress":
        """The progress with a subproblem whose gap may hold something better."""
        if not self.may_improve(subproblem.bound):
            return self.leaving_out(subproblem.bound)
        return replace(self, open=(*self.open, subproblem)).considering(subproblem, subproblems)

    def leaving_out_others(self) -> "Progress":
        """The progress with those subproblems open alone that may be better than the incumbent."""
        open = tuple(each for each in self.open if self.may_improve(each.bound))
        least = min((each.bound for each in self.open if not self.may_improve(each.bound)), default=float("inf"))
        return replace(self.leaving_out(least), open=open)

    def failing(self, errors: Iterable[InfeasibleError]) -> "Progress":
        """The progress with further errors, without tracebacks: their frames would keep the arrays of solvers."""
        return replace(self, errors=(*self.errors, *(error.with_traceback(None) for error in errors)))
