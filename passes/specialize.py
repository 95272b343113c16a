"""specialize: a program for many sizes and the sizes of one call in, the program for these sizes out.

`decided` and `hold` take along what a plan decided: what its nodes do at the planned sizes they do at others, as far as
that divides.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import cast

from passes.ir.choices import Node, Problem, Solution, Strategy
from passes.ir.errors import InputError
from passes.ir.layout import Layout, Letter, Shape
from passes.ir.program import Argument, Folded, Op, Program, Symbolic, TensorType
from passes.ir.sizes import is_expression, substituted


def specialize(symbolic: Symbolic, shapes: Mapping[str, Shape]) -> Program:
    """The program for inputs of `shapes`, by argument.

    Raises InputError for sizes that the program was not traced for.
    """
    sizes = _sizes(symbolic, shapes)

    @cache
    def number(expression: object) -> object:
        try:
            return substituted(expression, sizes)
        except ValueError:
            raise InputError(
                f"{_given(shapes)} do not fit the model: its size {expression} is no whole number"
            ) from None

    for condition in symbolic.conditions:
        if number(condition) is not True:
            raise InputError(f"{_given(shapes)} do not fit the trace of the model, which holds where {condition}")
    return _with_numbers(symbolic.program, number)


def _sizes(symbolic: Symbolic, shapes: Mapping[str, Shape]) -> dict[str, int]:
    """The size that each symbol stands for."""
    sizes: dict[str, int] = {}
    for item in symbolic.program.inputs:
        for size, given in zip(item.type.shape, shapes[item.argument], strict=True):
            if str(size) in symbolic.ranges:
                sizes.setdefault(str(size), given)
    for name, (least, most) in symbolic.ranges.items():
        if name not in sizes:
            raise InputError(f"{_given(shapes)} do not say what {name} is, which the trace of the model needs")
        if sizes[name] < least or (most is not None and sizes[name] > most):
            allowed = f"at least {least}" if most is None else f"{least} to {most}"
            raise InputError(f"{_where(name)} has size {sizes[name]}, but the model was traced for {allowed} there")
    for item in symbolic.program.inputs:
        for dim, (size, given) in enumerate(zip(item.type.shape, shapes[item.argument], strict=True)):
            wanted = substituted(size, sizes)
            if wanted != given:
                same = "" if isinstance(size, int) else f", which is {size}"
                where = _where(f"{item.argument}.{dim}")
                raise InputError(f"{where} has size {given}, but the model was traced for {wanted} there{same}")
    return sizes


def _where(symbol: str) -> str:
    name, _, dim = symbol.rpartition(".")
    return f"dim {dim} of {name}"


def _given(shapes: Mapping[str, Shape]) -> str:
    return "the sizes " + ", ".join(f"{name}{list(shape)}" for name, shape in shapes.items())


def _with_numbers(program: Program, number: Callable[[object], object]) -> Program:
    """`program` with all expressions replaced by numbers."""

    def argument(value: Argument) -> Argument:
        if isinstance(value, tuple):
            return tuple(argument(item) for item in value)
        return cast(Argument, number(value)) if is_expression(value) else value

    def typed(type: TensorType) -> TensorType:
        shape = tuple(cast(int, number(size)) if is_expression(size) else size for size in type.shape)
        return replace(type, shape=shape)

    def op(given: Op) -> Op:
        return replace(given, arguments={name: argument(value) for name, value in given.arguments.items()})

    return replace(
        program,
        inputs=tuple(replace(item, type=typed(item.type)) for item in program.inputs),
        ops=tuple(op(item) for item in program.ops),
        outputs=tuple(argument(value) for value in program.outputs),
        types={name: typed(type) for name, type in program.types.items()},
    )


# --- what a plan decided ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decided:
    """What was decided for one node, and the planned shapes of its operands and results."""

    strategy: Strategy
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]


def decided(folded: Folded, problem: Problem, solution: Solution) -> Mapping[str, Decided]:
    """What `solution` decides for each node, by its key."""
    shapes = _shapes(folded)
    found = {}
    for index, node in enumerate(problem.nodes):
        strategy = solution.strategy(problem, index)
        found[node.key] = Decided(strategy, *shapes(node))
    return found


def hold(folded: Folded, problem: Problem, decisions: Mapping[str, Decided]) -> Problem:
    """`problem` with only those strategies that do what was decided at other sizes.

    Where sizes do not allow what a node does on some axis, it is free on that axis; a node that is not among the
    decisions is free. A split at the same place of a dim whose size is another may lie at another digit.
    """
    shapes = _shapes(folded)
    nodes = [
        _held(node, decisions[node.key], *shapes(node)) if node.key in decisions else node for node in problem.nodes
    ]
    return replace(problem, nodes=nodes)


Shapes = tuple[Shape, ...]


def _shapes(folded: Folded) -> Callable[[Node], tuple[Shapes, Shapes]]:
    """For every node the shapes of its operands and of its results."""
    ops = {op.key: op for op in folded.ops}

    def shapes(node: Node) -> tuple[Shapes, Shapes]:
        strategy = node.strategies[0]
        if node.kind == "op":
            operands, results = ops[node.key].operands, ops[node.key].results
        else:
            operands, results = (node.name,) * len(strategy.operands), (node.name,) * len(strategy.results)
        return tuple(folded.types[name].shape for name in operands), tuple(folded.types[name].shape for name in results)

    return shapes


def _held(node: Node, before: Decided, operands: Shapes, results: Shapes) -> Node:
    """`node` with only the strategies that do what was decided, on as many axes as some strategy does it on."""
    shapes, planned = (*operands, *results), (*before.operands, *before.results)
    if [len(shape) for shape in shapes] != [len(shape) for shape in planned]:
        return node
    wanted = (*before.strategy.operands, *before.strategy.results)
    for axes in _most_first(len(before.strategy.methods)):
        exact, moved = [], []
        for index, strategy in enumerate(node.strategies):
            layouts = (*strategy.operands, *strategy.results)
            if _on(layouts, axes) == _on(wanted, axes):
                exact.append(index)
            if all(
                _alike(layout[axis], letters[axis], now, then)
                for layout, letters, now, then in zip(layouts, wanted, shapes, planned, strict=True)
                for axis in axes
            ):
                moved.append(index)
        # Inputs and outputs lie as planned if they can: users cut their batches so.
        kept = exact if exact and node.kind != "op" else moved
        if kept:
            return _only(node, kept)
    return node


def _most_first(count: int) -> Iterator[tuple[int, ...]]:
    """All choices of some of `count` axes, those of most axes first."""
    for size in range(count, 0, -1):
        yield from combinations(range(count), size)


def _on(layouts: Sequence[Layout], axes: Sequence[int]) -> list[list[Letter]]:
    return [[layout[axis] for axis in axes] for layout in layouts]


def _alike(letter: Letter, before: Letter, shape: Shape, planned: Shape) -> bool:
    """Whether a letter does at one size what another does at the planned one: which digit of a dim that is may be
    told by a size."""
    if letter.kind != "S" or before.kind != "S":
        return letter == before
    return letter.dim == before.dim and (letter.major == before.major or shape[letter.dim] != planned[letter.dim])


def _only(node: Node, kept: Sequence[int]) -> Node:
    """`node` with some of its strategies."""
    return replace(
        node,
        strategies=tuple(node.strategies[index] for index in kept),
        seconds=tuple(node.seconds[index] for index in kept),
        memory=tuple(node.memory[index] for index in kept),
        results=tuple(node.results[index] for index in kept) if node.results else (),
        copies=tuple(node.copies[index] for index in kept) if node.copies else (),
        forward=tuple(node.forward[index] for index in kept) if node.forward else (),
        light=tuple(node.light[index] for index in kept) if node.light else (),
    )
