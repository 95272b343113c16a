"""A lower bound on the step of a pipeline, whatever its stages: the program is divided as if it could be cut anywhere.

The step is the longest path through the actions, and a mean of paths bounds it. A program of so many seconds forward
and backward puts them where the mean passes stages least often. The best mean comes from a linear program over the
paths that are longest where the other side puts its seconds (cutting planes).
"""

from dataclasses import dataclass

import numpy as np
from ortools.math_opt.python import mathopt

from passes.ir.arrays import Floats
from passes.ir.configuration import SPLITTING
from passes.search.pipelines.cuts.pieces import Path, Pipeline
from passes.solve.integer_program import MixedIntegerModel

# Pipelines with more actions get the bound of their formula, which is near where micro-batches are many.
_ACTIONS = 6000
# Rounds of raising the bound, where it is for leaving out what is slow.
ROUNDS = 50
# The bound is not raised further within this part of the step of the other side's stages.
_NEAR = 2e-3


@dataclass(frozen=True)
class LeastStep:
    """A step takes at least `forward` times the seconds of the forward pass of one micro-batch through all stages, and
    `backward` times those of its backward pass."""

    forward: float
    backward: float

    def of(self, forward_s: float, backward_s: float, either_s: float = 0.0) -> float:
        """The bound (seconds) for a program of so many seconds, and of so many more in either pass."""
        least = min(self.forward, self.backward)
        return self.forward * forward_s + self.backward * backward_s + least * either_s


def least_step(
    schedule: str,
    ranks: int,
    stages: int,
    micro_batches: int,
    forward_part: float,
    enough: float = float("inf"),
    rounds: int = ROUNDS,
) -> LeastStep:
    """A lower bound on the step of all stages of a program, best for one whose forward pass is `forward_part` of it:
    that after so many rounds, or the first that is `enough` seconds for a program of one second.

    Raises PipelineError where the schedule does not suit the sizes.
    """
    by_formula = simple_least_step(schedule, ranks, stages, micro_batches)
    if 2 * stages * micro_batches > _ACTIONS:
        return by_formula
    pipeline, value = Pipeline(schedule, ranks, stages, micro_batches), np.array([forward_part, 1 - forward_part])
    split = np.array([[forward_part], [1 - forward_part], [0.0]]) / stages
    seconds, paths, best = np.repeat(split, stages, axis=1), list[Path](), by_formula
    shortest, found_s = seconds, float("inf")
    for _ in range(rounds):
        step_s, path = pipeline.longest(seconds, np.zeros((2, stages)))
        if step_s < found_s:
            shortest, found_s = seconds, step_s
        if found_s <= best.of(*value) * (1 + _NEAR) or best.of(*value) >= enough:
            break
        paths.append(path)
        found = _best_mean(np.array(paths), value)
        if found is None:
            break
        best = max(best, found[0], key=lambda each: each.of(*value))
        # Halfway to the shortest stages so far: the steps of the linear program alone are too large.
        seconds = (found[1] + shortest) / 2
    return best


def simple_least_step(schedule: str, ranks: int, stages: int, micro_batches: int) -> LeastStep:
    """A lower bound without a simulation.

    The busiest rank has 1/p of all work. With one stage a rank, whose backward pass is whole, rank r waits for the
    stages before it to bring the first micro-batch and to take back the last one: the step is at least the sum of w_i
    over i < r, and m w_r, where w_i are the seconds of a micro-batch in stage i. Seconds that make all of these equal
    fall by 1 - 1/m from stage to stage, and their sum is (1 - (1 - 1/m)^p) times the step.
    """
    least = micro_batches / ranks
    if stages == ranks and schedule not in SPLITTING:
        least = 1 / (1 - (1 - 1 / micro_batches) ** ranks)
    return LeastStep(max(least, 1.0), max(least, 1.0))


def _best_mean(paths: Floats, value: Floats) -> tuple[LeastStep, Floats] | None:
    """The mean of paths [paths, 5, stages] with the highest bound, and where the other side puts its seconds against
    it, [3, stages]. None where no solution came."""
    count, _, stages = paths.shape
    model = MixedIntegerModel()
    weights, least = model.add_columns(np.zeros(count)), model.add_columns(-value)
    model.add_rows(1, np.zeros(count, dtype=np.int64), weights, np.ones(count), 1.0, 1.0)
    # The mean passes each stage, forward, and backward in both parts, as often as the bound counts, or more often.
    passes = paths[:, :3].reshape(count, -1)
    rows = 3 * stages
    counted = np.repeat(np.array([least[0], least[1], least[1]]), stages)
    places = np.concatenate([np.repeat(np.arange(rows), count), np.arange(rows)])
    columns = np.concatenate([np.tile(weights, rows), counted])
    scale = float(passes.max())
    model.add_rows(rows, places, columns, np.concatenate([passes.T.ravel() / scale, -np.ones(rows)]), 0.0, float("inf"))
    result = mathopt.solve(model.built(), mathopt.SolverType.GLOP)
    if result.termination.reason != mathopt.TerminationReason.OPTIMAL:
        return None
    parts = {variable.id: each for variable, each in result.variable_values().items()}
    mean = np.maximum([parts[each] for each in weights.tolist()], 0.0)
    mean = (mean / mean.sum()) @ passes
    forward, back = mean[:stages].min(), mean[stages:].min()
    duals = {row.id: each for row, each in result.dual_values().items()}
    seconds = np.maximum([duals[1 + row] for row in range(rows)], 0.0).reshape(3, stages)
    return LeastStep(float(forward), float(back)), np.asarray(seconds, dtype=np.float64)
