"""The lower bound on everything that a space offers."""

from dataclasses import replace

import pytest

from autopar.models.info import read_model, tracing
from autopar.options import Options
from autopar.request import make_request
from passes.capture import capture
from passes.clock import Clock
from passes.cost.cluster import CLUSTERS
from passes.ir.decisions import Decisions
from passes.normalize import normalize
from passes.search.choosing import searched
from passes.search.least_step import least_offered_s
from passes.search.subproblems import MicroBatchPrograms, Subproblems
from tests.architectures import ARCHITECTURES


@pytest.mark.parametrize(
    "name", ["bloom", pytest.param("llama", marks=pytest.mark.long), pytest.param("t5", marks=pytest.mark.slow)]
)
def test_no_choice_takes_less(name: str) -> None:
    """Without a memory limit and within ever less memory, where the bound rises with recompute."""
    stock = ARCHITECTURES[name]
    model, inputs = stock.make(), stock.inputs(8)
    request = make_request(4, Options(cluster=CLUSTERS["h100"]))
    info = read_model(model, inputs, request)
    program = normalize(capture(model, info.inputs, tracing(model, info, request, "train")))
    given = replace(request.space(info.casts(request.precision), Decisions()), pipeline=None)
    limit, bounds = 1e15, list[float]()
    for _ in range(3):
        space = replace(given, memory_limit=limit)
        subproblems = Subproblems(MicroBatchPrograms(program, space, Clock()), space, Clock(), limit)
        bound = least_offered_s(subproblems)
        _, progress = searched(subproblems)
        best = progress.best
        if best is None:
            break
        assert bound <= best.seconds * (1 + 1e-9)
        bounds.append(bound)
        taken = best.subproblem.solver.instance.totals(best.solution.picks, best.solution.regathered)
        limit = float(taken.max()) * 0.7
    assert bounds == sorted(bounds)
    assert bounds
