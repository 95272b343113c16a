"""Pipeline stages in the data that passes share: a program that is cut between the copies of its region."""

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autopar.plans.probing import FakeProber
from passes.codegen import Naming, emit
from passes.cost.liveness import MACHINES, MemoryPeak, Stored, peak_memory
from passes.cost.schedules import Held
from passes.cost.walk import Optimizer, Prices, block_seconds, stage_seconds, walk
from passes.ir.configuration import RECOMPUTE, Configuration, Staging
from passes.ir.errors import PipelineError, PlanMismatchError
from passes.ir.lowered import Lowered, Stage, only_stage
from passes.ir.plan import ParameterPlan, Plan
from passes.ir.work import Work
from passes.lower.positions import named_starts, positions
from passes.lower.recompute import recompute
from passes.lower.stages import cut
from passes.lower.units import fsdp_units
from passes.record import decisions_of, layout_texts, record, record_stage
from passes.solve import solve
from passes.solve.limits import Limits
from passes.variables import name_variables
from tests.passes.helpers import mesh_of
from tests.passes.ir.test_plan import example
from tests.passes.planning import STATES, Planning, planning

MESH = mesh_of(dp=2)
COUNT, CUT, WIDTH = 7, 3, 8
STAGING = Staging(2, "1f1b", 2, (f"layers.{CUT}",))
STORED = {"*.weight": {"stored": {"dp": "S(0)"}, "used": {"dp": "R"}}, "@linear": {"out": {"dp": "S(0)"}}}


class Layer(nn.Module):
    """A linear layer with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, width]."""
        return x + self.linear(x).relu()


class Model(nn.Module):
    """Equal layers, and a head that has the weight of the table before them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(COUNT))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """x: [rows, width]."""
        hidden = self.table(x).relu()
        for layer in self.layers:
            hidden = layer(hidden)
        return {"loss": self.head(hidden).sum()}


@pytest.fixture(scope="module")
def case() -> Planning:
    return planning(Model(), {"x": torch.ones(64, WIDTH)}, MESH, "ideal", STORED)


@pytest.fixture(scope="module")
def configuration(case: Planning) -> Configuration:
    return Configuration(MESH, recompute={region.name: "selective" for region in case.folded.regions})


@pytest.fixture(scope="module")
def whole(case: Planning, configuration: Configuration) -> Stage:
    """The program in one stage, before FSDP units are formed."""
    return case.lowered(solve(case.problem, case.cluster, Limits(1e30, STATES), configuration))


@pytest.fixture(scope="module")
def lowered(case: Planning, whole: Stage) -> Lowered:
    """The same in two stages: the region is cut after its first copies."""
    stages = cut(whole, named_starts(whole, [f"layers.{CUT}"]), case.folded.flowing, MESH)
    return Lowered(whole.program, tuple(fsdp_units(stage, MESH) for stage in stages))


def simulated(stage: Stage) -> MemoryPeak:
    """Its peak in training."""
    stored = Stored(None, {"x": torch.float32}, "sgd")
    peaks = peak_memory(stage, name_variables(stage, MESH), stored, MACHINES["cpu"], FakeProber(MESH, "cpu"), MESH)
    return peaks.with_held([Held(1)])


def seconds_of(case: Planning, configuration: Configuration, stage: Stage) -> list[float]:
    """The seconds of its blocks."""
    return block_seconds(stage, case.folded, case.cluster, configuration)


def test_ranks_hold_what_their_stages_read(whole: Stage, lowered: Lowered) -> None:
    """Parameters of copies are in one stage, that of both ends in both. FSDP units are around the copies that run."""
    names = {f"layers.{number}.linear.weight": (int(number >= CUT),) for number in range(COUNT)}
    assert {name: lowered.holders[name] for name in whole.parameters} == {"table.weight": (0, 1), **names}
    assert lowered.parameters == whole.parameters
    assert lowered.inputs == whole.inputs
    assert lowered.outputs == whole.outputs
    for stage, count in zip(lowered.stages, (CUT, COUNT - CUT), strict=True):
        assert stage.units.gathered == set(stage.parameters)
        (copies,) = stage.units.around_copies
        own = [tuple(stage.units.units[number].parameters) for (number,) in copies]
        assert own == [(name,) for name in stage.parameters if name.startswith("layers.")]
        assert len(copies) == count


def test_stages_are_priced(case: Planning, configuration: Configuration, whole: Stage, lowered: Lowered) -> None:
    """Computation of the stages adds up to that of the program. Each has a first copy whose gather nothing hides."""
    marked = fsdp_units(whole, MESH)
    first, second, alone = (
        walk(stage, case.folded, case.cluster, Optimizer(STATES), configuration) for stage in (*lowered.stages, marked)
    )
    for name in ("forward_compute", "backward_compute", "recompute"):
        assert getattr(first, name) + getattr(second, name) == pytest.approx(getattr(alone, name))
    assert first.inputs == alone.inputs
    assert second.inputs == 0
    assert second.forward_compute > first.forward_compute


def test_prices_are_shared_by_stages(
    case: Planning, configuration: Configuration, whole: Stage, lowered: Lowered
) -> None:
    """Stages that are priced together take what each takes alone, at every level of recompute."""
    prices = Prices(case.folded, case.cluster, MESH)
    for level in RECOMPUTE:
        own = replace(configuration, recompute=dict.fromkeys(configuration.recompute, level))
        for stage in (*lowered.stages, fsdp_units(whole, MESH)):
            marked = recompute(stage, own.recompute)
            alone = Prices(case.folded, case.cluster, MESH)
            assert stage_seconds(marked, prices, Optimizer(STATES), own) == stage_seconds(
                marked, alone, Optimizer(STATES), own
            )


def test_stages_are_simulated(whole: Stage, lowered: Lowered) -> None:
    """A rank takes what its stage holds: its parameters, and the tensors that its copies save."""
    size, marked = WIDTH * WIDTH * 4 // 2, fsdp_units(whole, MESH)
    first, second, alone = (simulated(stage).bytes_by_kind for stage in (*lowered.stages, marked))
    assert first["parameters"] == (CUT + 1) * size
    assert second["parameters"] == (COUNT - CUT + 1) * size
    assert alone["parameters"] == (COUNT + 1) * size
    assert (first["inputs"], second["inputs"]) == (alone["inputs"], 0)
    assert 0 < first["activations"] < second["activations"] < alone["activations"]
    assert simulated(lowered.stages[0]).moment.startswith(("backward", "forward", "gather", "reduction"))


def test_stages_have_sources(lowered: Lowered) -> None:
    """A stage is called with what it receives, returns what it sends, and has the copies that it runs."""
    first, second = (emit(stage, name_variables(stage, MESH), MESH, Naming("M", "M.")) for stage in lowered.stages)
    for source in (first, second):
        compile(source, "generated", "exec")
    assert "def forward(self, x):" in first
    assert "def forward(self, hidden):" in second
    assert [f'("layers.{number}",)' in first for number in range(COUNT)] == [number < CUT for number in range(COUNT)]
    assert [f'("layers.{number}",)' in second for number in range(COUNT)] == [number >= CUT for number in range(COUNT)]
    assert "return last" not in first


@pytest.fixture(scope="module")
def plan(case: Planning, configuration: Configuration, whole: Stage, lowered: Lowered) -> Plan:
    """A plan with the two stages."""
    solution = solve(case.problem, case.cluster, Limits(1e30, STATES), configuration)
    solution = replace(solution, configuration=replace(configuration, pipeline=STAGING))
    stages = [
        record_stage(case.problem, solution, stage, seconds_of(case, configuration, stage), simulated(stage))
        for stage in lowered.stages
    ]
    seconds = walk(whole, case.folded, case.cluster, Optimizer(STATES), configuration)
    parameters = {
        item.name: ParameterPlan(
            item.type.shape,
            "float32",
            layout_texts(whole.parameters[item.name], MESH),
            True,
            lowered.holders[item.name],
        )
        for item in whole.program.parameters
    }
    programs = {"train": record(stages, solution, seconds, 1.0, 0.0, Work())}
    return replace(example(), mesh=MESH.by_name, inputs={}, parameters=parameters, programs=programs)


# A plan says the level of each stage.
_WITH_LEVELS = replace(STAGING, recompute=((("layers.*", "selective"),),) * 2)


def test_plans_have_stages(plan: Plan, configuration: Configuration, lowered: Lowered) -> None:
    """A plan of several stages is saved, loaded and printed; parameters say which stages hold them."""
    assert Plan.from_json(plan.to_json()) == plan
    written = plan.programs["train"].configuration(MESH)
    assert written == replace(configuration, pipeline=_WITH_LEVELS)
    in_sequence = replace(STAGING, schedule="sequential")
    assert written.for_evaluation() == Configuration(MESH, pipeline=in_sequence)
    peaks = [simulated(stage).kinds() for stage in lowered.stages]
    assert plan.programs["train"].memory == max(peaks, key=lambda peak: sum(peak.values()))
    lines = [" ".join(line.split()) for line in str(plan).splitlines()]
    assert any(line.startswith(f"layers.* x {CUT}, recompute selective: ") for line in lines)
    assert any(line.startswith(f"layers.* x {COUNT - CUT}, recompute selective: ") for line in lines)
    begun = [line for line in lines if line.startswith("stage")]
    assert [line.split(",")[0] for line in begun[:2]] == ["stage 0: 0 layers", f"stage 1: from layers.{CUT}"]
    assert [line.split(" memory")[0] for line in begun[2:]] == ["stage 0:", "stage 1:"]
    assert "table.weight float32[8, 8] stored dp S(0) on stage 0, 1" in lines
    assert f"layers.*.linear.weight x {COUNT - CUT} float32[8, 8] stored dp S(0) on stage 1" in lines
    assert plan.coverage.ops == len(lowered.program.ops)


def test_stages_have_the_decisions_of_the_program(plan: Plan, configuration: Configuration) -> None:
    """All stages of a plan are replayed by the same decisions; a plan whose stages differ is damaged."""
    decisions = decisions_of(plan.programs["train"], MESH)
    assert decisions.configuration == replace(configuration, pipeline=_WITH_LEVELS)
    first, second = plan.programs["train"].stages
    assert decisions.methods == first.decisions == second.decisions
    other = replace(plan.programs["train"], stages=(first, replace(second, decisions={})))
    with pytest.raises(PlanMismatchError, match="stage 1 has other decisions than stage 0"):
        decisions_of(other, MESH)


def test_formulas_are_of_one_stage(lowered: Lowered) -> None:
    """Formulas of costs are refused in one sentence for a program of several stages."""
    with pytest.raises(PlanMismatchError, match="the program has 2 pipeline stages, and formulas of its costs are"):
        only_stage(lowered.stages)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("schedule", lambda plan: plan["programs"]["train"].update(schedule="none")),
        ("stages", lambda plan: plan["programs"]["train"].update(stages=[])),
        ("memory", lambda plan: plan["programs"]["train"]["stages"][1]["memory"].update(parameters=-1.0)),
        ("table.weight", lambda plan: plan["parameters"]["table.weight"].update(stages=[0, 2])),
    ],
)
def test_damaged_stages_are_named(plan: Plan, field: str, change: object) -> None:
    """A schedule without stages or stages without a schedule, bytes below zero, and a stage that is not there."""
    data = json.loads(plan.to_json())
    change(data)  # type: ignore[operator]
    with pytest.raises(PlanMismatchError, match=f"the plan is damaged.*{field}"):
        Plan.from_json(json.dumps(data))


def test_sums_and_quotients_of_samples_are_cut_alike_in_whole_means() -> None:
    """Micro-batches make two ops of a mean over samples; a stage of the first alone is empty where it is one op."""

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            """x: [rows, width]."""
            return {"loss": x.sin().mean().exp()}

    planned = planning(Mean(), {"x": torch.ones(8, WIDTH, requires_grad=True)}, MESH, "ideal")
    solution = solve(planned.problem, planned.cluster, Limits(1e30, STATES), Configuration(MESH))
    stage = planned.lowered(solution)
    keys = [item.name for item in positions(stage)]
    at = keys.index("/mean")
    assert named_starts(stage, ["/mean.sum", "/mean", "/exp"]) == (at, at, at + 1)
    assert named_starts(stage, ["/mean.sum", "/exp"]) == named_starts(stage, ["/mean", "/exp"]) == (at, at + 1)
    stages = cut(stage, (at, at, at + 1), planned.folded.flowing, MESH)
    assert [len(own.body.statements) > 0 for own in stages] == [True, False, True, True]
    assert stages[1].sent == stages[0].sent
    for wrong in (["/mean.sum", "/mean.sum"], ["/mean", "/mean"], ["/exp", "/mean"]):
        with pytest.raises(PipelineError, match="give cuts in order"):
            named_starts(stage, wrong)
