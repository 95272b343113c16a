import contextlib
import inspect
import io
import logging
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

import pytest
import torch
from torch import nn

from passes._torch import TRACE_LOGGERS, FakeTensorMode, GuardOnDataDependentSymNode, ShapeEnv
from passes.capture import Tracing, capture
from passes.capture.source import replaced

T = TypeVar("T")


def _elsewhere(function: Callable[[], T]) -> T:
    """The result of a function that another thread runs."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


class Base:
    def name(self) -> str:
        return "base"

    @classmethod
    def kind(cls, suffix: str = "") -> str:
        return cls.__name__ + suffix


class Derived(Base):
    pass


def test_functions_of_modules():
    module = ModuleType("module")
    module.function = original = lambda: "original"
    with replaced(module, "function", lambda: "other") as before:
        assert before is original
        assert module.function() == "other"
        assert _elsewhere(lambda: module.function()) == "original"
        with replaced(module, "function", lambda: "inner") as outer:
            assert module.function() == "inner"
            assert outer() == "other"
        assert module.function() == "other"
    assert module.function is original


def test_methods():
    with replaced(Base, "name", lambda self: f"other {type(self).__name__}"):
        assert Derived().name() == "other Derived"
        assert _elsewhere(lambda: Derived().name()) == "base"
    assert Base().name() == "base"


def test_class_methods():
    with replaced(Base, "kind", lambda cls, suffix="": f"other {cls.__name__}{suffix}") as before:
        assert Derived.kind("!") == "other Derived!"
        assert before(Derived) == "Derived"
        assert _elsewhere(lambda: Derived.kind(suffix="?")) == "Derived?"
    assert isinstance(vars(Base)["kind"], classmethod)


def test_class_methods_of_c():
    """As `torch.autograd.Function.apply` is in newer versions of torch."""

    class Table(dict):
        fromkeys = vars(dict)["fromkeys"]

    class Small(Table):
        pass

    with replaced(Table, "fromkeys", lambda cls, keys: f"other {cls.__name__}") as before:
        assert Small.fromkeys("ab") == "other Small"
        made = before(Small, "ab", 1)
        assert (type(made), made) == (Small, {"a": 1, "b": 1})
        assert _elsewhere(lambda: Small.fromkeys("a")) == {"a": None}
    assert vars(Table)["fromkeys"] is vars(dict)["fromkeys"]
    assert Small.fromkeys("a") == {"a": None}


def test_inherited_attributes():
    with replaced(Derived, "name", lambda self: "other"):
        assert (Derived().name(), Base().name()) == ("other", "base")
    assert "name" not in vars(Derived)


def test_after_an_exception():
    with pytest.raises(ValueError, match="here"), replaced(Base, "name", lambda self: "other"):
        raise ValueError("here")
    assert Base().name() == "base"


def test_threads_leave_in_any_order():
    original = vars(Base)["name"]
    entered, leave = threading.Event(), threading.Event()
    names: list[str] = []

    def other() -> None:
        with replaced(Base, "name", lambda self: "theirs"):
            entered.set()
            leave.wait()
            names.append(Base().name())

    thread = threading.Thread(target=other)
    with replaced(Base, "name", lambda self: "ours"):
        thread.start()
        entered.wait()
        assert Base().name() == "ours"
    assert Base().name() == "base"
    leave.set()
    thread.join()
    assert names == ["theirs"]
    assert vars(Base)["name"] is original


def test_what_is_put_there_meanwhile_stays(monkeypatch: pytest.MonkeyPatch):
    mine = io.StringIO()
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    with replaced(sys, "stdout", io.StringIO()):
        sys.stdout = mine
    assert sys.stdout is mine


# --- while a model is traced ------------------------------------------------------------------------------------------


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Asking(nn.Module):
    """A model that lets another thread look at what it sees itself while it is traced."""

    def __init__(self, look):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.look = look

    def forward(self, x):
        y = Double.apply(x * self.weight)
        if y.sum().isnan():
            raise ValueError("nan")
        self.look()
        return y.sum()


def _seen(unknown: torch.SymBool) -> dict[str, object]:
    """The answers in a thread that does not trace; `unknown` depends on values that nobody knows."""
    leaf = torch.ones(2, requires_grad=True)
    doubled = Double.apply(leaf)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger(TRACE_LOGGERS[0])
    logger.addHandler(handler)
    logger.error("of this thread")
    logger.removeHandler(handler)
    try:
        if unknown:
            raise ValueError("a check that a trace takes as passed")
    except Exception as error:
        refused = type(error)
    return {"function": type(doubled.grad_fn).__name__, "records": len(records), "refused": refused}


def test_another_thread_meets_nothing_of_a_trace(capsys: pytest.CaptureFixture[str]):
    attributes = [(torch.autograd.Function, "apply"), (torch.SymBool, "__bool__"), (sys, "stdout"), (sys, "stderr")]
    values = [inspect.getattr_static(owner, name) for owner, name in attributes]
    with FakeTensorMode(shape_env=ShapeEnv()):
        unknown = torch.ones(()).item() > 3
    before = _seen(unknown)
    assert before == {"function": "DoubleBackward", "records": 1, "refused": GuardOnDataDependentSymNode}
    seen: list[dict[str, object]] = []

    def look() -> None:
        seen.append(_elsewhere(lambda: _seen(unknown)))
        _elsewhere(lambda: print("another thread prints"))
        print("the model prints")

    tracing = Tracing(training=True, gradients=True, context=contextlib.nullcontext())
    program = capture(Asking(look), {"x": torch.ones(4)}, tracing)
    assert [op.kind for op in program.ops].count("autograd_function") == 1
    assert seen
    assert all(item == before for item in seen)
    assert capsys.readouterr().out == "another thread prints\n" * len(seen)
    assert all(
        inspect.getattr_static(owner, name) is value for (owner, name), value in zip(attributes, values, strict=True)
    )
