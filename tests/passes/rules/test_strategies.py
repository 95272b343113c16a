"""Strategies: which there are, how they are named, and how splits travel from op to op."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from passes.ir.layout import I, Layout, P, R, S, fits
from passes.ir.mesh import Mesh
from passes.ir.program import Op
from passes.ir.rule import Method, Role, Rule
from passes.rules.following import begun_tokens, following, ranks_by_start
from passes.rules.propagation import propagate
from passes.rules.strategies import (
    Choice,
    axes_for_stripes,
    combine,
    is_uneven,
    named_choices,
    op_context,
    op_strategies,
    parse_choice,
    split,
)
from tests.passes.helpers import mesh_of
from tests.passes.planning import planning
from tests.passes.rules.one_op import digits_of, one_op
from tests.passes.rules.samples import Sample, samples

ATTENTION = tuple(torch.ones(2, 4, 8, 16) for _ in range(3))
LINEAR = Sample("aten.linear.default", (torch.ones(4, 6, 12), torch.ones(8, 12), torch.ones(8)), {})


def test_linear_has_all_the_known_splits() -> None:
    """Data, sequence, column and row parallel, and pending sums of input or weight, each with its layouts."""
    found = {
        strategy.methods[0]: (*strategy.operands, *strategy.results)
        for strategy in one_op(LINEAR).strategies(mesh_of(a=2))
    }
    expected: dict[str, tuple[Layout, ...]] = {
        "I": ((I,), (I,), (I,), (I,)),
        "R": ((R,), (R,), (R,), (R,)),
        "d0": ((S(0),), (R,), (R,), (S(0),)),
        "d1": ((S(1),), (R,), (R,), (S(1),)),
        "out": ((R,), (S(0),), (S(0),), (S(2),)),
        "in": ((S(2),), (S(1),), (P,), (P,)),
        "P(0, 2)": ((P,), (R,), (P,), (P,)),
        "P(1, 2)": ((R,), (P,), (P,), (P,)),
    }
    assert {name: found[name] for name in expected} == expected
    assert {name.partition("@")[0] for name in found} == set(expected)


def test_allowed_methods_keep_where_digits_begin() -> None:
    """Of each strategy the tokens allow itself, however many axes take the digits of one factor, and of the splits of
    that factor only those that begin where its own do. A token without a major allows all."""
    one, mesh = one_op(LINEAR), mesh_of(a=2, b=3, c=2)
    digits = {2: [("in", 1), ("in", 6), ("out", 1)], 3: [("in", 1), ("in", 2), ("out", 1)]}
    context = op_context(one.op, one.rule, one.folded.types, one.folded.flowing, {"x1", "x2"}, set())
    every = op_strategies(context, digits, mesh)
    assert begun_tokens(("in", "in@2", "in@6"), mesh.sizes) == [{"in@1"}, {"in@1", "in@2"}, {"in@1", "in@2", "in@6"}]
    for strategy in every:
        tokens = begun_tokens(strategy.methods, mesh.sizes)
        allowed = op_strategies(context, digits, mesh, tokens)
        assert strategy in allowed
        free = op_strategies(context, digits, mesh, [None, tokens[1], tokens[2]])
        assert (
            {each.operands for each in allowed} <= {each.operands for each in free} < {each.operands for each in every}
        )
    anywhere = op_strategies(context, digits, mesh, [{"in"}, {"R"}, {"I"}])
    assert {strategy.methods[0] for strategy in anywhere} == {"in", "in@6"}
    front = op_strategies(context, digits, mesh, [{"in@1"}, {"R"}, {"I"}])
    assert {strategy.methods[0] for strategy in front} == {"in"}


def test_parameters_are_no_pending_sums() -> None:
    """A parameter is never a pending sum by itself, although its product would pass one."""
    one = one_op(LINEAR)
    context = op_context(one.op, one.rule, one.folded.types, one.folded.flowing, {"x1", "x2"}, set())
    methods = {strategy.methods[0] for strategy in op_strategies(context, {2: []}, mesh_of(a=2))}
    assert methods == {"I", "R", "P(0, 2)"}


def test_ops_without_a_rule_are_whole() -> None:
    """Nothing of them is split."""
    sample = Sample("aten.cholesky_inverse.default", (torch.eye(4),), {})
    one = one_op(sample)
    assert one.rule is None
    assert {strategy.methods for strategy in one.strategies(mesh_of(a=2, b=2))} == {
        (first, second) for first in "IR" for second in "IR"
    }


def _attention_with_a_ring() -> tuple[Op, Rule]:
    """Attention whose rule has one method more, which splits queries and keys at once."""
    one = one_op(Sample("aten.scaled_dot_product_attention.default", ATTENTION, {"is_causal": True}))
    assert one.rule is not None
    return one.op, replace(one.rule, joint={"ring": Method(("queries", "keys"), "blockwise_attention", Role.FREE)})


def test_a_method_splits_several_factors_at_once() -> None:
    """Every tensor that carries one of them is split along it; a factor that may not be split alone may be in one."""
    _, rule = _attention_with_a_ring()
    assert split(rule, "keys", 1, 2) is None
    choice = split(rule, "ring", 1, 2)
    assert choice == Choice("ring", (S(2), S(2), S(2)), (S(2),), ("queries", "keys"), 1, "blockwise_attention")
    assert split(rule, "ring", 1, 16) is None, "fewer keys than parts"
    both = replace(rule, joint={"odd": Method(("queries", "width"), "", Role.FREE)})
    assert split(both, "odd", 1, 2) is None, "a tensor carries two of the factors"


def test_methods_of_several_factors_travel() -> None:
    """Attention begins with them, and takes splits of queries over for them, too."""
    op, rule = _attention_with_a_ring()
    (digits,), placements = propagate([(op, rule)], [], {}, 2)
    assert ("ring", 1) in digits
    assert S(2) in placements[op.operands[1]]
    (digits,), _ = propagate([(op, rule)], [], {op.operands[0]: [S(2, 2)]}, 2)
    assert ("ring", 2) in digits


def test_stripes_are_offered_where_that_is_asked_for() -> None:
    """Of methods in stripes, to all ops that they reach; work is uneven where such a factor is split in order."""
    op, rule = _attention_with_a_ring()
    striped = replace(rule, joint={"ring": replace(rule.joint["ring"], in_stripes=True)})
    for own, asked, offered in ((striped, True, True), (striped, False, False), (rule, True, False)):
        (digits,), placements = propagate([(op, own)], [], {}, 2, stripes_over=(2,) if asked else ())
        assert (("ring", 4) in digits) == offered
        assert (S(2, 4) in placements[op.operands[0]]) == offered
    assert [is_uneven(striped, [name]) for name in ("queries", "ring", "ring@4", "heads", "R")] == [1, 1, 0, 0, 0]
    assert not is_uneven(rule, ["queries"])
    assert axes_for_stripes(striped, ["queries", "heads", "ring@4", "R"]) == (0, 2)


def test_ranks_whose_digits_follow_each_other() -> None:
    """By the major that they begin at: stripes over two axes together begin at one."""
    assert ranks_by_start(["ring@4", "queries@8"], (2, 3), (0, 1)) == {4: 6}
    assert ranks_by_start(["ring@4", "heads", "queries"], (2, 5, 3), (0, 2)) == {4: 2, 1: 3}


def test_digits_may_begin_at_several_majors() -> None:
    """On axes of 2, 8 and 4 the digits at 1, 2 and 16 all begin at 1, or the last two at 2."""
    tokens = begun_tokens(("d0", "d0@2", "d0@16"), (2, 8, 4))
    assert tokens == [{"d0@1"}, {"d0@1", "d0@2"}, {"d0@1", "d0@2", "d0@16"}]


def test_joint_methods_do_not_take_the_place_of_digits() -> None:
    """An op has as many digits of its factors with a joint method as without."""
    op, rule = _attention_with_a_ring()
    given = {op.operands[0]: [S(dim, major) for dim in range(4) for major in (1, 2, 4, 8)]}
    (digits,), _ = propagate([(op, rule)], [], given, 1)
    (alone,), _ = propagate([(op, replace(rule, joint={}))], [], given, 1)
    assert [digit for digit in digits if digit[0] != "ring"] == alone
    assert [major for name, major in digits if name == "ring"] == [1, 2, 4, 8]


def test_axes_with_different_local_forms_are_not_combined() -> None:
    """An op runs one local form: two axes may have the same one, or one axis none."""
    _, rule = _attention_with_a_ring()
    joint = {**rule.joint, "other": Method(("queries", "keys"), "softmax", Role.FREE)}
    one = one_op(Sample("aten.scaled_dot_product_attention.default", ATTENTION, {"is_causal": True}))
    context = replace(one.context, rule=replace(rule, joint=joint))
    digits = {2: [(name, major) for name in ("heads", "queries", "ring", "other") for major in (1, 2)]}
    mesh = mesh_of(a=2, b=2)
    found = op_strategies(context, digits, mesh)
    methods = {strategy.methods for strategy in found}
    assert {("queries", "queries@2"), ("heads", "other"), ("ring", "ring@2")} <= methods
    assert all(len({choice.form for choice in choices} - {""}) <= 1 for choices in found.values())
    assert named_choices(context, ("ring", "other@2"), mesh) is None
    assert ("ring",) in {item.methods for item in op_strategies(context, digits, mesh_of(a=2))}
    assert ("other",) in {item.methods for item in op_strategies(context, digits, mesh_of(a=2))}, "equal layouts"


def test_a_ring_runs_beside_queries() -> None:
    """Both split queries, whose digits follow each other in mesh order; keys are whole on the axis of queries alone.
    The tokens of such a strategy allow it."""
    given = one_op(Sample("aten.scaled_dot_product_attention.default", ATTENTION, {"is_causal": True}))
    mesh, rule = mesh_of(a=2, b=2), given.rule
    found = {each.methods: each for each in op_strategies(given.context, {2: [("queries", 1), ("ring", 1)]}, mesh)}
    split = S(2), S(2, 2)
    assert found["ring", "queries@2"].operands == (split, (S(2), R), (S(2), R))
    assert found["queries", "ring@2"].operands == (split, (R, S(2, 2)), (R, S(2, 2)))
    assert found["queries", "ring@2"].results == (split,)
    choices = named_choices(given.context, ("queries", "ring@2"), mesh)
    assert choices is not None
    assert [choice.form for choice in choices] == ["blockwise_attention", "ring_attention"]
    assert begun_tokens(("queries", "ring@2"), mesh.sizes, rule) == [{"queries@1"}, {"ring@1", "ring@2"}]
    assert begun_tokens(("queries", "ring@2"), mesh.sizes) == [{"queries@1"}, {"ring@2"}]


def test_required_methods_take_the_digits_that_follow() -> None:
    """Axes split a factor at one place, as methods that are named without a place do."""
    _, rule = _attention_with_a_ring()
    sizes = (2, 3, 2)
    assert following(rule, {0: "ring", 2: "queries"}, sizes) == {0: "ring", 2: "queries@2"}
    assert following(rule, {0: "queries", 1: "ring", 2: "queries"}, sizes)[2] == "queries@6"
    assert following(rule, {0: "ring@4", 2: "ring@4"}, sizes) == {0: "ring@4", 2: "ring@8"}
    same: list[dict[int, str]] = [{0: "ring", 2: "queries@2"}, {0: "ring@4", 2: "ring@8"}, {0: "heads", 1: "ring"}]
    assert [following(rule, each, sizes) for each in same] == same
    assert following(rule, {0: "R", 1: "R"}, sizes) == {0: "R", 1: "R"}
    assert following(None, {0: "I", 1: "I"}, sizes) == {0: "I", 1: "I"}


def test_axes_take_digits_of_one_factor_in_mesh_order() -> None:
    """Two axes on one dim: the first splits its front, the second what is left; both are one contiguous split."""
    found = {strategy.methods: strategy for strategy in one_op(LINEAR).strategies(mesh_of(a=2, b=3))}
    assert found["in", "in@2"].operands[0] == (S(2), S(2, 2))
    assert ("in", "in") not in found


@pytest.mark.parametrize("sample", samples()[::7], ids=lambda item: item.target)
@pytest.mark.parametrize("mesh", [mesh_of(a=2), mesh_of(a=2, b=3)], ids=str)
def test_methods_name_their_strategy(sample: Sample, mesh: Mesh) -> None:
    """The methods of a strategy, as a plan keeps them, give it again; all layouts divide; none stands twice."""
    one = one_op(sample)
    strategies = one.strategies(mesh)
    assert len({(strategy.operands, strategy.results) for strategy in strategies}) == len(strategies)
    for strategy, made in strategies.items():
        choices = named_choices(one.context, strategy.methods, mesh)
        assert choices == made
        again = combine(one.context, choices)
        assert (again.operands, again.results) == (strategy.operands, strategy.results)
        for tensor, layout in zip((*one.operands, *one.results), (*strategy.operands, *strategy.results), strict=True):
            assert fits(tuple(tensor.shape), layout, mesh)


@pytest.mark.parametrize("name", ["X", "d9", "out@x", "out@3", "P(5)", ""])
def test_names_of_no_method(name: str) -> None:
    """A name of no choice gives None (8 outputs have no split into 2 after 3)."""
    one = one_op(LINEAR)
    assert parse_choice(name, one.rule, 3, 1, 2) is None
    assert digits_of(one.rule, 2)


class Fused(nn.Module):
    """Attention in the manner of gpt2: one projection for queries, keys and values."""

    def __init__(self, width: int = 12, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attention."""
        split = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]
        return nn.functional.scaled_dot_product_attention(*split).sum()


def test_splits_travel_to_fused_projections() -> None:
    """A split of heads splits the projection to queries, keys and values after its three parts, and its weight in use;
    the weight is stored in layouts that checkpoints take."""
    problem = planning(Fused(), {"x": torch.ones(2, 5, 12)}, mesh_of(tp=2)).problem
    linear = problem.nodes[problem.index["qkv/linear"]]
    assert {strategy.results[0][0] for strategy in linear.strategies} >= {S(2), S(2, 3)}
    assert (S(0, 3),) in [strategy.operands[1] for strategy in linear.strategies]
    stored = problem.nodes[problem.index["qkv.weight"]]
    assert {strategy.results[0] for strategy in stored.strategies} == {(I,), (S(0),), (S(1),)}
    attention = problem.nodes[problem.index["/scaled_dot_product_attention"]]
    assert ("heads",) in [strategy.methods for strategy in attention.strategies]
