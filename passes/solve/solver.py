"""The solver of one problem in one configuration, step by step."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from passes.cost.cluster import Cluster
from passes.cost.memory import memory_model
from passes.cost.redistributions import RedistributionCosts
from passes.ir.choices import Problem, Solution
from passes.ir.configuration import Configuration
from passes.solve.arrays import Uses, arrays, find_uses
from passes.solve.branch_and_bound import NOTHING, Branch
from passes.solve.effort import Effort, OutOfEffortError
from passes.solve.exact_search import FIRST, ExactSearch
from passes.solve.feasibility import refuse_if_hopeless, smallest
from passes.solve.gap import Gap
from passes.solve.instance import Instance
from passes.solve.lagrangian.cutting_planes import Cut
from passes.solve.lagrangian.dual_ascent import DualAscent
from passes.solve.limits import Limits, infeasible, out_of_effort
from passes.solve.shared_decisions import shared_decisions

# Units of effort for closing a gap (`solve/effort`: about 30 s); what is not proven then is the gap of the plan.
ALLOWANCE = 10_000.0


class Solver:
    """A resumable search for the best choice in one configuration.

    `begin` and `climb` raise the bound by dual iterations and mostly find a choice near it; `close` closes the `gap`.
    """

    def __init__(
        self,
        problem: Problem,
        cluster: Cluster,
        limits: Limits,
        configuration: Configuration,
        costs: RedistributionCosts | None = None,
        uses: Sequence[Uses] | None = None,
    ) -> None:
        """Build the arrays of a problem; `costs` on the mesh and `uses` of the problem are reused if given."""
        self.cluster = cluster
        self.limits = limits
        self.uses = uses or find_uses(problem, costs or RedistributionCosts(cluster, configuration.mesh))
        sizes = memory_model(problem, configuration, [each.tensor for each in self.uses])
        found = arrays(problem, self.uses, configuration)
        shared = shared_decisions(problem, found, sizes)
        own = shared.arrays(found), shared.bytes(sizes)
        self.instance = Instance(problem, configuration, *own, sizes, shared, limits)
        self.gap = Gap(self.instance)
        self.dual = DualAscent(self.gap)
        self.exact = ExactSearch(self.dual)
        self.root: Branch | None = None
        self.climbing: Iterator[Cut] | None = None

    def other(self, limits: Limits, configuration: Configuration) -> "Solver":
        """A solver for the same problem within other limits, in another configuration."""
        return Solver(self.instance.problem, self.cluster, limits, configuration, uses=self.uses)

    @property
    def has_begun(self) -> bool:
        """Whether `begin` was called."""
        return self.root is not None

    @property
    def effort(self) -> Effort:
        """The effort spent so far."""
        return self.instance.arrays.effort

    @property
    def configuration(self) -> Configuration:
        """The configuration of the problem."""
        return self.instance.configuration

    @property
    def mixed(self) -> list[tuple[int, ...]]:
        """The strategies of the choices that the bound is a mixture of."""
        mixture = [] if self.root is None else self.root.mixture
        return [self.instance.shared.expanded(found.picks, ())[0] for found, part in mixture if part > NOTHING]

    def begin(self, cutoff: float = np.inf) -> None:
        """Solve the problem without limits, which gives the first bound.

        Raises InfeasibleError where the least bytes of each node by itself do not fit.
        """
        self.gap.cutoff = cutoff
        refuse_if_hopeless(self.instance)
        planes = self.dual.cutting_planes
        start = planes.start()
        self.root = Branch(self.instance.all_alive, [], -np.inf, start, [])
        planes.unit = self.dual.at(self.root, start).seconds / self.limits.memory
        self.gap.bound = max(self.gap.bound, self.root.bound)

    def climb(self, cutoff: float = np.inf) -> bool:
        """Raise the bound by one dual iteration. Returns whether further iterations are worthwhile.

        Raises InfeasibleError where no choice fits.
        """
        assert self.root is not None
        if cutoff > self.gap.cutoff:
            # Choices that were pruned may be better than the new cutoff.
            self.root.alive, self.climbing = self.instance.all_alive, None
        self.gap.cutoff = cutoff
        if self.gap.bound * (1 + FIRST) >= self.gap.least:
            # The exact search closes a gap this small.
            return False
        if self.climbing is None:
            self.climbing = self.dual.climb(self.root, 1e-8 * abs(self.root.bound))
        goes_on = next(self.climbing, None) is not None
        self.gap.bound = max(self.gap.bound, self.root.bound)
        return goes_on

    def close(self, cutoff: float = np.inf, allowance: float = ALLOWANCE) -> None:
        """Close the gap with about `allowance` units of effort: exactly, in increasing intervals above the bound, then
        by branch and bound.

        Raises InfeasibleError where no choice fits, or none was found with that effort.
        """
        assert self.root is not None
        self.gap.cutoff = min(self.gap.cutoff, cutoff)
        try:
            self.exact.close(self.root, self.effort.spent + allowance)
        except OutOfEffortError:
            if self.gap.least < np.inf:
                return
            raise out_of_effort(self.limits) from None
        if self.gap.least == np.inf:
            raise infeasible(self.limits, smallest(self.instance, self.root.multipliers))

    def solution(self) -> Solution:
        """The incumbent with the bound that was found."""
        best = self.gap.best
        assert best is not None
        return replace(best, bound=min(best.seconds, self.gap.bound))
