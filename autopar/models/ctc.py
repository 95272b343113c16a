"""Losses of connectionist temporal classification, which are traced as one operator of padded labels.

Lengths of labels depend on values, and so do the sizes of labels without padding, which `transformers` makes.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from passes.capture.source import replaced
from passes.ctc import ctc_loss

Lengths = Tensor | Sequence[int]


@contextlib.contextmanager
def with_padded_labels() -> Iterator[None]:
    """Enter around a trace: `torch.nn.functional.ctc_loss` of padded labels is one operator, and so is the loss of
    `transformers`."""

    def padded_loss(
        log_probs: Tensor,
        targets: Tensor,
        input_lengths: Lengths,
        target_lengths: Lengths,
        blank: int = 0,
        reduction: str = "mean",
        zero_infinity: bool = False,
    ) -> Tensor:
        alike = isinstance(input_lengths, Tensor) == isinstance(target_lengths, Tensor)
        if targets.dim() != 2 or log_probs.dim() != 3 or not alike:
            original = cast("Callable[..., Tensor]", before)
            return original(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
        lengths = [_tensor(each, targets) for each in (input_lengths, target_lengths)]
        losses = ctc_loss(log_probs, targets, *lengths, blank, zero_infinity)
        return _reduced(losses, lengths[1], reduction)

    with contextlib.ExitStack() as stack:
        before = stack.enter_context(replaced(functional, "ctc_loss", padded_loss))
        # A model of `transformers` may be a part of another one, which then has imported it.
        models = sys.modules.get("transformers.modeling_utils")
        losses: Mapping[str, object] = getattr(models, "LOSS_MAPPING", {})
        if models is not None and "ForCTC" in losses:
            stack.enter_context(replaced(models, "LOSS_MAPPING", {**losses, "ForCTC": transformers_loss}))
        yield


def transformers_loss(
    logits: Tensor,
    labels: Tensor,
    logit_lengths: Tensor,
    blank_token_id: int,
    reduction: str = "mean",
    zero_infinity: bool = False,
    ignore_index: int = -100,
    **_: object,
) -> Tensor:
    """The loss of models of `transformers`: of logits [samples, steps, classes] and labels [samples, labels], some of
    which are ignored. These go behind the others here, where the loss of `transformers` removes them."""
    counted = (labels != ignore_index) & (labels != blank_token_id)
    lengths = counted.sum(-1)
    order = (~counted).to(torch.int64).argsort(dim=-1, stable=True)
    kept = labels.masked_fill(~counted, blank_token_id).gather(1, order)
    log_probs = functional.log_softmax(logits, dim=-1, dtype=torch.float32).transpose(0, 1)
    losses = ctc_loss(log_probs, kept, logit_lengths, lengths, blank_token_id, zero_infinity)
    return _reduced(losses, lengths, reduction)


def _tensor(lengths: Lengths, like: Tensor) -> Tensor:
    return lengths if isinstance(lengths, Tensor) else torch.tensor(lengths, device=like.device)


def _reduced(losses: Tensor, lengths: Tensor, reduction: str) -> Tensor:
    """As `torch.nn.functional.ctc_loss` does: the mean is over samples, of losses by labels."""
    if reduction == "mean":
        return (losses / lengths.clamp(min=1)).mean()
    return losses.sum() if reduction == "sum" else losses
