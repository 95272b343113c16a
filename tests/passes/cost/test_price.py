"""The cost of ops under strategies."""

from dataclasses import replace
from math import prod

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from passes.cost.cluster import CLUSTERS, Cluster, Device, Link
from passes.cost.price import cover, op_seconds, seconds_alone, shares, update_seconds
from passes.cost.step_costs import StepCosts
from passes.ir.choices import Cover
from passes.ir.folded import Folded
from passes.ir.layout import P, R
from passes.ir.mesh import Mesh
from passes.ir.redistribution import RedistributionStep
from passes.rules import written_rule
from passes.rules.local_forms import LOCAL_FORMS
from passes.rules.strategies import combine, named_choices, op_context
from tests.passes.helpers import Apply, mesh_of
from tests.passes.planning import planning

# A byte a second, a multiplication in 1e-9 seconds, and nothing to start.
DEVICE = Device("d", {"float32": 1e9}, 1.0, 1e9, 1.0, 0.0, 0.0)
CLUSTER = Cluster("slow", DEVICE, 8, Link(1.0, 0.0), Link(1.0, 0.0))
# Memory and links cost nothing.
WIDE = replace(
    CLUSTER,
    device=replace(DEVICE, bandwidth=1e30, fill=100.0, depth=10.0),
    inside=Link(1e30, 0.0),
    between=Link(1e30, 0.0),
)
MESH = mesh_of(a=2, b=2)


def folded_of(module: nn.Module, **inputs: Tensor) -> Folded:
    """A module traced for training."""
    return planning(module, inputs, mesh_of(one=1), CLUSTER).folded


def cost(folded: Folded, kind: str, methods: tuple[str, ...], cluster: Cluster, mesh: Mesh) -> tuple[float, float]:
    """Seconds of the first op of `kind`, computed by `methods`."""
    op = next(op for op in folded.ops if op.kind == kind)
    context = op_context(op, written_rule(op, folded.types), folded.types, folded.flowing, set(), set())
    choices = named_choices(context, methods, mesh)
    assert choices is not None
    found = op_seconds(context, choices, combine(context, choices), cluster, mesh)
    return found.forward, found.backward


def test_products_have_the_shape_that_a_rank_sees() -> None:
    """16 x 32 over 64, split in rows and columns: 8 x 16 over 64 forward; the gradients sum over 16 and over 8."""
    folded = folded_of(nn.Linear(64, 32, bias=False), input=torch.ones(16, 64, requires_grad=True))

    def product(elements: int, summed: int) -> float:
        return 2 * (elements + 100) * (summed + 10) / 1e9

    forward, backward = cost(folded, "linear", ("d0", "out"), WIDE, MESH)
    assert forward == pytest.approx(product(8 * 16, 64))
    assert backward == pytest.approx(product(8 * 64, 16) + product(16 * 64, 8))
    forward, backward = cost(folded, "linear", ("in", "I"), WIDE, MESH)
    assert forward == pytest.approx(product(16 * 32, 32))
    assert backward == pytest.approx(product(16 * 32, 32) + product(32 * 32, 16))


@pytest.mark.parametrize(
    ("classes", "methods", "times"),
    [
        (128, ("R", "R"), 1),
        (125, ("R", "R"), 3),
        # Of 24 columns a rank has 6, which are 12 bytes.
        (24, ("out", "out"), 3),
        (24, ("d0", "d0"), 1),
    ],
)
def test_rows_begin_at_multiples_of_16_bytes_on_a_rank(classes: int, methods: tuple[str, ...], times: int) -> None:
    """Or products take three times as long."""
    cores = replace(WIDE, device=replace(WIDE.device, flops={"float32": 1e6, "bfloat16": 1e9}, fill=0.0, depth=0.0))
    unaligned = replace(cores, device=replace(cores.device, unaligned=1 / 3))
    product = nn.Linear(64, classes, bias=False, dtype=torch.bfloat16)
    folded = folded_of(product, input=torch.ones(16, 64, dtype=torch.bfloat16, requires_grad=True))
    expected, found = (cost(folded, "linear", methods, cluster, MESH) for cluster in (cores, unaligned))
    assert found == pytest.approx(tuple(times * seconds for seconds in expected))


@pytest.mark.long
def test_many_products_with_narrow_rows() -> None:
    """Heads of 108 elements are multiplied as fast as in float32, those of 112 as fast as tensor cores can."""
    cores = {"float32": 1e6, "bfloat16": 1e9}
    cluster = replace(WIDE, device=replace(WIDE.device, flops=cores, fill=0.0, depth=0.0, unaligned=1 / 3))

    def seconds(width: int) -> float:
        inputs = {name: torch.ones(2, 4, 16, width, dtype=torch.bfloat16, requires_grad=True) for name in ("x", "y")}
        folded = folded_of(Apply(lambda x, y: x @ y.transpose(2, 3)), **inputs)
        return cost(folded, "matmul", ("R", "R"), cluster, MESH)[0]

    flops = 2 * 2 * 4 * 16 * 16
    assert seconds(112) == pytest.approx(flops * 112 / 1e9)
    assert seconds(108) == pytest.approx(flops * 108 / 1e6)


def test_attention_of_a_part_of_the_heads() -> None:
    """Half of them has half of the multiplications and of the elements; width and length stay."""
    shape = (2, 4, 16, 8)
    inputs = {name: torch.ones(shape, requires_grad=True) for name in ("query", "key", "value")}
    module = Apply(lambda query, key, value: functional.scaled_dot_product_attention(query, key, value, is_causal=True))
    folded = folded_of(module, **inputs)
    cluster = replace(WIDE, device=replace(WIDE.device, attention=0.5, softmax=8.0))
    forward, backward = cost(folded, "scaled_dot_product_attention", ("heads", "I"), cluster, MESH)
    flops, elements = 2 * 2 * (2 * 2 * 16 * 16 * 8) / 2, 2 * 2 * 16 * 8
    assert forward == pytest.approx(flops / 0.5e9 * 2 * (1 + 100 * 8 / 256 / elements))
    assert backward == pytest.approx(2.5 * forward)


def test_the_width_of_values_is_in_one_product_of_two() -> None:
    """Every rank makes all scores: one of two products forward, and three of five backward."""
    shape = (2, 4, 16, 8)
    inputs = {name: torch.ones(shape, requires_grad=True) for name in ("query", "key", "value")}
    module = Apply(lambda query, key, value: functional.scaled_dot_product_attention(query, key, value))
    folded = folded_of(module, **inputs)
    cluster = replace(WIDE, device=replace(WIDE.device, fill=0.0, depth=0.0))
    whole = cost(folded, "scaled_dot_product_attention", ("R", "R"), cluster, MESH)
    found = cost(folded, "scaled_dot_product_attention", ("value_width", "value_width"), cluster, MESH)
    assert found == pytest.approx((whole[0] * (1 + 1 / 4) / 2, whole[1] * (3 + 2 / 4) / 5))
    # On a CPU no fused kernel takes unequal widths: the query, key and half of the value, the result, and four passes.
    slow = replace(CLUSTER, device=replace(DEVICE, flops={"float32": 1e30}, overlaps=False))
    passes = 4 * 2 * 4 * 16 * 16
    forward, _ = cost(folded, "scaled_dot_product_attention", ("value_width", "R"), slow, MESH)
    assert forward == 4 * (prod(shape) * 3 + passes)


def test_collectives_inside_a_form_are_communication(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of a softmax has a gradient, the maximum has none. Only where collectives overlap computation does that
    of the form hide a part of them."""
    folded = folded_of(Apply(lambda x: x.softmax(1)), x=torch.ones(8, 4, requires_grad=True))
    context = op_context(
        folded.ops[0], written_rule(folded.ops[0], folded.types), folded.types, folded.flowing, set(), set()
    )
    choices = named_choices(context, ("along", "I"), MESH)
    assert choices is not None
    found = op_seconds(context, choices, combine(context, choices), CLUSTER, MESH)
    each = StepCosts(CLUSTER, MESH).total([RedistributionStep(0, P, R, (8,), (8,))], 4)
    assert (found.forward_communication, found.backward_communication) == pytest.approx((2 * each, each))
    assert found.forward == 2 * 8 * 4 * 4 / 2
    form = LOCAL_FORMS["softmax"]
    monkeypatch.setattr(
        "passes.cost.forms.LOCAL_FORMS", {"softmax": replace(form, overlap=lambda about: 1 / about.ways)}
    )
    for overlaps in (True, False):
        cluster = replace(CLUSTER, device=replace(DEVICE, overlaps=overlaps))
        found = op_seconds(context, choices, combine(context, choices), cluster, MESH)
        hidden = found.forward / MESH.sizes[0] if overlaps else 0.0
        assert found.forward_communication == pytest.approx(max(0.0, 2 * each - hidden))


@pytest.mark.parametrize("methods", [("ring", "queries@2"), ("queries", "ring@2")])
def test_a_ring_beside_queries(methods: tuple[str, str]) -> None:
    """The busiest rank has the last quarter of the queries, whatever axis keys go around; these are halves, of which
    one comes, and goes back with its gradients."""
    inputs = {name: torch.ones(2, 4, 16, 8, requires_grad=True) for name in ("query", "key", "value")}
    module = Apply(lambda query, key, value: functional.scaled_dot_product_attention(query, key, value, is_causal=True))
    folded = folded_of(module, **inputs)
    op = folded.ops[0]
    context = op_context(op, written_rule(op, folded.types), folded.types, folded.flowing, set(), set())
    choices, alone = (named_choices(context, each, MESH) for each in (methods, ("queries", "queries@2")))
    assert choices is not None
    assert alone is not None
    assert shares(context.rule, choices, MESH.sizes) == shares(context.rule, alone, MESH.sizes) == (7 / 16, 7 / 16)
    slow = replace(CLUSTER, device=replace(DEVICE, overlaps=False))
    found = op_seconds(context, choices, combine(context, choices), slow, MESH)
    axis, held = methods.index("ring" if "ring" in methods else "ring@2"), 2 * (2 * 4 * 8 * 8) * 4
    each = StepCosts(slow, MESH).shift_seconds(axis, held)
    assert (found.forward_communication, found.backward_communication) == pytest.approx((each, 3 * each))


def test_a_lookup_reads_what_it_writes() -> None:
    """Of a table of 1000 rows it reads six, and the six indices; its gradient is a whole table."""
    folded = folded_of(nn.Embedding(1000, 4), input=torch.ones(6, dtype=torch.long))
    rows, indices, table = 6 * 4 * 4, 6 * 8, 1000 * 4 * 4
    forward, backward = cost(folded, "embedding", ("R", "R"), CLUSTER, MESH)
    assert forward == rows + indices + rows
    assert backward == pytest.approx(rows + indices + table)


def test_the_backward_pass_reads_what_was_saved() -> None:
    """A product of elements both factors, a sum none."""
    inputs = {name: torch.ones(8, 4, requires_grad=True) for name in ("x", "y")}
    folded = folded_of(Apply(lambda x, y: (x * y, x + y)), **inputs)
    size = 8 * 4 * 4 / 2
    assert cost(folded, "mul", ("d0", "I"), CLUSTER, MESH) == (3 * size, 5 * size)
    assert cost(folded, "add", ("d0", "I"), CLUSTER, MESH) == (3 * size, 3 * size)


def test_computation_covers_nothing_where_collectives_do_not_run_beside_it() -> None:
    """Else it covers as long as one device of all takes for its part."""
    folded = folded_of(nn.Linear(64, 32, bias=False), input=torch.ones(16, 64))
    alone = seconds_alone(folded.ops[0], folded.types, folded.flowing, {}, CLUSTER)
    found = cover(folded.ops, folded.types, folded.flowing, {}, CLUSTER, 4, 3, {})
    assert (found.forward, found.backward) == pytest.approx(tuple(3 / 4 * seconds for seconds in alone))
    waiting = replace(CLUSTER, device=replace(DEVICE, overlaps=False))
    assert cover(folded.ops, folded.types, folded.flowing, {}, waiting, 4, 3, {}) == Cover()
    assert not CLUSTERS["cpu"].device.overlaps
    assert CLUSTERS["h100"].device.overlaps


def test_updates_read_and_write() -> None:
    """A parameter, its gradient and two states: read all, write all but the gradient."""
    assert update_seconds(10.0, 2, CLUSTER) == 70.0
    assert update_seconds(10.0, 2, replace(CLUSTER, device=replace(DEVICE, streaming=0.5))) == 140.0
