"""Stock models in pipeline stages on gloo ranks equal themselves on one device: outputs, loss and every gradient."""

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import autopar
from autopar import Pipeline
from autopar.testing import compare
from passes.lower.positions import named_starts
from passes.search.pipelines import staging
from passes.search.pipelines.bounds import Narrowed, PipelineBounds
from passes.search.pipelines.memory import StageMemory
from passes.search.pipelines.staging import staged
from passes.search.space import Space
from tests.architectures import ARCHITECTURES
from tests.autopar.comparing import TOLERANCE
from tests.models import MODELS, gpt2, gpt_oss, llama, t5, tokens

pytestmark = pytest.mark.usefixtures("one_trace")

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
BIDIRECTIONAL = {"vocab_size": 64, "max_position_embeddings": 32, "hidden_dropout_prob": 0.0}


def bert() -> nn.Module:
    """Three layers, bidirectional, with a tied head."""
    torch.manual_seed(0)
    sizes = {**SIZES, **BIDIRECTIONAL, "num_hidden_layers": 3, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**sizes))


def albert() -> nn.Module:
    """Four layers that share all parameters."""
    torch.manual_seed(0)
    sizes = {
        **SIZES,
        **BIDIRECTIONAL,
        "num_hidden_layers": 4,
        "embedding_size": 16,
        "attention_probs_dropout_prob": 0.0,
    }
    return AlbertForMaskedLM(AlbertConfig(**sizes))


def vit() -> nn.Module:
    """Three layers over patches of an image."""
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": 3, "image_size": 16, "patch_size": 4, "num_labels": 5}
    return ViTForImageClassification(ViTConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def mixtral() -> nn.Module:
    """Three layers of four experts, of which two are active."""
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": 3, "num_key_value_heads": 2, "vocab_size": 64, "num_local_experts": 4}
    model = MixtralForCausalLM(MixtralConfig(**sizes))
    model.set_experts_implementation("batched_mm")
    return model


def gemma3() -> nn.Module:
    """Five layers: windows but for the third."""
    torch.manual_seed(0)
    kinds = [*["sliding_attention"] * 2, "full_attention", *["sliding_attention"] * 2]
    sizes = {**SIZES, "num_hidden_layers": 5, "num_key_value_heads": 2, "vocab_size": 64, "head_dim": 8}
    return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, sliding_window=8, layer_types=kinds))


def sequences() -> dict[str, object]:
    """Ids and labels of different lengths."""
    torch.manual_seed(0)
    return {"input_ids": torch.randint(3, 64, (4, 12)), "labels": torch.randint(3, 64, (4, 8))}


def images() -> dict[str, object]:
    """Four images of three channels."""
    torch.manual_seed(0)
    return {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.randint(0, 5, (4,))}


def deep() -> nn.Module:
    """A llama of four layers."""
    return llama(num_hidden_layers=4)


CUTS = ("model.layers.1", "model.norm/pow")
# Within layers: between attention and MLP.
WITHIN = ("model.layers.0.post_attention_layernorm", "model.layers.2.post_attention_layernorm")
ONE_LAYER = ("model.layers.1", "model.layers.1.post_attention_layernorm", "model.layers.2.post_attention_layernorm")
INTERLEAVED = Pipeline(schedule="interleaved_1f1b", virtual_stages=2)
LONG, SLOW = pytest.mark.long, pytest.mark.slow


@pytest.mark.parametrize(
    ("make", "inputs", "mesh", "options"),
    [
        pytest.param(MODELS["llama"], tokens, {"pp": 2, "dp": 2}, {}, id="llama"),
        pytest.param(gpt2, tokens, {"pp": 2, "tp": 2}, {"micro_batches": 2}, id="tied embeddings", marks=LONG),
        pytest.param(
            deep, tokens, {"pp": 2}, {"pipeline": INTERLEAVED, "micro_batches": 4}, id="interleaved", marks=SLOW
        ),
        pytest.param(t5, sequences, {"pp": 2}, {"micro_batches": 2}, id="encoder and decoder", marks=SLOW),
        pytest.param(
            deep,
            tokens,
            {"pp": 3},
            {"pipeline": Pipeline(cuts=CUTS, schedule="gpipe"), "micro_batches": 1},
            id="forced cuts, one micro-batch",
            marks=SLOW,
        ),
        pytest.param(
            deep,
            tokens,
            {"pp": 3},
            {"pipeline": Pipeline(cuts=WITHIN), "recompute": "full", "micro_batches": 4},
            id="cuts within layers",
            marks=LONG,
        ),
        pytest.param(
            deep,
            tokens,
            {"pp": 2, "dp": 2},
            {"pipeline": Pipeline(cuts=ONE_LAYER, schedule="interleaved_1f1b"), "micro_batches": 2, "zero": 3},
            id="stages within a layer, interleaved",
            marks=SLOW,
        ),
        pytest.param(
            mixtral,
            tokens,
            {"pp": 2, "dp": 2},
            {"pipeline": Pipeline(cuts=ONE_LAYER[1:2]), "recompute": "selective"},
            id="mixtral, cut within a layer",
            marks=SLOW,
        ),
        pytest.param(
            bert,
            tokens,
            {"pp": 2, "tp": 2},
            {"pipeline": Pipeline(cuts=("bert.encoder.layer.1.intermediate.dense",))},
            id="bert, cut within a layer",
            marks=SLOW,
        ),
        pytest.param(
            deep, tokens, {"pp": 2, "dp": 2}, {"recompute": "full", "micro_batches": 2}, id="recompute", marks=SLOW
        ),
        pytest.param(
            deep, tokens, {"pp": 2, "dp": 2}, {"zero": 3, "micro_batches": 2}, id="regathered for each", marks=SLOW
        ),
        pytest.param(deep, tokens, {"pp": 2, "dp": 2, "tp": 2}, {}, id="three axes", marks=SLOW),
        pytest.param(MODELS["qwen3"], tokens, {"pp": 2, "tp": 2}, {}, id="qwen3", marks=SLOW),
        pytest.param(MODELS["gemma2"], tokens, {"pp": 4}, {}, id="gemma2", marks=SLOW),
        pytest.param(gemma3, tokens, {"pp": 2, "dp": 2}, {}, id="gemma3", marks=SLOW),
        pytest.param(gpt_oss, tokens, {"pp": 2}, {"micro_batches": 2}, id="gpt_oss", marks=SLOW),
        pytest.param(mixtral, tokens, {"pp": 2, "dp": 2}, {}, id="mixtral", marks=SLOW),
        pytest.param(bert, tokens, {"pp": 4}, {}, id="bert", marks=SLOW),
        pytest.param(vit, images, {"pp": 2, "dp": 2}, {}, id="vit", marks=SLOW),
        pytest.param(albert, tokens, {"pp": 2, "dp": 2}, {}, id="shared layers", marks=SLOW),
        pytest.param(
            albert,
            tokens,
            {"pp": 2, "dp": 2},
            {"pipeline": INTERLEAVED, "micro_batches": 4},
            id="shared layers, interleaved",
            marks=SLOW,
        ),
        pytest.param(t5, sequences, {"pp": 4}, {}, id="t5 on four stages", marks=SLOW),
        pytest.param(
            deep,
            tokens,
            {"pp": 2, "cp": 2},
            {"constraints": {"@scaled_dot_product_attention": {"method": {"cp": "ring"}}}},
            id="rings in stages",
            marks=SLOW,
        ),
    ],
)
def test_stages_equal_one_device(make, inputs, mesh, options):
    """Training in stages, gradients of all parameters among them."""
    model = make()
    comparison = compare(model, mesh, inputs(), **{"cluster": "ideal", **options})
    assert comparison.worst[1] <= TOLERANCE, str(comparison)
    gradients = [item for item in comparison.errors if item.startswith("gradient of ")]
    assert len(gradients) == len(list(model.parameters()))


@pytest.mark.long
@pytest.mark.parametrize(
    "inputs",
    [
        pytest.param({**tokens(), "use_cache": False}, id="on the last stage"),
        pytest.param({"input_ids": tokens()["input_ids"], "output_hidden_states": True}, id="on all", marks=SLOW),
    ],
)
def test_inference_equals_one_device(inputs):
    """Plain calls of a module planned for inference, with outputs of several stages whole on all ranks."""
    outputs = "full" if "labels" not in inputs else "planned"
    comparison = compare(deep().eval(), {"pp": 2}, inputs, cluster="ideal", objective="infer", outputs=outputs)
    assert comparison.worst[1] <= TOLERANCE, str(comparison)


# --- plans ------------------------------------------------------------------------------------------------------------


def large(layers: int = 8) -> nn.Module:
    """A llama without values whose layers take most of the time."""
    sizes = {**SIZES, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": layers, "vocab_size": 2048}
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**sizes))


def batch(samples: int = 16, length: int = 256) -> dict[str, torch.Tensor]:
    """Ids and labels without values."""
    ids = torch.zeros(samples, length, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids}


def planned(mesh: dict[str, int] | int, model: nn.Module | None = None, **options: object) -> autopar.Plan:
    """The plan of a model on H100s."""
    return autopar.plan(model or large(), mesh, batch(), **{"cluster": "h100", **options})


@pytest.fixture(scope="module")
def plan() -> autopar.Plan:
    return planned({"pp": 4, "dp": 2}, micro_batches=8, pipeline=Pipeline(schedule="1f1b"))


@pytest.mark.long
def test_plans_are_balanced_and_printed(plan):
    """Equal layers are cut into equal parts; the plan says what each stage has, and its step adds up."""
    program = plan.programs["train"]
    assert (len(program.stages), program.ranks, program.schedule) == (4, 4, "1f1b")
    assert plan.mesh == {"pp": 4, "dp": 2}
    assert sum(stage.layers for stage in program.stages) == 8
    assert {stage.layers for stage in program.stages} <= {1, 2, 3}
    assert [stage.in_flight for stage in program.stages] == [4, 3, 2, 1]
    assert program.step_s == pytest.approx(sum(program.seconds.values()))
    busy = max(8 * (stage.forward_s + stage.backward_s) for stage in program.stages)
    assert busy < program.step_s < 1.8 * busy
    assert program.seconds["bubble"] > 0
    assert program.bound_s < program.step_s
    text = str(plan)
    assert "4 pipeline stages on pp 4, schedule 1f1b" in text
    assert "stage 3: from " in text
    assert re.search(r"rank 3 \.+F", text)
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.long
def test_cuts_within_layers_balance():
    """Where stages cannot have equally many layers, cuts within layers make them more even."""
    model, mesh = large(4), {"pp": 3}
    free = planned(mesh, model, micro_batches=8, pipeline=Pipeline(virtual_stages=1)).programs["train"]
    assert any("post_attention_layernorm" in name for name in free.cuts)
    assert sum(stage.layers for stage in free.stages) == 4
    for cuts in (("model.layers.1", "model.layers.3"), ("model.layers.2", "model.layers.3")):
        given = planned(mesh, model, micro_batches=8, pipeline=Pipeline(cuts=cuts)).programs["train"]
        assert free.step_s < given.step_s


@pytest.mark.long
def test_plans_of_stages_are_saved_and_replayed(plan, tmp_path):
    """A plan with its cuts is loaded and replayed as it is; contradicting arguments are refused."""
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    again = autopar.plan(large(), plan.mesh, batch(), cluster="h100", plan=loaded)
    assert again.programs == plan.programs
    with pytest.raises(autopar.PlanMismatchError, match="pipeline= is given with a plan"):
        autopar.plan(large(), plan.mesh, batch(), cluster="h100", plan=loaded, pipeline=Pipeline())


def test_stages_hold_what_they_run(plan):
    """A stage has the parameters of its layers alone."""
    numbers = [[int(number) for number in re.findall(r"layers\.(\d+)\.", name)] for name in plan.parameters]
    layers = [(own[0], item.stages) for own, item in zip(numbers, plan.parameters.values(), strict=True) if own]
    assert all(len(stages) == 1 for _, stages in layers)
    assert [stages for _, stages in sorted(layers)] == sorted(stages for _, stages in layers)
    assert plan.parameters["model.embed_tokens.weight"].stages == (0,)
    assert plan.parameters["lm_head.weight"].stages == (3,)


@pytest.mark.long
def test_memory_limits_cuts():
    """Within a limit that the stages of the fastest pipeline exceed, more is recomputed or cut elsewhere; what fits in
    no way is an error that says how much is missing."""
    model, mesh, asked = large(4), {"pp": 2}, Pipeline(virtual_stages=1)
    free = planned(mesh, model, micro_batches=2, recompute="none", pipeline=asked).programs["train"]
    peak = sum(free.memory.values())
    tight = planned(mesh, model, micro_batches=2, memory_limit=0.8 * peak, pipeline=asked).programs["train"]
    assert sum(tight.memory.values()) <= 0.8 * peak
    assert tight.step_s >= free.step_s
    with pytest.raises(autopar.InfeasibleError, match="no pipeline over 2 ranks fits the memory limit of 0"):
        planned(mesh, model, micro_batches=2, memory_limit=0.1 * peak, pipeline=asked)


def test_decisions_are_not_cut_twice(monkeypatch):
    """The program is solved again in less memory where no cuts fit; the same decisions are not cut again."""
    tried = []

    def refuse(program, pipeline, _):
        strategies = [node.strategies for node in program.choice.subproblem.problem.nodes]
        picked = [own[pick] for own, pick in zip(strategies, program.choice.solution.picks, strict=True)]
        tried.append((pipeline, picked))
        raise autopar.InfeasibleError("no cuts fit", 1.0)

    monkeypatch.setattr("passes.search.pipelines.search.staged", refuse)
    with pytest.raises(autopar.InfeasibleError, match="no cuts fit"):
        planned({"pp": 2}, micro_batches=4, pipeline=Pipeline(virtual_stages=1))
    assert len(tried) == 1


@pytest.mark.long
@pytest.mark.parametrize(
    "schedule",
    ["1f1b", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zb_h1", "interleaved_1f1b", "gpipe"))],
)
def test_cuts_are_chosen_by_the_bytes_of_the_plan(schedule, monkeypatch):
    """The bytes of stages by which cuts and recompute are chosen are those that the plan says."""
    compared = []

    def compare_bytes(program, pipeline, limit_s):
        found, fits = staged(program, pipeline, limit_s)
        run = found.configuration.pipeline
        starts = named_starts(program.whole, run.cuts)
        ends = zip((0, *starts), (*starts, len(program.positions)), strict=True)
        for number, (first, last) in enumerate(ends):
            levels = dict(run.recompute[number]) if run.recompute else found.configuration.recompute
            memory = program.memory_of(replace(program.configured(pipeline), recompute=levels))
            peaks = memory.simulate(first, last)
            compared.append((peaks.bytes_with(found.step.held[number]), found.memory[number].peak))
        return found, fits

    monkeypatch.setattr("passes.search.pipelines.search.staged", compare_bytes)
    limit = 0.85 * sum(planned({"pp": 4}, micro_batches=8, recompute="none").programs["train"].memory.values())
    compared.clear()
    asked = Pipeline(schedule=schedule)
    program = planned({"pp": 4}, micro_batches=8, memory_limit=limit, pipeline=asked).programs["train"]
    assert len(compared) >= len(program.stages)
    assert all(chosen == said for chosen, said in compared)


@pytest.mark.slow
def test_memory_of_slower_cuts_is_not_simulated(monkeypatch):
    """Of the cuts that are lowered the fastest is simulated first, and no slower one where it fits."""
    lowered, simulated = [], []
    lower, simulate = staging._lowered, staging.found_choice

    def counted_lowered(*arguments):
        lowered.append(lower(*arguments))
        return lowered[-1]

    def counted_simulated(subproblems, choice, simulator):
        simulated.append(choice)
        return simulate(subproblems, choice, simulator)

    monkeypatch.setattr(staging, "_lowered", counted_lowered)
    monkeypatch.setattr(staging, "found_choice", counted_simulated)
    # Ranks cannot share these layers evenly, so that several cuts are good.
    model = large(13)
    free = planned({"pp": 4}, model, micro_batches=8, recompute="none").programs["train"]
    lowered.clear()
    simulated.clear()
    limit = 0.75 * sum(free.memory.values())
    planned({"pp": 4}, model, micro_batches=8, memory_limit=limit, pipeline=Pipeline(schedule="1f1b"))
    fast, slow = sorted(each.step.seconds.total for each in lowered)
    assert fast < slow
    (only,) = simulated
    assert only.step.seconds.total == fast


@pytest.mark.parametrize(
    "schedule", [pytest.param(name, marks=pytest.mark.slow) for name in ("1f1b", "interleaved_1f1b")]
)
def test_more_memory_is_not_slower(schedule):
    """Plans that fit in less memory fit in more, with steps that are no longer, where stages have to recompute."""
    model, asked = large(), Pipeline(schedule=schedule)
    free = planned({"pp": 4}, model, micro_batches=8, recompute="none", pipeline=asked).programs["train"]
    peak = sum(free.memory.values())
    steps = [
        planned({"pp": 4}, model, micro_batches=8, memory_limit=part * peak, pipeline=asked).programs["train"].step_s
        for part in (0.8, 0.85, 0.9, 1.0)
    ]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > steps[-1]


@pytest.mark.parametrize("near", [0.0, float("inf")])
def test_stages_that_do_not_fit_after_all_are_refused(near, monkeypatch):
    """Whatever near bytes say: the error is that of the memory simulator, and says how much is missing."""
    monkeypatch.setattr(StageMemory, "near_bytes", lambda *_: near)
    monkeypatch.setattr(StageMemory, "excess", lambda *_, **__: 2.0**30)
    asked = Pipeline(cuts=("model.layers.4",)) if near else Pipeline(virtual_stages=1)
    with pytest.raises(autopar.InfeasibleError, match=r"exceeds its memory limit of .* by 1 GiB with full recompute"):
        planned({"pp": 2}, micro_batches=4, pipeline=asked)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.25, 0.5])
def test_bounds_before_solving_lose_no_plan(share, monkeypatch):
    """Levels of recompute that are excluded before anything is solved are in no plan that is found without that."""
    model, samples, refused, bounded = large(), batch(64, 1024), [], PipelineBounds.narrowed

    options = {"cluster": "h100", "pipeline": "auto"}
    free = autopar.plan(model, {"pp": 2, "dp": 2}, samples, **options, micro_batches=8, recompute="none")
    options["memory_limit"] = share * sum(free.programs["train"].memory.values())

    def watched(bounds: PipelineBounds, whole: Space, limit_s: float) -> Narrowed:
        found = bounded(bounds, whole, limit_s)
        refused.append(found.space is None or found.space.refused)
        return found

    monkeypatch.setattr(PipelineBounds, "narrowed", watched)
    first = autopar.plan(model, {"pp": 2, "dp": 2}, samples, **options)
    assert any(refused)
    monkeypatch.setattr(PipelineBounds, "narrowed", lambda _, whole, __: Narrowed(whole, 0.0))
    second = autopar.plan(model, {"pp": 2, "dp": 2}, samples, **options)
    assert second.programs["train"].step_s == first.programs["train"].step_s


@SLOW
def test_micro_batches_are_chosen():
    """Where their number is free it is chosen by the step, and is never slower than a given one."""
    free = planned({"pp": 2, "dp": 2}).programs["train"]
    for count in (2, 4, 8):
        given = planned({"pp": 2, "dp": 2}, micro_batches=count).programs["train"]
        assert free.step_s <= given.step_s * (1 + 1e-9)


@SLOW
def test_sizes_of_pipelines_are_chosen():
    """With a number of devices, a pipeline that is asked for has the size that is fastest, and never one that a mesh
    given by hand beats."""
    found = planned(4, large(4), pipeline=Pipeline(virtual_stages=1), micro_batches=4)
    assert next(iter(found.mesh)) == "pp"
    assert torch.tensor(list(found.mesh.values())).prod() == 4
    program = found.programs["train"]
    assert program.ranks == len(program.stages) == found.mesh["pp"]
    for mesh in ({"pp": 4}, {"pp": 2, "dp": 2}):
        given = planned(mesh, large(4), pipeline=Pipeline(virtual_stages=1), micro_batches=4)
        assert program.step_s <= given.programs["train"].step_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("mesh", "options", "message"),
    [
        ({"dp": 2, "pp": 2}, {}, "the pipeline's axis 'pp' must be the first of the mesh, which has dp, pp"),
        ({"pp": 2}, {"pipeline": Pipeline(axis="stage")}, "a pipeline is asked for over the axis 'stage'"),
        (17, {"pipeline": Pipeline()}, "17 devices cannot be shared by stages of equally many"),
        ({"pp": 2}, {"pipeline": Pipeline(cuts=("model.layers.99",))}, "the cut 'model.layers.99' names no module"),
        (
            {"pp": 3},
            {"pipeline": Pipeline(cuts=("model.layers.3", "model.layers.1"))},
            "the cut 'model.layers.1' does not come after 'model.layers.3'",
        ),
        ({"pp": 3}, {"pipeline": Pipeline(cuts=("model.layers.3",))}, "1 cuts make 2 stages, but 3 ranks have"),
        (
            {"pp": 4},
            {"micro_batches": 2, "pipeline": Pipeline(schedule="1f1b")},
            "at least as many micro-batches as stages",
        ),
        ({"pp": 64}, {"pipeline": Pipeline(schedule="gpipe")}, "64 stages are asked for, but the model can be cut at"),
        ({"pp": 2}, {"pipeline": Pipeline(schedule="1f1b", virtual_stages=2)}, "1f1b has 1 stage"),
    ],
)
def test_pipelines_that_cannot_be(mesh, options, message):
    """Each is one sentence that names what is wrong."""
    with pytest.raises(autopar.PipelineError, match=re.escape(message)):
        planned(mesh, large(4), **options)


@pytest.mark.long
def test_stages_of_frozen_parameters_alone_are_refused():
    """No gradient comes back to them; adapters of the first layer are enough for cuts anywhere."""
    model = llama(num_hidden_layers=4).requires_grad_(False)
    model.lm_head.requires_grad_(True)
    with pytest.raises(autopar.PipelineError, match=r"cut at 0 places \(\d+ others are behind frozen parameters alone"):
        planned({"pp": 2}, model, pipeline=Pipeline(virtual_stages=1), micro_batches=2)
    model.model.layers[0].self_attn.q_proj.requires_grad_(True)
    found = planned({"pp": 2}, model, pipeline=Pipeline(virtual_stages=1), micro_batches=2)
    assert len(found.programs["train"].stages) == 2


class Partly(nn.Module):
    """Linear layers, of which the last is not used, with a mean over the samples that count."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, counted: torch.Tensor) -> dict[str, torch.Tensor]:
        """x: [batch, 8]; counted: [batch]."""
        scale = counted.sum()
        for layer in self.layers[:2]:
            x = layer(x).tanh()
        return {"loss": (x / scale).sum(1).mean()}


def test_what_no_stage_reads_is_held_by_the_first():
    """A parameter that nothing reads, and an input that totals alone read."""
    inputs = {"x": torch.randn(4, 8), "counted": torch.ones(4)}
    found = autopar.plan(Partly(), {"pp": 2}, inputs, cluster="ideal", micro_batches=2)
    assert found.parameters["layers.2.weight"].stages == (0,)
    assert {"x", "counted"} == set(found.inputs)


def test_cuts_of_micro_batches_are_those_of_the_batch():
    """A mean over samples is two ops in micro-batches; a cut at the first of them is found where it is one."""
    inputs = {"x": torch.randn(4, 8), "counted": torch.ones(4)}
    options = {"cluster": "ideal", "pipeline": Pipeline(cuts=("/mean.sum",))}
    trained = autopar.plan(Partly(), {"pp": 2}, inputs, micro_batches=2, **options)
    evaluated = autopar.plan(Partly(), {"pp": 2}, inputs, objective="infer", **options)
    assert trained.programs["train"].cuts == evaluated.programs["infer"].cuts == ("/mean.sum",)


class Choosing(nn.Module):
    """It multiplies the features that have the highest scores; scores get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.sharper, self.up, self.head = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """x: [rows, 8]."""
        x = self.up(x)
        best = self.sharper(self.score(x).relu()).topk(3).indices
        chosen = torch.zeros_like(x).scatter(1, best, 1.0)
        return {"loss": self.head(x * chosen).square().mean()}


@pytest.mark.parametrize("cut", ["sharper", "head"])
def test_what_only_chooses_indices_gets_no_gradient(cut: str) -> None:
    """Its parameters have none, as on one device, also where stages are cut within it: an optimizer with weight decay
    would change them for a gradient of zero."""
    torch.manual_seed(0)
    model = Choosing()
    found = compare(
        model, {"pp": 2}, {"x": torch.randn(4, 8)}, cluster="ideal", micro_batches=2, pipeline=Pipeline(cuts=(cut,))
    )
    assert found.worst[1] <= TOLERANCE, str(found)
    model(torch.randn(4, 8))["loss"].backward()
    assert [name for name, item in model.named_parameters() if item.grad is None] == [
        f"{module}.{name}" for module in ("score", "sharper") for name in ("weight", "bias")
    ]


def test_axes_are_checked():
    """A pipeline of one rank takes no cuts, and constraints no axis of a pipeline."""
    with pytest.raises(
        autopar.PipelineError, match="the pipeline's axis 'pp' has one rank, which runs the whole model"
    ):
        planned({"pp": 1, "dp": 2}, large(2), pipeline=Pipeline(cuts=("model.layers.1",)))
    with pytest.raises(autopar.ConstraintError, match="nothing is split over 'pp', the pipeline's axis"):
        planned({"pp": 2, "dp": 2}, large(2), constraints={"lm_head.weight": {"stored": {"pp": "S(0)"}}})
    with pytest.raises(autopar.InputError, match="axis must be the name of an axis of the mesh, got 3"):
        Pipeline(axis=3)
    with pytest.raises(autopar.InputError, match="cuts must be names of modules in order, got 3"):
        Pipeline(cuts=3)


def test_options_are_checked():
    with pytest.raises(autopar.InputError, match="schedule is 'fifo': it must be one of gpipe"):
        Pipeline(schedule="fifo")
    with pytest.raises(autopar.InputError, match="cuts must be names of modules in order"):
        Pipeline(cuts="model.layers.1")
    with pytest.raises(autopar.InputError, match="virtual_stages is 0"):
        Pipeline(virtual_stages=0)
    with pytest.raises(autopar.InputError, match=r"pipeline is 4: give an autopar\.Pipeline"):
        autopar.plan(large(2), {"pp": 2}, batch(), cluster="h100", pipeline=4)


@pytest.mark.slow
def test_caches_of_several_stages_are_none() -> None:
    """A cache holds tensors of all layers: no rank has all of them, and half a cache would number them anew."""
    one = ARCHITECTURES["qwen3_vl-language"]
    comparison = compare(one.make(), {"pp": 2}, one.inputs(4), one.dtype, cluster="ideal", micro_batches=2)
    assert comparison.worst[1] <= TOLERANCE, str(comparison)
    assert "output ['logits']" in comparison.errors
    assert not [name for name in comparison.errors if "past_key_values" in name]
