"""Begin, end and failure of backward passes through FSDP units."""

import warnings
from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from autopar.runtime.fsdp import _torch as fsdp
from autopar.runtime.fsdp.gradients import UnitGradients
from autopar.runtime.fsdp.reductions import Reductions
from passes.ir.errors import UnsupportedError

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
        for leaf in outputs if isinstance(outputs, tuple) else (outputs,):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(self._begin)  # type: ignore[no-untyped-call]

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

    def _begin(self, _: Tensor) -> None:
        """Hook at an output: a backward pass begins, before it computes any gradient of a parameter."""
        number = fsdp.current_backward()
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
