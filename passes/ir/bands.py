"""The keys that a query attends to by their places in the sequence."""

from collections.abc import Sequence
from dataclasses import dataclass

# The most queries, and keys, of a block of which documents hide keys.
TILE = 1024
# The most queries of which scores are whole at a time, where no kernel computes them.
CHUNK = 128

# Kernels of CUDA take widths that are multiples of this, to which torch's own attention pads operands.
_ALIGNED = 8


@dataclass(frozen=True, slots=True)
class Band:
    """A query attends to the keys from `before` places before its own to `after` places behind it; None: to all."""

    before: int | None = None
    after: int | None = None

    @property
    def is_full(self) -> bool:
        """Whether every query attends to every key."""
        return self.before is None and self.after is None


def kernel_width(query: int, value: int, device: str) -> int:
    """The one width that kernels of attention take on a type of `device`, for a `query` and a `value` of these."""
    wide = max(query, value)
    return -(-wide // _ALIGNED) * _ALIGNED if device == "cuda" else wide


def band_of(causal: bool, window: Sequence[int] | None) -> Band:
    """The band of attention that is `causal` or not, to a `window` of so many keys before and after the own one."""
    before, after = (None, None) if window is None else window
    return Band(before, 0 if causal else after)
