"""Models and batches that are held on `fully_shard` against one device; operators that run, and gradients."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import ViTConfig, ViTForImageClassification

import autopar
from autopar.runtime import DistributedModule
from tests.autopar.stored import storage
from tests.models import Block, gpt2, llama, tokens

AXES: Mapping[int, tuple[str, ...]] = {1: ("dp",), 2: ("dp", "tp")}


def vit() -> nn.Module:
    """Two layers on images of 8 x 8."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    images = {"image_size": 8, "patch_size": 4, "num_labels": 4}
    config = ViTConfig(**sizes, **images, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return ViTForImageClassification(config)


def images() -> dict[str, torch.Tensor]:
    """Four images and their labels."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.tensor([0, 1, 2, 3])}


class Exits(nn.Module):
    """Three blocks with a head on what the first one gives, and one on the sum of all: both read it as it is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.early, self.late = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """x: [batch, 16]."""
        kept = []
        for block in self.blocks:
            x = block(x)
            kept.append(x)
        return {"loss": self.early(kept[0]).pow(2).mean() + self.late(kept[0] + kept[1] + x).pow(2).mean()}


def rows() -> dict[str, torch.Tensor]:
    """Eight rows of 16 features."""
    return {"x": torch.randn(8, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)}


MODELS: Mapping[str, tuple[Callable[..., nn.Module], Callable[..., dict[str, torch.Tensor]]]] = {
    "llama": (llama, tokens),
    "tied llama": (lambda: llama(tie_word_embeddings=True), tokens),
    "gpt2": (gpt2, tokens),
    "vit": (vit, images),
    "exits": (Exits, rows),
}


def mesh_of(sizes: tuple[int, ...]) -> DeviceMesh:
    """The mesh of a rank's process group."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=AXES[len(sizes)])


class Counting(TorchDispatchMode):
    """Counts collectives by name while it is entered, but for those that compare calls, over a CPU group."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        name = func._opname.strip("_")
        compares = any(isinstance(arg, str) and arg.startswith("autopar_cpu") for arg in args)
        if func.namespace in ("c10d", "_c10d_functional") and name != "wait_tensor" and not compares:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def calls_in(run: Callable[[], object]) -> Counter[str]:
    """Collectives by name."""
    with Counting() as counting:
        run()
    return counting.counts


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole gradients by name."""
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {name: item.full_tensor() if isinstance(item, DTensor) else item for name, item in found.items()}


def are_close(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> bool:
    """Equal but for rounding in float64."""
    return set(ours) == set(theirs) and all(
        torch.allclose(ours[name], theirs[name], rtol=1e-9, atol=1e-12) for name in theirs
    )


def made_with(
    model: nn.Module, sizes: tuple[int, ...], inputs: Mapping[str, torch.Tensor], **options: Any
) -> DistributedModule:
    """A distributed model, its parameters stored in parts on the first axis."""
    options = {"cluster": "ideal", "constraints": storage(dp="S(0)"), **options}
    return autopar.parallelize(model, mesh_of(sizes), inputs, **options)


def batch_of(seed: int) -> dict[str, torch.Tensor]:
    """Eight rows of 16 features, and what they are held against."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(8, 16, generator=generator, dtype=torch.float64) for name in ("x", "target")}
