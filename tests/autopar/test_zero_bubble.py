"""Zero-bubble schedules: gradients of weights are computed apart from those of inputs, and all equal one device's."""

import copy
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar import Pipeline
from autopar.runtime.pipeline import schedule as running
from autopar.testing import LiftFloat32, compare, run_ranks
from passes.cost.schedules import SCHEDULES, Action, schedule_actions
from passes.ir.configuration import SPLITTING
from passes.ir.plan import ProgramPlan
from tests.autopar.comparing import TOLERANCE
from tests.autopar.test_pipeline import albert, deep, large, planned
from tests.models import gpt2, llama, tokens

SLOW = pytest.mark.slow
EVERY = sorted(SPLITTING)
MESHES = {"pp 2": {"pp": 2}, "pp 2 x tp 2": {"pp": 2, "tp": 2}, "pp 2 x dp 2": {"pp": 2, "dp": 2}}


def eight() -> nn.Module:
    """A llama of eight layers."""
    return llama(num_hidden_layers=8)


def tied() -> nn.Module:
    """A gpt2 of four layers, whose first and last stage share the embeddings."""
    return gpt2(num_hidden_layers=4)


def exact(model: nn.Module, mesh: Mapping[str, int], schedule: str, samples: int = 8, **options: Any) -> None:
    """Outputs, loss and all gradients in a schedule are those of one device."""
    pipeline = Pipeline(schedule=schedule, cuts=options.pop("cuts", None))
    comparison = compare(model, mesh, tokens(samples), cluster="ideal", pipeline=pipeline, **options)
    assert comparison.worst[1] <= TOLERANCE, str(comparison)
    gradients = [item for item in comparison.errors if item.startswith("gradient of ")]
    assert len(gradients) == len(list(model.parameters()))


# --- equality ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_zbv_equals_one_device() -> None:
    """Tied embeddings on one rank, FSDP units, more micro-batches than stages."""
    exact(tied(), {"pp": 2, "dp": 2}, "zbv", micro_batches=8, zero=3)


@SLOW
@pytest.mark.parametrize("schedule", EVERY)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("make", [deep, tied])
def test_schedules_equal_one_device(make: Callable[[], nn.Module], mesh: str, schedule: str) -> None:
    exact(make(), MESHES[mesh], schedule, micro_batches=4)


@SLOW
@pytest.mark.parametrize("schedule", EVERY)
@pytest.mark.parametrize("make", [eight, lambda: gpt2(num_hidden_layers=8)])
def test_four_ranks_equal_one_device(make: Callable[[], nn.Module], schedule: str) -> None:
    exact(make(), {"pp": 4}, schedule, micro_batches=8)


@SLOW
@pytest.mark.parametrize("schedule", EVERY)
@pytest.mark.parametrize(("zero", "recompute"), [(1, "none"), (1, "full"), (2, "ops"), (3, "full")])
def test_units_and_recompute_equal_one_device(schedule: str, zero: int, recompute: str) -> None:
    """Parameters gathered for each micro-batch or once, copies that run again."""
    exact(deep(), {"pp": 2, "dp": 2}, schedule, micro_batches=4, zero=zero, recompute=recompute)


@SLOW
@pytest.mark.parametrize("schedule", EVERY)
def test_unequal_stages_equal_one_device(schedule: str) -> None:
    """Cuts that are forced, one of them behind all layers."""
    cuts = ("model.layers.3",) if schedule == "zb_h1" else ("model.layers.1", "model.layers.3", "model.norm/pow")
    exact(deep(), {"pp": 2}, schedule, samples=12, micro_batches=12, cuts=cuts)


@SLOW
@pytest.mark.parametrize("schedule", ["zbv", "interleaved_zero_bubble"])
def test_shared_layers_equal_one_device(schedule: str) -> None:
    """Parameters that all stages read, with FSDP units beside them."""
    exact(albert(), {"pp": 2, "dp": 2}, schedule, micro_batches=4)


# --- order ------------------------------------------------------------------------------------------------------------


class _Recorder:
    """The actions that the stages of this rank run."""

    def __init__(self) -> None:
        self.actions: list[Action] = []

    def noting(self, kind: Callable[..., str], method: Callable[..., object]) -> Callable[..., object]:
        """`method` of a stage, which is noted as the action that `kind(**options)` names."""

        def noted(stage: Any, number: int, *args: object, **options: object) -> object:
            self.actions.append(Action(kind(**options), stage.stage_index, number))
            return method(stage, number, *args, **options)

        return noted


def _ran(schedule: str, micro_batches: int) -> list[Action]:
    """The actions that this rank runs in a step, by calls of torch's schedule."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    module = autopar.parallelize(
        deep(),
        mesh,
        tokens(micro_batches),
        cluster="ideal",
        micro_batches=micro_batches,
        pipeline=Pipeline(schedule=schedule),
    )
    found, stage = _Recorder(), running._Stage
    changed = {
        "forward_one_chunk": found.noting(lambda **_: "F", stage.forward_one_chunk),
        "backward_one_chunk": found.noting(
            lambda full_backward=True, **_: "B" if full_backward else "I", stage.backward_one_chunk
        ),
        "backward_weight_one_chunk": found.noting(lambda **_: "W", stage.backward_weight_one_chunk),
    }
    with mock.patch.multiple(stage, **changed):
        module.forward_backward(**tokens(micro_batches))
    return found.actions


@pytest.mark.long
@pytest.mark.parametrize(
    ("schedule", "micro_batches"),
    [
        pytest.param(name, count, marks=() if (name, count) == ("dualpipev", 6) else SLOW)
        for name in SCHEDULES
        for count in (4, 6)
    ],
)
def test_actions_run_in_the_simulated_order(schedule: str, micro_batches: int) -> None:
    """Those of each rank, in the order that the simulator has."""
    ran = run_ranks(_ran, 2, schedule, micro_batches)
    stages = 2 * SCHEDULES[schedule].least
    assert [tuple(each) for each in ran] == [
        tuple(each) for each in schedule_actions(schedule, 2, stages, micro_batches)
    ]


# --- training ---------------------------------------------------------------------------------------------------------


def _trained(schedule: str, zero: int | None, axes: Mapping[str, int]) -> float:
    """The largest difference of this rank's parameters from those of one device after three steps with clipping; the
    loss, which the model computes in float32, is lifted."""
    torch.set_default_dtype(torch.float64)
    with LiftFloat32(torch.float64):
        return _difference(schedule, zero, axes)


def _difference(schedule: str, zero: int | None, axes: Mapping[str, int]) -> float:
    model = tied()
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    options: dict[str, Any] = {"cluster": "ideal", "micro_batches": 4, "zero": zero}
    module = autopar.parallelize(model, mesh, tokens(), pipeline=Pipeline(schedule=schedule), **options)
    alone = copy.deepcopy(model)
    ours = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3)
    theirs = torch.optim.AdamW(alone.parameters(), lr=1e-2, eps=1e-3)
    for _ in range(3):
        module.forward_backward(**tokens())
        alone(**tokens()).loss.backward()
        own = autopar.clip_grad_norm_(module, 0.5)
        norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        assert float(norm) > 0.5
        torch.testing.assert_close(float(own), float(norm), rtol=1e-9, atol=0.0)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    pairs = ((whole(item), alone.get_parameter(name)) for name, item in module.named_parameters())
    return max(float((found - expected).abs().max()) for found, expected in pairs)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, detached."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


@SLOW
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_training_equals_one_device(schedule: str, zero: int) -> None:
    """Three steps of AdamW on clipped gradients, tied embeddings among the parameters."""
    assert max(run_ranks(_trained, 4, schedule, zero, {"pp": 2, "dp": 2})) <= 1e-9


# --- plans ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plans() -> dict[str, ProgramPlan]:
    """Plans of the same model in several schedules."""
    options: dict[str, Any] = {"micro_batches": 8, "recompute": "none"}
    return {
        name: planned({"pp": 4}, large(8), pipeline=Pipeline(schedule=name), **options).programs["train"]
        for name in ("1f1b", "zb_h1", "zbv")
    }


@SLOW
def test_weights_fill_the_bubble(plans: Mapping[str, ProgramPlan]) -> None:
    """The same computation takes less time; rank 0 of a V has the first and the last stage."""
    plain, apart, in_a_v = (plans[name] for name in ("1f1b", "zb_h1", "zbv"))
    assert apart.step_s < plain.step_s
    assert in_a_v.seconds["bubble"] < apart.seconds["bubble"] < plain.seconds["bubble"]
    for one, other in zip(plain.stages, apart.stages, strict=True):
        assert one.weight_s == 0.0 < other.weight_s
    assert in_a_v.places == (0, 1, 2, 3, 3, 2, 1, 0)
    assert [(stage.in_flight, stage.weights_left) for stage in apart.stages] == [(4, 0), (3, 1), (2, 2), (1, 3)]
    assert any("I" in line and "W" in line for line in apart.drawn)


@SLOW
def test_zero_bubble_schedules_are_offered() -> None:
    """Where none is given, one is taken that is faster than any plain schedule; a compiled program has a plain one."""
    options: dict[str, Any] = {"mesh": {"pp": 4}, "model": large(8), "micro_batches": 8}
    free = planned(**options).programs["train"]
    assert free.schedule in SPLITTING
    for name in ("1f1b", "interleaved_1f1b", "zb_h1", "zbv"):
        given = planned(**options, pipeline=Pipeline(schedule=name)).programs["train"]
        assert free.step_s <= given.step_s * (1 + 1e-9)
    assert planned(**options, compiled=True).programs["train"].schedule not in SPLITTING


@SLOW
def test_memory_counts_what_waits(plans: Mapping[str, ProgramPlan]) -> None:
    """A micro-batch whose gradients of weights are left holds the operands of its products, and the gradients of
    their results."""
    last = plans["zb_h1"].stages[-1]
    plain = plans["1f1b"].stages[-1]
    # Of a layer of width 1024 and 4096 and a sample pair of 256 tokens: five operands, and the gradients of q, k, v, o,
    # gate, up and down (k and v are as wide as q).
    rows, width, wide = 2 * 256, 1024, 4096
    operands, gradients = 3 * width + wide, 5 * width + 2 * wide
    held = 4 * rows * (operands + gradients) * last.layers
    more = sum(last.memory.values()) - sum(plain.memory.values())
    assert 3 * held <= more <= 6 * held
    assert plans["zb_h1"].reduce_once


@pytest.mark.parametrize(
    ("mesh", "options", "message"),
    [
        pytest.param(
            {"pp": 4},
            {"micro_batches": 4, "pipeline": Pipeline(schedule="dualpipev")},
            "dualpipev needs at least as many micro-batches as stages, but 4 are given for 8 stages",
            marks=SLOW,
        ),
        pytest.param(
            {"pp": 2},
            {"micro_batches": 4, "pipeline": Pipeline(schedule="zbv", virtual_stages=3)},
            "zbv has 2 stage(s) on each rank",
            marks=SLOW,
        ),
        (
            {"pp": 2},
            {"compiled": True, "pipeline": Pipeline(schedule="zb_h1")},
            "the schedule zb_h1 computes gradients of weights apart, which code compiled by torch cannot",
        ),
    ],
)
def test_what_does_not_go_is_refused(mesh: dict[str, int], options: dict[str, Any], message: str) -> None:
    """One sentence each."""
    with pytest.raises(autopar.PipelineError) as caught:
        planned(mesh, large(8), **options)
    assert message in str(caught.value)
