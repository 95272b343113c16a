"""One trace of a module by `torch.export`, or an error that says in one sentence why it cannot be traced.

Reads of tensor values by the model are answered where values are known (`values`); a number taken out of a tensor stays
a tensor. If a module cannot be traced like this, other ways are tried before it is refused.
"""

import functools
import io
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import cast
from unittest import mock

import sympy
import torch
from torch import Tensor, nn

from passes._torch import (
    AUTOGRAD_FUNCTION_APPLY,
    TRACE_LOGGERS,
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
    OpOverload,
    eager,
    free_unbacked_symbols,
    operator_name,
    pytree,
    schema_of,
)
from passes.capture.caches import caches_kept
from passes.capture.mapped import without_vmap
from passes.capture.source import (
    Line,
    Loops,
    UntraceableError,
    construct,
    line_of_node,
    line_of_traceback,
    replaced,
)
from passes.capture.state import state_kept
from passes.capture.unread import nothing_unread
from passes.capture.values import MOST, SYMBOLIC, Read, Rewording, Values, checks_pass
from passes.ir.errors import CaptureError
from passes.ir.leaves import Inputs, input_leaves
from passes.ir.log import logger

OFFER = (
    "what can be traced can be parallelized part by part, and data parallelism needs no trace "
    "(torch.distributed.fsdp.fully_shard over the whole mesh)"
)

_ITEM = torch.ops.aten.item.default
_STRIDED = torch.ops.aten.as_strided.default
_UNKNOWN = GuardOnDataDependentSymNode, DynamicOutputShapeException, DataDependentOutputException
_ASSERTIONS = ("_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size")


@dataclass(frozen=True)
class Exported:
    """A trace, and the inputs that are constants in it, with their values."""

    program: torch.export.ExportedProgram
    constants: Mapping[str, Tensor]


class _NeedsValues(Exception):  # noqa: N818 (it says what is needed; nobody sees it)
    """The trace needs what is known by these symbols only; `line` is where, `kind` what it does with it."""

    def __init__(self, symbols: Set[sympy.Symbol], line: Line | None, kind: str) -> None:
        super().__init__(kind)
        self.symbols = symbols
        self.line = line
        self.kind = kind


def refusal(module: nn.Module, line: Line | None, reason: str) -> CaptureError:
    """The error for a module that cannot be traced: where, why, and what can be done instead."""
    where = f" at {line}" if line is not None else ""
    return CaptureError(f"cannot trace {type(module).__name__}{where}: {reason}; {OFFER}")


def possible_constants(inputs: Inputs) -> dict[str, Tensor | None]:
    """The inputs that could be constants of a plan, with their values where they have any: whole numbers."""
    found: dict[str, Tensor | None] = {}
    for name, leaf in input_leaves(inputs):
        if isinstance(leaf, Tensor) and not leaf.is_floating_point() and not leaf.is_complex():
            has_values = type(leaf) is Tensor and not leaf.is_meta and leaf.numel() <= MOST
            found[name] = leaf.detach().cpu() if has_values else None
    return found


def export(
    module: nn.Module, example: Inputs, values: Mapping[str, Tensor | None], varying: Set[tuple[str, int]]
) -> Exported:
    """Trace `module(**example)`; dims `varying` (by input and number) may have other sizes.

    `values` are those of inputs that may become constants, which they do where the model needs them. Raises
    CaptureError.
    """
    constants = frozenset[str]()
    while True:
        read = Read()
        try:
            program = _exported(module, example, values, constants, varying, read)
        except _NeedsValues as needed:
            known = [inputs for symbol, inputs in read.wanted.items() if symbol in needed.symbols]
            wanted = frozenset[str]().union(*(known or read.wanted.values())) - constants
            having = {name for name in wanted if values[name] is not None}
            if not having:
                raise refusal(module, needed.line, _reason(needed.kind, wanted)) from needed.__cause__
            constants |= having
            continue
        return Exported(program, _told(module, values, read))


def _told(module: nn.Module, values: Mapping[str, Tensor | None], read: Read) -> dict[str, Tensor]:
    """The inputs that were read, which is logged, and so are the checks that were passed over."""
    for line in read.checks:
        logger.warning("the check of %s at %s is taken as passed: it is not made any more", type(module).__name__, line)
    if read.changed:
        logger.warning(
            "a forward pass of %s changes its %s, which it may read in the next one: the distributed module has what "
            "the trace had in every call; hold in buffers what changes",
            type(module).__name__,
            " and ".join(read.changed),
        )
    constants: dict[str, Tensor] = {}
    for name, line in read.inputs.items():
        value = values[name]
        assert value is not None
        constants[name] = value
        logger.warning(
            "the input %s is a constant of the plan, because %s reads its values at %s",
            name,
            type(module).__name__,
            line or "a line that is not known",
        )
    return constants


_REASONS = {
    "branches": "it branches on the values of a tensor{given}, which is data-dependent control flow: compute both "
    "sides and choose with torch.where, or move the branch out of the model",
    "loops": "how often it loops depends on the values of a tensor{given}, which is data-dependent control flow: loop "
    "a fixed number of times and mask with torch.where, or move the loop out of the model",
    "size": "a size depends on the values of a tensor{given}",
    "number": "it takes a size, or a number to compute with, out of the values of a tensor{given}",
}


def _reason(kind: str, wanted: Set[str]) -> str:
    names = " and ".join(sorted(wanted))
    given = f" (give {names} with values, not on meta, and the plan is made for these)" if wanted else ""
    return _REASONS[kind].format(given=given)


# --- ways to trace ---------------------------------------------------------------------------------------------------


def _exported(
    module: nn.Module,
    example: Inputs,
    values: Mapping[str, Tensor | None],
    constants: Set[str],
    varying: Set[tuple[str, int]],
    read: Read,
) -> torch.export.ExportedProgram:
    """The trace by the first way that works; where none does, the error of the first one.

    Raises _NeedsValues where values are needed, and CaptureError.
    """

    lengths = [size for _, leaf in input_leaves(example) if isinstance(leaf, Tensor) for size in leaf.shape]

    def follow(arguments: object, *more: AbstractContextManager[object]) -> AbstractContextManager[object]:
        leaves = dict(zip([name for name, _ in input_leaves(example)], pytree.tree_leaves(arguments), strict=True))
        given = [(name, cast(Tensor, leaves[name]), value) for name, value in values.items()]
        answers = Values(given, constants, read, Loops(lengths, __file__))
        stack = ExitStack()
        contexts: tuple[AbstractContextManager[object], ...] = (
            *(answers, checks_pass(answers), Rewording(), caches_kept(module), state_kept(module, read.changed)),
            *more,
        )
        for context in contexts:
            stack.enter_context(context)
        return stack

    first: Exception | None = None
    for within, strict in ((follow, False), (lambda arguments: follow(arguments, eager()), False), (None, True)):
        if strict and varying:
            break
        surrounding = _without_functions() if within is None else _within_forward(module, within)
        try:
            with surrounding:
                program = _export(module, example, varying, strict)
                without_vmap(program.graph_module)
                _settle(program.graph_module)
                return program
        except (CaptureError, _NeedsValues, UntraceableError) as error:
            if first is None and isinstance(error, UntraceableError):
                raise refusal(module, error.line, str(error)) from None
            if first is None:
                raise
            logger.debug("another way to trace fails too: %s", error)
        except Exception as error:
            needed = _needed(error)
            if needed is not None and first is None:
                raise needed from error
            logger.debug("a way to trace fails", exc_info=error)
            first = first or error
    assert first is not None
    line = line_of_traceback(first.__traceback__)
    if read.wanted:
        raise _NeedsValues(frozenset(read.wanted), line, "number") from first
    raise refusal(module, line, _first_sentence(first)) from first


def _first_sentence(error: Exception) -> str:
    said = re.split(r"\n|(?<!e\.g)\.\s+(?=[A-Z])", str(error).strip())[0].rstrip(".")
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _export(
    module: nn.Module, example: Inputs, varying: Set[tuple[str, int]], strict: bool
) -> torch.export.ExportedProgram:
    output = io.StringIO()
    shapes = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
    for name, leaf in input_leaves(example):
        dims = {dim: torch.export.Dim.AUTO for owner, dim in varying if owner == name}
        if dims:
            shapes[leaf] = dims
    dynamic = cast(dict[str, object], shapes) if varying else None
    try:
        # What strict=True runs are graph modules.
        sparing = nullcontext() if strict else nothing_unread()
        with replaced(sys, "stderr", output), replaced(sys, "stdout", output), _quiet(), sparing:
            return torch.export.export(module, (), dict(example), dynamic_shapes=dynamic, strict=strict)
    except Exception:
        logger.debug("torch.export printed:\n%s", output.getvalue())
        raise


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's own words on what it cannot trace: it raises them too."""
    thread = threading.get_ident()

    def is_other(record: logging.LogRecord) -> bool:
        return record.thread != thread

    loggers = [logging.getLogger(name) for name in TRACE_LOGGERS]
    try:
        for item in loggers:
            item.addFilter(is_other)
        yield
    finally:
        for item in loggers:
            item.removeFilter(is_other)


@contextmanager
def _within_forward(module: nn.Module, within: Callable[[object], AbstractContextManager[object]]) -> Iterator[None]:
    """Run `module.forward` inside of what `within` makes of its arguments."""
    original = module.forward

    @functools.wraps(original)
    def forward(*args: object, **kwargs: object) -> object:
        with within((args, kwargs)):
            return original(*args, **kwargs)

    with mock.patch.object(module, "forward", forward):
        yield


@contextmanager
def _without_functions() -> Iterator[None]:
    """Refuse custom autograd functions: `torch.export` with strict=True keeps only their forward."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise CaptureError("a custom autograd.Function is not traced like this")

    with replaced(type(AUTOGRAD_FUNCTION_APPLY), "__call__", refuse):
        yield


# --- what depends on data --------------------------------------------------------------------------------------------


def _needed(error: BaseException) -> _NeedsValues | None:
    """The reason why a failed trace needs values, if it does."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, _UNKNOWN):
        cause = cause.__cause__
    if cause is None:
        return None
    line = line_of_traceback(error.__traceback__)
    kind = construct(line) if line is not None else ""
    symbols = cause.cond.free_symbols if isinstance(cause, GuardOnDataDependentSymNode) else frozenset()
    return _NeedsValues(symbols, line, kind or "size")


def _settle(graph_module: torch.fx.GraphModule) -> None:
    """Check that a graph is well formed, remove checks of values from it, and keep numbers as tensors.

    Raises _NeedsValues for what still depends on values.
    """
    for part in graph_module.modules():
        if isinstance(part, torch.fx.GraphModule):
            part.graph.lint()
            _drop_checks(part.graph)
            for node in list(part.graph.nodes):
                if node.target == _ITEM:
                    _keep_as_tensor(node)
                elif node.target == _STRIDED:
                    _lay_out(node)
            _drop_checks(part.graph)
            for node in part.graph.nodes:
                _refuse_unknown(node)


def _drop_checks(graph: torch.fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or node.users:
            continue
        if operator_name(node.target) in _ASSERTIONS:
            useless = any(_unknown(item) for item in node.all_input_nodes)
        else:
            writes = isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable
            useless = node.target == _ITEM or (bool(_unknown(node)) and not writes)
        if useless:
            graph.erase_node(node)


def _unknown(node: torch.fx.Node) -> set[sympy.Symbol]:
    """The symbols in the result of a node that stand for values of tensors."""
    found: set[sympy.Symbol] = set()
    for leaf in pytree.tree_leaves(node.meta.get("val")):
        if isinstance(leaf, SYMBOLIC):
            found |= free_unbacked_symbols(leaf)
        elif isinstance(leaf, Tensor):
            found |= set().union(
                *(free_unbacked_symbols(size) for size in leaf.shape if isinstance(size, torch.SymInt))
            )
    return found


def _keep_as_tensor(item: torch.fx.Node) -> None:
    """Use the tensor of one element in place of the number in it, wherever an operator takes both."""
    source = item.args[0]
    assert isinstance(source, torch.fx.Node)
    value = source.meta["val"]
    users = [user for user in item.users if _takes_tensor(user, item)]
    if not users or value.dtype == torch.bool:
        return
    graph = item.graph
    with graph.inserting_before(item):
        scalar = graph.call_function(torch.ops.aten.reshape.default, (source, []))
        apart = graph.call_function(torch.ops.aten.detach.default, (scalar,))
    for node in (scalar, apart):
        node.meta = {**item.meta, "val": value.detach().reshape(())}
    for user in users:
        user.replace_input_with(item, apart)


def _takes_tensor(user: torch.fx.Node, item: torch.fx.Node) -> bool:
    """Whether an operator may be given a tensor in place of a number: the result is of the same dtype then."""
    if not isinstance(user.target, OpOverload) or schema_of(user.target).is_mutable:
        return False
    parameters = schema_of(user.target).arguments
    for place, argument in enumerate(user.args):
        if argument is item and not isinstance(parameters[place].type, torch.TensorType):
            return False
    others = [node.meta["val"] for node in user.all_input_nodes if node is not item]
    if item in user.kwargs.values() or not all(isinstance(other, Tensor) for other in others):
        return False
    made = user.meta["val"]
    number = item.args[0].meta["val"].dtype  # type: ignore[union-attr]
    largest = functools.reduce(torch.promote_types, (other.dtype for other in others), number)
    return isinstance(made, Tensor) and (any(other.dim() > 0 for other in others) or largest == made.dtype)


def _lay_out(strided: torch.fx.Node) -> None:
    """Let `as_strided` see a tensor whose elements stand one after the other, as they did in memory: how a tensor lies
    in memory is not kept."""
    source, size, stride, *offset = strided.args
    assert isinstance(source, torch.fx.Node)
    value = source.meta["val"]
    order = sorted(range(value.dim()), key=lambda dim: (value.stride(dim), value.shape[dim]), reverse=True)
    ordered = value.permute(order)
    given = [*offset, strided.kwargs.get("storage_offset")][0]
    start = (value.storage_offset() if given is None else given) - value.storage_offset()
    if not ordered.is_contiguous() or start < 0:
        raise UntraceableError(
            "it takes elements by their places in memory out of a tensor with gaps", line_of_node(strided)
        )
    with strided.graph.inserting_before(strided):
        previous = source
        for target, arguments in (
            (torch.ops.aten.permute.default, (order,)),
            (torch.ops.aten.reshape.default, ([value.numel()],)),
            (torch.ops.aten.slice.Tensor, (0, start, value.numel())),
        ):
            made = strided.graph.call_function(target, (previous, *arguments))
            made.meta = {**strided.meta, "val": target(previous.meta["val"], *arguments)}
            previous = made
    strided.args, strided.kwargs = (previous, size, stride), {}


def _refuse_unknown(node: torch.fx.Node) -> None:
    symbols = _unknown(node)
    if symbols:
        line = line_of_node(node)
        number = isinstance(node.meta["val"], SYMBOLIC)
        raise _NeedsValues(symbols, line, (construct(line) if line else "") or ("number" if number else "size"))
