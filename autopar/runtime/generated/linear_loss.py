"""A linear layer and the cross entropy of its result, in chunks of tokens: logits exist for one chunk at a time.

The forward pass computes the gradients, too, while a chunk's logits are there, and the backward pass multiplies them
with the gradient of the sum: no product is computed twice. Of a single chunk the gradient of logits is saved, in the
dtype of logits, and the backward pass computes the gradient of the weight from it. Gradients of the weight that
several chunks add to are at least in single precision, and so are the softmax and the sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from autopar.runtime.generated.collectives import reduce_largest, reduce_sum
from autopar.runtime.generated.digits import Digits, to_local
from passes.ir.layout import I
from passes.ir.linear_loss import token_chunks


class Options(TypedDict, total=False):
    """Options of the loss. `digits` split the classes, `size` in all; `at_once` makes all tokens one chunk."""

    bias: Tensor | None
    ignore_index: int
    scale: float
    soft_cap: float | None
    dtype: torch.dtype | None
    size: int
    digits: Digits
    at_once: bool


@torch.compiler.disable  # type: ignore[untyped-decorator]
def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Unpack[Options]) -> Tensor:
    """The sum of the cross entropies of tokens, as `autopar::linear_cross_entropy` has it (see `passes/ops.py`).

    hidden: [tokens, width]; weight: [classes of this rank, width]; labels: [tokens], numbers among all classes; bias:
    [classes of this rank]. Where classes are split, the result is the same on every rank of their axes, and the
    gradient of hidden is that of this rank's classes: a pending sum.
    """
    return _applied(_Given(hidden, weight, options.get("bias"), labels), _form(hidden, weight, options))


def first_chunks(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Unpack[Options]) -> Tensor:
    """The same, of which only the first two chunks are computed: they take the same memory."""
    form = replace(_form(hidden, weight, options), last=2)
    return _applied(_Given(hidden, weight, options.get("bias"), labels), form)


def _form(hidden: Tensor, weight: Tensor, options: Options) -> "_Form":
    return _Form(
        options.get("ignore_index", -100),
        options.get("scale", 1.0),
        options.get("soft_cap"),
        options.get("dtype") or hidden.dtype,
        options.get("size", weight.shape[0]),
        tuple(options.get("digits", ())),
        1 if options.get("at_once", False) else max(token_chunks(*hidden.shape), 1),
    )


def _applied(given: "_Given", form: "_Form") -> Tensor:
    found: Tensor = _LinearCrossEntropy.apply(*given, form, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return found


class _Given(NamedTuple):
    """The operands."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor


@dataclass(frozen=True)
class _Form:
    """The form of a loss: logits are multiplied with `scale`, capped at `cap`, and cast to `dtype`; there are
    `classes` in all, of which this rank has the `digits`, and so many `chunks`, of which those before the `last` are
    computed (None: all)."""

    ignored: int
    scale: float
    cap: float | None
    dtype: torch.dtype
    classes: int
    digits: Digits
    chunks: int
    last: int | None = None

    @property
    def wide(self) -> torch.dtype:
        """The dtype of the softmax."""
        return torch.promote_types(self.dtype, torch.float32)

    def parts(self, tokens: int) -> list[slice]:
        """The tokens of each chunk."""
        size = max(-(-tokens // self.chunks), 1)
        return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)][: self.last]

    @property
    def axes(self) -> list[Any]:
        """The axes that split classes."""
        return [axis for axis, _ in self.digits]


class _Labels(NamedTuple):
    """Labels of tokens: whether they count, their places among this rank's classes, and whether they are among
    these."""

    counted: Tensor
    places: Tensor
    mine: Tensor

    def part(self, rows: slice) -> "_Labels":
        """Those of some tokens."""
        return _Labels(*(each[rows] for each in self))


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss and its gradients."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        """The sum over tokens; `arguments` are those of `_Given`, the form, and whether gradients are needed at all."""
        given, form, is_trained = _Given(*arguments[:4]), arguments[4], arguments[5]
        needed = tuple(ctx.needs_input_grad[:3]) if is_trained else (False,) * 3
        counted = given.labels != form.ignored
        labels = _Labels(counted, *to_local(torch.where(counted, given.labels, 0), form.classes, form.digits))
        gradients = _Gradients(given, labels, needed, form)
        total = torch.zeros((), dtype=form.wide, device=given.hidden.device)
        for rows in form.parts(given.hidden.shape[0]):
            made = _chunk(linear(given.hidden[rows], given.weight, given.bias), labels.part(rows), form, any(needed))
            total += made.losses
            of_logits = made.of_logits
            del made
            if of_logits is not None:
                gradients.add(rows, of_logits)
            del of_logits
        ctx.save_for_backward(*gradients.saved())
        ctx.about = form, needed, given.hidden.dtype
        return total.to(form.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of hidden, weight and bias."""
        form, needed, dtype = ctx.about
        counted, of_hidden, *others = ctx.saved_tensors
        # Of labels none of which count nothing depends on the logits, by whatever number of them the sum is divided.
        gradient = torch.where(counted.any(), gradient.to(form.wide), 0.0)
        found = [None if of_hidden is None else _times(of_hidden, gradient, dtype)]
        if form.chunks > 1:
            found += [None if each is None else _times(each, gradient, dtype) for each in others]
        else:
            of_logits, hidden = others
            weights = torch.where(counted, gradient * form.scale, 0.0)
            found.append(of_logits.mT @ _times(hidden, weights[:, None], dtype) if needed[1] else None)
            found.append(of_logits.mT @ weights.to(dtype) if needed[2] else None)
        return (*found, None, None, None)


class _Gradients:
    """Gradients of the sum, as far as the forward pass computes them: that of hidden, and of several chunks those of
    weight and bias. Of a single chunk that of logits is kept for these."""

    def __init__(self, given: _Given, labels: _Labels, needed: Sequence[bool], form: _Form) -> None:
        self.given = given
        self.needed = needed
        self.form = form
        self.counted = labels.counted
        # What the gradient of a token's loss is multiplied with.
        self.weights = labels.counted.to(form.wide).mul_(form.scale)
        self.of_hidden = torch.empty_like(given.hidden) if needed[0] else None
        self.of_logits: Tensor | None = None
        self.of_weight: Tensor | None = None
        self.of_bias: Tensor | None = None

    def add(self, rows: slice, of_logits: Tensor) -> None:
        """Add those of a chunk."""
        given, weights = self.given, self.weights[rows]
        if self.of_hidden is not None:
            torch.mul(of_logits @ given.weight, weights[:, None], out=self.of_hidden[rows])
        if self.form.chunks == 1:
            self.of_logits = of_logits if any(self.needed[1:]) else None
            return
        dtype = of_logits.dtype
        if self.needed[1]:
            hidden = _times(given.hidden[rows], weights[:, None], dtype)
            self.of_weight = _added(self.of_weight, of_logits.mT, hidden, self.form.wide)
        if self.needed[2]:
            more = (of_logits.mT @ weights.to(dtype)).to(self.form.wide)
            self.of_bias = more if self.of_bias is None else self.of_bias.add_(more)

    def saved(self) -> tuple[Tensor | None, ...]:
        """Tensors for the backward pass: flags of labels that count, and these gradients."""
        if not any(self.needed):
            return ()
        if self.form.chunks > 1:
            return self.counted, self.of_hidden, self.of_weight, self.of_bias
        hidden = self.given.hidden if self.needed[1] else None
        return self.counted, self.of_hidden, self.of_logits, hidden


class _Chunk(NamedTuple):
    """The sum of the losses of a chunk, and the gradient of its logits, as if all labels counted, in their dtype."""

    losses: Tensor
    of_logits: Tensor | None


def _chunk(logits: Tensor, labels: _Labels, form: _Form, is_trained: bool) -> _Chunk:
    """A chunk of `logits`, [tokens, classes of this rank], which are overwritten; without gradients unless
    `is_trained`."""
    dtype, factor, bent = logits.dtype, form.scale, None
    if form.cap is not None:
        bent = (logits.div_(form.cap) if factor == 1.0 else logits.mul_(factor / form.cap)).tanh_()
        factor = form.cap
    if factor == 1.0:
        scores = logits.to(form.wide)
    else:
        is_free = bent is None and dtype == form.wide
        scores = logits.mul_(factor) if is_free else _times(logits, factor, form.wide)
    del logits
    largest, place = scores.max(-1, keepdim=True)
    places = labels.places[:, None]
    picked = torch.where(labels.mine[:, None], scores.gather(-1, places), 0.0)
    weights = scores.softmax(-1)
    del scores
    sums, factors = weights.gather(-1, place).log_().neg_(), None
    if form.digits:
        largest, sums, picked, factors = _over_ranks(largest, sums, picked, form)
    losses = torch.where(labels.counted[:, None], largest - picked + sums, 0.0).sum()
    return _Chunk(losses, _of_logits(weights, labels, factors, bent, dtype) if is_trained else None)


def _over_ranks(largest: Tensor, sums: Tensor, picked: Tensor, form: _Form) -> tuple[Tensor, ...]:
    """The largest log-sum-exp of any rank's classes, the logarithm of the sum of exponentials relative to that, and the
    logits of labels; and what this rank's softmax is multiplied with to be that over all classes."""
    own = largest + sums
    most = reduce_largest(own, form.axes)
    parts = (own - most).exp_()
    total, picked = reduce_sum(torch.stack([parts, picked]), form.axes, I)
    return most, total.log(), picked, parts / total


def _of_logits(
    weights: Tensor, labels: _Labels, factors: Tensor | None, bent: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The softmax, of which labels have one less, times the tangent of the soft cap; in the dtype of logits. The number
    of a label is computed before it is rounded."""
    places = labels.places[:, None]
    own = weights.gather(-1, places)
    own = (own if factors is None else own * factors) - labels.mine[:, None].to(own.dtype)
    if factors is not None:
        weights = weights.mul_(factors) if weights.dtype == dtype else _times(weights, factors, dtype)
    found = weights.to(dtype).scatter_(-1, places, own.to(dtype))
    return found if bent is None else torch.ops.aten.tanh_backward(found, bent)


def _times(tensor: Tensor, factor: Tensor | float, dtype: torch.dtype) -> Tensor:
    """`tensor` times a number, or one of each row, in another dtype."""
    return torch.mul(tensor, factor, out=torch.empty_like(tensor, dtype=dtype))


def _added(total: Tensor | None, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """`total` plus a product, in at least single precision."""
    if total is None:
        return (left @ right).to(dtype)
    return total.addmm_(left, right) if left.dtype == dtype else total.add_(left @ right)
