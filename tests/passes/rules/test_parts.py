from dataclasses import replace

import pytest
import torch

from passes.ir.program import Program
from passes.ir.rule import Factor, Part, Rule
from passes.regions import fold
from passes.rules import find_rule, rule_for, signature, written_rule
from passes.strategies.analysis import place
from tests.passes.helpers import Apply, normalized

_BATCH = ((Part("b", 4),),)
DISCOVERED = Rule({"b": Factor(4)}, (_BATCH,), (_BATCH,))


@pytest.fixture(scope="module")
def program() -> Program:
    """A sum and an op that no rule function covers."""
    return normalized(Apply(lambda x: torch.cholesky_inverse(x + x)), x=torch.ones(4, 4))


def test_discovered_rules_count_where_no_rule_function_covers_an_op(program: Program) -> None:
    for op in program.ops:
        key = signature(op, program.types)
        written = written_rule(op, program.types)
        assert find_rule(op, program.types, {}) == written
        assert find_rule(op, program.types, {key: DISCOVERED}) == (written or DISCOVERED)


def test_discovered_rules_belong_to_their_program(program: Program) -> None:
    (op,) = [op for op in program.ops if written_rule(op, program.types) is None]
    other = replace(program, rules={signature(op, program.types): DISCOVERED})
    found, without = place(fold(other))[0], place(fold(program))[0]
    assert [item.rule for item in found if item.op.kind == op.kind] == [DISCOVERED]
    assert [item.rule for item in without if item.op.kind == op.kind] == [None]


def test_an_operator_has_one_rule_function() -> None:
    with pytest.raises(AssertionError, match="linear has a rule already"):
        rule_for("linear")(lambda op, types: None)
