"""Hooks of the parameters that users see.

Autograd computes gradients of other tensors (FSDP units, local parts), so these hooks are called by hand. Tensors have
no public table of their hooks: `_backward_hooks` and `_post_accumulate_grad_hooks` are those of torch 2.11 to 2.13.
"""

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from passes.ir.errors import InputError


def tensor_hooks(parameter: nn.Parameter) -> Sequence[Callable[[Tensor], Tensor | None]]:
    """The hooks that were registered with `register_hook`, in their order."""
    return tuple((parameter._backward_hooks or {}).values())


def post_accumulate_hooks(parameter: nn.Parameter) -> Sequence[Callable[[Tensor], None]]:
    """The hooks that were registered with `register_post_accumulate_grad_hook`, in their order."""
    return tuple((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())


def after_tensor_hooks(path: str, parameter: nn.Parameter, gradient: DTensor) -> DTensor:
    """A gradient of the parameter called `path`, as its tensor hooks return it.

    Raises InputError for a hook that returns anything but a `DTensor` with the placements of the gradient.
    """
    for hook in tensor_hooks(parameter):
        result = hook(gradient)
        if result is None:
            continue
        if not isinstance(result, DTensor) or result.placements != gradient.placements:
            kind = (
                f"a DTensor with {result.placements}" if isinstance(result, DTensor) else f"a {type(result).__name__}"
            )
            raise InputError(
                f"a hook of the parameter {path!r} returned {kind}: return a DTensor with the placements of the "
                f"gradient that it is given, {gradient.placements}"
            )
        gradient = result
    return gradient
