"""Random numbers, equal on ranks that compute the same and different where ranks have different parts; one seed."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import blake2b, sha256

import torch

from autopar.runtime.state import Axis


class Randomness:
    """The random generator of generated code. All ranks seed and advance it alike, so it needs no communication.

    Every pass through the model (`advance`) takes a new number from a generator of its own, which `seed` starts. The
    numbers of an op are determined by that number, the op, and this rank's place on the axes that split its result.
    Copies of a region are numbered through all pipeline stages, so they draw different numbers.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator()
        self._number = 0
        self._step: torch.Generator | None = None
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
        """Begin the next pass through the model, or through a pipeline stage of it."""
        self._number = int(torch.randint(2**62, (), generator=self._step or self._generator))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of all passes of a call in pipeline stages: it takes one number, however many passes this rank makes
        before something raises, so that ranks stay alike."""
        self._step = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=self._generator)))
        try:
            yield
        finally:
            self._step = None

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Context managers for a part of the model: for this pass, and for recomputing the part in the backward pass.

        The latter may be entered as often as the backward pass is.
        """
        return nullcontext(), _Recomputation(self, self._number)

    def exchange_number(self, number: int) -> int:
        """Draw from now on the numbers of the pass with `number`; returns the number of the current pass."""
        now, self._number = self._number, number
        return now

    def drawn(self, key: str, axes: Sequence[Axis], device: torch.device) -> AbstractContextManager[None]:
        """Context in which the op called `key` draws its numbers; afterwards the process's generators go on as before.

        `axes` are those on which ranks have different parts of the result.
        """
        text = f"{self._number} {key} {[axis.rank for axis in axes]}"
        seed = int.from_bytes(sha256(text.encode()).digest()[:7], "little")
        if device.type != "cuda":
            return _Seeded(seed, (torch.default_generator,))
        index = torch.cuda.current_device() if device.index is None else device.index
        return _Seeded(seed, (torch.default_generator, torch.cuda.default_generators[index]))


class _Seeded:
    """Context in which `generators` draw from `seed` on; afterwards they go on as before.

    It is entered for every op that draws, so it must be cheap: `torch.random.fork_rng` with `torch.manual_seed` takes
    ten times as long, as it looks for accelerators of every kind, and a function under `contextmanager` half as long
    again.
    """

    __slots__ = ("_generators", "_seed", "_states")

    def __init__(self, seed: int, generators: tuple[torch.Generator, ...]) -> None:
        self._seed, self._generators = seed, generators

    def __enter__(self) -> None:
        self._states = [generator.get_state() for generator in self._generators]
        for generator in self._generators:
            generator.manual_seed(self._seed)

    def __exit__(self, *_: object) -> None:
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)


@dataclass
class _Recomputation:
    """Context that draws the numbers of an earlier pass; it can be entered any number of times."""

    source: Randomness
    number: int

    def __enter__(self) -> None:
        self.number = self.source.exchange_number(self.number)

    def __exit__(self, *_: object) -> None:
        self.number = self.source.exchange_number(self.number)
