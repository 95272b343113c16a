"""Lines of models: which of a stack is the model's, and what it does there."""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
import transformers

from passes.capture.source import Line, construct, line_of_frame, line_of_node, line_of_traceback

TRANSFORMERS = Path(transformers.__file__).parent


def _raising() -> None:
    raise ValueError("here")


def test_the_line_of_an_error() -> None:
    """The innermost one, with what stands there."""
    with pytest.raises(ValueError, match="here") as caught:
        _raising()
    line = line_of_traceback(caught.tb)
    assert line == Line(__file__, inspect.getsourcelines(_raising)[1] + 1)
    assert str(line) == f'{__file__}:{line.number} (raise ValueError("here"))'


def test_lines_of_torch_are_none_of_the_model() -> None:
    """The line that calls torch is."""
    with pytest.raises(RuntimeError) as caught:
        torch.nn.functional.linear(torch.ones(2), torch.ones(3, 3))
    line = line_of_traceback(caught.tb)
    assert line is not None
    assert line.text == "torch.nn.functional.linear(torch.ones(2), torch.ones(3, 3))"


def test_the_line_of_a_frame() -> None:
    """Here."""

    def frame() -> FrameType:
        return sys._getframe(0)

    line = line_of_frame(frame())
    assert line is not None
    assert line.text == "return sys._getframe(0)"


def node(*files: str) -> torch.fx.Node:
    """A traced operator that was called through these files, on line 3 of each."""
    made = torch.fx.Graph().call_function(torch.sin, ())
    made.meta["stack_trace"] = "\n".join(f'  File "{file}", line 3, in forward\n    something' for file in files)
    return made


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["/home/me/model.py"], "/home/me/model.py"),
        (["/home/me/model.py", torch.__file__], "/home/me/model.py"),
        (["/home/me/model.py", "/home/me/helpers.py"], "/home/me/helpers.py"),
        ([f"{TRANSFORMERS}/models/x/modeling_x.py", f"{TRANSFORMERS}/masking_utils.py"],) * 2,
        (["/home/me/model.py", f"{TRANSFORMERS}/masking_utils.py"], "/home/me/model.py"),
        ([f"{TRANSFORMERS}/masking_utils.py"], f"{TRANSFORMERS}/masking_utils.py"),
        (["/home/me/train.py", "/home/me/transformers/layers.py"], "/home/me/transformers/layers.py"),
        ([torch.__file__], None),
        ([], None),
    ],
)
def test_the_line_of_an_operator(files: list[str], expected: str | list[str] | None) -> None:
    """The innermost line that is the model's; what serves models of transformers is none, unless there is no other."""
    file = expected[0] if isinstance(expected, list) else expected
    assert line_of_node(node(*files)) == (Line(file, 3) if file else None)


def _if(x: int) -> int:
    if x:  # it
        return 1
    return 2


def _expression(x: int) -> int:
    return 1 if x else 2  # it


def _while(x: int) -> int:
    while x:  # it
        x -= 1
    return x


def _for(x: int) -> int:
    for _ in range(x):  # it
        x += 1
    return x


def _comprehension(x: int) -> list[int]:
    return [1 for _ in range(x)]  # it


def _nothing(x: int) -> int:
    return x + 1  # it


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (_if, "branches"),
        (_expression, "branches"),
        (_while, "loops"),
        (_for, "loops"),
        (_comprehension, "loops"),
        (_nothing, ""),
    ],
)
def test_what_a_line_does(function: Callable[[int], object], expected: str) -> None:
    """As far as its syntax says."""
    lines, first = inspect.getsourcelines(function)
    (place,) = [number for number, line in enumerate(lines) if "# it" in line]
    assert construct(Line(__file__, first + place)) == expected
    assert construct(Line("/no/such/file.py", 1)) == ""
