"""Names of one function's variables, while its statements are followed one by one."""

import keyword
from collections.abc import Collection, Mapping, Sequence

from passes.ir.lowered import Body
from passes.ir.variables import FunctionVariables
from passes.ir.vocabulary import identifier, numbered

# Names of results of operators whose own name shadows a builtin or says little.
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

# Operators whose result never takes over the variable of an operand.
_OWN = {"cos", "cross_entropy_loss", "scaled_dot_product_attention", "sin", "softmax"}

# Suffixes for views of a value that is still read later.
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
    """The variables of one function up to the statement at `position`.

    `hints` are names that values should have, `reserved` names that no variable may have. `live` maps variables in use
    to the values that they hold.
    """

    def __init__(self, body: Body, hints: Mapping[str, str], reserved: Collection[str]) -> None:
        self.position = 0
        self.of: dict[str, str] = {}
        self.live: dict[str, str] = {}
        self.elements: dict[str, tuple[str, int]] = {}
        self.lambdas: dict[str, dict[str, str]] = {}
        self._hints = hints
        self._reserved = reserved
        self._last = _last_uses(body)
        self._generic: set[str] = set()

    def frozen(self) -> FunctionVariables:
        """The variables as the writer of the function and the memory simulator read them."""
        return FunctionVariables(self.of, self.elements, self.lambdas)

    def text(self, value: str) -> str | None:
        """The expression that reads a value; None for a value without a variable."""
        return self.frozen().text(value)

    def is_reserved(self, name: str) -> bool:
        """Whether no variable may have this name."""
        return name in self._reserved or keyword.iskeyword(name)

    def fresh(self, base: str, *, generic: bool = False) -> str:
        """A variable that is not in use, named `base` or `base` with a number. It is free again after this statement,
        unless a value is assigned to it."""
        name = numbered(base, lambda name: name in self.live or self.is_reserved(name))
        self.live[name] = ""
        (self._generic.add if generic else self._generic.discard)(name)
        return name

    def assign(self, name: str, value: str) -> None:
        """Let variable `name` hold `value` from now on."""
        self.of[value] = name
        self.live[name] = value

    def last(self, value: str) -> int:
        """The position of the last statement that reads a value."""
        return self._last.get(value, -1)

    def ends(self, value: str) -> bool:
        """Whether the variable of a value may be assigned by this statement."""
        name = self.of.get(value)
        return name is not None and self.live.get(name) == value and self.last(value) <= self.position

    def take_over(self, value: str, source: str) -> bool:
        """Whether no later statement reads `source`: then its variable holds `value` from now on."""
        ends = self.ends(source)
        if ends:
            self.assign(self.of[source], value)
        return ends

    def release(self) -> None:
        """Free the variables of values that no later statement reads."""
        self.live = {name: value for name, value in self.live.items() if self.last(value) > self.position}

    def result(self, kind: str, value: str, operands: Sequence[str]) -> None:
        """Give the result of an operator a variable, which may be that of one of `operands`."""
        ending = [operand for operand in operands if self.ends(operand)]
        hint = self._hints.get(value)
        if hint is not None:
            name = hint if any(self.of[operand] == hint for operand in ending) else self.fresh(hint)
        elif ending and kind not in _OWN:
            name = min((self.of[operand] for operand in ending), key=lambda name: name in self._generic)
        elif kind in _VIEWS and operands and (viewed := self.text(operands[0])) is not None:
            name = self.fresh(f"{identifier(viewed)}_{_VIEWS[kind]}", generic=True)
        else:
            name = self.fresh(identifier(_KINDS.get(kind, kind)), generic=kind not in _OWN)
        self.assign(name, value)


def _last_uses(body: Body) -> dict[str, int]:
    """The position of the last statement that reads each value; results are read after all statements."""
    last = {name: position for position, statement in enumerate(body.statements) for name in statement.reads}
    return last | dict.fromkeys(body.results, len(body.statements))
