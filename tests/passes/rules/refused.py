"""Forms of operators that their rules do not split, and why that is so."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from passes.rules.linalg import MATRIX_FUNCTIONS
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
    """Whether the last list among the arguments names all dims that are not 1; none means all."""
    tensor = sample.tensors[0]
    dims = [argument for argument in sample.arguments[1:] if isinstance(argument, list)][-1] or range(tensor.dim())
    named = {int(dim) % tensor.dim() for dim in dims}
    return all(size == 1 or dim in named for dim, size in enumerate(tensor.shape))


def _all_padded(sample: Sample) -> bool:
    """Whether all dims that are not 1 are padded."""
    tensor, pad = sample.tensors[0], sample.arguments[1]
    assert isinstance(pad, list)
    padded = {tensor.dim() - 1 - place // 2 for place, amount in enumerate(pad) if amount}
    return all(size == 1 or dim in padded for dim, size in enumerate(tensor.shape))


def _one_matrix(sample: Sample) -> bool:
    """Whether the first operand is a single matrix."""
    return prod(sample.tensors[0].shape[:-2]) == 1


def _one_system(sample: Sample) -> bool:
    """Whether a single matrix is solved for a single vector."""
    return _one_matrix(sample) and sample.tensors[1].numel() == sample.tensors[0].shape[-1]


def _nothing_left(sample: Sample) -> bool:
    return any(result.numel() == 0 for result in sample.run(sample.tensors))


def _one_channel(sample: Sample) -> bool:
    """Whether there is one sample of one channel."""
    return prod(sample.tensors[0].shape[:2]) == 1


def _masked(sample: Sample) -> bool:
    """Whether an index is a mask."""
    return any(tensor.dtype == torch.bool for tensor in sample.tensors[1:])


def _partial(sample: Sample) -> bool:
    """Whether the indices of a scatter do not reach through any dim but that which they point into."""
    tensor, dim, index = sample.arguments[:3]
    assert isinstance(tensor, Tensor)
    assert isinstance(index, Tensor)
    assert isinstance(dim, int)
    others = [other for other in range(tensor.dim()) if other != dim % tensor.dim()]
    return all(index.shape[other] != tensor.shape[other] or tensor.shape[other] == 1 for other in others)


def _ends_of_values(sample: Sample) -> bool:
    """Whether a histogram is not told where its bins begin and end."""
    low, high = (*sample.arguments[2:], 0, 0)[:2]
    return sample.options.get("min", low) == sample.options.get("max", high)


def _partial_flags(sample: Sample) -> bool:
    """The same of flags, which cannot be summed."""
    return sample.tensors[0].dtype == torch.bool and _partial(sample)


def _few_dims(count: int) -> Callable[[Sample], bool]:
    """Whether the first operand has no more than `count` dims."""
    return lambda sample: sample.tensors[0].dim() <= count


def _one_column(sample: Sample) -> bool:
    """Whether one system of equations is solved for one column, or row."""
    right = sample.tensors[1]
    return prod(right.shape[:-2]) == 1 == right.shape[-1 if sample.options.get("left", True) else -2]


_WINDOWED = ("conv3d", *(f"conv_transpose{rank}d" for rank in (1, 2, 3)), "avg_pool3d")
# fmt: off
_WHOLE = (
    "all", "any", "amax", "amin", "aminmax", "argmax", "argmin", "kthvalue", "linalg_vector_norm", "max", "median",
    "min", "mode", "norm", "prod", "std", "std_mean", "var", "var_mean",
)
# fmt: on

# Those that the database has forms of.
_OF_MATRICES = tuple(sorted(set(MATRIX_FUNCTIONS) - {"det", "inverse", "linalg_matrix_exp", "slogdet"}))

REFUSED = (
    Refused(_WHOLE, _one_number, "all dims are reduced, and a reduced dim stays whole"),
    Refused(("argsort", "mode", "msort", "sort"), _one_row, "the only dim is sorted, and stays whole"),
    Refused(("cosine_similarity",), _one_number, "the only dim is reduced, and stays whole"),
    Refused(("select",), _one_number, "the only dim is the one that is taken from"),
    Refused(("histc",), _ends_of_values, "bins end where the values do, all of which have to be seen"),
    Refused(("unfold",), _few_dims(1), "windows overlap, or parts are no multiple of the step"),
    Refused(("flip", "roll"), _all_in_argument, "dims that are turned stay whole"),
    Refused(("pad", "constant_pad_nd"), _all_padded, "padded dims stay whole"),
    Refused(("tril", "triu", "diagonal"), _few_dims(2), "the diagonal runs through both dims"),
    Refused(("slice",), _nothing_left, "there is nothing to compute"),
    Refused(("index", "index_put"), _masked, "how many elements a mask takes is not known beforehand"),
    Refused(
        ("scatter", "scatter_reduce"), _partial, "a part of a dim that indices reach is no equal part for each rank"
    ),
    Refused(("scatter_add",), _partial_flags, "the same; and a sum of flags is no flag"),
    Refused(("nll_loss_nd",), _few_dims(1), "there is one sample"),
    Refused(("scaled_dot_product_attention",), _few_dims(3), "a query without heads for keys with heads"),
    Refused(_OF_MATRICES, _one_matrix, "a matrix stays whole"),
    Refused(("linalg_solve",), _one_system, "a matrix stays whole, and so does the vector that it is solved for"),
    Refused(("linalg_solve", "linalg_solve_triangular"), _one_column, "a system is solved for whole columns"),
    Refused(_WINDOWED, _one_channel, "windows that parts do not divide into, of one sample and one channel"),
)
