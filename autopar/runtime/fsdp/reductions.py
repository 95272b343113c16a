"""Backward passes: when they begin, end and fail, and all-reduces of gradients of parameters that every rank of their
group stores and reads whole.

Nothing of these parameters is gathered or cast, so generated code reads them as they are: as leaves of autograd. Those
of one unit are reduced together, as soon as the last of their gradients is there. The backward pass goes on meanwhile,
and ends by waiting for all reductions. `fully_shard` would copy such parameters for every use and, on CPUs, wait for
each reduction.

NCCL reduces several tensors in one launch, in place. gloo would copy them into one tensor, and out of it again; so they
are put together here, and reduced gradients are views of the tensor that was sent. Its threads share the cores with the
backward pass, so little is gained by an early start: gradients of several units wait until they fill a batch.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from autopar._torch import backend_name, collectives, parts_of_flat
from autopar.runtime.fsdp import _torch as fsdp
from autopar.runtime.fsdp.gradients import LeafParameter, UnitGradients, without_keeping
from autopar.runtime.ranks.failures import naming_collectives
from passes.ir.errors import InputError, UnsupportedError
from passes.ir.exchanges import REDUCTION_BYTES, Batching

_REDUCING = "reducing the gradients of parameters"


@dataclass(eq=False)
class _Unit:
    """Parameters whose gradients are reduced together over `group`, numbered from `first`.

    In a backward pass `missing` are those whose gradients are to come.
    """

    group: dist.ProcessGroup
    first: int
    leaves: Sequence[LeafParameter]
    missing: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class _Gradient:
    """An unreduced gradient of parameter `number`, for which `leaf` is read."""

    number: int
    leaf: Tensor
    value: Tensor


@dataclass(frozen=True)
class _Begun:
    """A reduction of gradients that has begun: either each is sent, or one tensor with all of them."""

    numbers: Sequence[int]
    leaves: Sequence[Tensor]
    sent: Sequence[Tensor]

    def finished(self) -> Sequence[Tensor]:
        """Wait for the reduction; the reduced gradients."""
        waited = [collectives.wait_tensor(tensor) for tensor in self.sent]
        return waited if len(waited) == len(self.numbers) else parts_of_flat(waited[0], self.leaves)


class Reductions:
    """The reductions of all units of a model. `hand_over(number, gradient)` is called for each gradient that has been
    reduced, at the end of the backward pass."""

    def __init__(self, hand_over: Callable[[int, Tensor], None]) -> None:
        self._hand_over = hand_over
        self._units: list[_Unit] = []
        self._waiting: Batching[tuple[dist.ProcessGroup, list[_Gradient]]] = Batching(REDUCTION_BYTES)
        self._begun: list[_Begun] = []
        self._holding = False

    def add(self, group: dist.ProcessGroup, first: int, parameters: Sequence[nn.Parameter]) -> list[LeafParameter]:
        """Reduce the gradients of `parameters`, which have the numbers from `first` on, together over `group`."""
        leaves = [LeafParameter(parameter) for parameter in parameters]
        for place, parameter in enumerate(parameters):
            if parameter.requires_grad:
                hook = without_keeping(self.accumulated, len(self._units), place)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._units.append(_Unit(group, first, leaves))
        return leaves

    def begin_backward(self, holding: bool) -> None:
        """Begin a backward pass; if `holding`, gradients accumulate without being reduced."""
        self._holding = holding
        for unit in self._units:
            unit.missing = {place for place, leaf in enumerate(unit.leaves) if leaf.parameter.requires_grad}

    def accumulated(self, number: int, place: int, _: Tensor) -> None:
        """Count the gradient of a parameter of a unit, and begin the reduction after the last one."""
        unit = self._units[number]
        if place not in unit.missing:
            return
        unit.missing.discard(place)
        if not unit.missing and not self._holding:
            self._begin(unit)

    def end_backward(self) -> None:
        """Wait for all reductions, and hand the gradients over."""
        for unit in self._units:
            # Not all of its parameters were used now; some, perhaps, in backward passes that held gradients back.
            if any(leaf.parameter.grad is not None for leaf in unit.leaves):
                self._begin(unit)
        for batch in self._waiting.rest():
            self._send(batch)
        # All of them first: hooks of parameters may raise.
        for number, gradient in self._finished():
            self._hand_over(number, gradient)

    def reset(self) -> None:
        """Drop all gradients and reductions after an exception."""
        self._finished()
        self._waiting = Batching(REDUCTION_BYTES)
        for unit in self._units:
            for leaf in unit.leaves:
                leaf.take_gradient()

    def _begin(self, unit: _Unit) -> None:
        """Begin the all-reduce of the gradients that a unit has, or queue it for one with those of other units."""
        found = [
            _Gradient(number, leaf.parameter, gradient)
            for number, leaf in enumerate(unit.leaves, unit.first)
            if (gradient := leaf.take_gradient()) is not None
        ]
        if any(gradient.value.requires_grad for gradient in found):
            raise InputError(
                "the gradient of a parameter has a graph: second derivatives with respect to parameters are "
                "not supported, call backward without create_graph"
            )
        if not found:
            return
        first = found[0].value
        if joins(unit.group, first):
            size = sum(gradient.value.nbytes for gradient in found)
            self._send(self._waiting.add((unit.group.group_name, first.dtype), size, (unit.group, found)))
        else:
            self._send([(unit.group, found)])

    def _send(self, batch: Sequence[tuple[dist.ProcessGroup, Sequence[_Gradient]]]) -> None:
        """Begin one all-reduce of the gradients of a batch of units, which have the same group and dtype."""
        if not batch:
            return
        group, gradients = batch[0][0], [gradient for _, own in batch for gradient in own]
        # Nobody else has them, so they are reduced in place.
        if len(gradients) > 1 and joins(group, gradients[0].value):
            sent = [torch.cat([gradient.value.reshape(-1) for gradient in gradients])]
        else:
            sent = [gradient.value.contiguous() for gradient in gradients]
        with naming_collectives(_REDUCING):
            if len(sent) == 1:
                collectives.all_reduce_(sent[0], "sum", group.group_name)
            else:
                collectives.all_reduce_coalesced_(sent, "sum", group.group_name)
        numbers, leaves = zip(*((gradient.number, gradient.leaf) for gradient in gradients), strict=True)
        self._begun.append(_Begun(numbers, leaves, sent))

    def _finished(self) -> list[tuple[int, Tensor]]:
        """Wait for all reductions that have begun; the reduced gradients, with the numbers of their parameters."""
        begun, self._begun = self._begun, []
        with naming_collectives(_REDUCING):
            return [pair for each in begun for pair in zip(each.numbers, each.finished(), strict=True)]


def joins(group: dist.ProcessGroup, tensor: Tensor) -> bool:
    """Whether collectives over `group` of several tensors like `tensor` copy them into one, as those of gloo do."""
    return backend_name(group, tensor.device) == "gloo"


# --- begin, end and failure of backward passes -----------------------------------------------------------------------

_BROKEN = (
    "an earlier backward pass ended with an exception after this forward pass: call zero_grad() and run the forward "
    "pass again"
)


class BackwardPasses:
    """Backward passes of the programs of one model, one after the other.

    `holding` says that they add up gradients without reducing them.
    """

    def __init__(self, gradients: UnitGradients, reductions: Reductions) -> None:
        self.holding = False
        self._gradients = gradients
        self._reductions = reductions
        self._root: FSDPModule | None = None
        # The backward pass that runs, or that an exception has ended; whether it adds to gradients that were held back.
        self._current: int | None = None
        self._adding = False

    def watch(self, root: FSDPModule | None, outputs: object) -> None:
        """Watch for backward passes from `outputs`, tensors returned by `root`, which contains all FSDP units."""
        self._root = root
        begin = partial(self._begin, self._gradients.current)
        for leaf in outputs if isinstance(outputs, tuple) else (outputs,):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(begin)  # type: ignore[no-untyped-call]

    def recover(self, root: FSDPModule | None, units: Sequence[nn.Module]) -> None:
        """Reset the units if the last backward pass ended with an exception. Its gradients are lost."""
        failed = self._current is not None or (root is not None and fsdp.is_in_backward(root))
        if not failed or fsdp.current_backward() != fsdp.NO_BACKWARD:
            return
        if root is not None:
            fsdp.reset(root, units)
        self._reductions.reset()
        self._gradients.reset()
        adding = self._current is not None and self._adding
        self._current = None
        if adding:
            warnings.warn(
                "a backward pass ended with an exception while it added to gradients that were held back: these are "
                "lost; call zero_grad() and begin the accumulation again",
                stacklevel=2,
            )

    def _begin(self, read: Sequence[nn.Parameter], _: Tensor) -> None:
        """Hook at an output: a backward pass begins, before it computes any gradient of a parameter. `read` are the
        parameters that users saw in the forward pass."""
        number = fsdp.current_backward()
        self._gradients.check_current(read)
        if number == self._current:
            return
        if self._current is not None:
            raise UnsupportedError(_BROKEN)
        self._current = number
        fsdp.at_end_of_backward(self._end)
        self._adding = self._gradients.begin_backward(self.holding)
        self._reductions.begin_backward(self.holding)

    def _end(self) -> None:
        if self._root is not None and fsdp.is_in_backward(self._root):
            # An earlier pass failed before it came here. So torch did not expect the end of this one.
            raise UnsupportedError(_BROKEN)
        if self.holding:
            self._gradients.end_held_backward()
        else:
            self._gradients.end_reduced_backward()
            self._reductions.end_backward()
        self._current = None
