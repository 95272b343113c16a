"""An architecture to be tested, and the ways to make one."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from tests.architectures.batches import Batch, Kind, image, pair, patches, sound, spectrogram
from tests.architectures.configs import large_config, small_config
from tests.architectures.modules import Scored

LENGTH = 16


@dataclass(frozen=True)
class Architecture:
    """A stock model in small: `make` makes it (in float32), `inputs` makes a batch of so many samples.

    `unused` are patterns of parameters that have no part in the loss. `extra` is what is tested at night only. `large`
    makes the architecture as its config has it by default, but for two layers or four, on meta, with a batch for it;
    None where there is no default. `refused` is what an error says, by objective, where it cannot be traced.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], Batch]
    dtype: torch.dtype = torch.float64
    unused: tuple[str, ...] = ()
    extra: bool = False
    large: Callable[[], tuple[nn.Module, Batch]] | None = None
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)


# Lengths of the texts that large architectures get; those whose sequences are unrolled in the trace get the short one.
LONG = 1024


# Samples in the batch of a large architecture, where it is not 128; the ones they were trained with are as large.
# Patches are of images of their own sizes, each of which stands in the trace by itself.
SAMPLES: Mapping[Kind, int] = {image: 1024, pair: 1024, sound: 256, spectrogram: 256, patches: 8}


def mixture(name: str, stock: str, kind: Kind, **own: Any) -> Iterator[Architecture]:
    """A mixture of experts, once with every way of computing its experts that can be traced."""
    for implementation, dtype in (("batched_mm", torch.float64), ("grouped_mm", torch.float32)):

        def with_experts(model: Any, implementation: str = implementation) -> nn.Module:
            model.set_experts_implementation(implementation)
            return model

        yield changed_models(stock_model(f"{name}-{implementation}", stock, kind, dtype=dtype, **own), with_experts)


def scored_model(one: Architecture, output: str) -> Architecture:
    """An architecture without a loss, whose output by this name is scored."""
    return changed_models(one, lambda model: Scored(model, output))


def changed_models(one: Architecture, change: Callable[[nn.Module], nn.Module]) -> Architecture:
    """An architecture whose models are changed once they are made."""

    def large() -> tuple[nn.Module, Batch]:
        assert one.large is not None
        model, batch = one.large()
        return change(model), batch

    return dataclasses.replace(one, make=lambda: change(one.make()), large=large)


def stock_model(
    name: str,
    stock: str,
    kind: Kind,
    *,
    dtype: torch.dtype = torch.float64,
    unused: tuple[str, ...] = (),
    unrolled: bool = False,
    refused: Mapping[str, str] | None = None,
    **own: Any,
) -> Architecture:
    """An architecture of transformers: its class, the kind of its batch, and what its config has of its own."""

    def config() -> Any:
        return small_config(getattr(transformers, stock).config_class, own)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return stirred(getattr(transformers, stock)(config()))

    def large() -> tuple[nn.Module, Batch]:
        made = large_config(getattr(transformers, stock).config_class, own)
        with torch.device("meta"):
            model: nn.Module = getattr(transformers, stock)(made)
        limits = (
            getattr(made.get_text_config(), name, None) for name in ("max_position_embeddings", "max_target_positions")
        )
        longest = min(LONG, *(limit for limit in limits if limit and limit > 0), LONG)
        return model.train(), kind(made, SAMPLES.get(kind, 128), LENGTH if unrolled else longest)

    def inputs(samples: int) -> Batch:
        return kind(config(), samples, LENGTH)

    return Architecture(name, make, inputs, dtype, unused, large=large, refused=refused or {})


def stirred(model: nn.Module) -> nn.Module:
    """The model with noise on its weights: those that are all zeros or ones would hide what goes wrong with them."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model.train()


def other_model(name: str, make: Callable[[], nn.Module], inputs: Callable[[int], Batch]) -> Architecture:
    """An architecture that is not of transformers."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return stirred(make())

    return Architecture(name, made, inputs)
