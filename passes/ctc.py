"""`autopar::ctc_loss`: the loss of connectionist temporal classification (Graves et al. 2006), for each sample.

torch's own operator has a result whose size depends on the lengths of the labels, so that it is not traced. This one
keeps the log-probabilities alone; the backward pass computes the rest again.
"""

import torch
from torch import Tensor

from passes._torch import CTC_LOSS, CTC_LOSS_BACKWARD


@torch.library.custom_op("autopar::ctc_loss", mutates_args=())
def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """The loss of each sample, [samples]; with `zero_infinity` 0 where no alignment exists.

    log_probs: [steps, samples, classes]; targets: [samples, labels], of which the first `target_lengths` count;
    lengths: [samples].
    """
    losses: Tensor
    losses, _ = CTC_LOSS(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
    return losses.masked_fill_(losses == torch.inf, 0.0) if zero_infinity else losses


@ctc_loss.register_fake
def _(log_probs: Tensor, *_: object) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


@torch.library.custom_op("autopar::ctc_loss_backward", mutates_args=())
def ctc_loss_backward(
    gradient: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """The gradient of the log-probabilities, from that of the losses."""
    given = log_probs, targets, input_lengths, target_lengths
    losses, alpha = CTC_LOSS(*given, blank, zero_infinity)
    found: Tensor = CTC_LOSS_BACKWARD(gradient.contiguous(), *given, losses, alpha, blank, zero_infinity)
    return found


@ctc_loss_backward.register_fake
def _(gradient: Tensor, log_probs: Tensor, *_: object) -> Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor | int | bool, ...], output: Tensor) -> None:
    *tensors, blank, zero_infinity = inputs
    ctx.save_for_backward(*tensors)  # type: ignore[arg-type]
    ctx.options = blank, zero_infinity  # type: ignore[attr-defined]


def _backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
    tensors, options = ctx.saved_tensors, ctx.options  # type: ignore[attr-defined]
    return ctc_loss_backward(gradient, *tensors, *options), None, None, None, None, None


torch.library.register_autograd("autopar::ctc_loss", _backward, setup_context=_keep)
