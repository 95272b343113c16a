"""Calls of a distributed module, compared between ranks before anything runs.

Ranks that are called with different arguments, or in different modes, would enter different collectives, or compute one
batch out of pieces of several. So every call compares a digest, and some calls compare the values of the batch, too.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.runtime.calls.inputs import BoundCall, constant_text
from autopar.runtime.generated.random import Randomness
from autopar.runtime.parameters import ParameterWatch
from autopar.runtime.ranks.agreement import Agreement, Difference, HeldComparison
from autopar.runtime.ranks.values import Leaf, ValueComparison
from passes.ir.errors import InputError
from passes.ir.mesh import Mesh
from passes.ir.program import dtype_name

_WHAT = "a call of the module"


@dataclass(frozen=True)
class Surroundings:
    """The state that a call depends on besides its arguments and parameters.

    `training` is the mode, `micro_batches` the number of them, `random` what dropout draws from, `within` the contexts
    of the FSDP manager that are entered.
    """

    training: bool
    micro_batches: int
    random: Randomness
    within: str
    device_type: str


# Advice for each difference.
_ADVICE = {
    "arguments": "pass the same global batch on every rank, or each rank's own samples through "
    "from_local(batch, axes=({axis!r},))",
    "mode": "call train() or eval() on all ranks",
    "gradients": "call with torch.no_grad(), torch.inference_mode() or neither on all ranks alike",
    "autocast": "enter torch.autocast on all ranks alike",
    "micro_batches": "call the module, or its forward_backward, on all ranks alike",
    "trainable": "change requires_grad on all ranks alike",
    "within": "enter it on all ranks alike",
    "random": "seed the module's random numbers alike on all ranks",
}


class CallComparison:
    """Compares the calls of one module between its ranks, those of all pipeline stages."""

    def __init__(self, agreement: Agreement, mesh: Mesh, inner: Mesh, batch_axis: str) -> None:
        """`mesh` has all ranks, and its last axes are those of `inner`, the mesh of one pipeline stage; `batch_axis` is
        an axis of it that samples are split on, for messages."""
        self._agreement = agreement
        self._held = HeldComparison(agreement)
        self._outer = len(mesh.sizes) - len(inner.sizes)
        self._batch_axis = batch_axis
        self._number = 0
        self._flags: tuple[list[str], bytes] = ([], b"")
        self._by_name: Mapping[str, object] = {}
        self._comparison = ValueComparison(
            agreement,
            mesh,
            "call",
            "a call takes the global batch, the same on every rank; give each rank's own samples through "
            f"from_local(batch, axes=({batch_axis!r},))",
        )
        self.compares_floats = True

    def telling(self) -> AbstractContextManager[None]:
        """A context before `compare`: what raises within on one rank raises on all."""
        return self._agreement.telling(_WHAT, self._where)

    def compare(self, call: BoundCall, surroundings: Surroundings, flags: bytes, parameters: ParameterWatch) -> None:
        """Compare the arguments of a call, its surroundings, and which parameters require gradients.

        Only calls that all ranks make alike are counted, so that all have the same number.
        """
        trainable = self._trainable(flags, parameters)
        description = _description(call, surroundings)
        numbers, difference = self._agreement.compared(_WHAT, self._where, description, self._held.number(trainable))
        if difference is not None:
            raise self._error(_difference_text(difference), difference.name)
        difference = self._held.difference(numbers, trainable)
        if difference is not None:
            raise self._error(_trainable_text(difference), "trainable")
        self._number += 1
        # As likely as the first call, the first one of evaluation or of another size has each rank's own samples.
        kind = repr([said for name, said in description.items() if name != "random"])
        self._comparison.compare(self._number, kind, partial(self._leaves, call))

    def _trainable(self, flags: bytes, parameters: ParameterWatch) -> Mapping[str, object]:
        """Whether each parameter that this rank holds requires a gradient."""
        if (parameters.names, flags) != self._flags:
            self._flags = parameters.names, flags
            self._by_name = dict(zip(parameters.names, flags, strict=True))
        return self._by_name

    def _error(self, said: str, name: str) -> InputError:
        advice = _ADVICE[name].format(axis=self._batch_axis)
        return InputError(f"ranks are called differently in {self._where}: {said}; {advice}")

    def _leaves(self, call: BoundCall) -> list[Leaf]:
        """The tensors of a call whose values are compared."""
        with torch.no_grad():
            # Computed tensors may differ by rounding.
            return [
                Leaf(name, (leaf.to_local() if isinstance(leaf, DTensor) else leaf).detach(), self._split_on(leaf))
                for name, leaf in sorted(call.tensors.items())
                if leaf.grad_fn is None and (self.compares_floats or not leaf.is_floating_point())
            ]

    def _split_on(self, leaf: Tensor) -> frozenset[int]:
        """The axes of the mesh on which ranks have different parts of a tensor."""
        if not isinstance(leaf, DTensor):
            return frozenset()
        split = enumerate(leaf.placements, self._outer)
        return frozenset(axis for axis, placement in split if not placement.is_replicate())

    @property
    def _where(self) -> str:
        return f"call {self._number + 1}"


def _description(call: BoundCall, surroundings: Surroundings) -> Mapping[str, object]:
    """The description of a call on this rank, with names of `_ADVICE`."""
    arguments = {name: _tensor_text(tensor) for name, tensor in call.tensors.items()}
    constants = {name: constant_text(value) for name, value in (*call.values.items(), *call.settings.items())}
    if torch.is_inference_mode_enabled():
        gradients = "inference mode"
    else:
        gradients = "gradients" if torch.is_grad_enabled() else "no gradients"
    kind = surroundings.device_type
    return {
        "arguments": dict(sorted((*arguments.items(), *constants.items()))),
        "mode": "training mode" if surroundings.training else "evaluation mode",
        "gradients": gradients,
        "autocast": str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "no autocast",
        "micro_batches": surroundings.micro_batches,
        "within": surroundings.within,
        "random": surroundings.random.digest().hex(),
    }


def _tensor_text(tensor: Tensor) -> str:
    text = f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
    if isinstance(tensor, DTensor):
        text += f" as {tensor.placements}"
    if tensor.grad_fn is not None:
        return f"{text}, computed with gradient"
    return f"{text} with gradient" if tensor.requires_grad else text


def _trainable_text(difference: Difference) -> str:
    """The parameter that requires a gradient on one of two ranks alone, as the middle of a sentence."""
    ranks = difference.rank, difference.other
    with_gradient, without = ranks if difference.theirs[difference.name] else reversed(ranks)
    return (
        f"the parameter {difference.name!r} requires a gradient on rank {with_gradient} of the mesh, but not on rank "
        f"{without}"
    )


def _difference_text(difference: Difference) -> str:
    """The difference between the call of a rank and that of rank 0, as the middle of a sentence."""
    name, rank = difference.name, difference.rank
    theirs, ours = difference.theirs[name], difference.ours[name]
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        return str(Difference(rank, theirs, ours))
    if name == "random":
        return f"rank {rank} of the mesh draws other random numbers than rank 0"
    said = {"mode": "is in", "within": "is in", "micro_batches": "has micro-batches:"}.get(name, "is called with")
    return f"rank {rank} of the mesh {said} {theirs}, rank 0 {said} {ours}"
