"""Whether there is a pipeline: what the planner decides, and what users get who ask for nothing."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar import Cluster, Pipeline
from autopar.testing import compare_on_mesh, run_ranks
from passes.cost.cluster import CLUSTERS
from passes.search.pipelines import search as pipeline_search
from tests.autopar.comparing import TOLERANCE

SLOW = pytest.mark.slow

pytestmark = pytest.mark.usefixtures("one_trace")


def slow(name: str, bandwidth: float) -> Cluster:
    """A cluster whose devices are nodes of their own, with slow links between them: gradients cost more than layers."""
    known = CLUSTERS[name]
    return replace(
        known, name=f"slow {name}", node_size=1, between=replace(CLUSTERS["h100"].between, bandwidth=bandwidth)
    )


def large() -> nn.Module:
    """A llama without values whose layers take most of the time."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "vocab_size": 2048}
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8))


def planned(mesh: dict[str, int] | int, cluster: Cluster | str, **options: object) -> autopar.Plan:
    """The plan of the large model."""
    ids = torch.zeros(16, 256, dtype=torch.int64, device="meta")
    return autopar.plan(large(), mesh, {"input_ids": ids, "labels": ids}, cluster=cluster, **options)


@pytest.mark.slow
def test_pipelines_are_chosen_where_they_are_faster(tmp_path):
    """Between slow links there is a pipeline, which says what it gains; the same plan comes of asking for one, a plan
    without one is slower, and it is replayed as it is."""
    cluster = slow("h100", 2e9)
    plan = planned(4, cluster)
    program = plan.programs["train"]
    assert plan.pipeline_axis == next(iter(plan.mesh)) == "pp"
    assert program.ranks == plan.mesh["pp"] > 1
    assert program.bound_s < program.step_s < 0.95 * program.single_s
    assert f"schedule {program.schedule}; without a pipeline a step takes " in str(plan)
    alone = planned(4, cluster, pipeline=False)
    assert (alone.pipeline_axis, alone.programs["train"].single_s) == ("", None)
    assert alone.programs["train"].step_s == pytest.approx(program.single_s)
    asked = planned(4, cluster, pipeline=Pipeline()).programs["train"]
    assert asked.step_s <= program.step_s * (1 + 1e-9)
    plan.save(tmp_path / "plan.json")
    again = planned(4, cluster, plan=autopar.Plan.load(tmp_path / "plan.json"))
    assert (again.mesh, again.programs) == (plan.mesh, plan.programs)


@pytest.mark.long
def test_there_is_none_where_it_cannot_be_faster():
    """If computation alone takes nearly as long as the plan, no pipeline is solved for; the plan is the one that
    comes without, and claims no more than is proven where pipelines are offered."""
    plan, alone = planned(4, "h100"), planned(4, "h100", pipeline=False)
    program, single = plan.programs["train"], alone.programs["train"]
    assert (plan.pipeline_axis, plan.mesh) == ("", alone.mesh)
    assert program.step_s == single.step_s
    assert program.bound_s <= single.bound_s
    assert single.complete or not program.complete


@pytest.mark.slow
def test_low_limits_at_first_find_the_same(monkeypatch):
    """Pipelines that are searched below low limits first are those that are found below the only one."""
    cluster, tried = slow("h100", 5e8), []
    solved = pipeline_search._chosen

    def counted(*arguments):
        tried.append(arguments)
        return solved(*arguments)

    monkeypatch.setattr(pipeline_search, "_chosen", counted)
    first = planned(8, cluster, pipeline=Pipeline()).programs["train"]
    low, tried[:] = len(tried), []
    monkeypatch.setattr(pipeline_search, "_limits", lambda _, limit_s: [limit_s])
    second = planned(8, cluster, pipeline=Pipeline()).programs["train"]
    assert (first.step_s, first.stages) == (second.step_s, second.stages)
    assert low != len(tried)


@pytest.mark.long
def test_given_meshes_have_what_they_say():
    """With the shape of a mesh nothing is decided: an axis "pp" is the pipeline's, unless there is to be none."""
    assert planned({"dp": 4}, slow("h100", 2e9)).pipeline_axis == ""
    assert planned({"dp": 4}, slow("h100", 2e9), pipeline="auto").pipeline_axis == ""
    assert planned({"pp": 2, "dp": 2}, "h100", micro_batches=4, pipeline="auto").pipeline_axis == "pp"
    assert planned({"pp": 2, "dp": 2}, "h100", pipeline=False).pipeline_axis == ""


def test_options_are_checked():
    """Anything else is an error."""
    with pytest.raises(autopar.InputError, match=r"give an autopar\.Pipeline, 'auto', False or None"):
        planned(4, "h100", pipeline="pp")


def middling() -> nn.Module:
    """A llama whose gradients take long to send, and whose layers take long to compute."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).double()


def middling_batch() -> dict[str, torch.Tensor]:
    """Eight samples."""
    ids = torch.randint(64, (8, 64), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def _trained(options: dict[str, object]) -> tuple[str, float]:
    """Train a model on two ranks: the pipeline's axis, and the largest error."""
    chosen = {"cluster": slow("cpu", 3e7), "micro_batches": 4, **options}
    module = autopar.parallelize(middling(), 2, middling_batch(), **chosen)
    axis = module.plan.pipeline_axis
    if not axis:
        # The loop of a user who asked for nothing.
        module(**middling_batch()).loss.backward()
        assert all(item.grad is not None for item in module.parameters())
    return axis, compare_on_mesh(middling(), 2, middling_batch(), torch.float64, **chosen).worst[1]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "axis"), [({"pipeline": "auto"}, "pp"), ({}, "")])
def test_ranks_train_in_a_pipeline_where_they_ask(options, axis):
    """On a number of devices, "auto" builds the mesh of a pipeline, which equals one device. Without the word there is
    none, though `plan` proposes it, and plain calls have gradients."""
    proposed = autopar.plan(middling(), 2, middling_batch(), cluster=slow("cpu", 3e7), micro_batches=4)
    assert proposed.pipeline_axis == "pp"
    for found, error in run_ranks(_trained, 2, options):
        assert found == axis
        assert error <= TOLERANCE
