"""Stock models with the sequence of attention split, against one device in float64."""

import re
from collections.abc import Callable, Mapping
from math import prod

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    ModernBertConfig,
    ModernBertForMaskedLM,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import autopar
from benchmarks.context import methods_of
from tests.autopar.comparing import exact
from tests.autopar.plans.test_dynamic_shapes import on_ranks
from tests.autopar.test_other_inputs import off
from tests.models import MODELS, bloom, gemma2, gpt2, gpt_oss, llama, mistral, t5, tokens

ATTENTION = "@scaled_dot_product_attention"


def _queries(**axes: str) -> dict[str, dict[str, dict[str, str]]]:
    return {ATTENTION: {"out": axes}}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "mesh", "axes"),
    [
        pytest.param("llama", "2", {"dp": "S(2)"}, marks=pytest.mark.slow),
        pytest.param("llama", "2", {"dp": "S(2, 8)"}, marks=pytest.mark.slow),
        ("gpt2", "2x2", {"dp": "S(2)", "tp": "S(2, 2)"}),
        pytest.param("llama", "4", {"tp": "S(2)"}, marks=pytest.mark.slow),
        pytest.param("qwen3", "4", {"tp": "S(2, 4)"}, marks=pytest.mark.slow),
        pytest.param("llama", "2x2", {"dp": "S(2)", "tp": "S(1)"}, marks=pytest.mark.slow),
        pytest.param("qwen3", "2x2", {"dp": "S(2, 4)", "tp": "S(2, 8)"}, marks=pytest.mark.slow),
        pytest.param("gpt2", "2x2x2", {"dp": "S(0)", "cp": "S(2)", "tp": "S(1)"}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_split_queries(name: str, mesh: str, axes: dict[str, str], recompute: str) -> None:
    """In order and in stripes, on one axis and on two, beside split heads and samples."""
    exact(MODELS[name]().double(), mesh, tokens(), constraints=_queries(**axes), recompute=recompute)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "mesh", "methods"),
    [
        pytest.param("llama", "2", {"dp": "ring"}, marks=pytest.mark.slow),
        pytest.param("gpt2", "4", {"tp": "ring@4"}, marks=pytest.mark.slow),
        ("qwen3", "2x2", {"dp": "ring", "tp": "ring@2"}),
        pytest.param("llama", "2", {"dp": "ring@8"}, marks=pytest.mark.slow),
        pytest.param("llama", "2x2", {"dp": "ring@4", "tp": "ring@8"}, marks=pytest.mark.slow),
        pytest.param("qwen3", "2x2", {"dp": "ring", "tp": "heads"}, marks=pytest.mark.slow),
        pytest.param("llama", "2x2", {"dp": "ring", "tp": "queries"}, marks=pytest.mark.slow),
        pytest.param("qwen3", "2x2", {"dp": "queries", "tp": "ring"}, marks=pytest.mark.slow),
        pytest.param("llama", "2x2", {"dp": "queries@4", "tp": "ring@4"}, marks=pytest.mark.slow),
        pytest.param("llama", "2x2", {"dp": "ring@4", "tp": "queries@8"}, marks=pytest.mark.slow),
        pytest.param("gpt2", "2x2x2", {"dp": "heads", "cp": "ring", "tp": "queries"}, marks=pytest.mark.slow),
        pytest.param("qwen3", "2x2x2", {"dp": "queries", "cp": "groups", "tp": "ring"}, marks=pytest.mark.slow),
        pytest.param("llama", "2x2x2", {"dp": "ring", "cp": "queries", "tp": "ring"}, marks=pytest.mark.slow),
        pytest.param("gpt2", "2x2x2", {"dp": "batch", "cp": "ring", "tp": "heads"}, marks=pytest.mark.slow),
        pytest.param("llama", "2x2x2", {"dp": "batch", "cp": "ring@4", "tp": "ring@8"}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_rings(name: str, mesh: str, methods: dict[str, str], recompute: str) -> None:
    """In order and in stripes, on one axis and on two, beside split heads and samples, and queries on another axis."""
    exact(MODELS[name]().double(), mesh, tokens(), constraints={ATTENTION: {"method": methods}}, recompute=recompute)


_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}


def _gemma3() -> nn.Module:
    """Layers that alternate between a window and all keys before."""
    sizes = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4}
    kinds = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, layer_types=kinds, bos_token_id=0, eos_token_id=1))


def _bert() -> nn.Module:
    return BertForMaskedLM(BertConfig(**_SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def _modernbert() -> nn.Module:
    """Layers that alternate between a window on both sides and all keys."""
    ids = {"pad_token_id": 2, "bos_token_id": 0, "cls_token_id": 0, "eos_token_id": 1, "sep_token_id": 1}
    return ModernBertForMaskedLM(ModernBertConfig(**_SIZES, **ids, local_attention=8))


def _whisper() -> nn.Module:
    """An encoder of 16 places, and a decoder that attends to it."""
    shared = {"decoder_start_token_id": 0, "pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1, "dropout": 0.0}
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in _PART.items()}
    lengths = {"max_source_positions": 16, "max_target_positions": 32}
    config = WhisperConfig(vocab_size=64, d_model=32, num_mel_bins=8, **sizes, **lengths, **shared)
    return WhisperForConditionalGeneration(config)


_PART = {"layers": 1, "attention_heads": 4, "ffn_dim": 64}


def _packed() -> dict[str, Tensor]:
    """Two documents in a sample."""
    return {**tokens(), "position_ids": torch.cat([torch.arange(10), torch.arange(6)]).repeat(4, 1)}


def _left() -> dict[str, Tensor]:
    """Padding on the left: queries without keys."""
    found = tokens(padding=True)
    return {**found, "attention_mask": found["attention_mask"].flip(1)}


def _sound() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(4, 8, 32, generator=generator, dtype=torch.float64)
    return {"input_features": features, "labels": torch.randint(0, 64, (4, 8), generator=generator)}


Inputs = Callable[[], Mapping[str, Tensor]]
# A model that hides keys, and inputs. Shards of two ranks are of 8 tokens.
HIDING: Mapping[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "a window shorter than shards": (lambda: mistral(sliding_window=5), tokens),
    "a window longer than shards": (lambda: mistral(sliding_window=11), tokens),
    "windows in turns": (_gemma3, tokens),
    "windows on both sides and padding": (_modernbert, lambda: tokens(padding=True)),
    "causal padding": (llama, lambda: tokens(padding=True)),
    "padding on the left": (llama, _left),
    "padding": (_bert, lambda: tokens(padding=True)),
    "documents": (llama, _packed),
    "a window of documents": (mistral, _packed),
    "a window and padding": (mistral, lambda: tokens(padding=True)),
    "other keys": (_whisper, _sound),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "mesh", "methods", "recompute"),
    [
        pytest.param("a window shorter than shards", "4", {"tp": "ring"}, "none", marks=pytest.mark.slow),
        pytest.param("windows on both sides and padding", "2", {"dp": "ring"}, "none", marks=pytest.mark.slow),
        ("causal padding", "2x2", {"dp": "ring@4", "tp": "ring@8"}, "none"),
        pytest.param("padding on the left", "2", {"dp": "queries@8"}, "none", marks=pytest.mark.slow),
        pytest.param("a window of documents", "2x2", {"dp": "queries", "tp": "heads"}, "full", marks=pytest.mark.slow),
        ("a window and padding", "2x2", {"dp": "ring", "tp": "queries"}, "full"),
        ("other keys", "2", {"dp": "ring"}, "none"),
        *(
            pytest.param(name, mesh, methods, recompute, marks=pytest.mark.slow)
            for name in HIDING
            for mesh, methods in (
                ("2", {"dp": "queries"}),
                ("2", {"dp": "ring"}),
                ("4", {"tp": "ring"}),
                ("2x2", {"dp": "queries", "tp": "queries@2"}),
                ("2x2", {"dp": "ring", "tp": "ring@2"}),
                ("2x2", {"dp": "ring", "tp": "queries"}),
                ("2x2", {"dp": "queries", "tp": "ring"}),
                ("2x2", {"dp": "ring", "tp": "heads"}),
                ("2x2x2", {"dp": "batch", "cp": "ring", "tp": "heads"}),
            )
            for recompute in ("none", "full")
        ),
    ],
)
def test_hidden_keys(name: str, mesh: str, methods: dict[str, str], recompute: str) -> None:
    """In windows, padding and documents, and keys of another sequence."""
    build, inputs = HIDING[name]
    torch.manual_seed(0)
    exact(build().double(), mesh, inputs(), constraints={ATTENTION: {"method": methods}}, recompute=recompute)


# Models that write attention out, and the op that it becomes.
WRITTEN: Mapping[str, tuple[Callable[[], nn.Module], Inputs, str]] = {
    "gemma2": (gemma2, tokens, "@chunked_attention"),
    "gemma2, padded on the left": (gemma2, _left, "@chunked_attention"),
    "gpt_oss": (gpt_oss, tokens, "@chunked_attention"),
    "t5, padded": (t5, lambda: tokens(padding=True), "@chunked_attention"),
    "bloom": (bloom, tokens, "@chunked_attention"),
    "llama": (lambda: llama(attn_implementation="eager"), tokens, ATTENTION),
    "llama, padded on the left": (lambda: llama(attn_implementation="eager"), _left, "@chunked_attention"),
}
_AXES = {"2": {"dp": "queries"}, "2x2": {"dp": "queries", "tp": "heads"}}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "mesh", "objective"),
    [
        ("gemma2, padded on the left", "2x2", "train"),
        pytest.param("t5, padded", "2", "train", marks=pytest.mark.slow),
        *(
            pytest.param(name, mesh, objective, marks=pytest.mark.slow)
            for name in WRITTEN
            for mesh in _AXES
            for objective in ("train", "infer")
        ),
    ],
)
def test_attention_that_is_written_out(name: str, mesh: str, objective: str) -> None:
    """In training and inference, with queries split on an axis, and beside split heads."""
    build, inputs, op = WRITTEN[name]
    exact(build(), mesh, inputs(), constraints={op: {"method": _AXES[mesh]}}, objective=objective)


@pytest.mark.parametrize(
    ("op", "build", "inputs", "said"),
    [
        (ATTENTION, lambda: gpt2(attn_pdrop=0.25), tokens, "dropout of 0.25"),
        ("@chunked_attention", gemma2, tokens, "all keys of a query at once"),
        (ATTENTION, llama, lambda: {**tokens(), "attention_mask": _flags()}, "[4, 1, 16, 16] is for queries by keys"),
    ],
)
def test_rings_that_cannot_be_are_refused(op: str, build: Callable[[], nn.Module], inputs: Inputs, said: str) -> None:
    """In a sentence that says why the op has none."""
    with pytest.raises(autopar.ConstraintError, match=re.escape(said)):
        autopar.plan(build(), {"cp": 2}, inputs(), cluster="ideal", constraints={op: {"method": {"cp": "ring"}}})


def test_dropout_is_planned_without_a_ring() -> None:
    """A ring is refused in one sentence that names the op, the method and the reason; left free, another is planned."""
    said = (
        "constraint '@scaled_dot_product_attention', method ring on axis 'cp' cannot be met at transformer.h.*.attn/"
        "scaled_dot_product_attention: it has dropout of 0.25, which blocks cannot draw as the whole does"
    )
    model, constraints = gpt2(attn_pdrop=0.25), {ATTENTION: {"method": {"cp": "ring"}}}
    with pytest.raises(autopar.ConstraintError, match=f"^{re.escape(said)}"):
        autopar.plan(model, {"cp": 2}, tokens(), cluster="ideal", constraints=constraints)
    method = methods_of(autopar.plan(model, {"cp": 2}, tokens(), cluster="ideal"))["cp"]
    assert method in ("batch", "heads")


def _single_head(length: int) -> nn.Module:
    """Attention that only samples and the sequence can split."""
    return llama(num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=1, max_position_embeddings=length)


@pytest.mark.parametrize(
    ("axes", "length"),
    [({"a": 2, "b": 2}, 4096), ({"a": 2, "b": 2, "c": 2}, 32768)],
)
@pytest.mark.slow
def test_stripes_over_several_axes_are_planned(axes: dict[str, int], length: int) -> None:
    """Together they leave all ranks the same work. No forced plan is faster, and the plan is replayed."""
    with torch.device("meta"):
        model, ids = _single_head(length), torch.empty(1, length, dtype=torch.long)
    batch, size = {"input_ids": ids, "labels": ids}, prod(axes.values())
    plan = autopar.plan(model, axes, batch, cluster="h100")
    majors = [length // size * 2**number for number in range(len(axes))]
    assert [int(name.partition("@")[2]) for name in methods_of(plan).values()] == majors
    for forced in ({"a": "ring"}, {"b": "queries"}, {"b": f"queries@{length // 2}"}):
        other = autopar.plan(model, axes, batch, cluster="h100", constraints={ATTENTION: {"method": forced}})
        assert plan.programs["train"].step_s <= other.programs["train"].step_s * (1 + 1e-6)
    again = autopar.plan(model, axes, batch, cluster="h100", plan=autopar.Plan.from_json(plan.to_json()))
    assert methods_of(again) == methods_of(plan)
    assert again.programs["train"].step_s == pytest.approx(plan.programs["train"].step_s, rel=1e-9)


@pytest.mark.slow
def test_planned_stripes_over_two_axes_are_exact() -> None:
    """As planned, without constraints, and at other lengths."""
    found = on_ranks(_in_planned_stripes, mesh="2x2")
    assert all(not wrong for wrong in found), found


def _in_planned_stripes(mesh: DeviceMesh) -> dict[int, float]:
    model = _single_head(1024).double()
    dist_model = autopar.parallelize(model, mesh, tokens(1, 512), cluster="ideal")
    assert all("@" in name for name in methods_of(dist_model.plan).values())
    return off(dist_model, model, [tokens(1, 512), tokens(1, 256), tokens(1, 510)], True)


def _flags() -> Tensor:
    """A mask of queries by keys that is given, so that nothing is known of it."""
    return torch.ones(4, 1, 16, 16, dtype=torch.bool).tril()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["queries", "ring"])
def test_windows_at_other_sizes(method: str) -> None:
    """A plan for one length serves others, longer and shorter than the window, and other masks."""
    found = on_ranks(_other_sizes, method, mesh="2")
    assert all(not wrong for wrong in found), found


def _other_sizes(mesh: DeviceMesh, method: str) -> dict[int, float]:
    model = mistral(max_position_embeddings=64).double()
    constraints = {ATTENTION: {"method": {"dp": method}}}
    dist_model = autopar.parallelize(model, mesh, tokens(), cluster="ideal", constraints=constraints)
    packed = {**tokens(4, 24), "position_ids": torch.arange(24).remainder(9).repeat(4, 1)}
    return off(dist_model, model, [tokens(), tokens(4, 32), tokens(4, 6), tokens(4, 24, padding=True), packed], True)


@pytest.mark.slow
@pytest.mark.usefixtures("one_trace")
@pytest.mark.parametrize("method", ["ring", "queries"])
def test_formulas_of_windows(method: str) -> None:
    """They have the seconds of the plan at its sizes, and of one that is made for others."""

    def planned(length: int, **options: object) -> autopar.Plan:
        constraints = {ATTENTION: {"method": {"cp": method}}}
        return autopar.plan(mistral(max_position_embeddings=512, sliding_window=32), {"cp": 2}, tokens(2, length),
                            cluster="h100", constraints=constraints, **options)  # fmt: skip

    plan = planned(128, symbolic=True)
    assert plan.expressions is not None
    for length in (128, 256):
        at = {**plan.expressions.sizes, "sequence": length}
        seconds = sum(planned(length).programs["train"].seconds.values())
        assert float(plan.step_time_expression().subs(at)) == pytest.approx(seconds, rel=1e-6)


def _padded(length: int) -> dict[str, Tensor]:
    return tokens(1, length, padding=True)


def _restarting(length: int) -> dict[str, Tensor]:
    return {**tokens(1, length), "position_ids": torch.arange(length)[None] % 1000}


def _windows(**config: object) -> nn.Module:
    return mistral(sliding_window=256, **config)


# A model, its inputs for a length, and the methods that are fast: each hides keys in blocks of its own.
MASKED: Mapping[str, tuple[Callable[..., nn.Module], Callable[[int], dict[str, Tensor]], tuple[str, ...]]] = {
    "causal": (llama, lambda length: tokens(1, length), ("queries",)),
    "a window": (_windows, lambda length: tokens(1, length), ("heads",)),
    "padding": (llama, _padded, ("ring",)),
    "documents": (llama, _restarting, ()),
}


@pytest.mark.long
@pytest.mark.usefixtures("one_trace")
@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(name, method, marks=[] if method in fast else pytest.mark.slow)
        for name, (*_, fast) in MASKED.items()
        for method in ("queries", "ring", "heads")
    ],
)
def test_no_mask_is_made(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program has no tensor of queries by keys, whose memory would show: it grows with the sequence."""
    build, inputs, _ = MASKED[name]
    for name in ("autopar.runtime.generated.blocks.TILE", "passes.rules.attention_forms.TILE"):
        monkeypatch.setattr(name, 256)

    def peak(length: int) -> float:
        model = build(max_position_embeddings=length)
        constraints = {ATTENTION: {"method": {"cp": method}}}
        plan = autopar.plan(model, {"cp": 4 if method != "heads" else 2}, inputs(length), cluster="ideal",
                            constraints=constraints)  # fmt: skip
        return sum(plan.programs["train"].memory.values()) - plan.programs["train"].memory["parameters"]

    short, long = peak(1024), peak(4096)
    assert long < 4.2 * short


@pytest.mark.long
@pytest.mark.parametrize("method", ["queries", pytest.param("heads", marks=pytest.mark.slow)])
def test_no_scores_are_made(method: str) -> None:
    """Attention in chunks has scores of a chunk alone, of which one is there at a time."""

    def peak(length: int) -> float:
        model = gemma2(max_position_embeddings=length, sliding_window=256)
        constraints = {"@chunked_attention": {"method": {"cp": method}}}
        plan = autopar.plan(model, {"cp": 2}, tokens(1, length), cluster="ideal", constraints=constraints)
        return sum(plan.programs["train"].memory.values()) - plan.programs["train"].memory["parameters"]

    short, long = peak(1024), peak(4096)
    assert long < 4.2 * short
