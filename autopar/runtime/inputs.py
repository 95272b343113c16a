"""What a call gives, held against what was planned."""

import inspect
from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from passes.ir.errors import InputError
from passes.ir.program import TensorType, dtype_name


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
    """A constant as a plan has it."""
    return f"{dtype_name(value.dtype)} {value.tolist()}" if isinstance(value, Tensor) else repr(value)


def tensors_among(constants: Mapping[str, object]) -> dict[str, Tensor]:
    """Constants that are tensors."""
    return {name: value for name, value in constants.items() if isinstance(value, Tensor)}


def values_of(name: str, leaf: object, planned: Tensor) -> Tensor:
    """The values that a call has for a constant."""
    if not isinstance(leaf, Tensor) or isinstance(leaf, DTensor) or leaf.dtype != planned.dtype:
        raise InputError(
            f"{name} must be a whole tensor of {planned.dtype}, because the model needs its values; it is {leaf!r}"
        )
    return leaf.detach().cpu().contiguous()


def check_names(given: Sequence[str], planned: Mapping[str, object], constants: Mapping[str, object]) -> None:
    missing = [name for name in planned if name not in given]
    if missing:
        raise InputError(f"missing {listed(missing)}: the plan was made for inputs {', '.join(planned)}")
    additional = [name for name in given if name not in planned and name not in constants]
    if additional:
        raise InputError(
            f"additional {listed(additional)}: the plan was made for inputs {', '.join(planned)} (plan again with it)"
        )


def listed(names: Sequence[str]) -> str:
    return ("argument " if len(names) == 1 else "arguments ") + ", ".join(names)


def is_like(tensor: Tensor, planned: TensorType) -> bool:
    """Whether a tensor differs from a planned one in sizes at most."""
    return tensor.dtype == planned.dtype and tensor.dim() == len(planned.shape)


def check_tensor(name: str, tensor: Tensor, planned: TensorType, what: str) -> None:
    if tuple(tensor.shape) != planned.shape or tensor.dtype != planned.dtype:
        given = TensorType(tuple(tensor.shape), tensor.dtype)
        raise InputError(f"{what}{name} is {given}, but was planned as {planned}: pass that, or plan again")
