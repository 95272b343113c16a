"""One training step: forward and backward of the program on every micro-batch of the batch."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from autopar.runtime.fsdp.manager import FSDPManager
from autopar.runtime.generated.bases import Cut, MicroBatching
from autopar.runtime.generated.collectives import run_change
from autopar.runtime.state import Axis
from passes.ir.errors import InputError
from passes.ir.redistribution import RedistributionStep

# Runs a program on this rank's part of its inputs, and returns the leaves of its output.
Run = Callable[[Sequence[Tensor]], Sequence[object]]


def forward_backward(
    batching: MicroBatching,
    inputs: Sequence[Tensor],
    axes: Sequence[Axis],
    totals: Run | None,
    program: Run,
    fsdp_manager: FSDPManager,
) -> list[object]:
    """Run `program` on every micro-batch, and backward from its part of the loss; returns the leaves for the batch.

    `inputs` are this rank's parts of the inputs for the whole batch. `totals` runs on all micro-batches first;
    `program` takes the sums of its results after its inputs. `axes` are those of the mesh; `fsdp_manager` gathers
    parameters and reduces gradients. Gradients are added to `.grad`; the leaves are without gradient.
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
    with fsdp_manager.keeping_parameters() if batching.gather_once else nullcontext():
        for number, batch in enumerate(batches):
            holds = batching.reduce_once and number < batching.count - 1
            with fsdp_manager.holding_gradients() if holds else nullcontext():
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
    groups = torch.unflatten(tensor, where.dim, (where.before * where.groups, count, -1))
    return [part.flatten(where.dim, where.dim + 1).contiguous() for part in groups.unbind(where.dim + 1)]


def together(tensors: Sequence[Tensor], where: Cut) -> Tensor:
    """Concatenate the parts of all micro-batches; the inverse of `parts`."""
    groups = [torch.unflatten(tensor, where.dim, (where.before * where.groups, -1)) for tensor in tensors]
    return torch.cat(groups, where.dim + 1).flatten(where.dim, where.dim + 1)


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
    first, *others = (leaf for leaf in leaves if isinstance(leaf, Tensor))
    return sum(others, first)
