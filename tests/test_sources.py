"""The limits that the sources of autopar keep."""

import ast
from collections.abc import Iterator
from pathlib import Path

import autopar

ROOT = Path(autopar.__file__).parents[1]
MOST_LINES, MOST_PARAMETERS = 70, 9
# What users call takes all options by name.
PUBLIC = {"autopar/api.py: plan", "autopar/api.py: parallelize"}


def _trees() -> Iterator[tuple[str, ast.Module]]:
    for room in ("autopar", "passes"):
        for path in sorted((ROOT / room).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def _functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    for path, tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                yield f"{path}: {node.name}", node


def _parameters(function: ast.FunctionDef) -> int:
    given = function.args
    return len([*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))])


def test_functions_are_short() -> None:
    assert [name for name, node in _functions() if node.end_lineno - node.lineno >= MOST_LINES] == []


def test_functions_take_few_arguments() -> None:
    assert {name for name, node in _functions() if _parameters(node) > MOST_PARAMETERS} == PUBLIC


def test_the_compiler_imports_nothing_of_the_product() -> None:
    found = [
        path
        for path, tree in _trees()
        for node in ast.walk(tree)
        if path.startswith("passes/")
        and (
            (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "autopar")
            or (isinstance(node, ast.Import) and any(item.name.split(".")[0] == "autopar" for item in node.names))
        )
    ]
    assert found == []
