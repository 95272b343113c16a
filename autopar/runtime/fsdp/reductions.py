"""All-reduces of gradients of parameters that every rank of their group stores and reads whole.

Nothing of these parameters is gathered or cast, so generated code reads them as they are: as leaves of autograd. Those
of one unit are reduced together, as soon as the last of their gradients is there. The backward pass goes on meanwhile,
and ends by waiting for all reductions. `fully_shard` would copy such parameters for every use and, on CPUs, wait for
each reduction.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from autopar._torch import collectives
from autopar.runtime.ranks.failures import naming_collectives
from passes.ir.errors import InputError


@dataclass(frozen=True)
class LeafParameter:
    """A parameter that generated code reads as it is stored. Its `.grad` is the gradient that is not reduced yet."""

    parameter: nn.Parameter

    def take_gradient(self) -> Tensor | None:
        """Remove and return the gradient that is not reduced, if there is one."""
        gradient, self.parameter.grad = self.parameter.grad, None
        return gradient

    def give_gradient(self, gradient: Tensor) -> None:
        """Let the next backward pass add to a gradient that is not reduced."""
        self.parameter.grad = gradient

    def note_change(self) -> None:
        """Let autograd know that the values have changed, through memory that is shared."""
        increment_version(self.parameter)


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
class _Reduction:
    """An all-reduce that has begun, in place, of `gradients` by the numbers of their parameters."""

    gradients: Mapping[int, Tensor]

    def finished(self) -> Iterable[tuple[int, Tensor]]:
        """Wait for it; gives the reduced gradients with their numbers."""
        with naming_collectives(_REDUCING):
            return [(number, collectives.wait_tensor(gradient)) for number, gradient in self.gradients.items()]


class Reductions:
    """The reductions of all units of a model. `hand_over(number, gradient)` is called for each gradient that has been
    reduced, at the end of the backward pass."""

    def __init__(self, hand_over: Callable[[int, Tensor], None]) -> None:
        self._hand_over = hand_over
        self._units: list[_Unit] = []
        # Of the backward pass that runs.
        self._begun: list[_Reduction] = []
        self._holding = False

    def add(self, group: dist.ProcessGroup, first: int, parameters: Sequence[nn.Parameter]) -> list[LeafParameter]:
        """Reduce the gradients of `parameters`, which have the numbers from `first` on, together over `group`."""
        leaves = [LeafParameter(parameter) for parameter in parameters]
        for place, parameter in enumerate(parameters):
            if parameter.requires_grad:
                # The hook keeps neither this object nor the parameter alive: no garbage collector sees a cycle
                # through it.
                hook = partial(_accumulated, weakref.ref(self), len(self._units), place)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._units.append(_Unit(group, first, leaves))
        return leaves

    def begin_backward(self, holding: bool) -> None:
        """Begin a backward pass; if `holding`, gradients accumulate without being reduced."""
        self._holding = holding
        for unit in self._units:
            unit.missing = {place for place, leaf in enumerate(unit.leaves) if leaf.parameter.requires_grad}

    def accumulated(self, number: int, place: int) -> None:
        """Count the gradient of a parameter of a unit, and begin the reduction after the last one."""
        unit = self._units[number]
        was_missing = place in unit.missing
        unit.missing.discard(place)
        if was_missing and not unit.missing and not self._holding:
            self._begin(unit)

    def end_backward(self) -> None:
        """Wait for all reductions, and hand the gradients over."""
        for unit in self._units:
            # Not all of its parameters were used now; some, perhaps, in backward passes that held gradients back.
            if any(leaf.parameter.grad is not None for leaf in unit.leaves):
                self._begin(unit)
        begun, self._begun = self._begun, []
        # All of them first: hooks of parameters may raise.
        for number, gradient in [item for reduction in begun for item in reduction.finished()]:
            self._hand_over(number, gradient)

    def reset(self) -> None:
        """Drop all gradients and reductions after an exception."""
        begun, self._begun = self._begun, []
        for reduction in begun:
            reduction.finished()
        for unit in self._units:
            for leaf in unit.leaves:
                leaf.take_gradient()

    def _begin(self, unit: _Unit) -> None:
        """Begin the all-reduce of the gradients that a unit has."""
        gradients: dict[int, Tensor] = {}
        for number, leaf in enumerate(unit.leaves, unit.first):
            gradient = leaf.take_gradient()
            if gradient is not None:
                if gradient.requires_grad:
                    raise InputError(
                        "the gradient of a parameter has a graph: second derivatives with respect to parameters are "
                        "not supported, call backward without create_graph"
                    )
                # Nobody else has it, so it is reduced in place.
                gradients[number] = gradient.contiguous()
        with naming_collectives(_REDUCING):
            # NCCL reduces them in one launch, without a copy. gloo copies them to one tensor in a thread of its own.
            collectives.all_reduce_coalesced_(list(gradients.values()), "sum", unit.group.group_name)
        self._begun.append(_Reduction(gradients))


_REDUCING = "reducing the gradients of parameters"


def _accumulated(reductions: "weakref.ref[Reductions]", number: int, place: int, _: Tensor) -> None:
    found = reductions()
    if found is not None:
        found.accumulated(number, place)
