"""The lower bound on the step time on a number of devices."""

import pytest

from autopar.models.huggingface import tracing
from passes.capture import Tracing, capture
from passes.constrain import constrain
from passes.cost.bound import least_by_op, least_step_s
from passes.cost.cluster import CLUSTERS
from passes.cost.walk import Optimizer
from passes.ir.configuration import Configuration
from passes.ir.folded import Folded
from passes.ir.mesh import Mesh
from passes.micro_batches import Batch
from passes.normalize import normalize
from passes.regions import fold
from passes.solve import solve
from passes.solve.limits import Limits
from passes.strategies import Setting, planning_problem
from tests.models import MODELS, tokens

STATES = 2


def _folded(name: str) -> Folded:
    model, inputs = MODELS[name](), tokens(8)
    return fold(normalize(capture(model, inputs, Tracing(True, True, tracing(model, inputs, "train")))))


@pytest.mark.parametrize(("name", "cluster"), [("llama", "h100"), ("gpt2", "cpu"), ("mistral", "h100")])
def test_no_strategy_is_below_the_bound(name: str, cluster: str) -> None:
    """Of every op, on meshes of one axis and of two; and no step is."""
    folded, known = _folded(name), CLUSTERS[cluster]
    for mesh in (Mesh(("a",), (4,)), Mesh(("a", "b"), (2, 2))):
        problem = planning_problem(folded, constrain(folded.program, {}, mesh), Setting(mesh, known, STATES))
        least = least_by_op(folded, known, mesh.size)
        assert set(least) <= {node.key for node in problem.nodes}
        for node in problem.nodes:
            assert min(node.seconds) >= least.get(node.key, 0.0) * (1 - 1e-9), node.key
        best = solve(problem, known, Limits(float("inf"), STATES), Configuration(mesh)).seconds
        bound = least_step_s(folded, known, Optimizer(STATES), mesh.size)
        assert 0.1 * best < bound <= best


def test_one_device_computes_what_the_bound_says() -> None:
    """Nothing is communicated there, so the bound is near to the step."""
    folded, known, mesh = _folded("llama"), CLUSTERS["cpu"], Mesh(("a",), (1,))
    problem = planning_problem(folded, constrain(folded.program, {}, mesh), Setting(mesh, known, STATES))
    best = solve(problem, known, Limits(float("inf"), STATES), Configuration(mesh)).seconds
    assert 0.8 * best < least_step_s(folded, known, Optimizer(STATES), 1) <= best


@pytest.mark.parametrize("name", ["gpt2", pytest.param("mistral", marks=pytest.mark.slow)])
def test_pipelines_compute_no_less_than_fewer_micro_batches(name: str) -> None:
    """m micro-batches in the ranks of p stages, on average over these, against all numbers up to m/p on all devices; op
    by op, and also where factors of an op may not be split."""
    model, inputs = MODELS[name](), tokens(8)
    program = normalize(capture(model, inputs, Tracing(True, True, tracing(model, inputs, "train"))))
    known, devices, batch = CLUSTERS["h100"], 16, Batch(program)
    counts = (1, 2, 4, 8)
    programs = {count: fold(batch.cut(count).program if count > 1 else program) for count in counts}
    for ranks, count in ((2, 2), (2, 4), (2, 8), (4, 4), (4, 8), (8, 8)):
        staged = least_by_op(programs[count], known, devices // ranks)
        for fewer in (each for each in counts if each * ranks <= count):
            together = least_by_op(programs[fewer], known, devices)
            shared = [key for key in together if key in staged]
            assert len(shared) > 0.9 * len(together)
            for key in shared:
                # Bounds are within 1e-4 of the least that they bound.
                assert count / ranks * staged[key] >= fewer * together[key] * (1 - 2e-4), (key, ranks, count, fewer)
