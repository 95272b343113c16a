"""Values of tensors that are known while tracing.

A trace has no values. But tensors that depend on sizes alone (`torch.ones(...)`, `torch.arange(...)`) are the same in
every call, and so are tensors computed from an input that is a constant of the plan. These values are computed along
with the trace, as long as they are small. So a model may branch on them, and take sizes from them.

Inputs become constants on demand: where the model needs a value, the inputs that the value depends on are known.

A branch on values that are not known could go either way, unless one way does nothing but raise:
`if x.max() > n: raise ...`, `assert x.all()`. Such a check is taken as passed. Within a `try` it is none: there an
error may be a way to go."""

import ast
import dis
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from functools import cache, reduce
from itertools import islice
from types import CodeType, FrameType
from typing import cast

import sympy
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from passes._torch import (
    NUMBER_OF_TENSOR,
    GuardOnDataDependentSymNode,
    OpOverload,
    TorchDispatchMode,
    free_unbacked_symbols,
    operator_name,
    pytree,
    schema_of,
    storage_id,
    without_function_modes,
    without_modes,
)
from passes.capture.ranks import communicates
from passes.capture.source import TORCH, Line, Loops, UntraceableError, line_of_frame, replaced, syntax_tree

_Range = tuple[int, int, int, int]


def passing_value(frame: FrameType) -> bool | None:
    """The value of the expression at `frame` with which a check passes; None where it is not part of a check."""
    position = _asking(frame.f_code, frame.f_lasti)
    if position is None:
        return None
    for test, value in _checks(frame.f_code.co_filename):
        if _contains(_range(test), position):
            return _part(test, position, value)
    return None


def _asking(code: CodeType, instruction: int) -> _Range | None:
    """The position in the source of the expression whose value an instruction tests.

    That of a branch was made by the instruction before it. (Where the branch itself stands, Python says less exactly.)
    """
    place = instruction // 2
    name = dis.opname[code.co_code[instruction]]
    if "JUMP" in name or name in ("TO_BOOL", "UNARY_NOT"):
        place -= 1
        while place > 0 and dis.opname[code.co_code[2 * place]] == "EXTENDED_ARG":
            place -= 1
    return _range_of(next(islice(code.co_positions(), place, None)))


def _range_of(position: tuple[int | None, int | None, int | None, int | None]) -> _Range | None:
    """Lines and columns of the source that an instruction comes from."""
    line, last_line, column, last_column = position
    if line is None or last_line is None or column is None or last_column is None:
        return None
    return line, column, last_line, last_column


def _part(test: ast.expr, position: _Range, value: bool) -> bool | None:
    """The value of the part of `test` at `position` with which the test is `value`.

    Of several parts that are joined by `and` or `or` each may decide; it is taken to be the one. That is right wherever
    the test is right, because all that happens besides is that the other parts are looked at.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _part(test.operand, position, not value)
    if isinstance(test, ast.BoolOp):
        inside = [part for part in test.values if _contains(_range(part), position)]
        return _part(inside[0], position, value) if inside else None
    return value if _range(test) == position else None


@cache
def _checks(filename: str) -> tuple[tuple[ast.expr, bool], ...]:
    """The tests of all checks in a file that assign nothing, with the values that pass them."""
    return tuple(
        (test, value)
        for test, value in _checks_in(syntax_tree(filename))
        if not any(isinstance(part, ast.NamedExpr) for part in ast.walk(test))
    )


def _checks_in(node: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    if isinstance(node, ast.Assert):
        yield node.test, True
    elif isinstance(node, ast.If) and _raises(node.body) != _raises(node.orelse):
        yield node.test, not _raises(node.body)
    caught = node.body if isinstance(node, (ast.Try, ast.TryStar)) and node.handlers else []
    for child in ast.iter_child_nodes(node):
        if child not in caught:
            yield from _checks_in(child)


def _raises(body: list[ast.stmt]) -> bool:
    """Whether statements always raise."""
    if not body or not isinstance(body[-1], ast.Raise):
        return False
    leaves = ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom, ast.Await
    return not any(isinstance(node, leaves) for statement in body for node in ast.walk(statement))


def _range(node: ast.expr) -> _Range:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _contains(outer: _Range, inner: _Range) -> bool:
    return outer[:2] <= inner[:2] and inner[2:] <= outer[2:]


# Elements that a tensor may have whose values are computed.
MOST = 2**20

SYMBOLIC = torch.SymInt, torch.SymFloat, torch.SymBool
# Operators whose results have arbitrary values.
_OPEN = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"}
# Files of torch that models call: they do not count as internal to an operator.
_CALLED = tuple(TORCH + name for name in ("__init__.py", "_tensor.py", "functional.py", "distributions", "nn"))


@dataclass
class Memory:
    """A storage: the inputs that its values depend on, and whether these values are no longer known."""

    inputs: frozenset[str]
    lost: bool = False


@dataclass(frozen=True)
class Value:
    """The values of a tensor; `tensor` is None where only the inputs that they depend on are known."""

    tensor: Tensor | None
    memory: Memory


@dataclass
class Read:
    """The values that a model read while it was traced.

    `inputs` are those whose values were read, and the line that did. `wanted` are the inputs that a symbol of the trace
    comes from and that are no constants. `checks` are the lines that may raise, which were taken not to. `changed` are
    the attributes of the model, by path, that hold another number or tensor after the trace.
    """

    inputs: dict[str, Line | None] = field(default_factory=dict)
    wanted: dict[sympy.Symbol, frozenset[str]] = field(default_factory=dict)
    checks: dict[Line | None, None] = field(default_factory=dict)
    changed: dict[str, None] = field(default_factory=dict)


_ACTIVE: ContextVar["Values | None"] = ContextVar("_ACTIVE", default=None)


def is_readable(tensor: Tensor) -> bool:
    """Whether the model that is being traced may read the values of `tensor`."""
    active = _ACTIVE.get()
    return active is not None and active.is_readable(tensor)


class Values(TorchDispatchMode):
    """Mode that propagates known values through operators.

    `given` are the inputs that could be constants, by name, each with its values where there are any. Those of
    `constants` may be read. `loops` counts the operators that are called.
    """

    supports_higher_order_operators = True

    def __init__(
        self, given: Iterable[tuple[str, Tensor, Tensor | None]], constants: Set[str], read: Read, loops: Loops
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.loops = loops
        self.constants = constants
        self.read = read
        self.known = cast("MutableMapping[Tensor, Value]", WeakIdKeyDictionary())
        self.tokens: list[Token[Values | None]] = []
        for name, tensor, values in given:
            self.known[tensor] = Value(values, Memory(frozenset({name})))

    def __enter__(self) -> "Values":
        self.tokens.append(_ACTIVE.set(self))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _ACTIVE.reset(self.tokens.pop())

    def __torch_dispatch__(
        self, function: object, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """Call an operator, and compute the values of its results where those of its operands are known.

        Raises UnrolledError where the model loops too often, and UntraceableError where it calls a collective.
        """
        self.loops.note(sys._getframe(1))
        if (reason := communicates(function)) is not None:
            raise UntraceableError(f"it {reason}", line_of_frame(sys._getframe(1)))
        with without_function_modes():
            return self._call(function, args, kwargs or {})

    def is_readable(self, tensor: Tensor) -> bool:
        """Whether the values of `tensor` are known and may be read."""
        value = self._value(tensor)
        return value is not None and value.tensor is not None and value.memory.inputs <= self.constants

    def _call(self, function: object, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        if not isinstance(function, OpOverload):
            return function(*args, **kwargs)  # type: ignore[operator]
        if function is NUMBER_OF_TENSOR:
            return self._number(cast(Tensor, args[0]))
        leaves, tree = pytree.tree_flatten((args, kwargs))
        values = self._operands(function, leaves)
        if values is None:
            result = function(*args, **kwargs)
            self._forget(function, args, kwargs)
            return result
        inputs = frozenset[str]().union(*(value.memory.inputs for value in values))
        if torch.Tag.dynamic_output_shape in function.tags and inputs <= self.constants:
            computed = _computed(function, leaves, tree, values)
            if computed is not None:
                self._note_read(inputs)
                device = next(leaf.device for leaf in leaves if isinstance(leaf, Tensor))
                # Fake tensors of the trace with the types of the computed ones.
                result = pytree.tree_map_only(
                    Tensor,
                    lambda own: torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device=device),
                    computed,
                )
                self._note(result, computed, values, inputs)
                return result
        result = function(*args, **kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if not tensors:
            return result
        computed = _computed(function, leaves, tree, values) if all(map(_is_small, tensors)) else None
        if computed is None:
            self._forget(function, args, kwargs)
        self._note(result, computed, values, inputs)
        return result

    def _value(self, tensor: Tensor) -> Value | None:
        value = self.known.get(tensor)
        if value is not None:
            return None if value.memory.lost else value
        if type(tensor) is Tensor and tensor.device.type == "cpu" and _is_small(tensor):
            # One that the model makes of numbers, or holds.
            with without_modes():
                return Value(tensor.detach().clone(), Memory(frozenset()))
        return None

    def _operands(self, function: OpOverload, leaves: Sequence[object]) -> list[Value] | None:
        """The values of all operands; None where those of one are not known, or those of the results still open."""
        values = []
        for leaf in leaves:
            if isinstance(leaf, SYMBOLIC):
                return None
            if isinstance(leaf, Tensor):
                value = self._value(leaf)
                if value is None:
                    return None
                values.append(value)
        if torch.Tag.nondeterministic_seeded in function.tags or operator_name(function) in _OPEN:
            return None
        return values

    def _note(self, result: object, computed: object, values: Sequence[Value], inputs: frozenset[str]) -> None:
        """Record the known values of results."""
        leaves = pytree.tree_leaves(result)
        owns = pytree.tree_leaves(computed) if computed is not None else [None] * len(leaves)
        for leaf, own in zip(leaves, owns, strict=True):
            if not isinstance(leaf, Tensor):
                continue
            self._note_symbols(leaf.shape, inputs)
            kept = own if isinstance(own, Tensor) and own.dtype == leaf.dtype else None
            shared = [
                value.memory
                for value in values
                if kept is not None and value.tensor is not None and storage_id(value.tensor) == storage_id(kept)
            ]
            memory = shared[0] if shared else Memory(inputs)
            memory.inputs |= inputs
            self.known[leaf] = Value(kept, memory)

    def _forget(self, function: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Forget the values of tensors that an operator writes to, and of tensors that share their memory."""
        for place, parameter in enumerate(schema_of(function).arguments):
            if parameter.alias_info is None or not parameter.alias_info.is_write:
                continue
            for leaf in pytree.tree_leaves(args[place] if place < len(args) else kwargs.get(parameter.name)):
                value = self.known.get(leaf) if isinstance(leaf, Tensor) else None
                if value is not None:
                    value.memory.lost = True

    def _number(self, tensor: Tensor) -> object:
        """The number in a tensor: the known one, or one that lets a check pass."""
        value = self._value(tensor)
        if value is not None and value.tensor is not None and value.memory.inputs <= self.constants:
            self._note_read(value.memory.inputs)
            with without_modes():
                return value.tensor.item()
        passing = self.passing(_calling_frame())
        if passing is not None:
            with without_modes():
                return torch.tensor(passing, dtype=tensor.dtype).item()
        number = NUMBER_OF_TENSOR(tensor)
        if value is not None:
            self._note_symbols([number], value.memory.inputs)
        return number

    def passing(self, frame: FrameType) -> bool | None:
        """The value that makes the check at `frame` pass; None where there is no check."""
        passing = passing_value(frame)
        if passing is not None:
            self.read.checks.setdefault(Line(frame.f_code.co_filename, frame.f_lineno))
        return passing

    def _note_read(self, inputs: Iterable[str]) -> None:
        for name in inputs:
            self.read.inputs.setdefault(name, line_of_frame(_calling_frame()))

    def _note_symbols(self, numbers: Iterable[object], inputs: frozenset[str]) -> None:
        """Note which inputs symbols come from that a trace has in place of numbers."""
        for number in numbers:
            if isinstance(number, SYMBOLIC) and not inputs <= self.constants:
                self.read.wanted.update(dict.fromkeys(free_unbacked_symbols(number), inputs - self.constants))


@contextmanager
def checks_pass(values: Values) -> Iterator[None]:
    """Let checks on numbers pass that a trace has symbols for."""

    def decided(number: torch.SymBool) -> bool:
        try:
            return bool(cast(Callable[[torch.SymBool], bool], original)(number))
        except GuardOnDataDependentSymNode:
            # The caller of `bool`: a dispatcher stands between.
            frame = sys._getframe(2)
            passing = values.passing(frame) if not _is_machinery(frame) else None
            if passing is None:
                raise
            return passing

    with replaced(torch.SymBool, "__bool__", decided) as original:
        yield


_HOOKS = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)


class Rewording(TorchFunctionMode):
    """While entered, what a trace does not follow is said in words that it does: `x.data` is `x.detach()`, and
    `torch.tensor` is given the numbers in tensors. Hooks on gradients cannot be: they raise
    UntraceableError."""

    def __torch_function__(
        self, function: object, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """Call a function of torch."""
        if function == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            return cast(Tensor, args[0]).detach()
        if function in _HOOKS and isinstance(args[0], Tensor) and args[0].requires_grad:
            raise UntraceableError(
                "it registers a hook on the gradient of a tensor, which would be lost: write a torch.autograd.Function "
                "whose backward does what the hook does",
                line_of_frame(_calling_frame()),
            )
        options = dict(kwargs or {})
        if function == torch.tensor and args and isinstance(args[0], (list, tuple)):
            leaves, tree = pytree.tree_flatten(args[0])
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            if tensors and len(tensors) == len(leaves) and all(leaf.numel() == 1 for leaf in tensors):
                options.setdefault("dtype", reduce(torch.promote_types, (leaf.dtype for leaf in tensors)))
                args = (pytree.tree_unflatten([leaf.item() for leaf in tensors], tree), *args[1:])
        return function(*args, **options)  # type: ignore[operator]


def _computed(function: OpOverload, leaves: Sequence[object], tree: pytree.TreeSpec, values: Sequence[Value]) -> object:
    """The results of an operator for known values, on the CPU; None where they cannot be computed."""
    given = iter(values)
    filled: list[object] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            value = next(given)
            if value.tensor is None:
                return None
            filled.append(value.tensor)
        else:
            filled.append(torch.device("cpu") if isinstance(leaf, torch.device) else leaf)
    args, kwargs = pytree.tree_unflatten(filled, tree)
    try:
        with without_modes(), torch.no_grad():
            computed: object = function(*args, **kwargs)
    except Exception:
        # The trace itself raises the error of the call.
        return None
    return computed


def _is_small(tensor: Tensor) -> bool:
    """Whether values of a tensor are computed; of sizes that are not known, they may be."""
    return any(isinstance(size, torch.SymInt) for size in tensor.shape) or tensor.numel() <= MOST


def _calling_frame() -> FrameType:
    """The frame that called an operator."""
    frame = sys._getframe(1)
    while _is_machinery(frame) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_machinery(frame: FrameType) -> bool:
    """Whether a frame is internal: between the caller of an operator and the operator."""
    file = frame.f_code.co_filename
    if file == __file__ or frame.f_code.co_name in ("__torch_function__", "__torch_dispatch__"):
        return True
    return file.startswith(TORCH) and not file.startswith(_CALLED)
