"""Lower bounds on bytes hold for all strategies on meshes of any shape."""

from dataclasses import replace

import pytest

from autopar.models.info import read_model, tracing
from autopar.options import Options
from autopar.request import make_request
from passes.capture import capture
from passes.clock import Clock
from passes.cost.cluster import CLUSTERS
from passes.ir.decisions import Decisions
from passes.ir.levels import level_items
from passes.ir.mesh import Mesh
from passes.normalize import normalize
from passes.search.configurations import limited_configurations
from passes.search.least_memory import LeastMemory
from passes.search.pipelines.bounds import PipelineBounds
from passes.search.subproblems import MicroBatchPrograms, Subproblems
from passes.solve import solve
from tests.architectures import ARCHITECTURES

FAST = ("bloom", "vit")
MESHES = (Mesh(("a",), (2,)), Mesh(("a", "b"), (2, 4)), Mesh(("a", "b"), (3, 2)))


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FAST else pytest.mark.slow)
        for name, item in ARCHITECTURES.items()
        if not item.extra
    ],
)
def test_no_strategies_take_less(name: str) -> None:
    """At every level of recompute and ZeRO stage, with one micro-batch in flight and with three."""
    stock = ARCHITECTURES[name]
    model, inputs = stock.make(), stock.inputs(12)
    request = make_request(2, Options(cluster=CLUSTERS["h100"]))
    info = read_model(model, inputs, request)
    program = normalize(capture(model, info.inputs, tracing(model, info, request, "train")))
    given = request.space(info.casts(request.precision), Decisions())
    parts = []
    for in_flight in (1, 3):
        space = replace(given, any_shape=False, in_flight=in_flight)
        subproblems = Subproblems(MicroBatchPrograms(program, space, Clock()), space, Clock(), float("inf"))
        least = LeastMemory(subproblems)
        count = 1 if subproblems.programs.of(4, is_given=False) is None else 4
        for mesh in MESHES:
            relaxed = subproblems.relaxed(mesh, count)
            assert relaxed is not None
            for configuration in limited_configurations(space, mesh, count, relaxed.program.folded):
                every = subproblems.limited(relaxed, configuration).solver.instance.every
                taken, bound = float(every.least_totals().max()), least.bytes(configuration)
                assert bound <= taken * (1 + 1e-9), configuration
                parts.append(bound / taken)
    # It is near to what is taken where all of the tensors can be split.
    assert max(parts) > 0.5


@pytest.mark.long
@pytest.mark.parametrize("name", ["bloom", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "t5"))])
def test_levels_are_not_refused_below_their_seconds(name: str) -> None:
    """No level of recompute is left out for a limit that its best choice without memory limit keeps."""
    stock = ARCHITECTURES[name]
    model, inputs, mesh = stock.make(), stock.inputs(12), Mesh(("a", "b"), (2, 3))
    request = make_request(6, Options(cluster=CLUSTERS["h100"]))
    info = read_model(model, inputs, request)
    program = normalize(capture(model, info.inputs, tracing(model, info, request, "train")))
    given = request.space(info.casts(request.precision), Decisions())
    space = replace(given, any_shape=False, mesh=mesh, micro_batches=2, some_copies=False, memory_limit=1e15)
    subproblems = Subproblems(MicroBatchPrograms(program, space, Clock()), space, Clock(), 1e15)
    bounds, relaxed = PipelineBounds(subproblems, LeastMemory(subproblems)), subproblems.relaxed(mesh, 2)
    assert relaxed is not None
    assert bounds.narrowed(space, 0.0).space is None
    for configuration in limited_configurations(space, mesh, 2, relaxed.program.folded):
        best = solve(relaxed.problem, space.cluster, subproblems.limits(configuration), configuration)
        found = bounds.narrowed(space, best.seconds * (1 + 1e-9)).space
        assert found is not None
        assert level_items(configuration.recompute) not in found.refused
