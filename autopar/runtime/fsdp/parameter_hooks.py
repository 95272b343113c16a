"""Hooks of the parameters that users see.

Autograd computes gradients of other tensors (FSDP units, local parts), so these hooks are called by hand.
"""

from torch import nn
from torch.distributed.tensor import DTensor

from autopar._torch import tensor_hooks
from passes.ir.errors import InputError


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
