"""normalize: a traced program in, the same function in normal form out.

Normal form: no assertions, no in-place ops, no ops that do nothing, no op that only repacks another one's results;
every size is written out, views are `reshape`, casts are `to.dtype`, splits are slices, a mean loss is a sum and a
count. Rows of experts stay in the order in which they come. Ops without a sharding rule are decomposed into ops with
one, where possible. Attention that is written out is one op, and so is a convolution with its padding. Nothing is
computed twice. Unused ops are removed. Every op has its key.
"""

from dataclasses import replace

from passes.ir.program import Program, without_unused
from passes.normalize.attention import with_attention
from passes.normalize.convolution import with_padded_convolutions
from passes.normalize.decompositions import decomposed
from passes.normalize.forms import canonical
from passes.normalize.in_place import functional
from passes.normalize.routing import without_sorting
from passes.normalize.simplified import simplified


def normalize(program: Program) -> Program:
    """The program in normal form.

    Raises CaptureError for changes of the model's inputs and parameters, for in-place changes that cannot be applied to
    all views, and for ops that a generated program cannot run.
    """
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
    functional,
    canonical,
    without_sorting,
    decomposed,
    without_unused,
    with_attention,
    with_padded_convolutions,
    simplified,
    without_unused,
    with_keys,
)
