"""Checks on the values of tensors: branches of a model that only raise an error.

While a model is traced there are no values. A branch on them could go either way, unless one way does nothing but
raise: `if x.max() > n: raise ...`, `assert x.all()`. Such a check is taken as passed. Within a `try` it is none: there
an error may be a way to go.
"""

import ast
import dis
from collections.abc import Iterator
from functools import cache
from itertools import islice
from types import CodeType, FrameType

from passes.capture.source import syntax_tree

_Range = tuple[int, int, int, int]


def passing_value(frame: FrameType) -> bool | None:
    """The value of the expression at `frame` with which a check passes; None where it is not part of a check."""
    position = _asking(frame.f_code, frame.f_lasti)
    if position is None:
        return None
    for test, value in _checks(frame.f_code.co_filename):
        if _contains(_range(test), position):
            return _part(test, position, value)
    return None


def _asking(code: CodeType, instruction: int) -> _Range | None:
    """The position in the source of the expression whose value an instruction tests.

    That of a branch was made by the instruction before it. (Where the branch itself stands, Python says less exactly.)
    """
    place = instruction // 2
    name = dis.opname[code.co_code[instruction]]
    if "JUMP" in name or name in ("TO_BOOL", "UNARY_NOT"):
        place -= 1
        while place > 0 and dis.opname[code.co_code[2 * place]] == "EXTENDED_ARG":
            place -= 1
    return _range_of(next(islice(code.co_positions(), place, None)))


def _range_of(position: tuple[int | None, int | None, int | None, int | None]) -> _Range | None:
    """Lines and columns of the source that an instruction comes from."""
    line, last_line, column, last_column = position
    if line is None or last_line is None or column is None or last_column is None:
        return None
    return line, column, last_line, last_column


def _part(test: ast.expr, position: _Range, value: bool) -> bool | None:
    """The value of the part of `test` at `position` with which the test is `value`.

    Of several parts that are joined by `and` or `or` each may decide; it is taken to be the one. That is right wherever
    the test is right, because all that happens besides is that the other parts are looked at.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _part(test.operand, position, not value)
    if isinstance(test, ast.BoolOp):
        inside = [part for part in test.values if _contains(_range(part), position)]
        return _part(inside[0], position, value) if inside else None
    return value if _range(test) == position else None


@cache
def _checks(filename: str) -> tuple[tuple[ast.expr, bool], ...]:
    """The tests of all checks in a file that assign nothing, with the values that pass them."""
    return tuple(
        (test, value)
        for test, value in _checks_in(syntax_tree(filename))
        if not any(isinstance(part, ast.NamedExpr) for part in ast.walk(test))
    )


def _checks_in(node: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    if isinstance(node, ast.Assert):
        yield node.test, True
    elif isinstance(node, ast.If) and _raises(node.body) != _raises(node.orelse):
        yield node.test, not _raises(node.body)
    caught = node.body if isinstance(node, (ast.Try, ast.TryStar)) and node.handlers else []
    for child in ast.iter_child_nodes(node):
        if child not in caught:
            yield from _checks_in(child)


def _raises(body: list[ast.stmt]) -> bool:
    """Whether statements always raise."""
    if not body or not isinstance(body[-1], ast.Raise):
        return False
    leaves = ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom, ast.Await
    return not any(isinstance(node, leaves) for statement in body for node in ast.walk(statement))


def _range(node: ast.expr) -> _Range:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _contains(outer: _Range, inner: _Range) -> bool:
    return outer[:2] <= inner[:2] and inner[2:] <= outer[2:]
