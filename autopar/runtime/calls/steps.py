"""One training step: forward and backward of the program on every micro-batch of the batch."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from autopar.runtime.generated.axis import Axis
from autopar.runtime.generated.bases import Cut, MicroBatching
from autopar.runtime.generated.collectives import run_change
from passes.ir.errors import InputError
from passes.ir.redistribution import RedistributionStep

# Runs a program on this rank's part of its inputs, and returns the leaves of its output.
Run = Callable[[Sequence[Tensor]], Sequence[object]]


class Travel(Protocol):
    """Controls when parameters on data axes are gathered and when their gradients are reduced."""

    def holding_gradients(self) -> AbstractContextManager[None]:
        """Context in which gradients accumulate without being reduced."""

    def keeping_parameters(self) -> AbstractContextManager[None]:
        """Context in which parameters stay gathered."""


def forward_backward(
    batching: MicroBatching,
    inputs: Sequence[Tensor],
    axes: Sequence[Axis],
    totals: Run | None,
    program: Run,
    travel: Travel,
) -> list[object]:
    """Run `program` on every micro-batch, and backward from its part of the loss; returns the leaves for the batch.

    `travel` says when parameters and gradients travel.
    `inputs` are this rank's parts of the inputs for the whole batch. `totals` come first and say what the micro-batches
    sum to; each gets that whole. `axes` are those of the mesh. Gradients are added to `.grad`. The
    leaves are without gradient.
    """
    cut = [
        [tensor] * batching.count if where is None else parts(tensor, where, batching.count)
        for tensor, where in zip(inputs, batching.inputs, strict=True)
    ]
    batches = list(zip(*cut, strict=True))
    sums: list[Tensor] = []
    if totals is not None:
        with torch.no_grad():
            found = [
                totals([_relaid(batch[place], steps, axes) for place, steps in batching.reads]) for batch in batches
            ]
        sums = [_sum(leaves) for leaves in zip(*found, strict=True)]
        del found
    results: list[list[object]] = []
    with travel.keeping_parameters() if batching.gather_once else nullcontext():
        for number, batch in enumerate(batches):
            holds = batching.reduce_once and number < batching.count - 1
            with travel.holding_gradients() if holds else nullcontext():
                leaves = program([*batch, *sums])
                loss = leaves[batching.loss]
                if not isinstance(loss, Tensor) or not loss.requires_grad:
                    raise InputError("the loss has no gradient to run backward from: call without torch.no_grad()")
                loss.backward()  # type: ignore[no-untyped-call]
            results.append([leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves])
            # Free the tensors of this backward pass before the next micro-batch begins.
            del leaves, loss
    return [_joined(leaves, where) for leaves, where in zip(zip(*results, strict=True), batching.outputs, strict=True)]


def parts(tensor: Tensor, where: Cut, count: int) -> list[Tensor]:
    """Split this rank's part of a tensor into the parts of `count` micro-batches."""
    shape, dim = tensor.shape, where.dim
    groups = tensor.reshape(*shape[:dim], where.before * where.groups, count, -1, *shape[dim + 1 :])
    part = (*shape[:dim], shape[dim] // count, *shape[dim + 1 :])
    return [groups.select(dim + 1, number).reshape(part).contiguous() for number in range(count)]


def together(tensors: Sequence[Tensor], where: Cut) -> Tensor:
    """Concatenate the parts of all micro-batches; the inverse of `parts`."""
    shape, dim, count = tensors[0].shape, where.dim, len(tensors)
    groups = [tensor.reshape(*shape[:dim], where.before * where.groups, 1, -1, *shape[dim + 1 :]) for tensor in tensors]
    return torch.cat(groups, dim + 1).reshape(*shape[:dim], shape[dim] * count, *shape[dim + 1 :])


def _relaid(tensor: Tensor, steps: Sequence[RedistributionStep], axes: Sequence[Axis]) -> Tensor:
    """Redistribute this rank's part of an input to another layout."""
    for step in steps:
        axis = axes[step.axis]
        tensor = run_change(tensor, axis.group, axis.size, axis.rank, step.source, step.target)
    return tensor


def _joined(leaves: Sequence[object], where: Cut | str) -> object:
    if not isinstance(leaves[0], Tensor) or where == "R":
        return leaves[-1]
    if isinstance(where, Cut):
        return together([leaf for leaf in leaves if isinstance(leaf, Tensor)], where)
    return _sum(leaves)


def _sum(leaves: Sequence[object]) -> Tensor:
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    result = tensors[0]
    for tensor in tensors[1:]:
        result = result + tensor
    return result
