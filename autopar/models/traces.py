"""Programs of a model in normal form: for its objective, for evaluation, and for inputs of many sizes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from autopar.models import huggingface
from autopar.models.info import ModelInfo
from autopar.request import Request
from passes.capture import CPU, Tracing, capture, capture_symbolic
from passes.clock import Clock
from passes.ir.errors import CaptureError, ExpressionError
from passes.ir.leaves import Inputs, input_leaves
from passes.ir.plan import BATCH, SEQUENCE
from passes.ir.program import Program, Symbolic
from passes.micro_batches import batch_size
from passes.normalize import normalize

# A dim of an input, by the input's name and the dim's number.
Dim = tuple[str, int]
# A size, and the dims that have it.
NamedSize = tuple[int, list[Dim]]


@dataclass(frozen=True)
class TracedSizes:
    """A program for several sizes of its inputs, and these sizes by name."""

    program: Symbolic
    named: Mapping[str, NamedSize]


@dataclass(frozen=True)
class CapturedModel:
    """A model as the passes take it.

    `program` is that of the objective; `evaluation` is that of evaluation, if it is planned too and is another one, or
    the error of tracing it. `sizes` is there where costs are asked for as formulas.
    """

    info: ModelInfo
    program: Program
    evaluation: Program | CaptureError | None
    sizes: TracedSizes | None


def tracing(model: nn.Module, info: ModelInfo, request: Request, mode: str, device: torch.device = CPU) -> Tracing:
    """The settings for tracing `model` in the `mode` of an objective; a model on meta is traced as if on `device`."""
    context = huggingface.tracing(model, info.inputs)
    return Tracing(mode == "train", request.objective == "train", context, request.precision.compute, device)


def traced(model: nn.Module, info: ModelInfo, request: Request, mode: str, clock: Clock) -> Program:
    """The program of `model` in normal form, in the `mode` of an objective.

    Raises CaptureError where it cannot be traced.
    """
    with clock("capture"):
        program = capture(model, info.inputs, tracing(model, info, request, mode))
    with clock("normalize"):
        return normalize(program)


def traced_evaluation(
    model: nn.Module, info: ModelInfo, request: Request, program: Program, clock: Clock
) -> Program | CaptureError | None:
    """The program for evaluation, without trained parameters, if `program` is for training and differs from it; or the
    error of tracing it."""
    if request.objective != "train":
        return None
    try:
        evaluation = traced(model, info, request, "infer", clock)
    except CaptureError as error:
        # It can be trained all the same.
        return error
    return None if str(evaluation) == str(program) else frozen(evaluation)


def frozen(program: Program) -> Program:
    """`program` with parameters that do not train."""
    return replace(program, parameters=tuple(replace(item, trainable=False) for item in program.parameters))


def traced_sizes(model: nn.Module, info: ModelInfo, request: Request, program: Program, clock: Clock) -> TracedSizes:
    """The program of `model` for several sizes of its inputs; `program` is that for the given ones.

    Raises ExpressionError where it cannot be traced for several sizes.
    """
    sizes = named_sizes(info.inputs, frozenset(item.argument for item in program.inputs))
    varying = {dim for _, dims in sizes.values() for dim in dims}
    try:
        with clock("expressions"):
            settings = tracing(model, info, request, request.objective)
            return TracedSizes(capture_symbolic(model, info.inputs, settings, varying), sizes)
    except CaptureError as error:
        raise ExpressionError(
            f"costs have no formulas, as the model cannot be traced for other sizes: {error}"
        ) from None


def named_sizes(inputs: Inputs, arguments: frozenset[str]) -> dict[str, NamedSize]:
    """The sizes that may vary, by name, and the dims of inputs that they are: the batch is the first dim of most
    inputs, the sequence the second of those that hold numbers of something; others are called after their input. Only
    `arguments` are inputs of the program, the others are constants.

    Nothing is for many sizes that is shown a size of one.
    """
    given = [(name, leaf) for name, leaf in input_leaves(inputs) if name in arguments]
    tensors = [(name, leaf) for name, leaf in given if isinstance(leaf, torch.Tensor)]
    # Those of numbers first: what features are given of has the same length.
    tensors.sort(key=lambda item: _has_features(item[1]))
    batch = batch_size(tuple(tensor.shape) for _, tensor in tensors)
    found: dict[str, NamedSize] = {}
    for dim, common in ((0, BATCH), (1, SEQUENCE)):
        for argument, tensor in tensors:
            if tensor.dim() <= dim or tensor.shape[dim] == 1:
                continue
            size = tensor.shape[dim]
            same = size == batch if common == BATCH else common not in found or found[common][0] == size
            if dim and _has_features(tensor) and (common not in found or not same or tensor.dim() != 3):
                continue
            name = common if same else f"{argument}_{dim}".replace(".", "_")
            found.setdefault(name, (size, []))[1].append((argument, dim))
    return found


def _has_features(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex
