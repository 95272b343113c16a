"""Bad input gets one clear sentence, early, as a named exception."""

import inspect
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.testing import run_ranks
from passes.cost.cluster import CLUSTERS, cluster_of_device
from tests.architectures import ARCHITECTURES
from tests.models import Stack, llama, tokens
from tests.untraceable import REFUSED, Branches, Repeats, Selects

pytestmark = pytest.mark.usefixtures("one_trace")

MESH = {"dp": 2, "tp": 2}


def plan(model: nn.Module | None = None, mesh: object = MESH, inputs: object = None, **options: object) -> autopar.Plan:
    """Plan a tiny llama."""
    chosen = {"cluster": "ideal", **options}
    return autopar.plan(model or llama(), mesh, tokens() if inputs is None else inputs, **chosen)


def stack_inputs(batch: int, width: int = 16) -> dict[str, torch.Tensor]:
    """Inputs of a `Stack`."""
    return {name: torch.empty(batch, width, device="meta") for name in ("x", "target")}


def test_all_errors_have_one_base():
    names = ["CaptureError", "ClusterError", "ConstraintError", "InfeasibleError", "InputError", "MeshError"]
    names += ["CheckpointError", "PlanMismatchError"]
    assert all(issubclass(getattr(autopar, name), autopar.AutoparError) for name in names)


# --- meshes -----------------------------------------------------------------------------------------------------------


def _nameless() -> str:
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(autopar.MeshError) as caught:
        autopar.parallelize(llama(), mesh, tokens())
    return str(caught.value)


def test_a_mesh_without_names():
    assert all("no axis names" in message for message in run_ranks(_nameless, 2))


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (0, "give a DeviceMesh"),
        (-8, "give a DeviceMesh"),
        (True, "give a DeviceMesh"),
        (8.0, "give a DeviceMesh"),
        ("dp", "give a DeviceMesh"),
        ({"dp": 0}, "dp"),
        ({"dp": 2.5}, "dp"),
        ({}, "axis"),
        ({"my axis": 2}, "my axis"),
    ],
    ids=["no devices", "less than none", "truth", "float", "text", "zero", "fraction", "empty", "no identifier"],
)
def test_meshes_that_are_none(mesh, message):
    with pytest.raises(autopar.MeshError, match=message):
        plan(mesh=mesh)


def test_a_dict_mesh_needs_a_cluster():
    with pytest.raises(autopar.MeshError, match="cluster="):
        plan(cluster=None)


@pytest.mark.parametrize(
    ("name", "nearest"), [("h10", "h100"), ("H1000", "h100"), ("a10", "a100"), ("mi300", "mi300x")]
)
def test_an_unknown_cluster(name, nearest):
    """The nearest, and the list of all."""
    with pytest.raises(autopar.MeshError, match=rf"'{name}' \(did you mean '{nearest}'\?\).*a100.*b200.*cpu"):
        plan(cluster=name)


def test_a_cluster_in_capitals():
    assert plan(Stack(), inputs=stack_inputs(8), cluster="H100").cluster == "h100"


def test_an_unknown_device():
    with pytest.raises(
        autopar.MeshError, match=r"'NVIDIA H10' \(the nearest is .*cluster='h100'\).*pass cluster=, one of a100.*ideal"
    ):
        cluster_of_device("NVIDIA H10")


@pytest.mark.parametrize("mesh", [{"dp": 4, "tp": 2}, {"dp": 64}, 8])
def test_a_mesh_larger_than_the_cluster(mesh):
    cluster = replace(CLUSTERS["h100"], devices=4)
    with pytest.raises(
        autopar.MeshError, match=r"has (8|64) devices, but the cluster 'h100' has 4: make the mesh smaller"
    ):
        plan(mesh=mesh, cluster=cluster)


def test_a_cluster_as_mesh():
    """It says how many devices there are, once."""
    cluster = replace(CLUSTERS["ideal"], devices=2)
    assert plan(mesh=cluster, cluster=None).mesh == {"intra": 2}
    with pytest.raises(autopar.MeshError, match="leave out cluster="):
        plan(mesh=cluster, cluster="h100")
    with pytest.raises(autopar.MeshError, match=r"does not say how many devices it has: set Cluster\(devices"):
        plan(mesh=CLUSTERS["h100"], cluster=None)


def test_constraints_need_named_axes():
    with pytest.raises(autopar.ConstraintError, match="pass a mesh with named axes"):
        plan(mesh=4, constraints={"lm_head": {"weight": {"tp": "S(0)"}}})


def test_parallelize_needs_a_device_mesh():
    with pytest.raises(autopar.MeshError, match="DeviceMesh"):
        autopar.parallelize(llama(), MESH, tokens())  # type: ignore[arg-type]


def test_an_axis_that_divides_nothing_useful(caplog):
    """A plan all the same, and a warning that says so."""
    with caplog.at_level(logging.WARNING, logger="autopar"):
        found = plan(mesh={"dp": 2, "odd": 7})
    assert any("'odd' of size 7 splits nothing" in record.message for record in caplog.records)
    assert not any("'dp'" in record.message for record in caplog.records)
    assert found.mesh == {"dp": 2, "odd": 7}


# --- inputs -----------------------------------------------------------------------------------------------------------


def test_inputs_whose_sizes_do_not_divide(caplog):
    """Nothing of them is split, and it is said."""
    with caplog.at_level(logging.WARNING, logger="autopar"):
        found = autopar.plan(Stack(width=7), {"dp": 5}, stack_inputs(batch=3, width=7), cluster="ideal")
    assert all(item.layout == {"dp": "R"} for item in found.inputs.values())
    assert any("'dp' of size 5" in record.message for record in caplog.records)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({**stack_inputs(8), "tokens": torch.zeros(1, 2)}, "tokens"),
        ((torch.zeros(4, 16),), "target"),
        ((), "x"),
        ([torch.zeros(4, 16)], "example_inputs is of type list: give a dict of keyword arguments of Stack, or a tuple"),
        (torch.zeros(4, 16), "example_inputs is of type Tensor"),
    ],
    ids=["unknown name", "too few", "none", "list", "tensor"],
)
def test_inputs_that_the_model_does_not_take(inputs, message):
    with pytest.raises(autopar.InputError, match=message):
        plan(Stack(), inputs=inputs)


def test_other_modules_need_example_inputs():
    with pytest.raises(autopar.InputError, match="pass example_inputs"):
        autopar.plan(Stack(), MESH, cluster="ideal")


@pytest.mark.parametrize(
    "options",
    [
        {"objective": "serve"},
        {"optimizer": "magic"},
        {"memory_limit": 0},
        {"memory_limit": float("nan")},
        {"plan": "plan.json"},
    ],
    ids=str,
)
def test_options_that_mean_nothing(options: Mapping[str, object]):
    with pytest.raises(autopar.InputError, match=next(iter(options))):
        plan(**options)


@pytest.mark.parametrize("precision", ["bf16", torch.int32, {"compute": torch.bfloat16}], ids=str)
def test_precisions_that_are_none(precision):
    with pytest.raises(
        autopar.InputError, match=r"^precision(: compute must be a floating| is .*: give an autopar\.Prec)"
    ):
        plan(Stack(), inputs=stack_inputs(8), precision=precision)


def test_a_precision_may_be_a_dtype():
    """The dtype to compute in; gradients are reduced in float32."""
    found = plan(Stack(), inputs=stack_inputs(8), precision=torch.bfloat16).precision
    assert (found.compute, found.reduce, found.master) == ("bfloat16", "float32", None)


@pytest.mark.parametrize(
    "limit", [0, -1, -60e9, float("nan"), float("-inf"), "inf", "60e9", "60GB", True, [60e9]], ids=repr
)
def test_memory_limits_that_are_none(limit):
    with pytest.raises(autopar.InputError, match=r"^memory_limit is .*: it must be a positive number of bytes per dev"):
        plan(Stack(), inputs=stack_inputs(8), memory_limit=limit)


# --- models -----------------------------------------------------------------------------------------------------------


OFFER = (
    "what can be traced can be parallelized part by part, and data parallelism needs no trace "
    "(torch.distributed.fsdp.fully_shard over the whole mesh)"
)


def named_line(kind: type[nn.Module]) -> str:
    """The line of a module that an error must name, and what stands there."""
    lines, first = inspect.getsourcelines(kind)
    ((place, text),) = [(number, line.strip()) for number, line in enumerate(lines) if line.endswith("# here\n")]
    return f"{inspect.getsourcefile(kind)}:{first + place} ({text})"


def reason(kind: type[nn.Module]) -> str:
    """The reason that an error must give for a module: the first line of its docstring, as it goes on in a sentence."""
    said = str(kind.__doc__).rstrip(".")
    return said[0].lower() + said[1:] if said.startswith(("It ", "A ", "How ")) else said


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_models_that_cannot_be_traced(kind):
    """One sentence: which model, where, why, and what can be done instead."""
    with pytest.raises(autopar.CaptureError) as caught:
        plan(kind(), inputs={"x": torch.rand(2, 4)})
    message = str(caught.value)
    assert message.startswith(f"cannot trace {kind.__name__} at {named_line(kind)}: {reason(kind)}")
    assert message.endswith(f"; {OFFER}")
    assert "\n" not in message


@pytest.mark.parametrize(("kind", "hint"), [(Branches, "choose with torch.where"), (Repeats, "loop a fixed number")])
def test_control_flow_that_depends_on_data(kind, hint):
    """It is called what it is, with what to do instead."""
    with pytest.raises(autopar.CaptureError, match=f"which is data-dependent control flow: .*{hint}"):
        plan(kind(), inputs={"x": torch.rand(2, 4)})


def _refused_on_ranks() -> list[str]:
    """The error messages on each rank."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    messages = []
    for kind in REFUSED:
        torch.manual_seed(0)
        with pytest.raises(autopar.CaptureError) as caught:
            autopar.parallelize(kind(), mesh, {"x": torch.ones(2, 4)}, cluster="ideal")
        messages.append(str(caught.value))
    return messages


@pytest.mark.long
def test_all_ranks_are_told_the_same():
    first, second = run_ranks(_refused_on_ranks, 2)
    assert first == second
    assert len(set(first)) == len(REFUSED)


class Within(nn.Module):
    """A model with one in it that cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Selects()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, 4]."""
        return self.inner(x)


def test_the_line_is_that_of_the_inner_module():
    """The error names the model that was given, and the line of the part that is in the way."""
    with pytest.raises(autopar.CaptureError, match="cannot trace Within at ") as caught:
        plan(Within(), inputs={"x": torch.rand(2, 4)})
    assert named_line(Selects) in str(caught.value)


def test_the_line_of_a_stock_model_is_that_of_its_own_source():
    """Not of what serves all models: here the sizes are taken in a file of helpers."""
    vision = ARCHITECTURES["qwen2_5_vl-vision"]
    inputs = {name: leaf.to("meta") for name, leaf in vision.inputs(2).items()}
    with pytest.raises(autopar.CaptureError, match=r"modeling_qwen2_5_vl.py:\d+ .*give grid_thw with values"):
        plan(vision.make(), inputs=inputs)


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_memory_limit_that_cannot_be_met():
    """The error says the GiB that are missing, the largest terms, what would help."""
    with pytest.raises(autopar.InfeasibleError) as caught:
        autopar.plan(Stack(), MESH, stack_inputs(8), cluster="h100", memory_limit=1000)
    message = str(caught.value)
    assert "GiB are missing" in message
    assert "parameters" in message or "optimizer states" in message
    assert "nor does any fit with up to 256 devices" in message
    limit, missing, *terms = map(float, re.findall(r"(\S+) GiB", message.partition(")")[0]))
    assert sum(terms) == pytest.approx(limit + missing, rel=1e-2)
    with pytest.raises(autopar.InfeasibleError, match=r"; it would fit on \d+ devices \(dp \d+ x tp 2\)"):
        autopar.plan(Stack(), MESH, stack_inputs(8), cluster="h100", memory_limit=9000)


def test_a_memory_limit_below_the_parameters():
    """Less than what the parameters take where they lie in parts on all devices."""
    model = Stack()
    own = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) / 4
    with pytest.raises(
        autopar.InfeasibleError, match=r"GiB are missing \(.*; it would fit on \d+ devices \("
    ) as caught:
        plan(model, inputs=stack_inputs(8), memory_limit=0.9 * own)
    assert caught.value.missing > 0.1 * own


# --- saved plans ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved() -> autopar.Plan:
    """The plan of a llama with two layers."""
    return plan()


def test_a_plan_of_another_model(saved):
    with pytest.raises(autopar.PlanMismatchError, match="made for another LlamaForCausalLM"):
        plan(llama(num_hidden_layers=3), plan=saved)


def test_a_plan_for_another_mesh(saved):
    with pytest.raises(autopar.PlanMismatchError, match="made for the mesh"):
        plan(mesh={"dp": 4}, plan=saved)


def test_a_plan_for_other_inputs(saved):
    with pytest.raises(autopar.PlanMismatchError, match="made for the inputs"):
        plan(inputs=tokens(batch=8), plan=saved)


def test_a_plan_for_another_objective(saved):
    with pytest.raises(autopar.PlanMismatchError, match="no program for objective='infer'"):
        plan(inputs=tokens(labels=True), objective="infer", plan=saved)


def test_a_plan_whose_storage_no_checkpoint_takes(saved):
    name = "model.layers.0.self_attn.q_proj.weight"
    parameters = {**saved.parameters, name: replace(saved.parameters[name], layout={"dp": "I", "tp": "S(0, 2)"})}
    with pytest.raises(autopar.PlanMismatchError, match=f"{name} as dp I, tp S.0, 2., which torch.distributed.checkp"):
        plan(plan=replace(saved, parameters=parameters))


def test_a_plan_of_another_version(saved, tmp_path):
    document = json.loads(saved.to_json())
    document["format_version"] += 1
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    with pytest.raises(autopar.PlanMismatchError, match="version"):
        autopar.Plan.load(path)


@pytest.mark.parametrize("text", ["", "[]", '{"format_version": 1}', "not json"])
def test_a_file_that_is_no_plan(text, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(autopar.PlanMismatchError):
        autopar.Plan.load(path)
