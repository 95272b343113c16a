"""Random numbers: the same on ranks that compute the same, others on ranks that have other parts, all from one seed."""

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from hashlib import blake2b, sha256

import torch

from autopar.runtime.generated.axis import Axis


class Randomness:
    """The random generator of generated code. All ranks seed and advance it alike, so it needs no communication.

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
        """The state as a tensor of bytes, for a checkpoint."""
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
        """Context managers for a part of the model: for this pass, and for recomputing the part in the backward pass.

        The latter may be entered as often as the backward pass is.
        """
        return contextlib.nullcontext(), _Again(self, self._number)

    def exchange_number(self, number: int) -> int:
        """Draw what was drawn in the pass with `number` from now on; returns the number of the current pass."""
        now, self._number = self._number, number
        return now

    def drawn(self, key: str, axes: Sequence[Axis], device: torch.device) -> AbstractContextManager[None]:
        """Let the op that runs within draw its numbers; the numbers of the rest of the process stay as they were.

        `key` names the op, `axes` are those on which the ranks have other parts.
        """
        text = f"{self._number} {key} {[axis.rank for axis in axes]}"
        return _Seeded(int.from_bytes(sha256(text.encode()).digest()[:7], "little"), device)


class _Again:
    """Within, what was drawn in an earlier pass is drawn again; it can be entered any number of times."""

    def __init__(self, source: Randomness, number: int) -> None:
        self._source = source
        self._number = number

    def __enter__(self) -> None:
        self._number = self._source.exchange_number(self._number)

    def __exit__(self, *_: object) -> None:
        self._number = self._source.exchange_number(self._number)


class _Seeded:
    """Within, the generators that ops on a device draw from begin at a seed; afterwards they go on as before.

    (`torch.random.fork_rng` with `torch.manual_seed` looks for accelerators of every kind, which takes ten times as
    long as a small op.)
    """

    __slots__ = ("_generators", "_seed", "_states")

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._generators = _generators(device)

    def __enter__(self) -> None:
        self._states = [generator.get_state() for generator in self._generators]
        for generator in self._generators:
            generator.manual_seed(self._seed)

    def __exit__(self, *_: object) -> None:
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)


def _generators(device: torch.device) -> tuple[torch.Generator, ...]:
    if device.type != "cuda":
        return (torch.default_generator,)
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.default_generator, torch.cuda.default_generators[index]
