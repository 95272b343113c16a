"""The local forms that run on a rank under a strategy, and their contexts."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from operator import mul

from passes.ir.choices import Strategy
from passes.ir.layout import Shape, local_shape
from passes.ir.mesh import Mesh
from passes.ir.rule import Role, Rule
from passes.rules.attention_forms import runs_in_blocks, runs_in_chunks
from passes.rules.form_context import FormContext
from passes.rules.local_forms import LOCAL_FORMS, LocalForm, form_that_runs
from passes.rules.strategies import Choice, OpContext


def form_contexts(
    context: OpContext, choices: Sequence[Choice], strategy: Strategy, mesh: Mesh, device: str
) -> Iterator[tuple[LocalForm, FormContext]]:
    """The local forms that run, and their contexts: one for each axis that splits a factor of one, or for adjacent ones
    that split it one after the other. Axes of a form that another includes have none: it sends nothing there."""
    rule = context.rule
    if rule is None or not any(choice.form for choice in choices):
        return
    shapes = _local_shapes(context, strategy, mesh)
    reduced = prod(factor.size for factor in rule.factors.values() if factor.role is Role.INSIDE)
    splits = [(choice, size) for choice, size in zip(choices, mesh.sizes, strict=True) if choice.form]
    inside = prod(size for choice, size in splits if rule.factors[choice.factors[0]].role is Role.INSIDE)
    rows = prod(shapes[0]) * inside // reduced
    digits: dict[tuple[str, tuple[str, ...]], list[tuple[int, int]]] = {}
    runs = form_that_runs(choice.form for choice in choices)
    for axis, choice in enumerate(choices):
        if choice.form and choice.form == runs:
            digits.setdefault((choice.form, choice.factors), []).append((axis, choice.major))
    for (form, factors), own in digits.items():
        dtype, reach = context.operands[0].dtype, rule.factors[factors[0]].reach
        earlier, later = prod(mesh.sizes[axis] for axis, _ in own), 1
        spans = mesh.joined(own)
        gathered = accumulate((mesh.ways(span) for span, _ in spans), mul, initial=1)
        in_order = all(major == before for (_, major), before in zip(spans, gathered, strict=False))
        placed = _places(rule, factors[0], choices, mesh)
        for span, _ in reversed(spans):
            ways, dim = mesh.ways(span), strategy.operands[0][mesh.spans[span][0]].dim
            earlier //= ways
            about = FormContext(
                context.op, span, ways, shapes, dtype, rows, dim, later, earlier, reach, in_order, *placed, device
            )
            yield LOCAL_FORMS[form], about
            later *= ways


def forms_of(
    context: OpContext, choices: Sequence[Choice], strategy: Strategy, mesh: Mesh, device: str
) -> Iterator[tuple[LocalForm, FormContext]]:
    """`form_contexts`, or the form of attention that runs in blocks also where neither queries nor keys are split."""
    found = list(form_contexts(context, choices, strategy, mesh, device))
    yield from found
    if not found and context.rule is not None and runs_in_blocks(context.op):
        shapes = _local_shapes(context, strategy, mesh)
        queries = context.rule.factors.get("queries")
        reach = (0, 0) if queries is None else queries.reach
        name = "chunked_attention" if runs_in_chunks(context.op) else "blockwise_attention"
        dtype = context.operands[0].dtype
        yield (
            LOCAL_FORMS[name],
            FormContext(context.op, 0, 1, shapes, dtype, prod(shapes[0]), reach=reach, device=device),
        )


def _local_shapes(context: OpContext, strategy: Strategy, mesh: Mesh) -> tuple[Shape, ...]:
    operands = zip(context.operands, strategy.operands, strict=True)
    return tuple(local_shape(type.shape, layout, mesh) for type, layout in operands)


def _places(rule: Rule, factor: str, choices: Sequence[Choice], mesh: Mesh) -> tuple[bool, int, int]:
    """Whether every rank has every n-th entry of a factor (the digits of axes reach without a gap to its last one), and
    the runs and the stride of a rank's entries (see `FormContext`)."""
    size = rule.factors[factor].size
    axes = zip(choices, mesh.sizes, strict=True)
    splits = sorted((choice.major, ways) for choice, ways in axes if factor in choice.factors and ways > 1)
    runs = inner = stride = taken = 1
    # A rank has all parts between the digits of two axes; those between the last such digits follow each other.
    for major, ways in (*splits, (size, 1)):
        if major != taken:
            runs, inner, stride = runs * inner, major // taken, 1
        taken, stride = major * ways, stride * ways
    return splits[0][0] * prod(ways for _, ways in splits) == size, runs, stride
