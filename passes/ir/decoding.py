"""Dataclasses from JSON, checked field by field."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import get_args, get_origin, get_type_hints


def decode(kind: object, value: object, place: str) -> object:
    """A value of type `kind` from its JSON; `kind` is made of dataclasses, tuples, mappings and scalars.

    Raises ValueError, which names the field by `place`, for a missing or unknown field and for a value of another type.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        return _decode_dataclass(kind, value, place)
    if origin is UnionType:
        return None if value is None else decode(arguments[0], value, place)
    if origin is tuple and isinstance(value, list):
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
        if len(kinds) != len(value):
            raise ValueError(f"{place} has {len(value)} entries instead of {len(kinds)}")
        pairs = enumerate(zip(kinds, value, strict=True))
        return tuple(decode(item_kind, item, f"{place}[{index}]") for index, (item_kind, item) in pairs)
    if origin is Mapping and isinstance(value, dict):
        return {key: decode(arguments[1], item, f"{place}[{key!r}]") for key, item in value.items()}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{place} is too large") from None
    if isinstance(kind, type) and type(value) is kind:
        return value
    raise ValueError(f"{place} is {_short(value)}, which is not of the type {_type_text(kind)}")


def _decode_dataclass(kind: type, value: object, place: str) -> object:
    if not isinstance(value, dict):
        raise ValueError(f"{place} is {_short(value)}, which is no object")
    hints = get_type_hints(kind)
    names = [item.name for item in fields(kind)]
    missing = [name for name in names if name not in value]
    if missing:
        raise ValueError(f"{place}.{missing[0]} is missing")
    unknown = [name for name in value if name not in names]
    if unknown:
        raise ValueError(f"{place} has the unknown field {_short(unknown[0])}")
    return kind(**{name: decode(hints[name], value[name], f"{place}.{name}") for name in names})


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _type_text(kind: object) -> str:
    """A declared type by its name in JSON."""
    names: Mapping[object, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
    return names.get(kind) or ("array" if get_origin(kind) is tuple else "object")
