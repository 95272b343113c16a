"""Loops that a trace unrolls are noticed while it runs."""

import contextlib
import linecache

import pytest
import torch
from torch import Tensor, nn

from passes.capture import Tracing, capture
from passes.ir.errors import CaptureError


class Recurrent(nn.Module):
    """A cell that is called for each step, as one line of the loop; or the step itself."""

    def __init__(self, calls: bool) -> None:
        super().__init__()
        self.cell = nn.Linear(4, 4)
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, steps, 4]."""
        state = torch.zeros_like(x[:, 0])
        for step in range(x.shape[1]):
            state = self.called(state) if self.calls else state * 0.5 + x[:, step]  # here
        return state.sum()

    def called(self, state: Tensor) -> Tensor:
        """The next state."""
        return self.cell(state)


class Deep(nn.Module):
    """Many layers, and in each of them a loop over blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(40))

    def blocks(self, x: Tensor) -> Tensor:
        """x: [batch, steps, 4]."""
        return torch.cat([block * 2 for block in x.split(100, 1)], 1)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, steps, 4]."""
        for layer in self.layers:
            x = self.blocks(layer(x))
        return x.sum()


TRACING = Tracing(True, True, contextlib.nullcontext())


@pytest.mark.long
@pytest.mark.parametrize("calls", [True, False])
def test_a_loop_over_the_sequence_is_refused(calls: bool) -> None:
    """The error names the line within the loop, long before the loop ends."""
    with pytest.raises(CaptureError, match="a loop over the samples or the sequence is unrolled") as caught:
        capture(Recurrent(calls), {"x": torch.ones(2, 5000, 4)}, TRACING)
    (line,) = (line for line in linecache.getlines(__file__) if line.endswith("# here\n"))
    assert f"({line.strip()})" in str(caught.value)
    assert "has run 256 times in one call" in str(caught.value)


@pytest.mark.long
def test_layers_and_blocks_are_traced() -> None:
    """Lines that run often in many calls, and once for many tokens in one."""
    program = capture(Deep(), {"x": torch.ones(2, 1000, 4)}, TRACING)
    assert sum(op.kind == "linear" for op in program.ops) == 40
    assert capture(Recurrent(False), {"x": torch.ones(2, 200, 4)}, TRACING).ops
