"""A lower bound on the step of everything that a space offers, before anything of it is solved.

Whatever the mesh and the layouts, a step of m micro-batches computes at least m times what one of them takes on all
devices without communication (`cost.bound`), and at each level of recompute what is computed again. Levels whose least
bytes exceed the memory limit (`least_memory`) cannot be chosen. More micro-batches never compute for less time, so that
numbers are tried from one up, until their computation alone takes as long as the least step so far.
"""

from bisect import bisect_left
from dataclasses import replace

from passes.cost.bound import LeastWork, least_once_s, least_work
from passes.ir.configuration import Configuration
from passes.ir.folded import Folded
from passes.ir.levels import LevelItems, level_items
from passes.rules.cheap import Cheap
from passes.search.configurations import between, is_undecided, limited_configurations, micro_batch_counts, numbers
from passes.search.least_memory import LeastMemory
from passes.search.recomputing import RecomputeBounds
from passes.search.space import Space
from passes.search.subproblems import MicroBatchProgram, Subproblems


def least_offered_s(subproblems: Subproblems) -> float:
    """A lower bound on the seconds of every step without a pipeline that the space of `subproblems` offers; infinite
    where nothing can fit."""
    space, memory = subproblems.space, LeastMemory(subproblems)
    whole = subproblems.programs.given(1).folded
    once_s = least_once_s(whole, space.cluster, space.optimizer, space.mesh.size)
    # A search offers full recompute of some copies where that of all would be the best.
    offered = replace(space, divides_copies=space.some_copies, in_flight=1)
    found, undecided = float("inf"), list[tuple[RecomputeBounds, Configuration]]()
    for count in micro_batch_counts(space, subproblems.programs.program):
        program = subproblems.programs.of(count, is_given=space.micro_batches is not None)
        if program is None:
            break
        least = least_at_levels(program, count, least_work(program.folded, space.cluster, space.mesh.size))
        if least.bound + once_s >= found:
            break
        for each in sorted(by_levels(offered, count, program.folded).values(), key=least.of):
            if is_undecided(each):
                undecided.append((least, each))
            elif least.of(each) + once_s < found and memory.bytes(each) <= space.memory_limit:
                found = least.of(each) + once_s
    for least, each in undecided:
        found = min(found, _least_of_some(each, least, found - once_s, memory, space.memory_limit) + once_s)
    return found


def _least_of_some(
    configuration: Configuration, least: RecomputeBounds, limit_s: float, memory: LeastMemory, limit_bytes: float
) -> float:
    """A lower bound on the seconds with every number of copies that a configuration leaves open, or `limit_s` if that
    is less. The search takes it for granted, too, that more copies which are recomputed fully need no more memory."""
    first, last = numbers(configuration)
    every = range(first, last + 1)

    def own(number: int) -> Configuration:
        return between(configuration, number, number)

    fast = bisect_left(every, True, key=lambda number: least.of(own(number)) >= limit_s)
    if not fast or memory.bytes(own(every[fast - 1])) > limit_bytes:
        return limit_s
    return least.of(own(every[bisect_left(every[:fast], True, key=lambda n: memory.bytes(own(n)) <= limit_bytes)]))


def least_at_levels(program: MicroBatchProgram, count: int, work: LeastWork) -> RecomputeBounds:
    """Lower bounds on the seconds of `count` micro-batches at each level of recompute, where one takes `work` without.
    Ops that are cheap in some of their local forms alone count in none."""
    regions, analysis = program.folded.regions, program.analysis
    cheap = {key for key, how in analysis.cheap.items() if how is Cheap.ALWAYS}
    again = {"full": work.ops_s.keys(), "ops": cheap | analysis.second, "selective": cheap}
    added = {
        (region.name, level): count
        * region.count
        * sum(work.ops_s.get(op.key, 0.0) for op in region.ops if op.key in keys)
        for region in regions
        for level, keys in again.items()
    }
    every_s = count * (work.forward_s + work.backward_s + work.either_s)
    return RecomputeBounds(every_s, added, {region.name: region.count for region in regions})


def by_levels(space: Space, count: int, folded: Folded) -> dict[LevelItems, Configuration]:
    """The configurations of `count` micro-batches that a space offers, of each level of recompute the one that takes
    least memory: that of the first stage of ZeRO."""
    found: dict[LevelItems, Configuration] = {}
    for each in limited_configurations(space, space.mesh, count, folded):
        found.setdefault(level_items(each.recompute), each)
    return found
