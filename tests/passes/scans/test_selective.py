"""The scan of selective state spaces: results and gradients of its blocks, and what it costs."""

import pytest
import torch
from torch import Tensor

from passes.rules.scan_forms import selective_kernels
from passes.scans.selective import Blocks, block_sizes, selective_scan
from tests.autopar.runtime.generated.kernels import Kernels
from tests.passes.rules.one_op import one_op
from tests.passes.rules.samples import Sample


def _operands(length: int, channels: int = 3, width: int = 4, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    found = [drawn(2, channels, length), drawn(2, channels, length).abs(), -drawn(channels, width).abs()]
    return [each.requires_grad_() for each in (*found, drawn(2, width, length), drawn(2, width, length))]


def _place_by_place(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    state, results = x.new_zeros(*x.shape[:2], a.shape[1]), []
    for place in range(x.shape[2]):
        state = (dt[:, :, place, None] * a).exp() * state + (dt * x)[:, :, place, None] * b[:, None, :, place]
        results.append((state * c[:, None, :, place]).sum(-1))
    return torch.stack(results, -1), state


@pytest.mark.parametrize("length", [1, 5, 64, 65, 200])
def test_results_and_gradients(length: int) -> None:
    """Of the results, of the last state, and of both; where the last block is not full, too."""
    operands = _operands(length)
    own, expected = selective_scan(*operands), _place_by_place(*operands)
    for one, other in zip(own, expected, strict=True):
        torch.testing.assert_close(one, other)
    factors = [torch.randn_like(each) for each in own]
    for taken in ((0,), (1,), (0, 1)):
        losses = [sum((each[slot] * factors[slot]).sum() for slot in taken) for each in (own, expected)]
        gradients = [
            torch.autograd.grad(loss, operands, retain_graph=True, allow_unused=True, materialize_grads=True)
            for loss in losses
        ]
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_places_that_forget_everything() -> None:
    """A decay that is zero in floating point, within a block and at its end, has the gradients of the loop."""
    operands = _operands(130)
    with torch.no_grad():
        operands[1][:, :, [7, 64, 129]] = 1e6
    own, expected = (
        torch.autograd.grad(function(*operands)[0].tanh().sum(), operands)
        for function in (selective_scan, _place_by_place)
    )
    for one, other in zip(own, expected, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_half_precision() -> None:
    """States are in single precision; results have the dtype of the operand."""
    operands = _operands(130, dtype=torch.bfloat16)
    results, last = selective_scan(*operands)
    expected, state = _place_by_place(*(each.float() for each in operands))
    assert (results.dtype, last.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(results, expected.bfloat16())
    torch.testing.assert_close(last, state)
    gradients = torch.autograd.grad(results.float().sum() + last.sum(), operands)
    assert {each.dtype for each in gradients} == {torch.bfloat16}


@pytest.mark.parametrize(("length", "blocks", "places"), [(1, 1, 1), (64, 1, 64), (65, 2, 33), (4096, 64, 64)])
def test_blocks(length: int, blocks: int, places: int) -> None:
    """They have at most 64 places, and as many each but for what is missing at the end."""
    assert block_sizes(length) == (blocks, places)


def _run(length: int, channels: int, width: int) -> tuple[Kernels, Kernels]:
    """The kernels of both passes."""
    with torch.no_grad():
        operands = _operands(length, channels, width, torch.float32)
        with Kernels() as forward:
            blocks = Blocks.of(*operands)
            blocks.results(blocks.states(None)[0])
        with Kernels() as backward:
            blocks = Blocks.of(*operands)
            before, of_results = blocks.states(None)[0], blocks.by_place(operands[0])
            after, _ = blocks.of_states(blocks.of_ends(of_results), None)
            blocks.gradients(operands, before, of_results, after)
    return forward, backward


@pytest.mark.parametrize("length", [256, 1000, 9000])
def test_kernels_are_counted(length: int) -> None:
    """Within 3% of what runs."""
    for run, said in zip(_run(length, 4, 4), selective_kernels(length), strict=True):
        assert run.others == pytest.approx(said, rel=0.03)


def test_passes_are_counted() -> None:
    """The bytes that both passes read and write are within 5% of what the rule says."""
    operands = _operands(256, 128, 32, torch.float32)
    one = one_op(Sample("autopar.selective_scan.default", tuple(operands), {}))
    assert one.rule is not None
    for run, passes in zip(_run(256, 128, 32), one.rule.passes, strict=True):
        assert run.bytes == pytest.approx(passes * operands[0].nbytes, rel=0.05)
