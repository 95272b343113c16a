"""Models with custom autograd functions, whose backward is not the derivative of their forward, on gloo ranks."""

import random
from contextlib import nullcontext
from functools import partial
from itertools import product
from math import prod

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import BloomConfig, BloomForCausalLM, PhimoeConfig, PhimoeForCausalLM
from transformers.models.phimoe.modeling_phimoe import PhimoeMultiplier

import autopar
from autopar.testing import compare, compare_on_mesh, run_ranks
from passes.ir.choices import Solution
from tests.autopar.comparing import TOLERANCE
from tests.autopar.solving import solved_by
from tests.autopar.test_random_plans import random_solution
from tests.models import tokens
from tests.passes import custom

MESHES = {"tp": {"tp": 2}, "dp, tp": {"dp": 2, "tp": 2}}


def _exact(model: nn.Module, mesh: str, inputs: dict[str, Tensor]) -> None:
    comparison = compare(model, MESHES[mesh], inputs, cluster="ideal")
    assert comparison.worst[1] <= TOLERANCE, str(comparison)


class Custom(nn.Module):
    """A function between two layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """x: [batch, 16]."""
        return {"loss": self.down(_FUNCTIONS[self.kind](self.up(x))).square().mean()}


def _centered(x: Tensor) -> Tensor:
    centered, mean = custom.Centered.apply(x)
    return centered + 2 * mean


_FUNCTIONS = {
    "straight": lambda x: custom.StraightThrough.apply(3 * x),
    "reversed": lambda x: custom.Reversal.apply(x, 0.5),
    "clipped": lambda x: custom.Clipped.apply(x, 1e-3),
    "normed": lambda x: custom.Normed.apply(x),
    "centered": _centered,
    "scaled": lambda x: custom.Scaled.apply(x, x.cos(), {"weight": 2.0}),
    "sized": lambda x: custom.Sized.apply(x),
}

# What looks at rows, at a size, or at all of a gradient is not the same function on a part.
_WHOLE = {"normed", "centered", "sized"}

_X = {"x": torch.randn(8, 16, generator=torch.Generator().manual_seed(1))}


def _errors(sizes: dict[str, int], seeds: range) -> list[str]:
    """On a rank: every function under the best plan, and under random ones; those that are not as on one device."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    inputs = {"x": _X["x"].double()}
    wrong = []
    for kind, seed in product(_FUNCTIONS, (None, *seeds)):
        solver = nullcontext() if seed is None else solved_by(_any(seed))
        with solver:
            comparison = compare_on_mesh(Custom(kind).double(), mesh, inputs, torch.float64, cluster="ideal")
        if not comparison.worst[1] <= TOLERANCE:
            wrong.append(f"{kind}, seed {seed}: {comparison}")
    return wrong


def _any(seed: int) -> partial[Solution]:
    return partial(random_solution, random.Random(seed))


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "seeds"),
    [
        ("tp", range(1)),
        *(
            pytest.param(mesh, seeds, marks=pytest.mark.slow)
            for mesh, seeds in (("dp, tp", range(4)), ("tp", range(1, 4)))
        ),
    ],
    ids=str,
)
def test_gradients_are_those_of_the_function(mesh, seeds):
    assert run_ranks(_errors, prod(MESHES[mesh].values()), MESHES[mesh], seeds)[0] == []


@pytest.mark.parametrize("kind", _FUNCTIONS)
def test_the_plan_says_what_is_whole(kind):
    plan = autopar.plan(Custom(kind), {"dp": 2, "tp": 2}, _X, cluster="ideal")
    assert list(plan.whole_ops) == (["/autograd_function"] if kind in _WHOLE else [])
    methods = plan.programs["train"].stages[0].decisions["/autograd_function"]
    assert any(method.startswith("d") for method in methods) == (kind not in _WHOLE)


def _rows(kind: str, placement: str) -> None:
    """Plan with the function's results held to a placement on both axes."""
    demand = {"@autograd_function": {"out": {"dp": placement, "tp": placement}}}
    autopar.plan(Custom(kind), {"dp": 2, "tp": 2}, _X, cluster="ideal", constraints=demand)


def test_a_gradient_that_is_clipped_is_never_a_sum_to_be_made():
    """Clipped addends would not add up to a clipped sum."""
    _rows("reversed", "R")
    _rows("clipped", "I")
    with pytest.raises(autopar.AutoparError):
        _rows("clipped", "R")


class Routed(nn.Module):
    """The function of phimoe's router, without the random draws."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(16, 4)
        self.values = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """x: [batch, 16]."""
        scores = self.router(x)
        gates = scores.softmax(-1)
        picked = scores.argmax(-1, keepdim=True)
        weight = PhimoeMultiplier.apply(scores, gates.gather(-1, picked), picked, gates, torch.ones_like(gates[:, :1]))
        return {"loss": (self.values(x) * weight).square().mean()}


@pytest.mark.parametrize("mesh", MESHES)
def test_a_router(mesh):
    _exact(Routed(), mesh, _X)


def _bloom() -> nn.Module:
    torch.manual_seed(0)
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    quiet = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4, **quiet, **special))


def _phimoe() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    # Without jitter nothing that it draws at random changes anything.
    quiet = {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0, "attention_dropout": 0.0}
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "max_position_embeddings": 32}
    model = PhimoeForCausalLM(PhimoeConfig(**sizes, **heads, **quiet, **special))
    # The other ways to compute experts take no float64.
    model.set_experts_implementation("batched_mm")
    return model


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("make", [_bloom, pytest.param(_phimoe, marks=pytest.mark.slow)])
def test_stock_models(make, mesh):
    _exact(make(), mesh, tokens(length=8))


def test_blooms_activation_is_split():
    plan = autopar.plan(_bloom(), {"dp": 2, "tp": 2}, tokens(length=8), cluster="ideal")
    assert not [key for key in plan.whole_ops if "autograd_function" in key]
