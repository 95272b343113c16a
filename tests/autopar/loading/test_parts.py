"""Parallelized parts in models that are otherwise as they were."""

import copy
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.testing import LiftFloat32, run_ranks
from tests.architectures import ARCHITECTURES
from tests.architectures.batches import images_in_texts

# Planned; the same number of patches otherwise; other numbers, and longer texts.
GRIDS = ([[1, 4, 4], [1, 4, 8]], [[1, 4, 8], [1, 4, 4]], [[1, 8, 8], [1, 4, 4]])
LENGTH = 6


def mesh_of_two() -> DeviceMesh:
    """The mesh of a rank's process group."""
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def seen_texts(model: nn.Module, grids: list[list[int]]) -> dict[str, Tensor]:
    """Texts with images of these sizes, in float64."""
    batch = images_in_texts(model.config, grids, LENGTH)
    tokens = batch["input_ids"]
    return {**batch, "pixel_values": batch["pixel_values"].double(), "attention_mask": torch.ones_like(tokens)}


def inputs_of_parts(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, dict[str, object]]:
    """The inputs of each part in a call of the model; those of the text part require the gradients of earlier parts."""
    samples, length = batch["input_ids"].shape
    shape = (samples, length, model.config.text_config.hidden_size)
    vision = {"hidden_states": batch["pixel_values"], "grid_thw": batch["image_grid_thw"]}
    language: dict[str, object] = {
        "inputs_embeds": torch.empty(shape, dtype=torch.float64, requires_grad=True),
        "position_ids": torch.zeros(3, samples, length, dtype=torch.int64),
        "attention_mask": batch["attention_mask"],
        "use_cache": False,
    }
    return {"model.visual": vision, "model.language_model": language}


def whole(tensor: Tensor) -> Tensor:
    """The whole value of a tensor, distributed or not."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def error(got: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """The largest error, relative to the largest value."""
    return float((whole(got) - expected).abs().max() / max(float(expected.abs().max()), floor, 1e-300))


def errors_of_step(model: nn.Module, original: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, float]:
    """Loss, logits and all gradients of both on one batch."""
    outputs = []
    for module in (model, original):
        module.zero_grad()
        output = module(**batch, use_cache=False)
        output.loss.backward()
        outputs.append(output)
    own, expected = dict(model.named_parameters()), dict(original.named_parameters())
    assert set(own) == set(expected)
    assert all((own[name].grad is None) == (item.grad is None) for name, item in expected.items())
    largest = max(float(item.grad.abs().max()) for item in expected.values() if item.grad is not None)
    found = {name: error(getattr(outputs[0], name), getattr(outputs[1], name)) for name in ("loss", "logits")}
    for name, item in expected.items():
        if item.grad is not None:
            found[name] = error(own[name].grad, item.grad, 1e-6 * largest)
    return found


def _vision_and_language() -> list[dict[str, float]]:
    """Both parts of a model parallelized, with the rest between them as it is."""
    mesh, found = mesh_of_two(), []
    model = ARCHITECTURES["qwen2_5_vl"].make().double()
    original = copy.deepcopy(model)
    batches = [seen_texts(model, grids) for grids in GRIDS]
    batch = batches[0]
    with LiftFloat32(torch.float64):
        for name, inputs in inputs_of_parts(model, batch).items():
            part = autopar.parallelize(model.get_submodule(name), mesh, inputs, cluster="ideal")
            autopar.replace_part(model, name, part)
        split = [item for item in model.parameters() if isinstance(item, DTensor)]
        assert sum(item.to_local().numel() for item in split) < 0.6 * sum(item.numel() for item in split)
        found = [errors_of_step(model, original, other) for other in batches]
        model.eval()
        original.eval()
        with torch.no_grad():
            logits = [item(**batch, use_cache=False).logits for item in (model, original)]
        found.append({"evaluation": error(*logits)})
    return found


@pytest.mark.slow
def test_vision_and_language_apart():
    """Qwen2.5-VL, with images and text, in training: loss, logits and all gradients, for the images that were planned
    and for others; the parts come back whole, and what is between them has its gradients too."""
    first, second = run_ranks(_vision_and_language, 2, timeout=600.0)
    assert [set(item) for item in first] == [set(item) for item in second]
    assert all(max(item.values()) <= 1e-9 for item in (*first, *second)), first
    assert len(first[0]) > 50
    assert "model.language_model.embed_tokens.weight" in first[0]


# --- parts of small models --------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """Embeds tokens if need be, and counts its calls."""

    size = 16

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, self.size)
        self.first = nn.Linear(self.size, 32)
        self.second = nn.Linear(32, self.size)

    def forward(self, tokens: Tensor | None = None, embedded: Tensor | None = None) -> dict[str, Tensor]:
        """tokens: [batch, length], or embedded: [batch, length, 16]."""
        x = self.embed(tokens) if embedded is None else embedded
        y = self.second(self.first(x).relu())
        return {"made": y, "size": y.square().mean()}

    @property
    def doubled(self) -> int:
        """Something that others read."""
        return 2 * self.size


class Model(nn.Module):
    """Branches between its parts, which a trace does not follow."""

    def __init__(self) -> None:
        super().__init__()
        self.encoders = nn.ModuleList([Encoder(), Encoder()])
        self.head = nn.Linear(16, 10)
        self.head.weight = self.encoders[0].embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [batch, length]."""
        first, second = self.encoders
        made = first(embedded=first.embed(tokens) * first.doubled)["made"]
        if made.sum() > 0:
            made = made + made.mean()
        again = second(embedded=made)
        return nn.functional.cross_entropy(self.head(again["made"]).flatten(0, 1), tokens.flatten()) + again["size"]


EMBEDDED = torch.zeros(4, 6, 16, dtype=torch.float64, requires_grad=True)


def _small() -> None:
    torch.manual_seed(0)
    model = Model().double()
    original = copy.deepcopy(model)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for name in ("encoders.0", "encoders.1"):
        part = model.get_submodule(name)
        made = autopar.parallelize(part, mesh_of_two(), {"embedded": EMBEDDED}, cluster="ideal")
        assert isinstance(made(embedded=EMBEDDED.detach())["made"], DTensor)
        autopar.replace_part(model, name, made)
        assert type(made(embedded=EMBEDDED.detach())["made"]) is Tensor
    assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == names
    assert model.head.weight is model.encoders[0].embed.weight
    assert isinstance(model.encoders[0].first.weight, DTensor)
    assert {name: whole(value).equal(state[name]) for name, value in model.state_dict().items()} == dict.fromkeys(
        state, True
    )
    tokens = torch.randint(10, (4, 6), generator=torch.Generator().manual_seed(0))
    for module in (model, original):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, foreach=False)
        for _ in range(3):
            loss = module(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.allclose(model(tokens), original(tokens), rtol=1e-10)
    for name, expected in original.named_parameters():
        assert torch.allclose(whole(model.get_parameter(name)), expected, rtol=1e-8), name


@pytest.mark.long
def test_parts_train_with_the_rest():
    """Untraced members of a part stay as they are, ties included; attributes are found; names are as they were."""
    run_ranks(_small, 2)


def _wrong() -> list[str]:
    model = Model().double()
    part = autopar.parallelize(model.encoders[0], mesh_of_two(), {"embedded": EMBEDDED}, cluster="ideal")
    said = []
    for name in ("decoder", "", "head"):
        with pytest.raises(autopar.InputError) as caught:
            autopar.replace_part(model, name, part)
        said.append(str(caught.value))
    tokens = {"tokens": torch.zeros(4, 6, dtype=torch.int64)}
    with pytest.raises(autopar.InputError) as caught:
        autopar.replace_part(model, "encoders.0", autopar.parallelize(model.encoders[0], mesh_of_two(), tokens))
    said.append(str(caught.value))
    with pytest.raises(AttributeError, match="nothing"):
        _ = part.nothing
    autopar.replace_part(model, "encoders.0", part)
    with pytest.raises(AttributeError, match="nothing"):
        _ = part.nothing
    return said


def test_parts_that_do_not_fit():
    torch.manual_seed(0)
    for said in run_ranks(_wrong, 2):
        assert said == [
            "Model has no part called 'decoder'",
            "Model has no part called ''",
            "head is Linear, but the part was made of Encoder",
            "'embed.weight' of encoders.0 is also 'head.weight' of the model, and would become another parameter: "
            "take a part that has both, or give the part what it makes of it as an input",
        ]
