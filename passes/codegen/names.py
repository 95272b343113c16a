"""Which variable holds which value in a generated function.

A value that leaves its module is called after the module ("q_proj", "input_layernorm"), one that the model returns
after the field ("loss"), the values that layers pass on "hidden". What is computed within a module keeps the name of
the operand that it is made of, when that is not needed any more, as one would write `x = x + 1`.
"""

import keyword
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from passes.ir.lowered import Body, Change, Compute, Loop

# Names for what an operator computes, where its own would shadow a builtin or say little.
_KINDS = {
    "abs": "magnitude",
    "all": "every",
    "any": "some",
    "cross_entropy_loss": "loss",
    "eq": "mask",
    "ge": "mask",
    "gt": "mask",
    "le": "mask",
    "lt": "mask",
    "max": "largest",
    "min": "least",
    "ne": "mask",
    "neg": "negative",
    "pow": "power",
    "scaled_dot_product_attention": "attention",
    "sum": "total",
}

# Operators whose result is a thing of its own.
_OWN = {"cos", "cross_entropy_loss", "scaled_dot_product_attention", "sin", "softmax"}

# Names for another look at a value that is still needed.
_VIEWS = {
    "expand": "expanded",
    "permute": "permuted",
    "reshape": "flat",
    "select": "part",
    "slice": "part",
    "to": "cast",
    "transpose": "transposed",
    "unsqueeze": "expanded",
}


class Names:
    """The variables of one function. `hints` are names that values should have, `reserved` those that none may have."""

    def __init__(self, body: Body, hints: Mapping[str, str], reserved: Collection[str]) -> None:
        self.of: dict[str, str] = {}
        self.live: dict[str, str] = {}
        self.position = 0
        self._hints = hints
        self._reserved = reserved
        self._last = last_uses(body)
        self._generic: set[str] = set()

    def fresh(self, base: str, value: str, *, generic: bool = False) -> str:
        """A new variable for `value`."""
        name, count = base, 1
        while name in self.live or name in self._reserved or keyword.iskeyword(name):
            count += 1
            name = f"{base}_{count}"
        self.hold(name, value)
        (self._generic.add if generic else self._generic.discard)(name)
        return name

    def hold(self, name: str, value: str) -> None:
        """Let variable `name` hold `value` from now on."""
        self.of[value] = name
        self.live[name] = value

    def ends(self, value: str) -> bool:
        """Whether the variable of a value is free after this statement."""
        name = self.of.get(value)
        return name is not None and self.live.get(name) == value and self.last(value) <= self.position

    def last(self, value: str) -> int:
        """The position of the last statement that reads a value."""
        return self._last.get(value, -1)

    def take_over(self, value: str, source: str) -> str | None:
        """The variable of `source` for `value`, if nothing reads `source` after this statement."""
        if not self.ends(source):
            return None
        self.hold(self.of[source], value)
        return self.of[source]

    def forget(self) -> None:
        """Variables whose value is read no more are free again."""
        for name, value in list(self.live.items()):
            if self.last(value) <= self.position:
                del self.live[name]

    def result(self, kind: str, value: str, operands: Sequence[str]) -> str:
        """The variable for the result of an operator, whose `operands` may pass on theirs."""
        ending = [operand for operand in operands if self.ends(operand)]
        hint = self._hints.get(value)
        if hint is not None:
            for operand in ending:
                if self.of[operand] == hint:
                    self.hold(hint, value)
                    return hint
            return self.fresh(hint, value)
        if kind not in _OWN:
            for operand in sorted(ending, key=lambda item: self.of[item] in self._generic):
                self.hold(self.of[operand], value)
                return self.of[operand]
        if kind in _VIEWS and operands and operands[0] in self.of:
            return self.fresh(f"{identifier(self.of[operands[0]])}_{_VIEWS[kind]}", value, generic=True)
        return self.fresh(identifier(_KINDS.get(kind, kind)), value, generic=kind not in _OWN)


def plain(name: str) -> str:
    """A name without what tells it from another: "q_proj_2" -> "q_proj"."""
    return re.sub(r"_\d+$", "", name)


def identifier(text: str) -> str:
    """A name of a value, a module or a path as a variable's."""
    name = re.sub(r"\W+", "_", re.sub(r"_n\d+$|_\d+$", "", text.lstrip("%"))).strip("_").lower()
    return name if name and not name[0].isdigit() else f"value_{name}".rstrip("_")


def hints(body: Body, returned: Mapping[str, str]) -> dict[str, str]:
    """What values of a body should be called; `returned` has the names under which the model returns some."""
    found: dict[str, str] = {}
    leaving: dict[str, set[str]] = {}
    readers = dict(_readers(body))
    for statement in body.statements:
        if isinstance(statement, Compute):
            module = statement.op.module
            for value in statement.op.results:
                outside = [reader for reader in readers.get(value, ()) if not _within(reader, module)]
                if outside:
                    leaving.setdefault(module, set()).add(value)
        elif isinstance(statement, Loop):
            found.update({origin(initial): "hidden" for initial in statement.initial[:1]})
    for module, values in leaving.items():
        leaf = module.rsplit(".", 1)[-1].partition("[")[0]
        for value in values:
            if leaf == "*" or leaf.replace("-", "").isdigit():
                found[value] = "hidden"
            elif leaf and len(values) == 1:
                found.setdefault(value, identifier(leaf))
    found.update({origin(value): identifier(name.rsplit(".", 1)[-1]) for value, name in returned.items()})
    return found


def origin(value: str) -> str:
    """The value that a redistributed one is made of."""
    return value.partition("~")[0]


def _within(module: str, owner: str) -> bool:
    return module == owner or module.startswith(f"{owner}.") or not owner


def _readers(body: Body) -> Iterator[tuple[str, list[str]]]:
    """For every value the modules that read it; what the body returns is read by no module."""
    found: dict[str, list[str]] = {}
    for statement in body.statements:
        if isinstance(statement, Compute):
            for operand in statement.op.operands:
                found.setdefault(origin(operand), []).append(statement.op.module)
        elif isinstance(statement, Loop):
            for value in (*statement.initial, *statement.shared):
                found.setdefault(origin(value), []).append("?")
    for value in body.results:
        found.setdefault(origin(value), []).append("?")
    yield from found.items()


def last_uses(body: Body) -> dict[str, int]:
    """The position of the last statement that reads each value; results are read after all."""
    last: dict[str, int] = {}
    for position, statement in enumerate(body.statements):
        if isinstance(statement, Compute):
            read: Iterable[str] = statement.op.operands
        elif isinstance(statement, Change):
            read = (statement.source,)
        else:
            read = (*statement.initial, *statement.shared)
        last.update(dict.fromkeys(read, position))
    last.update(dict.fromkeys(body.results, len(body.statements)))
    return last
