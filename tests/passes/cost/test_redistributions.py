"""Costs of all pairs of layouts at once, against the steps of each pair."""

from collections.abc import Iterable
from dataclasses import replace
from math import prod

import numpy as np
import pytest
import torch

from passes.cost.cluster import CLUSTERS, Cluster
from passes.cost.communication import collective_lines
from passes.cost.redistributions import RedistributionCosts, TensorLayouts
from passes.cost.step_costs import StepCosts
from passes.ir.choices import EdgeGroup
from passes.ir.exchanges import ALONE, Sharing
from passes.ir.layout import I, Layout, P, R, S, Shape
from passes.ir.mesh import Mesh
from passes.ir.program import TensorType
from passes.ir.redistribution import RedistributionStep, redistribution, step_in_parts
from tests.passes.helpers import layouts_on, mesh_of, some_layouts

MESHES = [mesh_of(a=2), mesh_of(a=2, b=2), mesh_of(a=2, b=3)]
SLOW = pytest.mark.slow
PLACEMENTS = [R, I, P, S(0), S(1), S(0, 2), S(0, 3), S(1, 2)]


def _seconds(
    steps: Iterable[RedistributionStep], itemsize: int, joined: Sharing, cluster: Cluster, mesh: Mesh
) -> float:
    """The seconds of `steps`, one by one: the fastest algorithm of each, and kernels that copy, cut, pad or fill."""
    total = 0.0
    for step in steps:
        source, target = step.source.kind, step.target.kind
        before, after = prod(step.before) * itemsize, prod(step.after) * itemsize
        if step.moves:
            lines = collective_lines(step.collective, cluster.route(mesh, step.span))
            together = joined.all_reduce if step.collective == "all_reduce" else joined.other
            total += min(fixed / together + each * max(before, after) for fixed, each in lines)
            copies = [before] * (step.cut and target == "S") + [after] * (step.join and source == "S")
            kernels = [2 * size for size in copies]
        elif {source, target} == {"R", "I"}:
            kernels = []
        else:
            kernels = [before + after if source == "S" else 2 * after]
        total += sum(cluster.device.launch + touched / cluster.device.stream for touched in kernels)
    return total


def _in_cheapest_parts(
    step: RedistributionStep, group: EdgeGroup, cluster: Cluster, mesh: Mesh
) -> tuple[tuple[float, float], tuple[RedistributionStep, ...]]:
    """The seconds of a step forward and backward, and the steps that it runs as: over its axes together, or cut."""
    found = []
    for parts in mesh.partitions(step.span):
        own = step_in_parts(step, parts, mesh)
        forward = _seconds(own, group.type.dtype.itemsize, group.joined, cluster, mesh)
        back = [part.backward for part in own] if group.gradient else []
        found.append(((forward, _seconds(back, group.gradient_itemsize, group.joined, cluster, mesh)), own))
    return min(found, key=lambda each: sum(each[0]))


def _assert_costs(
    costs: RedistributionCosts, cluster: Cluster, group: EdgeGroup, sources: list[Layout], targets: list[Layout]
) -> None:
    """Each entry is the sum of the steps of its pair, which `cheapest_steps` gives too."""
    seconds = costs.seconds([TensorLayouts(group, sources, targets)])[0]
    found = np.array([seconds.forward, seconds.backward])
    expected = np.zeros_like(found)
    itemsize, shape, mesh = group.type.dtype.itemsize, group.type.shape, costs.mesh
    gradient_itemsize = group.gradient_itemsize if group.gradient else None
    several: list[tuple[RedistributionStep, tuple[RedistributionStep, ...]]] = []
    for row, source in enumerate(sources):
        for column, target in enumerate(targets):
            steps = redistribution(source, target, shape, mesh, strided=group.strided)
            each = [_in_cheapest_parts(step, group, cluster, mesh) for step in steps]
            expected[:, row, column] = np.sum([seconds for seconds, _ in each], axis=0) if each else 0
            several += [(step, own) for step, (_, own) in zip(steps, each, strict=True) if step.span >= len(mesh.sizes)]
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=0.0)
    run = costs.steps.cheapest_steps([step for step, _ in several], itemsize, gradient_itemsize, group.joined)
    assert run == tuple(part for _, own in several for part in own)


def _group(
    shape: Shape, dtype: torch.dtype, gradient: bool, gradient_itemsize: int, strided: bool, joined: Sharing = ALONE
) -> EdgeGroup:
    about = TensorType(shape, dtype)
    return EdgeGroup("x", about, 3, 0, gradient, gradient_itemsize, False, strided, joined=joined)


# Each mesh, and both orders in memory; the other pairs of these are like them, and as long.
FAST = [(MESHES[0], False), (MESHES[1], True)]
REST = [(mesh, strided) for mesh in MESHES for strided in (False, True) if (mesh, strided) not in FAST]


@pytest.mark.long
@pytest.mark.parametrize(("mesh", "strided"), [*FAST, *(pytest.param(*case, marks=SLOW) for case in REST)], ids=str)
@pytest.mark.parametrize("cluster", [pytest.param("cpu", marks=SLOW), "h100"])
def test_every_pair_costs_what_its_steps_do(mesh: Mesh, cluster: str, strided: bool) -> None:
    """All layouts; one price object for tensors of several shapes and sizes."""
    costs = RedistributionCosts(CLUSTERS[cluster], mesh)
    shapes: list[tuple[Shape, torch.dtype, int]] = [
        ((12, 36), torch.float32, 4),
        ((36, 24), torch.bfloat16, 4),
        ((1, 12), torch.float64, 8),
        ((), torch.float32, 4),
    ]
    for shape, dtype, gradient_itemsize in shapes:
        layouts = list(layouts_on(shape, PLACEMENTS, mesh))
        for gradient in (True, False):
            for joined in (ALONE, Sharing(9, 4)) if gradient else (ALONE,):
                group = _group(shape, dtype, gradient, gradient_itemsize, strided, joined)
                _assert_costs(costs, CLUSTERS[cluster], group, layouts, layouts)


@pytest.mark.parametrize("parameter", [False, True])
def test_tensors_priced_together_cost_what_they_do_alone(parameter: bool) -> None:
    """Tensors of one type with other layouts, in another order, and one of another type."""
    mesh = mesh_of(a=2, b=3)
    layouts = list(layouts_on((12, 36), PLACEMENTS, mesh))
    group = replace(_group((12, 36), torch.bfloat16, True, 4, False), parameter=parameter)
    other = replace(group, type=TensorType((12, 36), torch.float32))
    tensors = [
        TensorLayouts(group, layouts[:9], layouts[4:20], parameter),
        TensorLayouts(group, layouts[12:3:-1], layouts[30:10:-2], parameter),
        TensorLayouts(other, layouts[:9], layouts[4:20], parameter),
    ]
    together = RedistributionCosts(CLUSTERS["h100"], mesh).seconds(tensors)
    for tensor, found in zip(tensors, together, strict=True):
        alone = RedistributionCosts(CLUSTERS["h100"], mesh).seconds([tensor])[0]
        assert found.forward.shape == (len(tensor.sources), len(tensor.targets))
        for name in ("forward", "backward", "exchange", "inline"):
            np.testing.assert_array_equal(getattr(found, name), getattr(alone, name))


# The mesh, what all digits divide, and shapes from few bytes to many; some of them are not divided.
RANDOM: list[tuple[Mesh, Shape, list[Shape]]] = [
    (mesh_of(a=16), (64, 32), [(64, 32), (65536, 32768), (63, 31)]),
    (mesh_of(a=3, b=8), (48, 24, 24), [(48, 24, 24), (480, 2400, 240), (50, 7, 1)]),
    (mesh_of(a=32, b=1, c=8), (512, 256), [(512, 256), (65536, 65536), (1000, 300)]),
    (mesh_of(a=2, b=4, c=2, d=8), (256, 256), [(256, 256), (131072, 65536), (250, 17)]),
    (mesh_of(a=2, b=2, c=2, d=2), (32, 16, 16, 4), [(32, 16, 16, 4), (3200, 160, 1600, 4), (33, 15, 1, 2)]),
]


RANDOM_CLUSTERS = ["cpu", "a100", "h200", "b200", "ideal"]


# Every mesh and every cluster is fast once.
@pytest.mark.parametrize(
    ("mesh", "whole", "shapes", "cluster"),
    [
        pytest.param(*case, cluster, marks=[] if number == place else SLOW, id=f"{case[0]}-{cluster}")
        for number, case in enumerate(RANDOM)
        for place, cluster in enumerate(RANDOM_CLUSTERS)
    ],
)
def test_random_layouts_cost_what_their_steps_do(mesh: Mesh, whole: Shape, shapes: list[Shape], cluster: str) -> None:
    """Up to four axes, inside nodes and across; digits in each other's way; every algorithm is the least at some
    size."""
    costs = RedistributionCosts(CLUSTERS[cluster], mesh)
    sources, targets = some_layouts(whole, mesh, 15, seed=3), some_layouts(whole, mesh, 15, seed=4)
    for number, shape in enumerate(shapes):
        group = _group(shape, torch.bfloat16, gradient=True, gradient_itemsize=4, strided=number == 1)
        _assert_costs(costs, CLUSTERS[cluster], group, sources, targets)


def test_bytes_decide_between_one_collective_and_several() -> None:
    """Of few bytes hops take longest, and over eight nodes there are fewer axis by axis; many bytes are sent at once
    over the cards of all devices of a node. The outer axis, whose link is slower, gathers first and scatters last."""
    mesh = mesh_of(dp=8, tp=8)
    costs = StepCosts(CLUSTERS["h100"], mesh)
    for source, target, order in (((S(0), S(0, 8)), (R, R), (0, 1)), ((P, P), (S(0), S(0, 8)), (1, 0))):
        for rows, spans in ((64, order), (1 << 20, (2,))):
            (step,) = redistribution(source, target, (rows, 64), mesh)
            assert mesh.spans[step.span] == (0, 1)
            run = costs.cheapest_steps([step], 2, 2, ALONE)
            assert tuple(part.span for part in run) == spans
            cheapest = sum(costs.total([way.backward, way], 2) for way in run)
            for parts in mesh.partitions(step.span):
                others = step_in_parts(step, parts, mesh)
                assert cheapest <= sum(costs.total([way.backward, way], 2) for way in others)


def test_what_was_asked_is_remembered() -> None:
    """The same tensor and layouts are priced once; other bytes are other prices."""
    mesh = mesh_of(a=2, b=2)
    costs = RedistributionCosts(CLUSTERS["h100"], mesh)
    layouts: list[Layout] = [(R, S(0)), (S(0), R)]
    group = _group((8, 8), torch.float32, True, 4, False)
    small = _group((8, 8), torch.bfloat16, True, 4, False)
    (first,) = costs.seconds([TensorLayouts(group, layouts, layouts)])
    again, other = costs.seconds([TensorLayouts(group, layouts, layouts), TensorLayouts(small, layouts, layouts)])
    assert again is first
    assert other.forward[0, 1] < first.forward[0, 1]
