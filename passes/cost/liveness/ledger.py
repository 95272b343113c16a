"""The account of an abstract run: how many bytes lie on the device, of what kind, and when they were most."""

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
# What can stay from one micro-batch to the next.
STAYING = (GRADIENTS, GATHERED)


@dataclass(frozen=True)
class Peak:
    """The most bytes that lay there at once, by kind, and what was running."""

    kinds: dict[str, int]
    moment: str


@dataclass
class Ledger:
    """Bytes by kind. Every storage takes a multiple of `unit` bytes. `moment` is what runs now."""

    unit: int = 1
    moment: str = ""
    held: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    total: int = 0
    peak_total: int = -1
    peak: Peak = field(default_factory=lambda: Peak(dict.fromkeys(KINDS, 0), ""))

    def add(self, kind: str, size: int) -> None:
        """Let `size` more bytes lie there; fewer, if it is below zero."""
        self.held[kind] += size
        self.total += size
        if self.total > self.peak_total:
            self.peak_total = self.total
            self.peak = Peak(dict(self.held), self.moment)

    def turn(self, old: str, new: str, size: int) -> None:
        """Let bytes of one kind be of another."""
        self.held[old] -= size
        self.held[new] += size


class Storage:
    """Bytes on the device, from when it is made until nothing refers to it, like a tensor's: Python counts references
    to both in the same way."""

    __slots__ = ("__weakref__", "_ledger", "bytes", "kind")

    def __init__(self, ledger: Ledger, size: int, kind: str) -> None:
        self._ledger = ledger
        self.bytes = -(-size // ledger.unit) * ledger.unit
        self.kind = kind
        ledger.add(kind, self.bytes)

    def turn(self, kind: str) -> None:
        """Be of another kind from now on."""
        self._ledger.turn(self.kind, kind, self.bytes)
        self.kind = kind

    def resize(self, size: int) -> None:
        """Take other memory, or none, and be the same storage."""
        change = -(-size // self._ledger.unit) * self._ledger.unit - self.bytes
        self.bytes += change
        if change:
            self._ledger.add(self.kind, change)

    def __del__(self) -> None:
        self._ledger.add(self.kind, -self.bytes)
