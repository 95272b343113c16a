"""Convolutions that pad one side more than the other become one op, as long as their operand."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tests.passes.helpers import Apply, normalized
from tests.passes.normalize.running import run

X = torch.linspace(-1, 1, 2 * 6 * 10, dtype=torch.float64).reshape(2, 6, 10).sin()
OWN, MIXING = (torch.linspace(1, 2, 6 * inner * 4, dtype=torch.float64).reshape(6, inner, 4).cos() for inner in (1, 6))

Function = Callable[[Tensor], Tensor]
# By name: a convolution, and the padding of the op that it becomes.
PADDED: dict[str, tuple[Function, str]] = {
    "cut at the end": (lambda x: F.conv1d(x, OWN, padding=3, groups=6)[..., :10], "padding=[3, 0], groups=6"),
    "padded first": (lambda x: F.conv1d(F.pad(x, (3, 0)), MIXING), "padding=[3, 0]"),
    "with holes": (lambda x: F.conv1d(x, MIXING, padding=6, dilation=2)[:, :, :10], "padding=[6, 0], dilation=[2]"),
    "cut at the beginning": (lambda x: F.conv1d(x, MIXING, padding=3)[:, :, 3:13], "padding=[0, 3]"),
    "cut on both sides": (lambda x: F.conv1d(x, MIXING, padding=4)[:, :, 2:12], "padding=[2, 1]"),
    "padded twice": (lambda x: F.conv1d(F.pad(x, (1, 0)), MIXING, padding=2)[:, :, :10], "padding=[3, 0]"),
    "even": (lambda x: F.conv1d(x, MIXING, padding="same"), "padding=[1, 2]"),
}
# By name: a convolution that stays as it is written.
KEPT: dict[str, Function] = {
    "shorter": lambda x: F.conv1d(x, MIXING, padding=3)[:, :, :9],
    "read twice": lambda x: (lambda made: made[:, :, :10] + made.sum())(F.conv1d(x, MIXING, padding=3)),
    "with a stride": lambda x: F.conv1d(x, MIXING, padding=11, stride=2)[:, :, :10],
    "of channels": lambda x: F.conv1d(x, MIXING, padding=3)[:, :5],
    "padded with ones": lambda x: F.conv1d(F.pad(x, (3, 0), value=1.0), MIXING),
    "symmetric": lambda x: F.conv1d(x, MIXING[:, :, :3], padding=1),
    "beyond the operand": lambda x: F.conv1d(x, MIXING, padding=6)[:, :, :10],
}


def _normal(function: Function) -> tuple[list[str], str]:
    """The kinds of ops, and all of them as text; what they compute is checked, on 10 places."""
    program = normalized(Apply(lambda x: {"y": function(x)}), x=X)
    (found,) = run(program, {"x": X})[0].values()
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found, function(X), rtol=1e-12, atol=1e-12)
    return [op.kind for op in program.ops], str(program)


@pytest.mark.parametrize("name", PADDED)
def test_convolutions_as_long_as_their_operand_are_one_op(name: str) -> None:
    function, shown = PADDED[name]
    kinds, text = _normal(function)
    assert kinds == ["padded_conv1d"], text
    assert shown in text


@pytest.mark.parametrize("name", KEPT)
def test_others_stay(name: str) -> None:
    """Also where the window of a place would be all padding."""
    kinds, text = _normal(KEPT[name])
    assert "conv1d" in kinds, text
    assert "padded_conv1d" not in kinds, text
