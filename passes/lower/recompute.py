"""recompute: marks the tensors of a stage that the backward pass recomputes, by a level for each region, or for some of
its copies.

- "none": autograd saves all tensors that it needs.
- "selective": cheap ops are recomputed: those without matrix products, collectives and random numbers. Results of
  products, attention and collectives are saved.
- "ops": every second matrix product is recomputed too.
- "full": only the inputs of a copy of the region are saved; the backward pass runs the copy once more, collectives
  included. "full:20" is that of the first 20 copies alone, which are put into a loop of their own (`ir.levels`).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from passes.ir.errors import ConstraintError
from passes.ir.folded import Region
from passes.ir.levels import level_of
from passes.ir.lowered import Body, Compute, Loop, Redistribution, Stage, Statement
from passes.ir.rule import Rules
from passes.lower.loops import carried_before, some_copies, titled
from passes.rules import find_rule
from passes.rules.cheap import is_cheap, is_view, second_products, with_viewed


def check_patterns(regions: Iterable[Region], asked: Mapping[str, str]) -> None:
    """Raise ConstraintError for a pattern that matches no region, except "*", which matches all of any number, and for
    more copies of a region than it has."""
    counts = {region.name: (region.count, len(region.copies[0])) for region in regions}
    for pattern in asked:
        if pattern != "*" and not any(_matches(name, pattern) for name in counts):
            repeating = f"these repeat: {', '.join(counts)}" if counts else "nothing repeats in the model"
            raise ConstraintError(f"recompute for {pattern!r} matches no region: {repeating}")
    for name, level in levels(counts, asked).items():
        count, size = counts[name]
        full = level_of(level).full
        if full > count:
            each = f" of {size} layers each" if size > 1 else ""
            raise ConstraintError(
                f"recompute of {name!r} is {level!r}, but it has {count} copies{each}: give a number of at most {count}"
            )


def levels(regions: Iterable[str], asked: Mapping[str, str]) -> dict[str, str]:
    """The level of each of these regions by name, from levels by pattern; the longest matching pattern applies."""
    found = {}
    for name in regions:
        patterns = sorted((pattern for pattern in asked if _matches(name, pattern)), key=len)
        found[name] = asked[patterns[-1]] if patterns else "none"
    return found


def recompute(stage: Stage, chosen: Mapping[str, str]) -> Stage:
    """`stage` with the regions marked as `chosen` by their names, from the first of the copies that it has; the others
    save all that autograd needs."""
    types, layouts = dict(stage.body.types), dict(stage.body.layouts)
    found: list[Statement] = []
    seen: dict[str, int] = {}
    for item in stage.body.statements:
        if not isinstance(item, Loop):
            found.append(item)
            continue
        name, count = item.region.name, len(item.copies)
        level = level_of(chosen.get(name, "none"))
        before = seen.get(name, 0)
        seen[name] = before + count
        full = min(max(level.full - before, 0), count)
        if not 0 < full < count:
            found.append(_marked(item, "full" if full else level.rest, stage.program.rules))
            continue
        first, second = item.copies[:full], item.copies[full:]
        found.append(_marked(titled(some_copies(item, first)), "full", stage.program.rules))
        for carried, value, change in carried_before(item, second.start):
            types[carried], layouts[carried] = item.body.types[value], item.body.layouts[value]
            if change is not None:
                types[change.result], layouts[change.result] = change.type, change.after
                found.append(change)
        found.append(_marked(titled(some_copies(item, second)), level.rest, stage.program.rules))
    return replace(stage, body=replace(stage.body, statements=tuple(found), types=types, layouts=layouts))


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)


def _marked(loop: Loop, level: str, rules: Rules) -> Loop:
    body = loop.body
    if level in ("selective", "ops"):
        # The results of a copy and the tensors that they are views of: were these not saved, the last copy would be
        # recomputed from the first.
        saved = with_viewed(body.results, _views(body, rules))
        ops = [item.whole for item in body.statements if isinstance(item, Compute)]
        second = second_products((op, find_rule(op, body.types, rules)) for op in ops) if level == "ops" else set()
        marked = tuple(
            replace(
                item,
                recomputed=item.op.results[0] not in saved
                and (
                    item.op.key in second
                    or is_cheap(item.whole, find_rule(item.whole, body.types, rules), item.copies, [item.body])
                ),
            )
            if isinstance(item, Compute)
            else item
            for item in body.statements
        )
        body = replace(body, statements=marked)
    return replace(loop, body=body, recompute=level)


def _views(body: Body, rules: Rules) -> Iterator[tuple[Collection[str], Collection[str]]]:
    """The results of statements that may be views, and the tensors that they view, from last to first."""
    for item in reversed(body.statements):
        if isinstance(item, Compute) and is_view(find_rule(item.whole, body.types, rules), item.copies):
            yield item.op.results, item.op.operands
        elif isinstance(item, Redistribution):
            yield (item.result,), (item.source,)
