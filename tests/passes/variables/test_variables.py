"""variables: the statements of lowered programs before and after values are replaced by variables."""

import re

import torch
from torch import Tensor, nn

from passes.constrain import Constraints
from passes.ir.configuration import Configuration
from passes.ir.lowered import Body, Compute, FunctionVariables, Loop, LoopVariables, Redistribution, Stage
from passes.ir.mesh import Mesh
from passes.lower.recompute import recompute
from passes.lower.units import fsdp_units
from passes.solve import solve
from passes.solve.limits import Limits
from passes.variables import name_variables
from tests.passes.helpers import Apply, mesh_of, source_of
from tests.passes.lower.test_straight import Heads, choose
from tests.passes.planning import STATES, planning

ONE = mesh_of(dp=1)
TWO = mesh_of(dp=2)
EIGHT = torch.ones(8, 8)


def _lowered(module: nn.Module, mesh: Mesh = ONE, constraints: Constraints | None = None, **inputs: Tensor) -> Stage:
    case = planning(module, inputs or {"x": EIGHT}, mesh, constraints=constraints)
    return case.lowered(solve(case.problem, case.cluster, Limits(1e30, STATES), Configuration(mesh)))


def _before(body: Body) -> list[str]:
    """The ops and redistributions of a body as they print."""
    return [
        f"{item.result} = {'/'.join(step.collective for step in item.steps)}({item.source})"
        if isinstance(item, Redistribution)
        else str(item.op)
        for item in body.statements
        if not isinstance(item, Loop)
    ]


def _after(body: Body, variables: FunctionVariables) -> list[str]:
    """The same with the expressions that read values in place of these."""
    return [re.sub(r"%?[\w.]+(~\d+)?", lambda name: variables.text(name[0]) or name[0], line) for line in _before(body)]


class Straight(nn.Module):
    """A projection, values that are read twice, and a returned value besides the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor, dp: Tensor) -> dict[str, Tensor]:
        """x, dp: [8, 8]."""
        y = self.proj(x * 2).relu()
        z = y.transpose(0, 1) @ y
        return {"loss": (z.cos() * dp + 1).sum(), "y": y}


def test_values_take_over_variables() -> None:
    """A value is named after its module or the field that returns it; another takes over the variable of an operand
    that is not read later. An input is not called like an axis."""
    lowered = _lowered(Straight(), x=EIGHT, dp=EIGHT)
    assert _before(lowered.body) == [
        "%mul = mul(x, other=2)",
        "%linear = linear(%mul, proj.weight)",
        "%relu = relu(%linear)",
        "%transpose = transpose(%relu, dim0=0, dim1=1)",
        "%matmul = matmul(%transpose, %relu)",
        "%cos = cos(%matmul)",
        "%mul_1 = mul(%cos, dp)",
        "%add = add(%mul_1, other=1)",
        "%sum = sum(%add)",
    ]
    found = name_variables(lowered, ONE)
    assert _after(lowered.body, found.whole) == [
        "x = mul(x, other=2)",
        "proj = linear(x, proj.weight)",
        "y = relu(proj)",
        "y_transposed = transpose(y, dim0=0, dim1=1)",
        "y_transposed = matmul(y_transposed, y)",
        "cos = cos(y_transposed)",
        "cos = mul(cos, dp_2)",
        "cos = add(cos, other=1)",
        "loss = sum(cos)",
    ]
    assert (found.regions, found.loops, found.returned) == ((), (), {})


def test_names_are_no_keywords_and_not_reserved() -> None:
    """Inputs whose names generated code cannot use get a number."""
    lowered = _lowered(Apply(lambda lambda_, layer: lambda_ * layer), lambda_=EIGHT, layer=EIGHT)
    assert _after(lowered.body, name_variables(lowered, ONE).whole)[0] == "value = mul(lambda_2, layer_2)"


def test_redistributions() -> None:
    """The result of a redistribution takes over the variable of a value that is not read later, and is named after what
    was done to it otherwise. That of a parameter is named after it."""
    mesh = mesh_of(tp=2)
    case = planning(Heads(), {"x": torch.ones(4, 8)}, mesh)
    lowered = case.lowered(choose(case, x="S(0)", relu="d0", q_linear="out", k_linear="d0", v_linear="d0"))
    assert _before(lowered.body)[:9] == [
        "%relu = relu(x)",
        "%relu~0 = all_gather(%relu)",
        "q.weight~1 = convert(q.weight)",
        "%linear = linear(%relu~0, q.weight~1)",
        "k.weight~2 = convert(k.weight)",
        "%linear_1 = linear(%relu, k.weight~2)",
        "%linear~3 = all_gather(%linear)",
        "%linear_1~4 = all_gather(%linear_1)",
        "%add = add(%linear~3, %linear_1~4)",
    ]
    assert _after(lowered.body, name_variables(lowered, mesh).whole)[:9] == [
        "x = relu(x)",
        "x_gathered = all_gather(x)",
        "q_weight = convert(q.weight)",
        "q = linear(x_gathered, q_weight)",
        "k_weight = convert(k.weight)",
        "k = linear(x, k_weight)",
        "q = all_gather(q)",
        "k = all_gather(k)",
        "q = add(q, k)",
    ]


class Layer(nn.Module):
    """x + relu(projection of x * scale)."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        """x: [8, 8], scale: [8]."""
        return x + self.proj(x * scale).relu()


class Layers(nn.Module):
    """Three layers. The results of the first and of the last one are read outside, and a sum within the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """x: [8, 8], scale: [8]."""
        kept = []
        for layer in self.layers:
            x = layer(x, scale)
            kept.append(x)
        return {"loss": self.head(kept[0]).sum() + x.cos().sum()}


SCALED = {"x": EIGHT, "scale": torch.ones(8)}


def test_loops() -> None:
    """A carried value stays in one variable, which holds the last copy's result in the end. What is read of earlier
    copies is an element of a list. Arguments of a region are named after the caller's variables."""
    lowered = _lowered(Layers(), **SCALED)
    (loop,) = (item for item in lowered.body.statements if isinstance(item, Loop))
    found = name_variables(lowered, ONE)
    assert found.loops == (LoopVariables(last={"%add": "x"}, every={"%add": "every_add"}),)
    assert found.whole.elements == {"%add": ("every_add", 0), "%add_2": ("every_add", 2)}
    assert found.whole.names[loop.region.carries[0].argument] == "x"
    assert _after(lowered.body, found.whole)[1:3] == ["head = linear(every_add[0], head.weight)", "head = sum(head)"]
    (region,) = found.regions
    assert [region.names[argument] for argument in loop.body.arguments] == ["x", "scale"]
    assert _after(loop.body, region) == [
        "mul = mul(x, scale)",
        "proj = linear(mul, layers.*.proj.weight)",
        "proj = relu(proj)",
        "hidden = add(x, proj)",
    ]


def test_a_carried_value_that_is_read_later_is_copied() -> None:
    """The loop must not overwrite a variable that is still read after it."""

    class Residual(Layers):
        """A model that reads the input of the first layer again after the layers."""

        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)

        def forward(self, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
            """x: [8, 8], scale: [8]."""
            x = y = self.first(x)
            for layer in self.layers:
                y = layer(y, scale)
            return {"loss": (x + y).sum()}

    lowered = _lowered(Residual(), **SCALED)
    (loop,) = (item for item in lowered.body.statements if isinstance(item, Loop))
    found = name_variables(lowered, ONE)
    (initial,), (carry,) = loop.initial, loop.region.carries
    assert (found.whole.names[initial], found.whole.names[carry.argument]) == ("hidden", "hidden_2")
    assert found.loops == (LoopVariables(last={"%add": "hidden_2"}, every={}),)
    assert found.whole.names["%add_2"] == "hidden_2"


def test_recomputed_ops_have_lambdas() -> None:
    """Parameters of a lambda are named like the variables that it is called with."""
    lowered = recompute(_lowered(Layers(), **SCALED), {"layers.*": "selective"})
    (loop,) = (item for item in lowered.body.statements if isinstance(item, Loop))
    marked = [item.op.results[0] for item in loop.body.statements if isinstance(item, Compute) and item.recomputed]
    (region,), (carry,) = name_variables(lowered, ONE).regions, loop.region.carries
    assert marked == ["%mul", "%relu"]
    assert region.lambdas == {"%mul": {carry.argument: "x", "scale": "scale"}, "%relu": {"%linear": "proj"}}


def test_a_parameter_that_is_gathered_around_an_op_has_no_variable() -> None:
    """Within a region it has one."""
    constraints: Constraints = {
        "*": {"stored": {"dp": "S(0)"}, "used": {"dp": "R"}},
        "@linear": {"out": {"dp": "S(0)"}},
    }
    lowered = _lowered(Layers(), TWO, constraints, **SCALED)
    (loop,) = (item for item in lowered.body.statements if isinstance(item, Loop))
    (head,), (proj,) = lowered.body.redistributed_parameters, loop.body.redistributed_parameters
    taken = fsdp_units(lowered, TWO)
    before, after = name_variables(lowered, TWO), name_variables(taken, TWO)
    assert before.whole.names[head] == "head_weight"
    assert after.whole.text(head) is None
    # The op runs in a lambda, whose parameters are names also where what it is given is an element of a list.
    assert (before.whole.lambdas, after.whole.lambdas) == ({}, {"%linear_3": {"%add": "add"}})
    assert "lambda add: F.linear(add, gathered(self.root.head.weight)), every_add[0]" in source_of(taken, TWO)
    assert before.regions[0].names[proj] == after.regions[0].names[proj] == "proj_weight"


def test_a_returned_buffer_is_copied_before_it_changes() -> None:
    """The returned value is the one from before the update, under a variable of its own."""

    class Counter(nn.Module):
        """Returns a buffer as it was, twice."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(8))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            """x: [8, 8]."""
            first, second = self.steps.clone(), self.steps.clone()
            self.steps.add_(1)
            return {"loss": x.sum(), "first": first, "second": second}

    assert name_variables(_lowered(Counter()), ONE).returned == {"first": "first", "second": "second"}
