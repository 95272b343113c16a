"""The search for the shape of the mesh, for micro-batches and for recompute."""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

import autopar
from autopar import Cluster, InfeasibleError, MeshError, Plan, PlanMismatchError, parallelize
from autopar.models.info import read_model, tracing
from autopar.options import Options
from autopar.request import make_request
from autopar.testing import LiftFloat32, compare_on_mesh
from autopar.testing.ranks import run_ranks
from passes.capture import capture
from passes.clock import Clock
from passes.cost.cluster import CLUSTERS
from passes.ir.decisions import Decisions
from passes.ir.layout import I
from passes.ir.mesh import Mesh
from passes.ir.plan import ProgramPlan
from passes.normalize import normalize
from passes.search.best_first import OnMesh, close, explore
from passes.search.configurations import micro_batch_counts
from passes.search.meshes import finer, shapes
from passes.search.progress import Progress
from passes.search.refinement import best_choice
from passes.search.subproblems import Choice, MicroBatchPrograms, Subproblems
from passes.solve.gap import PROVEN
from tests.autopar.comparing import TOLERANCE, exact
from tests.models import Stack, llama, tokens

pytestmark = pytest.mark.usefixtures("one_trace")

# Four devices, two in a node: shapes differ in what they cost.
NODES = replace(CLUSTERS["h100"], name="pairs", node_size=2)


def train(plan: Plan) -> ProgramPlan:
    """The program of a plan for training."""
    return plan.programs["train"]


def seconds(plan: Plan) -> float:
    """The predicted step time."""
    return sum(train(plan).seconds.values())


def memory(plan: Plan) -> float:
    """The predicted peak."""
    return sum(train(plan).memory.values())


@cache
def tiny() -> nn.Module:
    """A tiny llama."""
    return llama()


def planned(limit: float | None = None, mesh: object = None, **options: object) -> Plan:
    """A plan for a tiny llama on two devices with links that cost nothing."""
    return autopar.plan(
        tiny(), mesh or {"dp": 2}, tokens(batch=8), **{"cluster": "ideal", "memory_limit": limit, **options}
    )


# --- the best of all outer choices ---

WIDE = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 4096, "num_attention_heads": 8}


@cache
def wide() -> nn.Module:
    """Two layers that are wide enough for splitting to pay, without values."""
    with torch.device("meta"):
        return llama(**WIDE, num_key_value_heads=8, max_position_embeddings=2048)


def _every_shape(devices: int) -> list[Mesh]:
    """All meshes of so many devices that the search may come to, by cutting axes again and again."""
    found = {mesh.sizes: mesh for mesh in shapes(devices, NODES.node_size)}
    waiting = list(found.values())
    while waiting:
        for mesh, _ in finer(waiting.pop(), NODES.node_size, 4):
            if mesh.sizes not in found:
                found[mesh.sizes] = mesh
                waiting.append(mesh)
    return list(found.values())


@pytest.mark.long
def test_searched_mesh_is_the_best_of_all() -> None:
    """No shape that is given is faster than the one that is found, which is as fast when it is given."""
    inputs = tokens(batch=8, length=512, vocabulary=4096)
    options = {"cluster": NODES, "memory_limit": 60e9}
    found = autopar.plan(wide(), 4, inputs, **options)
    every = {
        mesh.sizes: autopar.plan(wide(), dict(zip(mesh.names, mesh.sizes, strict=True)), inputs, **options)
        for mesh in _every_shape(4)
    }
    assert len(every) == 2
    assert len({round(seconds(plan) * 1e9) for plan in every.values()}) == 2
    assert seconds(found) == pytest.approx(min(seconds(plan) for plan in every.values()), rel=1e-6)
    assert seconds(every[tuple(found.mesh.values())]) == pytest.approx(seconds(found), rel=1e-6)


class Residual(nn.Module):
    """A norm and two products, and what they are added to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(1024)
        self.up = nn.Linear(1024, 4096, bias=False)
        self.down = nn.Linear(4096, 1024, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply them."""
        return (x + self.down(torch.relu(self.up(self.norm(x))))).square().sum()


def _subproblems(
    model: nn.Module, sizes: dict[str, int], inputs: dict[str, torch.Tensor], **options: object
) -> Subproblems:
    """The subproblems of all choices on a mesh."""
    request = make_request(sizes, Options(cluster=NODES, **options))
    info = read_model(model, inputs, request)
    program = normalize(capture(model, info.inputs, tracing(model, info, request, "train")))
    space, clock = request.space(info.casts(request.precision), Decisions()), Clock()
    return Subproblems(MicroBatchPrograms(program, space, clock), space, clock, space.memory_limit)


def _all_at_once(subproblems: Subproblems) -> Choice | None:
    """The best of all choices on the mesh, searched without coarse meshes."""
    counts = tuple(micro_batch_counts(subproblems.space, subproblems.programs.program))
    start = OnMesh(0.0, subproblems.space.mesh, counts)
    return close(subproblems, explore([start], subproblems, Progress())).best


def _residual(sizes: dict[str, int], **options: object) -> Subproblems:
    with torch.device("meta"):
        model = Residual()
        return _subproblems(model, sizes, {"x": torch.empty(64, 512, 1024)}, **options)


@pytest.mark.slow
def test_numbers_of_micro_batches_that_divide_over_an_axis() -> None:
    """Of 48 samples on 16 devices two micro-batches split unevenly, three do not: a bound on two is none on three."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 16}
    model = llama(**sizes, num_hidden_layers=4, vocab_size=512, max_position_embeddings=4096).to("meta")
    ids = torch.empty(48, 4096, dtype=torch.long, device="meta")

    def planned(**options: object) -> ProgramPlan:
        batch = {"input_ids": ids, "labels": ids}
        return train(autopar.plan(model, {"dp": 16}, batch, cluster="h100", memory_limit=5.8e9, **options))

    free, three = planned(), planned(micro_batches=3)
    assert free.micro_batches == 3
    assert free.step_s == pytest.approx(three.step_s, rel=1e-6)


FOUR = {"a": 2, "b": 2, "c": 2, "d": 2}


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, 150e6])
def test_axes_that_are_cut_up_have_the_best_of_all(limit: float | None) -> None:
    """On four axes, where not everything is looked at, what is found is what looking at everything finds."""
    expected = _all_at_once(_residual(FOUR, memory_limit=limit))
    found = best_choice(_residual(FOUR, memory_limit=limit), Progress()).best
    assert expected is not None
    assert found is not None
    assert found.subproblem.mesh.by_name == FOUR
    assert found.seconds == pytest.approx(expected.seconds, rel=1e-6)


@pytest.mark.slow
def test_nothing_but_what_is_near_is_looked_at_on_four_axes() -> None:
    """Nodes have a small part of all strategies to choose from."""
    found = best_choice(_residual(FOUR), Progress()).best
    assert found is not None
    every = _residual(FOUR)
    program = every.programs.of(1, is_given=False)
    assert program is not None
    problem = every.problem(every.space.mesh, program)
    counts = [sum(len(node.strategies) for node in each.nodes) for each in (found.subproblem.problem, problem)]
    assert 4 * counts[0] < counts[1]


@pytest.mark.long
def test_demands_hold_where_axes_are_cut_up() -> None:
    """A constraint on one axis is left out while that axis is merged with others, and holds in the end."""
    constraints = {"up": {"out": {"b": "S(2)"}, "in": {"b": "R"}}, "down.weight": {"stored": {"d": "I"}}}
    found = best_choice(_residual(FOUR, constraints=constraints), Progress()).best
    assert found is not None
    problem = found.subproblem.problem
    up, down = (found.solution.strategy(problem, problem.index[key]) for key in ("up/linear", "down.weight"))
    assert str(up.results[0][1]) == "S(2)"
    assert down.results[0][3] == I


@pytest.mark.slow
def test_three_axes_are_looked_at_wholly() -> None:
    """A bound on all there is proves what was found while axes were cut up."""
    sizes = {"dp": 2, "cp": 2, "tp": 2}
    inputs = tokens(batch=8, length=512, vocabulary=4096)
    expected = _all_at_once(_subproblems(wide(), sizes, inputs))
    found = best_choice(_subproblems(wide(), sizes, inputs), Progress()).best
    assert expected is not None
    assert found is not None
    assert found.seconds == pytest.approx(expected.seconds, rel=1e-6)
    assert found.solution.bound >= found.seconds * (1 - PROVEN)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [400e3, 300e3])
def test_searched_configuration_is_the_best_of_all(limit: float) -> None:
    """Every number of micro-batches with everything that may be computed again, each planned by itself."""
    found = planned(limit)
    best = math.inf
    for count in (1, 2, 4, 8):
        for level in ("none", "selective", "full"):
            try:
                plan = planned(limit, micro_batches=count, recompute=level)
            except InfeasibleError:
                continue
            assert memory(plan) <= limit
            best = min(best, seconds(plan))
    assert seconds(found) == pytest.approx(best, rel=1e-6)
    assert train(found).gap <= 1e-6


# --- memory decides ---


def test_plenty_of_memory_changes_nothing() -> None:
    plan = planned(1e9)
    assert (train(plan).micro_batches, dict(train(plan).stages[0].recompute)) == (1, {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "options"),
    [(400e3, {"recompute": "none"}), (450e3, {"micro_batches": 1})],
    ids=["micro-batches", "recompute"],
)
def test_what_memory_makes_necessary_runs(limit: float, options: dict[str, object]) -> None:
    """If one of the two is not allowed, the other is chosen; the plan runs and equals one device."""
    plan = planned(limit, **options)
    if "recompute" in options:
        assert train(plan).micro_batches > 1
    else:
        assert set(train(plan).stages[0].recompute.values()) - {"none"}
    assert memory(plan) <= limit
    # Twice the bytes in float64.
    exact(llama(), "2", tokens(batch=8), memory_limit=2 * limit, **options)


def _mixtral() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 64, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(**sizes, output_router_logits=True))


@pytest.mark.long
def test_a_batch_that_may_not_be_cut_is_said_to_be() -> None:
    """If memory is short and the loss is no sum over the samples, the plan says why there is one micro-batch."""
    model = _mixtral()
    roomy = autopar.plan(model, {"dp": 2}, tokens(batch=8), cluster="ideal")
    assert "one micro-batch" not in str(roomy), "nobody asked"
    limit = 0.95 * memory(roomy)
    plan = autopar.plan(model, {"dp": 2}, tokens(batch=8), cluster="ideal", memory_limit=limit)
    assert train(plan).micro_batches == 1
    assert memory(plan) <= limit
    printed = " ".join(str(plan).split())
    assert "one micro-batch: the batch cannot be cut into 2 micro-batches" in printed
    assert "needs the whole batch" in printed


# --- what does not fit ---

TERMS = r"\d\S* GiB are missing \(.*: \w+.* \d\S* GiB, .* GiB, .* GiB, others .* GiB\)"


def test_what_was_forbidden_would_fit() -> None:
    with pytest.raises(InfeasibleError, match=rf"limit of 0.000373 GiB.*{TERMS}; it would fit with "):
        planned(400e3, micro_batches=1, recompute="none")


@pytest.mark.slow
def test_recompute_that_was_forbidden_would_fit() -> None:
    """On expensive links, recompute is cheaper than more micro-batches."""
    with pytest.raises(InfeasibleError, match=r"it would fit with .*recompute of model.layers"):
        planned(320e3, micro_batches=2, recompute="none", cluster="h100")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"dp": 2}, 2])
def test_more_devices_would_fit(mesh: object) -> None:
    """The error names a mesh on which it fits indeed."""
    with pytest.raises(InfeasibleError, match=rf"{TERMS}; it would fit on 4 devices \(") as caught:
        planned(200e3, mesh)
    assert caught.value.missing > 0
    assert memory(planned(200e3, {"dp": 4} if isinstance(mesh, dict) else 4)) <= 200e3


@pytest.mark.slow
def test_nothing_would_fit() -> None:
    with pytest.raises(InfeasibleError, match=rf"{TERMS}; nor does any fit with up to 128 devices: take a smaller"):
        planned(1e3)


def test_no_pipeline_is_offered_where_nothing_would_fit() -> None:
    """One micro-batch, as given, has no pipeline that pays: the error is that of the plans without one."""
    with pytest.raises(InfeasibleError, match=rf"{TERMS}; it would fit with \d micro-batches"):
        planned(400e3, 2, micro_batches=1, recompute="none")


# --- a number of devices at run time ---


def _searched(model: nn.Module, batch: int, mesh: int | Cluster, options: dict[str, object]) -> dict[str, object]:
    """Errors on a mesh whose shape is searched, and again on a replayed plan, saved and loaded."""
    inputs = tokens(batch=batch)
    model.double()
    first = compare_on_mesh(model, mesh, inputs, torch.float64, **options)
    with LiftFloat32(torch.float64):
        module = parallelize(model, mesh, inputs, **options)  # type: ignore[arg-type]
    plan = Plan.from_json(module.plan.to_json())
    model.zero_grad()
    again = compare_on_mesh(model, mesh, inputs, torch.float64, **{**options, "plan": plan})
    names = module.mesh.mesh_dim_names
    assert names == tuple(plan.mesh)
    assert tuple(module.mesh.shape) == tuple(plan.mesh.values())
    return {"errors": max(first.worst[1], again.worst[1]), "plan": plan.to_json(), "names": names}


@pytest.mark.long
def test_a_number_of_devices_runs() -> None:
    """Outputs and gradients equal one device on a mesh that was searched, and on one that was replayed."""
    for found in run_ranks(_searched, 4, llama(), 8, 4, {"cluster": "ideal"}):
        assert found["errors"] <= TOLERANCE, found["errors"]


@pytest.mark.slow
def test_a_cluster_runs_in_a_configuration() -> None:
    """Memory is short, so that the batch goes in parts; the links of the cluster give axes their names."""
    cluster = replace(CLUSTERS["ideal"], name="pairs", node_size=2, devices=4)
    results = run_ranks(_searched, 4, llama(), 8, cluster, {"memory_limit": 400e3, "recompute": "none"})
    plan = Plan.from_json(str(results[0]["plan"]))
    assert train(plan).micro_batches > 1
    assert set(plan.mesh) <= {"inter", "intra", "inter0", "inter1", "intra0", "intra1"}
    assert all(found["errors"] <= TOLERANCE for found in results), [found["errors"] for found in results]


def _refused(rank_count: int) -> list[str]:
    """The error messages for meshes that do not match the ranks."""
    messages = []
    pairs = replace(CLUSTERS["cpu"], devices=3)
    rank = torch.distributed.get_rank()
    plan = autopar.plan(Stack(), {"dp": 4}, _stack_inputs(), cluster="ideal")
    for mesh, options in (
        (rank_count + 1, {}),
        (pairs, {}),
        (rank_count + rank, {}),
        (rank_count, {"plan": plan}),
        (rank_count, {"constraints": {"*": {"weight": {"dp": "S(0)"}}}}),
        (CLUSTERS["cpu"], {}),
        (True, {}),
        ({"dp": rank_count}, {}),
    ):
        try:
            parallelize(Stack(), mesh, _stack_inputs(), **options)  # type: ignore[arg-type]
            messages.append("ran")
        except autopar.AutoparError as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def _stack_inputs() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(8, 16) for name in ("x", "target")}


def test_other_ranks_than_asked_for() -> None:
    """One sentence on all ranks."""
    first, second = run_ranks(_refused, 2, 2)
    assert first == second
    expected = (
        "MeshError: mesh=3, but the process group has 2 ranks: start as many",
        "MeshError: the cluster 'cpu' has 3 devices, but the process group has 2 ranks",
        "MeshError: mesh=3, but the process group has 2 ranks",
        "PlanMismatchError: the plan was made for the mesh {'dp': 4} of 4 devices, here are 2",
        "ConstraintError: constraints name the axes of a mesh, but its shape is still to be found",
        "MeshError: the cluster 'cpu' does not say how many devices it has",
        "MeshError: the mesh is True: parallelize needs a DeviceMesh",
        "MeshError: the mesh is {'dp': 2}: parallelize needs a DeviceMesh",
    )
    for message, start in zip(first, expected, strict=True):
        assert message.startswith(start), message


def test_no_process_group() -> None:
    with pytest.raises(MeshError, match=r"no process group is initialized.*torchrun.*init_process_group"):
        parallelize(Stack(), 2, _stack_inputs())


@pytest.mark.long
def test_configurations_survive_the_round_trip(tmp_path: object) -> None:
    """A plan with micro-batches and recompute is saved, loaded and planned again as it was, by number of devices too;
    it is not replayed on another number."""
    plan = planned(300e3, 2, recompute="full")
    assert train(plan).micro_batches > 1
    path = f"{tmp_path}/plan.json"
    plan.save(path)
    loaded = Plan.load(path)
    assert loaded == plan
    again = planned(300e3, 2, plan=loaded)
    assert again.programs == plan.programs
    assert again.mesh == plan.mesh
    with pytest.raises(PlanMismatchError, match="of 2 devices, here are 4"):
        planned(300e3, 4, plan=loaded)
