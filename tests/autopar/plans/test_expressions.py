"""Formulas of costs against plans: the plan's own figures, and those of planning at other sizes with its decisions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import nn

import autopar
from autopar import ExpressionError, Plan
from autopar.models.info import read_model, tracing
from autopar.options import Options
from autopar.planner import PlannedModel, StepMemory, plan_model
from autopar.request import make_request
from passes.capture import capture
from passes.clock import Clock
from passes.cost.memory import memory_use
from passes.ir.formulas import formula_at
from passes.normalize import normalize
from passes.record import decisions_of
from passes.search import search
from tests.autopar.models.test_mamba import MODELS as SCANS
from tests.autopar.recipes import MEGATRON
from tests.models import gpt2, llama

EXACT = 1e-9
SIZES = (8, 16)
MESH = {"dp": 2, "tp": 2}
SCANNED = {
    "@padded_conv1d": {"method": {"dp": "batch", "tp": "space0"}},
    "@selective_scan": {"method": {"dp": "batch", "tp": "places"}},
}
SELECTIVE = Options(cluster="a100", recompute="selective", symbolic=True)


@dataclass(frozen=True)
class Case:
    """A model, its mesh and how it is planned."""

    model: Callable[[], nn.Module]
    mesh: Mapping[str, int]
    options: Options


CASES = {
    "megatron": Case(llama, MESH, Options(cluster="h100", constraints=MEGATRON, symbolic=True)),
    "free": Case(gpt2, MESH, Options(cluster="ideal", symbolic=True)),
    "again": Case(llama, MESH, Options(cluster="ideal", micro_batches=2, recompute="full", symbolic=True)),
    "selective": Case(partial(gpt2, n_head=8), {"dp": 4}, SELECTIVE),
    "inference": Case(llama, MESH, Options(cluster="ideal", objective="infer", symbolic=True)),
    "scan": Case(SCANS["mamba"], MESH, Options(cluster="h100", constraints=SCANNED, symbolic=True)),
    "two nodes": Case(llama, {"dp": 4, "tp": 4}, Options(cluster="h100", constraints=MEGATRON, symbolic=True)),
}
SLOW = ("free", "again", "selective", "inference", "scan", "two nodes")
EVERY = ["megatron", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


def batch_of(case: Case, batch: int, sequence: int) -> dict[str, object]:
    """Token ids, and labels to train on."""
    ids = torch.empty(batch, sequence, dtype=torch.long, device="meta")
    return {"input_ids": ids} if case.options.objective == "infer" else {"input_ids": ids, "labels": ids}


@pytest.fixture(scope="module")
def compiled() -> Callable[[str], PlannedModel]:
    """A function that compiles a case once and returns the result."""
    done: dict[str, PlannedModel] = {}

    def get(name: str) -> PlannedModel:
        if name not in done:
            case = CASES[name]
            model = case.model()
            request = make_request(case.mesh, case.options)
            done[name] = plan_model(model, read_model(model, batch_of(case, *SIZES), request), request)
        return done[name]

    return get


def formulas(plan: Plan, **sizes: int) -> tuple[float, float]:
    """Bytes and seconds by the formulas, at the planned sizes but for some."""
    found = plan.expressions
    assert found is not None
    assert set(sizes) <= set(found.sizes)
    at = {**found.sizes, **sizes}
    return formula_at(found.memory, at), formula_at(found.step_time, at)


def planned_at(
    case: Case, done: PlannedModel, batch: int, sequence: int, mesh: Mapping[str, int]
) -> tuple[float, float]:
    """Bytes (by blocks) and seconds of planning at other sizes with the same decisions: held as calls of other sizes
    hold them, or on another mesh taken by their names."""
    model = case.model()
    request = make_request(mesh, replace(case.options, constraints=None))
    info = read_model(model, batch_of(case, batch, sequence), request)
    name = request.objective
    program = normalize(capture(model, info.inputs, tracing(model, info, request, name)))
    decisions = decisions_of(done.plan.programs[name], request.mesh)
    if mesh == case.mesh:
        decisions = replace(decisions, methods=None, strategies=done.decided[name], stored=done.stored)
    space = replace(request.space(info.casts(request.precision), decisions), memory_limit=float("inf"))
    found = search(program, space, StepMemory(info, request), Clock())
    use = memory_use(found.problem, found.solution, space.optimizer_states)
    return use.peak, found.seconds.total


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_formulas_give_the_plan(compiled: Callable[[str], PlannedModel], name: str) -> None:
    """At the planned sizes they are the plan's figures, also as expressions of sympy, and after saving."""
    plan = Plan.from_json(compiled(name).plan.to_json())
    assert plan == compiled(name).plan
    expected = planned_at(CASES[name], compiled(name), *SIZES, CASES[name].mesh)
    assert expected[1] == pytest.approx(sum(plan.programs[plan.objective].seconds.values()), rel=EXACT)
    assert formulas(plan) == pytest.approx(expected, rel=EXACT)
    assert plan.expressions is not None
    for expression, figure in zip((plan.memory_expression(), plan.step_time_expression()), expected, strict=True):
        assert {str(symbol) for symbol in expression.free_symbols} <= set(plan.expressions.sizes)
        assert float(expression.subs(dict(plan.expressions.sizes))) == pytest.approx(figure, rel=EXACT)


@pytest.mark.long
@pytest.mark.parametrize("name", EVERY)
def test_formulas_give_other_batches_and_sequences(compiled: Callable[[str], PlannedModel], name: str) -> None:
    """At sizes that all splits divide they are what planning there with the same decisions predicts."""
    case, done = CASES[name], compiled(name)
    assert done.plan.expressions is not None
    step = done.plan.expressions.batch_step
    for batch, sequence in ((3 * step, 16), (8, 32), (16 * step, 24), (512 * step, 32))[: 4 if name in SLOW else 2]:
        expected = planned_at(case, done, batch, sequence, case.mesh)
        assert formulas(done.plan, batch=batch, sequence=sequence) == pytest.approx(expected, rel=EXACT), (
            batch,
            sequence,
        )
        assert expected != formulas(done.plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("megatron", {"dp": 4, "tp": 2}),
        ("selective", {"dp": 2}),
        ("selective", {"dp": 8}),
    ],
)
def test_formulas_give_other_axis_sizes(
    compiled: Callable[[str], PlannedModel], name: str, mesh: Mapping[str, int]
) -> None:
    """On axes of other sizes they are what planning there with the same methods predicts."""
    case, done = CASES[name], compiled(name)
    expected = planned_at(case, done, *SIZES, mesh)
    assert expected != formulas(done.plan)
    assert formulas(done.plan, **mesh) == pytest.approx(expected, rel=EXACT)


@pytest.mark.slow
def test_axes_across_nodes_are_numbers_in_seconds(compiled: Callable[[str], PlannedModel]) -> None:
    """The nodes of groups have no formula; memory does not depend on them."""
    plan = compiled("two nodes").plan
    names = {str(symbol) for symbol in plan.step_time_expression().free_symbols}
    assert names == {"batch", "sequence"}
    assert {"dp", "tp"} <= {str(symbol) for symbol in plan.memory_expression().free_symbols}


@pytest.mark.long
@pytest.mark.parametrize("name", ["megatron", pytest.param("again", marks=pytest.mark.slow)])
def test_the_largest_batch_fits_and_the_next_does_not(compiled: Callable[[str], PlannedModel], name: str) -> None:
    """Planned at that batch with the same decisions the memory is within the limit, at the next one above it."""
    case, done = CASES[name], compiled(name)
    needed, _ = formulas(done.plan)
    plan = replace(done.plan, memory_limit=6.5 * needed)
    assert plan.expressions is not None
    largest, step = plan.max_batch(), plan.expressions.batch_step
    assert largest % step == 0
    assert largest > SIZES[0]
    assert planned_at(case, done, largest, SIZES[1], case.mesh)[0] <= plan.memory_limit
    assert planned_at(case, done, largest + step, SIZES[1], case.mesh)[0] > plan.memory_limit


def test_formulas_are_made_where_asked() -> None:
    """Other plans say how to get them."""
    plan = autopar.plan(nn.Linear(4, 4), {"dp": 2}, {"input": torch.empty(4, 4)}, cluster="cpu")
    for ask in (plan.memory_expression, plan.step_time_expression, plan.max_batch):
        with pytest.raises(ExpressionError, match="plan with symbolic=True"):
            ask()


def test_other_inputs_have_sizes_of_their_own() -> None:
    """A first dim that is not the batch is called after its input; one sample is no size that may vary."""

    class Pair(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
            return (x @ y).sum() + z.sum()

    inputs = {"x": torch.empty(6, 8), "z": torch.empty(6, 2), "y": torch.empty(8, 6)}
    plan = autopar.plan(Pair(), {"dp": 2}, inputs, cluster="ideal", objective="infer", symbolic=True)
    assert plan.expressions is not None
    assert plan.expressions.sizes == {"batch": 6, "dp": 2}


def test_axes_are_not_called_like_sizes() -> None:
    """An axis called batch could not be told from the batch."""
    with pytest.raises(ExpressionError, match="an axis called 'batch'"):
        autopar.plan(nn.Linear(4, 4), {"batch": 2}, {"input": torch.empty(4, 4)}, cluster="cpu", symbolic=True)
