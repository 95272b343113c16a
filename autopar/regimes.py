"""What may be chosen beside layouts: how many micro-batches there are, what is computed again, and when parameters
travel."""

from collections.abc import Iterator, Mapping
from itertools import product

from autopar.request import Request
from passes.ir.program import Folded, Program
from passes.ir.regime import RECOMPUTE, Regime
from passes.micro_batches import batch_size
from passes.recompute import levels

# Regions whose levels of recompute are chosen one by one; of more, all get the same.
_APART = 2


def micro_batch_counts(request: Request, program: Program) -> Iterator[int]:
    """In how many micro-batches the batch of `program` may be cut, fewest first."""
    if request.micro_batches is not None or request.objective != "train":
        yield request.micro_batches or 1
        return
    batch = batch_size(item.type.shape for item in program.inputs)
    yield from (count for count in range(1, batch + 1) if batch % count == 0)


def limited_regimes(request: Request, count: int, folded: Folded) -> Iterator[Regime]:
    """All ways to run so many micro-batches, what takes least memory first; parameters as in ZeRO-3, 2 and 1."""
    travel = [(False, False)] if count == 1 else [(False, False), (True, False), (True, True)]
    for again in _levels(request, folded):
        yield from (Regime(count, again, *once) for once in travel)


def free_regime(request: Request, count: int, folded: Folded) -> Regime:
    """How so many micro-batches run where memory is not limited: nothing that is not asked for is computed again, and
    parameters travel once. No other way takes less time."""
    *_, again = _levels(request, folded)
    return Regime(count, again, count > 1, count > 1)


def regime_text(regime: Regime) -> str:
    """A regime for people: "4 micro-batches, full recompute of model.layers.*"; nothing for the plain one."""
    parts = [f"{regime.micro_batches} micro-batches"] if regime.micro_batches > 1 else []
    parts += [f"{level} recompute of {name}" for name, level in regime.recompute.items() if level != "none"]
    return ", ".join(parts)


def _levels(request: Request, folded: Folded) -> Iterator[Mapping[str, str]]:
    """What may be computed again of each region, what takes least memory first."""
    if request.recompute is not None or request.objective != "train":
        yield levels([region.name for region in folded.regions], request.recompute or {})
        return
    names = [region.name for region in folded.regions if region.count > 1]
    if len(names) <= _APART:
        yield from (dict(zip(names, each, strict=True)) for each in product(RECOMPUTE[::-1], repeat=len(names)))
    else:
        yield from (dict.fromkeys(names, level) for level in RECOMPUTE[::-1])
