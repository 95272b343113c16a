"""Clipping of gradients by their norm."""

from torch import Tensor

from autopar.runtime import DistributedModule
from passes.ir.errors import InputError


def clip_grad_norm_(
    dist_model: DistributedModule, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale the gradients of a distributed module so that their norm is at most `max_norm`.

    Does what `torch.nn.utils.clip_grad_norm_(model.parameters(), ...)` does to the stock model; every rank calls it
    alike. In a pipeline the norm is that of all stages, and a parameter that several stages hold counts once. Torch's
    own function sees the parameters of one rank: in a pipeline it clips each stage by its own norm, without an error.

    `norm_type` is the order of the norm, at least 1, or `inf`. Returns the norm before: a plain tensor without dims,
    the same on every rank.

    Raises InputError, on all ranks, for another module, for what are no such numbers, and where ranks differ in them or
    in which parameters have gradients; with `error_if_nonfinite` RuntimeError for a norm that is not finite, and then
    no gradient is changed.
    """
    if not isinstance(dist_model, DistributedModule):
        raise InputError(
            f"clip_grad_norm_ takes a module that parallelize returned, not {type(dist_model).__name__}: call "
            "torch.nn.utils.clip_grad_norm_ on the parameters of others"
        )
    return dist_model.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)
