"""What users demand of ops, and what meets it."""

from collections.abc import Iterable, Mapping, Sequence

from passes.ir.choices import Strategy
from passes.ir.demands import Demand, Demands
from passes.ir.errors import ConstraintError
from passes.ir.layout import I, Letter, R
from passes.ir.mesh import Mesh
from passes.ir.program import Op
from passes.rules.strategies import Subject


def meant(demand: Demand, flows: bool) -> Letter:
    """The letter that is demanded: without a gradient R and I are the same."""
    assert demand.letter is not None, "only demands of a method have no letter"
    return R if demand.letter == I and not flows else demand.letter


def demanded_splits(
    ops: Sequence[Op], demands: Demands, names: Mapping[str, str], mesh: Mesh, size: int
) -> dict[str, list[Letter]]:
    """The splits that are demanded of the tensors of `ops`, by their names, on axes of `size`. `names` has the name in
    the program of what a region calls otherwise."""
    found: dict[str, list[Letter]] = {}

    def add(name: str, wanted: Mapping[int, Demand]) -> None:
        for axis, demand in wanted.items():
            letter = demand.letter
            if letter is not None and letter.kind == "S" and mesh.sizes[axis] == size:
                found.setdefault(name, []).append(letter)

    for op in ops:
        first = op.results[0]
        for slot, name in enumerate(op.operands):
            add(name, demands.at("in", first, str(slot)))
            add(name, demands.at("used", names.get(name, name)))
        for number, name in enumerate(op.results):
            add(name, demands.at("out", first, str(number)))
    return found


def meeting(
    about: Subject,
    strategies: list[Strategy],
    demands: Demands,
    names: Mapping[str, str],
    mesh: Mesh,
    followed: dict[Demand, bool],
) -> list[Strategy]:
    """The strategies that meet what is demanded of an op and of the parameters it uses.

    `names` has the name in the program of what a region calls otherwise. A method that is demanded of a whole module
    is taken where an op has it, which is noted in `followed`. Raises ConstraintError where no strategy is left.
    """
    op, first = about.op, about.op.results[0]

    def keep(demand: Demand, axis: int, met: Iterable[bool]) -> list[Strategy]:
        kept = [strategy for strategy, good in zip(strategies, met, strict=True) if good]
        if not kept:
            raise ConstraintError(
                f"constraint {demand.pattern!r}, {demand.what} {demand.letter or demand.method} on axis "
                f"{mesh.names[axis]!r} cannot be met at {op.key}: no strategy has it "
                "together with the other constraints"
            )
        return kept

    for axis, demand in demands.at("method", first).items():
        strategies = keep(demand, axis, (strategy.methods[axis] == demand.method for strategy in strategies))
    for axis, demand in demands.at("method within", first).items():
        following = [strategy for strategy in strategies if strategy.methods[axis] == demand.method]
        strategies = following or strategies
        followed[demand] = followed.get(demand, False) or bool(following)
    for slot, name in enumerate(op.operands):
        wanted = {**demands.at("used", names.get(name, name)), **demands.at("in", first, str(slot))}
        for axis, demand in wanted.items():
            letter = meant(demand, about.flowing_operands[slot])
            strategies = keep(demand, axis, (strategy.operands[slot][axis] == letter for strategy in strategies))
    for number in range(len(op.results)):
        for axis, demand in demands.at("out", first, str(number)).items():
            letter = meant(demand, about.flowing_results[number])
            strategies = keep(demand, axis, (strategy.results[number][axis] == letter for strategy in strategies))
    return strategies


def refuse_unfollowed(followed: Mapping[Demand, bool], mesh: Mesh) -> None:
    """Raise ConstraintError where no op of a module could follow the method that is demanded of it."""
    for demand, met in followed.items():
        if not met:
            raise ConstraintError(
                f"constraint {demand.pattern!r}, method {demand.method} on axis {mesh.names[demand.axis]!r} cannot be "
                "met: no op of the module has that method"
            )
