"""Programs without ops that do nothing and ops that repeat others."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from passes.ir.folded import Region
from passes.regions import fold
from tests.passes.helpers import Apply, normalized, op_lines

X = torch.ones(4, 6)


def _lines(function: object) -> list[str]:
    return op_lines(normalized(Apply(function), x=X))


def test_padding_by_nothing_is_dropped() -> None:
    """As a model pads a sequence that divides into blocks."""
    assert _lines(lambda x: functional.pad(x, (0, 0, 0, 0)) + 1) == ["%add = add(x, other=1)"]
    assert [line.split("(")[0] for line in _lines(lambda x: functional.pad(x, (0, 1)) + 1)] == [
        "%pad = pad",
        "%add = add",
    ]


def test_a_reshape_of_a_reshape_is_one() -> None:
    """And none where it gives back the shape; the first one stays where something else reads it."""
    assert _lines(lambda x: x.view(24).view(2, 12) + 1)[0].endswith("= reshape(x, shape=[2, 12])")
    assert _lines(lambda x: x.view(24).view(4, 6) + 1) == ["%add = add(x, other=1)"]
    read = _lines(lambda x: (x.view(24) * 2, x.view(24).view(2, 12) + 1))
    assert [line.split(" = ")[1] for line in read] == [
        "reshape(x, shape=[24])",
        "mul(%reshape_n0, other=2)",
        "reshape(x, shape=[2, 12])",
        "add(%reshape_n2, other=1)",
    ]


def test_pieces_that_are_put_together_again_are_a_reshape() -> None:
    """Rows of images, which some models give out by the image; the pieces must be all, and in order."""
    assert _lines(lambda x: torch.cat(list(x.unbind())) + 1)[0].endswith("reshape(x, shape=[24])")
    assert _lines(lambda x: torch.cat(list(x.unbind(1))) + 1)[-2].startswith("%cat = cat(")
    assert _lines(lambda x: torch.cat([x[:1], x[1:]]) + 1) == ["%add = add(x, other=1)"]
    assert _lines(lambda x: torch.cat(x.view(2, 2, 6).unbind(1), 1) + 1)[0].endswith("reshape(x, shape=[2, 12])")
    for pieces in (
        lambda x: [x[1], x[0], x[2], x[3]],
        lambda x: [x[0], x[1], x[2]],
        lambda x: [x[:2], x[3:]],
        lambda x: [x[::2], x[1::2]],
        lambda x: [x[:2], x[1:]],
        lambda x: [x[:2], (x + 1)[2:]],
    ):
        assert any("= cat(" in line for line in _lines(lambda x, pieces=pieces: torch.cat(pieces(x)) + 1))


def test_nothing_is_computed_twice() -> None:
    """Equal ops are one; 1 and 1.0, calls that draw random numbers, and results that are returned are not equal."""
    assert len(_lines(lambda x: x.exp() * x.exp().sum())) == 3
    assert len(_lines(lambda x: (x.int() + 1) * (x.int() + 1.0))) == 4
    assert len(_lines(lambda x: functional.dropout(x, 0.5) + functional.dropout(x, 0.5))) == 3
    assert len(_lines(lambda x: (x.exp(), x.exp()))) == 2


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        rows = self.linear(x.view(2, 2, 6) * table.exp())
        result: Tensor = rows.view(4, 6)
        return result


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        table = x[0]
        for layer in self.layers:
            x = layer(x, table)
        return x


def test_zeros_of_both_signs_are_two() -> None:
    """Python takes them for equal; ops do not."""
    ops = normalized(Apply(lambda x: (torch.copysign(x, 0.0), torch.copysign(x, -0.0))), x=X).ops
    assert [op.arguments["other"] for op in ops] == [0.0, -0.0]
    assert str(ops[1].arguments["other"]) == "-0.0"


def test_layers_stay_alike() -> None:
    """Each layer computes by itself a value that all of them compute of one tensor, and does not read a view that
    another one made, so that they are still copies of one region."""
    folded = fold(normalized(_Layers(), x=X))
    (region,) = (item for item in folded.items if isinstance(item, Region))
    assert region.count == 3
    assert [op.kind for op in region.ops] == ["reshape", "exp", "mul", "linear", "reshape"]
