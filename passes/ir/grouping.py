"""Things grouped by what they have in common."""

from collections.abc import Hashable, Iterable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def grouped(pairs: Iterable[tuple[K, T]]) -> dict[K, list[T]]:
    """The second members of `pairs` by the first, in the order in which they come."""
    found: dict[K, list[T]] = {}
    for key, item in pairs:
        found.setdefault(key, []).append(item)
    return found


def representatives(links: Iterable[Iterable[K]]) -> dict[K, K]:
    """For every member of `links` the representative of all that are linked to it."""
    parent: dict[K, K] = {}

    def find(item: K) -> K:
        while parent.setdefault(item, item) != item:
            item = parent[item]
        return item

    for first, *others in links:
        for other in others:
            parent[find(other)] = find(first)
    return {item: find(item) for item in parent}
