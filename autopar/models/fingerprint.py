"""Fingerprints of models: of their structure, to compare with plans, and of their values, to compare between ranks.

Those of callables are of everything that they compute with besides their arguments: their code, and the values that
they hold or refer to. Code of installed libraries counts by its name alone.
"""

import dis
import functools
import hashlib
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType

import torch
from torch import Tensor, nn

from passes._torch import TABLES
from passes.capture import evaluated_parts
from passes.ir.errors import PlanMismatchError


def structure_fingerprint(model: nn.Module) -> str:
    """Equal for models of the same structure: class, submodules, parameters and buffers with ties, configuration, and
    the parts that stay in evaluation mode."""
    lines = [f"{type(model).__module__}.{type(model).__qualname__}", repr(model)]
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "to_dict"):
        # Those left out change from version to version, or from run to run; a classifier sets its `problem_type` by the
        # labels of its first forward pass.
        left_out = ("transformers_version", "_name_or_path", "problem_type")
        settings = sorted((name, value) for name, value in config.to_dict().items() if name not in left_out)
        lines += [f"{name}={value!r}" for name, value in settings]
    lines += [f"{path} in evaluation" for path in evaluated_parts(model)]
    lines += _tensor_lines("parameter", model.named_parameters(remove_duplicate=False))
    lines += _tensor_lines("buffer", model.named_buffers(remove_duplicate=False))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def values_fingerprint(model: nn.Module) -> dict[str, str]:
    """For every parameter and buffer a text that is equal for equal values."""
    found = {}
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_meta or not tensor.numel():
                continue
            flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().flatten()
            # The hash is an exclusive or, which equal values cancel out of: look at some of them too.
            hashes = [torch.hash_tensor(part).item() for part in (flat, flat[::2], flat[::3])]
            found[name] = f"{hashes} {flat[:1].tolist()}"
    return found


@dataclass(frozen=True)
class Fingerprint:
    """The fingerprints of a model on one rank: of its structure, its loss, and every value by name."""

    structure: str
    loss: str
    values: Mapping[str, str]


def refuse_different_models(ranks: Sequence[Fingerprint]) -> None:
    """Raise PlanMismatchError if the ranks of a mesh, in its order, hold different models."""
    first = ranks[0]
    for rank, other in enumerate(ranks):
        if other.structure != first.structure:
            raise PlanMismatchError(
                f"ranks hold different models: the one of rank {rank} of the mesh has a different structure from "
                "rank 0's"
            )
        if other.loss != first.loss:
            raise PlanMismatchError(
                f"ranks pass different losses: the code of the one on rank {rank} of the mesh, or a value that it "
                "holds, is not that of rank 0"
            )
        names = (*first.values, *other.values)
        name = next((name for name in names if first.values.get(name) != other.values.get(name)), None)
        if name is not None and (name not in first.values or name not in other.values):
            empty, full = (0, rank) if name not in first.values else (rank, 0)
            raise PlanMismatchError(
                f"ranks hold different models: {name!r} is on meta on rank {empty} of the mesh, and has values on rank "
                f"{full}; make it on meta on every rank, and load a state dict into the distributed module"
            )
        if name is not None:
            raise PlanMismatchError(
                f"ranks hold different models: {name!r} has other values on rank {rank} of the mesh than on rank 0; "
                "make the model from the same seed or the same checkpoint on every rank"
            )


def _tensor_lines(kind: str, named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    first: dict[int, str] = {}
    return [
        f"{kind} {name} {first.setdefault(id(tensor), name)} "
        f"{tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}"
        for name, tensor in named
    ]


# --- callables -------------------------------------------------------------------------------------------------------

_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.layout)


def callable_fingerprint(function: Callable[..., object]) -> str:
    """Equal for callables with the same code and the same values: of closures, defaults, globals, attributes and
    `functools.partial`. Code is compared as bytecode, so it depends on the version of Python, but not on comments."""
    digest = hashlib.sha256()
    for path, value in _reached(function):
        digest.update(f"{path}={_text(value)}\n".encode())
    return digest.hexdigest()[:32]


def trainable_tensors(function: Callable[..., object]) -> list[str]:
    """The places where `function` holds or refers to parameters, and other tensors that require a gradient."""
    return [
        path
        for path, value in _reached(function)
        if isinstance(value, Tensor) and (value.requires_grad or isinstance(value, nn.Parameter))
    ]


def _text(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {_values_text(value)}"
    return value if isinstance(value, str) else repr(value)


def _values_text(tensor: Tensor) -> str:
    if tensor.is_meta:
        return "meta"
    flat = tensor.detach().cpu().contiguous().flatten()
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()


def _reached(function: object) -> Iterator[tuple[str, object]]:
    """The parts of a callable, by where each is: tensors, plain values as text, and names of what a library
    defines."""
    # What is made on the way stays alive, so that no other object gets its id.
    seen: dict[int, tuple[str, object]] = {}

    def visit(value: object, path: str) -> Iterator[tuple[str, object]]:
        if isinstance(value, Tensor):
            yield path, value
        elif isinstance(value, _PLAIN):
            yield path, f"{type(value).__name__} {value!r}"
        elif id(value) in seen:
            yield path, f"as {seen[id(value)][0]}"
        else:
            seen[id(value)] = path, value
            yield path, _kind(value)
            for name, inner in _inside(value):
                yield from visit(inner, f"{path}{name}")

    return visit(function, "")


def _kind(value: object) -> str:
    """The kind of an object, or the name of what a library defines. Where the user's own code stands does not count: a
    function may be planned in one script, and trained with in another."""
    if isinstance(value, ModuleType):
        return f"module {value.__name__}" if _is_library(value.__name__) else "module"
    if isinstance(value, FunctionType | BuiltinFunctionType | type):
        name = f" {value.__module__}.{value.__qualname__}" if _is_library(value.__module__) else ""
        return f"{type(value).__name__}{name}"
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}" if _is_library(kind.__module__) else kind.__name__


def _inside(value: object) -> Iterator[tuple[str, object]]:
    """The parts of an object, with their names."""
    match value:
        case FunctionType() if not _is_library(value.__module__):
            yield from _of_function(value)
        case CodeType():
            yield ".bytecode", value.co_code
            yield ".names", (*value.co_names, *value.co_varnames, *value.co_freevars, *value.co_cellvars)
            yield ".constants", value.co_consts
        case functools.partial():
            yield ".func", value.func
            yield ".args", value.args
            yield ".keywords", value.keywords
        case MethodType():
            yield ".self", value.__self__
            yield ".function", value.__func__
        case Mapping():
            yield from ((f"[{key!r}]", inner) for key, inner in value.items())
        case tuple() | list():
            yield from ((f"[{number}]", inner) for number, inner in enumerate(value))
        case set() | frozenset():
            yield from ((f"[{number}]", inner) for number, inner in enumerate(sorted(value, key=repr)))
        case type():
            if not _is_library(value.__module__):
                yield from ((f".{name}", inner) for name, inner in vars(value).items() if callable(inner))
        case ModuleType() | FunctionType() | BuiltinFunctionType():
            pass
        case nn.Module():
            yield ".class", type(value)
            for name, inner in vars(value).items():
                if name in TABLES:
                    yield from ((f".{own}", item) for own, item in inner.items())
                else:
                    yield f".{name}", inner
        case _:
            yield ".class", type(value)
            yield from ((f".{name}", inner) for name, inner in getattr(value, "__dict__", {}).items())


def _of_function(function: FunctionType) -> Iterator[tuple[str, object]]:
    code = function.__code__
    yield ".code", code
    yield ".defaults", function.__defaults__
    yield ".keyword defaults", function.__kwdefaults__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:
            # Nothing has been assigned to the variable yet.
            yield f".{name}", None
    for name in sorted(_read_by(code, _GLOBALS)):
        if name not in function.__globals__:
            continue
        value = function.__globals__[name]
        yield f".{name}", value
        if isinstance(value, ModuleType) and not _is_library(value.__name__):
            inside = vars(value)
            yield from ((f".{name}.{own}", inside[own]) for own in sorted(_read_by(code, _ATTRIBUTES)) if own in inside)


def _read_by(code: CodeType, instructions: Set[str]) -> Set[str]:
    """The names that code reads by some instructions, functions inside it included."""
    found = {item.argval for item in dis.get_instructions(code) if item.opname in instructions}
    return found.union(*(_read_by(inner, instructions) for inner in code.co_consts if isinstance(inner, CodeType)))


def _is_library(module: str | None) -> bool:
    """Whether a module is one of Python, torch or another installed package."""
    found = sys.modules.get(module or "builtins")
    file = getattr(found, "__file__", None)
    return found is not None and module != "__main__" and (file is None or file.startswith(_LIBRARIES))
