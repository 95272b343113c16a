"""The normal form of a call computes what the call does, with its gradients, over PyTorch's op database."""

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from passes.ir.errors import CaptureError
from passes.ir.program import Program, draws
from passes.normalize import normalize
from tests.passes.normalize.running import run
from tests.passes.rules.database import UNSAFE, as_function, features, spread_over
from tests.passes.rules.normal import traced

# Calls of each entry that are compared, and entries that one test compares.
_CALLS, _ENTRIES = 80, 25
_TOLERANCE = 1e-9
# Operators that have no gradients in torch, or other results that have none, and get some from what they are made of.
_MORE_GRADIENTS = ("logspace", "native_batch_norm", "_native_batch_norm_legit", "native_layer_norm")
# Signs and orders of their results are free, and depend on the last bits.
_FREE = ("pca_lowrank", "svd_lowrank")
# Of calls that make_fx does not trace, or that torch does not differentiate.
_UNTRACED = (CaptureError, RuntimeError, TypeError, ValueError, LookupError, AssertionError, NotImplementedError)


def _entries() -> list[Any]:
    return [
        entry
        for entry in op_db
        if not entry.name.startswith(("masked.", "sparse.", "_refs."))
        and not {entry.name, entry.aten_name} & {*UNSAFE, *_MORE_GRADIENTS, *_FREE}
        and torch.float64 in entry.supported_dtypes("cpu")
    ]


def _samples(entry: Any) -> Iterator[Any]:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    found = list(entry.sample_inputs_func(entry, "cpu", torch.float64, entry.supports_autograd))
    yield from spread_over(found, lambda item: features((item.input, item.args, item.kwargs)), _CALLS)


def _leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in tensors]


def _results(function: Callable[..., object], tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
    """The outputs, and the gradients of all tensors from a fixed weighting of them."""
    leaves = _leaves(tensors)
    outputs = [item for item in pytree.tree_leaves(function(*leaves)) if isinstance(item, Tensor)]
    total = torch.zeros((), dtype=torch.float64)
    for number, output in enumerate(outputs):
        if output.requires_grad:
            weights = torch.cos(torch.arange(output.numel(), dtype=torch.float64) + number).reshape(output.shape)
            parts = (output.real, output.imag) if output.is_complex() else (output,)
            total = total + sum((part * weights).sum() for part in parts)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    gradients = torch.autograd.grad(total, wanted, allow_unused=True) if total.requires_grad else [None] * len(wanted)
    return outputs, list(gradients)


def _error(ours: Tensor | None, theirs: Tensor | None) -> float:
    """No gradient is a gradient of zero."""
    if ours is None or theirs is None:
        return max([0.0, *(item.abs().max().item() for item in (ours, theirs) if item is not None and item.numel())])
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf")
    if not (ours.is_floating_point() or ours.is_complex()):
        return 0.0 if torch.equal(ours, theirs) else float("inf")
    close = torch.isclose(ours, theirs, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)
    return (ours - theirs).abs()[~close].max().item() if not close.all() else 0.0


def _compared(entry: Any, item: Any) -> float | None:
    """The largest error of a call; None where it is not traced, draws random numbers, or computes nothing."""
    called, tensors = as_function(entry, item)
    try:
        program, values = traced(called, _leaves(tensors))
        theirs = _results(called, tensors)
    except _UNTRACED:
        return None
    nothing = all(item.numel() == 0 for item in theirs[0])
    if nothing or _by_chance(program) or any(item.layout != torch.strided for item in theirs[0]):
        return None
    normal, names = normalize(program), [item.name for item in program.inputs]

    def computed(*given: Tensor) -> list[object]:
        return list(run(normal, {**values, **dict(zip(names, given, strict=True))})[0].values())

    both = zip(_results(computed, tensors), theirs, strict=True)
    pairs = [pair for mine, other in both for pair in zip(mine, other, strict=True)]
    return max(_error(*pair) for pair in pairs)


def _by_chance(program: Program) -> bool:
    return any(draws(op) or op.kind.startswith(("empty", "new_empty")) for op in program.ops)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(_entries()), _ENTRIES))
def test_calls_are_equal_in_normal_form(first: int) -> None:
    """Outputs and gradients, in float64."""
    wrong, compared = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for entry in _entries()[first : first + _ENTRIES]:
            for item in _samples(entry):
                error = _compared(entry, item)
                compared += error is not None
                if error:
                    wrong.append(f"{entry.formatted_name}: {error:.1e} for {str((item.args, item.kwargs))[:200]}")
    assert compared
    assert not wrong, "\n".join(wrong)
