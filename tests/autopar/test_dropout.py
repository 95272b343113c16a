"""Dropout: equal on replicas, independent on shards, right in mean and variance, reproducible from a seed."""

import functools
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from autopar import parallelize
from autopar.testing.ranks import run_ranks
from tests import models

PROBABILITY = 0.25
ROWS, WIDTH = 64, 256


class Dropping(nn.Module):
    """Dropout of a product with ones."""

    def __init__(self, probability: float = PROBABILITY) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.drop = nn.Dropout(probability)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """x: [rows, width]."""
        dropped = self.drop(x * self.scale)
        return {"loss": dropped.sum(), "dropped": dropped}


def _whole(value: object) -> Tensor:
    assert isinstance(value, Tensor)
    return value.full_tensor() if isinstance(value, DTensor) else value


def _dropped(layout: Mapping[str, str], sizes: Mapping[str, int], seed: int) -> list[dict[str, Tensor]]:
    """Two passes of a rank: what was left of ones, this rank's part of it, and the gradient of the scales."""
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    constraints = {"drop/dropout": {"out": dict(layout)}}
    x = torch.ones(ROWS, WIDTH, dtype=torch.float64)
    module = parallelize(Dropping(), mesh, {"x": x}, cluster="ideal", constraints=constraints)
    found = []
    for _ in range(2):
        output = module(x=x)
        output["loss"].backward()
        gradient = module.scale.grad
        found.append(
            {
                "whole": _whole(output["dropped"]).detach(),
                "loss": output["loss"].detach(),
                "gradient": _whole(gradient).clone(),
            }
        )
        module.zero_grad()
    return found


@functools.cache
def _ranks(rows: str, columns: str, seed: int) -> list[list[dict[str, Tensor]]]:
    results: list[list[dict[str, Tensor]]] = run_ranks(
        _dropped, 4, {"dp": rows, "tp": columns}, {"dp": 2, "tp": 2}, seed
    )
    return results


LAYOUTS = [("R", "R"), ("S(0)", "R"), ("S(0)", "S(1)"), ("R", "S(1)"), ("S(0)", "S(0, 2)")]


@pytest.mark.parametrize(
    ("rows", "columns"), [*(pytest.param(*case, marks=pytest.mark.slow) for case in LAYOUTS[:-1]), LAYOUTS[-1]]
)
def test_replicas_drop_the_same(rows: str, columns: str) -> None:
    """All ranks see one whole; the sum that each makes of its own copy, or its part, is that of the whole."""
    ranks = _ranks(rows, columns, 0)
    whole = ranks[0][0]["whole"]
    for rank in ranks:
        assert torch.equal(rank[0]["whole"], whole)
        torch.testing.assert_close(rank[0]["loss"], whole.sum(), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("rows", "columns"), LAYOUTS)
def test_shards_drop_independently(rows: str, columns: str) -> None:
    """No two blocks that ranks may have made by themselves are alike: they agree as often as chance makes them."""
    whole = _ranks(rows, columns, 0)[0][0]["whole"]
    blocks = [block for half in whole.chunk(4) for block in half.chunk(2, 1)]
    agreement = PROBABILITY**2 + (1 - PROBABILITY) ** 2
    allowed = 5 * (agreement * (1 - agreement) / blocks[0].numel()) ** 0.5
    for index, block in enumerate(blocks):
        for other in blocks[:index]:
            assert abs(float((block == other).double().mean()) - agreement) < allowed


@pytest.mark.long
@pytest.mark.parametrize(("rows", "columns"), LAYOUTS)
def test_mean_and_variance(rows: str, columns: str) -> None:
    """Elements are 0 or 1 / (1 - p); their mean is 1, their variance p / (1 - p), within five standard errors."""
    whole = _ranks(rows, columns, 0)[0][0]["whole"]
    kept = 1 / (1 - PROBABILITY)
    assert set(whole.unique().tolist()) == {0.0, kept}
    variance = PROBABILITY / (1 - PROBABILITY)
    assert abs(float(whole.mean()) - 1) < 5 * (variance / whole.numel()) ** 0.5
    assert abs(float(whole.var()) - variance) < 0.05 * variance


@pytest.mark.parametrize(("rows", "columns"), LAYOUTS)
def test_the_backward_pass_drops_what_the_forward_pass_dropped(rows: str, columns: str) -> None:
    """The gradient of a scale is the sum of what was left of its column."""
    for result in _ranks(rows, columns, 0)[0]:
        torch.testing.assert_close(result["gradient"], result["whole"].sum(0), rtol=1e-12, atol=0)


def test_a_seed_makes_a_run_reproducible() -> None:
    """The same seed drops the same, another one drops other elements, and so does the next pass."""
    first, second = _ranks("S(0)", "S(1)", 0)[0]
    again = run_ranks(_dropped, 4, {"dp": "S(0)", "tp": "S(1)"}, {"dp": 2, "tp": 2}, 0)[0][0]
    other = _ranks("S(0)", "S(1)", 1)[0][0]
    assert torch.equal(first["whole"], again["whole"])
    assert not torch.equal(first["whole"], second["whole"])
    assert not torch.equal(first["whole"], other["whole"])


class _Depth(nn.Module):
    """Samples are left out of a layer, as stochastic depth does it, and noise is drawn into memory that is there."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """x: [rows, width]."""
        kept = x.new_empty(x.shape[0], 1).bernoulli_(1 - PROBABILITY).div_(1 - PROBABILITY)
        left = x * self.scale * kept
        noise = torch.empty_like(x).uniform_(-2.0, 3.0)
        counts = torch.empty_like(x).random_(1, 4)
        return {"loss": left.sum(), "left": left, "noise": noise, "counts": counts}


def _drawn_in_place() -> dict[str, Tensor]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.ones(ROWS, WIDTH, dtype=torch.float64)
    module = parallelize(_Depth(), mesh, {"x": x}, cluster="ideal")
    output = module(x=x)
    output["loss"].backward()
    found = {name: _whole(output[name]).detach() for name in output}
    return {**found, "gradient": _whole(module.scale.grad)}


def test_numbers_that_are_drawn_in_place() -> None:
    """Whole samples are left out, alike on replicas; numbers are as they are asked for."""
    first, *others = run_ranks(_drawn_in_place, 4)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in ("left", "noise", "counts", "gradient"))
    left = first["left"]
    assert torch.equal(left, left[:, :1].expand_as(left))
    torch.testing.assert_close(left.unique(), torch.tensor([0.0, 1 / (1 - PROBABILITY)], dtype=torch.float64))
    assert torch.equal(first["gradient"], left.sum(0))
    assert first["noise"].min() >= -2.0
    assert first["noise"].max() < 3.0
    assert abs(first["noise"].mean() - 0.5) < 0.1
    assert first["counts"].unique().tolist() == [1.0, 2.0, 3.0]


def _trained(dropout: float) -> tuple[list[float], list[float], list[float]]:
    """Losses of GPT-2 with dropout everywhere: two passes, the same two from the same seed, two in evaluation."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = models.gpt2(resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout).double()
    inputs = models.tokens()
    module = parallelize(model, mesh, inputs, cluster="ideal")

    def passes() -> list[float]:
        return [float(module(**inputs).loss.detach()) for _ in range(2)]

    module.random.seed(7)
    first = passes()
    module.random.seed(7)
    again = passes()
    module(**inputs).loss.backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    module.eval()
    with torch.no_grad():
        expected = float(model.eval()(**inputs).loss)
        evaluated = passes()
    assert abs(evaluated[0] - expected) < 1e-6 * abs(expected)  # the loss is in float32
    return first, again, evaluated


@pytest.mark.long
def test_a_model_with_dropout_everywhere() -> None:
    """In projections, embeddings and attention; the loss is near the one without, and the same on all ranks."""
    ranks = run_ranks(_trained, 4, 0.1)
    first, again, evaluated = ranks[0]
    assert all(other == ranks[0] for other in ranks)
    assert first == again
    assert first[0] != first[1]
    assert evaluated[0] == evaluated[1]
    assert abs(first[0] - evaluated[0]) < 0.2 * evaluated[0]
