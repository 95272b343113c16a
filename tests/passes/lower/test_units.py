"""engines: which parameters go to the engine of data axes, and what is left in the source."""

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from passes.constrain import Constraints
from passes.cost.walk import Optimizer, walk
from passes.ir.configuration import Configuration
from passes.ir.layout import I, Layout, S
from passes.ir.lowered import Body, FSDPUnit, Loop, Redistribution, Stage, Statement
from passes.ir.mesh import Mesh
from passes.ir.redistribution import redistribution
from passes.lower.units import fsdp_units
from passes.solve import solve
from passes.solve.limits import Limits
from tests.passes.helpers import mesh_of, source_of
from tests.passes.planning import STATES, Planning, planning

BATCH = {"in": {"dp": "S(0)"}, "out": {"dp": "S(0)"}}
NONE = (None, None)


class Layer(nn.Module):
    """A projection with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        return x + self.proj(x).relu()


class Model(nn.Module):
    """Two layers and a head, which may be used in between, too, or twice."""

    def __init__(self, *, between: bool = False, twice: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(8, 8, bias=False)
        self.between, self.twice = between, twice

    def forward(self, x: Tensor) -> Tensor:
        """The mean of squares."""
        for layer in self.layers:
            x = layer(x)
            if self.between:
                x = x * self.head.weight.sum()
        if self.twice:
            x = self.head(x).exp()
        return self.head(x).pow(2).mean()


def case(mesh: Mesh, constraints: Constraints, model: nn.Module | None = None, cluster: str = "ideal") -> Planning:
    """The planning problem of a model under constraints."""
    return planning(model or Model(), {"x": torch.ones(8, 8)}, mesh, cluster, constraints)


def before(given: Planning) -> Stage:
    """Its best plan, lowered."""
    return given.lowered(solve(given.problem, given.cluster, Limits(1e30, STATES), Configuration(given.mesh)))


def written(lowered: Stage, mesh: Mesh) -> list[str]:
    """The source that reads parameters, without names of results and comments."""
    source = source_of(lowered, mesh)
    lines = [line.partition("  # ")[0].strip() for line in source.splitlines()]
    return [line.partition(" = ")[2] or line for line in lines if re.search(r"(local|gathered)\(", line)]


def parameter_changes(lowered: Stage) -> list[Redistribution]:
    """The changes of parameters, inside and outside regions."""
    bodies = [lowered.body, *(item.body for item in lowered.body.statements if isinstance(item, Loop))]
    return [item for body in bodies for item in body.statements if isinstance(item, Redistribution) and item.parameter]


HEAD = 'self.gathering("head.weight", lambda x: F.linear(x, gathered(self.root.head.weight)), x)'
LAYERS = "layers.0.proj.weight", "layers.1.proj.weight"
SHARDED: Constraints = {"*": {"stored": {"dp": "S(0)"}, "used": {"dp": "R"}}, "@linear": BATCH}
REPLICATED: Constraints = {"*": {"stored": {"dp": "I"}, "used": {"dp": "R"}}, "@linear": BATCH}


def test_gathers_go_to_the_engine() -> None:
    """Stored split, used whole: no gather is written any more, one group lies around each copy, one around the rest."""
    mesh = mesh_of(dp=2)
    lowered = before(case(mesh, SHARDED))
    assert written(lowered, mesh) == [
        "all_gather(local(layer.proj.weight), dp, src=S(0), dst=R)",
        "all_gather(local(self.root.head.weight), dp, src=S(0), dst=R)",
    ]
    after = fsdp_units(lowered, mesh)
    assert written(after, mesh) == ["gathered(layer.proj.weight)", HEAD]
    source = source_of(after, mesh)
    assert "layers.*: 2 copies. fully_shard: 1 parameter sharded over dp." in source
    head, first, second = sorted(after.units.units, key=lambda group: tuple(group.parameters))
    assert head == FSDPUnit({"head.weight": 0}, (0,), (), True, False, NONE)
    assert [first, second] == [FSDPUnit({name: 0}, (0,), (), True, False, NONE) for name in LAYERS]
    assert {
        op: [after.units.units[number] for number in numbers] for op, numbers in after.units.around_ops.items()
    } == {"head/linear": [head]}
    (copies,) = after.units.around_copies
    assert [[after.units.units[number] for number in copy] for copy in copies] == [[first], [second]]
    assert after.units.gathered == {"head.weight", *LAYERS}


def test_what_the_engine_does_is_priced() -> None:
    """Its steps stay in the program: the seconds are the same."""
    mesh = mesh_of(dp=2)
    given = case(mesh, SHARDED, cluster="cpu")
    lowered = before(given)
    seconds = [
        walk(item, given.folded, given.cluster, Optimizer(STATES), Configuration(mesh))
        for item in (lowered, fsdp_units(lowered, mesh))
    ]
    assert seconds[0] == seconds[1]
    assert seconds[1].exposed_gathers > 0
    assert seconds[1].exposed_reductions > 0
    assert [change.unit_steps for change in parameter_changes(fsdp_units(lowered, mesh))] == [1, 1]


@pytest.mark.parametrize("stored", [(S(1), S(1, 2)), (I, S(1))], ids=str)
def test_all_to_alls_that_come_first_are_made_by_the_engine(stored: Layout) -> None:
    """It gathers what they make, for the seconds that were planned."""
    mesh = mesh_of(dp=2, tp=2)
    placements = {"dp": str(stored[0]), "tp": str(stored[1])}
    constraints: Constraints = {"layers.*": {"stored": placements, "used": {"dp": "R", "tp": "S(0)"}}, "@linear": BATCH}
    given = case(mesh, constraints, cluster="cpu")
    lowered = before(given)
    after = fsdp_units(lowered, mesh)
    turned = [group.turned for group in after.units.units if not group.parameters.keys().isdisjoint(LAYERS)]
    assert turned == [{name: (stored[0], S(0))} for name in LAYERS]
    (change,) = [item for item in parameter_changes(after) if item.before == stored]
    assert [step.collective for step in change.steps[:2]] == [
        "all_to_all",
        "all_gather" if stored[0] != I else "convert",
    ]
    assert change.unit_steps == len(change.steps) == 2
    walked = walk(after, given.folded, given.cluster, Optimizer(STATES), Configuration(mesh))
    planned = solve(given.problem, given.cluster, Limits(1e30, STATES), Configuration(given.mesh)).seconds
    assert walked.total == pytest.approx(planned, rel=1e-9)


def test_equal_copies_are_reduced_by_the_engine() -> None:
    """Stored everywhere, used whole: gradients are all-reduced by it."""
    mesh = mesh_of(dp=2)
    after = fsdp_units(before(case(mesh, REPLICATED)), mesh)
    # Nothing is gathered, so nothing is called around what reads them.
    assert written(after, mesh) == ["gathered(layer.proj.weight)", "F.linear(x, gathered(self.root.head.weight))"]
    assert {(group.sharded, group.replicated) for group in after.units.units} == {((), (0,))}
    assert (after.units.around_copies, after.units.around_ops, after.units.call_order) == ((((), ()),), {}, ())
    assert "layers.*: 2 copies. all_reduce: 1 parameter replicated over dp." in source_of(after, mesh)


def test_hybrid() -> None:
    """Split on one axis, copied on the other."""
    mesh = mesh_of(dp=2, cp=2)
    batch = {"dp": "S(0)", "cp": "S(0, 2)"}
    constraints: Constraints = {
        "*": {"stored": {"dp": "I", "cp": "S(1)"}, "used": {"dp": "R", "cp": "R"}},
        "@linear": {"in": batch, "out": batch},
    }
    after = fsdp_units(before(case(mesh, constraints)), mesh)
    assert written(after, mesh) == ["gathered(layer.proj.weight)", HEAD]
    assert {(tuple(group.parameters.values()), group.sharded, group.replicated) for group in after.units.units} == {
        ((1,), (1,), (0,))
    }


def stored_otherwise(lowered: Stage, layout: Layout, mesh: Mesh) -> Stage:
    """`lowered` with parameters that lie in `layout`, also in one that is not offered today."""

    def changed(body: Body) -> Body:
        statements: list[Statement] = []
        for item in body.statements:
            if isinstance(item, Loop):
                statements.append(replace(item, body=changed(item.body)))
            elif isinstance(item, Redistribution) and item.parameter:
                steps = redistribution(layout, item.after, item.type.shape, mesh)
                statements.append(replace(item, before=layout, steps=steps))
            else:
                statements.append(item)
        return replace(body, statements=tuple(statements))

    return replace(lowered, body=changed(lowered.body), parameters=dict.fromkeys(lowered.parameters, layout))


@pytest.mark.parametrize(
    ("stored", "sharded"),
    [
        # One gather over both axes.
        ((S(0), S(0, 2)), (0, 1)),
        # Both would be one split, but not in the order of the mesh: the first goes.
        ((S(0, 2), S(0)), (0,)),
        # Different dims: the first.
        ((S(0), S(1)), (0,)),
        # One leaves room in front, which is gathered last or first.
        ((S(0), S(0, 4)), (0,)),
        ((S(0, 4), S(0)), ()),
        # Both do.
        ((S(0, 2), S(0, 4)), ()),
        ((S(1, 2), I), ()),
    ],
)
def test_one_gather_of_consecutive_parts(stored: Layout, sharded: tuple[int, ...]) -> None:
    """Gathers that the engine cannot do at once are left to the generated code."""
    mesh = mesh_of(dp=2, cp=2)
    batch = {"dp": "S(0)", "cp": "S(0, 2)"}
    constraints: Constraints = {
        "*": {"stored": {"dp": "S(0)", "cp": "S(1)"}, "used": {"dp": "R", "cp": "R"}},
        "@linear": {"in": batch, "out": batch},
    }
    after = fsdp_units(stored_otherwise(before(case(mesh, constraints)), stored, mesh), mesh)
    assert {group.sharded for group in after.units.units if group.sharded} == ({sharded} if sharded else set())
    left = [
        [axis for step in change.steps[change.unit_steps :] for axis in mesh.spans[step.span]]
        for change in parameter_changes(after)
    ]
    taken = {axis for group in after.units.units for axis in (*group.sharded, *group.replicated)}
    assert [set(axes) for axes in left] == [{0, 1} - taken] * 2
    shown = "gathered(layer.proj.weight)" if taken else "local(layer.proj.weight)"
    assert shown in written(after, mesh)[0]


def test_other_axes_follow() -> None:
    """An axis with its own use of the parameter keeps its steps, after those of the engine."""
    mesh = mesh_of(dp=2, tp=2)
    constraints: Constraints = {
        "*.proj.weight": {"stored": {"dp": "S(0, 2)", "tp": "S(0)"}, "used": {"dp": "R", "tp": "I"}},
        "head.weight": {"stored": {"dp": "S(0, 2)", "tp": "S(0)"}, "used": {"dp": "R", "tp": "S(0)"}},
        "@linear": BATCH,
    }
    after = fsdp_units(before(case(mesh, constraints)), mesh)
    assert written(after, mesh) == ["all_gather(gathered(layer.proj.weight), tp, src=S(0), dst=I)", HEAD]
    # The backward pass reads the copy that the code makes: the gathered parameter is freed, and not gathered again.
    read = {name: (unit.saved, unit.regathered) for unit in after.units.units for name in unit.parameters}
    assert read == {**dict.fromkeys(LAYERS, (False, True)), "head.weight": (True, False)}
    once = fsdp_units(before(case(mesh, constraints)), mesh, gather_once=True)
    assert {(unit.saved, unit.regathered) for unit in once.units.units} == {(True, False)}


def test_what_no_unit_gathers_after_all_to_alls_is_not_hidden() -> None:
    """An all-to-all leaves the other axis in the middle of a dim: the generated code has all steps, in the order that
    moves least, and nothing hides them."""
    mesh = mesh_of(dp=2, tp=2)
    stored = S(0, 2), S(0)
    placements = {"dp": str(stored[0]), "tp": str(stored[1])}
    constraints: Constraints = {"layers.*": {"stored": placements, "used": {"dp": "R", "tp": "S(1)"}}, "@linear": BATCH}
    given = case(mesh, constraints, cluster="h100")
    after = fsdp_units(before(given), mesh)
    (change,) = [item for item in parameter_changes(after) if item.before == stored]
    assert [step.collective for step in change.steps] == ["all_to_all", "all_gather"]
    assert (change.unit_steps, change.inline) == (0, True)
    walked = walk(after, given.folded, given.cluster, Optimizer(STATES), Configuration(mesh))
    planned = solve(given.problem, given.cluster, Limits(1e30, STATES), Configuration(mesh)).seconds
    assert walked.total == pytest.approx(planned, rel=1e-9)


def test_nothing_is_gathered_to_be_cut_afterwards() -> None:
    """If the plan cuts a parameter before it gathers it, the engine would move more, and does not gather it."""
    mesh = mesh_of(dp=2, tp=2)
    constraints: Constraints = {
        "*": {"stored": {"dp": "S(1)", "tp": "I"}, "used": {"dp": "R", "tp": "S(0)"}},
        "@linear": BATCH,
    }
    lowered = before(case(mesh, constraints))
    after = fsdp_units(lowered, mesh)
    assert after.units.units == ()
    assert written(after, mesh) == written(lowered, mesh)


@pytest.mark.parametrize("used", ["I", "S(0)"])
def test_what_is_no_data_axis_stays(used: str) -> None:
    """A gradient that is equal everywhere must not be summed; a parameter that is used split is not gathered."""
    mesh = mesh_of(dp=2)
    lowered = before(case(mesh, {"*": {"stored": {"dp": "S(0)"}, "used": {"dp": used}}}))
    after = fsdp_units(lowered, mesh)
    assert after.units.units == ()
    assert written(after, mesh) == written(lowered, mesh)


class Turned(Model):
    """Its head is a view of the parameter first."""

    def forward(self, x: Tensor) -> Tensor:
        """The mean of squares."""
        for layer in self.layers:
            x = layer(x)
        return (x @ self.head.weight.transpose(0, 1)).pow(2).mean()


@pytest.mark.parametrize(
    "model", [Model(between=True), Model(twice=True), Turned()], ids=["between", "twice", "longer than the op"]
)
def test_read_in_several_places(model: nn.Module) -> None:
    """A parameter that copies share, or several ops read, is gathered at each use, not kept in between."""
    mesh = mesh_of(dp=2)
    lowered = before(case(mesh, SHARDED, model))
    after = fsdp_units(lowered, mesh)
    assert after.units.gathered == set(LAYERS)
    assert [line for line in written(after, mesh) if "head" in line] == [
        line for line in written(lowered, mesh) if "head" in line
    ]


def test_what_the_backward_pass_needs() -> None:
    """A table is not read in it: it is dropped, and not gathered again."""

    class Table(nn.Module):
        """A table, and a product."""

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 8)
            self.head = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            """The mean of squares."""
            return self.head(self.table(x)).pow(2).mean()

    mesh = mesh_of(dp=2)
    constraints = {**SHARDED, "table": BATCH}
    given = planning(Table(), {"x": torch.arange(8)}, mesh, "ideal", constraints)
    table, head = fsdp_units(before(given), mesh).units.units
    assert (table.saved, table.regathered) == (False, True)
    assert (head.saved, head.regathered) == (True, False)
    redone = before(given)
    again = [
        replace(item, regathered=True) if isinstance(item, Redistribution) and item.parameter else item
        for item in redone.body.statements
    ]
    table, head = fsdp_units(replace(redone, body=replace(redone.body, statements=tuple(again))), mesh).units.units
    assert (head.saved, head.regathered) == (True, True)


def test_frozen_parameters_are_gathered_but_not_reduced() -> None:
    """Without a gradient there is nothing to do for a copy; a part must be gathered all the same."""
    mesh = mesh_of(dp=2)
    model = Model()
    model.head.requires_grad_(False)
    held = fsdp_units(before(case(mesh, REPLICATED, model)), mesh).units
    assert held.gathered == set(LAYERS)
    held = fsdp_units(before(case(mesh, SHARDED, model)), mesh).units
    assert held.gathered == {"head.weight", *LAYERS}


def test_other_programs_read_what_is_held_already() -> None:
    """A program that reads a layer twice reads it as it is stored; what it reads once it has from the engine."""
    mesh = mesh_of(dp=2)
    first = fsdp_units(before(case(mesh, SHARDED)), mesh)
    same = fsdp_units(before(case(mesh, SHARDED)), mesh, first.units.units)
    assert same.units == first.units

    class Unfolded(Model):
        """The second layer comes twice."""

        def forward(self, x: Tensor) -> Tensor:
            """The mean of squares."""
            x = self.layers[1](self.layers[0](x).exp()).sin()
            return self.head(self.layers[1](x)).pow(2).mean()

    other = fsdp_units(before(case(mesh, SHARDED, Unfolded())), mesh, first.units.units)
    assert other.units.units == first.units.units
    assert other.units.gathered == {"head.weight", "layers.0.proj.weight"}
    assert {len(numbers) for numbers in other.units.around_ops.values()} == {1}
    assert len(other.units.around_ops) == 2
    # One that uses a part of the head alone reads that.
    split = {**SHARDED, "head.weight": {"stored": {"dp": "S(0)"}, "used": {"dp": "S(0)"}}, "head": {}}
    alone = fsdp_units(before(case(mesh, {**split, "@linear": {}})), mesh, first.units.units)
    assert "head.weight" not in alone.units.gathered
