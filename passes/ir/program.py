"""The program: a traced model as plain, immutable data. Passes read programs and return new ones.

A program prints as text, one op per line:

    input input_ids: int64[2, 16]
    parameter lm_head.weight: float32[64, 32]
    %linear = linear(%mul, lm_head.weight)  # float32[2, 16, 64]  lm_head
    output logits: %linear
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

import torch

from passes._torch import OpOverload, pytree, schema_of
from passes.ir.arguments import Argument, Ref, find_overload, format_argument, freeze, references
from passes.ir.errors import InputError
from passes.ir.layout import Shape
from passes.ir.rule import Rules


def sparse_or_nested(tensor: torch.Tensor) -> str | None:
    """The layout of a sparse tensor, such as "sparse_coo", or "nested"; None for a dense one, which is strided."""
    if tensor.is_nested:
        return "nested"
    return None if tensor.layout == torch.strided else str(tensor.layout).removeprefix("torch.")


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as text: "float32"."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class TensorType:
    """Global shape and dtype of a tensor."""

    shape: Shape
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.size * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}{list(self.shape)}"


@dataclass(frozen=True)
class Op:
    """One call of an operator.

    `arguments` are by the names of its schema, in the order of the schema, defaults included. `results` are the names
    of the tensors that it returns. `module` is the path of the module that calls it and `line` the line in the model's
    source. `key` names it in plans: module path, operator, and a number where a module calls an operator more than
    once.
    """

    target: str
    arguments: Mapping[str, Argument]
    results: tuple[str, ...]
    module: str = ""
    module_class: str = ""
    line: str = ""
    key: str = ""

    @property
    def kind(self) -> str:
        """The operator's name: "linear" for `aten.linear.default`."""
        return self.target.split(".")[1]

    @property
    def overload(self) -> OpOverload:
        """The operator itself."""
        return find_overload(self.target)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the tensors that it reads, in the order of the schema; a tensor that is read twice occurs twice."""
        return tuple(references(tuple(self.arguments.values())))

    def __str__(self) -> str:
        defaults = {argument.name: argument.default_value for argument in schema_of(self.overload).arguments}
        shown = [
            (name, value)
            for name, value in self.arguments.items()
            if isinstance(value, Ref) or (name not in defaults) or value != freeze(defaults[name])
        ]
        given = [
            format_argument(value) if isinstance(value, Ref) else f"{name}={format_argument(value)}"
            for name, value in shown
        ]
        return f"{', '.join(self.results)} = {self.kind}({', '.join(given)})"


@dataclass(frozen=True)
class Input:
    """A tensor of the batch.

    `argument` is its place in the arguments of the model's forward, `name` the name by which ops refer to it (the same,
    unless a parameter has that name).
    """

    name: str
    argument: str
    type: TensorType
    trainable: bool = False


@dataclass(frozen=True)
class ModelTensor:
    """A tensor that the model holds, under all the names it has."""

    names: tuple[str, ...]
    type: TensorType

    @property
    def name(self) -> str:
        """The first of its names, by which ops refer to it."""
        return self.names[0]


@dataclass(frozen=True)
class Buffer(ModelTensor):
    """A buffer under all the names it has."""


@dataclass(frozen=True)
class Parameter(ModelTensor):
    """A parameter under all the names it has; `trainable` is its `requires_grad`."""

    trainable: bool


@dataclass(frozen=True)
class Update:
    """A buffer that the program updates, and the result that becomes its new value."""

    buffer: str
    value: str


@dataclass(frozen=True)
class StateChange:
    """An operator without gradient that changes a parameter in place, element by element, before anything reads it:
    `arguments` are all but the parameter."""

    parameter: str
    target: str
    arguments: Mapping[str, Argument]

    def __str__(self) -> str:
        given = "".join(f", {name}={format_argument(value)}" for name, value in self.arguments.items())
        return f"change {self.target.split('.')[1]}({self.parameter}{given})"


@dataclass(frozen=True)
class Program:
    """A whole model in one mode.

    `outputs` are the leaves of what the model returns (references and plain values) and `output_tree` reassembles them;
    `output_names` names each leaf. `types` has the type of every tensor. `copied` are the results of ops that return a
    view if possible, and here returned a copy. `changes` run before the ops. In a `compiled` program each chain of
    cheap ops in a region is one kernel. `rules` are those of ops that no rule function covers; they were discovered by
    running the ops.
    """

    inputs: tuple[Input, ...]
    parameters: tuple[Parameter, ...]
    buffers: tuple[Buffer, ...]
    constants: Mapping[str, torch.Tensor]
    ops: tuple[Op, ...]
    outputs: tuple[Argument, ...]
    output_names: tuple[str, ...]
    output_tree: pytree.TreeSpec
    types: Mapping[str, TensorType]
    updates: tuple[Update, ...] = ()
    copied: frozenset[str] = frozenset()
    changes: tuple[StateChange, ...] = ()
    compiled: bool = False
    rules: Rules = field(default_factory=dict)

    @property
    def returned(self) -> frozenset[str]:
        """The tensors that leave the program: in its outputs, and as new values of buffers."""
        names = (name for value in self.outputs for name in references(value))
        return frozenset({*names, *(update.value for update in self.updates)})

    @cached_property
    def updated(self) -> tuple[Parameter, ...]:
        """The parameters that the optimizer updates: those that train, and that an op reads."""
        read = {name for op in self.ops for name in op.operands}
        return tuple(item for item in self.parameters if item.trainable and item.name in read)

    def __str__(self) -> str:
        types = [", ".join(str(self.types[name]) for name in op.results) for op in self.ops]
        outputs = zip(self.output_names, self.outputs, strict=True)
        lines = (
            *(f"input {item.name}: {item.type}" for item in self.inputs),
            *(f"parameter {' = '.join(item.names)}: {item.type}" for item in self.parameters),
            *(f"buffer {' = '.join(item.names)}: {item.type}" for item in self.buffers),
            *(f"constant {name}: {self.types[name]}" for name in self.constants),
            *map(str, self.changes),
            *(f"{op}  # {made}" + f"  {op.module}" * bool(op.module) for op, made in zip(self.ops, types, strict=True)),
            *(f"update {update.buffer}: {update.value}" for update in self.updates),
            *(f"output {name}: {format_argument(value)}" for name, value in outputs),
        )
        return "\n".join(lines)


@dataclass(frozen=True)
class Symbolic:
    """A program for many sizes of its inputs: the sizes in `program` (in types, arguments and outputs) are sympy
    expressions over symbols.

    A symbol has the name of the dim that it stands for: "input_ids.0". `ranges` are the minimum and maximum (None: no
    limit) of each, `conditions` are the other conditions on them. `passes/dynamic_shapes/specialize` turns it into a
    program that passes can read.
    """

    program: Program
    ranges: Mapping[str, tuple[int, int | None]]
    conditions: tuple[object, ...]

    def __str__(self) -> str:
        sizes = [
            f"size {name}: " + (f"at least {least}" if most is None else f"{least} to {most}")
            for name, (least, most) in self.ranges.items()
        ]
        return "\n".join([*sizes, *(f"condition {condition}" for condition in self.conditions), str(self.program)])


def has_gradient(dtype: torch.dtype) -> bool:
    """Whether tensors of a dtype can have a gradient."""
    return dtype.is_floating_point or dtype.is_complex


def flow(ops: Iterable[Op], flowing: set[str], types: Mapping[str, TensorType]) -> None:
    """Add to `flowing` the differentiable results of ops that read something in it: gradients flow through them too."""
    for op in ops:
        if op.kind != "detach" and any(name in flowing for name in op.operands):
            flowing.update(name for name in op.results if has_gradient(types[name].dtype))


def differentiable(program: Program) -> set[str]:
    """Tensors that a gradient flows through: they depend on a trainable parameter or input."""
    sources: tuple[Parameter | Input, ...] = (*program.parameters, *program.inputs)
    flowing = {item.name for item in sources if item.trainable}
    flow(program.ops, flowing, program.types)
    return flowing


# In-place operators that change nothing the second time: whether an input was changed before makes no difference.
REPEATABLE = frozenset({"clamp_", "clamp_min_", "clamp_max_", "relu_"})


def draws(op: Op) -> bool:
    """Whether an op draws random numbers."""
    if any(op.arguments.get(name, 1.0) == 0.0 for name in ("p", "dropout", "dropout_p")):
        return False
    if not (op.arguments.get("train", True) and op.arguments.get("training", True)):
        return False
    return torch.Tag.nondeterministic_seeded in op.overload.tags


def has_linear_gradients(op: Op) -> bool:
    """Whether the gradients of `op` can be passed as addends, as those of all torch operators: its own gradients are
    linear in them. The backward of a custom autograd function may be nonlinear (gradient clipping); capture determines
    which."""
    return op.kind != "autograd_function" or op.arguments["linear"] is True


def with_scalars_alone(program: Program) -> Program:
    """`program` with None for every output that is not a scalar, and without the ops that only these need.

    Raises InputError where it has no scalar.
    """
    if not any(program.types[name].shape == () for value in program.outputs for name in references(value)):
        raise InputError("outputs='scalars' is asked for, but the model returns no scalar: pass labels or a loss")
    outputs = tuple(
        value if all(program.types[name].shape == () for name in references(value)) else None
        for value in program.outputs
    )
    return without_unused(replace(program, outputs=outputs))


def without_unused(program: Program) -> Program:
    """Drop ops whose results are never read, and the types of the dropped tensors."""
    used = set(program.returned)
    kept: list[Op] = []
    for op in reversed(program.ops):
        if any(name in used for name in op.results):
            kept.append(op)
            used.update(op.operands)
    given: tuple[Input | Parameter | Buffer, ...] = (*program.inputs, *program.parameters, *program.buffers)
    named = {item.name for item in given}
    constants = {name: value for name, value in program.constants.items() if name in used}
    typed = {*named, *constants, *(name for op in kept for name in op.results)}
    types = {name: type for name, type in program.types.items() if name in typed}
    return replace(program, ops=tuple(reversed(kept)), constants=constants, types=types)
