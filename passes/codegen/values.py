"""Arguments of operators as expressions."""

import json
from collections.abc import Callable, Sequence

import torch

from passes.ir.program import Argument, Ref


class Text(str):
    """An argument that is written already."""


def value_text(argument: Argument, read: Callable[[str], str]) -> str:
    """An argument as an expression; `read` gives the one that reads a tensor."""
    if isinstance(argument, Text):
        return argument
    if isinstance(argument, Ref):
        return read(argument.name)
    if isinstance(argument, tuple):
        return tuple_text([value_text(item, read) for item in argument])
    if isinstance(argument, torch.device):
        return "self.device"
    if isinstance(argument, float) and (argument != argument or argument in (float("inf"), float("-inf"))):
        return f'float("{argument}")'
    return json.dumps(argument) if isinstance(argument, str) else repr(argument)


def tuple_text(items: Sequence[str]) -> str:
    """Expressions as a tuple."""
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
