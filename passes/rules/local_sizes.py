"""The sizes among an op's arguments, as a rank has them when the op is split."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from passes.ir.choices import Strategy
from passes.ir.layout import local_shape, split_ways
from passes.ir.mesh import Mesh
from passes.ir.program import Argument, Op, TensorType
from passes.rules.rule import Choice


def local_arguments(
    op: Op,
    arguments: Mapping[str, Argument],
    strategy: Strategy,
    choices: Sequence[Choice],
    types: Mapping[str, TensorType],
    mesh: Mesh,
) -> dict[str, Argument]:
    """`arguments` of `op` with local sizes under `strategy`, which makes `choices`; `types` are the global ones."""
    localize = _LOCAL.get(op.kind)
    if localize is None:
        return dict(arguments)
    ways: dict[str, int] = {}
    for axis, choice in enumerate(choices):
        for factor in choice.factors:
            ways[factor] = ways.get(factor, 1) * mesh.sizes[axis]
    return localize(_Localizing(op, arguments, strategy, types, mesh, ways))


@dataclass(frozen=True)
class _Localizing:
    """An op with what its local sizes follow from; `ways` is into how many parts each factor is split."""

    op: Op
    arguments: Mapping[str, Argument]
    strategy: Strategy
    types: Mapping[str, TensorType]
    mesh: Mesh
    ways: Mapping[str, int]

    def result_shape(self) -> tuple[int, ...]:
        return local_shape(self.types[self.op.results[0]].shape, self.strategy.results[0], self.mesh)


def _shape(about: _Localizing) -> dict[str, Argument]:
    """A view gives the local shape of its result: -1 and literals need no care."""
    return {**about.arguments, "shape": about.result_shape()}


def _size(about: _Localizing) -> dict[str, Argument]:
    return {**about.arguments, "size": about.result_shape()}


def _bounds(about: _Localizing) -> dict[str, Argument]:
    """A slice takes whole units; of each a rank has an equal part."""
    shape = about.types[about.op.operands[0]].shape
    dim, start, end = (about.arguments[name] for name in ("dim", "start", "end"))
    assert isinstance(dim, int)
    assert isinstance(start, int)
    assert isinstance(end, int)
    ways = split_ways(about.strategy.operands[0], dim % len(shape), about.mesh)
    return {**about.arguments, "start": start // ways, "end": end // ways}


def _count(argument: str) -> Callable[[_Localizing], dict[str, Argument]]:
    """A number of groups, of which each rank has a part."""

    def local(about: _Localizing) -> dict[str, Argument]:
        groups = about.arguments[argument]
        assert isinstance(groups, int)
        return {**about.arguments, argument: groups // about.ways.get("groups", 1)}

    return local


_LOCAL = {
    "reshape": _shape,
    "expand": _size,
    "slice": _bounds,
    "group_norm": _count("num_groups"),
    **{f"conv{kind}{rank}d": _count("groups") for kind in ("", "_transpose") for rank in (1, 2, 3)},
}
