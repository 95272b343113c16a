"""solve: the planning problem in, the best strategy for every node out.

The best choice without limits (`solve/optimum`) is the answer where it fits the memory and all traffic of parameters
is hidden. Otherwise a Lagrangian relaxation (`solve/lagrangian`) gives a lower bound and choices that fit, and the
gap is closed exactly (`solve/solver`): by Pareto frontiers over increasing intervals above the bound
(`solve/pareto`), by branch and bound where that is too much, and by integer programs (`solve/integer_program`) on small
branches. The search drives a `solve.solver.Solver` step by step.
"""

from passes.cost.cluster import Cluster
from passes.ir.choices import Problem, Solution
from passes.ir.configuration import Configuration
from passes.solve.limits import Limits
from passes.solve.solver import Solver

__all__ = ["solve"]


def solve(problem: Problem, cluster: Cluster, limits: Limits, configuration: Configuration) -> Solution:
    """The choice of least step time that fits the memory, in one configuration.

    Raises InfeasibleError where none fits.
    """
    solver = Solver(problem, cluster, limits, configuration)
    solver.begin()
    while solver.climb():
        pass
    solver.close()
    return solver.solution()
