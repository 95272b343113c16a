"""Batches of tensors that share a collective: all-to-alls of parameters in other layouts (see `FSDPUnit.turned` in
`ir/lowered`), and all-reduces of gradients where a collective copies its tensors into one."""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

# Bytes of a batch: large enough to hide the latency of a collective, small enough for its buffers not to matter.
BATCH_BYTES = 64 * 2**20
# Bytes of a batch of gradients, as in the buckets of torch's DistributedDataParallel.
REDUCTION_BYTES = 25 * 2**20


class Sharing(NamedTuple):
    """Numbers of tensors that share a collective: an all-reduce, any other."""

    all_reduce: int = 1
    other: int = 1

    @property
    def by_unit(self) -> "Sharing":
        """The numbers where all-reduces are those of one unit, as its other collectives are."""
        return Sharing(self.other, self.other)


# No tensors share a collective.
ALONE = Sharing()


@dataclass
class Batching(Generic[T]):
    """Tensors that wait to share a collective: those of one key (axes and dtype) are sent together, `limit` bytes or
    more at a time."""

    limit: int = BATCH_BYTES
    _waiting: dict[Hashable, tuple[list[T], int]] = field(default_factory=dict)

    def add(self, key: Hashable, size: int, item: T) -> list[T]:
        """Queue `item`, of which a rank sends `size` bytes. Returns the batch that it fills, or nothing."""
        items, waiting = self._waiting.pop(key, ([], 0))
        items.append(item)
        if waiting + size >= self.limit:
            return items
        self._waiting[key] = items, waiting + size
        return []

    def rest(self) -> Iterator[list[T]]:
        """Return the batches of all queued items, and empty the queue."""
        waiting, self._waiting = self._waiting, {}
        return (items for items, _ in waiting.values())


def batches(items: Iterable[tuple[Hashable, int, T]]) -> Iterator[list[T]]:
    """The batches of items with their keys and sizes in bytes."""
    batching: Batching[T] = Batching()
    for key, size, item in items:
        full = batching.add(key, size, item)
        if full:
            yield full
    yield from batching.rest()
