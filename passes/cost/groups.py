"""What the engine of data axes needs memory for, group by group."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from passes.ir.layout import Layout, local_shape
from passes.ir.lowered import Group
from passes.ir.mesh import Mesh
from passes.ir.program import TensorType


@dataclass(frozen=True)
class GroupBytes:
    """Bytes on one rank for one group.

    `gathered`: its parameters as they are used; while they are copied out of what was received there is as much once
    more, and that flat buffer lives until the next group is copied out. `gradients`: those of all of them before they
    are reduced, in the dtype that is computed in. `reduced`: the flat buffer that is reduced.
    """

    gathered: int
    gradients: int
    reduced: int


def group_bytes(group: Group, types: Mapping[str, TensorType], stored: Mapping[str, Layout], mesh: Mesh) -> GroupBytes:
    """The bytes of `group`, whose parameters have `types` (in the dtype that is computed in) and lie as `stored`.

    From torch's `fully_shard` (2.13): one all-gather into a flat buffer that is split into the parameters, one
    reduce-scatter (on replicated axes an all-reduce of the result) of a flat buffer in the dtype of the reduction.
    """
    gathered = gradients = reduced = 0
    for name in group.parameters:
        type = types[name]
        count = prod(local_shape(type.shape, group.used(stored[name]), mesh))
        gathered += count * type.dtype.itemsize
        gradients += count * type.dtype.itemsize
        reduced += count * (group.dtypes[1] or type.dtype).itemsize
    return GroupBytes(gathered, gradients, reduced)
