"""Small modules of equal layers, of which the bytes of every tensor are known."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

ROWS, WIDTH, LAYERS = 8, 16, 3


class Between(nn.Module):
    """Cheap functions between two products: each reads what the one before gives."""

    def __init__(self, *functions: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.functions = functions

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        x = self.first(x)
        for function in self.functions:
            x = function(x)
        result: Tensor = self.second(x)
        return result


class Layers(nn.Module):
    """Layers that `layer` makes, one after the other, and a sum."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """Apply all layers. x: [ROWS, WIDTH]."""
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def batch() -> dict[str, Tensor]:
    """The inputs of `Layers`."""
    return {"x": torch.zeros(ROWS, WIDTH)}
