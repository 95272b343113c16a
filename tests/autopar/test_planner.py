"""The planner's choices for models of real sizes. Parameters are on meta and no process group runs.

Where depth does not matter models have few layers: a layer is planned once, however often it stands.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar import Plan
from passes.capture import capture
from passes.constrain import Constraints
from passes.cost.cluster import CLUSTERS, Link
from passes.ir.plan import ProgramPlan, Row
from tests.autopar.recipes import DDP, FSDP, MEGATRON
from tests.autopar.shared import shared_plan

pytestmark = pytest.mark.usefixtures("one_trace")

MESH = {"dp": 8, "tp": 8}
# Memory that never decides anything.
PLENTY = 1e12
SIZES = {
    "8B": LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
    ),
    "70B": LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
    ),
}


def llama(size: str, **changes: int) -> LlamaForCausalLM:
    """A llama of the given size in bfloat16, without values."""
    config = LlamaConfig(**{**SIZES[size].to_dict(), **changes})
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def batch_of(batch: int, sequence: int = 8192, *, labels: bool = True) -> dict[str, object]:
    """A global batch of token ids, and labels to train on."""
    ids = torch.empty(batch, sequence, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids} if labels else {"input_ids": ids}


def program_of(plan: Plan) -> ProgramPlan:
    """The program of the plan's objective."""
    return plan.programs[plan.objective]


def seconds(plan: Plan) -> float:
    """The predicted step time."""
    return sum(program_of(plan).seconds.values())


def rows(plan: Plan, kind: str, name: str) -> list[Row]:
    """The statements of a kind ("op" or "change") whose name ends in `name`."""
    return [
        row
        for block in program_of(plan).stages[0].blocks
        for row in block.rows
        if row.kind == kind and row.name.endswith(name)
    ]


def op(plan: Plan, name: str) -> Row:
    """The one op whose key ends in `name`."""
    (row,) = rows(plan, "op", name)
    return row


def methods(plan: Plan, name: str) -> tuple[str, ...]:
    """The method of the one op or parameter whose key ends in `name`, on each axis."""
    (found,) = (value for key, value in program_of(plan).stages[0].decisions.items() if key.endswith(name))
    return found


def layer_methods(plan: Plan, axis: int) -> Iterator[tuple[str, str]]:
    """The methods of the matrix products and the attention of a layer, on one axis."""
    for key, value in program_of(plan).stages[0].decisions.items():
        if key.startswith("model.layers.*") and key.endswith(("_proj/linear", "scaled_dot_product_attention")):
            yield key, value[axis]


def splits_batch(method: str) -> bool:
    """Whether a method of a matrix product or of attention splits dim 0: the batch."""
    return method.partition("@")[0] in ("d0", "batch")


def communication(plan: Plan) -> float:
    """Predicted seconds of communication that nothing hides: of activations, forward and backward, and of parameters
    and their gradients."""
    spent = program_of(plan).seconds
    return spent["forward communication"] + spent["backward communication"] + parameter_traffic(plan)


def parameter_traffic(plan: Plan) -> float:
    """Predicted seconds of gathers of parameters and reductions of their gradients that nothing hides."""
    spent = program_of(plan).seconds
    return spent["exposed gathers"] + spent["exposed reductions"]


# --- a 70B training step ---


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """A training step of 70B on 8 nodes of 8 with 60 GB per device: tight, so that memory decides as well."""

    def make() -> Plan:
        return autopar.plan(llama("70B"), MESH, batch_of(8), cluster="h100", memory_limit=60e9)

    return shared_plan(tmp_path_factory, "70B at 60 GB", make)


@pytest.fixture(scope="module")
def short() -> Plan:
    """A training step of two layers of 70B on short sequences."""
    return autopar.plan(llama("70B", num_hidden_layers=2), MESH, batch_of(8, 2048), cluster="h100", memory_limit=PLENTY)


@pytest.fixture(scope="module")
def plenty() -> Plan:
    """A training step of two layers of 70B without a limit."""
    return autopar.plan(llama("70B", num_hidden_layers=2), MESH, batch_of(8), cluster="h100", memory_limit=PLENTY)


NORMS = ("input_layernorm", "post_attention_layernorm")


@pytest.mark.slow
def test_large_fits(large: Plan) -> None:
    program = program_of(large)
    assert sum(program.memory.values()) <= 60e9
    assert program.gap <= 1e-6
    assert large.whole_ops == ()


@pytest.mark.slow
def test_large_layers_stand_once(large: Plan) -> None:
    counts = {block.name: block.count for block in program_of(large).stages[0].blocks}
    assert counts["model.layers.*"] == 80


@pytest.mark.slow
@pytest.mark.parametrize("norm", NORMS)
def test_large_norms_work_on_a_part_of_the_sequence(large: Plan, norm: str) -> None:
    """Norms are as cheap as the bytes that they touch: split over batch and sequence, each device has 1/64 of them."""
    own = [row for row in rows(large, "op", "") if f".{norm}/" in row.name]
    assert own
    for row in own:
        assert row.after == ("dp S(0), tp S(1)",), row.name


@pytest.mark.slow
def test_large_one_gather_for_all_that_read_a_norm(large: Plan) -> None:
    """The sequence is gathered once for gate and up: both read the very same tensor."""
    (gather,) = [row for row in rows(large, "change", "/mul.1") if f".{NORMS[1]}/" in row.name]
    assert gather.how == "all_gather tp"
    assert gather.before == ("dp S(0), tp S(1)",)
    for name in ("gate", "up"):
        assert op(large, f".{name}_proj/linear").before[0] == gather.after[0] == "dp S(0), tp R"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gate", "up"])
def test_large_features_are_split(large: Plan, name: str) -> None:
    """A weight of 470 MB stays in parts: gathering it would take longer than gathering 134 MB of activations."""
    row = op(large, f".{name}_proj/linear")
    assert row.before[1] == "dp R, tp S(0)", "rows of the weight"
    assert row.after == ("dp S(0), tp S(2)",)


@pytest.mark.slow
def test_large_pending_sums_are_reduce_scattered(large: Plan) -> None:
    """The second product makes pending sums; they go straight back to parts of the sequence."""
    assert op(large, ".mlp.down_proj/linear").after == ("dp S(0), tp P",)
    (change,) = rows(large, "change", ".mlp.down_proj/linear")
    assert (change.how, change.after) == ("reduce_scatter tp", ("dp S(0), tp S(1)",))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["q", "k", "v", "o"])
def test_large_attention_gathers_weights_not_sequences(large: Plan, name: str) -> None:
    """Weights of attention are no larger than activations, and what gathers them is hidden behind computation: their
    products work on a part of the sequence, and only heads are exchanged (Jacobs et al. 2023, DeepSpeed-Ulysses)."""
    row = op(large, f".{name}_proj/linear")
    assert row.before == ("dp S(0), tp S(1)", "R")
    assert row.after == ("dp S(0), tp S(1)",)
    assert parameter_traffic(large) < 0.05 * seconds(large)


@pytest.mark.slow
def test_large_attention_works_on_a_part_of_the_heads(large: Plan) -> None:
    """Each device has an eighth of the heads; keys and values of the few heads that share them are everywhere."""
    row = op(large, "/scaled_dot_product_attention")
    assert row.before == ("dp S(0), tp S(1, 8)", "dp S(0), tp R", "dp S(0), tp R")
    assert row.after == ("dp S(0), tp S(1, 8)",)
    exchanged = [change.how for change in rows(large, "change", "") if change.how == "all_to_all tp"]
    assert len(exchanged) == 2, "queries before, and the result after"


@pytest.mark.long
@pytest.mark.parametrize("name", ["q", "k", "v", "o"])
def test_short_sequences_split_heads(name: str, short: Plan) -> None:
    """With a quarter of the tokens activations weigh less than weights, and there is less to hide behind: q, k and v
    give a part of the heads, o makes pending sums (Korthikanti et al. 2022)."""
    row = op(short, f".{name}_proj/linear")
    assert row.before[1].startswith("dp R, tp S(")
    if name == "o":
        assert row.before[0].startswith("dp S(0), tp S(2")
        assert row.after == ("dp S(0), tp P",)
    else:
        assert row.before[0] == "dp S(0), tp R"
        assert row.after[0].startswith("dp S(0), tp S(2")


@pytest.mark.slow
def test_large_logits_stay_split_over_the_vocabulary(large: Plan) -> None:
    """The logits are the largest tensor: head and loss split the vocabulary, and nothing gathers it."""
    logits = op(large, "lm_head/linear")
    assert "S(2)" in logits.after[0]
    assert "classes" in op(large, "/cross_entropy_loss").how
    for change in rows(large, "change", ""):
        assert not change.type.endswith("128256]"), f"{change.name} moves logits"


@pytest.mark.slow
def test_large_parameters_are_stored_in_parts(large: Plan) -> None:
    """All matrices are split over tp, and over dp, too, but for some for which there is room: what is whole there is
    not gathered."""
    matrices = {name: parameter.layout for name, parameter in large.parameters.items() if "norm" not in name}
    assert all(layout["tp"].startswith("S(") for layout in matrices.values())
    whole = {name.rsplit(".", 2)[1] for name, layout in matrices.items() if not layout["dp"].startswith("S(")}
    assert 0 < len(whole) < 4
    # With its optimizer states, of which there are two.
    smallest = 3 * 80 * 8192**2 * 2 / 8 * (1 - 1 / 8)
    assert 60e9 - sum(program_of(large).memory.values()) < smallest, "none of q, o and the ffn would fit whole on dp"


# --- against plans that people write ---

RECIPES: Mapping[str, Constraints] = {"free": {}, "Megatron": MEGATRON, "FSDP": FSDP, "DDP": DDP}


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Plan]:
    """Eight 8B layers at batch 64, planned freely and by recipe. Memory is plenty: DDP does not fit 80 GB."""
    model = llama("8B", num_hidden_layers=8)

    def by(constraints: Constraints) -> Plan:
        return autopar.plan(
            model, MESH, batch_of(64, 2048), cluster="h100", memory_limit=PLENTY, constraints=constraints
        )

    return {
        name: shared_plan(tmp_path_factory, f"8B by {name}", partial(by, constraints))
        for name, constraints in RECIPES.items()
    }


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["Megatron", "FSDP", "DDP"])
def test_free_plan_is_no_slower(plans: dict[str, Plan], recipe: str) -> None:
    """The planner may choose what any recipe says, so its step is at most as long."""
    assert seconds(plans["free"]) <= seconds(plans[recipe]) * (1 + 1e-6)


@pytest.mark.long
def test_recipes_are_what_they_are_called(plans: dict[str, Plan]) -> None:
    weight = "model.layers.0.mlp.down_proj.weight"
    assert plans["Megatron"].parameters[weight].layout == {"dp": "I", "tp": "S(1)"}
    assert plans["FSDP"].parameters[weight].layout == {"dp": "S(0)", "tp": "S(0, 8)"}
    assert plans["DDP"].parameters[weight].layout == {"dp": "I", "tp": "I"}
    for name in ("FSDP", "DDP"):
        assert all(splits_batch(method) for axis in (0, 1) for _, method in layer_methods(plans[name], axis))


def test_against_ddp_gradients_cost_less(plans: dict[str, Plan]) -> None:
    """DDP all-reduces whole gradients over both axes, which is twice a reduce-scatter, and updates every parameter on
    every device: backward communication and the optimizer are where it loses."""
    free, fsdp, ddp = (program_of(plans[name]).seconds for name in ("free", "FSDP", "DDP"))

    def backward(spent: Mapping[str, float]) -> float:
        return spent["backward communication"] + spent["exposed reductions"]

    assert backward(ddp) > 2 * backward(free)
    assert ddp["optimizer"] == pytest.approx(64 * fsdp["optimizer"], rel=0.01), "of 64 times as many parameters"
    assert ddp["optimizer"] > 10 * free["optimizer"], "of 8 or 64 times as many parameters, but for norms"
    assert not [row for row in rows(plans["DDP"], "change", ".weight") if "all_gather" in row.how]


def test_against_fsdp_layers_compute_while_parameters_travel(plans: dict[str, Plan]) -> None:
    """FSDP's gathers, over both axes at once, take longer than what hides them. The free plan stores parameters in as
    many parts as can be hidden: its traffic shows less, by far more than the optimizer takes longer."""
    free, fsdp = plans["free"], plans["FSDP"]
    saved = parameter_traffic(fsdp) - parameter_traffic(free)
    longer = program_of(free).seconds["optimizer"] - program_of(fsdp).seconds["optimizer"]
    assert saved > 10 * longer > 0
    assert communication(free) < 2 / 3 * communication(fsdp)


@pytest.mark.long
def test_against_fsdp_weights_of_the_ffn_are_not_gathered_on_tp() -> None:
    """A device has 1,024 tokens: gathering these costs less than gathering the weights of the ffn, so where no other
    layer computes meanwhile the free plan splits features on tp there, and gathers their weights over dp only. All it
    saves is communication."""
    model = llama("8B", num_hidden_layers=1)
    free, fsdp = (
        autopar.plan(model, MESH, batch_of(64, 1024), cluster="h100", memory_limit=PLENTY, constraints=RECIPES[name])
        for name in ("free", "FSDP")
    )
    for name in ("gate_proj", "up_proj", "down_proj"):
        (ours,) = rows(free, "change", f".mlp.{name}.weight")
        (theirs,) = rows(fsdp, "change", f".mlp.{name}.weight")
        assert ours.how == "all_gather dp"
        assert theirs.how == "all_gather dp * tp"
    assert communication(free) < 0.6 * communication(fsdp)


def test_against_megatron_attention_moves_no_activations(plans: dict[str, Plan]) -> None:
    """With a sequence for each device, attention splits the batch on tp as well: the gather before q, k and v and the
    reduce-scatter after o are gone. Gradients of weights in parts on dp are reduce-scattered, not all-reduced."""
    free, theirs = plans["free"], plans["Megatron"]
    assert splits_batch(methods(free, "/scaled_dot_product_attention")[1])
    assert rows(theirs, "change", ".self_attn.o_proj/linear")
    assert not rows(free, "change", ".self_attn.o_proj/linear")
    assert not [row for row in rows(free, "change", "/mul.1") if ".input_layernorm/" in row.name]
    assert communication(free) < 0.9 * communication(theirs)


# --- plans change for good reasons ---


@pytest.fixture(scope="module")
def two_layers() -> LlamaForCausalLM:
    """Two layers of 8B."""
    return llama("8B", num_hidden_layers=2)


@pytest.mark.long
def test_batch_decides_what_the_data_axis_is_for(two_layers: LlamaForCausalLM) -> None:
    """A batch of 64 is split on dp: each device then moves only weights. A batch of 1 cannot be, and rather than idle
    the axis takes a part of the heads and features: each layer's dp methods change."""
    one, many = (
        autopar.plan(two_layers, MESH, batch_of(size), cluster="h100", memory_limit=PLENTY) for size in (1, 64)
    )
    assert all(splits_batch(method) for _, method in layer_methods(many, 0))
    for key, method in layer_methods(one, 0):
        assert method != "I", f"{key} repeats the same work on all of dp"
        assert not splits_batch(method), key


@pytest.mark.long
def test_links_decide_which_axis_is_for_tensors(plenty: Plan) -> None:
    """Tensor parallelism moves activations of every layer, data parallelism only weights. At 70B widths and one
    sequence for each data rank the activations are more, so they go over the faster links: inside the node as h100 is,
    between the nodes where these are the faster ones."""
    h100 = CLUSTERS["h100"]
    swapped = replace(
        h100,
        name="swapped",
        inside=Link(h100.between.bandwidth, h100.inside.latency),
        between=Link(h100.inside.bandwidth, h100.between.latency),
    )
    model = llama("70B", num_hidden_layers=2)
    other = autopar.plan(model, MESH, batch_of(8), cluster=swapped, memory_limit=PLENTY)
    for plan, data, tensor in ((plenty, 0, 1), (other, 1, 0)):
        assert all(splits_batch(method) for _, method in layer_methods(plan, data)), plan.cluster
        for name in ("gate", "up"):
            assert methods(plan, f".{name}_proj/linear")[tensor] == "out", plan.cluster
        assert methods(plan, ".down_proj/linear")[tensor] == "in", plan.cluster


@pytest.mark.long
def test_links_too_slow_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """At 1 GB/s between nodes even reducing gradients takes longer than computing everything in each node: the nodes
    repeat each other's work, and the planner says so."""
    slow = replace(CLUSTERS["h100"], name="slow", between=Link(1e9, 10e-6))
    model = llama("70B", num_hidden_layers=2)
    plan = autopar.plan(model, MESH, batch_of(8), cluster=slow, memory_limit=PLENTY)
    assert {method for _, method in layer_methods(plan, 0)} == {"I"}
    assert "mesh axis 'dp' of size 8 splits nothing" in caplog.text
    assert all(splits_batch(method) for _, method in layer_methods(plan, 1))


@pytest.mark.slow
def test_memory_decides_what_is_gathered_again(large: Plan, plenty: Plan) -> None:
    """Without a limit nothing is made again; with one gathered weights are gathered again for the backward pass,
    although computation does not hide all of that."""
    assert program_of(plenty).stages[0].regathered == ()
    again = {row.name.split(".")[-2] for row in rows(large, "change", ".weight") if row.rerun}
    assert again >= {"q_proj", "o_proj"}
    exposed, once = (program_of(plan).seconds["exposed gathers"] for plan in (large, plenty))
    assert exposed > 1.05 * once, "of what is gathered once, as much is exposed whatever the number of layers"


@pytest.mark.long
def test_memory_decides_how_parameters_are_stored(two_layers: LlamaForCausalLM) -> None:
    """Inference on a batch: with room each data rank holds the weights of the layers whole, and nothing in them is
    communicated. With less they are stored in parts: slower, but it fits."""
    inputs = {**batch_of(8, 1024, labels=False), "use_cache": False}
    roomy, tight = (
        autopar.plan(two_layers, {"dp": 8}, inputs, objective="infer", cluster="h100", memory_limit=limit)
        for limit in (PLENTY, 1.2e9)
    )
    layers = [name for name in roomy.parameters if name.endswith("_proj.weight")]
    assert {roomy.parameters[name].layout["dp"] for name in layers} == {"R"}
    assert not [row for row in rows(roomy, "change", "") if row.name.startswith("model.layers.")]
    assert any(tight.parameters[name].layout["dp"].startswith("S(") for name in layers)
    assert seconds(tight) > seconds(roomy)
    assert sum(program_of(tight).memory.values()) <= 1.2e9


@pytest.mark.long
def test_size_decides_whether_splitting_pays() -> None:
    """128 tokens of width 64 are computed before a collective has started, so all devices repeat the work; of width
    8192 reading the weights takes longest, and each device reads its part of them."""
    inputs = batch_of(1, 128)
    sizes = {"intermediate_size": 256, "num_attention_heads": 8, "hidden_size": 64, "vocab_size": 1024}
    small = autopar.plan(llama("8B", num_hidden_layers=2, head_dim=8, **sizes), {"tp": 8}, inputs, cluster="h100")
    assert {method for _, method in layer_methods(small, 0)} == {"I"}
    assert communication(small) == 0
    wide = autopar.plan(llama("70B", num_hidden_layers=2, vocab_size=1024), {"tp": 8}, inputs, cluster="h100")
    assert "I" not in {method for _, method in layer_methods(wide, 0)}
    assert methods(wide, ".gate_proj/linear") == ("out",)


# --- always the same ---


@pytest.mark.long
def test_same_call_gives_the_same_proven_plan(two_layers: LlamaForCausalLM) -> None:
    """Traced anew, the text of a plan is the same. With enough memory the choice is proven optimal."""
    with mock.patch("autopar.models.info.capture", capture):
        first, second = (
            autopar.plan(two_layers, MESH, batch_of(8), cluster="h100", memory_limit=PLENTY) for _ in range(2)
        )
    assert first.to_json() == second.to_json()
    assert program_of(first).gap <= 1e-6
