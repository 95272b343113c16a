"""How long each pass takes."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Clock:
    """Seconds spent in each pass."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}

    def __call__(self, name: str, run: Callable[[], T]) -> T:
        """Run something that belongs to the pass called `name`."""
        start = time.perf_counter()
        try:
            return run()
        finally:
            self.times[name] = self.times.get(name, 0.0) + time.perf_counter() - start
