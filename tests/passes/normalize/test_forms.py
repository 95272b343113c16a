"""Every form that normalize rewrites computes what it did, with its gradients, and comes out in the ops that it should.

The list is of calls: what a model may write on the left, the kinds of ops that are left of it on the right.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from passes.ir.program import Program
from tests.passes.helpers import Apply, normalized
from tests.passes.normalize.running import run

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

Function = Callable[[Tensor], object]


def _shifted(x: Tensor) -> Tensor:
    new = x.new_zeros(x.shape)
    new[:, 1:] = x[:, :-1].clone()
    new[:, 0] = 3.0
    return new * x


def _later_view(x: Tensor) -> Tensor:
    y = x * 2
    z = y.view(-1)
    y.add_(1)
    return z * 3


def _through_views(x: Tensor) -> Tensor:
    y = x * 2
    y.view(2, 2, 6).transpose(0, 1)[1].mul_(x[:2])
    return y


def _chunks(x: Tensor) -> Tensor:
    y = x.detach() * 1
    first, second = y.chunk(2, 1)
    first.add_(second)
    second.mul_(first)
    return y.sin() * x


def _unbound(x: Tensor) -> Tensor:
    y = x.detach() * 1
    rows = y.unbind(0)
    rows[1].copy_(rows[0] * 2)
    return y * rows[1] * x


def _filled(x: Tensor) -> Tensor:
    y = x * 1
    y[x > 0] = 2.0
    return y * x


def _row_put(x: Tensor) -> Tensor:
    y = x * 1
    y[x[:, 0] > 0] = x[1] * 2
    return y


def _reshaped(x: Tensor) -> Tensor:
    y = x * 1
    y.reshape(-1)[3:7].mul_(2.0)
    return y * y


def _several_views(x: Tensor) -> Tensor:
    y, z = x * 2, x * 3
    row = y.select(1, 5)
    row.mul_(0.5)
    z.unsqueeze(1)[..., 0].mul_(0.2)
    return row + z.square().sum(1)


def _narrowed(x: Tensor) -> Tensor:
    y = x * 1
    y.narrow(1, 2, 3).mul_(2.0)
    y.narrow(0, -1, 1).add_(1.0)
    return y * y


def _copied(x: Tensor) -> Tensor:
    y = x * 1
    y.t().reshape(-1).mul_(2.0)
    return y * y


def _diagonal(x: Tensor) -> Tensor:
    y = x[:, :4] * 1
    y.diagonal().fill_(2.0)
    return y * y


def _put(x: Tensor) -> Tensor:
    y = x * 1
    y[torch.tensor([2, 0])] = x[:2] * 5
    return y


def _filled_by_parts(x: Tensor) -> Tensor:
    y = x.new_empty(4, 12)
    y[:, :6] = x * 2
    y[:, 6:] = x.flip(0)
    y[1:3, 3:9] = x[:2] * 5
    return y * y


def _slice_of_joined(x: Tensor) -> Tensor:
    both = torch.cat([x * 2, x.int(), x * 3], 1)
    same = torch.cat([x * 2, x * 3], 1)
    return both[:, 7:16] * same[:, 2:11] * same[:, 7:9].sum()


def _steps(x: Tensor) -> Tensor:
    return x[:, 1::2] * x[:, ::2]


def _weighted(x: Tensor) -> Tensor:
    labels = torch.tensor([1, -100, 5, 2])
    return F.cross_entropy(x, labels, weight=torch.arange(1.0, 7.0, dtype=torch.float64))


def _probabilities(x: Tensor) -> Tensor:
    return F.cross_entropy(x, x.detach().softmax(1))


def _space(x: Tensor) -> Tensor:
    return F.cross_entropy(x.permute(0, 3, 1, 2), torch.arange(48).reshape(2, 4, 6) % 8)


FORMS: dict[str, tuple[Function, Tensor, set[str]]] = {
    "shifted labels": (_shifted, X, {"full", "cat", "slice", "mul", "zeros", "reshape", "expand"}),
    "a view that is read later": (_later_view, X, {"mul", "reshape", "add"}),
    "a change through views": (_through_views, X, {"mul", "reshape", "transpose", "permute", "select", "slice", "cat"}),
    "changes of chunks": (_chunks, X, {"detach", "mul", "slice", "add", "cat", "sin"}),
    "changes of rows": (_unbound, X, {"detach", "mul", "select", "slice", "cat", "reshape"}),
    "a change of a diagonal": (_diagonal, X, {"slice", "mul", "diagonal", "full", "diagonal_scatter", "full_like"}),
    "a change through a reshape": (_reshaped, X, {"mul", "reshape", "slice", "cat"}),
    "changes of narrow views": (_narrowed, X, {"mul", "slice", "add", "cat"}),
    "changes of several views": (
        _several_views, X, {"mul", "select", "reshape", "slice", "cat", "square", "sum", "add"}
    ),
    "a change of a copy": (_copied, X, {"mul"}),
    "assignment by index": (_put, X, {"slice", "mul", "index_put"}),
    "memory that is filled part by part": (_filled_by_parts, X, {"mul", "slice", "cat", "flip"}),
    "slices of joined tensors": (_slice_of_joined, X, {"mul", "to", "slice", "cat", "sum"}),
    "steps": (_steps, X, {"reshape", "select", "mul"}),
    "repeat": (lambda x: x.repeat(2, 3, 2), X, {"reshape", "expand"}),
    "tile": (lambda x: x.tile(3), X, {"reshape", "expand"}),
    "repeat_interleave": (lambda x: x.repeat_interleave(3, 1), X, {"reshape", "expand"}),
    "movedim": (lambda x: x.movedim((0, 2), (3, 1)), Y, {"permute"}),
    "swapaxes": (lambda x: x.swapaxes(1, -1), Y, {"permute"}),
    "mT": (lambda x: x.mT, Y, {"permute"}),
    "narrow": (lambda x: x.narrow(1, 2, 3), X, {"slice"}),
    "hstack": (lambda x: torch.hstack([x, x * 2]), X, {"mul", "cat"}),
    "vstack": (lambda x: torch.vstack([x, x[0]]), X, {"select", "reshape", "cat"}),
    "column_stack": (lambda x: torch.column_stack([x, x[:, 0]]), X, {"select", "reshape", "cat"}),
    "meshgrid": (lambda x: torch.meshgrid(x[0], x[:, 1], indexing="xy"), X, {"select", "reshape", "expand"}),
    "one chunk": (lambda x: x.chunk(1, 1)[0].squeeze(0), X[:1], {"reshape"}),
    "one part": (lambda x: x.split(100, 1)[0].T * 2, X, {"permute", "mul"}),
    "one row": (lambda x: x[:1].unbind(0)[0].reshape(2, 3), X, {"slice", "select", "reshape"}),
    "a list of rows": (lambda x: torch.atleast_2d((x, x[0]))[1], X, {"select", "reshape"}),
    "a list of one row": (lambda x: torch.atleast_2d((x[0],))[0], X, {"select", "reshape"}),
    "glu": (lambda x: F.glu(x, 1), X, {"slice", "sigmoid", "mul"}),
    "outer": (lambda x: torch.outer(x[0], x[:, 1]), X, {"select", "reshape", "mul"}),
    "matrix by vector": (lambda x: x @ x[0], X, {"select", "reshape", "matmul"}),
    "vector by matrices": (lambda x: x[0, 0, :, 0] @ x, Y, {"select", "reshape", "matmul"}),
    "dot": (lambda x: x[0].dot(x[1]), X, {"select", "reshape", "matmul"}),
    "baddbmm": (lambda x: torch.baddbmm(x[0], x[0], x[0].mT @ x[0]), Y, {"select", "permute", "matmul", "bmm", "add"}),
    "maximum of two": (lambda x: torch.max(x, x * 2), X, {"mul", "maximum"}),
    "mse": (lambda x: F.mse_loss(x, x.detach() * 2), X, {"detach", "mul", "mse_loss", "mean"}),
    "binary cross entropy": (
        lambda x: F.binary_cross_entropy_with_logits(x, (x > 0).double(), reduction="sum"),
        X,
        {"gt", "to", "binary_cross_entropy_with_logits", "sum"},
    ),
    "cross entropy by weights": (
        _weighted,
        X,
        {"cross_entropy_loss", "ne", "zeros", "where", "reshape", "embedding", "sum", "div", "arange", "lift_fresh"},
    ),
    "cross entropy with probabilities": (_probabilities, X, {"detach", "softmax", "cross_entropy_loss", "div"}),
    "cross entropy of an image": (
        _space,
        Y,
        {"permute", "arange", "reshape", "remainder", "cross_entropy_loss", "ne", "sum", "div"},
    ),
    "adaptive pooling": (lambda x: F.adaptive_avg_pool2d(x, (3, 2)), Y, {"reshape", "mean"}),
    "instance norm": (lambda x: F.instance_norm(x), Y, {"group_norm"}),
    "padding by a word": (
        lambda x: F.conv2d(x, torch.ones(3, 4, 3, 2, dtype=torch.float64), padding="same"),
        Y,
        {"ones", "pad", "conv2d"},
    ),
    "images among words": (
        lambda x: x.masked_scatter((x[:, :1] > 0).expand(4, 6), x * 2),
        X,
        {"slice", "gt", "mul", "reshape", "cumsum", "sub", "clamp", "index_select", "where"},
    ),
    "what a mask takes becomes a number": (_filled, X, {"mul", "gt", "reshape", "where"}),
    "what a mask takes becomes a row": (_row_put, X, {"mul", "select", "gt", "reshape", "where"}),
    "one hot": (lambda x: F.one_hot(x.argmax(1), 6) * x, X, {"argmax", "arange", "reshape", "eq", "to", "mul"}),
    "a distance, by what torch makes of it": (
        lambda x: F.triplet_margin_loss(x, x.roll(1, 0), x.roll(2, 0)),
        X,
        {"roll", "mul", "sum", "linalg_vector_norm", "clamp_min", "clamp", "div", "expand", "sqrt", "reshape",
         "maximum", "detach", "norm", "add", "sub", "mean"},
    ),
    "pixel shuffle": (lambda x: F.pixel_shuffle(x, 2), Y, {"pixel_shuffle", "reshape", "permute"}),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_a_form_computes_what_it_did(name: str) -> None:
    """Values and gradients in float64, and no kinds of ops but those listed."""
    function, given, kinds = FORMS[name]
    program = normalized(Apply(function), x=given.clone().requires_grad_())
    assert {op.kind for op in program.ops} <= kinds, program
    expected, expected_gradient = _results(lambda x: function(x), given)
    found, gradient = _results(lambda x: _run(program, x), given)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


def _run(program: Program, x: Tensor) -> list[Tensor]:
    outputs, _ = run(program, {"x": x})
    return list(outputs.values())


def _results(function: Function, given: Tensor) -> tuple[list[Tensor], Tensor]:
    x = given.clone().requires_grad_()
    value = function(x)
    outputs = [value] if isinstance(value, Tensor) else list(value)  # type: ignore[call-overload]
    weights = [torch.arange(1.0, item.numel() + 1, dtype=torch.float64).reshape(item.shape) for item in outputs]
    total = torch.stack([(item * weight).sum() for item, weight in zip(outputs, weights, strict=True)]).sum()
    (gradient,) = torch.autograd.grad(total, [x], allow_unused=True)
    return [item.detach() for item in outputs], torch.zeros_like(x) if gradient is None else gradient
