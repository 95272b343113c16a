"""Calls of operators from PyTorch's op database, in normal form.

The database (`torch.testing._internal.common_methods_invocations.op_db`) has calls of nearly every operator, but its
sizes are 5 and 3 nearly everywhere. So a call gives only the form: overload, ranks, which dims are 1, broadcasts,
keywords. `sizes.py` draws the sizes anew.
"""

import random
import warnings
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor
from torch.utils import _pytree as pytree

from passes.ir.errors import CaptureError
from passes.normalize import normalize
from passes.rules import pointwise, reduce, registered
from tests.passes.rules.normal import calls_in, traced
from tests.passes.rules.samples import Sample
from tests.passes.rules.sizes import alike, form, wide

# Entries of the database by kind, where more than those of its own name lead to it: the normal form writes these so.
SOURCES: Mapping[str, tuple[str, ...]] = {
    "_prelu_kernel": ("nn.functional.prelu",),
    "cross_entropy_loss": ("nn.functional.cross_entropy",),
    "expand": ("expand", "expand_as", "broadcast_to"),
    "index": ("__getitem__", "take"),
    "log_sigmoid": ("nn.functional.logsigmoid",),
    "nll_loss_nd": ("nn.functional.nll_loss",),
    "norm": ("nn.functional.pairwise_distance", "dist"),
    "permute": ("permute", "t", "T", "transpose", "movedim", "swapaxes"),
    "reshape": ("view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as", "reshape"),
    "select": ("select", "unbind", "__getitem__"),
    "slice": ("slice", "split", "chunk", "narrow", "split_with_sizes", "tensor_split", "__getitem__"),
    "to": ("to", "type_as", "float", "double", "long", "_to_copy"),
    **{f"max_pool{rank}d_with_indices": (f"nn.functional.max_pool{rank}d",) for rank in (1, 2, 3)},
    **{
        f"{prefix}upsample_{name}": ("nn.functional.interpolate",)
        for prefix in ("", "_")
        for name in (
            "nearest1d", "nearest2d", "nearest3d", "nearest_exact1d", "nearest_exact2d", "nearest_exact3d", "linear1d",
            "bilinear2d", "trilinear3d", "bicubic2d",
        )
    },
}  # fmt: skip

# Kinds whose rule is that of one with fewer dims, of the other interpolations, or of one that does the same.
_ALIKE = {
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d", "avg_pool3d",
    "constant_pad_nd", "conv3d", "conv_transpose2d", "conv_transpose3d", "max_pool1d", "max_pool2d", "max_pool3d",
    "max_pool3d_with_indices", "nll_loss_nd", "transpose", "upsample_bicubic2d", "upsample_bilinear2d",
    "upsample_nearest2d", "upsample_nearest3d", "upsample_trilinear3d", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
}  # fmt: skip

# Operators that read outside of their operands, rather than raise, when these do not fit together.
UNSAFE = ("_native_batch_norm_legit_functional", "ctc_loss")


def kinds(without: Container[str] = ()) -> list[ParameterSet]:
    """Parameters of tests: the kinds that have a rule. Those are slow whose rule is that of another one: kinds that
    have the same entry in a table of rules, but for the first."""
    alike = set(_ALIKE)
    for table in (pointwise.TABLE, reduce.TABLE):
        entries: list[object] = []
        for kind, entry in table.items():
            if entry in entries:
                alike.add(kind)
            entries.append(entry)
    return [
        pytest.param(kind, marks=pytest.mark.slow if kind in alike else ())
        for kind in registered()
        if kind not in without
    ]


# --- calls ----------------------------------------------------------------------------------------------------------


@cache
def _entries() -> Mapping[str, tuple[Any, ...]]:
    """The entries of the database by every name that they have."""
    from torch.testing._internal.common_methods_invocations import op_db

    found: dict[str, list[Any]] = {}
    for entry in op_db:
        if entry.name.startswith(("masked.", "sparse.", "_refs.")):
            continue
        for name in {entry.name, entry.name.split(".")[-1], entry.aten_name} - {""}:
            found.setdefault(name, []).append(entry)
    for entry in op_db:
        for alias in entry.aliases:
            if alias.name not in found:
                found[alias.name] = [entry]
    return {name: tuple(entries) for name, entries in found.items()}


def entries(kind: str) -> list[Any]:
    """The entries of the database that lead to operators called `kind`."""
    names = SOURCES.get(kind, (kind,)) if kind not in UNSAFE else ()
    return list({id(entry): entry for name in names for entry in _entries().get(name, ())}.values())


def _inputs(entry: Any) -> Iterator[Any]:
    """The samples of an entry in float64, and a few for whole numbers and flags where it takes them."""
    known = entry.supported_dtypes("cpu")
    for dtype in (torch.float64, torch.int64, torch.bool):
        if dtype in known:
            gradients = dtype == torch.float64 and entry.supports_autograd
            # `entry.sample_inputs` looks up the test that calls it, which takes longer than all else here.
            random.seed(0)
            np.random.seed(0)
            torch.manual_seed(0)
            found = entry.sample_inputs_func(entry, "cpu", dtype, gradients)
            most = 4 if torch.float64 in known and dtype != torch.float64 else None
            yield from spread_over(found, lambda item: features((item.input, item.args, item.kwargs)), most)


Item = TypeVar("Item")


def spread_over(items: Iterable[Item], features: Callable[[Item], Iterable[Hashable]], most: int | None) -> list[Item]:
    """Up to `most` of `items` that together have as many features as can be had greedily; all of them for None."""
    left = [(item, set(features(item))) for item in items]
    if most is None or len(left) <= most:
        return [item for item, _ in left]
    chosen: list[Item] = []
    seen: set[Hashable] = set()
    while len(chosen) < most:
        place = max(range(len(left)), key=lambda index: (len(left[index][1] - seen), -index))
        item, found = left.pop(place)
        chosen.append(item)
        seen |= found
    return chosen


def features(arguments: object) -> Iterator[Hashable]:
    """The features of a call: each of its arguments, with its position."""
    for path, leaf in pytree.tree_flatten_with_path(arguments)[0]:
        tensor = (tuple(min(size, 2) for size in leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else ()
        yield pytree.keystr(path), tensor or alike(leaf)


@cache
def calls(kind: str, traces: int | None) -> tuple[Sample, ...]:
    """The calls of `kind` that the database leads to, one of each form; at most `traces` of its samples are traced."""
    found: dict[Hashable, Sample] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pairs = {
            (entry.formatted_name, *features((item.input, item.args, item.kwargs))): (entry, item)
            for entry in entries(kind)
            for item in _inputs(entry)
        }
        chosen = spread_over(pairs, lambda key: key[1:], traces)
        for key in chosen:
            entry, item = pairs[key]
            for sample in _calls_of(entry, item, kind):
                found.setdefault(form(sample), sample)
    return tuple(found.values())


def as_function(entry: Any, item: Any) -> tuple[Callable[..., object], list[Tensor]]:
    """A call of an entry as a function of its tensors, and these."""
    leaves, tree = pytree.tree_flatten((item.input, item.args, item.kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def function(*tensors: Tensor) -> object:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        first, args, kwargs = pytree.tree_unflatten(filled, tree)
        return entry.op(first, *args, **kwargs)

    return function, [leaves[place] for place in places]


def _calls_of(entry: Any, item: Any, kind: str) -> list[Sample]:
    function, tensors = as_function(entry, item)
    try:
        program, values = traced(function, tensors)
        if not any(op.kind == kind for op in program.ops):
            program = normalize(program)
        return list(calls_in(program, values, kind))
    except (CaptureError, RuntimeError, TypeError, ValueError, LookupError):
        # What does not trace or run never reaches a rule: changes of inputs, sizes that depend on data, sparse tensors.
        return []


# --- forms ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Effort:
    """The effort for each kind: samples of the database that are traced, forms, strategies on two axes.

    A `thorough` check has all sizes on two axes too, and gradients for some operands alone.
    """

    traces: int | None
    forms: int | None
    strategies: int | None
    thorough: bool


FAST = Effort(8, 1, 6, False)
ALL = Effort(None, None, 64, True)


def forms(kind: str, effort: Effort) -> list[Sample]:
    """The forms of a kind that are checked; of fewer, those with many dims that are not 1."""
    found = sorted(calls(kind, effort.traces), key=lambda sample: -min(wide(sample), 4))
    return spread_over(found, _arguments, effort.forms)


def _arguments(sample: Sample) -> Iterator[Hashable]:
    yield sample.target
    for place, value in enumerate((*sample.arguments, *sample.options.values())):
        yield place, type(value), value.dim() if isinstance(value, Tensor) else None
