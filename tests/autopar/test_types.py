"""Generated modules pass the type checker of `spmd_types`: what it finds by itself is what the plan says."""

import ast
import contextlib
import random
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from math import prod
from unittest import mock

import pytest
import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types._testing import fake_pg
from spmd_types.rulecheck import RuleCheckError, rulecheck
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from autopar.models.info import read_model
from autopar.options import Options
from autopar.planner import PlannedModel, plan_model
from autopar.request import make_request
from autopar.runtime.state import local_part
from autopar.testing import LiftFloat32, run_ranks
from passes.constrain import Constraints
from passes.ir.layout import Layout, Placement, S, digits, fits, local_major, parse_placement
from passes.ir.mesh import Mesh
from passes.ir.redistribution import COLLECTIVES
from tests.autopar.comparing import marked
from tests.autopar.solving import solved_by
from tests.autopar.test_random_plans import random_solution
from tests.autopar.typed import Call, Report, SpmdTypeError, Typed, collectives, layouts, operators, run_typed
from tests.autopar.without_engine import without_engine
from tests.models import MODELS, tokens

# So large that no split leaves a single entry of a dim: what a dim of size 1 stands for after a reshape, its size does
# not tell.
_WIDE = {"hidden_size": 64, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 8}
_SIZES = {**dict.fromkeys(MODELS, _WIDE), "gpt2": {"n_embd": 64, "n_head": 8}}
_NAMES = {1: ("tp",), 2: ("dp", "tp")}


def _mesh(sizes: Sequence[int]) -> dict[str, int]:
    return dict(zip(_NAMES[len(sizes)], sizes, strict=True))


def _compiled(
    name: str,
    sizes: tuple[int, ...],
    seed: int | None = None,
    *,
    layers: int = 2,
    padding: bool = False,
    constraints: Constraints | None = None,
    outputs: str | None = None,
    vocabulary: int = 64,
    dtype: torch.dtype = torch.float64,
) -> tuple[nn.Module, dict[str, Tensor], PlannedModel]:
    """A model, its inputs and its program: under the best plan for free links, or under a random one."""
    model = MODELS[name](num_hidden_layers=layers, vocab_size=vocabulary, **_SIZES[name]).to(dtype)
    inputs = tokens(batch=8, length=8, padding=padding)
    options = Options(cluster="ideal", memory_limit=1e15, constraints=constraints, outputs=outputs)
    request = make_request(_mesh(sizes), options)
    info = read_model(model, inputs, request)
    if seed is None:
        return model, inputs, plan_model(model, info, request)
    with solved_by(partial(random_solution, random.Random(seed))):
        return model, inputs, plan_model(model, info, request)


def _run(model: nn.Module, compiled: PlannedModel, **options: object) -> Report:
    """Under the checker, without values: one process stands for the first of all ranks."""
    mesh = compiled.plan.mesh
    with fake_pg(prod(mesh.values())):
        return run_typed(
            model, compiled, init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh)), **options
        )


# --- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("sizes", [pytest.param((2,), marks=pytest.mark.slow), (2, 2)])
@pytest.mark.parametrize("name", marked(MODELS, {"llama"}))
def test_best_plans(name, sizes):
    model, _, compiled = _compiled(name, sizes)
    report = _run(model, compiled)
    assert len(report.proved) > 90
    # What the checker cannot say: gpt2's fused projections, and a mask that is expanded to a part of the batch.
    assert len(report.told) <= {"gpt2": 10, "gemma2": 2}.get(name, 0), report.told
    assert set(report.gradients) == {name for name, _ in model.named_parameters()}
    assert None not in report.gradients.values()


@pytest.mark.long
@pytest.mark.parametrize(
    "methods", [{"dp": "ring", "tp": "queries"}, pytest.param({"dp": "queries", "tp": "ring"}, marks=pytest.mark.slow)]
)
def test_rings_beside_queries(methods):
    """Keys are as if gathered over the ring's axis; the checker is told digits that are not the first ones."""
    model, _, compiled = _compiled(
        "llama", (2, 2), layers=1, constraints={"@scaled_dot_product_attention": {"method": methods}}
    )
    assert "queries=((" in compiled.programs["train"].source
    report = _run(model, compiled)
    assert len(report.told) <= 2, report.told
    assert None not in report.gradients.values()


@pytest.mark.long
@pytest.mark.parametrize(
    "methods",
    [
        {"dp": "tokens", "tp": "classes"},
        pytest.param({"dp": "classes_at_once", "tp": "tokens"}, marks=pytest.mark.slow),
    ],
)
def test_losses_in_chunks(methods):
    """Gradients of hidden states are pending sums over classes, those of the head over tokens."""
    options = {"constraints": {"@linear_cross_entropy": {"method": methods}}, "outputs": "scalars"}
    # In float64 the model would compute the loss in less precision than logits, which stays as it is written.
    model, _, compiled = _compiled("llama", (2, 2), layers=1, vocabulary=256, dtype=torch.float32, **options)
    assert "linear_cross_entropy(" in compiled.programs["train"].source
    report = _run(model, compiled)
    assert report.told == []
    assert None not in report.gradients.values()


def _check_random(name: str, sizes: tuple[int, ...], seed: int, padding: bool) -> None:
    model, _, compiled = _compiled(name, sizes, seed, padding=padding)
    report = _run(model, compiled)
    assert len(report.told) <= 0.15 * (len(report.told) + len(report.proved)), report.told


@pytest.mark.long
@pytest.mark.parametrize("name", marked(MODELS, {"gpt2"}))
def test_random_plans(name):
    _check_random(name, (2, 2), seed=0, padding=name != "gpt2")


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2)])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(1, 21))
def test_more_random_plans(name, seed, sizes):
    _check_random(name, sizes, seed, padding=seed % 2 == 0)


# --- the same values -------------------------------------------------------------------------------------------------


class _OverGloo:
    """`torch.distributed` with what `spmd_types` calls and gloo lacks."""

    def __getattr__(self, name: str) -> object:
        return getattr(dist, name)

    def all_to_all(self, received: list[Tensor], sent: list[Tensor], group: dist.ProcessGroup) -> None:
        """`received[i]` from rank i, `sent[i]` to it."""
        flat = torch.cat([part.reshape(-1) for part in sent])
        result = torch.empty_like(flat)
        dist.all_to_all_single(result, flat, group=group)
        for place, part in zip(received, result.chunk(len(received)), strict=True):
            place.copy_(part.view_as(place))


def _off(model: nn.Module, inputs: dict[str, Tensor], compiled: PlannedModel) -> list[str]:
    """On a rank: outputs and gradients of the typed module that are not what the model gives."""
    spmd.set_dist(_OverGloo())
    sizes = compiled.plan.mesh
    device_mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    mesh, coordinate = Mesh(tuple(sizes), tuple(sizes.values())), device_mesh.get_coordinate()
    report = run_typed(model, compiled, device_mesh, inputs)
    with LiftFloat32(torch.float64):
        expected = model(**inputs, use_cache=False)
    expected.loss.backward()
    wrong = []

    def hold(what: str, got: Tensor, whole: Tensor, layout: Layout) -> None:
        part = local_part(whole.detach(), layout, coordinate, mesh)
        error = float((got.detach() - part).abs().max()) / float(whole.detach().abs().max())
        if got.shape != part.shape or not error <= 1e-9:
            wrong.append(f"{what} is off by {error:.1e}")

    for item, value in zip(compiled.programs["train"].outputs, report.outputs, strict=True):
        hold(item.name, value, expected[item.name], item.layout)
    for name, parameter in model.named_parameters():
        hold(f"gradient of {name}", report.gradients[name], parameter.grad, compiled.stored[name])
    return wrong


def _check_values(name: str, sizes: tuple[int, ...], seed: int | None) -> None:
    with LiftFloat32(torch.float64):
        model, inputs, compiled = _compiled(name, sizes, seed)
    ranks = prod(sizes)
    assert run_ranks(_off, ranks, model, inputs, compiled) == [[]] * ranks


@pytest.mark.long
def test_the_typed_module_computes_the_same():
    """Through the collectives of `spmd_types`, outputs and gradients are those of the model: each of ours stands for
    the one that it is typed as, forward and backward."""
    _check_values("gpt2", (2,), 0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), [(name, seed) for name in ("llama", "gpt2", "gemma2") for seed in (None, 1)])
def test_more_typed_modules_compute_the_same(name, seed):
    _check_values(name, (2, 2), seed)


# --- what is wrong is refused ----------------------------------------------------------------------------------------


def _changed(source: str) -> Iterator[tuple[int, str, str]]:
    """All sources with one collective left out or with another placement, as line, what was done, and source.

    A collective whose placements are changed is the one that goes from the one placement to the other.
    """
    text = source.encode()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.expr) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def written(node: ast.expr) -> str:
        start, end = span(node)
        return text[start:end].decode()

    def instead(node: ast.expr, other: str) -> str:
        start, end = span(node)
        return "from autopar.runtime import *\n" + (text[:start] + other.encode() + text[end:]).decode()

    names = set(COLLECTIVES.values())
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in names:
            continue
        operand, axis = map(written, node.args)
        placements = {
            item.arg: parse_placement(written(item.value)) for item in node.keywords if item.arg in ("src", "dst")
        }
        yield node.lineno, f"{written(node)} left out", instead(node, operand)
        for which, other in product(placements, ("R", "I", "P", "S(0)", "S(1)")):
            new = {**placements, which: parse_placement(other)}
            name = COLLECTIVES.get((new["src"].kind, new["dst"].kind))
            if new == placements or name is None:
                continue
            call = f"{name}({operand}, {axis}, src={new['src']}, dst={new['dst']})"
            yield node.lineno, f"{written(node)} -> {call}", instead(node, call)


def _survivors(sizes: tuple[int, ...], every: int, engine: bool) -> tuple[int, list[str]]:
    """The number of changes that were tried on llama, and those that the checker lets pass. It is not told the layouts
    in the comments, only those of inputs, parameters and outputs.

    Collectives of an engine are not in the source; without one the generated code gathers parameters itself.
    """
    with contextlib.nullcontext() if engine else without_engine():
        model, _, compiled = _compiled("llama", sizes, layers=1)
    source = compiled.programs["train"].source
    assert ("gathered(" in source) == engine
    alike = _run(model, compiled, comments=False).alike
    tried, passed = 0, []
    for number, (line, what, text) in enumerate(_changed(source)):
        # Where no gradient flows R and I say the same.
        left, _, right = what.replace("=I", "=R").partition(" -> ")
        if number % every or (line in alike and _placements(left) == _placements(right)):
            continue
        tried += 1
        try:
            _run(model, compiled, source=text, comments=False)
        except SpmdTypeError:
            continue
        except (RuntimeError, IndexError, ValueError):
            # The shapes do not fit, which shows before the types are looked at.
            continue
        passed.append(f"line {line}: {what}")
    return tried, passed


def _placements(call: str) -> list[str]:
    return [call.rpartition(f"{which}=")[2].partition(",")[0].rstrip(")") for which in ("src", "dst")]


@pytest.mark.long
def test_wrong_collectives_are_refused():
    tried, passed = _survivors((2,), every=4, engine=False)
    assert tried > 25
    assert passed == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "engine", "least"), [((2,), False, 100), ((2, 2), False, 250), ((2,), True, 60), ((2, 2), True, 220)]
)
def test_all_wrong_collectives_are_refused(sizes, engine, least):
    tried, passed = _survivors(sizes, every=1, engine=engine)
    assert tried > least
    assert passed == []


@pytest.mark.parametrize(
    ("layout", "other", "message"),
    [("tp S(2)", "tp S(1)", r"tp S\(1\): the local shape is"), ("P", "I", r" I: the checker finds \(P,\)")],
)
def test_wrong_comments_are_refused(layout, other, message):
    model, _, compiled = _compiled("llama", (2,), layers=1)
    source = compiled.programs["train"].source
    assert f"] {layout}  modeling" in source
    with pytest.raises(SpmdTypeError, match=message):
        _run(model, compiled, source=source.replace(f"] {layout}  modeling", f"] {other}  modeling", 1))


# --- what we register ------------------------------------------------------------------------------------------------


def _normal(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)), dtype=torch.float64)


def _whole_numbers(end: int, *sizes: int) -> Tensor:
    return torch.randint(0, end, sizes, generator=torch.Generator().manual_seed(0))


def _masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def _reshaped(*dims: str) -> Call:
    """`Tensor.reshape` to dims that are products of those of a [a, b, c], or "c/2", "2"."""

    def sizes(x: Tensor) -> list[int]:
        a, b, c = x.shape
        return [eval(dim.replace("/", "//"), {"a": a, "b": b, "c": c}) for dim in dims]

    return Call("reshape", lambda x: x.reshape(sizes(x)), lambda x: operators.reshape(*sizes(x)).rule(x))


# Operators, global operands, and which of the enumerated placements are allowed besides all R and all I.
_REGISTERED = {
    "linear": (
        operators.linear(), [_normal(4, 6, 8), _normal(10, 8)],
        ["S(0) R", "S(1) R", "S(2) S(1)", "R S(0)", "P R", "R P"],
    ),
    "linear with bias": (
        operators.linear(), [_normal(4, 6, 8), _normal(10, 8), _normal(10)], ["S(0) R R", "S(1) R R", "R S(0) S(0)"],
    ),
    "addmm": (operators.addmm(), [_normal(10), _normal(4, 8), _normal(8, 10)], ["R S(0) R", "S(0) R S(1)"]),
    "matmul": (
        operators.matmul(), [_normal(4, 1, 6, 8), _normal(4, 12, 8, 10)],
        ["S(0) S(0)", "S(2) R", "S(3) S(2)", "R S(1)", "R S(3)", "P R", "R P"],
    ),
    "embedding": (
        operators.embedding(), [_whole_numbers(6, 4, 8), _normal(6, 10)], ["S(0) R", "S(1) R", "R S(1)", "R P"],
    ),
    "cross_entropy": (operators.cross_entropy(reduction="sum"), [_normal(4, 6), _whole_numbers(6, 4)], ["S(0) S(0)"]),
    "causal attention": (
        operators.attention(_causal, rows=False), [_normal(4, 12, 8, 10), _normal(4, 6, 8, 10), _normal(4, 6, 8, 14)],
        ["S(0) S(0) S(0)", "R R S(3)", "R R P"],
    ),
    "masked attention": (
        operators.attention(_masked, rows=True),
        [_normal(4, 6, 8, 10), _normal(4, 6, 12, 10), _normal(4, 6, 12, 14), _normal(4, 1, 8, 12)],
        ["S(0) S(0) S(0) S(0)", "S(1) S(1) S(1) R", "S(2) R R S(2)", "R R S(3) R", "R R P R"],
    ),
    "to": (operators.cast(torch.float64), [_normal(4, 6)], ["S(0)", "S(1)", "P"]),
    "pad": (operators.pad((0, 1)), [_normal(4, 6)], ["S(0)"]),
    "slice": (operators.index((slice(None), slice(1, 3))), [_normal(4, 6, 8)], ["S(0)", "S(2)", "P"]),
    "select": (operators.index((slice(None), 2)), [_normal(4, 6, 8)], ["S(0)", "S(2)", "P"]),
    "reshape, flattened": (_reshaped("a * b", "c"), [_normal(4, 6, 8)], ["S(0)", "S(2)", "P"]),
    "reshape, parted": (_reshaped("a", "b", "c / 2", "2"), [_normal(4, 6, 8)], ["S(0)", "S(1)", "S(2)", "P"]),
    "reshape, flattened behind": (_reshaped("a", "b * c"), [_normal(4, 6, 8)], ["S(0)", "S(1)", "P"]),
}  # fmt: skip


@pytest.mark.parametrize("name", _REGISTERED)
def test_registered_rules(name):
    """`spmd_types`' own check of a rule: it tries placements, and where the rule allows one, what the parts give, put
    together as the rule says, must be what the whole gives."""
    call, operands, allowed = _REGISTERED[name]
    # Its random numbers are made by a kernel that torch has for accelerators alone.
    with mock.patch("torch.func._random", None, create=True):
        report = rulecheck(Typed, (call, *operands))
    found = {" ".join(repr(item["shard"]) for item in placement.values()) for placement in report.checked}
    every = len(operands)
    assert found == {*allowed, " ".join("R" * every), " ".join("I" * every)}


@pytest.mark.parametrize("call", [operators.linear(), operators.addmm()])
def test_the_bias_of_a_split_sum_is_pending(call):
    split = {"first": {"tp": spmd.S(1)}, "second": {"tp": spmd.S(1)}, "third": {"tp": spmd.P}}
    operands = [_normal(4, 8), _normal(10, 8), _normal(10)]
    if call.name == "addmm":
        split = {"first": {"tp": spmd.P}, "second": {"tp": spmd.S(1)}, "third": {"tp": spmd.S(0)}}
        operands = [_normal(10), _normal(4, 8), _normal(8, 10)]
    whole = "third" if call.name == "linear" else "first"
    with mock.patch("torch.func._random", None, create=True):
        rulecheck(Typed, (call, *operands), split, mesh={"tp": 2})
        with pytest.raises(SpmdTypeError, match="jointly linear"):
            rulecheck(Typed, (call, *operands), {**split, whole: {"tp": spmd.R}}, mesh={"tp": 2})


def test_a_wrong_rule_is_found():
    softmax = Call("softmax", lambda x: x.softmax(-1), lambda x: spmd.rules.einsum("ab->ab", x))
    with mock.patch("torch.func._random", None, create=True), pytest.raises(RuleCheckError, match="S\\(1\\)"):
        rulecheck(Typed, (softmax, _normal(4, 6)))


def test_gradients_of_registered_operators():
    call = operators.linear()
    x, weight, bias = (_normal(*sizes).requires_grad_() for sizes in ((4, 8), (10, 8), (10,)))
    assert torch.autograd.gradcheck(lambda *operands: Typed.apply(call, *operands), (x, weight, bias))


# --- placements and types ---------------------------------------------------------------------------------------------


def _layouts(mesh: Mesh, shape: tuple[int, ...]) -> Iterator[Layout]:
    placements = [*map(parse_placement, "RIP"), *(S(dim, major) for dim in range(len(shape)) for major in (1, 2, 4))]
    for layout in product(placements, repeat=len(mesh.names)):
        if fits(shape, layout, mesh):
            yield layout


def test_layouts_survive_the_checker():
    """The annotation of a tensor is read back."""
    mesh = Mesh(("dp", "tp"), (2, 2))
    with fake_pg(4):
        device_mesh = init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names)
        with spmd.set_current_mesh(device_mesh):
            for layout in _layouts(mesh, (8, 16)):
                tensor = layouts.annotate(torch.empty(8, 16, device="meta"), layout, mesh)
                assert layouts.layout_of(tensor, mesh) == layout
                assert layouts.is_located(tensor) == (not _has_middle(layout, mesh))


def _has_middle(layout: Layout, mesh: Mesh) -> bool:
    """Whether something of a dim that is not split is more significant than a split of it."""
    for dim in range(2):
        taken = 1
        for major, size, _ in digits(layout, dim, mesh):
            if major != taken:
                return True
            taken *= size
    return False


def test_majors_that_ranks_see_are_told_apart():
    """From what a rank sees of a split, and the other splits, follows what it is in the whole tensor."""
    mesh = Mesh(("dp", "cp", "tp"), (2, 2, 2))
    tried = 0
    for layout in _layouts(mesh, (32,)):
        for axis, placement in enumerate(layout):
            if placement.kind == "S":
                others = (*layout[:axis], parse_placement("R"), *layout[axis + 1 :])
                seen = Placement("S", placement.dim, local_major(placement, others, mesh))
                assert collectives.whole_placement(seen, others, mesh, axis) == placement
                tried += 1
    assert tried > 100
