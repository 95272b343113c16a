"""Memory of optimizers: the table that planning, the memory simulator and the public `optimizer` argument share."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerMemory:
    """Tensors that an optimizer needs.

    `states` tensors of a parameter's size persist, and one number per parameter if it is `counting` its steps. While it
    runs it allocates `per_parameter` more tensors of the size of the parameter that it updates, or `for_all` of the
    size of all parameters in a multi-tensor implementation, which updates them together.
    """

    states: int
    counting: bool
    per_parameter: int
    for_all: int


# From the single-tensor and multi-tensor implementations in torch/optim/*.py. adam and adamw take the square root of
# the second moment and divide it by its correction; rmsprop and adagrad take a root and compute the rest in place; the
# multi-tensor adagrad also scales all gradients. lion: sign of a mix of momentum and gradient.
OPTIMIZERS: Mapping[str, OptimizerMemory] = {
    "adam": OptimizerMemory(2, True, 2, 1),
    "adamw": OptimizerMemory(2, True, 2, 1),
    "lion": OptimizerMemory(1, False, 1, 1),
    "rmsprop": OptimizerMemory(1, True, 1, 1),
    "adagrad": OptimizerMemory(1, True, 1, 2),
    "sgd": OptimizerMemory(0, False, 0, 0),
    "sgd_momentum": OptimizerMemory(1, False, 0, 0),
}
NO_OPTIMIZER = OptimizerMemory(0, False, 0, 0)
