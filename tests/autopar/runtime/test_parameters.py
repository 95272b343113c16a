"""Parameters that change after they were planned."""

import pytest
import torch
from torch import nn

from autopar.runtime.parameters import ParameterWatch
from passes.ir.errors import InputError
from passes.ir.plan import ParameterPlan


class Tied(nn.Module):
    """A table, a head that shares it, and a bias that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4)
        self.head.weight = self.table.weight
        self.head.bias.requires_grad_(False)


def watched() -> tuple[Tied, ParameterWatch]:
    """A module and its watch."""
    module = Tied()
    plans = {
        "table.weight": ParameterPlan((4, 2), "float32", {}, True),
        "head.bias": ParameterPlan((4,), "", {}, False),
    }
    return module, ParameterWatch(module, plans, lambda: None)


def test_flags() -> None:
    """They are those of now, in the order of the names, ties under the first one."""
    module, watch = watched()
    assert watch.names == ["table.weight", "table.weight", "head.bias"]
    assert watch.flags() == b"\1\1\0"
    module.table.weight.requires_grad_(False)
    assert watch.flags() == b"\0\0\0"
    module.table.weight = module.head.weight = nn.Parameter(torch.zeros(4, 2))
    assert watch.flags() == b"\1\1\0"
    for _ in range(2):
        module.head.bias.requires_grad_(True)
        with pytest.raises(InputError, match=r"the parameter 'head.bias' requires a gradient, but was frozen"):
            watch.flags()
    module.head.bias.requires_grad_(False)
    assert watch.flags() == b"\1\1\0"


def test_ties() -> None:
    module, watch = watched()
    module.head.weight = nn.Parameter(torch.zeros(4, 2))
    for _ in range(2):
        with pytest.raises(InputError, match=r"'table.weight' and 'head.weight' were one parameter"):
            watch.flags()
