"""Pipelines of published runs: their stages, their schedules, and what software waits for."""

from dataclasses import replace

import pytest

from benchmarks.models import GPT
from benchmarks.published import DATA
from benchmarks.replay.clusters import cluster_of
from benchmarks.replay.parts import parts_of
from benchmarks.replay.predict import forced_of, predict, stage_weights
from benchmarks.replay.product import inputs_of
from benchmarks.replay.records import Run, read_records, read_run
from benchmarks.replay.software import Knowledge
from benchmarks.replay.stages import (
    Sent,
    cuts_of,
    elements_of,
    exchanging,
    planned_schedule,
    schedule_of,
    simulated,
    stage_layers,
    step_of,
)
from passes.cost.schedules import StageSeconds

RECORDS = {str(record["id"]): record for record in read_records(DATA)}


def run_of(name: str) -> Run:
    return read_run(RECORDS[name], name)


def test_layers_are_laid_on_stages_as_pipelines_do() -> None:
    assert stage_layers(12, 4) == [3, 3, 3, 3]
    assert stage_layers(30, 8) == [3, 4, 4, 4, 4, 4, 4, 3]
    assert sum(stage_layers(31, 4)) == 31


def test_stages_that_are_filled_leave_the_rest_to_the_last() -> None:
    assert stage_layers(78, 12, fills=True) == [*[7] * 11, 1]
    assert stage_layers(72, 12, fills=True) == [6] * 12
    assert stage_layers(70, 12, fills=True) == [5, *[6] * 10, 5]


def test_stages_begin_with_layers_or_with_what_follows_them() -> None:
    """Of 22 layers on 24 stages the first has the embedding alone, and the last the head."""
    cuts = cuts_of(run_of("zb-1.5B-1F1B-I-m32"), GPT)
    assert len(cuts) == 23
    assert cuts[0] == "transformer.h.0"
    assert cuts[-2:] == ("transformer.h.21", "transformer.ln_f")


@pytest.mark.parametrize(
    ("name", "schedule", "planned"),
    [
        ("zb-6.2B-1F1B-m24", "1f1b", "1f1b"),
        ("zb-6.2B-1F1B-I-m24", "interleaved_1f1b", "interleaved_1f1b"),
        ("zb-6.2B-ZB-1p-m64", "zb_h1", "1f1b"),
        ("zb-6.2B-ZB-2p-m64", "zb_h2", "1f1b"),
        # Four micro-batches on six stages: all go forward first.
        ("internevo-mem-7B-6-tp1pp6fsdp0", "gpipe", "gpipe"),
    ],
)
def test_schedules_are_those_of_the_record(name: str, schedule: str, planned: str) -> None:
    run = run_of(name)
    assert (schedule_of(run), planned_schedule(run)) == (schedule, planned)
    pipeline = inputs_of(run, GPT, cluster_of(run)[1]).pipeline
    assert pipeline is not None
    assert pipeline.schedule == planned


def test_ranks_hold_the_parameters_of_all_their_stages() -> None:
    """With several stages or one, as many layers; embedding and head are on the first rank and the last."""
    run = run_of("zb-6.2B-1F1B-I-m24")
    forced = forced_of(run, cluster_of(run)[0])[0]
    several = elements_of(run, forced)
    one = elements_of(replace(run, parallel=replace(run.parallel, chunks=1)), forced)
    assert several == pytest.approx(one)
    assert max(several[1:-1]) == pytest.approx(min(several[1:-1]))


def test_zb_h2_has_no_bubble_where_ranks_step_apart() -> None:
    """Equal passes on four ranks: each rank works without a pause, with at most seven micro-batches in flight."""
    ranks, times = 4, 20
    seconds, sent = [StageSeconds(1.0, 1.0, 1.0)] * ranks, Sent([0.0] * 3, [0.0] * 3)
    timeline = simulated("zb_h2", ranks, times, seconds, sent)
    assert step_of(timeline, apart=True) == pytest.approx(3 * times)
    assert step_of(timeline, apart=False) == pytest.approx(3 * times + ranks - 1)
    assert timeline.in_flight == (2 * ranks - 1,) * ranks
    plain = simulated("zb_h1", ranks, times, seconds, sent)
    assert step_of(plain, apart=True) > 3 * times
    assert max(plain.in_flight) == ranks


def test_stages_wait_for_what_they_exchange() -> None:
    """Both ways of a micro-batch on inner ranks, one at either end."""
    waiting = exchanging([StageSeconds(1.0, 2.0)] * 3, 0.5)
    assert [(own.forward, own.backward) for own in waiting] == [(1.5, 2.0), (1.5, 2.5), (1.0, 2.5)]


def test_gradients_of_weights_are_less_than_half_of_a_backward_pass() -> None:
    """Of a product they are as much as those of inputs; attention and all else have none."""
    run = run_of("zb-6.2B-ZB-1p-m64")
    key, cluster = cluster_of(run)
    parts = parts_of(forced_of(run, key)[0], cluster, run.software.compiled)
    assert 0.35 * parts.layer.backward < parts.layer.weights < 0.5 * parts.layer.backward
    weights = stage_weights(run, parts)
    assert weights[1] == 4 * parts.layer.weights
    assert weights[-1] == 3 * parts.layer.weights + parts.after.weights
    assert 0 < parts.after.weights < parts.after.backward


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["zb-6.2B-ZB-1p-m64", "zb-6.2B-ZB-2p-m64", "simumax-llama3_405b_l4_tp1_pp2_dp4_mbc4_cef"]
)
def test_pipelines_are_predicted(name: str) -> None:
    """With facts: step times within 5%, memory within 10%."""
    told = predict(RECORDS[name], name)[Knowledge.ALL]
    assert told.error is not None
    assert abs(told.error) < 0.05
    assert told.memory_error is not None
    assert abs(told.memory_error) < 0.10
