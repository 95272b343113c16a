"""Seconds for one op on one device: a roofline of its multiplications and of the bytes that it reads and writes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from passes.cost.cluster import Device


@dataclass(frozen=True)
class Work:
    """What one rank does of an op.

    `forward` and `backward` count a multiply-add as two; `reads` and `writes` are the bytes of operands and results,
    `gradients` those of each operand that a gradient flows to.
    """

    forward: float
    backward: float
    reads: Sequence[float]
    writes: float
    gradients: Sequence[float]
    dtype: torch.dtype
    moves: bool = True


def compute_seconds(work: Work, device: Device) -> tuple[float, float]:
    """Seconds forward and backward.

    The backward pass reads the gradient of the result and what was saved, and writes the gradients: about the bytes
    of the results and operands, plus those of the gradients. Views touch nothing.
    """
    if not work.moves:
        return 0.0, 0.0
    rate = device.rate(work.dtype)
    touched = sum(work.reads) + work.writes
    forward = device.launch + max(work.forward / rate, touched / device.bandwidth)
    if not work.gradients:
        return forward, 0.0
    touched += sum(work.gradients)
    backward = device.launch * len(work.gradients) + max(work.backward / rate, touched / device.bandwidth)
    return forward, backward
