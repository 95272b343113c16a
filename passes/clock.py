"""Seconds spent in each pass."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Adds up the seconds spent in each pass, by its name: `with clock("solve"): …`."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the seconds of the body for the pass called `name`, also where the body raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.times[name] = self.times.get(name, 0.0) + time.perf_counter() - start
