"""One plan serves other sets of inputs: without labels, with masks or positions. On gloo ranks."""

import logging
from collections.abc import Mapping, Sequence
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.runtime.calls import programs
from tests.autopar.comparing import TOLERANCE
from tests.autopar.plans.test_dynamic_shapes import gradient_error, on_ranks, stack_batch, worst
from tests.models import Stack, gpt2, llama, tokens

Batch = Mapping[str, object]


def without(batch: Batch, *names: str) -> dict[str, object]:
    """A batch without some of its inputs."""
    return {name: leaf for name, leaf in batch.items() if name not in names}


def positions(batch: Batch, samples: int = 1) -> dict[str, object]:
    """A batch with positions that begin at 3."""
    ids = batch["input_ids"]
    assert isinstance(ids, torch.Tensor)
    return {**batch, "position_ids": (3 + torch.arange(ids.shape[1])).expand(samples, -1).contiguous()}


def off(dist_model: nn.Module, model: nn.Module, batches: Sequence[Batch], training: bool) -> dict[int, float]:
    """The calls, by number, that are off in one mode: outputs, or gradients of the loss or of all logits."""
    wrong = {}
    for module in (dist_model, model):
        module.train(training)
    for number, batch in enumerate(batches):
        dist_model.zero_grad()
        model.zero_grad()
        with torch.set_grad_enabled(training):
            ours, theirs = dist_model(**batch), model(**{"use_cache": False, **batch})
        found = worst(ours, theirs)
        if training:
            weight = torch.linspace(-1, 1, theirs.logits.numel(), dtype=torch.float64).reshape(theirs.logits.shape)
            for output in (ours, theirs):
                loss = output.get("loss")
                if loss is None:
                    logits = output.logits
                    loss = ((logits.full_tensor() if logits is not theirs.logits else logits) * weight).sum()
                loss.backward()
            found = max(found, gradient_error(dist_model, model))
        if not found <= TOLERANCE:
            wrong[number] = found
    return wrong


def _optional(mesh: DeviceMesh) -> list[dict[int, float]]:
    """A llama that is planned with labels, with what people add and leave out; other sizes, too. Some inputs in
    training, others in evaluation, some in both."""
    model, planned = llama(num_hidden_layers=1).double(), tokens(8)
    dist_model = autopar.parallelize(model, mesh, planned, cluster="ideal")
    padded, smaller = tokens(8, padding=True), tokens(6, 12, padding=True)
    batches = [
        without(planned, "labels"),
        padded,
        without(smaller, "labels", "attention_mask"),
        positions(planned),
        without(tokens(3), "labels"),
        {**positions(without(smaller, "labels")), "output_hidden_states": True, "logits_to_keep": 3},
        {**planned, "attention_mask": None},
    ]
    return [off(dist_model, model, batches[:4], True), off(dist_model, model, batches[3:], False)]


def _modes(mesh: DeviceMesh) -> list[dict[int, float]]:
    """A model that drops in training, planned with a mask: evaluated without labels, without the mask and without
    both; and one that is planned without labels is trained with them."""
    padded, plain = tokens(8, padding=True), tokens(8)
    model = gpt2(resid_pdrop=0.5, n_layer=1).double()
    dist_model = autopar.parallelize(model, mesh, padded, cluster="ideal")
    assert "infer" in dist_model.plan.programs
    batches = [without(padded, "labels"), plain, without(plain, "labels"), padded]
    found = [off(dist_model, model, batches, False)]
    # In training it drops, with or without labels.
    dist_model.train()
    first, second = (dist_model(**batches[2]).logits.full_tensor() for _ in range(2))
    assert not torch.equal(first, second)
    model = gpt2(n_layer=1).double()
    dist_model = autopar.parallelize(model, mesh, without(plain, "labels"), cluster="ideal")
    return [*found, off(dist_model, model, [plain, padded], True)]


def _micro_batches(mesh: DeviceMesh) -> list[float]:
    """In two micro-batches, of the planned inputs, with a mask, and with a mask at another size."""
    model = llama().double()
    dist_model = autopar.parallelize(model, mesh, tokens(8), cluster="ideal", micro_batches=2)
    found = []
    for batch in (tokens(8), tokens(8, padding=True), tokens(4, 12, padding=True), positions(tokens(8))):
        dist_model.zero_grad()
        model.zero_grad()
        ours, theirs = dist_model.forward_backward(**batch), model(**batch, use_cache=False)
        theirs.loss.backward()
        found += [worst(ours.loss, theirs.loss), gradient_error(dist_model, model)]
    dist_model.eval()
    found.append(worst(dist_model(input_ids=batch["input_ids"]), model(input_ids=batch["input_ids"], use_cache=False)))
    return found


def _inference(mesh: DeviceMesh) -> dict[int, float]:
    model, batch = gpt2(n_layer=1).double(), tokens(8, labels=False, padding=True)
    dist_model = autopar.parallelize(model, mesh, without(batch, "attention_mask"), cluster="ideal", objective="infer")
    return off(dist_model, model, [{**batch, "use_cache": False}, {**tokens(8), "use_cache": False}], False)


@pytest.mark.long
def test_optional_inputs() -> None:
    """Left out or added, in training and evaluation, at the planned sizes and others, they are those of one device."""
    assert all(wrong == {} for found in on_ranks(_optional, mesh="2") for wrong in found)


@pytest.mark.slow
def test_optional_inputs_without_training() -> None:
    """The same in evaluation, and of a plan for inference."""
    assert all(wrong == {} for found in on_ranks(_modes, mesh="2") for wrong in found)
    assert all(wrong == {} for wrong in on_ranks(_inference, mesh="2"))


@pytest.mark.slow
def test_optional_inputs_in_micro_batches() -> None:
    assert all(max(found) <= TOLERANCE for found in on_ranks(_micro_batches))


# --- what cannot be ---------------------------------------------------------------------------------------------------


class Optional(nn.Module):
    """A layer with a bias that may be given, and only as wide as its weight; other keywords are passed over."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None, **other: object) -> dict[str, torch.Tensor]:
        """x: [batch, 8]; bias: [8]."""
        made = self.linear(x)
        if bias is not None:
            made = made + bias
        return {"loss": made.pow(2).sum()}


def _refused(mesh: DeviceMesh) -> list[str]:
    x = torch.ones(8, 8, dtype=torch.float64)
    dist_model = autopar.parallelize(Optional().double(), mesh, {"x": x}, cluster="ideal")
    messages = []

    def refuses(**given: object) -> None:
        with pytest.raises(autopar.InputError) as caught:
            dist_model(**given)
        messages.append(str(caught.value))

    refuses(bias=x[0])
    refuses(x=x, unknown=x)
    refuses(x=x, bias=x[:, :7])
    refuses(x=x, bias={1, 2})
    refuses(x=x, **({"bias": x[0]} if mesh.get_rank() == 3 else {}))
    # Gradients of what was not planned are those of one device.
    ours, theirs = (torch.full((8,), 2.0, dtype=torch.float64, requires_grad=True) for _ in range(2))
    model = Optional().double()
    dist_model(x=x, bias=ours)["loss"].backward()
    model(x=x, bias=theirs)["loss"].backward()
    assert torch.allclose(ours.grad, theirs.grad, rtol=1e-9)
    assert gradient_error(dist_model, model) <= TOLERANCE
    return messages


def test_inputs_that_cannot_be() -> None:
    """One sentence on every rank alike, and the module goes on."""
    found = on_ranks(_refused)
    assert all(messages == found[0] for messages in found)
    missing, unknown, narrow, kind, one = found[0]  # type: ignore[misc]
    assert missing == "missing argument x: the plan was made for inputs x"
    assert unknown == (
        "additional argument unknown: the model's forward does not name it, and the plan was made for inputs x (plan "
        "again with it)"
    )
    assert narrow.startswith("the inputs (x [8, 8], bias [8, 7]) are not the planned ones (x), and the model cannot")
    assert kind.startswith("additional argument bias is set: only tensors, numbers, flags and texts can be added")
    assert "rank 3 of the mesh has bias float64[8], rank 0 has bias left out" in one


# --- how many are kept ------------------------------------------------------------------------------------------------


def _bounded(mesh: DeviceMesh) -> tuple[int, list[str]]:
    model = Stack().double()
    dist_model = autopar.parallelize(model, mesh, stack_batch(8), cluster="ideal")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("autopar").addHandler(handler)
    made = 0
    instance = programs.Programs._instance

    def counted(*given: object) -> object:
        nonlocal made
        made += 1
        return instance(*given)

    with mock.patch.object(programs, "KEPT", 2), mock.patch.object(programs.Programs, "_instance", counted):
        for samples in (8, 4, 6, 4, 2, 4, 6, 8, 2):
            assert worst(dist_model(**stack_batch(samples)), model(**stack_batch(samples))) <= TOLERANCE
    return made, [message for message in said if "different sizes" in message]


@pytest.mark.long
def test_programs_for_other_sizes_are_bounded() -> None:
    """Those that were not used for longest are made again; the first rank warns once."""
    found = on_ranks(_bounded, mesh="2")
    # 4, 6, 2 (drops 6), 6 (drops 2; 4 was used since), 2.
    assert [made for made, _ in found] == [5, 5]
    assert [len(said) for _, said in found] == [1, 0]
    assert "more than 2 different sizes" in found[0][1][0]
    assert "pad batches to a few sizes" in found[0][1][0]
