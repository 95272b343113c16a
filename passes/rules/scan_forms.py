"""The local forms of scans whose sequence is split: that of linear attention, and that of selective state spaces
(`delta_scan.py` and `selective_scan.py` of `autopar/runtime/generated`)."""

from collections.abc import Mapping, Sequence
from math import prod

import torch

from passes.ir.figures import largest, least
from passes.ir.layout import R, S, Shape
from passes.ir.redistribution import RedistributionStep
from passes.ir.rule import Rule
from passes.rules.form_context import FormContext, FormStep, MoreWork, Steps, Workspace, single_itemsize
from passes.scans.selective import STRIDE, block_sizes


def scan_steps(context: FormContext) -> Steps:
    """Of every rank's chunks of a scan, what they do to a state."""
    query, _, values = context.operands[:3]
    above, carried = query[:2], (query[4], query[4] + values[4])
    ranks = context.before
    part, whole = (*above, ranks, *carried), (*above, ranks * context.ways, *carried)
    return (FormStep(RedistributionStep(context.span, S(2), R, part, whole)),)


def scan_workspace(context: FormContext) -> Workspace:
    """Saved is what the chunks of all ranks do to a state, and the state before all. In the backward pass gradients of
    all ranks are sent, or what comes before each chunk is there again, with the gradients of what its places add."""
    query, _, values = context.operands[:3]
    batch, heads, chunks, places, width = query
    itemsize, wide = context.dtype.itemsize, width + values[4]
    one, ranks = batch * heads * width * wide * itemsize, context.before * context.ways * context.after
    state = batch * heads * width * values[4] * itemsize
    sent = (2 * ranks + 1) * one
    again = (chunks + 4) * one + 2 * batch * heads * places * wide * itemsize
    return ranks * one + (state if len(context.operands) > 6 else 0.0), max(sent, again)


# Kernels of `passes.scans.delta.carry` and its gradients for each chunk, and of the states between ranks for each rank.
_CARRY_KERNELS, _BETWEEN_KERNELS = (6, 21), (2, 6)


def scan_work(rule: Rule, ways: Mapping[str, int]) -> MoreWork:
    """The work of what chunks do to a state: two products each with a matrix as wide as a state and the identity
    together, backward those again, but of the last one, and five more. And the states between ranks: a product each,
    backward again with two more. Relative to the products of the op: three with a state of each chunk, one of its
    places."""
    sizes = {name: factor.size // ways.get(name, 1) for name, factor in rule.factors.items()}
    width, out, places, chunks = (sizes.get(name, 1) for name in ("width", "out", "places", "chunks"))
    ranks, wide = ways["chunks"], (width + out) / out
    forward, backward = 3 + places / width, 7 + 2 * places / width
    between = 2 * ranks * width / (2 * places * chunks)
    kernels = (each * chunks + more * ranks for each, more in zip(_CARRY_KERNELS, _BETWEEN_KERNELS, strict=True))
    return MoreWork((2 * wide + between) / forward, ((7 - 2 / chunks) * wide + 3 * between) / backward, *kernels)


def selective_steps(context: FormContext) -> Steps:
    """The factor of a state over every rank's places, and the state that these leave from zero. Gradients go another
    way."""
    return (FormStep(_gathered_states(context, 2), flows=False),)


def selective_backward(context: FormContext) -> tuple[RedistributionStep, ...]:
    """The gradient that every rank's results give the state before its places."""
    return (_gathered_states(context, 1),)


def _gathered_states(context: FormContext, count: int) -> RedistributionStep:
    """`count` tensors like a state of each rank."""
    (batch, channels, _), width = context.operands[0], context.operands[2][1]
    ranks = context.before
    part, whole = (count * batch, channels, ranks, width), (count * batch, channels, ranks * context.ways, width)
    return RedistributionStep(context.span, S(2), R, part, whole)


def selective_workspace(context: FormContext) -> Workspace:
    """Saved are the state before a rank's places and the factors of those of all ranks. In the backward pass the
    gradients of their states are there, too."""
    (batch, channels, _), width = context.operands[0], context.operands[2][1]
    state = batch * channels * width * single_itemsize(context)
    ranks = context.before * context.ways * context.after
    return (ranks + 1) * state, selective_temporaries(context.operands, context.dtype) + (ranks + 2) * state


# Kernels of a selective scan for each place of a block, for each block, and besides, forward and backward. Where ranks
# split it, states go from block to block once more, and from rank to rank.
_SELECTIVE_KERNELS, _BETWEEN_BLOCKS, _BETWEEN_STATES = ((10, 2, 16), (33, 4, 60)), 2, 1


def selective_kernels(length: int) -> tuple[int, int]:
    """The kernels of `passes.scans.selective`, forward and backward."""
    blocks, places = block_sizes(length)
    forward, backward = (place * places + block * blocks + more for place, block, more in _SELECTIVE_KERNELS)
    return forward, backward


def selective_work(rule: Rule, ways: Mapping[str, int]) -> MoreWork:
    """The kernels of a rank's places are more than a part of all kernels."""
    length, ranks = rule.factors["places"].size, ways["places"]
    more = _BETWEEN_BLOCKS * block_sizes(length // ranks)[0] + _BETWEEN_STATES * ranks
    forward, backward = (
        own - whole / ranks + more
        for own, whole in zip(selective_kernels(length // ranks), selective_kernels(length), strict=True)
    )
    return MoreWork(forward_kernels=forward, backward_kernels=backward)


def selective_temporaries(operands: Sequence[Shape], dtype: torch.dtype) -> float:
    """Bytes of the temporaries of the backward pass of `passes.scans.selective`, for local operands of these shapes,
    besides the gradients of operands."""
    (batch, channels, length), width = operands[0], operands[2][1]
    itemsize = max(torch.float32.itemsize, dtype.itemsize)
    blocks, places = block_sizes(length)
    strides = -(-places // STRIDE)
    # dt, its products with x, the gradients of these and of the results; b, c, and their gradients; of states: ends,
    # decays, those before, and the gradients of those after.
    row, narrow, state = (batch * blocks * each for each in (channels * places, width * places, channels * width))
    kept = 5 * row + 4 * narrow + 4 * state
    # States before strides and within one, and two products. At the end: gradients of operands, and x, if it was cast.
    last = places - (strides - 1) * STRIDE
    states = largest(strides - 1 + last, strides - 2 + least((STRIDE, places))) + 2
    end = largest((3 + (dtype.itemsize < itemsize)) * row, 2 * row + 3 * narrow)
    most = kept + largest(states * state, end)
    return most * itemsize - sum(map(prod, operands)) * dtype.itemsize
