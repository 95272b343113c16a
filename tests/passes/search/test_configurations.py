"""Configurations that may be chosen on one mesh."""

from dataclasses import replace

import pytest
import torch

from autopar.models.info import read_model, tracing
from autopar.options import Options
from autopar.request import make_request
from passes.capture import capture
from passes.cost.cluster import CLUSTERS
from passes.ir.configuration import RECOMPUTE, Configuration, Staging
from passes.ir.decisions import Decisions
from passes.ir.folded import Folded
from passes.ir.mesh import Mesh
from passes.ir.program import Program
from passes.normalize import normalize
from passes.regions import fold
from passes.search import Space
from passes.search.configurations import (
    any_number,
    between,
    chooses_recompute_apart,
    configuration_text,
    is_monotone_in_micro_batches,
    is_undecided,
    limited_configurations,
    micro_batch_counts,
    numbers,
    relaxed_configuration,
)
from passes.solve import solve
from passes.solve.limits import Limits
from passes.strategies import planning_problem
from tests.models import llama, tokens


@pytest.fixture(scope="module")
def asked() -> tuple[Space, Program, Folded]:
    """The space of a tiny llama and a batch of eight, with its program, plain and folded."""
    torch.manual_seed(0)
    model = llama()
    request = make_request({"dp": 2}, Options(cluster="ideal"))
    info = read_model(model, tokens(batch=8), request)
    program = normalize(capture(model, info.inputs, tracing(model, info, request, "train")))
    space = request.space(info.casts(request.precision), Decisions())
    return replace(space, divides_copies=True), program, fold(program)


def test_micro_batches_divide_the_batch(asked: tuple[Space, Program, Folded]) -> None:
    """All numbers that divide it, fewest first; the one that is asked for; and one where nothing is trained."""
    space, program, _ = asked
    assert list(micro_batch_counts(space, program)) == [1, 2, 4, 8]
    assert list(micro_batch_counts(replace(space, micro_batches=4), program)) == [4]
    assert list(micro_batch_counts(replace(space, trains=False), program)) == [1]


def test_configurations_of_one_micro_batch_are_levels_of_recompute(asked: tuple[Space, Program, Folded]) -> None:
    """One batch in one piece has nothing to gather or reduce once; of two layers one may be recomputed fully, of more
    any number."""
    space, _, folded = asked
    configurations = list(limited_configurations(space, space.mesh, 1, folded))
    texts = [text for each in configurations for text in each.recompute.values()]
    assert texts == ["full", "ops", "selective", "none", "full:1, ops", "full:1, selective", "full:1"]
    (region,) = folded.regions
    deep = replace(folded, items=(replace(region, copies=region.copies * 5),))
    (*_, last) = limited_configurations(space, space.mesh, 1, deep)
    assert list(last.recompute.values()) == ["full:1-9"]
    assert is_undecided(last)
    assert numbers(last) == (1, 9)
    assert [list(each.recompute.values()) for each in any_number(between(last, 3, 3), deep)] == [["full:1-9"], ["none"]]
    assert any_number(configurations[0], folded) == (configurations[0],)
    assert not any(configuration.gather_once or configuration.reduce_once for configuration in configurations)
    undivided = list(limited_configurations(replace(space, divides_copies=False), space.mesh, 1, folded))
    assert undivided == configurations[:4]


def test_configurations_of_micro_batches_are_stages_of_zero_too(asked: tuple[Space, Program, Folded]) -> None:
    """Every level of recompute, of all copies or of some, with ZeRO-3, 2 and 1; no two are the same."""
    space, _, folded = asked
    configurations = list(limited_configurations(space, space.mesh, 4, folded))
    assert [(configuration.gather_once, configuration.reduce_once) for configuration in configurations[:3]] == [
        (False, False),
        (True, False),
        (True, True),
    ]
    assert len({configuration.key for configuration in configurations}) == len(configurations) == 21


@pytest.mark.parametrize(
    ("stage", "count", "timing"), [(3, 4, (False, False)), (1, 4, (True, True)), (1, 1, (True, False))]
)
def test_a_stage_of_zero_that_is_asked_for_is_the_only_one(
    asked: tuple[Space, Program, Folded], stage: int, count: int, timing: tuple[bool, bool]
) -> None:
    """It is offered for a single micro-batch too, and the relaxed configuration has it."""
    space, _, folded = asked
    space = replace(space, zero=stage)
    configurations = list(limited_configurations(space, space.mesh, count, folded))
    assert len(configurations) == 7
    for found in (*configurations, relaxed_configuration(space, space.mesh, count, folded)):
        assert (found.gather_once, found.reduce_once, found.zero) == (*timing, stage)


def test_what_is_asked_for_is_computed_again_without_limits_too(asked: tuple[Space, Program, Folded]) -> None:
    """Without limits nothing is computed again but what the request says."""
    space, _, folded = asked
    (name,) = relaxed_configuration(space, space.mesh, 2, folded).recompute
    assert relaxed_configuration(space, space.mesh, 2, folded) == Configuration(
        space.mesh, 2, {name: "none"}, True, True
    )
    full = replace(space, recompute={"*": "full"})
    assert relaxed_configuration(full, space.mesh, 1, folded) == Configuration(space.mesh, 1, {name: "full"})


@pytest.mark.parametrize("count", [1, 4])
def test_the_relaxed_configuration_bounds_all_others(asked: tuple[Space, Program, Folded], count: int) -> None:
    """Without memory limit none of as many micro-batches takes less time, with whatever layouts are best for it."""
    space, _, folded = asked
    space = replace(space, cluster=CLUSTERS["h100"])
    problem = planning_problem(folded, space.placed_constraints(folded.program, space.mesh), space.setting(space.mesh))
    limits = Limits(float("inf"), space.optimizer_states)

    def best(configuration: Configuration) -> float:
        return solve(problem, space.cluster, limits, configuration).seconds

    least = best(relaxed_configuration(space, space.mesh, count, folded))
    others = [best(configuration) for configuration in limited_configurations(space, space.mesh, count, folded)]
    assert least <= min(others) * (1 + 1e-9)


def test_pipelines_of_several_stages_are_not_monotone(
    asked: tuple[Space, Program, Folded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More micro-batches never take less time while all pipelines have one stage; every pipeline is offered."""
    space, _, folded = asked
    assert is_monotone_in_micro_batches()
    count = len(list(limited_configurations(space, space.mesh, 4, folded)))
    monkeypatch.setattr("passes.search.configurations.PIPELINES", (Staging(), Staging(2, "1f1b")))
    assert not is_monotone_in_micro_batches()
    assert len({item.key for item in limited_configurations(space, space.mesh, 4, folded)}) == 2 * count


def test_configurations_for_people() -> None:
    """The text of a configuration gives the differences from the plain one."""
    mesh = Mesh(("dp",), (2,))
    assert configuration_text(Configuration(mesh)) == ""
    assert (
        configuration_text(Configuration(mesh, 4, {"a.*": "full", "b.*": "none"}))
        == "4 micro-batches, full recompute of a.*"
    )
    some = Configuration(mesh, 1, {"a.*": "full:3, selective", "b.*": "full:2"})
    text = "full recompute of 3 copies of a.* and selective of the others, full recompute of 2 copies of b.*"
    assert configuration_text(some) == text


def test_small_regions_share_the_level_of_the_largest(asked: tuple[Space, Program, Folded]) -> None:
    """Levels of two regions are chosen one by one unless one of them has next to none of the ops."""
    space, _, folded = asked
    (region,) = folded.regions
    ops = tuple(replace(op, key=f"first/{op.key}") for op in region.ops)

    def levels(copies: int) -> set[tuple[str, ...]]:
        first = replace(region, name="first", ops=ops, copies=region.copies[:1] * copies)
        second = replace(region, copies=region.copies[:1] * 20)
        both = replace(folded, items=(first, second))
        assert chooses_recompute_apart(space, both) is (copies > 2)
        found = list(limited_configurations(space, space.mesh, 1, both))
        assert all(numbers(each) in ((0, 0), (1, 19)) for each in found)
        return {tuple(each.recompute.values()) for each in found if not is_undecided(each)}

    assert levels(2) == {(level, level) for level in RECOMPUTE}
    assert levels(3) == {(one, other) for one in RECOMPUTE for other in RECOMPUTE}
