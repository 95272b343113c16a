"""Calls of a distributed module, compared between ranks before anything runs.

Ranks that are called with different arguments, or in different modes, would enter different collectives, or compute one
batch out of pieces of several. So every call compares a digest, and some calls compare the values of the batch, too.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.runtime.calls.inputs import BoundCall
from autopar.runtime.generated.random import Randomness
from autopar.runtime.parameters import ParameterWatch
from autopar.runtime.ranks.agreement import Agreement, Raised
from autopar.runtime.ranks.values import Leaf, ValueComparison
from passes.ir.errors import InputError
from passes.ir.mesh import Mesh
from passes.ir.program import dtype_name

_WHAT = "a call of the module"


@dataclass(frozen=True)
class Surroundings:
    """The state that a call depends on besides its arguments and parameters.

    `training` is the mode, `micro_batches` the number of them, `random` what dropout draws from, `within` the contexts
    of the engine that are entered.
    """

    training: bool
    micro_batches: int
    random: Randomness
    within: str
    device_type: str


@dataclass(frozen=True)
class _Description:
    """The description of a call on one rank; error messages use the names of the fields."""

    raised: Raised | None
    arguments: Mapping[str, str]
    mode: str
    gradients: str
    autocast: str
    micro_batches: int
    trainable: bytes
    random: bytes
    within: str

    def packed(self) -> bytes:
        """The description as bytes, equal for equal calls."""
        return repr([(item.name, getattr(self, item.name)) for item in fields(self)]).encode()


# What to do about a difference, by field.
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


# Compares the arguments of a call, its surroundings, and which parameters require gradients.
Compare = Callable[[BoundCall, Surroundings, bytes, ParameterWatch], None]


class CallComparison:
    """Compares the calls of one module between the ranks of its mesh."""

    def __init__(self, agreement: Agreement, mesh: Mesh, batch_axis: str) -> None:
        """`batch_axis` is an axis of the mesh that samples are split on, for messages."""
        self._agreement = agreement
        self._batch_axis = batch_axis
        self._number = 0
        advice = (
            "a call takes the global batch, the same on every rank; give each rank's own samples through "
            f"from_local(batch, axes=({batch_axis!r},))"
        )
        self._comparison = ValueComparison(agreement, mesh, "call", advice)
        self.compares_floats = True

    @contextmanager
    def next_call(self) -> Iterator[Compare]:
        """The next call: what raises within before the comparison is called raises on all ranks.

        Only calls that all ranks make alike are counted, so that all have the same number.
        """
        compared = False

        def compare(call: BoundCall, surroundings: Surroundings, flags: bytes, parameters: ParameterWatch) -> None:
            nonlocal compared
            compared = True
            self._compare(_description(call, surroundings, flags), parameters)
            self._number += 1
            with torch.no_grad():
                self._comparison.compare(self._number, self._values(call))

        try:
            yield compare
        except BaseException as error:
            if not compared:
                self._report(Raised.of(error))
            raise

    def _compare(self, mine: _Description, parameters: ParameterWatch) -> None:
        if not self._agreement.same(mine.packed()):
            self._raise_difference(mine, parameters)

    def _report(self, raised: Raised) -> None:
        """Report to the other ranks that this one raises."""
        mine = _Description(raised, {}, "", "", "", 0, b"", b"", "")
        if not self._agreement.same(mine.packed()):
            self._agreement.gathered_from(_WHAT, mine)

    def _raise_difference(self, mine: _Description, parameters: ParameterWatch) -> NoReturn:
        every = self._agreement.gathered_from(_WHAT, mine)
        for rank, other in enumerate(every):
            if other.raised is not None:
                other.raised.raise_here(rank, f"call {self._number + 1}")
        first = every[0]
        rank, other = next((rank, item) for rank, item in enumerate(every) if item != first)
        for field, advice in _ADVICE.items():
            theirs, ours = getattr(other, field), getattr(first, field)
            if theirs != ours:
                said = _told(field, theirs, ours, rank, parameters)
                raise InputError(
                    f"ranks are called differently in call {self._number + 1}: {said}; "
                    f"{advice.format(axis=self._batch_axis)}"
                )
        raise AssertionError("equal descriptions have equal digests")

    def _values(self, call: BoundCall) -> list[Leaf]:
        """The tensors that should be equal on all ranks, without computed ones, which may differ by rounding."""
        return [
            Leaf(name, (leaf.to_local() if isinstance(leaf, DTensor) else leaf).detach(), _split_on(leaf))
            for name, leaf in sorted(call.tensors.items())
            if leaf.grad_fn is None and (self.compares_floats or not leaf.is_floating_point())
        ]


def _split_on(leaf: Tensor) -> frozenset[int]:
    """The axes of the mesh on which ranks have different parts of a tensor."""
    if not isinstance(leaf, DTensor):
        return frozenset()
    return frozenset(axis for axis, placement in enumerate(leaf.placements) if not placement.is_replicate())


def _description(call: BoundCall, surroundings: Surroundings, flags: bytes) -> _Description:
    arguments = {name: _tensor_text(tensor) for name, tensor in call.tensors.items()}
    for name, value in call.values.items():
        arguments[name] = f"{dtype_name(value.dtype)} {value.tolist()}"
    arguments.update((name, repr(value)) for name, value in call.settings.items())
    if torch.is_inference_mode_enabled():
        gradients = "inference mode"
    else:
        gradients = "gradients" if torch.is_grad_enabled() else "no gradients"
    kind = surroundings.device_type
    autocast = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "no autocast"
    return _Description(
        None,
        dict(sorted(arguments.items())),
        "training mode" if surroundings.training else "evaluation mode",
        gradients,
        autocast,
        surroundings.micro_batches,
        flags,
        surroundings.random.digest(),
        surroundings.within,
    )


def _tensor_text(tensor: Tensor) -> str:
    text = f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
    if isinstance(tensor, DTensor):
        text += f" as {tensor.placements}"
    return f"{text} with gradient" if tensor.requires_grad else text


def _told(field: str, theirs: object, ours: object, rank: int, parameters: ParameterWatch) -> str:
    """The difference between the call of a rank and that of rank 0, as the middle of a sentence."""
    if field == "arguments":
        assert isinstance(theirs, Mapping)
        assert isinstance(ours, Mapping)
        name = next(name for name in (*ours, *theirs) if ours.get(name) != theirs.get(name))
        return (
            f"rank {rank} of the mesh has {name} {theirs.get(name, 'left out')}, "
            f"rank 0 has {name} {ours.get(name, 'left out')}"
        )
    if field == "trainable":
        assert isinstance(theirs, bytes)
        assert isinstance(ours, bytes)
        pairs = zip(parameters.names, theirs, ours, strict=True)
        name, there, _ = next(item for item in pairs if item[1] != item[2])
        with_gradient, without = (rank, 0) if there else (0, rank)
        return (
            f"the parameter {name!r} requires a gradient on rank {with_gradient} of the mesh, but not on rank {without}"
        )
    if field == "random":
        return f"rank {rank} of the mesh draws other random numbers than rank 0"
    said = {"gradients": "is called with", "autocast": "is called with", "mode": "is in", "within": "is in"}.get(
        field, "has micro-batches:"
    )
    return f"rank {rank} of the mesh {said} {theirs}, rank 0 {said} {ours}"
