"""The program: a traced model as plain, immutable data. Passes read programs and return new ones.

The sharding rule of an op names its factors, as in einsum: `linear` is "b s k, n k -> b s n". Each dim of each operand
and result is a list of parts, most significant first; a part is a whole factor or a range of its digits.
`passes/rules/strategies.py` derives from that how each tensor is split.

A program prints as text, one op per line:

    input input_ids: int64[2, 16]
    parameter lm_head.weight: float32[64, 32]
    %linear = linear(%mul, lm_head.weight)  # float32[2, 16, 64]  lm_head
    output logits: %linear
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache, cached_property
from math import prod

import torch

from passes._torch import OpOverload, pytree, schema_of
from passes.ir.layout import Shape


class Role(Enum):
    """The role of a factor: how it may be split."""

    FREE = "free"  # results carry it
    SUM = "sum"  # summed over: results without it are pending sums
    INSIDE = "inside"  # reduced inside the op's local form: results without it are the same on every rank
    WHOLE = "whole"  # not to be split


@dataclass(frozen=True, slots=True)
class Factor:
    """A named index of an op and its extent.

    `ordered` says that ranks must have consecutive parts in rank order, because the local form communicates with
    neighbouring ranks. `reach` is the number of elements of the operand that it needs from the neighbours on both
    sides, and `least` the minimum local size of the factor for that.
    """

    size: int
    role: Role = Role.FREE
    ordered: bool = False
    reach: tuple[int, int] = (0, 0)
    least: int = 1


@dataclass(frozen=True, slots=True)
class Part:
    """A dim, or a part of one: the digits of `factor` from `start` (exclusive product of those before) of `size`."""

    factor: str
    size: int
    start: int = 1


Dims = tuple[tuple[Part, ...], ...]


def parts_of(*tensors: Dims) -> Iterator[Part]:
    """The parts of all dims of these tensors, in order."""
    return (part for dims in tensors for parts in dims for part in parts)


@dataclass(frozen=True, slots=True)
class Method:
    """A way to split an op on one axis: its `factors` are split at once, into equally many parts. No tensor has two of
    them. `form` is the local form that runs on a shard, "" if the op itself does. `role` is that of the method; None:
    that of its first factor. Set it where that is WHOLE. `in_stripes` says that ranks have equal work only where each
    has every n-th entry, so that such splits may be offered too."""

    factors: tuple[str, ...]
    form: str = ""
    role: Role | None = None
    in_stripes: bool = False


@dataclass(frozen=True, slots=True)
class Saved:
    """A saved tensor: operand or result `index`.

    `needed_by` are the operands one of which must have a gradient; empty means any. `copy` says that autograd saves a
    new tensor of the same size instead.
    """

    index: int
    result: bool = False
    needed_by: tuple[int, ...] = ()
    copy: bool = False


@dataclass(frozen=True)
class Rule:
    """The sharding rule of one op.

    - `operands`, `results`: the parts of every dim of every tensor, operands in the order of `Op.operands`.
    - `added`: operands that are added to a sum; they are pending sums where it is split (the bias of `linear`).
    - `linear`: sets of operands in which the op is exactly linear together, so that pending sums pass through.
    - `forms`: for a factor, the local form that runs on a shard where the op itself would be incorrect.
    - `joint`: by name, methods that split several factors at once. Each factor alone is a method of its own name.
    - `multiplications`: of the forward pass on one device, a multiply-add counted as two.
    - `backward`: for each operand, the multiplications of its gradient relative to those of the forward pass.
    - `divided`: by factor, the parts of the multiplications of both passes that have it; other factors are in all.
    - `saved`: the tensors that autograd saves.
    - `moves`: whether it reads or writes memory (a view does not).
    """

    factors: Mapping[str, Factor]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    added: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    forms: Mapping[str, str] = field(default_factory=dict)
    joint: Mapping[str, Method] = field(default_factory=dict)
    multiplications: float = 0.0
    backward: tuple[float, ...] = ()
    divided: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    saved: tuple[Saved, ...] = ()
    moves: bool = True

    @property
    def local_forms(self) -> tuple[str, ...]:
        """The local forms of all methods."""
        return (*self.forms.values(), *(method.form for method in self.joint.values()))

    def method(self, name: str) -> Method | None:
        """The method called `name`; None where there is none."""
        if name in self.joint:
            return self.joint[name]
        return Method((name,), self.forms.get(name, "")) if name in self.factors else None

    def methods_with(self, factor: str) -> Iterator[str]:
        """The names of the methods that split `factor`."""
        yield factor
        yield from (name for name, method in self.joint.items() if factor in method.factors)


# Rules that were found by running ops, by the signature of a call (`passes.rules.signature`).
Rules = Mapping[Hashable, Rule]


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


@dataclass(frozen=True, slots=True)
class Ref:
    """A use of a tensor: an input, a parameter, a buffer or constant by its name, or a result as "%name"."""

    name: str

    def __str__(self) -> str:
        return self.name


Argument = (
    None
    | bool
    | int
    | float
    | complex
    | str
    | torch.dtype
    | torch.device
    | torch.layout
    | torch.memory_format
    | Ref
    | tuple["Argument", ...]
)


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

    @property
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


@dataclass(frozen=True)
class Carry:
    """A tensor that every copy of a region takes from the copy before: the first takes `initial`."""

    argument: str
    initial: str
    next: str


@dataclass(frozen=True)
class Export:
    """A tensor of a region's body that is used outside: for each copy its name there, or None if that copy's is not
    used."""

    value: str
    names: tuple[str | None, ...]


@dataclass(frozen=True)
class Region:
    """A repeated sequence of ops, stored once.

    `ops` is the body. Its operands are the arguments of the carries, the region's own names for tensors that differ
    between copies (`owned`: a parameter or buffer of the body -> its name in each copy), and names from outside that
    all copies share. `copies` are the module paths that each copy stands for.
    """

    name: str
    copies: tuple[tuple[str, ...], ...]
    ops: tuple[Op, ...]
    carries: tuple[Carry, ...]
    owned: Mapping[str, tuple[str, ...]]
    exports: tuple[Export, ...]

    @property
    def count(self) -> int:
        """The number of copies."""
        return len(self.copies)

    @property
    def results(self) -> tuple[str, ...]:
        """The values of a copy that the next copy or the rest of the program reads."""
        return tuple(dict.fromkeys((*(item.next for item in self.carries), *(item.value for item in self.exports))))

    def __str__(self) -> str:
        lines = (
            f"region {self.name} x {self.count}",
            *(f"  carry {carry.argument}: {carry.initial}, then {carry.next}" for carry in self.carries),
            *(f"  own {name}: {names[0]}, ..., {names[-1]}" for name, names in self.owned.items()),
            *(f"  {op}" for op in self.ops),
            *(f"  export {export.value}: {export.names[-1]}" for export in self.exports),
        )
        return "\n".join(lines)


@dataclass(frozen=True)
class Folded:
    """A program whose repeated runs are folded into regions: `items` are ops and regions in order.

    `types` has the type of every tensor in `items`, those of the regions' bodies included; `flowing` are the names of
    those that a gradient flows through. Equal layers that are written several times share their decisions: `alike` maps
    the keys of their ops, and the names of their parameters and buffers, to those of the first one.
    """

    program: Program
    items: tuple[Op | Region, ...]
    types: Mapping[str, TensorType]
    flowing: frozenset[str]
    alike: Mapping[str, str] = field(default_factory=dict)

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions, in order."""
        return tuple(item for item in self.items if isinstance(item, Region))

    @property
    def ops(self) -> tuple[Op, ...]:
        """All ops, those of the regions' bodies once."""
        return tuple(op for op, _ in self.runs)

    @property
    def runs(self) -> Iterator[tuple[Op, int]]:
        """All ops, each with its number of copies."""
        yield from (
            (op, item.count if isinstance(item, Region) else 1)
            for item in self.items
            for op in (item.ops if isinstance(item, Region) else (item,))
        )

    def __str__(self) -> str:
        return "\n".join(map(str, self.items))


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


def dependents(folded: Folded) -> frozenset[str]:
    """Tensors that depend on the batch or on a parameter; the others are the same for every batch."""
    depends = {item.name for item in folded.program.inputs} | {item.name for item in folded.program.parameters}
    for region in folded.regions:
        depends.update(own for own, names in region.owned.items() if names[0] in depends)
    for _ in range(2):
        for item in folded.items:
            if isinstance(item, Region):
                depends.update(carry.argument for carry in item.carries if {carry.initial, carry.next} & depends)
            for op in item.ops if isinstance(item, Region) else (item,):
                if any(name in depends for name in op.operands):
                    depends.update(op.results)
            if isinstance(item, Region):
                depends.update(
                    name for export in item.exports if export.value in depends for name in export.names if name
                )
    return frozenset(depends)


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


@cache
def find_overload(target: str) -> OpOverload:
    """The operator called `target`, such as "aten.linear.default"."""
    namespace, name, overload = target.split(".")
    found = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    assert isinstance(found, OpOverload)
    return found


def references(argument: Argument) -> Iterator[str]:
    """The names that an argument refers to, in order."""
    if isinstance(argument, Ref):
        yield argument.name
    elif isinstance(argument, tuple):
        for item in argument:
            yield from references(item)


def integer(argument: Argument) -> int:
    """An argument that is an integer."""
    assert isinstance(argument, int)
    return argument


def listed(argument: Argument) -> tuple[Argument, ...]:
    """An argument that is a list."""
    assert isinstance(argument, tuple)
    return argument


def rename(argument: Argument, names: Callable[[str], Argument]) -> Argument:
    """`argument` with its references replaced."""
    if isinstance(argument, Ref):
        return names(argument.name)
    if isinstance(argument, tuple):
        return tuple(rename(item, names) for item in argument)
    return argument


def freeze(value: object) -> Argument:
    """A value of an operator's schema as an argument: lists become tuples."""
    if isinstance(value, (list, tuple)):
        return tuple(freeze(item) for item in value)
    return value  # type: ignore[return-value]


def bound_arguments(overload: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, Argument]:
    """The arguments of a call by the names of the schema, in its order, defaults included."""
    return {
        item.name: freeze(args[place] if place < len(args) else kwargs.get(item.name, item.default_value))
        for place, item in enumerate(schema_of(overload).arguments)
    }


def format_argument(argument: Argument) -> str:
    """An argument as text."""
    if isinstance(argument, tuple):
        return "[" + ", ".join(format_argument(item) for item in argument) + "]"
    if isinstance(argument, float):
        return repr(argument)
    return str(argument)


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
