"""State of a model, besides its tensors, that a forward pass changes: a trace has what it was in every call."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import cast

import torch
from torch import Tensor, nn

from passes.capture.source import UntraceableError, line_of_frame, replaced

# The function of torch that enters the mode around a decorated one.
_DECORATED = "decorate_context"

# Numbers in attributes of a module, by path and name; tensors with the address of the object, which they keep alive.
_Attributes = dict[str, object]


@contextmanager
def state_kept(module: nn.Module, changed: dict[str, None]) -> Iterator[None]:
    """Enter around a forward pass of `module`. Adds to `changed` the attributes that hold another number or tensor
    afterwards, by path.

    Raises UntraceableError where random numbers are drawn by others than torch (by any thread: all share these
    generators), where torch's are seeded, and where inference mode is entered.
    """

    def refuse_inference(mode: torch.inference_mode) -> None:
        # Above it is the frame of what replaces the method.
        caller = sys._getframe(2)
        if _owner(caller).partition(".")[0] == "torch":
            before(mode)
            return
        raise UntraceableError(
            "it enters torch.inference_mode, which a trace does not keep: enter torch.no_grad()", line_of_frame(caller)
        )

    def refuse_seed(*_: object) -> None:
        raise UntraceableError(
            "it seeds torch's random numbers, which a distributed module draws from a generator of its own: seed "
            "dist_model.random instead",
            line_of_frame(sys._getframe(1)),
        )

    attributes, drawn = _attributes(module), _generators()
    with (
        replaced(torch.inference_mode, "__enter__", refuse_inference) as entered,
        replaced(torch, "manual_seed", refuse_seed),
    ):
        before = cast(Callable[[torch.inference_mode], None], entered)
        yield
    for name, state in _generators().items():
        if state != drawn.get(name):
            raise UntraceableError(
                f"it draws random numbers with {name}, which would be the same in every call: draw them with torch",
                None,
            )
    now = _attributes(module)
    changed.update(dict.fromkeys(name for name in sorted({*now, *attributes}) if now.get(name) != attributes.get(name)))


def _owner(frame: FrameType) -> str:
    """The module of the function that enters a mode: that which torch decorated, or the running one."""
    decorated = frame.f_locals.get("func") if frame.f_code.co_name == _DECORATED else None
    return str(getattr(decorated, "__module__", None) or frame.f_globals.get("__name__", ""))


def _generators() -> dict[str, object]:
    """The states of the random generators that all modules share, by the library."""
    found: dict[str, object] = {"Python's random": random.getstate()}
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        found["numpy.random"] = (kind, keys.tobytes(), *rest)
    return found


def _attributes(module: nn.Module) -> _Attributes:
    """Numbers and tensors in attributes of all parts of `module`, but for parameters, buffers and flags."""
    return {
        f"{path}.{name}".lstrip("."): (id(value), value) if isinstance(value, Tensor) else value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, int | float | Tensor) and not isinstance(value, bool)
    }
