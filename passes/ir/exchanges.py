"""Which parameters share an all-to-all before the forward pass (see `Group.turned` in `ir/lowered`)."""

from collections.abc import Hashable, Iterator, Sequence

# Bytes of a batch: many enough that the start does not count, and few enough that the buffers do not.
_BYTES = 128 * 2**20


def batches(keys: Sequence[Hashable], sizes: Sequence[int]) -> Iterator[list[int]]:
    """The numbers of the parameters that go together: those of one key, in order, as long as their `sizes` (bytes of a
    rank's part) are not too many."""
    by_key: dict[Hashable, list[int]] = {}
    for number, key in enumerate(keys):
        by_key.setdefault(key, []).append(number)
    for numbers in by_key.values():
        batch: list[int] = []
        for number in numbers:
            if batch and sum(sizes[other] for other in batch) + sizes[number] > _BYTES:
                yield batch
                batch = []
            batch.append(number)
        yield batch
