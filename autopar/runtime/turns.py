"""Parameters that an FSDP unit gathers from a copy in another layout, which all-to-alls make before each forward pass.

One all-to-all carries many parameters, so that they share its latency. Reduced gradients take the way back one by one,
as they come.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.runtime.axis import Axis
from autopar.runtime.collectives import Exchanged, exchange, run_change
from passes.ir.exchanges import batches
from passes.ir.layout import Letter

# The all-to-alls of a way: axis, letter before, letter after.
Way = tuple[tuple[Axis, Letter, Letter], ...]


@dataclass(frozen=True)
class Turn:
    """The ways between the part of a parameter that users see and the part that a unit keeps. Values go `forth` in
    `dtype`, the one that is computed in (None: as they are)."""

    forth: Way
    back: Way
    dtype: torch.dtype | None

    def to_kept(self, part: Tensor) -> Tensor:
        """The part that the unit keeps."""
        return _through(part, self.forth)

    def to_seen(self, part: Tensor) -> Tensor:
        """The part that users see."""
        return _through(part, self.back)


@dataclass(frozen=True)
class Copy:
    """A parameter whose values go to the unit that holds it: the part that users `see`, and the one that is `kept`."""

    turn: Turn
    seen: Tensor
    kept: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """What values are sent in."""
        return self.turn.dtype or self.seen.dtype


def take_values(copies: Sequence[Copy]) -> None:
    """Bring what users see of parameters to the units; all ranks call it alike."""
    keys = [(tuple(axis.name for axis, _, _ in each.turn.forth), each.dtype) for each in copies]
    sizes = [each.seen.numel() * each.dtype.itemsize for each in copies]
    with torch.no_grad():
        for batch in batches(keys, sizes):
            _take_batch([copies[number] for number in batch])


def _take_batch(copies: Sequence[Copy]) -> None:
    """Bring values of parameters that go over the same axes in the same dtype."""
    dtype, last = copies[0].dtype, len(copies[0].turn.forth) - 1
    parts = [each.seen for each in copies]
    for number, (axis, _, _) in enumerate(copies[0].turn.forth):
        exchanged = []
        for each, part in zip(copies, parts, strict=True):
            _, source, target = each.turn.forth[number]
            after = each.kept if number == last else _empty(part, axis.size, source, target, dtype)
            exchanged.append(Exchanged(part, after, source, target))
        exchange(exchanged, axis.group, axis.size, dtype)
        parts = [each.after for each in exchanged]


def _empty(part: Tensor, size: int, source: Letter, target: Letter, dtype: torch.dtype) -> Tensor:
    """What takes `part` on an axis of `size` ranks after the step from `source` to `target`."""
    shape = list(part.shape)
    shape[target.dim] //= size
    shape[source.dim] *= size
    return part.new_empty(shape, dtype=dtype)


def _through(part: Tensor, way: Way) -> Tensor:
    with torch.no_grad():
        for axis, before, after in way:
            part = run_change(part, axis.group, axis.size, axis.rank, before, after)
    return part
