"""record: decisions as data, and back."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from passes.cost.liveness import MemoryPeak
from passes.cost.memory import MemoryUse, memory_use
from passes.cost.walk import Optimizer, block_seconds, walk
from passes.cost.work import seconds_by_op
from passes.ir.choices import Solution
from passes.ir.configuration import Configuration
from passes.ir.layout import S
from passes.ir.plan import ProgramPlan
from passes.ir.work import Work
from passes.record import decisions_of, idle_axes, record, record_stage, whole_ops
from passes.search.restrict import planned_solution
from passes.solve import solve
from passes.solve.limits import Limits
from tests.passes.helpers import Apply, mesh_of
from tests.passes.planning import STATES, Planning, planning, random_planning


def _peak(use: MemoryUse) -> MemoryPeak:
    """The bytes that the solver counts, as the memory simulator gives its own."""
    return MemoryPeak({kind: int(size) for kind, size in use.kinds().items()}, use.moment, {})


def _recorded(case: Planning, solution: Solution) -> ProgramPlan:
    """The recorded plan of a solution."""
    lowered = case.lowered(solution)
    seconds = walk(lowered, case.folded, case.cluster, Optimizer(STATES), Configuration(case.mesh))
    memory = memory_use(case.problem, solution, STATES)
    blocks = block_seconds(lowered, case.folded, case.cluster, solution.configuration)
    assert sum(blocks) + seconds.inputs + seconds.optimizer == pytest.approx(seconds.total)
    stage = record_stage(case.problem, solution, lowered, blocks, _peak(memory))
    plan = record([stage], solution, seconds, 1.0, 0.0, Work())
    assert [block.seconds for block in plan.stages[0].blocks] == blocks
    assert sum(plan.seconds.values()) == pytest.approx(seconds.total)
    assert sum(plan.memory.values()) == pytest.approx(memory.peak)
    return plan


@pytest.mark.parametrize("seed", range(4))
def test_decisions_are_found_again(seed: int) -> None:
    """A recorded stage gives the same strategies in a problem that is made anew, and what is made again."""
    case = random_planning(seed, blocks=2 if seed == 3 else 0)
    solution = solve(case.problem, case.cluster, Limits(1e30, STATES), Configuration(case.mesh))
    solution = replace(solution, regathered=frozenset(case.changed_and_kept(solution.picks)))
    anew = random_planning(seed, blocks=2 if seed == 3 else 0)
    found = planned_solution(anew.problem, decisions_of(_recorded(case, solution), case.mesh))
    assert isinstance(found, Solution)
    assert found.picks == solution.picks
    assert case.seconds(found) == pytest.approx(case.seconds(solution))
    assert case.peak(found) == case.peak(solution)


@pytest.mark.parametrize("how", ["missing", "unknown", "other method", "unknown use"])
def test_decisions_that_do_not_fit_are_named(how: str) -> None:
    """The first key on which plan and problem differ."""
    case = random_planning(1)
    solution = solve(case.problem, case.cluster, Limits(1e30, STATES), Configuration(case.mesh))
    plan = _recorded(case, solution)
    (stage,) = plan.stages
    first = case.problem.nodes[0].key
    decisions = dict(stage.decisions)
    again: tuple[tuple[str, int], ...] = ()
    if how == "missing":
        del decisions[first]
    elif how == "unknown":
        decisions["odd/op"] = ("R",)
    elif how == "other method":
        decisions[first] = ("nothing",) * len(case.mesh.sizes)
    else:
        again = (("odd/op", 0),)
    expected = "odd/op" if how.startswith("unknown") else first
    other = replace(plan, stages=(replace(stage, decisions=decisions, regathered=again),))
    assert planned_solution(case.problem, decisions_of(other, case.mesh)) == expected


def test_ops_that_are_computed_whole() -> None:
    """Ops without a rule are named if they depend on the batch, and not if they are the same for every batch."""

    def function(x: Tensor) -> Tensor:
        return x + torch.histc(x, 4) + torch.histc(torch.arange(4.0), 4)

    case = planning(Apply(function), {"x": torch.ones(6, 4)}, mesh_of(a=2))
    assert whole_ops(case.folded) == ("/histc",)


def test_axes_that_split_nothing() -> None:
    """An axis on which no op is split is idle; one of a single device never is. Batches that all axes could split stand
    beside it, unless the batch is one."""
    mesh = mesh_of(one=1, idle=5, used=2)
    case = planning(nn.Linear(8, 8), {"input": torch.ones(16, 8)}, mesh, "h100")
    (batch,) = [node for node in case.problem.nodes if node.kind == "input"]
    found = [number for number, strategy in enumerate(batch.strategies) if strategy.results[0][2] == S(0)]
    solution = solve(case.problem, case.cluster, Limits(1e30, STATES), Configuration(mesh))
    idle = idle_axes(case.problem, solution, seconds_by_op(case.folded, case.cluster), 16)
    assert idle is not None
    assert (idle.axes, idle.busy) == (("idle",), 2)
    picks = list(solution.picks)
    picks[case.problem.nodes.index(batch)] = found[0]
    split = replace(solution, picks=tuple(picks))
    for samples, batches in ((16, (10, 20)), (9, (10,)), (20, ())):
        again = idle_axes(case.problem, split, seconds_by_op(case.folded, case.cluster), samples)
        assert again is not None
        assert again.batches == batches
    assert idle_axes(case.problem, solution, dict.fromkeys(seconds_by_op(case.folded, case.cluster), 0.0), 16) is None


def test_rows_show_every_statement() -> None:
    """Each op of the program has a row under its key, in the block that it stands in; collectives are spelled out."""
    case = random_planning(3, blocks=3)
    solution = solve(case.problem, case.cluster, Limits(1e30, STATES), Configuration(case.mesh))
    plan = _recorded(case, solution)
    (stage,) = plan.stages
    shown = {row.name for block in stage.blocks for row in block.rows if row.kind == "op"}
    assert shown == {op.key for op in case.folded.ops}
    region = next(block for block in stage.blocks if block.name.endswith("*"))
    assert region.count == 3
    assert {row.name for row in region.rows if row.kind == "op"} == {op.key for op in case.folded.regions[0].ops}
