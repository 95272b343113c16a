"""lower: which statements a choice becomes."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from passes.ir.choices import Solution, Strategy
from passes.ir.configuration import Configuration
from passes.ir.layout import I, Layout, P, R, S, local_shape
from passes.ir.lowered import Compute, Loop, Redistribution, Stage
from passes.lower.straight import Casts, straight_code
from tests.passes.helpers import Apply, mesh_of
from tests.passes.planning import Planning, planning

MESH = mesh_of(tp=2)


def choose(case: Planning, **methods: str) -> Solution:
    """The solution in which nodes have the given methods (keys with _ for what is no placement); the others their first
    strategy that is whole, or the first of all."""
    picks, unknown = [], set(methods)
    for node in case.problem.nodes:
        name = "".join(item if item.isalnum() else "_" for item in node.key).strip("_")
        names = [strategy.methods[0] for strategy in node.strategies]
        unknown.discard(name)
        wanted = methods.get(name, "R" if "R" in names else "I" if "I" in names else names[0])
        picks.append(names.index(wanted))
    assert not unknown
    return Solution(tuple(picks), frozenset(), 0.0, 0.0, Configuration(case.mesh))


def changes(lowered: Stage) -> list[Redistribution]:
    """The redistributions outside regions."""
    return [statement for statement in lowered.body.statements if isinstance(statement, Redistribution)]


def computes(lowered: Stage) -> list[Compute]:
    """The ops outside regions."""
    return [statement for statement in lowered.body.statements if isinstance(statement, Compute)]


class Heads(nn.Module):
    """Three projections of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Sum of the projections of relu(x)."""
        x = x.relu()
        return (self.q(x) + self.k(x) + self.v(x)).sum()


def test_a_redistribution_is_shared() -> None:
    """Three consumers that want one tensor in the same other layout: it is brought there once, before the first."""
    case = planning(Heads(), {"x": torch.ones(4, 8)}, MESH)
    lowered = case.lowered(choose(case, x="S(0)", relu="d0", q_linear="out", k_linear="out", v_linear="out"))
    from_relu = [change for change in changes(lowered) if change.source == "%relu"]
    assert len(from_relu) == 1
    assert (from_relu[0].before, from_relu[0].after) == ((S(0),), (R,))
    used = [statement.op.arguments["input"] for statement in computes(lowered) if statement.op.kind == "linear"]
    assert {str(item) for item in used} == {from_relu[0].result}


def test_different_layouts_are_different_values() -> None:
    """A consumer that wants another layout gets one of its own, and one that takes it as it is none."""
    case = planning(Heads(), {"x": torch.ones(4, 8)}, MESH)
    lowered = case.lowered(choose(case, x="S(0)", relu="d0", q_linear="out", k_linear="in", v_linear="d0"))
    from_relu = {change.after: change.result for change in changes(lowered) if change.source == "%relu"}
    assert set(from_relu) == {(R,), (S(1),)}
    used = {
        statement.op.key: str(statement.op.arguments["input"])
        for statement in computes(lowered)
        if statement.op.kind == "linear"
    }
    assert used == {"q/linear": from_relu[R,], "k/linear": from_relu[S(1),], "v/linear": "%relu"}


def test_what_is_made_again_is_marked() -> None:
    """A redistribution that the solution makes again says so, and only that one."""
    case = planning(Heads(), {"x": torch.ones(4, 8)}, MESH)
    chosen = choose(case, x="S(0)", relu="d0", q_linear="out", k_linear="in", v_linear="d0")
    edge = next(
        edge for edge in case.problem.edges if case.problem.nodes[edge.consumer].key == "q/linear" and edge.operand == 0
    )
    lowered = case.lowered(replace(chosen, regathered=frozenset({(edge.group, (R,))})))
    assert {change.after for change in changes(lowered) if change.regathered} == {(R,)}


class Twice(nn.Module):
    """Uses a parameter in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        """The same product twice."""
        return ((x @ self.weight).relu() @ self.weight).sum()


def test_a_parameter_is_gathered_at_each_use() -> None:
    """A parameter is gathered at each use and need not be kept in between."""
    case = planning(Twice(), {"x": torch.ones(4, 8)}, MESH)
    lowered = case.lowered(choose(case, weight="S(0)", matmul="R", matmul_1="R"))
    gathers = [change for change in changes(lowered) if change.source == "weight"]
    assert len(gathers) == 2
    assert all(change.parameter and change.after == (R,) for change in gathers)
    assert lowered.parameters == {"weight": (S(0),)}


def test_parameters_are_cast_and_their_gradients_reduced() -> None:
    """With other dtypes for storing and reducing every use of a parameter says so, even where its layout stays."""
    case = planning(Twice(), {"x": torch.ones(4, 8)}, MESH)
    chosen = choose(case, weight="I", matmul="I", matmul_1="I", relu="I", sum="I", x="R")
    assert not [change for change in changes(case.lowered(chosen)) if change.parameter]
    casts = Casts(torch.float64, torch.bfloat16)
    lowered = straight_code(case.folded, case.problem, chosen, MESH, casts)
    uses = [change for change in changes(lowered) if change.parameter]
    assert [change.dtypes for change in uses] == [(torch.float32, torch.bfloat16)] * 2
    assert all(change.steps == () for change in uses)
    assert not [
        change
        for change in changes(
            straight_code(case.folded, case.problem, chosen, MESH, Casts(torch.float32, torch.float32))
        )
        if change.parameter
    ]


def _sizes(case: Planning, kind: str, strategy: Strategy) -> object:
    """The size arguments of the only op of `kind` when it is lowered under `strategy`."""
    index = next(number for number, node in enumerate(case.problem.nodes) if node.key == f"/{kind}")
    picks = list(choose(case).picks)
    picks[index] = case.problem.nodes[index].strategies.index(strategy)
    lowered = case.lowered(Solution(tuple(picks), frozenset(), 0.0, 0.0, Configuration(case.mesh)))
    (statement,) = [item for item in computes(lowered) if item.op.kind == kind]
    names = {"reshape": ("shape",), "expand": ("size",), "slice": ("start", "end")}[kind]
    found = [statement.op.arguments[name] for name in names]
    return found[0] if len(found) == 1 else tuple(found)


@pytest.mark.parametrize("kind", ["reshape", "expand", "slice"])
def test_sizes_are_local(kind: str) -> None:
    """For every strategy, a view gets the local shape of its result, and a slice its part of the whole units."""

    def function(x: Tensor) -> Tensor:
        views = {
            "reshape": lambda: x.reshape(4, 2, 12),
            "expand": lambda: x.unsqueeze(0).expand(3, 8, 12),
            "slice": lambda: x[:, 4:8],
        }
        return views[kind]() * 2

    mesh = mesh_of(a=2, b=2)
    case = planning(Apply(function), {"x": torch.ones(8, 12).requires_grad_()}, mesh)
    node = case.problem.nodes[case.problem.index[f"/{kind}"]]
    assert len(node.strategies) > 4
    results = {"reshape": (4, 2, 12), "expand": (3, 8, 12), "slice": (8, 4)}
    for strategy in node.strategies:
        local = local_shape(results[kind], strategy.results[0], mesh)
        if kind == "slice":
            assert _sizes(case, kind, strategy) == (local[1], 2 * local[1])
        else:
            assert _sizes(case, kind, strategy) == local


class Stack(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """All layers."""
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def test_regions_are_lowered_once() -> None:
    """The body stands once; the first copy's input, what lies between copies, and what comes out are brought to the
    layouts that were chosen."""
    case = planning(Stack(), {"x": torch.ones(4, 8)}, MESH)
    lowered = case.lowered(choose(case, x="S(0)", layers___carry="R", layers___linear="out", layers___weight="S(1)"))
    (loop,) = [statement for statement in lowered.body.statements if isinstance(statement, Loop)]
    (initial,) = loop.initial
    assert lowered.body.layouts[initial] == (R,)
    (between,) = loop.between
    assert between is not None
    assert (between.before, between.after) == ((S(1),), (R,))
    assert [type(statement) for statement in loop.body.statements] == [Redistribution, Compute]
    assert loop.body.arguments == (loop.region.carries[0].argument,)
    assert dict(lowered.parameters) == {f"layers.{number}.weight": (S(1),) for number in range(3)}


def test_nothing_lies_between_copies_that_agree() -> None:
    """Copies that give what the next takes need no redistribution."""
    case = planning(Stack(), {"x": torch.ones(4, 8)}, MESH)
    lowered = case.lowered(choose(case, layers___carry="S(0)", layers___linear="d0"))
    (loop,) = [statement for statement in lowered.body.statements if isinstance(statement, Loop)]
    assert loop.between == (None,)


def test_outputs_and_updates_lie_as_chosen() -> None:
    """Outputs in the layouts of their nodes, plain values as they are, new values of buffers whole."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(8))

        def forward(self, x: Tensor) -> tuple[Tensor, int]:
            self.seen.add_(x.sum(0))
            return x * 2, 3

    case = planning(Model(), {"x": torch.ones(4, 8).requires_grad_()}, MESH)
    names = {node.key: [strategy.methods[0] for strategy in node.strategies] for node in case.problem.nodes}
    assert "S(0)" in names["output [0]"]
    lowered = case.lowered(choose(case, output__0="S(0)", mul="d0", x="S(0)"))
    first, second = lowered.outputs
    assert (first.name, first.layout) == ("[0]", (S(0),))
    assert (second.value, second.layout) == (3, None)
    ((buffer, value),) = lowered.updates
    assert buffer == "seen"
    whole: set[Layout] = {(I,), (R,)}
    assert lowered.body.layouts[value] in whole
    assert P not in lowered.body.layouts[value]
