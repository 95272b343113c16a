"""Models as they are read."""

import pytest
import torch
from torch import nn

import autopar
from autopar.models.info import named_sizes, read_model, traced, traced_evaluation, traced_sizes
from autopar.models.losses import with_loss
from autopar.options import Options, Precision
from autopar.request import make_request
from passes.clock import Clock
from passes.ir.errors import CaptureError
from passes.ir.program import Program
from passes.lower import Casts
from tests.models import llama, tokens


class _Tied(nn.Module):
    """Two linear layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Apply both."""
        return self.second(self.first(x)) * scale


def test_properties_of_a_model_and_its_inputs() -> None:
    """Names and dtypes, ties included; inputs by name, also where they were given by position."""
    request = make_request({"dp": 2}, Options(cluster="ideal"))
    info = read_model(_Tied(), (torch.empty(2, 4), 2.0), request)
    assert info.name == "_Tied"
    assert info.dtypes == dict.fromkeys(("first.weight", "first.bias", "second.weight"), torch.float32)
    assert (set(info.inputs), info.assumed, info.loss) == ({"x", "scale"}, frozenset(), "")
    assert info.casts(Precision(compute=torch.bfloat16)) == Casts(torch.float32, torch.float32)
    assert info.casts(Precision()) == Casts(None, None)


def test_inputs_that_nobody_gave() -> None:
    """Of a Hugging Face model its inputs are made, and training leaves its cache out."""
    request = make_request({"dp": 2}, Options(cluster="ideal"))
    assert read_model(llama(), None, request).inputs["input_ids"].shape == (2, 32)
    info = read_model(llama(), tokens(), request)
    assert (info.inputs["use_cache"], info.assumed) == (False, frozenset({"use_cache"}))
    with pytest.raises(autopar.InputError, match="_Tied is no Hugging Face model, so its inputs are not known"):
        read_model(_Tied(), None, request)


def test_inputs_are_checked() -> None:
    """The model must take them, the loss have what it needs, and the batch be cut as asked for."""
    request = make_request({"dp": 2}, Options(cluster="ideal", micro_batches=3))
    with pytest.raises(autopar.InputError, match="_Tied does not take these example_inputs"):
        read_model(_Tied(), {"y": torch.empty(2, 4)}, request)
    with pytest.raises(autopar.InputError, match="the loss needs target: add it to example_inputs"):
        read_model(with_loss(_Tied(), lambda output, target: (output - target).sum()), (torch.empty(2, 4),), request)
    with pytest.raises(autopar.MicroBatchError, match="a batch of 2 cannot be cut into 3 micro-batches"):
        read_model(_Tied(), {"x": torch.empty(2, 4)}, request)
    with pytest.raises(autopar.InputError, match=r"x is a sparse_coo tensor: pass a dense one \(to_dense\)"):
        read_model(_Tied(), {"x": torch.eye(4).to_sparse()}, request)
    with pytest.raises(autopar.InputError, match=r"x is of type ndarray: pass a tensor \(torch.as_tensor\)"):
        read_model(_Tied(), {"x": torch.empty(2, 4).numpy()}, request)
    nested = torch.nested.nested_tensor([torch.ones(1, 4), torch.ones(2, 4)], layout=torch.jagged)
    with pytest.raises(autopar.InputError, match=r"x is a nested tensor: pass a padded one .* with a mask"):
        read_model(_Tied(), {"x": nested}, request)


class _Dropped(nn.Module):
    """A linear layer, with dropout, and with a branch on values in evaluation where that is asked for."""

    def __init__(self, p: float, branches: bool = False) -> None:
        super().__init__()
        self.linear, self.dropout, self.branches = nn.Linear(4, 4), nn.Dropout(p), branches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply it."""
        output = self.dropout(self.linear(x))
        if self.branches and not self.training and output.sum() > 0:
            output = -output
        return output.sum()


def _evaluation(model: nn.Module, objective: str) -> Program | CaptureError | None:
    request = make_request({"dp": 2}, Options(cluster="ideal", objective=objective))
    info, clock = read_model(model, {"x": torch.empty(2, 4)}, request), Clock()
    return traced_evaluation(model, info, request, traced(model, info, request, objective, clock), clock)


def test_programs_for_evaluation() -> None:
    """There is one where it differs from that of training, and an error where it cannot be traced."""
    program = _evaluation(_Dropped(0.5), "train")
    assert isinstance(program, Program)
    assert not any(item.trainable for item in program.parameters)
    assert _evaluation(_Dropped(0.5), "infer") is None
    assert isinstance(_evaluation(_Dropped(0.5, branches=True), "train"), CaptureError)


def test_programs_for_several_sizes() -> None:
    """Named sizes vary."""
    request = make_request({"dp": 2}, Options(cluster="ideal", symbolic=True))
    model, clock = _Dropped(0.0), Clock()
    info = read_model(model, {"x": torch.empty(2, 4)}, request)
    found = traced_sizes(model, info, request, traced(model, info, request, "train", clock), clock)
    assert found.named == {"batch": (2, [("x", 0)])}
    assert len(found.program.ranges) == 1


def test_sizes_are_named_after_the_batch_and_the_sequence() -> None:
    """Inputs share the sizes that they have in common; others are called after their input, and constants have none."""
    ids, images = torch.empty(4, 32, dtype=torch.int64), torch.empty(4, 3, 16, 16)
    inputs = {"input_ids": ids, "labels": ids, "pixel_values": images, "positions": torch.empty(32), "shift": ids}
    found = named_sizes(inputs, frozenset(inputs) - {"shift"})
    assert found == {
        "batch": (4, [("input_ids", 0), ("labels", 0), ("pixel_values", 0)]),
        "sequence": (32, [("input_ids", 1), ("labels", 1)]),
        "positions_0": (32, [("positions", 0)]),
    }


def test_dims_of_size_one_do_not_vary() -> None:
    assert named_sizes({"x": torch.empty(1, 1, dtype=torch.int64)}, frozenset({"x"})) == {}
