"""What one statement does to memory: what it allocates and frees in which order, what autograd keeps of it.

Indices of storages count what the statement itself allocates, in its order.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Protocol

import torch

from passes.ir.lowered import Compute
from passes.ir.program import TensorType
from passes.ir.redistribution import RedistributionStep


@dataclass(frozen=True, slots=True)
class Form:
    """Local shape, strides (in elements) and dtype of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes of a tensor of this shape of which no two elements share a place."""
        return prod(self.shape) * self.dtype.itemsize

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], dtype: torch.dtype) -> "Form":
        """The form of a new tensor."""
        stride, step = [], 1
        for size in reversed(shape):
            stride.append(step)
            step *= max(size, 1)
        return cls(shape, tuple(reversed(stride)), dtype)

    @property
    def spread(self) -> bool:
        """Whether elements share places, as in what was expanded."""
        return any(step == 0 and size > 1 for size, step in zip(self.shape, self.stride, strict=True))


class StorageOrigin(Enum):
    """Whose storage it is."""

    OWN = "own"  # allocated by the statement
    OPERAND = "operand"
    GRADIENT = "gradient"  # of a result, as it comes in


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage, as a statement sees it: what it allocated itself, that of an operand or of a result's gradient."""

    origin: StorageOrigin
    index: int


class EventKind(Enum):
    """What can happen to memory while a statement runs forward or backward."""

    ALLOCATE = "allocate"  # own storage
    FREE = "free"  # own storage
    TAKEN = "taken"  # the gradient of a result is read no more
    KEEP = "keep"  # autograd keeps a tensor from here on
    USE = "use"  # what autograd kept is read
    DONE = "done"  # what was read is let go, by whom it was read for
    RELEASE = "release"  # autograd keeps it no more
    GIVE = "give"  # an operand's gradient is there


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happens to a storage, a gradient of a result, a kept tensor or an operand's gradient, by index.
    `bytes` are those allocated."""

    what: EventKind
    index: int
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class ResultStorage:
    """A result: where it lies, its form, and whether a gradient flows through it."""

    place: StorageRef
    form: Form
    flows: bool


@dataclass(frozen=True, slots=True)
class ForwardProfile:
    """The forward pass of a statement. `kept` are the tensors that autograd keeps of it, one by one; None for one that
    lies nowhere (a number). `attached` stay as long as the graph: a function holds them itself."""

    events: tuple[Event, ...]
    results: tuple[ResultStorage, ...]
    kept: tuple[StorageRef | None, ...]
    attached: tuple[StorageRef, ...] = ()


@dataclass(frozen=True, slots=True)
class OperandGradient:
    """The gradient of an operand: where it lies, and its form."""

    place: StorageRef
    form: Form


@dataclass(frozen=True, slots=True)
class BackwardProfile:
    """The backward pass of a statement; `given` has the gradients of the operands that get one."""

    events: tuple[Event, ...]
    given: Mapping[int, OperandGradient]


@dataclass(frozen=True, slots=True)
class Task:
    """A statement to look into: `text` is its expression, in which `x0`, `x1`, … are the operands; `results` how many
    tensors it gives; `flows` of which operands there is a gradient."""

    text: str
    operands: tuple[Form, ...]
    flows: tuple[bool, ...]
    results: int


class Prober(Protocol):
    """Finds out what statements do to memory."""

    def compute(self, statement: Compute, types: Mapping[str, TensorType], copied: frozenset[str]) -> str:
        """The expression of an op; operands in `copied` are read as copies of what they are called."""

    def change(self, step: RedistributionStep, dtypes: tuple[torch.dtype | None, torch.dtype | None]) -> str:
        """The expression of a step of a redistribution; `dtypes` as those of a `Change`."""

    def forward(self, task: Task) -> ForwardProfile:
        """What the forward pass of a task does."""

    def backward(self, task: Task, gradients: tuple[Form | None, ...]) -> BackwardProfile:
        """What its backward pass does, given the forms of the gradients of its results."""
