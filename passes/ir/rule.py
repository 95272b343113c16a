"""The sharding rule of an op, as data; `passes/rules/` has the rules of all ops.

A rule names its factors, as in einsum: `linear` is "b s k, n k -> b s n". Each dim of each operand and result is a
list of parts, most significant first; a part is a whole factor or a range of its digits. `passes/rules/strategies.py`
derives from that how each tensor is split.
"""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum


class Role(Enum):
    """The role of a factor: how it may be split."""

    FREE = "free"  # results carry it
    SUM = "sum"  # summed over: results without it are pending sums
    INSIDE = "inside"  # reduced inside the op's local form: results without it are the same on every rank
    WHOLE = "whole"  # not to be split


@dataclass(frozen=True, slots=True)
class Factor:
    """A named index of an op and its extent.

    `ordered` says that ranks must have consecutive parts in rank order, because the local form communicates with
    neighbouring ranks. `reach` is the number of elements of the operand that it needs from the neighbours on both
    sides, and `least` the minimum local size of the factor for that.
    """

    size: int
    role: Role = Role.FREE
    ordered: bool = False
    reach: tuple[int, int] = (0, 0)
    least: int = 1


@dataclass(frozen=True, slots=True)
class Part:
    """A dim, or a part of one: the digits of `factor` from `start` (exclusive product of those before) of `size`."""

    factor: str
    size: int
    start: int = 1


Dims = tuple[tuple[Part, ...], ...]


def parts_of(*tensors: Dims) -> Iterator[Part]:
    """The parts of all dims of these tensors, in order."""
    return (part for dims in tensors for parts in dims for part in parts)


@dataclass(frozen=True, slots=True)
class Method:
    """A way to split an op on one axis: its `factors` are split at once, into equally many parts. No tensor has two of
    them. `form` is the local form that runs on a shard, "" if the op itself does. `role` is that of the method; None:
    that of its first factor. Set it where that is WHOLE. `in_stripes` says that ranks have equal work only where each
    has every n-th entry, so that such splits may be offered too."""

    factors: tuple[str, ...]
    form: str = ""
    role: Role | None = None
    in_stripes: bool = False


@dataclass(frozen=True, slots=True)
class Saved:
    """A saved tensor: operand or result `index`.

    `needed_by` are the operands one of which must have a gradient; empty means any. `copy` says that autograd saves a
    new tensor of the same size instead.
    """

    index: int
    result: bool = False
    needed_by: tuple[int, ...] = ()
    copy: bool = False


@dataclass(frozen=True)
class Rule:
    """The sharding rule of one op.

    - `operands`, `results`: the parts of every dim of every tensor, operands in the order of `Op.operands`.
    - `added`: operands that are added to a sum; they are pending sums where it is split (the bias of `linear`).
    - `linear`: sets of operands in which the op is exactly linear together, so that pending sums pass through.
    - `forms`: for a factor, the local form that runs on a shard where the op itself would be incorrect.
    - `joint`: by name, methods that split several factors at once. Each factor alone is a method of its own name.
    - `withheld`: by name, why ops of this kind do not have a method that others of it have.
    - `multiplications`: of the forward pass on one device, a multiply-add counted as two.
    - `backward`: for each operand, the multiplications of its gradient relative to those of the forward pass.
    - `divided`: by factor, the parts of the multiplications of both passes that have it; other factors are in all.
    - `kernels`: the number of kernels that the forward and the backward pass launch; None: one, and one for each
      gradient.
    - `launched_for`: the factor for each element of which as many of these are launched, so that a rank with a part of
      it launches a part of them; none if "".
    - `passes`: the bytes of temporaries that the forward and the backward pass read and write, relative to those of the
      first operand.
    - `saved`: the tensors that autograd saves.
    - `moves`: whether it reads or writes memory (a view does not).
    """

    factors: Mapping[str, Factor]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    added: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    forms: Mapping[str, str] = field(default_factory=dict)
    joint: Mapping[str, Method] = field(default_factory=dict)
    withheld: Mapping[str, str] = field(default_factory=dict)
    multiplications: float = 0.0
    backward: tuple[float, ...] = ()
    divided: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    kernels: tuple[int, int] | None = None
    launched_for: str = ""
    passes: tuple[float, float] = (0.0, 0.0)
    saved: tuple[Saved, ...] = ()
    moves: bool = True

    @property
    def local_forms(self) -> tuple[str, ...]:
        """The local forms of all methods."""
        return (*self.forms.values(), *(method.form for method in self.joint.values()))

    def method(self, name: str) -> Method | None:
        """The method called `name`; None where there is none."""
        if name in self.joint:
            return self.joint[name]
        return Method((name,), self.forms.get(name, "")) if name in self.factors else None

    def methods_with(self, factor: str) -> Iterator[str]:
        """The names of the methods that split `factor`."""
        yield factor
        yield from (name for name, method in self.joint.items() if factor in method.factors)


# Rules that were found by running ops, by the signature of a call (`passes.rules.signature`).
Rules = Mapping[Hashable, Rule]
