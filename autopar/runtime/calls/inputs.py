"""Arguments of calls, bound to the signature of the model and checked against the plan."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.runtime.generated.bases import GeneratedProgram, PlannedInput
from passes.ir.errors import InputError
from passes.ir.leaves import input_leaves, map_leaves
from passes.ir.program import TensorType, dtype_name

# Values that are no tensors and may be given where nothing was planned: a program is made for each.
_SETTINGS = (bool, int, float, str)


@dataclass(frozen=True)
class BoundCall:
    """The arguments of a call.

    `arguments` are those by name that are not left out. Their leaves by name are `tensors`, the inputs of a program,
    `values`, which are constants of it (on the CPU), and `settings`, which are no tensors. `as_planned` says that
    these are the leaves that the plan was made for.
    """

    arguments: Mapping[str, object]
    tensors: Mapping[str, Tensor]
    values: Mapping[str, Tensor]
    settings: Mapping[str, object]
    as_planned: bool

    @property
    def on_meta(self) -> dict[str, object]:
        """The arguments with tensors on `meta`, but for those that are constants."""
        return map_leaves(self.arguments, self._on_meta)

    def _on_meta(self, name: str, leaf: object) -> object:
        if name in self.values or not isinstance(leaf, Tensor):
            return self.values.get(name, leaf)
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta", requires_grad=_differentiable(leaf))


def bound_call(
    signature: inspect.Signature, planned: GeneratedProgram, args: Sequence[object], kwargs: Mapping[str, object]
) -> BoundCall:
    """The arguments of a call of the module whose forward has `signature`, for the program `planned`.

    Raises InputError for an argument that the model does not have or that it cannot do without, for a tensor of another
    dtype or number of dims than planned, and for a constant of another value.
    """
    try:
        bound = signature.bind_partial(*args, **kwargs)
    except TypeError as error:
        raise InputError(f"the model does not take these arguments: {error}") from None
    arguments = {name: value for name, value in named_arguments(signature, bound) if value is not None}
    leaves = dict(input_leaves(arguments))
    inputs = {item.name: item for item in planned.inputs}
    _check_known(signature, arguments, leaves, planned)
    _check_left_out(signature, list(leaves), planned)
    counting = tensors_among(planned.constants)
    values = {name: values_of(name, leaf, counting[name]) for name, leaf in leaves.items() if name in counting}
    tensors: dict[str, Tensor] = {}
    settings: dict[str, object] = {}
    for name, leaf in leaves.items():
        if name in inputs:
            tensors[name] = _planned_tensor(leaf, inputs[name])
        elif name in counting:
            continue
        elif name in planned.constants:
            if isinstance(leaf, Tensor) or leaf != planned.constants[name]:
                raise InputError(f"{name} is {leaf!r}, but was planned as {planned.constants[name]!r}: plan again")
        elif isinstance(leaf, Tensor):
            tensors[name] = leaf
        elif isinstance(leaf, _SETTINGS):
            settings[name] = leaf
        else:
            raise InputError(
                f"additional argument {name} is {type(leaf).__name__}: only tensors, numbers, flags and texts can be "
                f"added to the inputs that the plan was made for, {', '.join(inputs)} (plan again with it)"
            )
    as_planned = set(tensors) == set(inputs) and set(values) == set(counting) and not settings
    return BoundCall(arguments, tensors, values, settings, as_planned)


def _check_known(
    signature: inspect.Signature,
    arguments: Mapping[str, object],
    leaves: Mapping[str, object],
    planned: GeneratedProgram,
) -> None:
    """Raise for an argument that neither the model's signature nor the plan names, and for one that is missing."""
    inputs = [item.name for item in planned.inputs]
    for name, parameter in signature.parameters.items():
        named = parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if named and parameter.default is inspect.Parameter.empty and name not in arguments:
            raise InputError(f"missing argument {name}: the plan was made for inputs {', '.join(inputs)}")
    known = {*inputs, *planned.constants}
    explicit = _named(signature)
    tops = {name: [leaf for leaf in leaves if leaf == name or leaf.startswith(f"{name}[")] for name in arguments}
    additional = [name for name, inner in tops.items() if name not in explicit and not known & {name, *inner}]
    if additional:
        noun = "argument" if len(additional) == 1 else "arguments"
        raise InputError(
            f"additional {noun} {', '.join(additional)}: the model's forward does not name it, and the plan was made "
            f"for inputs {', '.join(inputs)} (plan again with it)"
        )


def _named(signature: inspect.Signature) -> set[str]:
    """The arguments that a signature names, those of `**kwargs: Unpack[...]` among them."""
    found: set[str] = set()
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            for keywords in get_args(parameter.annotation):
                found.update(getattr(keywords, "__annotations__", ()))
        elif parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
            found.add(name)
    return found


def _check_left_out(signature: inspect.Signature, given: Sequence[str], planned: GeneratedProgram) -> None:
    """Raise where an omitted argument has a default other than the planned value."""
    for name, value in planned.constants.items():
        parameter = signature.parameters.get(name)
        if name in given or name in planned.assumed or parameter is None or isinstance(value, Tensor):
            continue
        if parameter.default != value:
            raise InputError(
                f"{name} is left out, which means {parameter.default!r}, but was planned as {value!r}: pass it"
            )


def _planned_tensor(leaf: object, item: PlannedInput) -> Tensor:
    if not isinstance(leaf, Tensor):
        raise InputError(f"{item.name} must be a tensor, got {type(leaf).__name__}")
    if not is_like(leaf, item.type):
        raise unlike(item.name, leaf, item.type)
    if _differentiable(leaf) and not item.differentiable:
        raise InputError(f"{item.name} requires a gradient, but was planned without: plan with one that does")
    return leaf


def _differentiable(leaf: Tensor) -> bool:
    return leaf.requires_grad and torch.is_grad_enabled()


def named_arguments(signature: inspect.Signature, bound: inspect.BoundArguments) -> list[tuple[str, object]]:
    """The given arguments by name, those in `**kwargs` among them."""
    found: list[tuple[str, object]] = []
    for name, value in bound.arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            found += list(value.items())
        elif signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
            raise InputError(f"the model takes *{name}: pass its inputs by name")
        else:
            found.append((name, value))
    return found


def constant_text(value: object) -> str:
    """A constant as text, in the form that plans record."""
    return f"{dtype_name(value.dtype)} {value.tolist()}" if isinstance(value, Tensor) else repr(value)


def tensors_among(constants: Mapping[str, object]) -> dict[str, Tensor]:
    """The constants that are tensors."""
    return {name: value for name, value in constants.items() if isinstance(value, Tensor)}


def values_of(name: str, leaf: object, planned: Tensor) -> Tensor:
    """The values that a call passes for a constant."""
    if not isinstance(leaf, Tensor) or isinstance(leaf, DTensor) or leaf.dtype != planned.dtype:
        raise InputError(
            f"{name} must be a whole tensor of {planned.dtype}, because the model needs its values; it is {leaf!r}"
        )
    return leaf.detach().cpu().contiguous()


def is_like(tensor: Tensor, planned: TensorType) -> bool:
    """Whether a tensor equals a planned one in everything but its sizes."""
    return tensor.dtype == planned.dtype and tensor.dim() == len(planned.shape)


def unlike(what: str, tensor: Tensor, planned: TensorType) -> InputError:
    """The error for a tensor, called `what`, that cannot take the place of a planned one."""
    given = TensorType(tuple(tensor.shape), tensor.dtype)
    return InputError(f"{what} is {given}, but was planned as {planned}: pass that, or plan again")
