"""forward_backward on gloo ranks: losses and gradients of micro-batches add up to those of one device, in float64."""

import functools
import math
import random

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import autopar
from autopar import InputError, MicroBatchError, Plan, PlanMismatchError, UnsupportedError, parallelize
from autopar.testing import LiftFloat32, compare_on_mesh
from autopar.testing.ranks import run_ranks
from passes.ir.configuration import RECOMPUTE
from tests.autopar.comparing import exact
from tests.autopar.fuzzing import random_solution
from tests.autopar.solving import solved_by
from tests.models import MODELS, Stack, gpt2, llama, tokens

pytestmark = pytest.mark.usefixtures("one_trace")

_SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def _classifier() -> tuple[nn.Module, dict[str, Tensor]]:
    """Sequences of different lengths, one label each."""
    torch.manual_seed(0)
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(**_SMALL, **quiet, vocab_size=64, max_position_embeddings=32))
    inputs = tokens(padding=True, labels=False)
    return model, {**inputs, "labels": torch.tensor([0, 1, 1, 0])}


def _pictures() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(**_SMALL, image_size=16, patch_size=4, num_labels=3))
    return model, {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.tensor([0, 2, -100, 1])}


def _squares() -> tuple[nn.Module, dict[str, Tensor]]:
    return Stack(), {"x": torch.randn(8, 16), "target": torch.randn(8, 16)}


CASES = {
    "llama": lambda: (llama(), tokens()),
    "gpt2": lambda: (gpt2(), tokens(padding=True)),
    "gemma2": lambda: (MODELS["gemma2"](), tokens(padding=True)),
    "classifier": _classifier,
    "pictures": _pictures,
    "squares": _squares,
}

_FAST = {("squares", "2", 4, "selective")}


def _cases() -> list[object]:
    cases = [(name, "2x2", 2, "none") for name in CASES]
    cases += [(name, "2", count, level) for name in ("llama", "gpt2") for count in (2, 4) for level in ("none", "full")]
    cases += [("gpt2", "2", 4, "selective"), ("llama", "2x2", 2, "full"), ("llama", "2x2", 4, "selective")]
    cases += [("squares", "2", 4, "selective"), ("llama", "2x2", 1, "none"), ("gpt2", "2x2x2", 2, "none")]
    return [case if case in _FAST else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(("name", "mesh", "count", "recompute"), _cases())
def test_equal_to_one_device(name: str, mesh: str, count: int, recompute: str) -> None:
    """Loss, outputs of the whole batch, every gradient; some micro-batches ignore more labels than others."""
    model, inputs = CASES[name]()
    exact(model, mesh, inputs, micro_batches=count, recompute=recompute)


def _whole(value: object) -> Tensor:
    assert isinstance(value, Tensor)
    return value.full_tensor() if isinstance(value, DTensor) else value


def _off(got: object, expected: Tensor) -> float:
    """The error relative to the largest element."""
    expected = expected.detach()
    return float((_whole(got).detach() - expected).abs().max() / expected.abs().max())


def _worst_gradient(module: nn.Module, model: nn.Module) -> float:
    own = dict(module.named_parameters())
    return max(_off(own[name].grad, item.grad) for name, item in model.named_parameters() if item.grad is not None)


def _steps(text: str) -> dict[str, float]:
    """The errors of training steps by a replayed plan, relative to one device."""
    with LiftFloat32(torch.float64):
        return _lifted_steps(text)


def _lifted_steps(text: str) -> dict[str, float]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = gpt2().double()
    plan = Plan.from_json(text)
    first, second = tokens(batch=8), {name: leaf.flip(0)[:4] for name, leaf in tokens(batch=8).items()}
    module = parallelize(model, mesh, first, cluster="ideal", plan=plan)
    own = torch.optim.SGD(module.parameters(), lr=0.1)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    errors: dict[str, float] = {"programs": float(module.plan.programs != plan.programs)}

    output = module.forward_backward(**first)
    expected = model(**first)
    expected.loss.backward()
    errors["loss"] = _off(output.loss, expected.loss)
    errors["logits"] = _off(output.logits, expected.logits)
    errors["type"] = float(type(output) is not type(expected) or output.logits.requires_grad)
    errors["gradients"] = _worst_gradient(module, model)

    # A batch of another size, whose gradients come on top.
    errors["second loss"] = _off(module.forward_backward(**second).loss, model(**second).loss)
    model(**second).loss.backward()
    errors["added gradients"] = _worst_gradient(module, model)
    own.step()
    other.step()
    own.zero_grad()
    other.zero_grad()

    # Each rank's own part, and a call of the whole batch.
    half = slice(4 * mesh.get_local_rank(), 4 * mesh.get_local_rank() + 4)
    layouts = module.input_layouts
    given = {name: leaf[half] if layouts[name]["dp"] == "S(0)" else leaf for name, leaf in first.items()}
    errors["loss of parts"] = _off(module.forward_backward(**module.from_local(given)).loss, model(**first).loss)
    model(**first).loss.backward()
    errors["gradients of parts"] = _worst_gradient(module, model)
    errors["call"] = _off(module(**first).logits, model(**first).logits)
    # Batches that are not divisible by the planned number of micro-batches, one of them too large for one micro-batch.
    for rows in (3, 9):
        batch = tokens(batch=rows)
        errors[f"loss of {rows}"] = _off(module.forward_backward(**batch).loss, model(**batch).loss)
        model(**batch).loss.backward()
        errors[f"gradients of {rows}"] = _worst_gradient(module, model)

    # Hooks would see gradients of single micro-batches.
    weight = module.get_parameter("transformer.h.1.mlp.c_fc.weight")
    for register in (weight.register_hook, weight.register_post_accumulate_grad_hook):
        handle = register(lambda *_: None)
        with pytest.raises(UnsupportedError, match=r"'transformer.h.1.mlp.c_fc.weight' has a hook, which would see"):
            module.forward_backward(**first)
        handle.remove()
    own.zero_grad()
    other.zero_grad()
    module.forward_backward(**first)
    model(**first).loss.backward()
    errors["gradients after hooks"] = _worst_gradient(module, model)
    return errors


@pytest.mark.slow
def test_steps_of_a_replayed_plan() -> None:
    """Gradients add up over calls, optimizers go on from them, and batches may be given in parts or in other sizes."""
    options = {"cluster": "ideal", "micro_batches": 2, "recompute": {"transformer.*": "full"}}
    with LiftFloat32(torch.float64):
        plan = autopar.plan(gpt2().double(), {"dp": 2}, tokens(batch=8), **options)
    assert plan.programs["train"].micro_batches == 2
    assert plan.programs["train"].stages[0].recompute == {"transformer.h.*": "full"}
    assert "2 micro-batches" in str(plan)
    assert "transformer.h.* x 2, recompute full" in str(plan)
    for errors in run_ranks(_steps, 2, plan.to_json()):
        assert max(errors.values()) <= 1e-9, errors


@functools.cache
def _llama() -> nn.Module:
    return llama()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"micro_batches": 0}, InputError, "micro_batches is 0: it must be a whole number of at least 1"),
        ({"micro_batches": True}, InputError, "micro_batches is True"),
        ({"micro_batches": 2.0}, InputError, "micro_batches is 2.0"),
        ({"micro_batches": 3}, MicroBatchError, "a batch of 4 cannot be cut into 3"),
        ({"micro_batches": 2, "objective": "infer"}, InputError, "only training"),
        ({"recompute": "all"}, InputError, "recompute is 'all': it must be one of none, selective, ops, full"),
        ({"recompute": {"model.layers.*": 1}}, InputError, "recompute for 'model.layers.*' is 1"),
        ({"recompute": 3}, InputError, "recompute is 3"),
        ({"recompute": "full", "objective": "infer"}, InputError, "only training"),
        ({"recompute": {"layers": "full"}}, autopar.ConstraintError, "matches no region: these repeat: model.layers"),
    ],
)
def test_options_that_cannot_be_meant(options: dict[str, object], error: type[Exception], message: str) -> None:
    """One clear error each."""
    with pytest.raises(error, match=message):
        autopar.plan(_llama(), {"dp": 2}, tokens(), cluster="ideal", **options)


@pytest.mark.parametrize("level", ["none", "selective", "full"])
def test_a_plan_may_be_asked_for_as_it_is(level: str) -> None:
    """Options that say what the plan says: the level of all regions, or of one by its name."""
    options: dict[str, object] = {"cluster": "ideal", "micro_batches": 1}
    plan = autopar.plan(_llama(), {"dp": 2}, tokens(), recompute=level, **options)
    for recompute in (level, {"model.layers.*": level}, None):
        again = autopar.plan(_llama(), {"dp": 2}, tokens(), recompute=recompute, plan=plan, **options)
        assert again.programs == plan.programs


def test_a_plan_is_not_overruled() -> None:
    """Decisions of a plan cannot be requested again with other values."""
    plan = autopar.plan(_llama(), {"dp": 2}, tokens(), cluster="ideal", recompute="full")
    for options in ({"micro_batches": 2}, {"recompute": "none"}):
        with pytest.raises(PlanMismatchError, match="leave"):
            autopar.plan(_llama(), {"dp": 2}, tokens(), cluster="ideal", plan=plan, **options)


@pytest.mark.long
def test_experts_with_a_loss_of_their_own_are_refused() -> None:
    """The balance of tokens over the experts is no sum over the samples; without it the batch is cut."""
    sizes = {**_SMALL, "num_key_value_heads": 2, "vocab_size": 64, "num_local_experts": 4}
    model = MixtralForCausalLM(MixtralConfig(**sizes, output_router_logits=True))
    with pytest.raises(MicroBatchError, match=r": /mul needs the whole batch .*aux_loss='micro_batch'"):
        autopar.plan(model, {"dp": 2}, tokens(), cluster="ideal", micro_batches=2)
    model = MixtralForCausalLM(MixtralConfig(**sizes))
    plan = autopar.plan(model, {"dp": 2}, tokens(), cluster="ideal", micro_batches=2)
    assert plan.programs["train"].micro_batches == 2


def _random(name: str, sizes: tuple[int, ...], seeds: range) -> list[str]:
    """The errors of random plans: strategies, repeated gathers, micro-batches and recompute."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])
    wrong = []
    for seed in seeds:
        choose = random.Random(seed)
        count, recompute = choose.choice([1, 2, 4]), choose.choice(RECOMPUTE)
        options = {"micro_batches": count, "recompute": recompute, "cluster": "ideal", "memory_limit": 1e15}
        inputs = tokens(batch=8, length=8, padding=name == "gpt2")
        with solved_by(functools.partial(random_solution, choose)):
            comparison = compare_on_mesh(MODELS[name]().double(), mesh, inputs, torch.float64, **options)
        if not comparison.worst[1] <= 1e-9:
            wrong.append(f"seed {seed}: {comparison}")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
def test_random_plans(name: str, sizes: tuple[int, ...]) -> None:
    """Random plans are right, whatever else they decide."""
    assert run_ranks(_random, math.prod(sizes), name, sizes, range(6), timeout=900)[0] == []


class _Captioner(nn.Module):
    """Words with places for two rows of an image in each sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(8, 16)
        self.rows = nn.Linear(4, 16)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))

    def forward(self, ids: Tensor, images: Tensor) -> dict[str, Tensor]:
        """ids: [batch, words], images: [batch, 2, 4]."""
        words = self.words(ids)
        rows = self.rows(images).to(words.dtype)
        seen = words.masked_scatter((ids == 7)[..., None].expand_as(words), rows)
        logits = self.layers(seen + seen.mean(1, keepdim=True))
        labels = torch.where(ids == 7, -100, ids)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def _captions(*counts: int) -> dict[str, Tensor]:
    """Five words each, of which `counts` are places."""
    generator = torch.Generator().manual_seed(len(counts))
    ids = torch.randint(0, 7, (len(counts), 5), generator=generator)
    for row, count in zip(ids, counts, strict=True):
        row[torch.randperm(5, generator=generator)[:count]] = 7
    return {"ids": ids, "images": torch.randn(len(counts), 2, 4, generator=generator)}


def _places(axis: str) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    model = parallelize(_Captioner(), mesh, _captions(2, 2, 2, 2), micro_batches=2, cluster="ideal")
    stock = _Captioner()
    # As many places as rows, also in each micro-batch: but not in each sample.
    for counts in ((3, 2, 1, 2), (0, 2, 4, 2), (2, 2, 2, 1)):
        with pytest.raises(InputError, match=r"each sample must have 2 of them.*use micro_batches=1"):
            model.forward_backward(**_captions(*counts))
    for seed in range(2):
        inputs = _captions(*(2,) * (4 + 4 * seed))
        got = model.forward_backward(**inputs)["loss"]
        expected = stock(**inputs)["loss"]
        expected.backward()
        assert _off(got, expected) < 1e-6
    gradients = dict(stock.named_parameters())
    for name, parameter in model.named_parameters():
        assert _off(parameter.grad, gradients[name].grad) < 1e-5, name


@pytest.mark.long
@pytest.mark.parametrize("axis", ["dp", "pp"])
def test_places_for_images(axis: str) -> None:
    """Batches whose samples differ in their places are refused on all ranks, without a trace in the gradients; others,
    and other sizes, are equal to one device."""
    run_ranks(_places, 2, axis)
