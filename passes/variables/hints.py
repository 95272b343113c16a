"""Names that values should have, after the modules that compute them and the fields that return them."""

from collections.abc import Mapping

from passes.ir.lowered import Body, Compute, Loop, Redistribution
from passes.ir.vocabulary import identifier

# Stands for a reader that is not a module: a loop, or the function's return.
_NO_MODULE = "?"


def hints(body: Body, returned: Mapping[str, str]) -> dict[str, str]:
    """The names that values of `body` should have, by value.

    A value that leaves its module is named after the module ("q_proj"), one that the model returns after the field
    ("loss"), values that layers pass on "hidden". `returned` maps values to the fields that return them.
    """
    found: dict[str, str] = {}
    leaving: dict[str, set[str]] = {}
    readers = _reading_modules(body)
    for statement in body.statements:
        if isinstance(statement, Compute):
            module = statement.op.module
            for value in statement.op.results:
                if not all(_within(reader, module) for reader in readers.get(value, ())):
                    leaving.setdefault(module, set()).add(value)
        elif isinstance(statement, Loop):
            found.update({_origin(initial): "hidden" for initial in statement.initial[:1]})
    for module, values in leaving.items():
        leaf = module.rsplit(".", 1)[-1].partition("[")[0]
        for value in values:
            if leaf == "*" or leaf.replace("-", "").isdigit():
                found[value] = "hidden"
            elif leaf and len(values) == 1:
                found.setdefault(value, identifier(leaf))
    found.update({_origin(value): identifier(name.rsplit(".", 1)[-1]) for value, name in returned.items()})
    return found


def _origin(value: str) -> str:
    """The value before its redistributions."""
    return value.partition("~")[0]


def _within(module: str, owner: str) -> bool:
    return module == owner or module.startswith(f"{owner}.") or not owner


def _reading_modules(body: Body) -> dict[str, list[str]]:
    """The modules that read each value."""
    found: dict[str, list[str]] = {}
    for statement in body.statements:
        # A redistribution passes on what its own readers read.
        for value in () if isinstance(statement, Redistribution) else statement.reads:
            module = statement.op.module if isinstance(statement, Compute) else _NO_MODULE
            found.setdefault(_origin(value), []).append(module)
    for value in body.results:
        found.setdefault(_origin(value), []).append(_NO_MODULE)
    return found
