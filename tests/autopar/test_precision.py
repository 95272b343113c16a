"""Gradients of parameters are reduced and added up in float32 where the model computes in less."""

import contextlib
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar import Precision
from autopar.testing import run_ranks
from tests.autopar.stored import storage
from tests.autopar.without_engine import without_engine

# What a sample adds to the gradient of each weight: one number, and others that bfloat16 loses beside it.
LARGE, SMALL = 1.0, 2.0**-9


class Sum(nn.Module):
    """A weight whose gradient is the sum of the samples, and one that is read in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1, bias=False)
        self.twice = nn.Linear(8, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 8]."""
        return (self.linear(x) + self.twice(x) + self.twice(2 * x)).sum()


def samples(count: int) -> Tensor:
    """One large sample, and small ones: [count, 8]."""
    x = torch.full((count, 8), SMALL)
    x[0] = LARGE
    return x


def _gradients(cases: list[tuple[Mapping[str, object], str, int, bool]]) -> list[dict[str, tuple[Tensor, torch.dtype]]]:
    """On each rank the gradients of every case, after two backward passes."""
    found = []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "other"))
    for options, stored, micro_batches, engine in cases:
        x = samples(4 * micro_batches)
        with contextlib.nullcontext() if engine else without_engine():
            dist_model = autopar.parallelize(
                Sum(),
                mesh,
                {"x": x},
                cluster="ideal",
                constraints={**storage(dp=stored, other="I"), "@linear": {"method": {"dp": "d0", "other": "d0@2"}}},
                micro_batches=micro_batches,
                **options,
            )
        for _ in range(2):
            dist_model.forward_backward(x=x)
        gradients = {}
        for name, parameter in dist_model.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            gradients[name] = parameter.grad.full_tensor(), parameter.grad.dtype
        found.append(gradients)
    return found


CASES = [
    ({"precision": torch.bfloat16}, stored, micro_batches, engine)
    for stored in ("S(1)", "I")
    for micro_batches, engine in ((1, True), (2, True), (2, False))
]
HALF: tuple[Mapping[str, object], str, int, bool]
HALF = ({"precision": Precision(compute=torch.bfloat16, reduce=torch.bfloat16)}, "I", 1, True)


@pytest.mark.long
def test_gradients_add_up_in_float32() -> None:
    """As exactly as on one device that adds in float32: over devices, micro-batches and backward passes, by
    `fully_shard` and by generated code."""
    *found, half = run_ranks(_gradients, 4, [*CASES, HALF])[0]
    for case, gradients in zip(CASES, found, strict=True):
        expected = 2 * samples(4 * case[2]).sum(0, keepdim=True)
        for name, factor in (("linear.weight", 1), ("twice.weight", 3)):
            gradient, dtype = gradients[name]
            assert dtype == torch.float32
            assert torch.equal(gradient, factor * expected), (case, name)
    assert not torch.equal(half["linear.weight"][0], 2 * samples(4).sum(0, keepdim=True))


@pytest.mark.parametrize(
    ("precision", "reduce"),
    [
        (Precision(), None),
        (Precision(compute=torch.bfloat16), torch.float32),
        (Precision(compute=torch.float16), torch.float32),
        (Precision(compute=torch.bfloat16, reduce=torch.bfloat16), torch.bfloat16),
        (Precision(compute=torch.float32), None),
        (Precision(compute=torch.float64), None),
    ],
    ids=str,
)
def test_the_default(precision: Precision, reduce: torch.dtype | None) -> None:
    """float32 where less is computed in, unless it is said otherwise."""
    assert precision.reduce == reduce
