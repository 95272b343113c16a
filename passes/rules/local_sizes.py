"""The sizes among an op's arguments, as a rank has them when the op is split."""

from collections.abc import Mapping, Sequence
from math import prod

from passes.ir.choices import Strategy
from passes.ir.layout import local_shape, split_ways
from passes.ir.mesh import Mesh
from passes.ir.program import Argument, Op, TensorType
from passes.rules.strategies import Choice

# The arguments that are the shape of the result (-1 and literals need no care).
_SHAPES = {"reshape": "shape", "expand": "size"}
# The arguments that are a number of groups, of which each rank has a part.
_GROUPS = {
    "group_norm": "num_groups",
    **{f"conv{kind}{rank}d": "groups" for kind in ("", "_transpose") for rank in (1, 2, 3)},
}
# The arguments of a slice, which takes whole units; of each a rank has an equal part.
_BOUNDS = ("start", "end")


def local_arguments(
    op: Op,
    arguments: Mapping[str, Argument],
    strategy: Strategy,
    choices: Sequence[Choice],
    types: Mapping[str, TensorType],
    mesh: Mesh,
) -> dict[str, Argument]:
    """`arguments` of `op` with local sizes under `strategy`, which makes `choices`; `types` are the global ones."""
    local = dict(arguments)
    if op.kind in _SHAPES:
        local[_SHAPES[op.kind]] = local_shape(types[op.results[0]].shape, strategy.results[0], mesh)
    ways = 1
    divided: tuple[str, ...] = ()
    if op.kind in _GROUPS:
        ways = prod(size for size, choice in zip(mesh.sizes, choices, strict=True) if "groups" in choice.factors)
        divided = (_GROUPS[op.kind],)
    elif op.kind == "slice":
        dim, rank = arguments["dim"], len(types[op.operands[0]].shape)
        assert isinstance(dim, int)
        ways = split_ways(strategy.operands[0], dim % rank, mesh)
        divided = _BOUNDS
    for name in divided:
        number = local[name]
        assert isinstance(number, int)
        local[name] = number // ways
    return local
