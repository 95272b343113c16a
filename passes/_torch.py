"""Private names of torch: the compiler uses them from here alone.

Every name says what it is for and why no public one serves. All were run with torch 2.11, 2.13 and 2.15
(`tests/passes/test_torch.py` holds each to what is expected of it); where versions differ, that is said.

The runtime has a door of its own, `autopar/_torch.py`, and one for the internals of `fully_shard`,
`autopar/runtime/fsdp/_torch.py`.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch._decomp import decomposition_table
from torch._functorch import predispatch
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
    SymbolicContext,
    free_unbacked_symbols,
)
from torch.utils import _pytree as pytree
from torch.utils import _traceback as tracebacks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes

# pytree: nested inputs and outputs, flattened as `torch.export` does. A user registers containers with the C++ and
#   with this registry; `torch.utils.pytree` does not exist.
# OpOverload, HigherOrderOperator: the classes of what `torch.ops.aten.add.Tensor` and `torch.cond` are. The objects are
#   public, their classes are not.
# TorchDispatchMode, without_modes: documented for users, under a private module. `without_modes()` leaves all modes of
#   the thread, function modes not included.
# FakeTensor, FakeTensorMode: tensors without memory on a real device; on meta models and kernels go other ways.
# DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode: the errors of a trace that
#   needs values. `torch.export` raises them, or errors that they are the cause of.
# ShapeEnv, DimDynamic, StatelessSymbolicContext, SymbolicContext, free_unbacked_symbols: the symbols of a trace. An
#   exported program shows them, without a public way to ask for their ranges, or to make some without a trace.
# make_fx: a graph of ATen operators from a function of tensors; `torch.export` takes modules alone, in a second each.
# tracebacks: the module that makes the stack trace of a graph's node, which `torch.export` has no option for.
# decomposition_table: operators written with others. `torch.export.default_decompositions` lacks those that ATen keeps.
__all__ = [
    "AUTOGRAD_FUNCTION_APPLY",
    "CTC_LOSS",
    "CTC_LOSS_BACKWARD",
    "EFFICIENT_ATTENTION",
    "FLASH_ATTENTION",
    "NUMBER_OF_TENSOR",
    "PARAMETERS",
    "SUMMARY_OF_FRAMES",
    "TABLES",
    "TRACE_LOGGERS",
    "VMAP_BEGIN",
    "VMAP_END",
    "VMAP_IDLE",
    "DataDependentOutputException",
    "DimDynamic",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "GuardOnDataDependentSymNode",
    "HigherOrderOperator",
    "OpOverload",
    "ShapeEnv",
    "StatelessSymbolicContext",
    "SymbolicContext",
    "TorchDispatchMode",
    "buffers_of",
    "decomposition_table",
    "eager",
    "fake_mode_of",
    "free_unbacked_symbols",
    "make_fx",
    "operator_name",
    "parameters_of",
    "pytree",
    "schema_of",
    "storage_id",
    "storage_number",
    "tracebacks",
    "version_of",
    "without_function_modes",
    "without_modes",
]

# The operator that `tensor.item()` comes to.
NUMBER_OF_TENSOR: OpOverload = torch.ops.aten._local_scalar_dense.default

# The attributes of a module that hold what is found under its own names. `vars(module)` has them.
PARAMETERS = "_parameters"
TABLES = (PARAMETERS, "_buffers", "_modules")

# The operator that `torch.export` with strict=True writes for a call of a custom `torch.autograd.Function`.
AUTOGRAD_FUNCTION_APPLY: HigherOrderOperator = torch._functorch.autograd_function.autograd_function_apply

# The functions that `torch.export` writes where a level of `torch.vmap` begins and ends, and one that does nothing.
VMAP_BEGIN = predispatch._vmap_increment_nesting
VMAP_END = predispatch._vmap_decrement_nesting
VMAP_IDLE = predispatch.lazy_load_decompositions

# The fused kernels of attention of a CUDA device. `scaled_dot_product_attention` chooses among those of the device that
# its tensors are on.
FLASH_ATTENTION: OpOverload = torch.ops.aten._scaled_dot_product_flash_attention.default
EFFICIENT_ATTENTION: OpOverload = torch.ops.aten._scaled_dot_product_efficient_attention.default

# The loss of connectionist temporal classification, with what its gradient needs. `ctc_loss` keeps that to itself.
CTC_LOSS: OpOverload = torch.ops.aten._ctc_loss.Tensor
CTC_LOSS_BACKWARD: OpOverload = torch.ops.aten._ctc_loss_backward.Tensor

# The loggers that say at length why a trace fails, before they raise the same.
TRACE_LOGGERS = ("torch._subclasses.fake_tensor", "torch.export._trace", "torch.fx.experimental.symbolic_shapes")

# The function of `tracebacks` that is given the frames of a stack, as dicts, and how many to leave out; it makes a
# `traceback.StackSummary` of them.
SUMMARY_OF_FRAMES = "_extract_symbolized_tb"

# A context without `TorchFunctionMode`s and without `__torch_function__` of subclasses; it has no public name.
without_function_modes = torch._C.DisableTorchFunction


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Let `torch.compiler.is_compiling()` and `is_exporting()` be False within `torch.export`.

    It sets two flags of the process while it traces, and has no option to leave them. Other threads see the flags as
    they are outside of the trace.
    """
    compiler = torch.compiler
    before = compiler._is_compiling_flag, compiler._is_exporting_flag
    compiler._is_compiling_flag = compiler._is_exporting_flag = False
    try:
        yield
    finally:
        compiler._is_compiling_flag, compiler._is_exporting_flag = before


def is_composite(overload: OpOverload) -> bool:
    """Whether an operator runs others, through which autograd flows, and has no derivative of its own."""
    return overload.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


def fake_mode_of(tensors: Iterable[Tensor]) -> FakeTensorMode:
    """The mode that fake tensors, as those in the metadata of a trace, belong to."""
    return next(tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor))


def schema_of(overload: OpOverload) -> torch._C.FunctionSchema:
    """The schema of an operator: names and types of arguments, results, aliases.

    Every operator has it in `_schema`; `torch.library` can write schemas, not read them.
    """
    return overload._schema


def operator_name(target: object) -> str:
    """The name of an operator without namespace and overload ("add_"); "" for what is no operator."""
    name: str = getattr(target, "_opname", "")
    return name


def version_of(tensor: Tensor) -> int:
    """The number of changes of a tensor in place, which autograd compares; C++ alone has a public way to ask."""
    return tensor._version


def storage_id(tensor: Tensor) -> int:
    """A number that tensors have in common if and only if they share memory, while one of them lives.

    `data_ptr()` is 0 for every tensor without memory (meta, fake, empty).
    """
    return storage_number(tensor.untyped_storage())


def storage_number(storage: torch.UntypedStorage) -> int:
    """`storage_id` of the tensors in `storage`."""
    number: int = storage._cdata
    return number


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The table of a module's own parameters, which can be written to: assignment of attributes checks and converts."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The table of a module's own buffers, as `parameters_of`."""
    return module._buffers
