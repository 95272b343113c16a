"""emit: names that generated source uses, and that it is source."""

import ast

import pytest
import torch
from torch import Tensor, nn

import autopar.runtime
from passes.codegen.expressions import WRITERS
from passes.ir import vocabulary
from passes.ir.configuration import Configuration
from passes.ir.lowered import Stage
from passes.ir.mesh import Mesh
from passes.rules.local_forms import LOCAL_FORMS
from passes.rules.strategies import combine, named_choices
from passes.solve import solve
from passes.solve.limits import Limits
from tests.passes.helpers import mesh_of, source_of
from tests.passes.planning import STATES, planning
from tests.passes.rules.one_op import lowered_one, one_op
from tests.passes.rules.samples import Sample


def test_names_are_those_of_the_runtime() -> None:
    """Every name that source may import is exported by the runtime, and the lists have all that are meant for it."""
    names = {*vocabulary.COLLECTIVES, *vocabulary.FORMS, *vocabulary.BASES, *vocabulary.HELPERS, *vocabulary.PLACEMENTS}
    assert names <= set(autopar.runtime.__all__)
    assert all(hasattr(autopar.runtime, name) for name in names)
    around = {
        "Axis",
        "GeneratedProgram",
        "Container",
        "DistributedModule",
        "LoadedProgram",
        "OtherSizes",
        "PlannedInput",
        "PlannedOutput",
        "named_arguments",
        "require_strided",
    }
    assert set(autopar.runtime.__all__) - names == around


def test_collectives_are_those_of_the_redistributions() -> None:
    """Every step has a collective that source can call, and every one is some step's."""
    from passes.ir.redistribution import COLLECTIVES

    assert set(COLLECTIVES.values()) == set(vocabulary.COLLECTIVES)


def test_forms_are_bodies() -> None:
    """Each named body is a function of the runtime, but for the mean, which is written out."""
    assert set(WRITERS) == set(LOCAL_FORMS)


def test_attention_keeps_its_dropout() -> None:
    """Causal or not. Split queries of causal attention have a local form that takes none, so they are not split."""
    query = torch.ones(2, 4, 8, 4)
    for causal, methods in ((False, "queries"), (True, "heads")):
        attention = Sample("aten.scaled_dot_product_attention.default", (query, query, query, None, 0.25, causal), {})
        one, mesh = one_op(attention), mesh_of(a=2)
        choices = named_choices(one.context, (methods,), mesh)
        assert choices is not None
        assert "dropout_p=0.25" in source_of(lowered_one(one, combine(one.context, choices), mesh), mesh)
    assert named_choices(one.context, ("queries",), mesh) is None


class Layer(nn.Module):
    """A layer with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        return x + self.proj(x).relu()


class Model(nn.Module):
    """Two layers, odd names, a buffer that changes, and outputs of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.ModuleDict({"class": nn.Linear(8, 4), "0a": nn.Linear(8, 4)})
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor, lambda_: Tensor) -> dict[str, object]:
        """Everything."""
        for layer in self.layers:
            x = layer(x)
        self.seen.add_(x.detach().mean(0))
        out = self.head["class"](x) + self.head["0a"](x) * lambda_
        return {"loss": out.pow(2).mean(), "self": out, "count": 3, "none": None, "inf": float("inf")}


def _emitted(mesh: Mesh, cluster: str = "cpu") -> tuple[Stage, str]:
    inputs = {"x": torch.ones(8, 8), "lambda_": torch.ones(4)}
    case = planning(Model(), inputs, mesh, cluster)
    lowered = case.lowered(solve(case.problem, case.cluster, Limits(1e30, STATES), Configuration(mesh)))
    return lowered, source_of(lowered, mesh)


@pytest.mark.parametrize("mesh", [mesh_of(dp=2), mesh_of(dp=2, tp=2), mesh_of(x=2, out=2)], ids=str)
def test_source_compiles_and_defines_the_class(mesh: Mesh) -> None:
    """The source is a module that defines the class, a subclass of what the runtime has, and one for the region; axes
    may be called like values of the program."""
    _, source = _emitted(mesh, "ideal")
    namespace: dict[str, object] = {}
    exec(compile(source, "<generated>", "exec"), namespace)
    kind = namespace["Model"]
    assert isinstance(kind, type)
    assert issubclass(kind, autopar.runtime.Generated)
    regions = [
        item
        for item in namespace.values()
        if isinstance(item, type)
        and issubclass(item, autopar.runtime.RegionCopy)
        and item is not autopar.runtime.RegionCopy
    ]
    assert len(regions) == 1


def test_imports_are_just_what_is_used() -> None:
    """Everything that is imported is read, and nothing else is free."""
    _, source = _emitted(mesh_of(dp=2, tp=2), "ideal")
    tree = ast.parse(source)
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert imported - {"torch"} <= read
    assert imported >= read & set(autopar.runtime.__all__)


def test_every_collective_of_the_plan_is_written_once() -> None:
    """Counting calls in the source gives the steps of the lowered program."""
    from passes.ir.lowered import Loop, Redistribution

    lowered, source = _emitted(mesh_of(dp=2, tp=2), "cpu")
    expected: list[str] = []

    def collect(statements: object) -> None:
        for statement in statements:  # type: ignore[attr-defined]
            if isinstance(statement, Redistribution):
                expected.extend(step.collective for step in statement.steps)
            elif isinstance(statement, Loop):
                collect(statement.body.statements)
                collect([change for change in statement.between if change is not None])

    collect(lowered.body.statements)
    calls = [
        node.func.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in vocabulary.COLLECTIVES
    ]
    assert sorted(calls) == sorted(expected)
    assert expected


def test_emitting_twice_gives_the_same() -> None:
    """Source depends on nothing but the lowered program."""
    assert _emitted(mesh_of(dp=2))[1] == _emitted(mesh_of(dp=2))[1]
