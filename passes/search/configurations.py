"""The configurations that may be chosen on one mesh: pipeline, micro-batches, recompute, and ZeRO stage."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

from passes.ir.configuration import RECOMPUTE, ZERO_STAGES, Configuration, Staging, zero_timing
from passes.ir.folded import Folded
from passes.ir.levels import Level, is_mixed, level_items, level_of, over
from passes.ir.mesh import Mesh
from passes.ir.program import Program
from passes.lower.recompute import levels
from passes.micro_batches import batch_size, divisors
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
    yield from divisors(batch)


def limited_configurations(space: Space, mesh: Mesh, count: int, folded: Folded) -> Iterator[Configuration]:
    """All configurations of `count` micro-batches on `mesh`, those that take least memory first; ZeRO stage 3, 2, 1.
    Those that recompute some copies of a region have all numbers of these at once, as undecided."""
    levels = (*_recompute_levels(space, folded), *_levels_of_some(space, folded))
    for pipeline, recompute in product(PIPELINES, levels):
        own = replace(pipeline, in_flight=space.in_flight)
        for stage in _zero_stages(space, count):
            yield Configuration(mesh, count, recompute, *zero_timing(stage, count), own, space.zero)


def relaxed_configuration(space: Space, mesh: Mesh, count: int, folded: Folded) -> Configuration:
    """The configuration of `count` micro-batches that is fastest where memory is not limited: no recompute that was not
    asked for, parameters gathered and gradients reduced once. Its step time without memory limit must be a lower
    bound on that of all `limited_configurations` of as many micro-batches, whatever their pipeline."""
    every = list(_recompute_levels(space, folded))
    recompute = {name: min((each[name] for each in every), key=_kept) for name in every[0]}
    *_, stage = _zero_stages(space, count)
    staging = Staging(in_flight=space.in_flight)
    return Configuration(mesh, count, recompute, *zero_timing(stage, count), staging, space.zero)


def _kept(level: str) -> int:
    """The place of a level of recompute among those that keep ever less."""
    return RECOMPUTE.index(level_of(level).rest)


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
    for name, text in configuration.recompute.items():
        level = level_of(text)
        if level.is_mixed:
            others = f" and {level.rest} of the others" if level.rest != "none" else ""
            parts.append(f"full recompute of {level.full} copies of {name}{others}")
        elif level.rest != "none":
            parts.append(f"{text} recompute of {name}")
    return ", ".join(parts)


def any_number(configuration: Configuration, folded: Folded) -> tuple[Configuration, ...]:
    """The configurations that differ from one in the number of copies that they recompute fully alone: none of them, or
    some, as undecided. The configuration itself where all copies of a region have one level."""
    counts = {region.name: region.count for region in folded.regions}
    levels = {name: level_of(text) for name, text in configuration.recompute.items()}
    if not is_mixed(configuration.recompute):
        return (configuration,)
    some = {name: _some(level.rest, counts[name]) if level.is_mixed else level.rest for name, level in levels.items()}
    none = {name: level.rest for name, level in levels.items()}
    return tuple(replace(configuration, recompute=each) for each in (some, none))


def between(configuration: Configuration, least: int, most: int) -> Configuration:
    """A configuration with these numbers of copies that are recomputed fully in place of its own."""
    levels = {name: level_of(text) for name, text in configuration.recompute.items()}
    own = {
        name: str(replace(level, full=least, undecided=most - least) if level.is_mixed else level)
        for name, level in levels.items()
    }
    return replace(configuration, recompute=own)


def numbers(configuration: Configuration) -> tuple[int, int]:
    """The least and the largest number of copies that are recomputed fully where others are not; zeros where all copies
    have one level."""
    levels = (level_of(text) for text in configuration.recompute.values())
    return next(((level.full, level.full + level.undecided) for level in levels if level.is_mixed), (0, 0))


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


def is_undecided(configuration: Configuration) -> bool:
    """Whether a configuration leaves a number of copies open."""
    least, most = numbers(configuration)
    return least < most


def _some(rest: str, count: int) -> str:
    """Full recompute of any number of `count` copies, but none and all."""
    return str(Level(rest, 1, count - 2))


def _levels_of_some(space: Space, folded: Folded) -> Iterator[Mapping[str, str]]:
    """The levels of recompute where some copies of the largest region are recomputed fully, and the others, like the
    other regions, have the other levels."""
    if _is_recompute_given(space) or not space.divides_copies or not folded.regions:
        return
    names = _sharing(folded)
    largest = max(folded.regions, key=lambda region: region.count * len(region.ops))
    if largest.count < 2:
        return
    apart = list(dict.fromkeys(names.values()))
    for each in product(RECOMPUTE[::-1], repeat=len(apart)):
        own = dict(zip(apart, each, strict=True))
        rest = own[names[largest.name]]
        if rest != "full":
            yield {name: own[first] for name, first in names.items()} | {largest.name: _some(rest, largest.count)}


def _recompute_levels(space: Space, folded: Folded) -> Iterator[Mapping[str, str]]:
    """The level of recompute of each region, those that take least memory first."""
    yield from (each for each in _all_recompute_levels(space, folded) if level_items(each) not in space.refused)


def _all_recompute_levels(space: Space, folded: Folded) -> Iterator[Mapping[str, str]]:
    if _is_recompute_given(space):
        counts = {region.name: region.count for region in folded.regions}
        yield {name: over(level, counts[name]) for name, level in levels(counts, space.recompute or {}).items()}
        return
    names = _sharing(folded)
    apart = list(dict.fromkeys(names.values()))
    for each in product(RECOMPUTE[::-1], repeat=len(apart)):
        own = dict(zip(apart, each, strict=True))
        yield {name: own[first] for name, first in names.items()}
