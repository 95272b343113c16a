"""State of a model, besides its tensors, that a forward pass changes: a trace has what it was in every call."""

import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import cast

import torch
from torch import Tensor, nn

from passes._torch import TABLES
from passes.capture.caches import is_dict, packages_of
from passes.capture.source import UntraceableError, line_of_frame, replaced

# The function of torch that enters the mode around a decorated one.
_DECORATED = "decorate_context"

_Items = dict[object, object]


@contextmanager
def state_kept(module: nn.Module, changed: dict[str, None]) -> Iterator[None]:
    """Enter around a traced forward pass of `module`. Adds to `changed` the attributes that hold another number or
    tensor afterwards, by path; then all attributes are as they were before, so that none holds a tensor of the trace.
    These are attributes of modules, and of objects of the model's own classes that modules hold.

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

    drawn, contents = _generators(), [_Contents(*each) for each in _holders(module)]
    with (
        replaced(torch.inference_mode, "__enter__", refuse_inference) as entered,
        replaced(torch, "manual_seed", refuse_seed),
    ):
        before = cast(Callable[[torch.inference_mode], None], entered)
        try:
            yield
        finally:
            found = sorted(name for part in contents for name in part.changed())
            for part in contents:
                part.restore()
    for name, state in _generators().items():
        if state != drawn.get(name):
            raise UntraceableError(
                f"it draws random numbers with {name}, which would be the same in every call: draw them with torch",
                None,
            )
    changed.update(dict.fromkeys(found))


def _holders(module: nn.Module) -> Iterator[tuple[str, object]]:
    """The modules in `module`, and the objects of classes of their packages that they hold, by path: as attributes, and
    as items of dicts, lists and tuples. Such objects compute tables, say, and keep them."""
    packages, seen = packages_of(module), set[int]()
    waiting: list[tuple[str, object]] = list(module.named_modules())
    while waiting:
        path, holder = waiting.pop()
        if id(holder) not in seen:
            seen.add(id(holder))
            yield path, holder
            held = _held(f"{path}.", vars(holder))
            waiting += [(name, item) for name, item in held if str(type(item).__module__).partition(".")[0] in packages]


def _held(path: str, items: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """The values of some items, and those in dicts, lists and tuples, that have attributes but are no modules, which
    are found as such, no tensors and no classes."""
    for name, value in items.items():
        of_dict: Collection[object] = value.values() if is_dict(value) and name not in TABLES else ()
        for item in value if isinstance(value, list | tuple) else of_dict or (value,):
            if hasattr(item, "__dict__") and not isinstance(item, nn.Module | Tensor | type):
                yield f"{path}{name}", item


class _Contents:
    """The attributes of the module or object at a path, and the items of those that are dicts, as hooks are, and
    lists."""

    def __init__(self, path: str, part: object) -> None:
        own = vars(part)
        self.path = path
        self._own = cast(_Items, own), dict(cast(_Items, own))
        self._tables = [(own[name], dict(own[name])) for name in TABLES if name in own]
        self._dicts = [(value, dict(value)) for name, value in own.items() if is_dict(value) and name not in TABLES]
        self._lists = [(value, list(value)) for value in own.values() if type(value) is list]

    def changed(self) -> Iterator[str]:
        """The paths of attributes that hold another number or tensor than before; flags are no numbers."""
        now, before = ({name: item for name, item in own.items() if _is_value(item)} for own in self._own)
        for name in {*now, *before}:
            one, other = now.get(name), before.get(name)
            if one is not other and (isinstance(one, Tensor) or isinstance(other, Tensor) or one != other):
                yield f"{self.path}.{name}".lstrip(".")

    def restore(self) -> None:
        """Give all of them what they had. Of parameters, buffers and parts, those that are new are taken out."""
        for tensors, had in self._tables:
            for name in [name for name in tensors if name not in had]:
                del tensors[name]
            tensors.update({name: None for name, tensor in had.items() if tensor is None})
        for now, before in (self._own, *self._dicts):
            for name in [name for name in now if name not in before]:
                del now[name]
            now.update({name: value for name, value in before.items() if now.get(name) is not value})
        for items, kept in self._lists:
            items[:] = kept


def _is_value(value: object) -> bool:
    return isinstance(value, int | float | Tensor) and not isinstance(value, bool)


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
