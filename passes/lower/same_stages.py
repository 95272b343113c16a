"""same_stages: cuts another program of a model, for evaluation or for other sizes, into the stages of its first one.

A stage of it reads the parameters, and the buffers that the first program updates, that the same stage of the first
program holds: a copy on other ranks would be neither trained nor updated.
"""

from collections.abc import Mapping, Sequence

from passes.ir.decisions import FirstProgram
from passes.ir.errors import PipelineError
from passes.ir.lowered import Stage
from passes.ir.mesh import Mesh
from passes.lower.positions import keys_of_positions, positions
from passes.lower.stages import cut, reads_of_positions


def cut_alike(
    stage: Stage, cuts: Sequence[str], first: FirstProgram, flowing: frozenset[str], mesh: Mesh
) -> tuple[Stage, ...]:
    """The stages of a program that is lowered to one, near the `cuts` of the first program of its model. A gradient
    flows through the tensors `flowing`.

    Raises PipelineError where there are no such stages.
    """
    starts = near_starts(stage, cuts, first.order)
    try:
        return cut(stage, starts, flowing, mesh, first.holders)
    except PipelineError:
        moved = _moved(starts, reads_of_positions(stage, flowing, mesh), first.holders)
        if moved == starts:
            raise
    return cut(stage, moved, flowing, mesh, first.holders)


def near_starts(stage: Stage, cuts: Sequence[str], order: Sequence[str]) -> tuple[int, ...]:
    """The numbers of the positions that stages begin with; `order` are the keys of the first program's ops.

    Where no position has the name of a cut, the stage begins before the first later op that both programs have, or
    after the piece that it is in; stages may be empty.
    """
    pieces = positions(stage)
    names = {item.name: number for number, item in reversed(list(enumerate(pieces)))}
    firsts: dict[str, int] = {}
    for number, (key, *others) in enumerate(keys_of_positions(stage)):
        firsts |= {key: number, **dict.fromkeys(others, number + 1)}
    found: list[int] = []
    for name in cuts:
        if name in names:
            number = names[name]
        else:
            within = (at for at, key in enumerate(order) if key == name or key.startswith((f"{name}/", f"{name}.")))
            later = order[next(within, len(order)) :]
            number = next((firsts[key] for key in later if key in firsts), len(pieces))
        found.append(min(max([1, number, *found[-1:]]), len(pieces) - 1))
    return tuple(found)


def _moved(starts: Sequence[int], reads: Sequence[set[str]], holders: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The nearest starts at which the positions, with the names that they `reads`, are in stages of their `holders`, as
    far as there are any."""
    held = [[holders[name] for name in names if name in holders] for names in reads]
    found: list[int] = []
    for number, start in enumerate(starts, 1):
        earlier = [at for at, own in enumerate(held) if any(max(stages) < number for stages in own)]
        later = [at for at, own in enumerate(held) if any(min(stages) >= number for stages in own)]
        least = max([1, *found[-1:], *(at + 1 for at in earlier[-1:])])
        found.append(max(least, min([start, *later[:1]])))
    return tuple(found)
