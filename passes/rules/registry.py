"""The op registry: which rule function speaks for which operator. The families register theirs here."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from passes.ir.program import Argument, Op, Ref, TensorType
from passes.rules.rule import Rule, RuleFunction

_RULES: dict[str, RuleFunction] = {}

# Rules of calls that no rule function speaks for, by `signature`.
_OTHERS: ContextVar[Mapping[Hashable, Rule]] = ContextVar("_OTHERS")


def rule_for(*kinds: str) -> Callable[[RuleFunction], RuleFunction]:
    """Register a rule function for the operators called `kinds` ("linear")."""

    def register(function: RuleFunction) -> RuleFunction:
        for kind in kinds:
            assert kind not in _RULES, f"{kind} has a rule already"
            _RULES[kind] = function
        return function

    return register


def find_rule(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """The rule of `op`, or None: then nothing of it is ever split."""
    rule = written_rule(op, types)
    others = _OTHERS.get({}) if rule is None else {}
    return others.get(signature(op, types)) if others else rule


def written_rule(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """What the rule functions say of `op`."""
    function = _RULES.get(op.kind)
    return function(op, types) if function else None


@contextmanager
def with_rules(rules: Mapping[Hashable, Rule]) -> Iterator[None]:
    """While this lasts, `rules` speak for calls that no rule function speaks for; they are by `signature`."""
    token = _OTHERS.set(rules)
    try:
        yield
    finally:
        _OTHERS.reset(token)


def signature(op: Op, types: Mapping[str, TensorType]) -> Hashable:
    """What two calls of an operator have alike: all arguments, with types in place of tensors."""

    def typed(argument: Argument) -> Hashable:
        if isinstance(argument, Ref):
            return types[argument.name]
        return tuple(map(typed, argument)) if isinstance(argument, tuple) else (type(argument), argument)

    return op.target, tuple((name, typed(value)) for name, value in op.arguments.items())


def registered() -> tuple[str, ...]:
    """The operators that have a rule."""
    return tuple(sorted(_RULES))
