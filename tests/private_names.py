"""Finds uses of torch's private names in source."""

import ast
from collections.abc import Iterator, Set
from pathlib import Path

from torch import nn

# Names that begin with an underscore, and that Python documents.
_PUBLIC = {"_exit", "_fields", "_getframe", "_replace"}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


# Private names that a module of ours has from torch: they are torch's even on `self`.
_INHERITED = {name for name in (*dir(nn.Module), *vars(nn.Module())) if _is_private(name)}


def private_names(path: Path, overridden: Set[str]) -> Iterator[str]:
    """The uses of torch's private names in a file, as "path:line: name".

    These are imports of private modules and names, and of `torch.fx.experimental`; attributes with private names that
    the file does not define; names that a module has from torch, on `self`, as methods and in text. Methods that
    override one of `overridden` may call the one that they override.
    """
    tree = ast.parse(path.read_text())
    own = _PUBLIC | set(_defined(tree)) | overridden
    for node in ast.walk(tree):
        for name in _names(node, own):
            yield f"{path}:{node.lineno}: {name}"  # type: ignore[attr-defined]


def _defined(tree: ast.Module) -> Iterator[str]:
    """The private names that a file defines; of a class with bases, those that cannot come from torch."""
    for node in tree.body:
        inherited = _INHERITED if isinstance(node, ast.ClassDef) and node.bases else set()
        for inner in ast.walk(node):
            match inner:
                case ast.FunctionDef(name=name) if name not in inherited:
                    yield name
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()) if name not in inherited:
                    yield name
                case ast.AnnAssign(target=ast.Name(id=name)) if name not in inherited:
                    yield name


def _names(node: ast.AST, own: Set[str]) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (item.name for item in names if _is_within_torch(item.name))
        case ast.ImportFrom(module=str(module), names=names):
            yield from (name for item in names if _is_within_torch(name := f"{module}.{item.name}"))
        case ast.Attribute(attr="experimental", value=ast.Attribute(attr="fx")):
            yield "torch.fx.experimental"
        case ast.Attribute(attr=name) if _is_private(name) and name not in own:
            yield name
        case ast.FunctionDef(name=name) if name in _INHERITED - own or (name.startswith("_torch") and name not in own):
            yield name
        case ast.Call(func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[_, ast.Constant(value=str(name)), *_]):
            if _is_private(name) and name not in own:
                yield name
        case ast.Constant(value=str(text)) if text in _INHERITED - own or _is_within_torch(text):
            yield text


def _is_within_torch(name: str) -> bool:
    """Whether a dotted name leads to a private part of torch."""
    first, *rest = name.split(".")
    return first == "torch" and (any(map(_is_private, rest)) or rest[:2] == ["fx", "experimental"])
