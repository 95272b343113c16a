"""dtypes of computation, stored parameters and gradient reductions."""

from dataclasses import dataclass

import torch

from passes.ir.errors import InputError


@dataclass(frozen=True)
class Precision:
    """dtypes of a distributed module; None leaves each as the model has it.

    `compute`: parameters are cast to it where they are used, floating inputs where they come in. `reduce`: gradients of
    parameters are reduced over devices in it, and added up in it until then; where `compute` has less than 32 bits it
    is float32 unless it is given. `master`: parameters, gradients and optimizer states are stored in it.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    master: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("compute", "reduce", "master"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise InputError(
                    f"precision: {name} must be a floating torch.dtype such as torch.bfloat16, got {dtype!r}"
                )
        if self.reduce is None and self.compute is not None and self.compute.itemsize < torch.float32.itemsize:
            object.__setattr__(self, "reduce", torch.float32)


def read_precision(given: object) -> Precision:
    """A precision as users write it: a `Precision`, or the dtype to compute in.

    Raises InputError for anything else.
    """
    if isinstance(given, Precision):
        return given
    if isinstance(given, torch.dtype):
        return Precision(compute=given)
    raise InputError(
        f"precision is {given!r}: give an autopar.Precision, or the dtype to compute in, such as torch.bfloat16"
    )
