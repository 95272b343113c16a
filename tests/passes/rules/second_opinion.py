"""A second opinion on the written rules: splits that running an op on shards finds and its rule does not have.

`python -m tests.passes.rules.second_opinion [kind ...]` prints them.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from autopar.discover import suggested
from autopar.discover.calls import call_of, draws, taken
from autopar.testing.ranks import RankError, run_ranks
from passes.ir.layout import I, P, Placement, R
from passes.ir.mesh import Mesh
from passes.ir.rule import Rule
from passes.rules import registered
from passes.rules.strategies import op_context, op_strategies
from tests.passes.rules.database import FAST, Effort, forms
from tests.passes.rules.one_op import OneOp, digits_of, one_op
from tests.passes.rules.resizing import resized
from tests.passes.rules.samples import Sample, samples
from tests.passes.rules.sizes import redrawn

MESH = Mesh(("a",), (2,))

# Kinds of which a miss is accepted, and why; what is missed there are pending sums only, unless `SPLITS` has it too.
ACCEPTED: Mapping[str, str] = {
    **dict.fromkeys(("ceil", "floor", "round", "nan_to_num"), "whole numbers, its operand, stay as they are"),
    **dict.fromkeys(("argmax", "argmin", "median"), "all places are 0 in a dim of one element"),
    **dict.fromkeys(("binary_cross_entropy", "binary_cross_entropy_with_logits"), "nobody has weights as pending sums"),
    **dict.fromkeys(("cross_entropy_loss", "nll_loss_nd"), "nobody has weights as pending sums"),
    "autograd_function": "what is known of it is said by the call, here that it is not linear",
    "batch_norm": "it is linear in evaluation alone, where no sum is pending",
    "detach": "what has no gradient later is cut from it before it is summed",
    **dict.fromkeys(("masked_fill", "index_fill"), "a value that is a tensor is no pending sum"),
    "nansum": "it is a sum where nothing is missing, which cannot be seen",
    "roll": "a roll by nothing, which the normal form drops",
}
SPLITS = ("roll",)
# Operators that read what is not theirs where sizes do not fit, which ends the process that tries them.
ENDING = ("_fft_c2c", "_native_batch_norm_legit_functional", "lstm", "scaled_dot_product_attention")

Way = tuple[tuple[Placement, ...], tuple[Placement, ...]]


def calls(kind: str, effort: Effort) -> Iterator[Sample]:
    """The calls of a kind, with sizes that divide."""
    yield from (sample for sample in samples() if sample.kind == kind)
    for sample in forms(kind, effort):
        yield from redrawn(sample, MESH.size)[:1]


def missed(sample: Sample) -> list[Way]:
    """The splits of a call in two that its rule does not have, as placements of operands and results."""
    if sample.random:
        return []
    one = one_op(sample)
    found = _discovered(one)
    return [] if found is None else sorted(_ways(one, found) - _ways(one, one.rule))


def _discovered(one: OneOp) -> Rule | None:
    """The rule that the operands of a call suggest, in its own sizes and in small ones: others of their values may not
    do (indices, probabilities)."""
    call = call_of(one.op, [tensor.double() if tensor.is_floating_point() else tensor for tensor in one.operands])
    small = (resized(call, unit, ties) for unit in (12, 6) for ties in ("equal", "aligned", "free"))
    found = next(filter(None, (draws(item, (_shuffled, _fractions)) for item in (*small, call) if taken(item))), None)
    return suggested(one.op, one.folded.types, found, draws(call, (_shuffled, _fractions))) if found else None


def _shuffled(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """The values in another order."""
    if not tensor.is_floating_point() and tensor.dtype != torch.bool:
        return tensor
    flat = tensor.detach().flatten()
    return flat[torch.randperm(len(flat), generator=generator)].reshape(tensor.shape)


def _fractions(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers between 0 and 1 in place of those that are not whole."""
    if not tensor.is_floating_point():
        return _shuffled(tensor, generator)
    return 0.25 + torch.rand(tensor.shape, generator=generator, dtype=torch.float64) / 2


def _ways(one: OneOp, rule: Rule | None) -> set[Way]:
    context = op_context(one.op, rule, one.folded.types, one.folded.flowing, set(), set())
    chosen = op_strategies(context, {2: list(digits_of(rule, 2))}, MESH)
    return {
        (
            tuple(_plain(layout[0]) for layout in strategy.operands),
            tuple(_plain(layout[0]) for layout in strategy.results),
        )
        for strategy in chosen
    }


def _plain(placement: Placement) -> Placement:
    """R and I are the same here: which of them it is shows nowhere in the values."""
    return R if placement == I else placement


def is_accepted(kind: str, way: Way) -> bool:
    """Whether that a rule lacks this split is no fault of it."""
    return kind in ACCEPTED and (
        kind in SPLITS or any(placement == P for placements in way for placement in placements)
    )


def way_text(sample: Sample, way: Way) -> str:
    """A split for people: the call, and what it makes of what."""
    sides = (", ".join(map(str, placements)) for placements in way)
    shapes = ", ".join(str(list(tensor.shape)) for tensor in sample.tensors)
    others = [item for item in sample.arguments if not _holds_tensors(item)]
    return f"{sample.kind}({shapes}; {others} {dict(sample.options)}): {' -> '.join(sides)}"


def _holds_tensors(item: object) -> bool:
    return isinstance(item, Tensor) or (isinstance(item, (list, tuple)) and any(map(_holds_tensors, item)))


def opinion(kind: str, effort: Effort = FAST) -> list[str]:
    """The findings that the rules of a kind miss, with the accepted ones marked."""
    return [
        ("accepted: " if is_accepted(kind, way) else "") + way_text(sample, way)
        for sample in calls(kind, effort)
        for way in missed(sample)
    ]


def apart(kind: str) -> list[str]:
    """The same in a process of its own, which some operators end."""
    try:
        (lines,) = run_ranks(opinion, 1, kind)
    except RankError as error:
        if "died with exit code" not in str(error):
            raise
        lines = [f"{'accepted: ' if kind in ENDING else ''}{kind} ends its process"]
    return lines


def main(kinds: Sequence[str]) -> None:
    """Print what is missed."""
    for kind in kinds or registered():
        for line in apart(kind):
            print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
