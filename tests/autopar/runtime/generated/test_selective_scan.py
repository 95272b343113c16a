"""The scan of split places: its price counts the kernels that run."""

import pytest
import torch

from autopar.runtime.generated.selective_scan import gradient_after, states_between
from passes.cost.cluster import CLUSTERS
from passes.cost.price import OpPrices
from passes.rules.strategies import combine, named_choices
from passes.scans.selective import Blocks
from tests.autopar.runtime.generated.kernels import Kernels
from tests.passes.helpers import mesh_of
from tests.passes.rules.one_op import one_op
from tests.passes.rules.samples import Sample


def _operands(length: int) -> tuple[torch.Tensor, ...]:
    sizes = ((2, 4, length), (2, 4, length), (4, 3), (2, 3, length), (2, 3, length))
    return tuple(torch.rand(size) for size in sizes)


def _run(length: int, ranks: int) -> tuple[int, int]:
    """The kernels of the forward and of the backward pass of the first of `ranks`, each of which has `length` places;
    what collectives do is not counted."""
    operands = _operands(length)
    with Kernels() as forward:
        blocks = Blocks.of(*operands)
        _, end = blocks.states(None)
        own = torch.cat((blocks.factor(), end))
    factors, ends = own.unsqueeze(2).repeat(1, 1, ranks, 1).chunk(2)
    with forward:
        before, _ = states_between(factors, ends, 0)
        blocks.results(blocks.states(before)[0])
    with Kernels() as backward:
        blocks = Blocks.of(*operands)
        of_results = blocks.by_place(operands[0])
        of_ends = blocks.of_ends(of_results)
        blocks.of_states(of_ends, None)
        after, _ = blocks.of_states(of_ends, gradient_after(factors, ends, 0, None))
        blocks.gradients(operands, blocks.states(before)[0], of_results, after)
    return forward.others, backward.others


@pytest.mark.parametrize(("length", "ranks"), [(4096, 2), (4096, 8), (65536, 64), (16384, 2)])
def test_kernels_are_counted(length: int, ranks: int) -> None:
    """Within 3% of what runs on the first rank."""
    one = one_op(Sample("autopar.selective_scan.default", _operands(length), {}))
    mesh = mesh_of(cp=ranks)
    choices = named_choices(one.context, ["places"], mesh)
    assert choices is not None
    said = OpPrices(one.context, CLUSTERS["h100"], mesh).parts(choices, combine(one.context, choices)).kernels
    assert said is not None
    for run, kernels in zip(_run(length // ranks, ranks), said, strict=True):
        assert run == pytest.approx(kernels, rel=0.03)
