"""Modules that have a model of transformers inside, and batches for them."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from tests.models import gpt2, llama, tokens


class Adapter(nn.Module):
    """A linear layer that is frozen, and two of low rank beside it."""

    def __init__(self, linear: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., width]."""
        result: Tensor = self.base_layer(x) + 2.0 * self.up(self.down(x))
        return result


class Adapted(nn.Module):
    """A model with adapters, as libraries of fine-tuning make it: all else is frozen, and arguments are passed on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = llama().requires_grad_(False)
        for layer in self.model.model.layers:
            for name in ("q_proj", "v_proj"):
                setattr(layer.self_attn, name, Adapter(getattr(layer.self_attn, name)))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: object) -> object:
        """input_ids, labels: [batch, length]. Returns what the model does."""
        return self.model(input_ids=input_ids, labels=labels, **kwargs)


class Preference(nn.Module):
    """A backbone that scores two answers, of which the first one is better."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = gpt2().transformer
        self.head = nn.Linear(self.backbone.config.hidden_size, 1, bias=False)

    def forward(self, chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
        """chosen, rejected: [batch, length]."""
        scores = [self.head(self.backbone(ids).last_hidden_state[:, -1]) for ids in (chosen, rejected)]
        return {"loss": -nn.functional.logsigmoid(scores[0] - scores[1]).sum() / len(chosen), "scores": scores[0]}


class Packing(nn.Module):
    """Several texts in a row, each begun by a certain token, whose positions this module counts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = llama()

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:
        """input_ids, labels: [batch, length]; the first token of a text is 3."""
        places = torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape)
        begins = torch.where(input_ids == 3, places, 0).cummax(1).values
        return self.model(input_ids=input_ids, labels=labels, position_ids=places - begins)


def _pairs() -> dict[str, Tensor]:
    ids = tokens()["input_ids"]
    return {"chosen": ids, "rejected": ids.flip(0)}


def _texts() -> dict[str, Tensor]:
    inputs = tokens()
    for sample, place in enumerate((0, 3, 5, 9)):
        inputs["input_ids"][sample, place] = 3
        inputs["input_ids"][sample, 12] = 3
    return inputs


WRAPPED: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "adapted": (Adapted, tokens),
    "preference": (Preference, _pairs),
    "packing": (Packing, _texts),
}
