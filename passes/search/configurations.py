"""The configurations that may be chosen on one mesh: pipeline, micro-batches, recompute, and ZeRO stage."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

from passes.ir.configuration import RECOMPUTE, ZERO_STAGES, Configuration, Staging, zero_timing
from passes.ir.folded import Folded
from passes.ir.mesh import Mesh
from passes.ir.program import Program
from passes.lower.recompute import levels
from passes.micro_batches import batch_size
from passes.search.space import Space

# The pipelines that may be chosen.
PIPELINES = (Staging(),)

# Different regions whose levels of recompute are chosen one by one; where there are more, all get the same level.
_CHOSEN_APART = 2
# Regions with a smaller part of the ops of all regions than this get the level of the largest region.
_SMALL = 0.1


def micro_batch_counts(space: Space, program: Program) -> Iterator[int]:
    """The numbers of micro-batches that the batch of `program` divides into, in ascending order."""
    if space.micro_batches is not None or not space.trains:
        yield space.micro_batches or 1
        return
    batch = batch_size(item.type.shape for item in program.inputs)
    yield from (count for count in range(1, batch + 1) if batch % count == 0)


def limited_configurations(space: Space, mesh: Mesh, count: int, folded: Folded) -> Iterator[Configuration]:
    """All configurations of `count` micro-batches on `mesh`, those that take least memory first; ZeRO stage 3, 2, 1."""
    for pipeline, recompute in product(PIPELINES, _recompute_levels(space, folded)):
        own = replace(pipeline, in_flight=space.in_flight)
        for stage in _zero_stages(space, count):
            yield Configuration(mesh, count, recompute, *zero_timing(stage, count), own, space.zero)


def relaxed_configuration(space: Space, mesh: Mesh, count: int, folded: Folded) -> Configuration:
    """The configuration of `count` micro-batches that is fastest where memory is not limited: no recompute that was not
    asked for, parameters gathered and gradients reduced once. Its step time without memory limit must be a lower
    bound on that of all `limited_configurations` of as many micro-batches, whatever their pipeline."""
    *_, recompute = _recompute_levels(space, folded)
    *_, stage = _zero_stages(space, count)
    staging = Staging(in_flight=space.in_flight)
    return Configuration(mesh, count, recompute, *zero_timing(stage, count), staging, space.zero)


def _zero_stages(space: Space, count: int) -> tuple[int, ...]:
    """The ZeRO stages that are offered for `count` micro-batches, those that take least memory first."""
    if space.zero is not None:
        return (space.zero,)
    return ZERO_STAGES if count > 1 else ZERO_STAGES[:1]


def is_monotone_in_micro_batches() -> bool:
    """Whether a multiple of a number of micro-batches never takes less time: what splits the smaller ones evenly splits
    the larger ones, and everything is done more often. Other numbers may divide over axes where a smaller one does not.
    With several pipeline stages more micro-batches also shorten the bubble."""
    return all(pipeline.stages == 1 for pipeline in PIPELINES)


def configuration_text(configuration: Configuration) -> str:
    """A configuration for people: "4 micro-batches, full recompute of model.layers.*"; "" for the default one."""
    count = configuration.micro_batches
    parts = [f"{count} micro-batches"] if count > 1 else []
    parts += [f"{level} recompute of {name}" for name, level in configuration.recompute.items() if level != "none"]
    return ", ".join(parts)


def chooses_recompute_apart(space: Space, folded: Folded) -> bool:
    """Whether all combinations of levels of recompute that `space` offers are among the configurations."""
    return _is_recompute_given(space) or _sharing(folded) == _repeated(folded)


def _is_recompute_given(space: Space) -> bool:
    return space.recompute is not None or not space.trains


def _repeated(folded: Folded) -> dict[str, str]:
    """The name of each region, and of the first region with equal layers, whose level of recompute it shares."""
    place = {op.key: region.name for region in folded.regions for op in region.ops}
    found: dict[str, str] = {}
    for region in folded.regions:
        alike = (place.get(folded.alike.get(op.key, op.key)) for op in region.ops)
        found[region.name] = next((found[name] for name in alike if name in found), region.name)
    return found


def _sharing(folded: Folded) -> dict[str, str]:
    """The name of each region, and of the region whose level of recompute it shares."""
    names = _repeated(folded)
    sizes = dict.fromkeys(names.values(), 0)
    for region in folded.regions:
        sizes[names[region.name]] += region.count * len(region.ops)
    large = {name for name, size in sizes.items() if size >= _SMALL * sum(sizes.values())}
    if not names:
        return names
    largest = max(sizes, key=lambda name: sizes[name])
    apart = large if len(large) <= _CHOSEN_APART else set()
    return {name: first if first in apart else largest for name, first in names.items()}


def _recompute_levels(space: Space, folded: Folded) -> Iterator[Mapping[str, str]]:
    """The level of recompute of each region, those that take least memory first."""
    if _is_recompute_given(space):
        yield levels([region.name for region in folded.regions], space.recompute or {})
        return
    names = _sharing(folded)
    apart = list(dict.fromkeys(names.values()))
    for each in product(RECOMPUTE[::-1], repeat=len(apart)):
        own = dict(zip(apart, each, strict=True))
        yield {name: own[first] for name, first in names.items()}
