"""normalize: a traced program in, the same function in normal form out.

Normal form: no assertions, no in-place ops, no ops that do nothing, no op that only repacks another one's results;
every size is written out, views are `reshape`, casts are `to.dtype`, splits are slices, a mean loss is a sum and a
count. Rows of experts stay in the order in which they come. Ops without a sharding rule are decomposed into ops with
one, where possible. Attention that is written out is one op, and so is a convolution with its padding. An `einsum` of
two tensors that copies operands is these copies and a product, where each operand has one dim of its own. Nothing is
computed twice. Unused ops are removed. Every op has its key. Calls of the same layer stand next to each other where
what they read allows it.
"""

from collections.abc import Set
from dataclasses import replace
from functools import reduce
from operator import or_

from passes.ir.arguments import references
from passes.ir.program import Input, Parameter, Program, has_gradient, without_unused
from passes.normalize.attention import with_attention
from passes.normalize.calls import with_calls_side_by_side
from passes.normalize.convolution import with_padded_convolutions
from passes.normalize.decompositions import decomposed
from passes.normalize.einsum import with_einsum_copies
from passes.normalize.forms import canonical
from passes.normalize.in_place import functional
from passes.normalize.routing import without_sorting
from passes.normalize.simplified import simplified


def normalize(program: Program) -> Program:
    """The program in normal form.

    Raises CaptureError for changes of the model's inputs and parameters, for in-place changes that cannot be applied to
    all views, and for ops that a generated program cannot run.
    """
    program = functional(program)
    found = _normalized(program, frozenset())
    # What only computes a part that is cut off has a gradient of zeros; without these ops it would have none.
    lost = set[str]()
    for before, after in zip(_contributing(program), _contributing(found), strict=True):
        lost |= before - after
    return _normalized(program, frozenset(lost)) if lost else found


def _contributing(program: Program) -> list[Set[str]]:
    """The trainable parameters and inputs that each output depends on, differentiably."""
    sources: tuple[Parameter | Input, ...] = (*program.parameters, *program.inputs)
    trainable = [item.name for item in sources if item.trainable]
    masks = {name: 1 << place for place, name in enumerate(trainable)}
    for op in program.ops:
        mask = reduce(or_, (masks.get(name, 0) for name in op.operands), 0)
        if mask and op.kind != "detach":
            masks.update({name: mask for name in op.results if has_gradient(program.types[name].dtype)})
    found = [reduce(or_, (masks.get(name, 0) for name in references(value)), 0) for value in program.outputs]
    return [{name for place, name in enumerate(trainable) if mask >> place & 1} for mask in found]


def _normalized(program: Program, kept: frozenset[str]) -> Program:
    program = canonical(program, kept)
    for rewrite in _REWRITES:
        program = rewrite(program)
    return program


def with_keys(program: Program) -> Program:
    """Give every op its key: module path, operator, and its number where the module calls the operator again."""
    counts: dict[str, int] = {}
    ops = []
    for op in program.ops:
        name = f"{op.module}/{op.kind}"
        count = counts.get(name, 0)
        counts[name] = count + 1
        ops.append(replace(op, key=f"{name}.{count}" if count else name))
    return replace(program, ops=tuple(ops))


_REWRITES = (
    without_sorting,
    decomposed,
    without_unused,
    with_attention,
    with_padded_convolutions,
    with_einsum_copies,
    simplified,
    without_unused,
    with_keys,
    with_calls_side_by_side,
)
