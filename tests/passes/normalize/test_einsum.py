"""einsum of two tensors whose operands would be copied becomes copies and a matrix product."""

import pytest
import torch
from torch import Tensor

from tests.passes.helpers import Apply, normalized
from tests.passes.normalize.running import run

LEFT, RIGHT = (torch.linspace(-1, 1, 2 * 3 * 4 * 5, dtype=torch.float64).mul(scale).sin() for scale in (7, 9))

# By equation: the shapes of the operands, and the ops that it becomes.
WRITTEN: dict[str, tuple[tuple[int, ...], tuple[int, ...], list[str]]] = {
    # The shared dims come first in neither operand, and in one of them.
    "blhn,bshn->blsh": ((2, 3, 4, 5), (2, 3, 4, 5), ["permute", "contiguous"] * 2 + ["permute", "matmul", "permute"]),
    "bhln,bshn->bhls": ((2, 4, 3, 5), (2, 3, 4, 5), ["permute", "contiguous", "permute", "matmul"]),
    # They come first in both, in different orders.
    "hbln,bhsn->bhls": ((4, 2, 3, 5), (2, 4, 3, 5), ["permute", "contiguous", "permute", "matmul"]),
    # The result begins with the dim of the second operand, so that it is on the left.
    "blhn,blhp->bhpn": (
        (2, 3, 4, 5),
        (2, 3, 4, 5),
        ["permute", "contiguous", "permute", "permute", "contiguous", "matmul"],
    ),
    # There is one shared dim, which comes first in one operand.
    "ijb,bjk->bik": ((3, 4, 2), (2, 4, 5), ["permute", "contiguous", "matmul"]),
}
# Equations that stay: nothing is copied, dims are broadcast or summed alone, or several are one operand's alone.
KEPT: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "bhln,bhsn->bhls": ((2, 4, 3, 5), (2, 4, 3, 5)),
    "bhln,bhsn->hbls": ((2, 4, 3, 5), (2, 4, 3, 5)),
    "blhn,bshn->bhls": ((2, 3, 4, 5), (2, 3, 1, 5)),
    "blhn,bshn->blh": ((2, 3, 4, 5), (2, 3, 4, 5)),
    "blhn,bshp->blshnp": ((2, 3, 4, 5), (2, 3, 4, 5)),
    "bzch,bzhpn->bchpn": ((2, 3, 5, 4), (2, 3, 4, 1, 5)),
}


def _normal(equation: str, *shapes: tuple[int, ...]) -> list[str]:
    """The kinds of ops; what they compute is checked."""
    operands = [
        values[: torch.Size(shape).numel()].reshape(shape) for values, shape in zip((LEFT, RIGHT), shapes, strict=True)
    ]
    program = normalized(Apply(lambda x, y: {"z": torch.einsum(equation, x, y)}), x=operands[0], y=operands[1])
    (found,) = run(program, dict(zip("xy", operands, strict=True)))[0].values()
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found, torch.einsum(equation, *operands), rtol=1e-12, atol=1e-12)
    return [op.kind for op in program.ops]


@pytest.mark.parametrize("equation", WRITTEN)
def test_operands_that_einsum_copies_are_copied_by_an_op(equation: str) -> None:
    left, right, kinds = WRITTEN[equation]
    assert _normal(equation, left, right) == kinds


@pytest.mark.parametrize("equation", KEPT)
def test_others_stay(equation: str) -> None:
    assert _normal(equation, *KEPT[equation]) == ["einsum"]


def test_products_of_one_tensor_share_its_copy() -> None:
    """As those of a state-space model do: B with the states and with C."""
    x, y = (values.reshape(2, 3, 4, 5) for values in (LEFT, RIGHT))

    def function(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"z": torch.einsum("blhn,bshn->blsh", x, y), "w": torch.einsum("blhn,blhp->bhpn", y, x)}

    program = normalized(Apply(function), x=x, y=y)
    kinds = [op.kind for op in program.ops]
    assert kinds.count("matmul") == 2
    assert kinds.count("contiguous") == 2, str(program)
