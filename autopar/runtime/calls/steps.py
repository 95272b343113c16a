"""One training step, forward and backward of the program on every micro-batch, and outputs as the model returns them.

In the plan's layout outputs are `DTensor`s, which say in one sentence why they mix with no plain tensors.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import SupportsIndex, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar._torch import without_subclasses
from autopar.runtime.fsdp.managers import FSDPManagers
from autopar.runtime.generated.bases import Cut, GeneratedProgram, MicroBatching, PlannedOutput
from autopar.runtime.generated.collectives import run_change
from autopar.runtime.state import axis_along, from_local, mesh_of
from passes._torch import pytree
from passes.ir.errors import InputError
from passes.ir.mesh import Mesh
from passes.ir.redistribution import RedistributionStep

# Runs a program on this rank's part of its inputs, and returns the leaves of its output.
Run = Callable[[Sequence[Tensor]], Sequence[object]]


def forward_backward(
    batching: MicroBatching,
    inputs: Sequence[Tensor],
    mesh: DeviceMesh,
    totals: Run | None,
    program: Run,
    managers: FSDPManagers,
) -> list[object]:
    """Run `program` on every micro-batch, and backward from its part of the loss; returns the leaves for the batch.

    `inputs` are this rank's parts of the inputs for the whole batch. `totals` runs on all micro-batches first;
    `program` takes the sums of its results after its inputs. `mesh` is that of the module; `managers` gather
    parameters and reduce gradients. Gradients are added to `.grad`; the leaves are without gradient.
    """
    batches = micro_batch_inputs(batching, inputs, mesh, totals)
    results: list[list[object]] = []
    with managers.keeping_parameters() if batching.gather_once else nullcontext():
        for number, batch in enumerate(batches):
            holds = batching.reduce_once and number < batching.count - 1
            with managers.holding_gradients() if holds else nullcontext():
                leaves = program(batch)
                loss = leaves[batching.loss]
                if not isinstance(loss, Tensor) or not loss.requires_grad:
                    raise InputError("the loss has no gradient to run backward from: call without torch.no_grad()")
                loss.backward()  # type: ignore[no-untyped-call]
            results.append([leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves])
            # Free the tensors of this backward pass before the next micro-batch begins.
            del leaves, loss
    return [joined(leaves, where) for leaves, where in zip(zip(*results, strict=True), batching.outputs, strict=True)]


def micro_batch_inputs(
    batching: MicroBatching, inputs: Sequence[Tensor], mesh: DeviceMesh, totals: Run | None
) -> list[list[Tensor]]:
    """This rank's parts of the inputs of every micro-batch, and the sums over the batch that `totals` computes.

    Raises InputError for a batch that cannot be split into micro-batches; waits for the device to know, if the program
    has conditions.
    """
    cut = [
        [tensor] * batching.count if where is None else parts(tensor, where, batching.count)
        for tensor, where in zip(inputs, batching.inputs, strict=True)
    ]
    batches = list(zip(*cut, strict=True))
    if totals is None:
        return [list(batch) for batch in batches]
    with torch.no_grad():
        found = [totals([_relaid(batch[place], steps, mesh) for place, steps in batching.reads]) for batch in batches]
    sums = [_sum(leaves) for leaves in zip(*found, strict=True)]
    taken = len(sums) - len(batching.checks)
    for check, amount in zip(batching.checks, sums[taken:], strict=True):
        if amount.item():
            raise InputError(f"{check}; use micro_batches=1, or batches of equal samples")
    return [[*batch, *sums[:taken]] for batch in batches]


def parts(tensor: Tensor, where: Cut, count: int) -> list[Tensor]:
    """Split this rank's part of a tensor into the parts of `count` micro-batches."""
    groups = torch.unflatten(tensor, where.dim, (where.before * where.groups, count, -1))
    return [part.flatten(where.dim, where.dim + 1).contiguous() for part in groups.unbind(where.dim + 1)]


def together(tensors: Sequence[Tensor], where: Cut) -> Tensor:
    """Concatenate the parts of all micro-batches; the inverse of `parts`."""
    groups = [torch.unflatten(tensor, where.dim, (where.before * where.groups, -1)) for tensor in tensors]
    return torch.cat(groups, where.dim + 1).flatten(where.dim, where.dim + 1)


def _relaid(tensor: Tensor, steps: Sequence[RedistributionStep], mesh: DeviceMesh) -> Tensor:
    """Redistribute this rank's part of an input to another layout."""
    for step in steps:
        axis = axis_along(mesh, step.span)
        tensor = run_change(tensor, axis.group, axis.size, axis.rank, step.source, step.target)
    return tensor


def joined(leaves: Sequence[object], where: Cut | str) -> object:
    """A leaf of the output for the batch from those of its micro-batches."""
    if not isinstance(leaves[0], Tensor) or where == "R":
        return leaves[-1]
    if isinstance(where, Cut):
        return together([leaf for leaf in leaves if isinstance(leaf, Tensor)], where)
    return _sum(leaves)


def _sum(leaves: Sequence[object]) -> Tensor:
    first, *others = (leaf for leaf in leaves if isinstance(leaf, Tensor))
    return sum(others, first)


# --- outputs ---------------------------------------------------------------------------------------------------------

# Part of the message of torch's RuntimeError, in torch 2.11 to 2.15.
_MIXED = "mixed torch.Tensor and DTensor"


# Functions that read values, by the names of the methods. Of a `DTensor`, torch reads the part of the rank that asks.
_READING = frozenset(
    (
        *("item", "tolist", "numpy", "is_nonzero", "__array__", "__format__"),
        *("__bool__", "__int__", "__float__", "__complex__", "__index__"),
    )
)


class PlannedTensor(DTensor):
    """An output of a distributed module, or a result computed from one: a `DTensor` with clearer error messages where
    it is mixed with a plain tensor, and where values are read of which each rank has a part."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an op as on a `DTensor`."""
        # `str()` and f-strings print a tensor as it is.
        if getattr(func, "__name__", "") in _READING and tuple(args[1:]) != ("",):
            _check_whole(args[0])
        try:
            with without_subclasses():
                result = func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if _MIXED not in str(error):
                raise
            raise InputError(
                "an output of the distributed module is a DTensor in the plan's layout, and meets a plain tensor: plan "
                "the loss with it (loss=), ask for whole outputs (outputs='full'), or call .full_tensor() on it"
            ) from None
        for item in result if isinstance(result, tuple | list) else (result,):
            # In-place ops return their argument, whose class stays.
            if type(item) is DTensor and not any(item is given for given in args):
                item.__class__ = PlannedTensor
        return result

    def __deepcopy__(self, memo: dict[int, object]) -> DTensor:
        """A copy as a `DTensor`."""
        return cast(DTensor, _as_dtensor(self).__deepcopy__(memo))  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        """Pickled as a `DTensor`, which `torch.load` knows."""
        return cast(str | tuple[object, ...], _as_dtensor(self).__reduce_ex__(protocol))  # type: ignore[no-untyped-call]


def _check_whole(tensor: object) -> None:
    """Raise InputError for a tensor of which each rank has a part, or an addend."""
    if isinstance(tensor, DTensor) and not all(placement.is_replicate() for placement in tensor.placements):
        raise InputError(
            f"a tensor that was computed from an output of the distributed module has the placements "
            f"{tensor.placements}, so this rank has a part of its values: call .full_tensor() on all ranks, and read "
            "that"
        )


def _as_dtensor(tensor: Tensor) -> DTensor:
    """The same values, on the same graph, as a plain `DTensor`."""
    with without_subclasses():
        plain = tensor.detach() if not tensor.requires_grad or tensor.is_leaf else tensor.view_as(tensor)
        if plain.is_leaf:
            plain.requires_grad_(tensor.requires_grad)
    assert isinstance(plain, DTensor)
    return plain


def output_of(program: GeneratedProgram, leaves: Sequence[object], mesh: DeviceMesh, *, whole: bool) -> object:
    """The model's output, from this rank's parts of its leaves: scalars as plain tensors, others as `DTensor`, or, with
    `whole`, as plain tensors too. Tensors of the pipeline stages of other ranks are None, and so are objects that are
    made of some of them, as caches of keys and values."""
    shape = mesh_of(mesh)
    outputs = [_at_surface(leaf, item, mesh, shape, whole) for leaf, item in zip(leaves, program.outputs, strict=True)]
    missing = [leaf is None and item.layout is not None for leaf, item in zip(leaves, program.outputs, strict=True)]
    if not any(missing):
        return pytree.tree_unflatten(outputs, program.output_tree)
    return _nested(program.output_tree, outputs, missing, is_output=True)


def _nested(tree: pytree.TreeSpec, leaves: Sequence[object], missing: Sequence[bool], *, is_output: bool) -> object:
    """`leaves` in `tree`, some of which are `missing`. The output itself may be of a class that takes None, as those of
    `transformers` are."""
    if tree.is_leaf():
        return leaves[0]
    if any(missing) and not is_output and tree.type not in pytree.BUILTIN_TYPES:
        return None
    children, at = [], 0
    for child in tree.children():
        own = slice(at, at + child.num_leaves)
        children.append(_nested(child, leaves[own], missing[own], is_output=False))
        at = own.stop
    return pytree.SUPPORTED_NODES[tree.type].unflatten_fn(children, tree.context)


def _at_surface(leaf: object, item: PlannedOutput, mesh: DeviceMesh, shape: Mesh, whole: bool) -> object:
    if not isinstance(leaf, Tensor) or item.layout is None or not item.shape:
        return leaf
    if whole and not any(placement.kind == "S" for placement in item.layout):
        return leaf
    distributed = from_local(leaf, item.layout, item.shape, mesh, shape)
    if whole:
        return distributed.full_tensor()
    distributed.__class__ = PlannedTensor
    return distributed


def loss_of(output: object) -> Tensor | None:
    """The loss in an output: the entry of that name, or the only scalar."""
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, Tensor):
        return named
    scalars = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.dim() == 0]
    return scalars[0] if len(scalars) == 1 else None
