"""Attention whose work is uneven: split in order, the rank with the last queries of causal attention computes most."""

from collections.abc import Iterator, Sequence

from passes.ir.rule import Rule
from passes.rules.strategies import is_uneven
from passes.search.subproblems import Choice, MicroBatchProgram


def has_uneven_work(choice: Choice) -> bool:
    """Whether some op of a choice splits in order what stripes would split evenly."""
    return any(is_uneven(rule, methods) for rule, methods in rules_in_choice(choice))


def rules_in_choice(choice: Choice) -> Iterator[tuple[Rule, Sequence[str]]]:
    """The rules of the ops that may be in stripes, and the methods that they have in a choice."""
    program, problem = choice.subproblem.program, choice.subproblem.problem
    for key, rule in may_be_in_stripes(program):
        index = problem.index[program.folded.alike.get(key, key)]
        yield rule, choice.solution.strategy(problem, index).methods


def may_be_in_stripes(program: MicroBatchProgram) -> Iterator[tuple[str, Rule]]:
    """The keys and the rules of ops that have a method in stripes."""
    for placed in program.analysis.placed:
        if placed.rule is not None and any(method.in_stripes for method in placed.rule.joint.values()):
            yield placed.op.key, placed.rule
