"""Ranks of a pipeline allocate the memory that is planned for them."""

from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.testing.ranks import run_ranks
from passes.ir.configuration import stage_places
from tests.autopar.simulated import OPTIMIZERS, allocated_bytes
from tests.models import gpt2, llama, tokens

# Bytes of tensors of single numbers.
_NUMBERS = 256


def _on_rank(name: str, schedule: str, options: Mapping[str, object]) -> tuple[list[float], int]:
    """Bytes of this rank's stages as planned, and as they are allocated."""
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    model = llama(num_hidden_layers=8) if name == "llama" else gpt2(n_layer=4)
    inputs = tokens(16, 32)
    pipeline = autopar.Pipeline(schedule=schedule)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("pp",))
    module = autopar.parallelize(
        model, mesh, inputs, **{"cluster": "ideal", "micro_batches": 8, "pipeline": pipeline, **options}
    )
    stages = module.plan.programs["train"].stages
    places = stage_places(schedule, ranks, len(stages))
    planned = [
        sum(stage.memory.values()) for stage, place in zip(stages, places, strict=True) if place == dist.get_rank()
    ]
    return planned, allocated_bytes(module, inputs, OPTIMIZERS["adamw"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "ranks", "options"),
    [
        pytest.param("llama", 4, {}, marks=pytest.mark.slow),
        ("llama", 2, {"recompute": "full"}),
        pytest.param("llama", 2, {"recompute": "selective"}, marks=pytest.mark.slow),
        pytest.param("llama", 2, {"micro_batches": 4}, marks=pytest.mark.slow),
        pytest.param("gpt2", 2, {}, marks=pytest.mark.slow),
    ],
)
def test_ranks_allocate_what_is_planned(name: str, ranks: int, options: Mapping[str, object]) -> None:
    """Under 1F1B, with the messages that torch holds, and the inputs that only other stages read."""
    for (planned,), allocated in run_ranks(_on_rank, ranks, name, "1f1b", options):
        assert allocated == pytest.approx(planned, abs=_NUMBERS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    ["zb_h1", "gpipe", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"],
)
def test_ranks_allocate_no_more_than_is_planned(schedule: str) -> None:
    """Several stages of a rank are not fullest at once, as many messages are counted as there may be under way at all,
    and all forward passes but the first as if backward passes had left gradients."""
    for planned, allocated in run_ranks(_on_rank, 2, "llama", schedule, {}):
        assert allocated - _NUMBERS <= sum(planned) <= 1.25 * allocated
