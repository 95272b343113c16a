"""Seconds and bytes of whole programs."""

import contextlib
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from passes.capture import Tracing, capture
from passes.constrain import constrain
from passes.cost.cluster import CLUSTERS, Device
from passes.cost.memory import chosen_memory, memory_use
from passes.cost.program_points import END, START, LiveFractions, LiveRange, Phase, ProgramPoint
from passes.cost.step import BlockSeconds, Seconds, compose, exposed
from passes.cost.walk import Optimizer, walk
from passes.ir.choices import Solution
from passes.ir.configuration import Configuration
from passes.normalize import normalize
from passes.regions import fold
from passes.strategies import Setting, planning_problem
from tests.passes.helpers import mesh_of
from tests.passes.planning import STATES, Planning, planning

MESH = mesh_of(a=2)
DEVICE = Device("d", {"float32": 1e12}, 0.5, 80e9, 1e11, launch=1e-6, reserve=0.0)
CLUSTER = replace(CLUSTERS["h100"], device=DEVICE, host=1e10)
_SHARES = [(1.0, 0.0, 0.0), (0.25, 0.75, 0.0), (0.25, 0.5, 0.25), (0.25, 0.0, 0.75)]


class Model(nn.Module):
    """A product and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(64, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """A number."""
        return self.proj(x).sum()


def whole(case: Planning) -> Solution:
    """Everything whole on every rank."""
    picks = []
    for node in case.problem.nodes:
        methods = [set(strategy.methods) for strategy in node.strategies]
        picks.append(methods.index({"I"} if {"I"} in methods else {"R"}))
    return Solution(tuple(picks), frozenset(), 0.0, 0.0, Configuration(MESH))


def test_a_step_on_one_device_adds_up() -> None:
    """Compute, reading the batch, and the optimizer, by hand."""
    case = planning(Model(), {"x": torch.ones(32, 64)}, MESH, CLUSTER)
    seconds = walk(case.lowered(whole(case)), case.folded, CLUSTER, Optimizer(2), Configuration(MESH))
    x, weight, y = 32 * 64 * 4, 128 * 64 * 4, 32 * 128 * 4
    flops = 2 * 32 * 64 * 128
    linear = 1e-6 + max(flops / 0.5e12, (x + weight + y) / 1e11)
    total = 1e-6 + (y + 4) / 1e11
    assert seconds.forward_compute == pytest.approx(linear + total)
    linear_back = 1e-6 + max(flops / 0.5e12, (x + weight + y + weight) / 1e11)
    total_back = 1e-6 + (4 + y) / 1e11
    assert seconds.backward_compute == pytest.approx(linear_back + total_back)
    assert seconds.inputs == pytest.approx(x / 1e10)
    assert seconds.optimizer == pytest.approx(weight * 7 / 1e11)
    assert seconds.forward_communication == seconds.backward_communication == 0.0
    parts = (getattr(seconds, name) for name in seconds.__dataclass_fields__)
    assert seconds.total == pytest.approx(sum(parts))


def test_memory_of_a_step_on_one_device() -> None:
    """Parameters, states, inputs and outputs throughout; activations until backward, gradients from there."""
    case = planning(Model(), {"x": torch.ones(32, 64)}, MESH, CLUSTER)
    use = memory_use(case.problem, whole(case), STATES)
    weight = 128 * 64 * 4
    own = [use.bytes_by_kind[kind] for kind in ("parameters", "optimizer states", "inputs", "outputs")]
    assert own == [weight, 2 * weight, 32 * 64 * 4, 4]
    assert use.moment == "backward of proj/linear"
    assert use.peak == sum(use.kinds().values())


def test_live_fractions_at_a_point() -> None:
    """A block loses what its ops keep as they run backward, copy by copy; its gradients come."""
    point = ProgramPoint("", block=1, op=5, own=0.25, left=0.5, done=0.25)
    expected = {
        (Phase.STEP, -1, 0, 0): 1.0,
        (Phase.FORWARD, 0, 9, 9): 1.0,
        (Phase.FORWARD, 1, 5, 9): 0.75,
        (Phase.FORWARD, 1, 6, 9): 0.5,
        (Phase.FORWARD, 2, 0, 9): 0.0,
        (Phase.COPY, 1, 4, 5): 0.25,
        (Phase.COPY, 1, 4, 4): 0.0,
        (Phase.COPY, 0, 4, 5): 0.0,
        (Phase.PREVIOUS_COPY, 1, 0, 0): 0.25,
        (Phase.NEXT_COPY, 1, 0, 0): 0.25,
        (Phase.ACCUMULATED, 1, 5, 0): 0.5,
        (Phase.ACCUMULATED, 1, 4, 0): 0.25,
        (Phase.ACCUMULATED, 2, 0, 0): 1.0,
        (Phase.ACCUMULATED, 0, 9, 0): 0.0,
        (Phase.UPDATE, -1, 0, 0): 0.0,
    }
    found = LiveFractions([point], [LiveRange(*item) for item in expected], Configuration(MESH)).at([0])
    assert dict(zip(expected, found[0].tolist(), strict=True)) == expected
    assert LiveFractions([point], [LiveRange(Phase.PREVIOUS_COPY, 2)], Configuration(MESH)).at([0]) == 0.0
    optimizer = LiveFractions([ProgramPoint("")], [LiveRange(phase, 1) for phase in Phase], Configuration(MESH))
    assert optimizer.at([0]).tolist() == [[1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0]]


@pytest.mark.parametrize("count", [1, 2])
def test_totals_are_sums_of_all_that_is_live(count: int) -> None:
    """Of random points and ranges, and of those from the start or to the end of a block."""
    choose = random.Random(count)

    def place() -> int:
        return choose.choice([START, END, *range(8)])

    points = [ProgramPoint("", choose.randrange(4), choose.randrange(-1, 8), *parts) for parts in _SHARES * 9]
    spans = [(phase, choose.randrange(4), place(), place()) for phase in Phase for _ in range(30)]
    live = LiveFractions([*points, ProgramPoint("")], [LiveRange(*span) for span in spans], Configuration(MESH, count))
    sizes = np.array([choose.uniform(0, 1e9) for _ in spans])
    every = live.at(range(len(live)))
    assert live.totals(sizes) == pytest.approx(every @ sizes, rel=1e-12)
    assert (live.of(np.arange(7, 99)) == every[:, 7:99]).all()


def test_gradients_stay_from_one_micro_batch_to_the_next() -> None:
    """With several micro-batches all gradients are there at every moment."""
    point = ProgramPoint("", block=1, op=5)
    assert LiveFractions([point], [LiveRange(Phase.ACCUMULATED, 0, 9)], Configuration(MESH, 2)).at([0]) == 1.0


class Stack(nn.Module):
    """Equal layers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """A number."""
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def _unfolded(module: nn.Module, x: Tensor) -> Planning:
    """The same problem with nothing folded."""
    program = normalize(capture(module, {"x": x}, Tracing(True, True, contextlib.nullcontext())))
    folded = fold(program, lambda op: op.key)
    return Planning(
        folded, planning_problem(folded, constrain(program, {}, MESH), Setting(MESH, CLUSTER, STATES)), MESH, CLUSTER
    )


@pytest.mark.parametrize(
    ("linear", "carry", "weight"), [("d0", "S(0)", "S(0)"), ("out", "R", "S(0)"), ("in", "S(1)", "S(1)")]
)
def test_a_region_costs_as_its_copies_do(linear: str, carry: str, weight: str) -> None:
    """The same decisions for every layer cost the same, folded and written out."""

    def decided(case: Planning) -> Solution:
        picks = []
        for node in case.problem.nodes:
            names = [strategy.methods[0] for strategy in node.strategies]
            kind = node.key.rsplit("/", 1)[-1].split(".")[0]
            wanted = {"linear": linear, "carry": carry, "relu": {"d0": "d0", "out": "d1", "in": "d1"}[linear]}.get(kind)
            if node.kind == "parameter":
                wanted = weight if len(case.folded.types[node.name].shape) == 2 else "I"
            elif node.kind == "input":
                wanted = {"d0": "S(0)", "out": "R", "in": "S(1)"}[linear]
            picks.append(names.index(wanted if wanted in names else "I" if "I" in names else "R"))
        return Solution(tuple(picks), frozenset(), 0.0, 0.0, Configuration(MESH))

    x = torch.ones(32, 64, requires_grad=True)
    one, other = planning(Stack(4), {"x": x}, MESH, CLUSTER), _unfolded(Stack(4), x)
    assert len(one.folded.regions) == 1
    assert not other.folded.regions
    costs = [
        walk(case.lowered(decided(case)), case.folded, CLUSTER, Optimizer(STATES), Configuration(MESH))
        for case in (one, other)
    ]
    for name in Seconds.__dataclass_fields__:
        if name not in ("exposed_gathers", "exposed_reductions", "hidden_communication"):
            assert getattr(costs[0], name) == pytest.approx(getattr(costs[1], name), rel=1e-12), name
    # Folded, the traffic of parameters is hidden by the copies before and behind; of no part more than of all.
    traffic = [cost.exposed_gathers + cost.exposed_reductions + cost.hidden_communication for cost in costs]
    assert traffic[0] == pytest.approx(traffic[1], rel=1e-12)
    assert costs[1].hidden_communication == 0.0
    assert 0.0 <= costs[0].hidden_communication <= 0.75 * traffic[0] * (1 + 1e-12)
    memories = [memory_use(case.problem, decided(case), STATES) for case in (one, other)]
    for name in ("parameters", "optimizer states", "inputs", "outputs", "buffers"):
        assert memories[0].kinds()[name] == pytest.approx(memories[1].kinds()[name]), name


def test_recomputing_costs_its_forward_once_more() -> None:
    """A redistribution that is made again adds its forward seconds to the backward pass, and frees what it kept."""
    case = planning(Stack(1), {"x": torch.ones(32, 64)}, MESH, CLUSTER)
    names = {
        index: [strategy.methods[0] for strategy in node.strategies] for index, node in enumerate(case.problem.nodes)
    }
    picks = list(whole(case).picks)
    picks[case.problem.index["layers.0.0/linear"]] = names[case.problem.index["layers.0.0/linear"]].index("R")
    picks[case.problem.index["x"]] = names[case.problem.index["x"]].index("S(0)")
    (redone,) = case.changed_and_kept(tuple(picks))
    kept, again = (Solution(tuple(picks), frozenset(made), 0.0, 0.0, Configuration(MESH)) for made in ((), (redone,)))
    costs = [
        walk(case.lowered(choice), case.folded, CLUSTER, Optimizer(STATES), Configuration(MESH))
        for choice in (kept, again)
    ]
    assert costs[1].backward_communication - costs[0].backward_communication == pytest.approx(
        costs[0].forward_communication
    )
    assert costs[1].forward_communication == costs[0].forward_communication > 0
    # It is live until its backward pass only where it is saved, and during that pass either way.
    memories = [chosen_memory(case.problem, choice) for choice in (kept, again)]
    for phase, more in ((Phase.FORWARD, 32 * 64 * 4), (Phase.COPY, -32 * 64 * 4)):
        sizes = [
            sum(item.size for item in allocations if model.ranges[item.range].phase is phase)
            for model, allocations in memories
        ]
        assert sizes[0] - sizes[1] == more


def test_what_is_hidden_slows_down_what_hides_it() -> None:
    """Of 4 copies the traffic of one is never hidden. A quarter of the device is taken while the rest of it is."""
    assert exposed(8.0, 100.0, 4) == 2.0
    assert exposed(8.0, 100.0, 4, 0.25) == pytest.approx(2.0 + 0.25 * 8.0 * 3 / 4)
    # What is not hidden is not slower for it.
    assert exposed(8.0, 0.0, 4, 0.25) == exposed(8.0, 0.0, 4) == 8.0
    parts = [BlockSeconds(4, forward_compute=100.0, gather=8.0, cover=100.0)]
    assert compose(parts, Configuration(MESH), 0.0, 0.0, 0.25).exposed_gathers == pytest.approx(3.5)


def test_collectives_take_multiprocessors() -> None:
    """24 of 132 on an H100 in a node; none of a device whose number is not known."""
    h100 = CLUSTERS["h100"]
    assert h100.device.share(h100.inside) == pytest.approx(24 / 132)
    assert CLUSTERS["cpu"].device.share(CLUSTERS["cpu"].inside) == 0.0
