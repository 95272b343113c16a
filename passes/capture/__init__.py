"""capture: a module and the types of its inputs in, a program out. `torch.export` does the tracing.

`capture` traces for the sizes of the inputs, `capture_symbolic` for other sizes too.

The program is the training IR: `linear`, `scaled_dot_product_attention`, `layer_norm` and `cross_entropy_loss` stay
whole, and the backward is left to autograd. The module is left as it was, and other threads meet nothing of a trace.
"""

from collections.abc import Set
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from passes.capture.exporting import Exported, export, possible_constants
from passes.capture.program import Symbols, program_of
from passes.capture.ranks import as_one_process
from passes.capture.setting import (
    autograd_functions_written,
    device_of,
    evaluated_parts,
    example_of,
    mode_of,
    parameters_as,
    tensors_on,
)
from passes.ir.leaves import Inputs
from passes.ir.program import Program, Symbolic

__all__ = ["CPU", "Tracing", "as_one_process", "capture", "capture_symbolic", "device_of", "evaluated_parts"]

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Tracing:
    """Settings of a trace.

    `training` is the mode of the module (see `mode_of`), `gradients` whether there will be a backward pass; `context`
    is entered around it; with `dtype` parameters and floating inputs are taken to be of that dtype. A module on meta is
    traced as if it were on `device`.
    """

    training: bool
    gradients: bool
    context: AbstractContextManager[object]
    dtype: torch.dtype | None = None
    device: torch.device = CPU


def capture(module: nn.Module, inputs: Inputs, tracing: Tracing) -> Program:
    """Trace `module(**inputs)`.

    `inputs` are keyword arguments that hold the global batch; of tensors only shape, dtype, device type and
    `requires_grad` matter, other values become part of the program. So do whole numbers in tensors whose values the
    module needs while it is traced: these are no inputs of the program.

    Raises CaptureError where the module cannot be traced, or where the trace would not have its gradients.
    """
    exported, example = _traced(module, inputs, tracing, frozenset())
    return program_of(module, exported, example, tracing.gradients, Symbols())


def capture_symbolic(module: nn.Module, inputs: Inputs, tracing: Tracing, varying: Set[tuple[str, int]]) -> Symbolic:
    """Trace `module(**inputs)` so that the dims `varying` (by input and number) of the inputs may have other sizes.

    A dim of which the trace needs the size is as it is in `inputs`. Raises CaptureError as `capture` does.
    """
    exported, example = _traced(module, inputs, tracing, varying)
    symbols = Symbols()
    program = program_of(module, exported, example, tracing.gradients, symbols)
    return Symbolic(program, symbols.ranges(exported.program), symbols.conditions(program))


def _traced(
    module: nn.Module, inputs: Inputs, tracing: Tracing, varying: Set[tuple[str, int]]
) -> tuple[Exported, Inputs]:
    """The module exported by `torch.export`, and the inputs that it was traced with."""
    stack = ExitStack()
    with stack:
        stack.enter_context(mode_of(module, tracing.training))
        stack.enter_context(autograd_functions_written(tracing.gradients))
        stack.enter_context(as_one_process(module))
        stack.enter_context(tracing.context)
        stack.enter_context(tensors_on(module, tracing.device))
        if tracing.dtype is not None:
            stack.enter_context(parameters_as(module, tracing.dtype))
        example = example_of(module, inputs, tracing.dtype)
        return export(module, example, possible_constants(inputs), varying), example
