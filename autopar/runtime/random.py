"""Random numbers: the same on ranks that compute the same, others on ranks that have other parts, all from one seed."""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from hashlib import blake2b, sha256

import torch

from autopar.runtime.axis import Axis


class Randomness:
    """Where generated code draws from. Made alike on all ranks and advanced alike, it needs no communication.

    Every pass through the model (`advance`) takes a new number from a generator of its own, which `seed` starts. What
    an op draws follows from that number, from the op, and from this rank's place on the axes that split its result.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator()
        self._number = 0
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Begin anew."""
        self._generator.manual_seed(seed)

    def get_state(self) -> torch.Tensor:
        """Where it stands: a tensor of bytes, for a checkpoint."""
        return self._generator.get_state()

    def set_state(self, state: torch.Tensor) -> None:
        """Go on from where `get_state` was called."""
        self._generator.set_state(state)

    def digest(self) -> bytes:
        """A few bytes that differ where the state does."""
        return blake2b(self._generator.get_state().numpy().tobytes(), digest_size=8).digest()

    def advance(self) -> None:
        """Begin the next pass through the model."""
        self._number = int(torch.randint(2**62, (), generator=self._generator))

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """What surrounds a part of the model in this pass, and where the backward pass runs that part again."""
        return contextlib.nullcontext(), self._again(self._number)

    @contextlib.contextmanager
    def _again(self, number: int) -> Iterator[None]:
        """Draw what was drawn in the pass with `number`."""
        now, self._number = self._number, number
        try:
            yield
        finally:
            self._number = now

    @contextlib.contextmanager
    def drawn(self, key: str, axes: Sequence[Axis], device: torch.device) -> Iterator[None]:
        """Let the op that runs within draw its numbers; the numbers of the rest of the process stay as they were.

        `key` names the op, `axes` are those on which the ranks have other parts.
        """
        text = f"{self._number} {key} {[axis.rank for axis in axes]}"
        seed = int.from_bytes(sha256(text.encode()).digest()[:7], "little")
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            yield
