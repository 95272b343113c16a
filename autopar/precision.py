"""Which dtypes are used for what."""

from dataclasses import dataclass

import torch

from passes.ir.errors import InputError


@dataclass(frozen=True)
class Precision:
    """dtypes of a distributed module; None leaves each as the model has it.

    `compute`: parameters are cast to it where they are used, floating inputs where they come in. `reduce`: gradients of
    parameters are reduced over devices in it. `master`: parameters, gradients and optimizer states are stored in it.
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
