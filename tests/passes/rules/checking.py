"""The checks of every rule, on any calls."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import torch

from passes.ir.choices import Strategy
from passes.ir.mesh import Mesh
from passes.rules.strategies import split, starts
from tests.passes.helpers import mesh_of
from tests.passes.rules.database import spread_over
from tests.passes.rules.one_op import Case, OneOp, check, communicates, make_case, run_here, run_on_ranks

MESHES = (mesh_of(a=2), mesh_of(a=3), mesh_of(a=2, b=2), mesh_of(a=2, b=3))


@dataclass
class Checking:
    """Checks strategies of ops; what communicates waits until `finish`, and runs on gloo ranks together.

    Of each op up to `most` strategies are taken on meshes with two axes, spread over what they do on which axis.
    """

    most: int | None = None
    waiting: list[tuple[OneOp, Mesh, Case]] = field(default_factory=list)
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def check(self, one: OneOp, mesh: Mesh) -> None:
        """Check an op on a mesh: AssertionError where a strategy does not compute what the op does."""
        strategies = one.strategies(mesh)
        if len(mesh.sizes) > 1:
            strategies = spread_over(strategies, _features, self.most)
        for strategy in strategies:
            case = make_case(one, strategy, mesh, self.generator)
            if communicates(case):
                self.waiting.append((one, mesh, case))
                continue
            run_here(case, mesh)
            check(one, case, mesh)

    def finish(self) -> list[str]:
        """Run what communicates, and check it: what is wrong, one line for each op."""
        waiting, self.waiting = self.waiting, []
        found: dict[int, str] = {}
        try:
            if waiting:
                run_on_ranks([(mesh, case) for _, mesh, case in waiting])
        except RuntimeError as error:
            return [str(error)]
        for one, mesh, case in waiting:
            try:
                check(one, case, mesh)
            except AssertionError as error:
                found.setdefault(id(one), str(error))
        return list(found.values())


def _features(strategy: Strategy) -> Iterator[Hashable]:
    yield from enumerate(strategy.methods)
    yield sum(_splits(method) for method in strategy.methods)


def _splits(method: str) -> bool:
    return method not in ("R", "I") and not method.startswith("P(")


def splits(one: OneOp, mesh: Mesh) -> set[str]:
    """The methods of an op that split something on the first axis of a mesh."""
    first = Mesh(mesh.names[:1], mesh.sizes[:1])
    return {strategy.methods[0] for strategy in one.strategies(first) if _splits(strategy.methods[0])}


def assert_all_is_tried(one: OneOp, mesh: Mesh) -> None:
    """Each part of a factor that the first axis divides is split in some strategy, and sums pass as it says."""
    rule = one.rule
    if rule is None:
        return
    first = Mesh(mesh.names[:1], mesh.sizes[:1])
    methods = {strategy.methods[0] for strategy in one.strategies(first)}
    for factor, start in starts(rule):
        if split(rule, factor, start, first.size) is not None:
            assert (factor if start == 1 else f"{factor}@{start}") in methods, f"{factor} is split in no strategy"
    passing = {method for method in methods if method.startswith("P(")}
    assert len(passing) == len(set(rule.linear)), f"pending sums pass as {sorted(passing)} only"
