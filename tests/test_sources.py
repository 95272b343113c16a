"""The limits that the sources of autopar keep."""

import ast
from collections.abc import Iterator
from pathlib import Path

import autopar

ROOT = Path(autopar.__file__).parents[1]
MOST_LINES, MOST_PARAMETERS = 70, 9
# Rooms of the compiler that a pass may import, and passes that the search runs.
BASE = {"ir", "rules", "cost"}
SEARCHED = {"micro_batches", "constrain", "regions", "strategies", "solve", "lower", "variables"}
# The other rooms of the compiler that a room may import, beside `_torch` and `clock`.
ARROWS: dict[str, set[str]] = {
    "ir": set(),
    "scans": set(),
    "ctc": set(),
    "ops": {"ir", "scans"},
    "rules": {"ir", "scans"},
    "cost": {"ir", "rules"},
    "capture": BASE | {"ops"},
    "normalize": BASE | {"ops"},
    "search": BASE | SEARCHED,
    **dict.fromkeys(("dynamic_shapes", "codegen", "record", "sequences", *SEARCHED), BASE),
}
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
    # The operators have the arguments of their schemas; a local form has those of its op, and its axes; what takes the
    # place of another library's function has the arguments of that.
    operators = {"passes/ops.py: _attention", "passes/ops.py: _chunked_attention"}
    operators |= {"autopar/runtime/generated/ring_attention.py: ring_attention", "autopar/models/mamba.py: mamba_scan"}
    assert {name for name, node in _functions() if _parameters(node) > MOST_PARAMETERS} == PUBLIC | operators


def test_docstrings_begin_with_their_subject() -> None:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = (
        (path, (ast.get_docstring(node) or "").split("\n")[0])
        for path, tree in _trees()
        for node in ast.walk(tree)
        if isinstance(node, kinds)
    )
    assert [(path, line) for path, line in docstrings if line.startswith(("What ", "How "))] == []


def _imported(tree: ast.Module) -> Iterator[str]:
    """The names of imported modules; names that a package gives count as modules of it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{item.name}" for item in node.names)
        elif isinstance(node, ast.Import):
            yield from (item.name for item in node.names)


def test_the_compiler_imports_nothing_of_the_product() -> None:
    assert [
        (path, name)
        for path, tree in _trees()
        for name in _imported(tree)
        if path.startswith("passes/") and name.split(".")[0] == "autopar"
    ] == []


def test_arrows_between_the_rooms_of_the_compiler_go_one_way() -> None:
    rooms, against = set(), []
    for path, tree in _trees():
        package, room = path.removesuffix(".py").split("/")[:2]
        if package != "passes" or room in ("__init__", "_torch", "clock"):
            continue
        rooms.add(room)
        allowed = ARROWS.get(room, set()) | {room, "_torch", "clock"}
        others = (name.split(".") for name in _imported(tree))
        against += [(path, other[1]) for other in others if other[0] == "passes" and other[1] not in allowed]
    assert rooms == set(ARROWS)
    assert against == []
