"""Errors of a parallelized model's outputs, buffers and gradients beside those of the model on one device."""

from collections.abc import Iterator, Mapping
from operator import itemgetter

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from passes._torch import pytree

# Errors are relative to at least this part of the model's largest gradient (of a parameter, or of an output, over which
# those of parameters are sums), or updated buffer. A tolerance of 1e-9 in float64 is then as much as 45 roundings of
# it, one of 1e-4 in float32 one: gradients that are small because their addends cancel have such errors on a single
# device, too.
_FLOOR = {torch.float64: 1e-5, torch.float32: 1e-3}


def output_errors(
    ours: Mapping[str, object], theirs: Mapping[str, object], in_stages: bool
) -> Iterator[tuple[str, float]]:
    """The error of every leaf of the output, by path; infinite where the leaves are not the same. A rank whose stage
    does not compute a leaf has None."""
    if in_stages:
        ours = {path: leaf for path, leaf in ours.items() if leaf is not None}
        theirs = {path: leaf for path, leaf in theirs.items() if path in ours}
    if ours.keys() != theirs.keys():
        yield "output structure", float("inf")
        return
    for path, other in theirs.items():
        mine, name = ours[path], f"output {path}"
        if isinstance(other, Tensor):
            yield (
                name,
                _error(whole_tensor(mine).detach(), other.detach(), 0.0) if isinstance(mine, Tensor) else float("inf"),
            )
        else:
            yield name, 0.0 if mine == other else float("inf")


def buffer_errors(
    distributed: nn.Module, model: nn.Module, before: Mapping[str, Tensor], in_stages: bool
) -> Iterator[tuple[str, float]]:
    """The buffers that were there `before`, after the call, which updates some: the mean of a norm's input may be
    nothing but rounding errors. A rank has those of its stages."""
    own = dict(distributed.named_buffers())
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in before}
    changed = {
        name: buffer
        for name, buffer in buffers.items()
        if buffer.is_floating_point() and buffer.numel() and not torch.equal(buffer, before[name])
    }
    largest = max((buffer.abs().nan_to_num(0.0, 0.0).max().item() for buffer in changed.values()), default=0.0)
    for name, buffer in buffers.items():
        if in_stages and name not in own:
            continue
        floor = _FLOOR.get(buffer.dtype, 1e-3) * largest if name in changed else 0.0
        yield f"buffer {name}", _error(whole_tensor(own[name]), buffer, floor)


def leaves_of(output: object) -> dict[str, object]:
    """The leaves of an output by their paths, in the order of these: some models fill in an output in another order
    than that of its fields."""
    leaves, _ = pytree.tree_flatten_with_path(output)
    return dict(sorted(((pytree.keystr(path), leaf) for path, leaf in leaves), key=itemgetter(0)))


def scalars_of(leaves: Mapping[str, object]) -> dict[str, object]:
    """The leaves that are tensors without dims, as `outputs="scalars"` returns them."""
    return {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor) and leaf.dim() == 0}


def whole_tensor(tensor: Tensor) -> Tensor:
    """A tensor with the parts of all ranks; collective for a `DTensor`."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradient_errors(
    distributed: nn.Module, model: nn.Module, in_stages: bool, largest: float
) -> Iterator[tuple[str, float]]:
    """The error of every gradient; `largest` is the largest of them and of their addends. A rank has the parameters of
    its stages."""
    own = dict(distributed.named_parameters(remove_duplicate=not in_stages))
    expected = dict(model.named_parameters())
    if in_stages:
        names = dict(model.named_parameters(remove_duplicate=False))
        if set(own) - set(names):
            yield "parameter names", float("inf")
        expected = {name: parameter for name, parameter in expected.items() if name in own}
    elif set(own) != set(expected):
        yield "parameter names", float("inf")
        return
    for name, parameter in expected.items():
        mine, other = own[name].grad, parameter.grad
        if mine is None or other is None:
            yield f"gradient of {name}", 0.0 if mine is other or not parameter.numel() else float("inf")
        else:
            yield (
                f"gradient of {name}",
                _error(whole_tensor(mine), _dense(other), _FLOOR.get(other.dtype, 1e-3) * largest),
            )


def largest_element(*gradients: Tensor | None) -> float:
    """The largest element of gradients, those that are there."""
    given = [_dense(gradient) for gradient in gradients if gradient is not None and gradient.numel()]
    return max((gradient.abs().max().item() for gradient in given), default=0.0)


def _dense(gradient: Tensor) -> Tensor:
    """A gradient of a table with `sparse=True` too: those of a distributed module are dense."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def _error(got: Tensor, expected: Tensor, floor: float) -> float:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return float("inf")
    if torch.equal(got, expected):
        return 0.0
    if not (expected.is_floating_point() or expected.is_complex()):
        return float("inf")
    if expected.isnan().any():
        return float("nan")
    if got.isnan().any():
        return float("inf")
    # Infinite elements, as of masks, must be the same; the others are compared.
    unequal = got != expected
    difference = (got[unequal] - expected[unequal]).abs().max().item()
    finite = expected[expected.isfinite()].abs()
    largest = finite.max().item() if finite.numel() else 0.0
    return difference / max(largest, floor, 1e-300)
