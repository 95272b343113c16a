"""The registry of rule functions by operator. Each family of operators registers its own."""

from collections.abc import Callable, Hashable, Mapping

from passes.ir.program import Argument, Op, Ref, TensorType
from passes.ir.rule import Rule, Rules
from passes.rules.rule import RuleFunction

_RULES: dict[str, RuleFunction] = {}


def rule_for(*kinds: str) -> Callable[[RuleFunction], RuleFunction]:
    """Register a rule function for the operators called `kinds` ("linear")."""

    def register(function: RuleFunction) -> RuleFunction:
        for kind in kinds:
            assert kind not in _RULES, f"{kind} has a rule already"
            _RULES[kind] = function
        return function

    return register


def find_rule(op: Op, types: Mapping[str, TensorType], discovered: Rules) -> Rule | None:
    """The rule of `op`, or None, in which case it is never split. Rules that were `discovered` apply if no rule
    function covers the op; a program has them (`Program.rules`)."""
    rule = written_rule(op, types)
    return discovered.get(signature(op, types)) if rule is None and discovered else rule


def written_rule(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """The rule of `op` by the rule functions alone."""
    function = _RULES.get(op.kind)
    return function(op, types) if function else None


def signature(op: Op, types: Mapping[str, TensorType]) -> Hashable:
    """A key that is equal for calls of an operator with the same arguments, with types in place of tensors."""

    def typed(argument: Argument) -> Hashable:
        if isinstance(argument, Ref):
            return types[argument.name]
        return tuple(map(typed, argument)) if isinstance(argument, tuple) else (type(argument), argument)

    return op.target, tuple((name, typed(value)) for name, value in op.arguments.items())


def registered() -> tuple[str, ...]:
    """The operators that have a rule."""
    return tuple(sorted(_RULES))
