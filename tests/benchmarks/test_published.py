"""Published runs replayed: what is read, converted, left out, predicted, and how it is scored."""

import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.calibrate import FITTED, fit, named_runs
from benchmarks.models import GPT, LLAMA, QWEN3, Dimensions, find_family
from benchmarks.published import DATA, Predictions, as_json, plan_all, predict_all
from benchmarks.replay.clusters import cluster_of, devices_per_card, network_bandwidth
from benchmarks.replay.compose import UPDATE_BYTES, step_time, update_bytes
from benchmarks.replay.flops import CONVENTIONS, formula
from benchmarks.replay.graphs import TRACED, multiplications, trace
from benchmarks.replay.parts import parameter_elements, parts_of
from benchmarks.replay.predict import Replayed, forced_of, predict, replayed
from benchmarks.replay.reasons import Reason, SkippedError
from benchmarks.replay.records import RecordsError, read_records, read_run
from benchmarks.replay.scores import percentile, ranks, repeated, score, spearman
from benchmarks.replay.software import PRODUCT, Knowledge, Software, find_row, find_software
from passes.cost.devices import TRAINING

ROOT = Path(__file__).parents[2]
FEW = (
    "korth-layer22B-sel+sp",
    "mosaic-h100_80gb-7b-s2048-n128-amp_bf16-m6-noac",
    "simumax-llama3_70b_tp2_pp1_dp4_l12_mbc8_cef",
    "zb-6.2B-1F1B-m24",
)


def records() -> dict[str, dict[str, object]]:
    return {str(item["id"]): dict(item) for item in read_records(DATA)}


def by_formulas(name: str) -> Replayed:
    """A run as the calibration predicts it."""
    run = read_run(records()[name], name)
    key, cluster = cluster_of(run)
    return replayed(run, key, cluster, *forced_of(run, key))


NAMES = list(FEW[:2])


@pytest.fixture(scope="module")
def found() -> Predictions:
    """One run each of a layer alone and of FSDP; one of an unknown device, and one that cannot be read."""
    few = [records()[name] for name in NAMES]
    return predict_all([*few, {**few[0], "id": "unknown", "hardware": {"gpu": "Z9", "count": 8}}, {"id": "empty"}])


@pytest.mark.long
def test_few_runs_are_predicted(found: Predictions) -> None:
    """The product's steps are near what was measured."""
    assert [name for name, _ in found.left] == ["unknown", "empty"]
    for items in found.scored.values():
        assert [item.run.id for item in items] == NAMES
        for item in items:
            assert item.error is not None
            assert abs(item.error) < 0.15
            assert abs(item.flops_apart) <= 0.011
    # FSDP gathers the twelve parameters of a layer again, whichever pattern its constraints are of.
    plan = found.scored[Knowledge.ALL][1].plan
    assert plan is not None
    assert (plan.gather_once, plan.reduce_once, len(plan.stages[0].regathered)) == (False, False, 12)


@pytest.mark.slow
def test_a_run_in_stages_is_predicted() -> None:
    """The step of a run with a pipeline is near what was measured."""
    for items in predict_all([records()[FEW[3]]]).scored.values():
        (item,) = items
        assert item.error is not None
        assert abs(item.error) < 0.15
        assert abs(item.flops_apart) <= 0.011


@pytest.mark.slow
def test_facts_bring_memory_nearer() -> None:
    """A run with tensor parallelism and ZeRO-1, which gathers and reduces once, of software that fuses kernels."""
    found = predict_all([records()[FEW[2]]])
    (told,), (as_it_is,) = (found.scored[knowledge] for knowledge in (Knowledge.ALL, Knowledge.NOTHING))
    assert told.plan is not None
    assert told.plan.gather_once
    assert told.plan.reduce_once
    assert told.memory_error is not None
    assert as_it_is.memory_error is not None
    assert abs(told.memory_error) < abs(as_it_is.memory_error) < 0.1


def test_a_run_is_told_as_much_as_it_is_to_know() -> None:
    """Nothing but the plan and the model; all but what has no source; or all."""
    record = records()["torchtune-3.2-3b-+compile"]
    nothing, sourced, every = (read_run(record, "x", knowledge).software for knowledge in Knowledge)
    assert nothing == replace(PRODUCT, compiled=True, reduced_bytes=every.reduced_bytes)
    assert (sourced.sample, sourced.loss_copies) == (every.sample, PRODUCT.loss_copies)
    assert every.loss_copies != PRODUCT.loss_copies
    slow = read_run(records()["bloom-sweep-118"], "x", Knowledge.SOURCED).software
    assert (slow.slower, slow.host) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("torchtune-3.2-3b-+act offload", Reason.OFFLOADED), ("internevo-mem-7B-3-tp1pp1fsdp1", Reason.UNEVEN)],
)
def test_plans_that_the_product_does_not_offer_are_left_out(name: str, reason: Reason) -> None:
    ((_, error),) = predict_all([records()[name]]).left
    assert error.reason is reason


@pytest.mark.slow
def test_free_plans_are_never_slower() -> None:
    """The published plan is among the choices; eight devices with all freedom need no more than it takes."""
    found = predict_all([records()[FEW[2]]])
    (planned,) = plan_all(found.scored[Knowledge.NOTHING])
    assert planned.seconds <= planned.published
    assert bool(planned.changes) == (planned.gain > 0)


def test_traffic_of_parameters_is_hidden_where_software_does_so() -> None:
    """FSDP gathers and reduces beside computation; ZeRO-3 of 2021 did not, and did so tensor by tensor."""
    run = read_run(records()[FEW[1]], FEW[1])
    key, cluster = cluster_of(run)
    parts = parts_of(forced_of(run, key)[0], cluster, run.software.compiled)

    def data(software: Software) -> float:
        return step_time(replace(run, software=software), parts, cluster, False).data

    waiting, apart = replace(run.software, prefetches=False), replace(run.software, coalesces=False)
    assert data(run.software) < data(waiting) / 3
    assert data(replace(waiting, coalesces=False)) > data(waiting)
    assert data(apart) > data(run.software)
    # Four matrices of attention and three of the MLP, or four where projections are fused.
    assert parts.layer.tensors in (4, 7)
    old = find_software("Narayanan et al. 2021", "fp16", "")
    assert (old.prefetches, old.coalesces) == (False, False)


def test_gradients_of_micro_batches_are_added_up() -> None:
    """In two bytes from the second on, by reading two and writing one; in four from the first on, from those of two."""
    run = read_run(records()["bloom-sweep-118"], "x")
    parallel = replace(run.parallel, shards=1)
    one = replace(run, micro_batches=1, parallel=parallel)
    assert update_bytes(one, 10.0) == 10 * UPDATE_BYTES
    assert update_bytes(replace(one, micro_batches=3), 10.0) == 10 * UPDATE_BYTES + 2 * 10 * 6
    wide = replace(one, software=find_software("BLOOM", "bf16 (fp32 grad accumulation)", ""))
    assert (wide.software.reduced_bytes, wide.software.all_reduces) == (4, True)
    assert update_bytes(replace(wide, micro_batches=3), 10.0) == 10 * UPDATE_BYTES + 3 * 10 * 10
    fused = replace(one, micro_batches=3, software=replace(one.software, adds=False))
    assert update_bytes(fused, 10.0) == 10 * UPDATE_BYTES
    pure = replace(fused, precision="bf16 (pure)")
    assert update_bytes(pure, 10.0) == 10 * 14


@pytest.mark.parametrize(
    ("name", "bytes_each"),
    [
        # Parameters and gradients in two bytes; states, gradients in float32 and two temporaries of 4 each.
        ("internevo-mem-7B-4-tp1pp1fsdp1", 2 + 2 + 3 * 4 + 4 + 2 * 4),
        # Gradients in two bytes are gone by then.
        ("internevo-mem-7B-4-tp4pp1fsdp0", 2 + 3 * 4 + 4 + 2 * 4),
    ],
)
def test_the_step_of_an_optimizer_may_take_most(name: str, bytes_each: int) -> None:
    """The optimizer step may take most if AdamW is not fused and gradients are cast."""
    item = by_formulas(name)
    assert item.predicted_memory is not None
    forced = forced_of(item.run, item.cluster)[0]
    layer, outside = parameter_elements(forced)
    elements = (item.run.dimensions.layers * layer + outside) / item.run.parallel.shards
    reserve = cluster_of(item.run)[1].device.reserve
    assert item.predicted_memory == pytest.approx(bytes_each * elements + reserve)
    assert item.memory_error is not None
    assert abs(item.memory_error) < 0.16


@pytest.mark.long
def test_json_says_what_it_must(found: Predictions) -> None:
    """Records that are predicted, one that is not scored, and those that are left out, with reasons."""
    printed = json.loads(json.dumps(as_json(found)))
    keys = {
        "records",
        "predicted",
        "skipped",
        "median_step_time_error",
        "p90_step_time_error",
        "median_memory_error",
        "spearman",
    }
    assert set(printed) == {*keys, "as_is", "sourced_only", "unscored"}
    assert set(printed["as_is"]) == set(printed["sourced_only"]) == keys
    assert printed["records"] == 4
    assert [item["id"] for item in printed["predicted"]] == NAMES
    assert printed["unscored"] == []
    reasons = {item["id"]: item["reason"] for item in printed["skipped"]}
    assert reasons == {"unknown": Reason.DEVICE.value, "empty": Reason.MALFORMED.value}


@pytest.mark.slow
def test_the_script_prints_what_it_predicts(tmp_path: Path) -> None:
    """As data, of the records of a file."""
    path = tmp_path / "runs.json"
    path.write_text(json.dumps([records()[FEW[0]], {"id": "empty"}]))
    command = [sys.executable, str(ROOT / "benchmarks" / "published.py"), "--json", "--data", str(path)]
    printed = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    assert [item["id"] for item in printed["predicted"]] == [FEW[0]]
    assert [item["id"] for item in printed["skipped"]] == ["empty"]


def test_every_reason_is_one_of_the_fixed_set() -> None:
    nothing: dict[Knowledge, list[Replayed]] = {knowledge: [] for knowledge in Knowledge}
    found = Predictions(nothing, [("x", SkippedError(Reason.PLAN, "no micro_batch"))])
    assert set(as_json(found)["skipped"][0]) == {  # type: ignore[index]
        "id",
        "reason",
        "detail",
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"precision": "fp8"}, Reason.PRECISION),
        ({"micro_batch": None}, Reason.PLAN),
        ({"micro_batch": "many"}, Reason.MALFORMED),
        ({"model": None}, Reason.MALFORMED),
        ({"tier": "C"}, Reason.FORMULA),
        ({"iter_time_s": None}, Reason.NOT_MEASURED),
        ({"iter_time_s": float("nan")}, Reason.MALFORMED),
        ({"parallel": {"tp": 4, "pp": 1, "cp": 1, "dp": 1}}, Reason.INCONSISTENT),
        ({"hardware": {"count": 8}}, Reason.DEVICE),
    ],
)
def test_what_cannot_be_replayed_says_why(changes: Mapping[str, object], reason: Reason) -> None:
    record = {**records()[FEW[0]], **changes}
    with pytest.raises(SkippedError) as caught:
        predict(record, "changed")
    assert caught.value.reason is reason


# What files that others write may hold in place of any field.
_ODD = (
    None,
    float("nan"),
    float("inf"),
    0,
    -1,
    "",
    "abc",
    [],
    {"a": 1},
    True,
    1.5,
    10**30,
    "0x100Gb",
    "FSDP over 0",
    "0 layer",
)


@pytest.mark.parametrize("name", ["korth-layer22B-sel+sp", "zb-6.2B-1F1B-m24", "torchtune-3.2-3b-qlora"])
def test_odd_fields_are_predicted_or_left_out(name: str) -> None:
    """With any value in any one field, the record is read or left out for one of the reasons."""
    record = records()[name]
    places: list[tuple[str, ...]] = [(key,) for key in record]
    for outer in ("model", "hardware", "parallel"):
        places += [(outer, key) for key in dict(record[outer])]  # type: ignore[call-overload]
    for place in places:
        for value in _ODD:
            changed = json.loads(json.dumps(record))
            holder = changed if len(place) == 1 else changed[place[0]]
            holder[place[-1]] = value
            with suppress(SkippedError):
                assert cluster_of(read_run(changed, "changed"))


@pytest.mark.slow
def test_the_order_of_a_file_and_the_processes_do_not_matter() -> None:
    chosen = [records()[name] for name in (FEW[0], "korth-layer22B-none", FEW[3])]
    forward, backward = as_json(predict_all(chosen)), as_json(predict_all(chosen[::-1], processes=2))
    assert forward["median_step_time_error"] == backward["median_step_time_error"]
    assert forward["predicted"] == list(reversed(backward["predicted"]))  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("text", "message"),
    [("{}", "holds a dict"), ("[", "cannot be read as JSON"), ("7", "holds a int"), (None, "cannot be read")],
)
def test_files_of_another_form_are_refused_in_a_sentence(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "runs.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(RecordsError, match=message):
        read_records(path)


def test_an_empty_file_has_no_scores(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    path.write_text("[]")
    printed = as_json(predict_all(read_records(path)))
    assert (printed["records"], printed["predicted"], printed["skipped"], printed["spearman"]) == (0, [], [], {})
    assert printed["median_step_time_error"] is None
    path.write_text('[null, "text", 3]')
    left = predict_all(read_records(path)).left
    assert [error.reason for _, error in left] == [Reason.MALFORMED] * 3


def test_the_depth_of_a_trace_does_not_matter() -> None:
    """A model traced with few layers counts the FLOPs of the whole depth, as the closed form does."""
    sizes = Dimensions("llama", 2 * TRACED + 1, 256, 8, 2, 32, 512, 1024, 128)
    counted, closed = multiplications(trace(LLAMA, sizes, 1, True, 0.0, False)), formula(LLAMA, sizes)
    assert counted.products == closed.products
    assert counted.attention == closed.attention
    assert counted.head == closed.head


def test_conventions_agree_with_their_published_formulas() -> None:
    """96 B s l h^2 (1 + s / 6h + V / 16lh) and 72 B s l h^2 (1 + s / 6h + V / 12lh) FLOPs of models with MLPs of 4h."""
    s, layers, h, vocab = 2048, 24, 2048, 51200
    counted = formula(GPT, Dimensions("GPT", layers, h, 16, 16, 128, 4 * h, vocab, s))
    recomputing = 96 * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))
    model = 72 * s * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h))
    assert CONVENTIONS["hardware_full_recompute"].flops(counted) == pytest.approx(recomputing)
    assert CONVENTIONS["model_noncausal"].flops(counted) == pytest.approx(model)
    causal = CONVENTIONS["model_causal"].flops(counted)
    assert model - causal == pytest.approx(6 * layers * h * s * s)


def test_families_are_found_by_name_and_by_dimensions() -> None:
    gated = Dimensions("", 2, 4096, 32, 8, 128, 14336, 32000, 2048)
    plain = Dimensions("", 2, 4096, 32, 32, 128, 16384, 32000, 2048)
    assert find_family(gated) is LLAMA
    assert find_family(plain) is GPT
    assert find_family(Dimensions("Qwen3 8B", 2, 4096, 32, 8, 128, 12288, 151936, 2048)) is QWEN3
    assert find_family(Dimensions("GPT-X", 2, 4096, 32, 8, 128, 16384, 32000, 2048)) is None


def test_networks_are_read_from_text() -> None:
    assert network_bandwidth("NVLink3 + 4x100Gb OPA/node (Jean Zay)", 8) == pytest.approx(6.25e9)
    assert network_bandwidth("NVLink4+NDR400/GPU (DGX H100)", 8) == pytest.approx(50e9)
    assert network_bandwidth("A100 80GB with 1600 Gbps node-node interconnect (RoCE)", 8) == pytest.approx(25e9)
    assert network_bandwidth("NVLink5", 8) is None


def test_zero_stages_are_read_from_what_sources_write() -> None:
    record = records()["internevo-tp2-z4-32"]
    parallel = read_run(record, "x").parallel
    assert (parallel.zero, parallel.shards) == (1, 4)
    record["parallel"] = {**dict(record["parallel"]), "zero": "Megatron-FSDP over 8"}  # type: ignore[call-overload]
    parallel = read_run(record, "x").parallel
    assert (parallel.zero, parallel.shards) == (3, 8)


def test_a_network_that_was_measured_counts_as_it_was() -> None:
    """Two devices share a card at Jean Zay; what the source measured is below what its cards could do."""
    run = read_run(records()["bloom-sweep-117"], "x")
    assert devices_per_card(run.interconnect, 8) == 2
    assert devices_per_card("NVLink5", 8) == 1
    between = cluster_of(run)[1].between
    assert between.bandwidth * between.efficiency * 8 == pytest.approx(135e9 / 8)


def test_stages_that_exchange_at_once_wait_half_as_long() -> None:
    run = read_run(records()["bloom-sweep-118"], "x")
    key, cluster = cluster_of(run)
    parts = parts_of(forced_of(run, key)[0], cluster, run.software.compiled)

    def bubble(software: Software) -> float:
        return step_time(replace(run, software=software), parts, cluster, False).bubble

    assert not run.software.exchanges
    assert bubble(replace(run.software, exchanges=True)) < bubble(run.software)
    slower = step_time(replace(run, software=replace(run.software, slower=1.1)), parts, cluster, False)
    assert slower.total == pytest.approx(1.1 * step_time(run, parts, cluster, False).total)


def test_rows_of_torchtune_add_one_technique_each() -> None:
    software = find_software("pytorch/torchtune README.md", "bf16 (pure)", "")
    rows = {name: find_row(software, name) for name in ("baseline", "+packed", "+compile", "+act offload", "qlora")}
    assert [row.packed for row in rows.values()] == [False, True, True, True, True]
    assert [row.compiled for row in rows.values()] == [False, False, True, True, True]
    assert [row.offloads for row in rows.values()] == [False, False, False, True, True]
    assert [row.optimizer_in_backward for row in rows.values()] == [False, False, False, True, False]
    assert rows["+compile"].loss_copies > rows["+act offload"].loss_copies
    assert find_row(software, "") is software


def test_samples_that_are_packed_are_shorter_than_sequences() -> None:
    """As many tokens, of which none attends beyond its sample; without packing as many steps of short samples."""
    known = records()
    packed, whole = (read_run(known[f"torchtune-3.2-3b-{row}"], row) for row in ("+packed", "baseline"))
    assert (packed.dimensions.sequence, packed.micro_batch, packed.repeats) == (128, 64, 1)
    assert (whole.dimensions.sequence, whole.micro_batch, whole.repeats) == (128, 2, 32)
    assert packed.tokens == whole.tokens == 2 * 4096


@pytest.mark.long
def test_records_that_are_equal_bound_the_correlation() -> None:
    """Three equal plans on the same days differ by 1%; no function of the records tells them apart."""
    names = ("bloom-sweep-040", "bloom-sweep-053", "bloom-sweep-056", "bloom-sweep-039")
    count, apart, most = repeated([by_formulas(name) for name in names])["bloom_sweep"]
    assert count == 3
    assert 0.01 < apart < 0.02
    assert most == pytest.approx(spearman([3, 2, 1, 0], [1, 1, 1, 0]))


def test_scores_of_known_lists() -> None:
    assert ranks([3.0, 1.0, 3.0]) == [1.5, 0.0, 1.5]
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1.0)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    assert percentile([0.0, 1.0, 2.0], 0.9) == pytest.approx(1.8)


def test_calibrations_name_four_runs_at_most_that_exist() -> None:
    known = records()
    for device, runs in named_runs().items():
        assert device in TRAINING
        assert 1 <= len(runs) <= 4
        assert all(name in known for name in runs)


@pytest.mark.slow
@pytest.mark.parametrize("device", sorted(TRAINING))
def test_calibrated_figures_are_those_that_the_fit_gives(device: str) -> None:
    """From where they are frozen, the fit moves them by less than 3%."""
    figures = fit(named_runs()[device]).figures
    for name, frozen in zip(FITTED, TRAINING[device], strict=True):
        assert figures[name] == pytest.approx(frozen, rel=0.03)


@pytest.mark.slow
def test_all_runs_are_predicted_within_the_aims() -> None:
    """Step times with facts within 5% and 15%, as it is within 10%; what is left out is not for want of a plan."""
    found = predict_all(read_records(DATA))
    told, as_it_is = (score(found.scored[knowledge]) for knowledge in (Knowledge.ALL, Knowledge.NOTHING))
    assert found.count == 503
    assert told.median_step_time is not None
    assert told.p90_step_time is not None
    assert as_it_is.median_step_time is not None
    assert told.median_step_time <= 0.05
    assert told.p90_step_time <= 0.15
    assert as_it_is.median_step_time <= 0.10
    known = records()
    for name, error in found.left:
        record = known[name]
        model = dict(record["model"])  # type: ignore[call-overload]
        half = str(record["precision"]).startswith(("bf16", "fp16", "amp_bf16"))
        # What no plan offers, and what is wrong with the record.
        known_reasons = (Reason.OFFLOADED, Reason.UNEVEN, Reason.INCONSISTENT, Reason.NOT_MEASURED)
        offered = error.reason not in known_reasons
        assert not (record["tier"] == "A" and half and not model.get("moe_experts") and offered), name
