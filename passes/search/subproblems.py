"""The search's problems on one mesh: how they are made, bounded and solved; and the program of one micro-batch, for
every number of micro-batches.
"""

from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from passes.clock import Clock
from passes.cost.memory import memory_use
from passes.cost.redistributions import RedistributionCosts
from passes.ir.choices import Problem, Solution
from passes.ir.configuration import Configuration
from passes.ir.errors import MicroBatchError
from passes.ir.folded import Folded
from passes.ir.levels import level_of
from passes.ir.mesh import Mesh
from passes.ir.program import Program
from passes.ir.rule import Rule
from passes.micro_batches import Batch, MicroBatches
from passes.regions import fold
from passes.rules.following import begun_tokens
from passes.rules.strategies import AllowedMethods, method_token
from passes.search.configurations import between, numbers, relaxed_configuration
from passes.search.space import Space
from passes.solve.arrays import least_seconds
from passes.solve.limits import Effort, Limits
from passes.solve.solver import Guess, Solver
from passes.strategies import Analysis, analyze, planning_problem

# Units of effort after which a search that knows some choice ends.
MOST_EFFORT = 70_000.0


@dataclass(frozen=True)
class MicroBatchProgram:
    """The program of one micro-batch, as it is and folded; `micro` is None where the batch is not split."""

    micro: MicroBatches | None
    program: Program
    folded: Folded

    @cached_property
    def analysis(self) -> Analysis:
        """The properties of the folded program that its strategies depend on, whatever the mesh."""
        return analyze(self.folded)


@dataclass
class MicroBatchPrograms:
    """The programs that `program` can be split into along its batch, each made once.

    Copies of a region share all decisions, so layers are folded together only where the constraints of `space` on them
    are equal. `refused` is the reason for which the batch cannot be split, once that is known.
    """

    program: Program
    space: Space
    clock: Clock
    refused: str = ""
    made: dict[int, MicroBatchProgram] = field(default_factory=dict)

    def given(self, count: int) -> MicroBatchProgram:
        """The program of one of `count` micro-batches. Raises MicroBatchError where the batch cannot be split."""
        if count not in self.made:
            with self.clock("micro-batches"):
                micro = self._batch.cut(count) if count > 1 else None
            program = self.program if micro is None else micro.program
            with self.clock("constrain"):
                constraints = self.space.placed_constraints(program, self.space.mesh)
            with self.clock("regions"):
                folded = fold(program, constraints.label)
            self.made[count] = MicroBatchProgram(micro, program, folded)
        return self.made[count]

    def of(self, count: int, *, is_given: bool) -> MicroBatchProgram | None:
        """The program of one of `count` micro-batches; None where the batch cannot be split.

        Raises MicroBatchError instead where the number `is_given` by the user.
        """
        if self.refused and count > 1 and not is_given:
            return None
        try:
            return self.given(count)
        except MicroBatchError as error:
            if is_given:
                raise
            self.refused = str(error)
            return None

    @cached_property
    def _batch(self) -> Batch:
        return Batch(self.program, couples=self.space.couples)


# Bytes that differ by less than this part are counted in one order of their terms.
_ROUNDING = 1e-9

# Making a strategy, and the costs of a pair of them, takes as long as operations on so many array elements.
_PER_STRATEGY, _PER_PAIR = 10_000, 400

# The methods of a node that splits nothing on an axis.
_WHOLE = frozenset({"I", "R"})


@dataclass(frozen=True)
class Subproblem:
    """All choices of layouts under one configuration on one mesh.

    `solver` is resumable: it raises the lower bound on their step time, and finds choices, as far as it is driven.
    Without `has_all_strategies` they are those near to another choice, and the bound is one on them alone.
    """

    program: MicroBatchProgram
    solver: Solver
    has_all_strategies: bool = True

    @property
    def mesh(self) -> Mesh:
        """The mesh of the configuration."""
        return self.configuration.mesh

    @property
    def configuration(self) -> Configuration:
        """The configuration that the choices are for."""
        return self.solver.configuration

    @property
    def bound(self) -> float:
        """A lower bound on the step time of all choices (seconds)."""
        return self.solver.gap.bound

    @property
    def problem(self) -> Problem:
        """The nodes with the strategies that they may take."""
        return self.solver.instance.problem

    @property
    def pairs(self) -> int:
        """The number of pairs of strategies over all edges, in which the size of the solver's arrays is linear."""
        return _pairs(self.problem)


def _pairs(problem: Problem) -> int:
    """The number of pairs of strategies over all edges of a problem."""
    counts = [len(node.strategies) for node in problem.nodes]
    return sum(counts[edge.producer] * counts[edge.consumer] for edge in problem.edges)


@dataclass(frozen=True)
class Choice:
    """A choice of the search: a solution of one subproblem."""

    subproblem: Subproblem
    solution: Solution

    @property
    def seconds(self) -> float:
        """The step time, as the solver counts it."""
        return self.solution.seconds


@dataclass(frozen=True)
class Memo:
    """Results that hold for all spaces over one program: costs of redistributions by mesh, problems by mesh and number
    of micro-batches, subproblems without memory limit by these, and lower bounds by the key of their
    configuration. A bound found within a memory limit holds within any smaller one. `guesses` are the last multipliers
    of bounds by the levels of recompute and the number of micro-batches, with and without a limit. `effort` was spent
    on all of that."""

    costs: dict[Mesh, RedistributionCosts] = field(default_factory=dict)
    problems: dict[tuple[Mesh, int], Problem] = field(default_factory=dict)
    relaxed: dict[tuple[Mesh, int], Subproblem] = field(default_factory=dict)
    bounds: dict[Hashable, float] = field(default_factory=dict)
    guesses: dict[Hashable, Guess] = field(default_factory=dict)
    effort: Effort = field(default_factory=Effort)


def levels_key(configuration: Configuration) -> Hashable:
    """A key that is equal for configurations with the same levels of recompute, in whatever number of copies."""
    levels = ((name, level_of(text)) for name, text in sorted(configuration.recompute.items()))
    return tuple((name, level.rest, level.is_mixed) for name, level in levels)


def _kind(subproblem: Subproblem) -> Hashable:
    """Equal for subproblems whose best multipliers are likely to be near."""
    configuration, has_limit = subproblem.configuration, subproblem.solver.limits.memory < float("inf")
    return levels_key(configuration), configuration.micro_batches, has_limit


def _tokens(methods: Sequence[str], sizes: Sequence[int], is_op: bool, rule: Rule | None) -> list[frozenset[str]]:
    """The names of a strategy's methods among allowed methods, for each axis of a mesh of these sizes."""
    return begun_tokens(methods, sizes, rule) if is_op else [frozenset({method_token(each, False)}) for each in methods]


@dataclass(frozen=True)
class Subproblems:
    """The subproblems of a space within `memory_limit` (bytes), of which `reserves` are set aside, by the levels of
    recompute (see `levels_key`) and the number of micro-batches. Other numbers have as much for each sample, and other
    levels as the most of these, if one level `lends` to another."""

    programs: MicroBatchPrograms
    space: Space
    clock: Clock
    memory_limit: float
    memo: Memo = field(default_factory=Memo)
    reserves: Mapping[tuple[Hashable, int], float] = field(default_factory=dict)
    lends: bool = True

    def limits(self, configuration: Configuration) -> Limits:
        """The limits that choices under `configuration` must keep."""
        memory = self.memory_limit - self.reserve(configuration)
        return Limits(memory, self.space.optimizer_states, self.space.memory_limit)

    def reserve(self, configuration: Configuration) -> float:
        """Bytes that are set aside under `configuration`."""
        own, count = levels_key(configuration), configuration.micro_batches
        if (own, count) in self.reserves:
            return self.reserves[own, count]
        known = self.reserves.items()
        return max((bytes * of / count for (levels, of), bytes in known if self.lends or levels == own), default=0.0)

    def reserving(self, configuration: Configuration, bytes: float) -> "Subproblems":
        """The subproblems with at least so many bytes set aside under `configuration`."""
        key = levels_key(configuration), configuration.micro_batches
        return replace(self, reserves={**self.reserves, key: max(bytes, self.reserves.get(key, 0.0))})

    def lends_to(self, configuration: Configuration) -> bool:
        """Whether what is set aside under `configuration` is not its own, but that of others."""
        is_own = (levels_key(configuration), configuration.micro_batches) in self.reserves
        return not is_own and self.reserve(configuration) > 0

    @property
    def is_spent(self) -> bool:
        """Whether so much effort was spent that a search which knows some choice ends."""
        return self.memo.effort.spent >= MOST_EFFORT

    def apart(self) -> "Subproblems":
        """The subproblems with all of the effort of a search for a small part of it, which counts in this search."""
        return replace(self, memo=replace(self.memo, effort=self.memo.effort.part()))

    def over(self, space: Space) -> "Subproblems":
        """The subproblems of another space over the same program."""
        return replace(self, space=space, memory_limit=space.memory_limit)

    def problem(
        self, mesh: Mesh, program: MicroBatchProgram, allowed: Mapping[str, AllowedMethods] | None = None
    ) -> Problem:
        """All strategies of a program on a mesh; nodes in `allowed` have only those of these methods."""
        with self.clock("constrain"):
            constraints = self.space.placed_constraints(program.program, mesh)
        with self.clock("strategies"):
            return planning_problem(program.folded, constraints, self.space.setting(mesh, allowed), program.analysis)

    def relaxed(self, mesh: Mesh, count: int) -> Subproblem | None:
        """The subproblem of `count` micro-batches without memory limit; None where the batch cannot be split so."""
        program = self.programs.of(count, is_given=self.space.micro_batches is not None)
        if program is None:
            return None
        configuration = relaxed_configuration(self.space, mesh, count, program.folded)
        limits = Limits(float("inf"), self.space.optimizer_states)
        key = mesh, count
        if key not in self.memo.relaxed:
            solver = self._solver(self._whole(mesh, count, program), limits, configuration)
            self.memo.relaxed[key] = Subproblem(program, solver)
        found = self.memo.relaxed[key]
        if found.configuration != configuration:
            found = replace(found, solver=found.solver.other(limits, configuration))
        return found

    def least_s(self, mesh: Mesh, count: int) -> float:
        """A lower bound on the step time with `count` micro-batches on `mesh` (seconds): that of computation alone."""
        program = self.programs.of(count, is_given=self.space.micro_batches is not None)
        if program is None:
            return 0.0
        configuration = relaxed_configuration(self.space, mesh, count, program.folded)
        return least_seconds(self._whole(mesh, count, program), configuration)

    def limited(
        self, subproblem: Subproblem, configuration: Configuration, held: Configuration | None = None
    ) -> Subproblem:
        """The same choices of layouts within the memory limit, under `configuration`; with the bytes of `held`, if that
        is given."""
        return replace(subproblem, solver=subproblem.solver.other(self.limits(configuration), configuration, held))

    def unlimited(self, subproblem: Subproblem) -> Subproblem:
        """The same choices of layouts without memory limit, under the configuration that is fastest then."""
        count, folded = subproblem.configuration.micro_batches, subproblem.program.folded
        configuration = relaxed_configuration(self.space, subproblem.mesh, count, folded)
        limits = Limits(float("inf"), self.space.optimizer_states)
        return replace(subproblem, solver=subproblem.solver.other(limits, configuration))

    def refined(self, parent: Choice, configuration: Configuration, origins: Sequence[int | None]) -> Subproblem:
        """The choices under `configuration` that are near to `parent`: on an axis with an origin, which is an axis of
        the parent's mesh, nodes do what they do there in the parent's solution or in those that its bound mixes; on
        others anything.

        Raises ConstraintError where the constraints leave nothing of that.
        """
        before, mesh = parent.subproblem, configuration.mesh
        program = self.programs.given(configuration.micro_batches)
        constraints = self.space.placed_constraints(program.program, mesh)
        ops = {op.key: op for op in program.folded.ops}
        rules = {placed.op.key: placed.rule for placed in program.analysis.placed}
        mixed = [parent.solution.picks, *before.solver.mixed]
        is_other_size = configuration.micro_batches != before.configuration.micro_batches
        allowed = {}
        for index, node in enumerate(before.problem.nodes):
            is_op = node.kind == "op"
            if is_op and node.key not in ops:
                # Another number of micro-batches has other ops; nodes that are not here may do anything.
                continue
            picks = {picks[index] for picks in mixed}
            rule = rules.get(node.key)
            done = [_tokens(node.strategies[pick].methods, before.mesh.sizes, is_op, rule) for pick in picks]
            constrained = constraints.axes(*(constraints.places(ops[node.key]) if is_op else [("stored", node.name)]))
            # A constraint on one axis, or another size, may leave nothing of what was done on another.
            others = _WHOLE if constrained or is_other_size else frozenset()
            allowed[node.key] = [
                None if origin is None or axis in constrained else others.union(*(tokens[origin] for tokens in done))
                for axis, origin in enumerate(origins)
            ]
        return self.subproblem(program, self.problem(mesh, program, allowed), configuration)

    def subproblem(self, program: MicroBatchProgram, problem: Problem, configuration: Configuration) -> Subproblem:
        """The subproblem of a problem with a part of the strategies, within the memory limit."""
        solver = self._solver(problem, self.limits(configuration), configuration)
        return Subproblem(program, solver, has_all_strategies=False)

    def begin(self, subproblem: Subproblem, cutoff: float) -> None:
        """Let the solver of a subproblem find its first bound on choices of less than `cutoff` seconds. The multipliers
        of the last one like it may exclude them. Raises InfeasibleError where no choice fits."""
        with self.clock("solve"):
            subproblem.solver.begin(cutoff, self.memo.guesses.get(_kind(subproblem)))

    def remember(self, subproblem: Subproblem) -> None:
        """Keep the multipliers of a subproblem whose bound was raised, to exclude others."""
        self.memo.guesses[_kind(subproblem)] = subproblem.solver.guess

    def fits(self, subproblem: Subproblem) -> bool:
        """Whether the best choice that the solver has found keeps the memory limit."""
        solver, limit = subproblem.solver, self.limits(subproblem.configuration).memory
        best = solver.gap.best
        if best is None:
            return False
        most = float(solver.instance.totals(best.picks, best.regathered).max())
        if abs(most - limit) > _ROUNDING * most:
            return most <= limit
        return memory_use(subproblem.problem, best, self.space.optimizer_states).peak <= limit

    def least_copies(self, subproblem: Subproblem, solution: Solution) -> int | None:
        """The least number of copies, among those that the configuration of `subproblem` leaves open, that have to be
        recomputed fully for the layouts of a solution to fit; None where none does."""
        configuration, problem = subproblem.configuration, subproblem.problem.only(solution.picks)
        least, most = numbers(configuration)
        picks = (0,) * len(problem.nodes)

        def fits(count: int) -> bool:
            own = between(configuration, count, count)
            chosen = replace(solution, picks=picks, configuration=own)
            return memory_use(problem, chosen, self.space.optimizer_states).peak <= self.limits(own).memory

        if not fits(most):
            return None
        return bisect_left(range(least, most), True, key=fits) + least

    def _whole(self, mesh: Mesh, count: int, program: MicroBatchProgram) -> Problem:
        """The problem of `count` micro-batches on `mesh` with all strategies."""
        if (mesh, count) not in self.memo.problems:
            self.memo.problems[mesh, count] = self.problem(mesh, program)
        return self.memo.problems[mesh, count]

    def _solver(self, problem: Problem, limits: Limits, configuration: Configuration) -> Solver:
        """A solver that shares the costs of redistributions with all others for the same mesh."""
        cluster, mesh = self.space.cluster, configuration.mesh
        costs = self.memo.costs
        if mesh not in costs:
            # Meshes of more axes are near to a choice, searched one after the other, and have most pairs of layouts.
            for other in [other for other in costs if len(other.sizes) > 2]:
                del costs[other]
            costs[mesh] = RedistributionCosts(cluster, mesh)
        with self.clock("solve"):
            strategies = sum(len(node.strategies) for node in problem.nodes)
            self.memo.effort.add(_PER_PAIR * _pairs(problem) + _PER_STRATEGY * strategies)
            return Solver(problem, cluster, limits, configuration, costs[mesh], effort=self.memo.effort)
