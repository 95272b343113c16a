"""Replacements of attributes that hold in one thread alone.

A trace must answer some questions of the model in its own way (`torch.autograd.Function.apply`, `bool(SymBool)`,
functions of `transformers`), and torch has no hooks for these. Other threads, which may train or plan meanwhile, keep
the original: while any thread has a replacement, the attribute is a dispatcher that asks which thread calls.
"""

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

_Function = Callable[..., object]


class _Attribute:
    """An attribute that some threads have replaced for themselves; `users` counts replacements, of all threads."""

    def __init__(self, owner: object, name: str) -> None:
        self.owner = owner
        self.name = name
        found = inspect.getattr_static(owner, name)
        self.is_of_class = isinstance(found, classmethod)
        self.found: object = found
        # The function that is called in place of the attribute, with the same arguments.
        self.original: object = found.__func__ if self.is_of_class else found
        self.inherited = name not in vars(owner)
        self.users = 0
        self.own = threading.local()
        self.dispatcher: object = self._dispatcher()

    def current(self) -> object:
        """The value in this thread."""
        stack = self.stack()
        return stack[-1] if stack else self.original

    def stack(self) -> list[object]:
        """The replacements of this thread, the innermost last."""
        found: list[object] | None = getattr(self.own, "stack", None)
        if found is None:
            found = self.own.stack = []
        return found

    def _dispatcher(self) -> object:
        if not callable(self.original):
            return _Proxy(self)

        def call(*args: object, **kwargs: object) -> object:
            return cast(_Function, self.current())(*args, **kwargs)

        return classmethod(call) if self.is_of_class else call

    def install(self) -> None:
        setattr(self.owner, self.name, self.dispatcher)

    def remove(self) -> None:
        """Put the original back, unless somebody has put something else there meanwhile."""
        if inspect.getattr_static(self.owner, self.name) is not self.dispatcher:
            return
        if self.inherited:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.found)


class _Proxy:
    """An object whose attributes are those of the value in the thread that asks."""

    def __init__(self, attribute: _Attribute) -> None:
        self.__attribute = attribute

    def __getattr__(self, name: str) -> object:
        return getattr(self.__attribute.current(), name)


# Attributes that are replaced at the moment belong to the process, as their owners do.
_replaced: dict[tuple[int, str], _Attribute] = {}
_lock = threading.Lock()


@contextmanager
def replaced(owner: object, name: str, replacement: object) -> Iterator[object]:
    """Let `owner.name` be `replacement` in this thread.

    `owner` is a module or a class. Of a function or method the replacement is one, of a class method a function that
    takes the class first; of any other object it is an object, which is asked for attributes alone. Replacements may
    nest, and threads may enter and leave in any order. Yields the value before, of a class method its function.
    """
    with _lock:
        attribute = _replaced.get((id(owner), name))
        if attribute is None:
            attribute = _replaced[id(owner), name] = _Attribute(owner, name)
            attribute.install()
        attribute.users += 1
    before = attribute.current()
    attribute.stack().append(replacement)
    try:
        yield before
    finally:
        attribute.stack().pop()
        with _lock:
            attribute.users -= 1
            if not attribute.users:
                attribute.remove()
                del _replaced[id(owner), name]
