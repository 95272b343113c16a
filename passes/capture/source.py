"""Locations in the source of a model, and the code at them.

A trace unrolls loops: a model that loops over its sequence gives a program that grows with the sequence.

A trace must answer some questions of the model in its own way (`torch.autograd.Function.apply`, `bool(SymBool)`,
functions of `transformers`), and torch has no hooks for these. Other threads, which may train or plan meanwhile, keep
the original: while any thread has a replacement, the attribute is a dispatcher that asks which thread calls.
"""

import ast
import importlib.util
import inspect
import linecache
import os
import sysconfig
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ClassMethodDescriptorType, CodeType, FrameType, TracebackType
from typing import cast

import torch

TORCH = os.path.dirname(torch.__file__) + os.sep
_ROOT = Path(__file__).resolve().parents[2]
_OURS = tuple(f"{_ROOT / room}{os.sep}" for room in ("autopar", "passes"))
_PYTHON = sysconfig.get_paths()["stdlib"] + os.sep


@dataclass(frozen=True)
class Line:
    """A line of source."""

    file: str
    number: int

    @property
    def text(self) -> str:
        """The text of the line."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.number}" + (f" ({self.text})" if self.text else "")


def line_of_frame(frame: FrameType) -> Line | None:
    """The line of the model that a running frame was called from."""
    return _models(_lines(traceback.walk_stack(frame)))


def line_of_traceback(trace: TracebackType | None) -> Line | None:
    """The line of the model that an error comes from."""
    return _models(_lines(traceback.walk_tb(trace))[::-1])


def _lines(frames: Iterable[tuple[FrameType, int]]) -> list[Line]:
    return [Line(frame.f_code.co_filename, number) for frame, number in frames]


def line_of_node(node: torch.fx.Node) -> Line | None:
    """The line of the model that a traced operator comes from."""
    return _models(lines_of_node(node))


def lines_of_node(node: torch.fx.Node) -> list[Line]:
    """The lines that a traced operator comes from, the innermost first, without those of torch, ours and Python's."""
    lines = []
    for written in (node.meta.get("stack_trace") or "").splitlines():
        file, comma, rest = written.strip().removeprefix('File "').partition('", line ')
        if comma and rest.split(",")[0].isdigit():
            lines.append(Line(file, int(rest.split(",")[0])))
    return [line for line in reversed(lines) if not is_foreign(line.file)]


def _models(lines: Sequence[Line]) -> Line | None:
    """The first of some lines that is the model's; else the first that is not torch's, ours or Python's."""
    others = [line for line in lines if not is_foreign(line.file)]
    models = [line for line in others if not _serves(line.file)]
    return next(iter(models or others), None)


def _serves(file: str) -> bool:
    """Whether a file is one of the package transformers that serves its models, and no model itself."""
    folder = _transformers_folder()
    return folder is not None and file.startswith(folder) and not file.startswith(f"{folder}models{os.sep}")


@cache
def _transformers_folder() -> str | None:
    """The folder of the package transformers, if it is installed."""
    found = importlib.util.find_spec("transformers")
    return None if found is None or found.origin is None else os.path.dirname(found.origin) + os.sep


@cache
def is_foreign(file: str) -> bool:
    """Whether a file is torch's, ours or Python's, so that it is no part of a model. That of `typing_extensions`, whose
    decorators stand around functions of torch, counts as Python's."""
    if file.startswith((TORCH, *_OURS, "<")) or os.path.basename(file) == "typing_extensions.py":
        return True
    return file.startswith(_PYTHON) and "site-packages" not in file


def construct(line: Line) -> str:
    """The use that the model makes of a value at `line`, as far as its syntax says: "branches", "loops",
    "number" (`bool` or `float` of it), or ""."""
    for number, kind in _constructs(line.file):
        if line.number in number:
            return kind
    return ""


def syntax_tree(file: str) -> ast.Module:
    """The syntax of a file; empty where it is not Python."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])


@cache
def _constructs(file: str) -> tuple[tuple[range, str], ...]:
    deciding = (found for node in ast.walk(syntax_tree(file)) for found in _deciding(node))
    return tuple((range(part.lineno, (part.end_lineno or part.lineno) + 1), kind) for part, kind in deciding)


def _deciding(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    match node:
        case ast.If(test=test) | ast.IfExp(test=test) | ast.Assert(test=test):
            yield test, "branches"
        case ast.While(test=test):
            yield test, "loops"
        case ast.For(iter=over) | ast.comprehension(iter=over):
            yield over, "loops"
        case ast.Call(func=ast.Name(id="bool" | "float")):
            yield node, "number"


# A line may run as often in one call, or once for so many tokens: layers, experts and blocks of a sequence are fewer.
_ALLOWED, _TOKENS = 256, 32


class UntraceableError(Exception):
    """The module does something at `line` that a trace cannot keep; the message has the reason."""

    def __init__(self, reason: str, line: Line | None) -> None:
        super().__init__(reason)
        self.line = line


class UnrolledError(UntraceableError):
    """A loop at `line` is unrolled, `times` so far."""

    def __init__(self, line: Line, times: int) -> None:
        super().__init__(
            f"this line has run {times} times in one call, so a loop over the samples or the sequence is unrolled, and "
            "the program grows with their number: use a version of the model that computes all steps by one operator "
            "or in blocks, or pass shorter inputs",
            line,
        )


@dataclass
class _Call:
    """A call of a function: how often each instruction has called operators, and the last one, with the frame that it
    called. Both frames are held, so that no later one is taken for them."""

    frame: FrameType
    counts: Counter[int] = field(default_factory=Counter)
    last: tuple[int, FrameType | None] | None = None


class Loops:
    """Counts how often each line of a model runs in one call. `lengths` are the sizes of the model's inputs, `caller`
    is the file that calls the model."""

    def __init__(self, lengths: Iterable[int], caller: str) -> None:
        self.caller = caller
        self.most = max(_ALLOWED, max(lengths, default=0) // _TOKENS)
        self.calls: dict[CodeType, _Call] = {}

    def note(self, frame: FrameType) -> None:
        """Count an operator that is called from `frame`. Raises UnrolledError."""
        child: FrameType | None = None
        above: FrameType | None = frame
        while above is not None and above.f_code.co_filename != self.caller:
            if not is_foreign(above.f_code.co_filename):
                self._count(above, child)
            child, above = above, above.f_back

    def _count(self, frame: FrameType, child: FrameType | None) -> None:
        call = self.calls.get(frame.f_code)
        if call is None or call.frame is not frame:
            call = self.calls[frame.f_code] = _Call(frame)
        if call.last is not None and call.last[0] == frame.f_lasti and call.last[1] is child:
            return
        call.last = frame.f_lasti, child
        call.counts[frame.f_lasti] += 1
        if call.counts[frame.f_lasti] > self.most:
            raise UnrolledError(Line(frame.f_code.co_filename, frame.f_lineno), self.most)


_Function = Callable[..., object]


class _Attribute:
    """An attribute that some threads have replaced for themselves; `users` counts replacements, of all threads."""

    def __init__(self, owner: object, name: str) -> None:
        self.owner = owner
        self.name = name
        found = inspect.getattr_static(owner, name)
        # `torch.autograd.Function.apply` is a method of C in torch 2.15.
        self.is_of_class = isinstance(found, (classmethod, ClassMethodDescriptorType))
        self.found: object = found
        # The function that is called in place of the attribute, with the same arguments.
        self.original: object = _function_of_class(found) if self.is_of_class else found
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


def _function_of_class(method: object) -> object:
    """The function that a class method calls with the class first."""
    if isinstance(method, ClassMethodDescriptorType):
        return lambda cls, *args, **kwargs: method.__get__(None, cls)(*args, **kwargs)
    return cast("classmethod[object, ..., object]", method).__func__


class _Proxy:
    """An object whose attributes and items are those of the value in the thread that asks."""

    def __init__(self, attribute: _Attribute) -> None:
        self.__attribute = attribute

    def __getattr__(self, name: str) -> object:
        return getattr(self.__attribute.current(), name)

    def __getitem__(self, key: object) -> object:
        return self._items[key]

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def __iter__(self) -> Iterator[object]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    @property
    def _items(self) -> Mapping[object, object]:
        return cast(Mapping[object, object], self.__attribute.current())


# Attributes that are replaced at the moment belong to the process, as their owners do.
_replaced: dict[tuple[int, str], _Attribute] = {}
_lock = threading.Lock()


@contextmanager
def replaced(owner: object, name: str, replacement: object) -> Iterator[object]:
    """Let `owner.name` be `replacement` in this thread.

    `owner` is a module or a class. Of a function or method the replacement is one, of a class method a function that
    takes the class first; of any other object it is an object, which is asked for attributes and items alone.
    Replacements may nest, and threads may enter and leave in any order. Yields the value before, of a class method its
    function.
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
