"""The op registry: which rule function speaks for which operator. The families register theirs here."""

from collections.abc import Callable, Mapping

from passes.ir.program import Op, TensorType
from passes.rules.rule import Rule, RuleFunction

_RULES: dict[str, RuleFunction] = {}


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
    function = _RULES.get(op.kind)
    return function(op, types) if function else None


def registered() -> tuple[str, ...]:
    """The operators that have a rule."""
    return tuple(sorted(_RULES))
