"""Programs of one op, lowered and generated under a given strategy, and run on simulated or real ranks."""

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from autopar.runtime import Axis
from autopar.runtime.state import axes_of, spanning
from passes._torch import TorchDispatchMode
from passes.cost.forms import form_contexts
from passes.ir.arguments import Argument, Ref, find_overload
from passes.ir.choices import Cover, Edge, EdgeGroup, Node, Problem, Solution, Strategy, StrategyBytes
from passes.ir.configuration import Configuration
from passes.ir.folded import Folded
from passes.ir.layout import Layout, gradient
from passes.ir.lowered import Compute, Stage
from passes.ir.mesh import Mesh
from passes.ir.program import Input, Op, Program, TensorType, has_gradient
from passes.ir.redistribution import RedistributionStep
from passes.ir.rule import Rule
from passes.lower.straight import Casts, straight_code
from passes.regions import fold
from passes.rules import written_rule
from passes.rules.local_forms import LOCAL_FORMS
from passes.rules.strategies import Choices, Digit, OpContext, named_choices, op_context, op_strategies, split, starts
from tests.passes.helpers import Coordinate, Values, part, source_of, spread, summed
from tests.passes.rules.ranks import ranks
from tests.passes.rules.samples import Sample


@dataclass(frozen=True)
class OneOp:
    """A sample as a program: its tensors are inputs called x0, x1, …; floating ones have a gradient."""

    sample: Sample
    folded: Folded
    op: Op
    operands: list[Tensor]
    results: list[Tensor]

    @property
    def rule(self) -> Rule | None:
        """The rule of the op."""
        return written_rule(self.op, self.folded.types)

    @property
    def context(self) -> OpContext:
        """The op context that strategies are made for."""
        return op_context(self.op, self.rule, self.folded.types, self.folded.flowing, set(), set())

    def strategies(self, mesh: Mesh) -> dict[Strategy, Choices]:
        """Every strategy whose splits begin at a part of a factor, or at its second digit of two, with its choices."""
        digits = {size: list(digits_of(self.rule, size)) for size in mesh.sizes}
        return op_strategies(self.context, digits, mesh)


def digits_of(rule: Rule | None, size: int) -> dict[Digit, None]:
    """The digits of every factor that an axis of `size` may split: from the front of each part, and after two."""
    found: dict[Digit, None] = {}
    for factor, start in starts(rule) if rule else ():
        for major in (start, 2 * start):
            if split(rule, factor, major, size) is not None:
                found[factor, major] = None
    return found


def one_op(sample: Sample, trainable: Container[int] = range(100)) -> OneOp:
    """The program of a sample; its floating operands in `trainable` have a gradient."""
    operands: list[Tensor] = []

    def named(value: object) -> Argument:
        if isinstance(value, Tensor):
            able = len(operands) in trainable and len(operands) not in sample.fixed
            operands.append(value.clone().requires_grad_(able and has_gradient(value.dtype)))
            return Ref(f"x{len(operands) - 1}")
        if isinstance(value, (list, tuple)):
            return tuple(named(item) for item in value)
        return value  # type: ignore[return-value]

    arguments: dict[str, Argument] = {}
    for position, item in enumerate(find_overload(sample.target)._schema.arguments):
        given = sample.options.get(item.name, item.default_value)
        arguments[item.name] = named(sample.arguments[position] if position < len(sample.arguments) else given)
    results = sample.run(operands)
    names = tuple(f"%y{index}" for index in range(len(results)))
    op = Op(sample.target, arguments, names, key=f"/{sample.kind}")
    inputs = tuple(
        Input(f"x{index}", f"x{index}", _type(tensor), tensor.requires_grad) for index, tensor in enumerate(operands)
    )
    types = {item.name: item.type for item in inputs}
    types.update({name: _type(tensor) for name, tensor in zip(names, results, strict=True)})
    program = Program(
        inputs, (), (), {}, (op,), tuple(map(Ref, names)), tuple(name[1:] for name in names),
        pytree.tree_structure(tuple(names)), types,
    )  # fmt: skip
    return OneOp(sample, fold(program), op, operands, results)


def _type(tensor: Tensor) -> TensorType:
    return TensorType(tuple(tensor.shape), tensor.dtype)


def problem_of(one: OneOp, strategy: Strategy) -> Problem:
    """The problem whose only choice is `strategy`, with inputs and outputs in just the layouts that it has."""
    nodes: list[Node] = []
    edges: list[Edge] = []
    groups: list[EdgeGroup] = []

    def add(key: str, kind: str, name: str, operands: Sequence[Layout], results: Sequence[Layout]) -> int:
        chosen = strategy if kind == "op" else Strategy(("",), tuple(operands), tuple(results))
        nodes.append(Node(key, kind, name, 1, 0, (chosen,), (0.0,), (StrategyBytes(),)))
        return len(nodes) - 1

    def use(producer: int, result: int, consumer: int, operand: int, name: str) -> None:
        type = one.folded.types[name]
        edges.append(Edge(producer, result, consumer, operand, len(groups), False))
        groups.append(EdgeGroup(name, type, 1, 0, name in one.folded.flowing, type.dtype.itemsize, False, False))

    sources = [
        add(name, "input", name, (), (layout,)) for name, layout in zip(one.op.operands, strategy.operands, strict=True)
    ]
    node = add(one.op.key, "op", one.op.results[0], strategy.operands, strategy.results)
    for slot, (source, name) in enumerate(zip(sources, one.op.operands, strict=True)):
        use(source, 0, node, slot, name)
    for index, (name, layout) in enumerate(zip(one.op.results, strategy.results, strict=True)):
        sink = add(f"output {name[1:]}", "output", name, (layout,), ())
        use(node, index, sink, 0, name)
    return Problem(
        nodes, edges, groups, ["before"], [1], {item.key: index for index, item in enumerate(nodes)}, [Cover()]
    )


@dataclass
class Case:
    """A strategy, the source that was generated for it, and what each rank is given and gives back.

    `inputs` and `cotangents` are per operand and per result (None where no gradient flows)."""

    name: str
    strategy: Strategy
    source: str
    body: str
    inputs: list[Values]
    trainable: list[int]
    cotangents: list[Values | None]
    wholes: list[Tensor | None]
    outcomes: dict[Coordinate, "Outcome"] = field(default_factory=dict)


# Name of the collective and bytes of its input.
Sent = tuple[str, int]
# Results, gradients, and the collectives of both passes.
Outcome = tuple[list[Tensor], list[Tensor | None], tuple[list[Sent], list[Sent]]]


class _Counting(TorchDispatchMode):
    """Notes the collectives that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Sent] = []

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        if func.namespace == "_c10d_functional" and "wait" not in func._opname:
            assert isinstance(args[0], Tensor)
            self.seen.append((func._opname, args[0].nbytes))
        return func(*args, **(kwargs or {}))  # type: ignore[arg-type]


def lowered_one(one: OneOp, strategy: Strategy, mesh: Mesh) -> Stage:
    """`one` lowered under `strategy`."""
    problem = problem_of(one, strategy)
    chosen = Solution((0,) * len(problem.nodes), frozenset(), 0.0, 0.0, Configuration(mesh))
    return straight_code(one.folded, problem, chosen, mesh, Casts())


def statement_of(lowered: Stage) -> Compute:
    """The only statement of a lowered op."""
    (statement,) = lowered.body.statements
    assert isinstance(statement, Compute)
    return statement


def make_case(one: OneOp, strategy: Strategy, mesh: Mesh, generator: torch.Generator) -> Case:
    """Lower and generate `one` under `strategy`, and lay out its operands and the gradients of its results."""
    lowered = lowered_one(one, strategy, mesh)
    statement = statement_of(lowered)
    source = source_of(lowered, mesh, "OneOp")
    inputs = [
        spread(tensor.detach(), layout, mesh, generator)
        for tensor, layout in zip(one.operands, strategy.operands, strict=True)
    ]
    wholes: list[Tensor | None] = []
    cotangents: list[Values | None] = []
    for tensor, layout in zip(one.results, strategy.results, strict=True):
        whole = None
        if tensor.requires_grad:
            double = torch.complex128 if tensor.is_complex() else torch.float64
            whole = torch.randn(tensor.shape, generator=generator, dtype=double).to(tensor.dtype)
        wholes.append(whole)
        cotangents.append(None if whole is None else spread(whole, gradient(layout), mesh, generator))
    trainable = [slot for slot, tensor in enumerate(one.operands) if tensor.requires_grad]
    name = f"{one.op} with {', '.join(strategy.methods)} on {mesh}: {strategy.operands} -> {strategy.results}"
    return Case(name, strategy, source, statement.body, inputs, trainable, cotangents, wholes)


@lru_cache(maxsize=8)
def _loaded(source: str) -> object:
    namespace: dict[str, object] = {}
    exec(compile(source, "<generated>", "exec"), namespace)
    return namespace["OneOp"]


def run_source(
    source: str,
    axes: tuple[Axis, ...],
    inputs: Sequence[Tensor],
    trainable: Sequence[int],
    cotangents: Sequence[Tensor | None],
) -> Outcome:
    """Run generated source on the local `inputs` of one rank, forward and backward: results and gradients."""
    kind = _loaded(source)
    own = [tensor.clone().requires_grad_(slot in trainable) for slot, tensor in enumerate(inputs)]
    with _Counting() as counting:
        results = kind(nn.Module(), axes, torch.device("cpu"), {}).forward(*own)  # type: ignore[operator]
    pairs = [
        (result, cotangent) for result, cotangent in zip(results, cotangents, strict=True) if cotangent is not None
    ]
    gradients: list[Tensor | None] = [None] * len(own)
    backward: list[Sent] = []
    if pairs:
        outputs, given = zip(*pairs, strict=True)
        with _Counting() as counting_backward:
            found = torch.autograd.grad(outputs, [own[slot] for slot in trainable], given, allow_unused=True)
        backward = counting_backward.seen
        for slot, item in zip(trainable, found, strict=True):
            gradients[slot] = torch.zeros_like(own[slot]) if item is None else item
    return [result.detach() for result in results], gradients, (counting.seen, backward)


def run_here(case: Case, mesh: Mesh) -> None:
    """Run a case on all ranks, one after the other in this process: it must not need a process group."""
    for coordinate in mesh.coordinates():
        axes = tuple(
            Axis(name, size, index, "no group")
            for name, size, index in zip(mesh.names, mesh.sizes, coordinate, strict=True)
        )
        _, source, *given = _given(case, coordinate)
        case.outcomes[coordinate] = run_source(source, spanning(axes, mesh.spans, lambda _: "no group"), *given)


def communicates(case: Case) -> bool:
    """Whether the local form of a case has collectives inside."""
    return bool(case.body) and LOCAL_FORMS[case.body].communicates


_Given = tuple[str, str, list[Tensor], list[int], list[Tensor | None]]
_Cases = list[tuple[Mesh, list[dict[Coordinate, _Given]]]]

# As many as the largest mesh of the tests has.
_RANKS = 6


@cache
def _device_mesh(mesh: Mesh) -> DeviceMesh:
    """`mesh` on the first ranks."""
    return DeviceMesh("cpu", torch.arange(mesh.size).reshape(mesh.sizes), mesh_dim_names=mesh.names)


@cache
def _whole_group(mesh: Mesh) -> str:
    """The group of both axes of a mesh; every rank makes it, those that are not of the mesh as well."""
    assert len(mesh.sizes) <= 2
    group = dist.new_group(list(range(mesh.size)))
    return group.group_name if isinstance(group, dist.ProcessGroup) else ""


def _on_rank(meshes: _Cases) -> list[list[Outcome]]:
    """Run the cases of each mesh on its first ranks."""
    found = []
    for mesh, cases in meshes:
        device_mesh = _device_mesh(mesh)
        coordinate = device_mesh.get_coordinate()
        group = _whole_group(mesh)
        axes = () if coordinate is None else spanning(axes_of(device_mesh), mesh.spans, lambda _, name=group: name)
        outcomes = []
        for case in cases if coordinate is not None else ():
            name, source, *given = case[tuple(coordinate or ())]
            try:
                outcomes.append(run_source(source, axes, *given))
            except Exception as error:
                error.add_note(name)
                raise
        found.append(outcomes)
    return found


def run_on_ranks(waiting: Sequence[tuple[Mesh, Case]]) -> None:
    """Run cases whose local form communicates on gloo ranks."""
    by_mesh: dict[Mesh, list[Case]] = {}
    for mesh, case in waiting:
        by_mesh.setdefault(mesh, []).append(case)
    given = [
        (mesh, [{coordinate: _given(case, coordinate) for coordinate in mesh.coordinates()} for case in cases])
        for mesh, cases in by_mesh.items()
    ]
    found = ranks(_RANKS).run(_on_rank, given)
    for position, (mesh, cases) in enumerate(by_mesh.items()):
        for rank, coordinate in enumerate(mesh.coordinates()):
            for case, outcome in zip(cases, found[rank][position], strict=True):
                case.outcomes[coordinate] = outcome


def _given(case: Case, coordinate: Coordinate) -> _Given:
    """The inputs of the rank at `coordinate`."""
    inputs = [values[coordinate] for values in case.inputs]
    cotangents = [None if values is None else values[coordinate] for values in case.cotangents]
    return case.name, case.source, inputs, case.trainable, cotangents


def check(one: OneOp, case: Case, mesh: Mesh) -> None:
    """Assert that what the ranks gave is, put together, what the op gives for the whole, and so its gradients."""
    strategy, where = case.strategy, case.name
    check_sent(one, case, mesh)
    single = any(tensor.dtype == torch.float32 for tensor in (*one.operands, *one.results))
    tolerance = float("inf") if one.sample.random else 1e-5 if single else 1e-12
    for index, (expected, layout) in enumerate(zip(one.results, strategy.results, strict=True)):
        values = {coordinate: results[index] for coordinate, (results, _, _) in case.outcomes.items()}
        _check_values(values, expected.detach(), layout, mesh, f"result {index} of {where}", tolerance)
    pairs = [(result, whole) for result, whole in zip(one.results, case.wholes, strict=True) if whole is not None]
    if not pairs:
        return
    outputs, given = zip(*pairs, strict=True)
    trained = [one.operands[slot] for slot in case.trainable]
    found = torch.autograd.grad(outputs, trained, given, retain_graph=True, allow_unused=True)
    for slot, expected in zip(case.trainable, found, strict=True):
        whole = torch.zeros_like(one.operands[slot]) if expected is None else expected
        gradients = {}
        for coordinate, (_, given_back, _) in case.outcomes.items():
            value = given_back[slot]
            assert value is not None, where
            gradients[coordinate] = value
        layout = gradient(strategy.operands[slot])
        _check_values(gradients, whole, layout, mesh, f"gradient of operand {slot} of {where}", tolerance)


def check_sent(one: OneOp, case: Case, mesh: Mesh) -> None:
    """Assert that the collectives that ranks ran are those that are priced; of the backward pass no others, if the
    first operand has no gradient."""
    context = one.context
    choices = named_choices(context, case.strategy.methods, mesh)
    assert choices is not None
    forward: list[Sent] = []
    backward: list[Sent] = []
    for form, about in form_contexts(context, choices, case.strategy, mesh, "cpu"):
        repeats = int(form.repeats(about)) if form.repeats else 1
        forward += _priced(form.steps(about), form.itemsize(about)) * repeats
        backward += _priced(form.backward_steps(about), form.itemsize(about))
        there, back = form.shifts(about) if form.shifts else ((), ())
        forward += [("all_to_all", int(size)) for count, size in there for _ in range(int(count))]
        backward += [("all_to_all", int(size)) for count, size in back for _ in range(int(count))]
    for _, _, (sent, sent_backward) in case.outcomes.values():
        assert sorted(map(_named, sent)) == sorted(forward), case.name
        found = Counter(map(_named, sent_backward))
        assert found <= Counter(backward), case.name
        assert found == Counter(backward) or 0 not in case.trainable, case.name


def _priced(steps: Sequence[RedistributionStep], itemsize: int) -> list[Sent]:
    return [(step.collective, prod(step.before) * itemsize) for step in steps if step.moves]


def _named(sent: Sent) -> Sent:
    name, size = sent
    return name.removesuffix("_into_tensor").removesuffix("_tensor").removesuffix("_single"), size


def _check_values(values: Values, whole: Tensor, layout: Layout, mesh: Mesh, where: str, tolerance: float) -> None:
    for coordinate, value in summed(values, layout, mesh).items():
        expected = part(whole, layout, coordinate, mesh)
        assert value.shape == expected.shape, f"{where}: {value.shape} is not {expected.shape}"
        assert value.dtype == expected.dtype, f"{where}: {value.dtype} is not {expected.dtype}"
        if tolerance == float("inf") or not whole.numel():
            continue
        if not has_gradient(value.dtype):
            assert torch.equal(value, expected), where
            continue
        error = float((value - expected).abs().max()) / max(1.0, float(whole.abs().max()))
        assert not error > tolerance, f"{where}: off by {error:.1e} on rank {coordinate}"
