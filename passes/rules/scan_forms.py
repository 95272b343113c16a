"""The local form of the scan of linear attention, whose chunks are split (`autopar/runtime/generated/scan.py`)."""

from collections.abc import Mapping

from passes.ir.layout import R, S
from passes.ir.redistribution import RedistributionStep
from passes.ir.rule import Rule
from passes.rules.form_context import FormContext, FormStep, MoreWork, Steps, Workspace


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


# Kernels of `passes.scans.carry` and its gradients for each chunk, and of the states between ranks for each rank.
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
