"""Formulas for the costs of a plan: its memory and step time as functions of batch, sequence and axis sizes.

The model is retraced with symbolic sizes, and the passes run at a few sizes. The results differ in dims only, which
`passes/dynamic_shapes/generalize` turns into figures: numbers that record their formulas. The cost model then computes
with these figures under the plan's decisions, so the formulas cannot differ from the planned costs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from itertools import islice
from math import isclose, lcm
from typing import cast

import sympy
import torch

from autopar.models.info import ModelInfo, TracedSizes
from autopar.plans.programs import PlannedProgram, returned_program
from autopar.request import Request
from passes.clock import Clock
from passes.constrain import constrain
from passes.cost.memory import chosen_memory
from passes.cost.walk import walk
from passes.dynamic_shapes.generalize import alike, corners, generalize
from passes.dynamic_shapes.specialize import specialize
from passes.ir.choices import Problem, Solution
from passes.ir.constraints import PlacedConstraints
from passes.ir.decisions import Decisions
from passes.ir.errors import AutoparError, ExpressionError
from passes.ir.figures import Figure, formula, largest_sum, size_of
from passes.ir.folded import Folded
from passes.ir.formulas import write_formula
from passes.ir.layout import Shape, digits
from passes.ir.leaves import input_leaves
from passes.ir.log import logger
from passes.ir.lowered import only_stage
from passes.ir.mesh import Mesh
from passes.ir.plan import BATCH, Expressions, ProgramPlan
from passes.lower import lower
from passes.micro_batches import micro_batches
from passes.normalize import normalize
from passes.record import decisions_of
from passes.regions import fold
from passes.search import Space
from passes.search.restrict import planned_methods, planned_solution
from passes.strategies import planning_problem

# How tight plans and formulas agree: they are sums of the same figures in another order.
_TOLERANCE = 1e-9


def expressions(sizes: TracedSizes, info: ModelInfo, request: Request, planned: PlannedProgram) -> Expressions:
    """Memory (bytes) and step time (seconds) of what was `planned` as formulas.

    Raises ExpressionError where the model is another program at other sizes, and where an axis of the mesh and a size
    have the same name.
    """
    for name in sizes.named:
        if name in request.mesh.names:
            raise ExpressionError(f"the mesh has an axis called {name!r}, as a size of the inputs: rename the axis")
    samples = _Samples(sizes, info, request, planned)
    varying, points = samples.points()
    folded = generalize([(varying, planned.folded), *((point, samples.folded(point)) for point in points[1:])])
    constraints = constrain(folded.program, request.constraints, request.mesh)
    space = request.space(info.casts(request.precision), Decisions())
    problem_on = partial(_planned_problem, folded, constraints, space, planned.record)
    mesh = Mesh.of(
        {name: size_of(size, sympy.Symbol(name)) if size > 1 else size for name, size in request.mesh.by_name.items()}
    )
    problem, solution = problem_on(mesh)
    on_numbers = problem_on(request.mesh)
    memory = _memory(problem, solution)
    _require_equal("memory", memory, _memory(*on_numbers))
    # How groups lie in nodes has no formula.
    in_one_node = request.mesh.size <= request.cluster.node_size
    timed, chosen = (problem, solution) if in_one_node else on_numbers
    stage = only_stage(lower(folded, timed, chosen, space.casts, space.cluster, Clock()).stages)
    seconds = walk(stage, folded, space.cluster, space.optimizer, chosen.configuration).total
    _require_equal("step time", seconds, sum(planned.record.seconds.values()))
    varying.update((name, size) for name, size in request.mesh.by_name.items() if size > 1)
    step = _batch_step(folded, problem, solution, mesh, varying)
    return Expressions(write_formula(formula(memory)), write_formula(formula(seconds)), varying, step)


@dataclass(frozen=True)
class _Samples:
    """The program at other sizes, after the passes before the cost model."""

    sizes: TracedSizes
    info: ModelInfo
    request: Request
    planned: PlannedProgram
    made: dict[tuple[tuple[str, int], ...], Folded] = field(default_factory=dict)

    def points(self) -> tuple[dict[str, int], list[dict[str, int]]]:
        """The planned sizes that may be others, and at which sizes to look: first of all as planned."""
        sizes: dict[str, int] = {}
        others: dict[str, list[int]] = {}
        points: list[dict[str, int]] = [{}]
        for name, (size, _) in self.sizes.named.items():
            more = {**others, name: self.others(name)}
            wider = {**sizes, name: size}
            if more[name]:
                found = corners(wider, {own: values[0] for own, values in more.items()})
                found.append({own: values[-1] for own, values in more.items()})
                if all(self._works(point) for point in found[1:]):
                    sizes, others, points = wider, more, found
                    continue
            logger.info("formulas do not depend on %s: at other sizes than %d the model is another program", name, size)
        return sizes, points

    def others(self, name: str) -> list[int]:
        """Up to two sizes besides the planned one at which the program is the same."""
        size = self.sizes.named[name][0]
        others = dict.fromkeys((2 * size, 3 * size, 4 * size, size // 2, size // 4, size + 2, size - 2))
        return list(islice((other for other in others if other > 1 and self._works({name: other})), 2))

    def _works(self, sizes: Mapping[str, int]) -> bool:
        try:
            return alike(self.planned.folded, self.folded(sizes))
        except AutoparError as error:
            logger.debug("no formula from %s: %s", sizes, error)
            return False

    def folded(self, sizes: Mapping[str, int]) -> Folded:
        """The program where some sizes are others than planned."""
        own = tuple((name, size) for name, size in sorted(sizes.items()) if size != self.sizes.named[name][0])
        if own not in self.made:
            program = normalize(specialize(self.sizes.program, self._shapes(sizes)))
            program = returned_program(program, self.request, self.planned.decided)
            if self.planned.record.micro_batches > 1:
                program = micro_batches(
                    program,
                    self.planned.record.micro_batches,
                    couples=self.request.aux_loss == "micro_batch",
                ).program
            self.made[own] = fold(program, constrain(program, self.request.constraints, self.request.mesh).label)
        return self.made[own]

    def _shapes(self, sizes: Mapping[str, int]) -> dict[str, Shape]:
        shapes = {
            name: list(leaf.shape) for name, leaf in input_leaves(self.info.inputs) if isinstance(leaf, torch.Tensor)
        }
        for name, size in sizes.items():
            for argument, dim in self.sizes.named[name][1]:
                shapes[argument][dim] = size
        return {name: tuple(shape) for name, shape in shapes.items()}


def _planned_problem(
    folded: Folded, constraints: PlacedConstraints, space: Space, record: ProgramPlan, mesh: Mesh
) -> tuple[Problem, Solution]:
    """The problem restricted to the decisions of a plan, and these as a solution."""
    decisions = decisions_of(record, mesh)
    assert decisions.methods is not None
    setting = space.setting(mesh, planned_methods(folded, decisions.methods))
    problem = planning_problem(folded, constraints, setting)
    solution = planned_solution(problem, decisions)
    if isinstance(solution, str):
        raise ExpressionError(f"costs have no formulas: what was decided for {solution!r} depends on the sizes")
    return problem, solution


def _memory(problem: Problem, solution: Solution) -> float:
    """The bytes per device of a solution; a figure where sizes or the mesh are symbols."""
    model, live = chosen_memory(problem, solution)
    return largest_sum(model.fractions.of([item.range for item in live]), [item.size for item in live])


def _require_equal(what: str, found: float, expected: float) -> None:
    """Raise ExpressionError if a formula does not give the value of the plan at the planned sizes."""
    value, planned = (float(one.value if isinstance(one, Figure) else one) for one in (found, expected))
    if not isclose(value, planned, rel_tol=_TOLERANCE):
        raise ExpressionError(f"the {what} of the plan is {planned}, but its formula gives {value}: report this")


def _batch_step(folded: Folded, problem: Problem, solution: Solution, mesh: Mesh, sizes: Mapping[str, int]) -> int:
    """The step of batch sizes at which every split dim remains divisible."""
    ops = {op.key: op for op in folded.ops}
    batch = sympy.Symbol(BATCH)
    others = {sympy.Symbol(name): sympy.Integer(size) for name, size in sizes.items() if name != BATCH}
    step = 1
    for index, node in enumerate(problem.nodes):
        strategy = solution.strategy(problem, index)
        if node.kind == "op":
            names = (*ops[node.key].operands, *ops[node.key].results)
        else:
            names = (node.name,) * (len(strategy.operands) + len(strategy.results))
        for name, layout in zip(names, (*strategy.operands, *strategy.results), strict=True):
            for dim, size in enumerate(cast(tuple[object, ...], folded.types[name].shape)):
                if isinstance(size, Figure):
                    rate = sympy.expand(size.expression.xreplace(others)).coeff(batch)
                    taken = digits(layout, dim, mesh)
                    parts = int(taken[-1][0]) * int(taken[-1][1]) if taken else 1
                    step = lcm(step, Fraction(int(rate.p), int(rate.q) * parts).denominator)
    return step
