"""Rules that are found by running ops on shards, and plans that use them."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.discover import discover
from autopar.testing import compare_on_mesh, run_ranks
from passes.ir.arguments import Ref, find_overload, freeze
from passes.ir.layout import I, P, R, S
from passes.ir.program import Op, TensorType
from passes.ir.rule import Role, Rule
from passes.rules.strategies import split


@torch.library.custom_op("autopar_tests::running_product", mutates_args=())
def running_product(x: Tensor, scale: Tensor) -> Tensor:
    """Sums along the last dim of what is scaled: an operator that no rule speaks for."""
    return (x * scale).cumsum(-1)


@running_product.register_fake
def _(x: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, scale = ctx.saved_tensors
    back = gradient.flip(-1).cumsum(-1).flip(-1)
    return back * scale, (back * x).sum(tuple(range(x.dim() - 1)))


running_product.register_autograd(_backward, setup_context=_keep)


def _found(target: str, *arguments: object, **types: TensorType) -> Rule | None:
    """The rule found for a call of `target`; tensors among the arguments are named in `types`."""
    schema = find_overload(target)._schema.arguments
    given = [Ref(item) if isinstance(item, str) and item in types else item for item in arguments]
    values = {
        item.name: freeze(given[place] if place < len(given) else item.default_value)
        for place, item in enumerate(schema)
    }
    tensors = {name: torch.zeros((), dtype=type.dtype).expand(type.shape) for name, type in types.items()}
    meta = [tensors[item.name].to("meta") if isinstance(item, Ref) else item for item in given]
    result = find_overload(target)(*meta)
    results = [result] if isinstance(result, Tensor) else list(result)
    names = tuple(f"%y{place}" for place in range(len(results)))
    every = {**types, **{n: TensorType(tuple(r.shape), r.dtype) for n, r in zip(names, results, strict=True)}}
    return discover(Op(target, values, names), every)


def _placements(rule: Rule) -> set[tuple[tuple[object, ...], tuple[object, ...]]]:
    """The placements of operands and results on an axis of two, for every factor that is not whole."""
    choices = [split(rule, name, 1, 2) for name, factor in rule.factors.items() if factor.role is not Role.WHOLE]
    return {(choice.operands, choice.results) for choice in choices if choice is not None}


FLOAT, WHOLE = torch.float32, torch.int64


def test_linear() -> None:
    """Rows, columns, the sum with its bias pending, and what passes pending sums; sizes are those of the op, although
    it ran on small ones."""
    rule = _found(
        "aten.linear.default", "x", "w", "b",
        x=TensorType((512, 4096), FLOAT), w=TensorType((11008, 4096), FLOAT), b=TensorType((11008,), FLOAT),
    )  # fmt: skip
    assert rule is not None
    assert _placements(rule) == {
        ((S(0), R, R), (S(0),)),
        ((R, S(0), S(0)), (S(1),)),
        ((S(1), S(1), P), (P,)),
    }
    assert set(rule.linear) == {frozenset({0, 2}), frozenset({1, 2})}
    assert {factor.size for factor in rule.factors.values()} == {512, 4096, 11008}


def test_look_up() -> None:
    """Indices and columns of a table; its rows would need a local form, which is not found."""
    rule = _found("aten.embedding.default", "w", "i", w=TensorType((36, 24), FLOAT), i=TensorType((8, 18), WHOLE))
    assert rule is not None
    assert _placements(rule) == {((R, S(0)), (S(0),)), ((R, S(1)), (S(1),)), ((S(1), R), (S(2),))}


def test_several_results() -> None:
    """Each result is told of its own: what is reduced stays whole."""
    rule = _found("aten.max.dim", "x", 1, x=TensorType((12, 8, 18), FLOAT))
    assert rule is not None
    assert _placements(rule) == {((S(0),), (S(0), S(0))), ((S(2),), (S(1), S(1)))}
    assert rule.linear == ()


def test_results_that_are_pieces() -> None:
    """A dim may be shorter in the result: the factor is what both are made of."""
    rule = _found("aten.avg_pool1d.default", "x", [2], x=TensorType((4, 8, 64), FLOAT))
    assert rule is not None
    assert ((S(2),), (S(2),)) in _placements(rule)


@pytest.mark.parametrize(
    ("target", "arguments"),
    [("aten.argsort.default", ("x",)), ("aten.flip.default", ("x", [0])), ("aten.bernoulli.default", ("x",))],
)
def test_nothing_is_found(target: str, arguments: tuple[object, ...]) -> None:
    """No rule is found if every dim must stay whole or the operator draws random numbers."""
    assert _found(target, *arguments, x=TensorType((24,), FLOAT)) is None


def test_custom_operator() -> None:
    """An operator of somebody's own."""
    x, scale = TensorType((8, 12, 36), FLOAT), TensorType((36,), FLOAT)
    rule = _found("autopar_tests.running_product.default", "x", "s", x=x, s=scale)
    assert rule is not None
    assert _placements(rule) == {((S(0), R), (S(0),)), ((S(1), R), (S(1),))}
    assert set(rule.linear) == {frozenset({0}), frozenset({1})}
    assert {item.index for item in rule.saved} == {0, 1}


class Running(nn.Module):
    """Two layers with the operator in between."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, 48)
        self.scale = nn.Parameter(torch.rand(48) + 0.5)
        self.down = nn.Linear(48, 24)

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        return self.down(running_product(self.up(x), self.scale)).square().mean()


INPUTS = {"x": torch.randn(8, 6, 24, dtype=torch.float64)}


def test_a_plan_names_what_was_discovered(caplog: pytest.LogCaptureFixture) -> None:
    """The op is whole without discovery; with it, it is split, said so where the plan is printed, and what was found is
    logged. The plan is replayed with what was discovered."""
    plain = autopar.plan(Running().double(), {"dp": 2}, INPUTS, cluster="ideal")
    assert plain.whole_ops == ("/running_product",)
    assert plain.discovered == ()
    found = autopar.plan(Running().double(), {"dp": 2}, INPUTS, cluster="ideal", discover=True)
    assert found.whole_ops == ()
    assert found.discovered == ("/running_product",)
    assert "split by discovered rules (found by running the ops, which is no proof): /running_product" in found.table()
    assert "no sharding rule speaks for running_product" in caplog.text
    rows = [row for block in found.programs["train"].stages[0].blocks for row in block.rows]
    assert [row.before for row in rows if row.name == "/running_product"] == [("dp S(0)", "R")]
    assert type(found).from_json(found.to_json()) == found
    again = autopar.plan(Running().double(), {"dp": 2}, INPUTS, cluster="ideal", plan=found)
    assert again.discovered == found.discovered
    assert again.programs["train"].stages == found.programs["train"].stages


class Weighed(Running):
    """The same, whose output is called loss."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """The loss."""
        return {"loss": super().forward(x)}


def test_discovered_rules_hold_in_a_micro_batch() -> None:
    """A rule is found at the sizes of the batch; the op of a micro-batch, which has others, is split by it too."""
    options = {"cluster": "ideal", "discover": True, "micro_batches": 2}
    found = autopar.plan(Weighed().double(), {"dp": 2}, INPUTS, **options)
    assert found.programs["train"].micro_batches == 2
    assert found.whole_ops == ()
    assert found.discovered == ("/running_product",)
    rows = [row for block in found.programs["train"].stages[0].blocks for row in block.rows]
    assert ("dp S(0)", "R") in [row.before for row in rows if row.name == "/running_product"]
    again = autopar.plan(Weighed().double(), {"dp": 2}, INPUTS, cluster="ideal", plan=found)
    assert again.discovered == found.discovered
    assert again.programs["train"].stages == found.programs["train"].stages


def _compared() -> list[tuple[float, tuple[str, ...]]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for kind, more in ((Running, {}), (Weighed, {"micro_batches": 2})):
        torch.manual_seed(0)
        model = kind().double()
        plan = autopar.plan(model, mesh, INPUTS, cluster="ideal", discover=True, **more)
        comparison = compare_on_mesh(model, mesh, INPUTS, cluster="ideal", discover=True, **more)
        found.append((comparison.worst[1], plan.discovered))
    return found


@pytest.mark.slow
def test_it_computes_the_same() -> None:
    """On four ranks, with all its gradients, in one micro-batch and in two."""
    for found in run_ranks(_compared, 4):
        for worst, discovered in found:
            assert worst < 1e-12
            assert discovered == ("/running_product",)


def test_letters_of_equal_results() -> None:
    """No rule says that a result is the same on all ranks though its operands are not: that takes a collective."""
    rule = _found("aten.amax.default", "x", [1], x=TensorType((8, 12), FLOAT))
    assert rule is not None
    assert all(I not in results for _, results in _placements(rule))
