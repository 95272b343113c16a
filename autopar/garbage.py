"""Python's search for cyclic garbage, put off while a model is planned."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Disable the cyclic garbage collector. Planning makes millions of objects that live to its end, and few cycles:
    collection would take a quarter of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
