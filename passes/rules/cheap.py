"""Which ops are cheap to run again in the backward pass, so that their results need not be kept."""

from collections.abc import Collection, Iterable
from enum import Enum

from passes.ir.program import Op, draws
from passes.ir.rule import Rule
from passes.rules.local_forms import LOCAL_FORMS


def is_view(rule: Rule | None, copies: bool) -> bool:
    """Whether an op gives a view of its operand; `copies` says that it must copy where it would else."""
    return rule is not None and not rule.moves and not copies


def with_viewed(values: Iterable[str], views: Iterable[tuple[Collection[str], Collection[str]]]) -> set[str]:
    """`values` and all that they are views of. `views` are the ops that give views, the last first: what each gives,
    and what that is a view of."""
    found = set(values)
    for given, viewed in views:
        if not found.isdisjoint(given):
            found.update(viewed)
    return found


class Cheap(Enum):
    """In which of its local forms an op is cheap to run again."""

    NEVER = "in none"
    SOMETIMES = "in some"
    ALWAYS = "in all"


def how_cheap(op: Op, rule: Rule | None, copies: bool) -> Cheap:
    """In which of the local forms that its rule has an op is cheap; on any mesh, whatever it is offered."""
    if rule is None or not is_cheap(op, rule, copies, ()):
        return Cheap.NEVER
    return Cheap.ALWAYS if is_cheap(op, rule, copies, rule.local_forms) else Cheap.SOMETIMES


def is_cheap(op: Op, rule: Rule | None, copies: bool, forms: Collection[str]) -> bool:
    """Whether an op that runs in the local forms `forms` takes little more than reading its operands and writing its
    result: it multiplies no matrices, sends nothing and draws nothing. A view takes nothing, and is of what is kept or
    made again."""
    if rule is None or is_view(rule, copies) or rule.multiplications:
        return False
    sends = any(LOCAL_FORMS[form].communicates for form in forms if form)
    calls = op.kind == "autograd_function"
    alone = len(op.results) == 1 and bool(op.operands)
    return alone and not (sends or calls or draws(op))
