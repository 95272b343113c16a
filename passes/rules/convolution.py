"""Convolutions and pools: samples, channels and groups are split as in a product, space with a halo from neighbours."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

from passes.ir.layout import Shape
from passes.ir.program import Op, TensorType
from passes.ir.rule import Dims, Factor, Part, Role, Rule, Saved
from passes.rules.parts import factors, is_tensor, linear_in, named, one, per_dim, rule_for, shapes


@dataclass(frozen=True)
class Window:
    """The windows along one spatial dim."""

    kernel: int
    stride: int
    padding: int
    dilation: int = 1

    @property
    def after(self) -> int:
        """The number of elements after a block of whole strides that its last window covers."""
        return self.dilation * (self.kernel - 1) - self.padding - self.stride + 1

    @property
    def reach(self) -> tuple[int, int]:
        """The number of elements before and after a block of whole strides that it needs."""
        return self.padding, max(self.after, 0)


def windows(op: Op, types: Mapping[str, TensorType]) -> list[Window]:
    """The windows of a convolution or pool, by spatial dim."""
    arguments = op.arguments
    if "kernel_size" in arguments:
        rank = int(op.kind[-2]) if op.kind[-1] == "d" else 2
        kernels = per_dim(arguments["kernel_size"], rank)
    else:
        kernels = types[op.operands[1]].shape[2:]
    count = len(kernels)
    if op.kind == "padded_conv1d":
        before, _ = per_dim(arguments["padding"], 2)
        return [Window(kernels[0], 1, before, per_dim(arguments["dilation"], 1)[0])]
    stride = arguments["stride"]
    strides = kernels if stride == () else per_dim(stride, count)
    padding, dilation = per_dim(arguments["padding"], count), per_dim(arguments.get("dilation", 1), count)
    return [Window(*numbers) for numbers in zip(kernels, strides, padding, dilation, strict=True)]


@dataclass
class _Space:
    """The spatial dims of an op before and after it, the roles of their factors, and the halos: factor -> windows."""

    before: list[tuple[Part, ...]] = field(default_factory=list)
    after: list[tuple[Part, ...]] = field(default_factory=list)
    roles: dict[str, Role] = field(default_factory=dict)
    halos: dict[str, Window] = field(default_factory=dict)

    def add_whole(self, place: int, size: int, made: int) -> None:
        """Add a dim that stays whole."""
        self.before.append(one(f"from{place}", size))
        self.after.append(one(f"to{place}", made))
        self.roles.update({f"from{place}": Role.WHOLE, f"to{place}": Role.WHOLE})


def _space(operand: Shape, result: Shape, found: list[Window], regular: bool) -> _Space:
    """A dim is split if windows are as many as strides: then a block of results is computed from a block of elements,
    with `padding` before it and `after` after it."""
    space = _Space()
    for place, (size, made, window) in enumerate(zip(operand, result, found, strict=True)):
        if not regular or made * window.stride != size or window.after <= -window.stride:
            space.add_whole(place, size, made)
            continue
        name = f"space{place}"
        space.before.append((*one(name, made), *one(f"stride{place}", window.stride)))
        space.after.append(one(name, made))
        space.roles[f"stride{place}"] = Role.WHOLE
        if max(window.reach) > 0:
            space.halos[name] = window
    return space


def _transposed_space(op: Op, operand: Shape, kernel: Shape, result: Shape) -> _Space:
    """A dim is split where windows do not overlap: each element makes its own."""
    space = _Space()
    names = ("stride", "padding", "output_padding", "dilation")
    settings = zip(*(per_dim(op.arguments[name], len(kernel)) for name in names), strict=True)
    for place, (size, window, made, setting) in enumerate(zip(operand, kernel, result, settings, strict=True)):
        if setting != (window, 0, 0, 1):
            space.add_whole(place, size, made)
            continue
        space.before.append(one(f"space{place}", size))
        space.after.append((*one(f"space{place}", size), *one(f"stride{place}", window)))
        space.roles[f"stride{place}"] = Role.WHOLE
    return space


def _haloed(found: dict[str, Factor], halos: Mapping[str, Window]) -> dict[str, Factor]:
    """Factors that need a halo are split in the order of ranks, with a minimum local size of the halo."""
    return found | {
        name: replace(found[name], ordered=True, reach=window.reach, least=-(-max(window.reach) // window.stride))
        for name, window in halos.items()
        if name in found
    }


@rule_for("padded_conv1d", *(f"conv{kind}{rank}d" for kind in ("", "_transpose") for rank in (1, 2, 3)))
def convolution(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """batch (groups in) space, (groups out) in kernel, (groups out) -> batch (groups out) space.

    A transposed one has weights (groups in) out kernel.
    """
    operand, weight, result = shapes((*op.operands[:2], op.results[0]), types)
    groups = op.arguments["groups"]
    if len(operand) != len(weight) or not isinstance(groups, int) or isinstance(op.arguments["padding"], str):
        return None
    batch, group = one("batch", operand[0]), one("groups", groups)
    inner, outer = one("in", operand[1] // groups), one("out", result[1] // groups)
    if op.kind.startswith("conv_transpose"):
        space = _transposed_space(op, operand[2:], weight[2:], result[2:])
        channels, places = ((*group, *inner), outer), operand
    else:
        space = _space(operand[2:], result[2:], windows(op, types), True)
        channels, places = ((*group, *outer), inner), result
    kernel = named(weight[2:], "kernel")
    operands: list[Dims] = [(batch, (*group, *inner), *space.before), (*channels, *kernel)]
    added = frozenset({2}) if is_tensor(op, "bias") else frozenset[int]()
    if added:
        operands.append(((*group, *outer),))
    results: Dims = (batch, (*group, *outer), *space.after)
    roles = {**space.roles, **{f"kernel{dim}": Role.WHOLE for dim in range(len(kernel))}, "in": Role.SUM}
    return Rule(
        _haloed(factors(*operands, results, roles=roles), space.halos),
        tuple(operands),
        (results,),
        added=added,
        linear=(frozenset({0}) | added, frozenset({1}) | added),
        forms=dict.fromkeys(space.halos, "haloed"),
        multiplications=2.0 * prod(places) * prod(weight[1:]),
        backward=(1.0, 1.0, 0.0)[: len(operands)],
        saved=(Saved(0, needed_by=(1,)), Saved(1, needed_by=(0,))),
    )


@rule_for("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d")
def pool(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """Samples and channels are free; what is padded counts in a mean only if the op says so."""
    operand, result = types[op.operands[0]].shape, types[op.results[0]].shape
    found = windows(op, types)
    mean = op.kind.startswith("avg")
    uneven = mean and any(window.padding for window in found) and not op.arguments["count_include_pad"]
    # Padding is minus infinity, which no dtype of whole numbers has.
    bounded = mean or types[op.results[0]].dtype.is_floating_point
    regular = not op.arguments["ceil_mode"] and not uneven and bounded
    count = len(found)
    space = _space(operand[-count:], result[-count:], found, regular)
    free = named(operand[:-count])
    before, after = (*free, *space.before), (*free, *space.after)
    return Rule(
        _haloed(factors(before, after, roles=space.roles), space.halos),
        (before,),
        (after,),
        linear=linear_in(op, types, 0) if mean else (),
        forms=dict.fromkeys(space.halos, "haloed"),
        saved=(Saved(0), Saved(0, result=True)),
    )


_WHOLE_SPACE = {
    **{f"adaptive_{name}_pool{rank}d": rank for name in ("avg", "max") for rank in (1, 2, 3)},
    **{f"max_pool{rank}d_with_indices": rank for rank in (1, 2, 3)},
    **{f"{mode}_pad{rank}d": rank for mode in ("reflection", "replication") for rank in (1, 2, 3)},
    **{f"upsample_{name}": rank for name, rank in (
        ("linear1d", 1), ("bilinear2d", 2), ("trilinear3d", 3), ("bicubic2d", 2),
    )},
}  # fmt: skip
_NEAREST = {f"{kind}{rank}d": rank for kind in ("upsample_nearest", "_upsample_nearest_exact") for rank in (1, 2, 3)}


@rule_for(*_WHOLE_SPACE)
def whole_space(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """Samples and channels are free, space stays whole."""
    operand = types[op.operands[0]].shape
    count = {**_WHOLE_SPACE, **_NEAREST}[op.kind]
    free = named(operand[:-count])
    before = (*free, *named(operand[-count:], "from"))
    after = (*free, *named(types[op.results[0]].shape[-count:], "to"))
    roles = dict.fromkeys((f"{side}{dim}" for side in ("from", "to") for dim in range(count)), Role.WHOLE)
    results = (after,) * len(op.results)
    linear = linear_in(op, types, 0) if "max" not in op.kind else ()
    saved = (Saved(0), Saved(0, result=True)) + ((Saved(1, result=True),) if len(results) > 1 else ())
    return Rule(factors(before, after, roles=roles), (before,), results, linear=linear, saved=saved)


@rule_for(*_NEAREST)
def nearest(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """Each element of space is repeated, so space can be split."""
    operand, made = types[op.operands[0]].shape, types[op.results[0]].shape
    space = range(len(operand) - _NEAREST[op.kind], len(operand))
    if op.arguments.get("scale_factors") is None or any(made[dim] % max(operand[dim], 1) for dim in space):
        return whole_space(op, types)
    before = named(operand)
    times = {dim: one(f"times{dim}", made[dim] // max(operand[dim], 1)) for dim in space}
    after = tuple((*parts, *times.get(dim, ())) for dim, parts in enumerate(before))
    return Rule(
        factors(before, after, roles=dict.fromkeys((f"times{dim}" for dim in space), Role.WHOLE)),
        (before,),
        (after,),
        linear=(frozenset({0}),),
    )


@rule_for("pixel_shuffle", "pixel_unshuffle")
def pixels(op: Op, types: Mapping[str, TensorType]) -> Rule | None:
    """batch (channels down right) rows columns <-> batch channels (rows down) (columns right)."""
    deep, wide = types[op.operands[0]].shape, types[op.results[0]].shape
    if op.kind == "pixel_unshuffle":
        deep, wide = wide, deep
    if len(deep) < 3 or 0 in deep:
        return None
    batch = named(deep[:-3])
    channels, rows, columns = one("channels", wide[-3]), one("rows", deep[-2]), one("columns", deep[-1])
    down, right = one("down", wide[-2] // deep[-2]), one("right", wide[-1] // deep[-1])
    dims = (*batch, (*channels, *down, *right), rows, columns), (*batch, channels, (*rows, *down), (*columns, *right))
    before, after = dims if op.kind == "pixel_shuffle" else dims[::-1]
    found = factors(before, after, roles=dict.fromkeys(("down", "right"), Role.WHOLE))
    return Rule(found, (before,), (after,), linear=linear_in(op, types, 0))
