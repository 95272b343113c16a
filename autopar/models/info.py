"""A model as plans need it: its properties and inputs, and its programs in normal form.

Properties and inputs are read and checked once. Programs are traced for the objective, for evaluation, and for inputs
of many sizes.
"""

import contextlib
import copy
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from autopar.models import huggingface
from autopar.models.ctc import with_padded_labels
from autopar.models.fingerprint import structure_fingerprint
from autopar.models.hooks import refuse_gradient_hooks
from autopar.models.huggingface import completed, is_huggingface, made_inputs, settings
from autopar.models.losses import joined_loss
from autopar.models.supported import refuse_unsupported
from autopar.options import Precision
from autopar.request import Request
from autopar.runtime import named_arguments, require_strided
from passes.capture import CPU, Tracing, capture, capture_symbolic
from passes.clock import Clock
from passes.ir.errors import CaptureError, ExpressionError, InputError, PlanMismatchError
from passes.ir.leaves import Inputs, input_leaves
from passes.ir.plan import BATCH, SEQUENCE, Plan
from passes.ir.program import Program, Symbolic, has_gradient
from passes.lower import Casts
from passes.micro_batches import batch_size, check_divides
from passes.normalize import normalize

ExampleInputs = Mapping[str, object] | tuple[object, ...]


@dataclass(frozen=True)
class ModelInfo:
    """A model, the loss that it was joined with, and its inputs.

    `name` is that of its class, `signature` that of its forward; `dtypes` are those of its parameters, under all their
    names. `structure` and `loss` are fingerprints, that of the loss "" without one. `inputs` are by name and hold the
    global batch; `assumed` are those that nobody gave.
    """

    name: str
    signature: inspect.Signature
    dtypes: Mapping[str, torch.dtype]
    structure: str
    loss: str
    inputs: Mapping[str, object]
    assumed: frozenset[str]

    def casts(self, precision: Precision) -> Casts:
        """The dtypes of stored parameters and reduced gradients, where they are not those that are computed in."""
        own = next((dtype for dtype in self.dtypes.values() if dtype.is_floating_point), None)
        return Casts(precision.master or (None if precision.compute is None else own), precision.reduce)


def read_model(model: nn.Module, example_inputs: ExampleInputs | None, request: Request) -> ModelInfo:
    """Read `model`, which `with_loss` may have joined with a loss, and check and complete its inputs.

    Raises InputError for inputs that it does not take or that are missing, MicroBatchError for a batch that cannot be
    cut as requested, PlanMismatchError for another loss than that of a plan to replay, and UnsupportedError for hooks
    on gradients and for models that are parallel already.
    """
    refuse_unsupported(model)
    if request.objective == "train":
        refuse_gradient_hooks(model)
    joined, plan = joined_loss(model), request.plan
    loss, required = ("", ()) if joined is None else (joined.fingerprint, joined.required)
    if plan is not None:
        _check_loss(plan, loss)
    signature = inspect.signature(model.forward)
    if example_inputs is not None:
        inputs = completed(model, _given_inputs(type(model).__name__, signature, example_inputs))
    elif plan is not None:
        if any("[" in name for name in plan.inputs):
            raise InputError("the plan has inputs inside lists or dicts: pass example_inputs too")
        inputs = {
            name: torch.empty(item.shape, dtype=getattr(torch, item.dtype), device="meta")
            for name, item in plan.inputs.items()
        }
    else:
        inputs = made_inputs(model, request.objective, request.mesh.size)
    for name, leaf in input_leaves(inputs):
        if isinstance(leaf, torch.Tensor):
            require_strided(name, leaf)
        elif hasattr(leaf, "__array__"):
            raise InputError(f"{name} is of type {type(leaf).__name__}: pass a tensor (torch.as_tensor)")
    missing = [name for name in required if inputs.get(name) is None]
    if missing and request.objective == "train":
        raise InputError(f"the loss needs {', '.join(missing)}: add it to example_inputs")
    # A program for inference of a plan for training was traced as it was.
    traced_for = request.objective if plan is None else plan.objective
    assumed = settings(signature, inputs, traced_for) if is_huggingface(model) else {}
    if example_inputs is None and plan is not None:
        unknown = sorted(set(plan.constants) - {*inputs, *assumed})
        if unknown:
            raise InputError(f"the plan was made for a certain {', '.join(unknown)}: pass example_inputs too")
    if request.micro_batches is not None:
        batch = batch_size(tuple(leaf.shape) for _, leaf in input_leaves(inputs) if isinstance(leaf, torch.Tensor))
        check_divides(batch, request.micro_batches)
    return ModelInfo(
        type(model).__name__,
        signature,
        {name: item.dtype for name, item in model.named_parameters(remove_duplicate=False)},
        structure_fingerprint(model),
        loss,
        {**inputs, **assumed},
        frozenset(assumed),
    )


def _check_loss(plan: Plan, loss: str) -> None:
    """Raise PlanMismatchError where a plan was made with another loss than the one of this fingerprint."""
    if plan.loss and not loss:
        raise PlanMismatchError("the plan was made with a loss outside of the model: pass the same one as loss=")
    if loss and not plan.loss:
        raise PlanMismatchError("loss= is given, but the plan was made without one: leave loss out, or plan anew")
    if plan.loss != loss:
        raise PlanMismatchError(
            "the plan was made with another loss=: its code, or a value that it holds, differs; plan anew"
        )


def _given_inputs(model: str, signature: inspect.Signature, example_inputs: ExampleInputs) -> dict[str, object]:
    """The inputs that were given for `model`, by name."""
    if not isinstance(example_inputs, (Mapping, tuple)):
        raise InputError(
            f"example_inputs is of type {type(example_inputs).__name__}: give a dict of keyword arguments of "
            f"{model}, or a tuple of positional ones, such as (ids,)"
        )
    args, kwargs = (example_inputs, {}) if isinstance(example_inputs, tuple) else ((), dict(example_inputs))
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(f"{model} does not take these example_inputs: {error}") from None
    return {name: value for name, value in named_arguments(signature, bound) if value is not None}


def structure_of(model: nn.Module) -> nn.Module:
    """A copy of `model` whose parameters and buffers are on meta. Other tensors that it holds are shared."""
    copies: dict[int, object] = {}
    for part in model.modules():
        copies.update({id(value): value for value in vars(part).values() if isinstance(value, torch.Tensor)})
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        copies[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, copies)


# --- traces ----------------------------------------------------------------------------------------------------------

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
    # A program for inference of a plan for training is traced as that is.
    objective = request.objective if request.plan is None else request.plan.objective
    context = _replacements(model, info.inputs, objective)
    return Tracing(mode == "train", request.objective == "train", context, request.precision.compute, device)


@contextlib.contextmanager
def _replacements(model: nn.Module, inputs: Inputs, objective: str) -> Iterator[None]:
    """Enter around a trace: functions that it cannot follow are replaced by others that compute the same."""
    with with_padded_labels(), huggingface.tracing(model, inputs, objective):
        yield


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
    tensors.sort(key=lambda item: has_gradient(item[1].dtype))
    batch = batch_size(tuple(tensor.shape) for _, tensor in tensors)
    found: dict[str, NamedSize] = {}
    for dim, common in ((0, BATCH), (1, SEQUENCE)):
        for argument, tensor in tensors:
            if tensor.dim() <= dim or tensor.shape[dim] == 1:
                continue
            size = tensor.shape[dim]
            same = size == batch if common == BATCH else common not in found or found[common][0] == size
            if dim and has_gradient(tensor.dtype) and (common not in found or not same or tensor.dim() != 3):
                continue
            name = common if same else f"{argument}_{dim}".replace(".", "_")
            found.setdefault(name, (size, []))[1].append((argument, dim))
    return found
