"""The configurations that may be chosen on one mesh: micro-batches, recompute, and ZeRO stage."""

from collections.abc import Iterator, Mapping
from itertools import product

from passes.ir.configuration import RECOMPUTE, Configuration
from passes.ir.mesh import Mesh
from passes.ir.program import Folded, Program
from passes.lower.recompute import levels
from passes.micro_batches import batch_size
from passes.search.space import Space

# Regions whose levels of recompute are chosen one by one; where there are more, all get the same level.
_CHOSEN_APART = 2


def micro_batch_counts(space: Space, program: Program) -> Iterator[int]:
    """The numbers of micro-batches that the batch of `program` divides into, in ascending order."""
    if space.micro_batches is not None or not space.trains:
        yield space.micro_batches or 1
        return
    batch = batch_size(item.type.shape for item in program.inputs)
    yield from (count for count in range(1, batch + 1) if batch % count == 0)


def limited_configurations(space: Space, mesh: Mesh, count: int, folded: Folded) -> Iterator[Configuration]:
    """All configurations of `count` micro-batches on `mesh`, those that take least memory first; ZeRO stage 3, 2, 1."""
    stages = [(False, False)] if count == 1 else [(False, False), (True, False), (True, True)]
    for recompute in _recompute_levels(space, folded):
        yield from (Configuration(mesh, count, recompute, *once) for once in stages)


def relaxed_configuration(space: Space, mesh: Mesh, count: int, folded: Folded) -> Configuration:
    """The configuration of `count` micro-batches that is fastest where memory is not limited: no recompute that was not
    asked for, parameters gathered and gradients reduced once."""
    *_, recompute = _recompute_levels(space, folded)
    return Configuration(mesh, count, recompute, count > 1, count > 1)


def configuration_text(configuration: Configuration) -> str:
    """A configuration for people: "4 micro-batches, full recompute of model.layers.*"; "" for the default one."""
    count = configuration.micro_batches
    parts = [f"{count} micro-batches"] if count > 1 else []
    parts += [f"{level} recompute of {name}" for name, level in configuration.recompute.items() if level != "none"]
    return ", ".join(parts)


def _recompute_levels(space: Space, folded: Folded) -> Iterator[Mapping[str, str]]:
    """The level of recompute of each region, those that take least memory first."""
    if space.recompute is not None or not space.trains:
        yield levels([region.name for region in folded.regions], space.recompute or {})
        return
    names = [region.name for region in folded.regions if region.count > 1]
    if len(names) <= _CHOSEN_APART:
        yield from (dict(zip(names, each, strict=True)) for each in product(RECOMPUTE[::-1], repeat=len(names)))
    else:
        yield from (dict.fromkeys(names, level) for level in RECOMPUTE[::-1])
