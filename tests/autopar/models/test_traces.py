"""Programs of a model in its modes."""

import torch
from torch import nn

from autopar.models.info import read_model
from autopar.models.traces import named_sizes, traced, traced_evaluation, traced_sizes
from autopar.options import Options
from autopar.request import make_request
from passes.clock import Clock
from passes.ir.errors import CaptureError
from passes.ir.program import Program


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
