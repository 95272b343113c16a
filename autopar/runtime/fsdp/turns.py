"""Parameters that FSDP units gather from a copy in another layout, made by all-to-alls before each forward pass.

One all-to-all carries many parameters, so that they share its latency. Reduced gradients take the way back in the same
manner, as soon as there are enough of them; the last ones when the backward pass ends.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.runtime.generated.axis import Axis
from autopar.runtime.generated.collectives import Exchanged, exchange, run_change
from passes.ir.exchanges import batches
from passes.ir.layout import Placement

# The all-to-alls of a way: axis, placement before, placement after.
Way = tuple[tuple[Axis, Placement, Placement], ...]


@dataclass(frozen=True)
class Turn:
    """The transfers between the part of a parameter that users see and the part that a unit stores. Values go `forth`
    in `dtype`, that of the computation, and gradients `back` in `gradient_dtype`, that of the reduction (None: their
    own)."""

    forth: Way
    back: Way
    dtype: torch.dtype | None
    gradient_dtype: torch.dtype | None

    def to_kept(self, part: Tensor) -> Tensor:
        """Convert a part in the users' layout to the part that the unit stores."""
        return _through(part, self.forth)

    def to_seen(self, part: Tensor) -> Tensor:
        """Convert a part that the unit stores to the users' layout."""
        return _through(part, self.back)

    def value(self, seen: Tensor, kept: Tensor) -> "Transfer":
        """The transfer of the values that users see to what the unit keeps."""
        return Transfer(self.forth, seen, kept, self.dtype or seen.dtype)

    def gradient(self, kept: Tensor, seen: Tensor) -> "Transfer":
        """The transfer of a reduced gradient of what the unit keeps to one of what users see."""
        return Transfer(self.back, kept, seen, self.gradient_dtype or kept.dtype)

    def gradient_key(self, kept: Tensor) -> tuple[Hashable, int]:
        """The key of the transfer of a reduced gradient, and the bytes that this rank sends."""
        dtype = self.gradient_dtype or kept.dtype
        return _key(self.back, dtype), kept.numel() * dtype.itemsize


@dataclass(frozen=True)
class Transfer:
    """A tensor that goes a `way`, sent in `dtype`, from the part `before` into the part `after`."""

    way: Way
    before: Tensor
    after: Tensor
    dtype: torch.dtype

    @property
    def key(self) -> Hashable:
        """Transfers of one key share their all-to-alls."""
        return _key(self.way, self.dtype)

    @property
    def bytes(self) -> int:
        """The bytes that this rank sends."""
        return self.before.numel() * self.dtype.itemsize


def transfer_all(transfers: Sequence[Transfer]) -> None:
    """Make all transfers; all ranks call it alike."""
    for batch in batches((each.key, each.bytes, each) for each in transfers):
        transfer_batch(batch)


def transfer_batch(transfers: Sequence[Transfer]) -> None:
    """Make transfers over the same axes in the same dtype together."""
    dtype, last = transfers[0].dtype, len(transfers[0].way) - 1
    parts = [each.before for each in transfers]
    with torch.no_grad():
        for number, (axis, _, _) in enumerate(transfers[0].way):
            exchanged = []
            for each, part in zip(transfers, parts, strict=True):
                _, source, target = each.way[number]
                after = each.after if number == last else _empty(part, axis.size, source, target, dtype)
                exchanged.append(Exchanged(part, after, source, target))
            exchange(exchanged, axis.group, axis.size, dtype)
            parts = [each.after for each in exchanged]


def _key(way: Way, dtype: torch.dtype) -> Hashable:
    return tuple(axis.name for axis, _, _ in way), dtype


def _empty(part: Tensor, size: int, source: Placement, target: Placement, dtype: torch.dtype) -> Tensor:
    """An empty tensor for `part` on an axis of `size` ranks after the step from `source` to `target`."""
    shape = list(part.shape)
    shape[target.dim] //= size
    shape[source.dim] *= size
    return part.new_empty(shape, dtype=dtype)


def _through(part: Tensor, way: Way) -> Tensor:
    with torch.no_grad():
        for axis, before, after in way:
            part = run_change(part, axis.group, axis.size, axis.rank, before, after)
    return part
