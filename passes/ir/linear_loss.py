"""A linear layer and the cross entropy of its result as one op: its local forms, its chunks, and what it allocates.
What is priced, counted and run has the same chunks."""

from dataclasses import dataclass

import torch

# Local forms: classes split; the logits of all tokens of a rank at once; and both.
SPLIT, AT_ONCE, SPLIT_AT_ONCE = "split_loss", "at_once", "split_at_once"


def token_chunks(tokens: int, width: int) -> int:
    """The number of chunks that `tokens` of `width` elements are computed in.

    A chunk has at most as many tokens as a row of the weight has elements, rounded up to a power of two. So its logits
    have about as many elements as the gradient of the weight, which each chunk adds to: smaller chunks would save
    little, and adding takes about as long as the passes over logits that the op saves.
    """
    most = 1 << max(int(width) - 1, 0).bit_length()
    return -(-tokens // most)


@dataclass(frozen=True)
class LinearLoss:
    """The op on one rank: its tokens, the width of their states, and its classes; how many `chunks` of tokens; the
    dtypes of operands and of the softmax; whether hidden states, weight and bias have gradients, logits are scaled or
    soft-capped, and classes are split."""

    tokens: int
    width: int
    classes: int
    chunks: int
    dtype: torch.dtype
    wide: torch.dtype
    flows: tuple[bool, bool, bool]
    is_scaled: bool = False
    is_capped: bool = False
    is_split: bool = False

    @property
    def gradients(self) -> float:
        """Bytes of the gradients of operands."""
        hidden, weight, bias = self.flows
        elements = hidden * self.tokens * self.width + weight * self.classes * self.width + bias * self.classes
        return elements * self.dtype.itemsize

    def workspace(self) -> tuple[float, float]:
        """Bytes that autograd saves, operands among them, and bytes of temporaries: those of the backward pass, or what
        the forward pass has besides these and more than the gradients of operands."""
        if not any(self.flows):
            return 0.0, 0.0
        hidden, weight, bias = self.flows
        item, wide, width = self.dtype.itemsize, self.wide.itemsize, self.width
        states, rows = self.tokens * width * item, -(-self.tokens // self.chunks)
        # Scores, the softmax, and what the tangents of a soft cap are made of.
        most = rows * self.classes * (2 * wide + self.is_capped * item)
        own, forward, backward, read = 0.0, 0.0, 0.0, 0.0
        if self.chunks == 1:
            own = hidden * states + (weight or bias) * self.tokens * self.classes * item
            forward, backward, read = hidden * states + most, weight * states, weight * states
        else:
            own = hidden * states + (weight * width + bias) * self.classes * wide
            added = width * (rows + self.classes * (item < wide)) * item
            forward = own + _larger(most, rows * self.classes * item + weight * added)
        return self.tokens + own + read, _larger(backward, forward - own - self.gradients)


def _larger(one: float, other: float) -> float:
    """The larger number. Figures of sizes are compared by their numbers alone."""
    return one if one >= other else other
