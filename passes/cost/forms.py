"""Local forms that an op runs under a strategy: their share of its work and their contexts."""

from collections.abc import Iterator, Sequence
from math import prod

from passes.ir.choices import Strategy
from passes.ir.layout import local_shape
from passes.ir.mesh import Mesh
from passes.ir.rule import Role, Rule
from passes.rules.local_forms import LOCAL_FORMS, FormContext, LocalForm, Split
from passes.rules.rule import Choice
from passes.rules.strategies import OpContext

_PLAIN = LocalForm()


def shares(rule: Rule | None, choices: Sequence[Choice], sizes: Sequence[int]) -> tuple[float, float]:
    """The part of the multiplications of an op, forward and backward, that the busiest rank has."""
    forward = backward = 1.0
    if rule is None:
        return forward, backward
    splits: dict[tuple[str, ...], list[Split]] = {}
    for choice, size in zip(choices, sizes, strict=True):
        if choice.factors:
            splits.setdefault((choice.form, *choice.factors), []).append(Split(size, choice.major))
    for (form, *factors), each in splits.items():
        share = (LOCAL_FORMS[form] if form else _PLAIN).share(each)
        parts = rule.divided.get(factors[0], (1.0, 1.0))
        forward, backward = (
            whole * (1 - part + part * share) for whole, part in zip((forward, backward), parts, strict=True)
        )
    return forward, backward


def form_contexts(
    context: OpContext, choices: Sequence[Choice], strategy: Strategy, mesh: Mesh, device: str
) -> Iterator[tuple[LocalForm, FormContext]]:
    """The local forms that run, and their contexts: one for each axis that splits a factor of one."""
    rule = context.rule
    if rule is None or not any(choice.form for choice in choices):
        return
    shapes = tuple(
        local_shape(type.shape, layout, mesh) for type, layout in zip(context.operands, strategy.operands, strict=True)
    )
    reduced = prod(factor.size for factor in rule.factors.values() if factor.role is Role.INSIDE)
    splits = [(choice, size) for choice, size in zip(choices, mesh.sizes, strict=True) if choice.form]
    inside = prod(size for choice, size in splits if rule.factors[choice.factors[0]].role is Role.INSIDE)
    rows = prod(shapes[0]) * inside // reduced
    for axis, choice in enumerate(choices):
        if choice.form:
            later = (size for other, size in splits if other.factors == choice.factors and other.major > choice.major)
            dim, reach = strategy.operands[0][axis].dim, rule.factors[choice.factors[0]].reach
            dtype = context.operands[0].dtype
            yield (
                LOCAL_FORMS[choice.form],
                FormContext(context.op, axis, mesh.sizes[axis], shapes, dtype, rows, dim, prod(later), reach, device),
            )
