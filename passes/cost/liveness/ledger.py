"""The ledger of a simulation: the live bytes by kind, and their peak."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer states"
BUFFERS = "buffers"
INPUTS = "inputs"
OUTPUTS = "outputs"
ACTIVATIONS = "activations"
GATHERED = "gathered parameters"
COMMUNICATION = "communication buffers"
TRANSIENT = "transient tensors"

KINDS = (PARAMETERS, OPTIMIZER, BUFFERS, INPUTS, OUTPUTS, GRADIENTS, ACTIVATIONS, GATHERED, COMMUNICATION, TRANSIENT)
# Kinds that can be live across micro-batches.
STAYING = (GRADIENTS, GATHERED)


@dataclass(frozen=True)
class Peak:
    """The largest number of live bytes, by kind and by block, and the statement that ran then."""

    kinds: dict[str, int]
    moment: str
    blocks: Mapping[str, int] = field(default_factory=dict)


@dataclass
class Ledger:
    """Live bytes by kind, and by the block of the program that allocates them. Every storage takes a multiple of `unit`
    bytes. `moment` is the statement that runs now, `block` the block that it is in."""

    unit: int = 1
    moment: str = ""
    block: str = ""
    live_by_block: Counter[str] = field(default_factory=Counter)
    live: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    total: int = 0
    peak_total: int = -1
    peak: Peak = field(default_factory=lambda: Peak(dict.fromkeys(KINDS, 0), ""))

    def add(self, kind: str, block: str, size: int) -> None:
        """Add `size` live bytes (negative: release)."""
        self.live[kind] += size
        self.live_by_block[block] += size
        self.total += size
        if self.total > self.peak_total:
            self.peak_total = self.total
            self.peak = Peak(dict(self.live), self.moment, dict(self.live_by_block))

    def turn(self, old: str, new: str, size: int) -> None:
        """Move bytes from one kind to another."""
        self.live[old] -= size
        self.live[new] += size


class Storage:
    """Bytes on the device, live from its creation until nothing refers to it: Python counts its references as it does
    those of a tensor."""

    __slots__ = ("__weakref__", "_ledger", "block", "bytes", "kind")

    def __init__(self, ledger: Ledger, size: int, kind: str) -> None:
        self._ledger = ledger
        self.bytes = -(-size // ledger.unit) * ledger.unit
        self.kind = kind
        self.block = ledger.block
        ledger.add(kind, self.block, self.bytes)

    def turn(self, kind: str) -> None:
        """Change the kind of the storage."""
        self._ledger.turn(self.kind, kind, self.bytes)
        self.kind = kind

    def resize(self, size: int) -> None:
        """Free the memory and allocate another size, as the same storage."""
        change = -(-size // self._ledger.unit) * self._ledger.unit - self.bytes
        self.bytes += change
        if change:
            self._ledger.add(self.kind, self.block, change)

    def __del__(self) -> None:
        self._ledger.add(self.kind, self.block, -self.bytes)
