"""All-reduces of gradients of parameters that every rank of their group stores and reads whole.

Nothing of these parameters is gathered or cast, so generated code reads them as they are: as leaves of autograd. Those
of one unit are reduced together, as soon as the last of their gradients is there. The backward pass goes on meanwhile,
and ends by waiting for all reductions. `fully_shard` would copy such parameters for every use and, on CPUs, wait for
each reduction.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor, nn

from autopar._torch import collectives
from autopar.runtime.fsdp.gradients import LeafParameter, without_keeping
from autopar.runtime.ranks.failures import naming_collectives
from passes.ir.errors import InputError

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


class Reductions:
    """The reductions of all units of a model. `hand_over(number, gradient)` is called for each gradient that has been
    reduced, at the end of the backward pass."""

    def __init__(self, hand_over: Callable[[int, Tensor], None]) -> None:
        self._hand_over = hand_over
        self._units: list[_Unit] = []
        # The gradients that are being reduced in place, by the numbers of their parameters.
        self._begun: list[tuple[int, Tensor]] = []
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
        # All of them first: hooks of parameters may raise.
        for number, gradient in self._finished():
            self._hand_over(number, gradient)

    def reset(self) -> None:
        """Drop all gradients and reductions after an exception."""
        self._finished()
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
        self._begun += gradients.items()

    def _finished(self) -> list[tuple[int, Tensor]]:
        """Wait for all reductions that have begun; the reduced gradients, with the numbers of their parameters."""
        begun, self._begun = self._begun, []
        with naming_collectives(_REDUCING):
            return [(number, collectives.wait_tensor(gradient)) for number, gradient in begun]
