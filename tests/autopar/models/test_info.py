"""Models as they are read."""

import pytest
import torch
from torch import nn

import autopar
from autopar.models.info import read_model
from autopar.models.losses import with_loss
from autopar.options import Options
from autopar.precision import Precision
from autopar.request import make_request
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
