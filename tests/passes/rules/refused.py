"""Forms of operators that their rules do not split, and why that is so."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch

from tests.passes.rules.samples import Sample


@dataclass(frozen=True)
class Refused:
    """`holds` for forms of `kinds` that are not split, for `reason`."""

    kinds: tuple[str, ...]
    holds: Callable[[Sample], bool]
    reason: str


def _one_number(sample: Sample) -> bool:
    """Whether every result is a single number."""
    return all(result.numel() == 1 for result in sample.run(sample.tensors))


def _one_row(sample: Sample) -> bool:
    """Whether but one dim of the first operand is not 1."""
    return sum(size != 1 for size in sample.tensors[0].shape) == 1


def _all_in_argument(sample: Sample) -> bool:
    """Whether the first list among the arguments names all dims that are not 1."""
    tensor = sample.tensors[0]
    dims = next(argument for argument in sample.arguments[1:] if isinstance(argument, list))
    named = {int(dim) % tensor.dim() for dim in dims}
    return all(size == 1 or dim in named for dim, size in enumerate(tensor.shape))


def _all_padded(sample: Sample) -> bool:
    """Whether all dims that are not 1 are padded."""
    tensor, pad = sample.tensors[0], sample.arguments[1]
    assert isinstance(pad, list)
    padded = {tensor.dim() - 1 - place // 2 for place, amount in enumerate(pad) if amount}
    return all(size == 1 or dim in padded for dim, size in enumerate(tensor.shape))


def _all_shuffled(sample: Sample) -> bool:
    """Whether all dims but the last three are 1."""
    return prod(sample.tensors[0].shape[:-3]) == 1


def _nothing_left(sample: Sample) -> bool:
    return any(result.numel() == 0 for result in sample.run(sample.tensors))


def _no_batch(sample: Sample) -> bool:
    """Whether a convolution or a pool is given a single image, without a batch."""
    return sample.tensors[0].dim() == int(sample.kind.rstrip("d")[-1]) + 1


def _masked(sample: Sample) -> bool:
    """Whether an index is a mask."""
    return any(tensor.dtype == torch.bool for tensor in sample.tensors[1:])


_RANKS = (1, 2, 3)

REFUSED = (
    Refused(
        (
            "all",
            "any",
            "amax",
            "amin",
            "aminmax",
            "argmax",
            "argmin",
            "kthvalue",
            "max",
            "median",
            "min",
            "mode",
            "prod",
            "std",
            "std_mean",
            "var",
            "var_mean",
        ),
        _one_number,
        "all dims are reduced, and a reduced dim stays whole",
    ),
    Refused(("argsort", "mode", "msort", "sort"), _one_row, "the only dim is sorted, and stays whole"),
    Refused(("select",), _one_number, "the only dim is the one that is taken from"),
    Refused(("flip",), _all_in_argument, "flipped dims stay whole"),
    Refused(("pad", "constant_pad_nd"), _all_padded, "padded dims stay whole"),
    Refused(
        ("pixel_shuffle", "pixel_unshuffle"), _all_shuffled, "the dims that change stay whole, and there is no batch"
    ),
    Refused(("diagonal",), lambda sample: sample.tensors[0].dim() == 2, "both dims make the diagonal"),
    Refused(("slice",), _nothing_left, "there is nothing to compute"),
    Refused(("index_put",), _masked, "how many elements a mask takes is not known beforehand"),
    Refused(
        tuple(f"conv{way}{rank}d" for way in ("", "_transpose") for rank in _RANKS)
        + tuple(f"adaptive_avg_pool{rank}d" for rank in _RANKS),
        _no_batch,
        "a single image without a batch dim is not known",
    ),
)
