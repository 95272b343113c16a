"""Properties of a model and its inputs that plans need besides its trace, read and checked once."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from autopar.models.fingerprint import structure_fingerprint
from autopar.models.huggingface import is_huggingface, made_inputs, settings
from autopar.models.losses import joined_loss
from autopar.precision import Precision
from autopar.request import Request
from autopar.runtime import named_arguments
from passes.ir.errors import InputError, MicroBatchError, PlanMismatchError
from passes.ir.leaves import input_leaves
from passes.ir.plan import Plan
from passes.lower import Casts
from passes.micro_batches import batch_size

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
    cut as requested, and PlanMismatchError for another loss than that of a plan to replay.
    """
    joined, plan = joined_loss(model), request.plan
    loss, required = ("", ()) if joined is None else (joined.fingerprint, joined.required)
    if plan is not None:
        _check_loss(plan, loss)
    signature = inspect.signature(model.forward)
    if example_inputs is not None:
        inputs = _given_inputs(type(model).__name__, signature, example_inputs)
    elif plan is not None:
        inputs = _planned_inputs(plan)
    else:
        inputs = made_inputs(model, request.objective, request.mesh.size)
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
    _check_batch(inputs, request.micro_batches)
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
    args, kwargs = (example_inputs, {}) if isinstance(example_inputs, tuple) else ((), dict(example_inputs))
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(f"{model} does not take these example_inputs: {error}") from None
    return {name: value for name, value in named_arguments(signature, bound) if value is not None}


def _planned_inputs(plan: Plan) -> dict[str, object]:
    """Inputs of the shapes that a plan was made for."""
    if any("[" in name for name in plan.inputs):
        raise InputError("the plan has inputs inside lists or dicts: pass example_inputs too")
    return {
        name: torch.empty(item.shape, dtype=getattr(torch, item.dtype), device="meta")
        for name, item in plan.inputs.items()
    }


def _check_batch(inputs: Mapping[str, object], micro_batches: int | None) -> None:
    """Raise MicroBatchError for a batch that cannot be cut into this number of micro-batches."""
    if micro_batches is None:
        return
    batch = batch_size(tuple(leaf.shape) for _, leaf in input_leaves(inputs) if isinstance(leaf, torch.Tensor))
    if batch % micro_batches:
        raise MicroBatchError(
            f"a batch of {batch} cannot be cut into {micro_batches} micro-batches: choose a number that divides it"
        )
