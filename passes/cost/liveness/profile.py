"""The memory profile of one statement: its allocations and frees in order, and its saved tensors.

Indices of storages number the statement's own allocations in order.
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
        """Bytes of a tensor of this shape without overlapping elements."""
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
        """Whether elements overlap in memory, as in an expanded tensor."""
        return any(step == 0 and size > 1 for size, step in zip(self.shape, self.stride, strict=True))


class StorageOrigin(Enum):
    """The origin of a storage."""

    OWN = "own"  # allocated by the statement
    OPERAND = "operand"
    GRADIENT = "gradient"  # of a result, as it comes in


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A reference to a storage in a statement: its own allocation, an operand's, or that of a result's gradient."""

    origin: StorageOrigin
    index: int


class EventKind(Enum):
    """Memory events of the forward or backward pass of a statement."""

    ALLOCATE = "allocate"  # own storage
    FREE = "free"  # own storage
    TAKEN = "taken"  # the last read of the gradient of a result
    KEEP = "keep"  # autograd saves a tensor
    USE = "use"  # a saved tensor is read
    DONE = "done"  # the reader of a saved tensor releases it
    RELEASE = "release"  # autograd releases it
    GIVE = "give"  # an operand's gradient is computed


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a storage, a gradient of a result, a saved tensor or an operand's gradient, by index. `bytes` are
    those allocated."""

    what: EventKind
    index: int
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class ResultStorage:
    """A result: its storage, its form, and whether a gradient flows through it."""

    place: StorageRef
    form: Form
    flows: bool


@dataclass(frozen=True, slots=True)
class ForwardProfile:
    """The forward pass of a statement. `saved` are the tensors that autograd saves; None for one without a storage (a
    number). `attached` are held by a function itself and live as long as the graph."""

    events: tuple[Event, ...]
    results: tuple[ResultStorage, ...]
    saved: tuple[StorageRef | None, ...]
    attached: tuple[StorageRef, ...] = ()


@dataclass(frozen=True, slots=True)
class OperandGradient:
    """The gradient of an operand: its storage and form."""

    place: StorageRef
    form: Form


@dataclass(frozen=True, slots=True)
class BackwardProfile:
    """The backward pass of a statement; `given` has the gradients of the operands that get one."""

    events: tuple[Event, ...]
    given: Mapping[int, OperandGradient]


@dataclass(frozen=True, slots=True)
class Task:
    """A statement to profile: `text` is its expression, in which `x0`, `x1`, … are the operands; `results` the number
    of its results; `flows` the operands that have a gradient."""

    text: str
    operands: tuple[Form, ...]
    flows: tuple[bool, ...]
    results: int


class Prober(Protocol):
    """Profiles the memory of statements."""

    def compute(self, statement: Compute, types: Mapping[str, TensorType], copied: frozenset[str]) -> str:
        """The expression of an op; operands in `copied` are read as copies."""

    def change(self, step: RedistributionStep, dtypes: tuple[torch.dtype | None, torch.dtype | None]) -> str:
        """The expression of a step of a redistribution; `dtypes` as those of a `Redistribution`."""

    def forward(self, task: Task) -> ForwardProfile:
        """The profile of the forward pass of a task."""

    def backward(self, task: Task, gradients: tuple[Form | None, ...]) -> BackwardProfile:
        """The profile of its backward pass, given the forms of the gradients of its results."""
