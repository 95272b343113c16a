"""The scope of a generated function, as the writers of expressions use it."""

from collections.abc import Mapping
from typing import Protocol

from passes.ir.program import Argument, TensorType


class Scope(Protocol):
    """A function body that is being written."""

    @property
    def types(self) -> Mapping[str, TensorType]:
        """The global type of every value."""

    def value(self, argument: Argument) -> str:
        """An argument as an expression."""

    def use(self, name: str) -> str:
        """A name of the runtime, to be imported."""

    def function(self, name: str) -> str:
        """A function of torch.nn.functional."""

    def axis(self, index: int) -> str:
        """The variable that holds an axis of the mesh."""
