"""The FSDP managers of one rank: one for each pipeline stage that it runs."""

import contextlib
from collections.abc import Iterator, Mapping

from torch import nn

from autopar.runtime.fsdp.manager import FSDPManager


class FSDPManagers:
    """The FSDP managers of the stages of this rank, by number; a program that is not cut is stage 0."""

    def __init__(self, by_stage: Mapping[int, FSDPManager]) -> None:
        self.by_stage = dict(by_stage)

    def bind(self, root: nn.Module) -> None:
        """Find in `root` the parameters that users see."""
        for manager in self.by_stage.values():
            manager.bind(root)

    @property
    def within(self) -> str:
        """The contexts that are entered."""
        return next(iter(self.by_stage.values())).within

    @contextlib.contextmanager
    def holding_gradients(self) -> Iterator[None]:
        """`FSDPManager.holding_gradients` of all stages."""
        with contextlib.ExitStack() as stack:
            for manager in self.by_stage.values():
                stack.enter_context(manager.holding_gradients())
            yield

    @contextlib.contextmanager
    def keeping_parameters(self) -> Iterator[None]:
        """`FSDPManager.keeping_parameters` of all stages."""
        with contextlib.ExitStack() as stack:
            for manager in self.by_stage.values():
                stack.enter_context(manager.keeping_parameters())
            yield
