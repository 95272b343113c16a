"""Bytes of published runs: what software keeps besides what its formulas say."""

from dataclasses import replace
from functools import cache

import pytest

from benchmarks.published import DATA
from benchmarks.replay.clusters import cluster_of
from benchmarks.replay.graphs import Forced
from benchmarks.replay.kept import kept_bytes
from benchmarks.replay.memory import peak_memory
from benchmarks.replay.parts import parameter_elements
from benchmarks.replay.predict import forced_of
from benchmarks.replay.records import Run, read_records, read_run
from benchmarks.replay.software import Software, find_software

LONG = "simumax-llama3_70b_l12_tp1_cp8_pp1_dp1_seq131072_mbc4_cef"
BLOOM = "bloom-sweep-034"
INTERLEAVED = "zb-6.2B-1F1B-I-m32"
SPLIT = "simumax-llama3_405b_l4_tp2_cp4_pp1_dp1_seq32768_mbc4_cef"


@cache
def forced(name: str) -> tuple[Run, Forced]:
    record = next(record for record in read_records(DATA) if record["id"] == name)
    run = read_run(record, name)
    return run, forced_of(run, cluster_of(run)[0])[0]


def peak(run: Run, graph: Forced, software: Software) -> float:
    return peak_memory(replace(run, software=software), graph, 0.0).total


@pytest.mark.parametrize("name", [LONG, SPLIT])
def test_runs_of_long_sequences_are_within_a_percent(name: str) -> None:
    """Measured by torch, so nothing but tensors is in the figure."""
    run, graph = forced(name)
    assert peak(run, graph, run.software) == pytest.approx(run.measured.memory, rel=0.01)


def test_exchanged_results_of_attention_are_kept_twice() -> None:
    """One tensor more of the size of the layer's entry, where all heads together are as wide."""
    run, graph = forced(LONG)
    assert run.parallel.context_method == "a2a"
    without = replace(run.software, keeps_exchanged=False)
    entry = 2 * 131072 // 8 * 8192
    assert peak(run, graph, run.software) - peak(run, graph, without) == 12 * entry
    gathered = replace(run, parallel=replace(run.parallel, context_method="all-gather"))
    assert peak(gathered, graph, run.software) == peak(run, graph, without)


def test_products_that_add_gradients_leave_a_tensor_for_each_weight_of_a_layer() -> None:
    """Once for all layers; the head's is there while its backward pass runs, when it needs more than the loss does."""
    run, graph = forced(LONG)
    without = replace(run.software, placeholders=False)
    layer = 2 * parameter_elements(graph)[0]
    logits, head, entry = 4 * 131072 // 8 * 128256, 2 * 128256 * 8192, 2 * 131072 // 8 * 8192
    assert peak(run, graph, run.software) - peak(run, graph, without) == layer + head
    unfused = replace(run.software, loss_copies=2.5)
    more = 2.5 * logits - (logits / 2 + entry + head)
    assert peak(run, graph, unfused) - peak(run, graph, run.software) == more


def test_what_stands_before_the_layers_is_kept_for_each_micro_batch_in_flight() -> None:
    """The operand of a norm in two bytes, and the mask of dropout in one, on the first of twelve stages."""
    run, graph = forced(BLOOM)
    assert (run.software.dropout, run.software.norms_embeddings) == (0.1, True)
    assert run.parallel.pipeline == 12
    torch_says = replace(run, measured=replace(run.measured, memory_kind="torch"))
    without = replace(run.software, norms_embeddings=False)
    assert peak(torch_says, graph, run.software) - peak(torch_says, graph, without) == 12 * 2 * 2048 * 14336
    assert kept_bytes(graph).before == 2048 * 14336


def test_gradients_under_way_are_counted_by_the_product_alone() -> None:
    """As large as what enters a layer, of as many micro-batches as there are ranks; Megatron keeps none. The fullest
    rank is not the first. A rank with one stage has none, either."""
    run, graph = forced(INTERLEAVED)
    assert not run.software.keeps_sent
    kept = replace(run.software, keeps_sent=True)
    gradients = run.parallel.chunks * run.parallel.pipeline * kept_bytes(graph).entry
    assert peak(run, graph, kept) - peak(run, graph, run.software) == pytest.approx(gradients)
    plain = replace(run, parallel=replace(run.parallel, chunks=1))
    assert peak(plain, graph, kept) == peak(plain, graph, run.software)


def test_drivers_count_what_the_allocator_has_cached_and_the_reserve() -> None:
    run, graph = forced(BLOOM)
    assert "nvidia-smi" in run.measured.memory_kind
    reserve = cluster_of(run)[1].device.reserve

    def said(kind: str) -> float:
        return peak_memory(replace(run, measured=replace(run.measured, memory_kind=kind)), graph, reserve).total

    tensors = said("torch max_allocated")
    assert said("nvidia-smi") == pytest.approx(1.04 * tensors + reserve)
    assert said("torch max_reserved") == pytest.approx(1.04 * tensors)
    assert said("nvidia-smi") == pytest.approx(run.measured.memory, rel=0.1)


def test_software_by_its_source() -> None:
    """Megatron of today, and those that compute layers with something else."""
    fused = find_software("MooreThreads/SimuMax docs/b200", "bf16", "")
    assert (fused.placeholders, fused.keeps_exchanged, fused.loss_copies) == (True, True, 0.5)
    for source in ("Zero Bubble", "InternEvo", "pytorch/torchtitan", "Korthikanti et al.", "BLOOM", "llm-foundry"):
        assert not find_software(source, "bf16", "").placeholders
    assert find_software("NVIDIA/Megatron-LM README", "bf16", "").placeholders


@pytest.mark.slow
def test_all_runs_on_eight_b200_are_within_five_percent() -> None:
    found = [record for record in read_records(DATA) if record.get("group") == "simumax_b200"]
    dense = [record for record in found if not record["model"].get("moe_experts")]  # type: ignore[attr-defined]
    assert len(dense) == 19
    for record in dense:
        run, graph = forced(str(record["id"]))
        assert peak(run, graph, run.software) == pytest.approx(run.measured.memory, rel=0.05), run.id
