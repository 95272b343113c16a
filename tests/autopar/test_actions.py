"""Random sequences of steps, evaluation, other batches, freezing, states and hooks: all equal to one device."""

from collections.abc import Sequence
from math import prod

import pytest

from autopar.testing import run_ranks
from tests.autopar.actions import MESHES, sequence

# Models that are small and quick to plan, with tied, fused and grouped parameters, windows, sinks and buffers.
MODELS = ("llama", "tied llama", "qwen3", "mistral", "gpt2", "gemma2", "gpt_oss", "phi3", "t5", "normed")
# At night also encoders, mixtures, scans, and models of images and sound.
OTHERS = (
    *("bert", "vit", "mamba", "mixtral-batched_mm", "qwen3_next-batched_mm", "bart", "opt", "bloom", "whisper"),
    *("resnet", "mamba2", "lfm2", "falcon", "modernbert", "deepseek_v3-batched_mm", "swin", "albert", "convnext"),
)
ACTIONS = 12


def _checked(mesh: str, models: Sequence[str], seeds: Sequence[int]) -> int:
    """Runs the sequences of these seeds; the number of those that were planned."""
    planned = 0
    for seed in seeds:
        found = run_ranks(sequence, prod(MESHES[mesh].values()), seed, mesh, models, ACTIONS, timeout=600)
        assert not any(wrong for _, wrong in found), next(item for item in found if item[1])
        planned += "not planned" not in found[0][0]
    return planned


@pytest.mark.parametrize(
    ("mesh", "seed"), [("pp", 3), *(pytest.param(*case, marks=pytest.mark.long) for case in (("dp", 1), ("2d", 2)))]
)
def test_random_actions(mesh: str, seed: int) -> None:
    """Gradients, parameters and buffers after each action."""
    assert _checked(mesh, MODELS, [seed]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_more_random_actions(mesh: str) -> None:
    """On every mesh."""
    seeds = range(100, 112 if prod(MESHES[mesh].values()) < 8 else 102)
    assert _checked(mesh, (*MODELS, *OTHERS), seeds) >= len(seeds) / 2
