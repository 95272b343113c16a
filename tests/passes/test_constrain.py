"""constrain: what is matched, what is refused, and which demand holds."""

import pytest
import torch
from torch import Tensor, nn

from passes.constrain import Constraints, constrain, stored_as
from passes.cost.cluster import CLUSTERS
from passes.ir.choices import Problem
from passes.ir.constraints import PlacedConstraints
from passes.ir.errors import ConstraintError, MeshError
from passes.ir.layout import I, P, Placement, R, S
from passes.ir.program import Program
from passes.regions import fold
from passes.strategies import Setting, planning_problem
from tests.passes.helpers import mesh_of, normalized

MESH = mesh_of(dp=2, tp=2)


class Layer(nn.Module):
    """Two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Up and down."""
        return self.down(self.up(x).relu())


class Model(nn.Module):
    """Two layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """A number."""
        for layer in self.layers:
            x = layer(x)
        return self.head(x).sum()


@pytest.fixture(scope="module")
def program() -> Program:
    """The model in normal form."""
    return normalized(Model(), x=torch.ones(4, 8))


def problem(program: Program, constraints: Constraints) -> Problem:
    """The planning problem under constraints."""
    demands = constrain(program, constraints, MESH)
    return planning_problem(fold(program, demands.label), demands, Setting(MESH, CLUSTERS["cpu"]))


def result_of(program: Program, key: str) -> str:
    """The first result of the op called `key`."""
    return next(op.results[0] for op in program.ops if op.key == key)


def placement(demands: PlacedConstraints, axis: int, *place: str) -> Placement | None:
    """The placement that is demanded at a place."""
    return demands.at(*place)[axis].placement


@pytest.mark.parametrize(
    ("text", "expected"), [("R", R), ("I", I), ("S(1)", S(1)), ("S(0, 2)", S(0, 2)), (" S( 0 ) ", S(0))]
)
def test_letters_are_parsed(program: Program, text: str, expected: Placement) -> None:
    """A layout is given as it prints."""
    demands = constrain(program, {"head.weight": {"used": {"tp": text}}}, MESH)
    assert placement(demands, 1, "used", "head.weight") == expected
    assert 0 not in demands.at("used", "head.weight")


def test_axes_make_a_split_one_after_the_other(program: Program) -> None:
    """The same split on two axes, in the order of the mesh, as torch's placements have it; others stay."""
    demands = constrain(program, {"*": {"stored": {"tp": "S(0)", "dp": "S(0)"}}}, MESH)
    assert [placement(demands, axis, "stored", "head.weight") for axis in (0, 1)] == [S(0), S(0, 2)]
    demands = constrain(program, {"*": {"stored": {"dp": "S(0)", "tp": "S(1)"}}}, MESH)
    assert [placement(demands, axis, "stored", "head.weight") for axis in (0, 1)] == [S(0), S(1)]
    (layout,) = {
        node.strategies[0].results[0]
        for node in problem(program, {"*.up.weight": {"stored": {"dp": "S(0)", "tp": "S(0)"}}}).nodes
        if node.kind == "parameter" and "up" in node.key
    }
    assert layout == (S(0), S(0, 2))


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ({"head.weight": {"stored": {"dp": "X"}}}, "'head.weight', stored, axis 'dp': 'X' is no layout: write 'R'"),
        ({"head.weight": {"stored": {"dp": "P"}}}, "'head.weight': a parameter cannot be stored as a pending sum"),
        ({"head.weight": {"kept": {"dp": "R"}}}, "'head.weight': 'kept' is none of stored, used, in, out, method"),
    ],
)
def test_what_cannot_be_read_is_refused(program: Program, constraints: Constraints, message: str) -> None:
    """Each by its own message."""
    with pytest.raises(ConstraintError, match=message.replace("(", "\\(").replace(")", "\\)")):
        constrain(program, constraints, MESH)


def test_unknown_axes_are_refused(program: Program) -> None:
    """With those that there are."""
    with pytest.raises(MeshError, match="no axis 'pp': its axes are dp, tp"):
        constrain(program, {"head.weight": {"stored": {"pp": "R"}}}, MESH)


@pytest.mark.parametrize(
    ("pattern", "what", "kind"),
    [
        ("layers.*.gate.weight", "stored", "parameter"),
        ("layers.0.up", "used", "parameter"),
        ("layers.9", "in", "op or module"),
        ("@conv2d", "method", "op or module"),
        ("head.weight", "out", "op or module"),
    ],
)
def test_patterns_without_match_are_refused(program: Program, pattern: str, what: str, kind: str) -> None:
    """By the pattern and what it was matched against."""
    text = "R" if what != "method" else "out"
    with pytest.raises(ConstraintError) as caught:
        constrain(program, {pattern: {what: {"dp": text}}}, MESH)
    assert str(caught.value).startswith(f"constraint {pattern!r}, {what}: it matches no {kind}")


def test_the_longer_pattern_holds(program: Program) -> None:
    """Of two that say something of the same place the longer one, whatever their order."""
    short, long = {"*.weight": {"stored": {"dp": "R"}}}, {"layers.*.up.weight": {"stored": {"dp": "S(0)"}}}
    for constraints in ({**short, **long}, {**long, **short}):
        demands = constrain(program, constraints, MESH)
        assert placement(demands, 0, "stored", "layers.0.up.weight") == S(0)
        assert placement(demands, 0, "stored", "layers.1.down.weight") == R


def test_axes_do_not_disturb_each_other(program: Program) -> None:
    """A longer pattern holds only on the axes that it speaks of."""
    constraints = {"*.weight": {"stored": {"dp": "R", "tp": "R"}}, "head.weight": {"stored": {"dp": "S(0)"}}}
    demands = constrain(program, constraints, MESH)
    assert placement(demands, 0, "stored", "head.weight") == S(0)
    assert placement(demands, 1, "stored", "head.weight") == R


def test_contradictions_are_refused_with_both(program: Program) -> None:
    """Two patterns of one length that demand different things of one place."""
    constraints = {"*head.weight": {"stored": {"dp": "R"}}, "head*weight": {"stored": {"dp": "S(0)"}}}
    constraints["?ead.weight"] = constraints.pop("*head.weight")
    with pytest.raises(ConstraintError) as caught:
        constrain(program, constraints, MESH)
    message = str(caught.value)
    assert "contradict each other at head.weight on axis 'dp'" in message
    assert "'?ead.weight': stored R" in message
    assert "'head*weight': stored S(0)" in message


def test_patterns_of_one_length_that_agree_are_fine(program: Program) -> None:
    """Saying the same twice is no contradiction."""
    constraints = {"?ead.weight": {"stored": {"dp": "R"}}, "head?weight": {"stored": {"dp": "R"}}}
    assert placement(constrain(program, constraints, MESH), 0, "stored", "head.weight") == R


def test_kinds_of_ops(program: Program) -> None:
    """`@kind` speaks of every op of that kind, and of no other."""
    demands = constrain(program, {"@linear": {"method": {"dp": "d0"}}}, MESH)
    found = {op.key for op in program.ops if demands.at("method", op.results[0])}
    assert found == {op.key for op in program.ops if op.kind == "linear"}
    assert len(found) == 5


def test_modules_are_what_enters_and_leaves_them(program: Program) -> None:
    """ "in" of a module holds where tensors enter it, "out" where they leave it; parameters do not enter."""
    demands = constrain(program, {"layers.1": {"in": {"dp": "S(0)"}, "out": {"tp": "I"}}}, MESH)
    up, down = (result_of(program, f"layers.1.{name}/linear") for name in ("up", "down"))
    assert placement(demands, 0, "in", up, "0") == S(0)
    assert not demands.at("in", up, "1")
    assert not demands.at("in", down, "0")
    assert placement(demands, 1, "out", down, "0") == I
    assert not demands.at("out", up, "0")


def test_methods_of_modules_and_of_ops(program: Program) -> None:
    """A module's ops follow its method if they can; an op has to."""
    demands = constrain(program, {"layers.0": {"method": {"dp": "d0"}}, "head/linear": {"method": {"dp": "in"}}}, MESH)
    assert demands.at("method within", result_of(program, "layers.0/relu"))
    assert not demands.at("method", result_of(program, "layers.0/relu"))
    assert demands.at("method", result_of(program, "head/linear"))[0].method == "in"


def test_demands_hold_in_the_problem(program: Program) -> None:
    """Every strategy that is left meets what is demanded."""
    made = problem(
        program,
        {
            "layers.*.up.weight": {"stored": {"dp": "S(1)"}, "used": {"tp": "S(0)"}},
            "head/linear": {"method": {"dp": "d0"}, "in": {"tp": "R"}},
        },
    )
    stored = made.nodes[made.index["layers.*.up.weight"]].strategies
    assert {strategy.results[0][0] for strategy in stored} == {S(1)}
    used = made.nodes[made.index["layers.*.up/linear"]].strategies
    assert {strategy.operands[1][1] for strategy in used} == {S(0)}
    head = made.nodes[made.index["head/linear"]].strategies
    assert {strategy.methods[0] for strategy in head} == {"d0"}
    assert {strategy.operands[0][1] for strategy in head} == {R}


def test_demands_open_splits_that_would_not_be_tried(program: Program) -> None:
    """A strided split that no neighbour offers is there because it is demanded."""
    made = problem(program, {"layers.*.up/linear": {"out": {"tp": "S(1, 2)"}}})
    placements = {strategy.results[0][1] for strategy in made.nodes[made.index["layers.*.up/linear"]].strategies}
    assert placements == {S(1, 2)}


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ({"head/linear": {"method": {"dp": "nothing"}}}, "'head/linear', method nothing on axis 'dp' cannot be met at"),
        (
            {"head/linear": {"out": {"dp": "S(5)"}}},
            r"'head/linear', out S\(5\) on axis 'dp' cannot be met at head/linear",
        ),
        (
            {"head.weight": {"stored": {"dp": "S(7)"}}},
            r"'head.weight', stored S\(7\) on axis 'dp' cannot be met for head",
        ),
        (
            {"head/linear": {"method": {"tp": "in"}}, "head.weight": {"used": {"tp": "S(0)"}}},
            r"used S\(0\) on axis 'tp' cannot be met at head/linear: no strategy has it together with",
        ),
    ],
)
def test_demands_that_cannot_be_met_are_refused(program: Program, constraints: Constraints, message: str) -> None:
    """By the constraint, the axis and the place."""
    with pytest.raises(ConstraintError, match=message):
        problem(program, constraints)


def test_layers_under_different_demands_do_not_fold(program: Program) -> None:
    """A constraint on one layer alone holds for that layer alone."""
    demands = constrain(program, {"layers.0.up.weight": {"stored": {"dp": "R"}}}, MESH)
    assert [region.count for region in fold(program, demands.label).regions] == []
    demands = constrain(program, {"layers.*.up.weight": {"stored": {"dp": "R"}}}, MESH)
    assert [region.count for region in fold(program, demands.label).regions] == [2]


def test_layers_under_equal_demands_fold_whichever_patterns_say_so(program: Program) -> None:
    """One pattern for each layer, as of numbers with one digit and with two."""
    each = {f"layers.{number}.up.weight": {"stored": {"dp": "R"}} for number in range(2)}
    assert [region.count for region in fold(program, constrain(program, each, MESH).label).regions] == [2]
    each["layers.1.up.weight"] = {"stored": {"dp": "I"}}
    assert [region.count for region in fold(program, constrain(program, each, MESH).label).regions] == []


def test_stored_as_fixes_every_parameter(program: Program) -> None:
    """Each parameter has to be stored as given, on every axis."""
    layouts = {item.name: (S(0), I) for item in program.parameters}
    demands = stored_as(program, layouts)
    for item in program.parameters:
        assert [placement(demands, axis, "stored", item.name) for axis in (0, 1)] == [S(0), I]
    assert P not in {placement(demands, 0, "stored", item.name) for item in program.parameters}


@pytest.mark.parametrize(
    ("pattern", "what", "hint"),
    [
        ("layers.*.gate.weight", "stored", "the nearest names are 'layers.*.up.weight'"),
        (
            "layers.*.{up,down}",
            "out",
            "'layers.*.down'.*; braces are not part of a shell pattern: write one constraint",
        ),
        ("@lineer", "method", "the nearest names are '@linear'"),
        ("heads", "in", "the nearest names are 'head'"),
    ],
)
def test_the_nearest_names_are_suggested(program: Program, pattern: str, what: str, hint: str) -> None:
    """Names as a plan prints them, and a word on braces."""
    text = "R" if what != "method" else "out"
    with pytest.raises(ConstraintError, match=hint.replace("*", r"\*").replace(r".\*;", ".*;")):
        constrain(program, {pattern: {what: {"dp": text}}}, MESH)


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ({"head": {"in": {"dp": "S(0)"}}}, r"its dim 0 of size 3 is not divisible into 2 devices"),
        (
            {"layers.0.up": {"out": {"dp": "S(0)"}}},
            r"its result of shape \[3, 16\] cannot be split so, because its dim 0",
        ),
        ({"layers.0.up/linear": {"method": {"dp": "d0"}}}, r"d0 of size 3 is not divisible into 2 devices"),
        ({"layers.0.up/linear": {"method": {"dp": "rows"}}}, r"no such method; its methods on this axis are I, .*out"),
        ({"layers.0.up": {"method": {"dp": "d0"}}}, r"met: layers.0.up/linear cannot use it, because d0 of size 3"),
        ({"layers.0.up": {"method": {"dp": "rows"}}}, r"met: no op of the module has that method; they have I, .*out"),
        ({"head.weight": {"stored": {"dp": "S(0, 4)"}}}, r"its dim 0 of size 4 is not divisible into 4 x 2 parts"),
        ({"head.weight": {"stored": {"dp": "S(2)"}}}, r"it has no dim 2"),
    ],
)
def test_sizes_that_do_not_divide_are_named(constraints: Constraints, message: str) -> None:
    """A batch of 3 on two devices."""
    with pytest.raises(ConstraintError, match=message):
        problem(normalized(Model(), x=torch.ones(3, 8)), constraints)


def test_whole_is_met_by_both_placements(program: Program) -> None:
    """Used and made in either way; stored R is what is stored I, because both say that the parameter is whole."""
    found = problem(program, {"head": {"out": {"tp": "whole"}}, "head.weight": {"used": {"dp": "whole"}}})
    strategies = found.nodes[found.index["head/linear"]].strategies
    assert {strategy.results[0][1] for strategy in strategies} == {R, I}
    assert {strategy.operands[1][0] for strategy in strategies} == {R, I}
    for text in ("R", "I", "whole"):
        made = problem(program, {"head.weight": {"stored": {"dp": text}}})
        stored = {item.results[0][0] for item in made.nodes[made.index["head.weight"]].strategies}
        assert stored == {I}, text
