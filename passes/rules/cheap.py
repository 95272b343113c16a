"""Ops that the backward pass recomputes below full recompute: those that are cheap, and every second product."""

from collections.abc import Collection, Iterable
from enum import Enum

from passes.ir.program import Op, draws
from passes.ir.rule import Rule
from passes.rules.local_forms import LOCAL_FORMS

_ATTENTION = ("scaled_dot_product_attention", "chunked_attention")


def is_view(rule: Rule | None, copies: bool) -> bool:
    """Whether an op returns a view of its operand; `copies` says that it must copy instead."""
    return rule is not None and not rule.moves and not copies


def with_viewed(values: Iterable[str], views: Iterable[tuple[Collection[str], Collection[str]]]) -> set[str]:
    """`values` and all tensors that they view. `views` are the ops that return views, the last first: the result of
    each, and the tensor that it views."""
    found = set(values)
    for given, viewed in views:
        if not found.isdisjoint(given):
            found.update(viewed)
    return found


class Cheap(Enum):
    """The local forms in which an op is cheap to recompute: all, some or none."""

    NEVER = "in none"
    SOMETIMES = "in some"
    ALWAYS = "in all"


def how_cheap(op: Op, rule: Rule | None, copies: bool) -> Cheap:
    """The local forms of its rule in which an op is cheap, on any mesh and with any allowed methods."""
    if rule is None or not is_cheap(op, rule, copies, ()):
        return Cheap.NEVER
    return Cheap.ALWAYS if is_cheap(op, rule, copies, rule.local_forms) else Cheap.SOMETIMES


def is_cheap(op: Op, rule: Rule | None, copies: bool, forms: Collection[str]) -> bool:
    """Whether an op in the local forms `forms` takes little more than reading its operands and writing its result: it
    has no matrix products, collectives or random numbers. A view is free: its operand is saved or recomputed."""
    if rule is None or is_view(rule, copies) or rule.multiplications:
        return False
    sends = any(LOCAL_FORMS[form].communicates for form in forms if form)
    calls = op.kind == "autograd_function"
    alone = len(op.results) == 1 and bool(op.operands)
    return alone and not (sends or calls or draws(op))


def second_products(ops: Iterable[tuple[Op, Rule | None]]) -> set[str]:
    """The keys of every second matrix product among the ops of a region, in their order: recompute of "ops" recomputes
    these. Attention is none, nor is a product with a local form that sends.

    torchtitan's selective checkpointing counts products so: of two in a row it keeps the first.
    """
    products = [op.key for op, rule in ops if rule is not None and _is_product(op, rule)]
    return set(products[1::2])


def _is_product(op: Op, rule: Rule) -> bool:
    sends = any(LOCAL_FORMS[form].communicates for form in rule.local_forms if form)
    return (
        bool(rule.multiplications) and op.kind not in _ATTENTION and len(op.results) == 1 and not (sends or draws(op))
    )
