"""Plans whose parameters are stored in a way that a test asks for, and what becomes of them."""

import contextlib
from dataclasses import replace
from unittest import mock

from passes import lower, search
from passes.ir.choices import Problem, Solution
from passes.ir.lowered import Stage
from tests.autopar.solving import solved_by
from tests.passes.planning import same_tensor


def storage(**stored: str) -> dict[str, dict[str, dict[str, str]]]:
    """All parameters are stored like this on these axes, and used whole there."""
    return {"*": {"stored": stored, "used": dict.fromkeys(stored, "R")}}


class Spy:
    """Remembers what went to the engine; with `again` parameters are gathered again wherever that can be. In
    micro-batches they are gathered and their gradients reduced as ZeRO of this `stage` does."""

    def __init__(self, again: bool = False, stage: int = 3) -> None:
        self.again = again
        self.stage = stage
        self.seen: list[Stage] = []
        self._engines, self._solve = lower.fsdp_units, search.solve

    def engines(self, *given: object) -> Stage:
        """The pass."""
        self.seen.append(self._engines(*given))  # type: ignore[arg-type]
        return self.seen[-1]

    def solve(self, problem: Problem, *given: object) -> Solution:
        """The pass, with its choice of what is gathered again overruled."""
        solution = self._solve(problem, *given)  # type: ignore[arg-type]
        if not self.again:
            return solution
        again = set()
        for edge in problem.edges:
            before = solution.strategy(problem, edge.producer).results[edge.result]
            after = solution.strategy(problem, edge.consumer).operands[edge.operand]
            if edge.saved and problem.groups[edge.group].parameter and not same_tensor(before, after):
                again.add((edge.group, after))
        return replace(solution, regathered=frozenset(again))

    def __enter__(self) -> "Spy":
        self._patches = contextlib.ExitStack()
        self._patches.enter_context(mock.patch("passes.lower.fsdp_units", self.engines))
        self._patches.enter_context(solved_by(self.solve, gather_once=self.stage < 3, reduce_once=self.stage < 2))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()
