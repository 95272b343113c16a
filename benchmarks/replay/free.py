"""The planner's own plan for a run's model and devices: mesh, layouts, micro-batches, ZeRO stage and recompute, and the
stages of a pipeline where the run has one, are chosen freely, by the same product that predicts the published plan."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar import Pipeline
from benchmarks.replay.predict import Replayed
from benchmarks.replay.product import Inputs, planned
from passes.ir.errors import InfeasibleError
from passes.ir.plan import ProgramPlan

# Plans that are faster by more than this are explained.
NOTABLE = 0.10
_GIB = 1024**3


@dataclass(frozen=True)
class Planned:
    """The fastest plan for a run's model and devices: `published` and `seconds` of a step, bytes, and what is changed;
    nothing where no other plan is faster."""

    id: str
    published: float
    seconds: float
    memory: float
    changes: tuple[str, ...]

    @property
    def gain(self) -> float:
        """The time saved relative to the predicted time of the published plan."""
        return 1 - self.seconds / self.published

    def sentence(self) -> str:
        """Why it is faster, in words."""
        needs = f"{self.memory / _GIB:.0f} GiB are predicted for it"
        return f"{100 * self.gain:.0f}% faster with {' and '.join(self.changes)}; {needs}."


def plan_freely(item: Replayed) -> Planned:
    """The fastest plan for the devices of `item`, which the product has predicted; its own plan ran, so it fits.

    Raises a subclass of AutoparError where nothing can be planned.
    """
    inputs, own = item.inputs, item.plan
    assert inputs is not None
    assert own is not None
    published = Planned(item.run.id, own.step_s, own.step_s, sum(own.memory.values()), ())
    limit = inputs.cluster.usable_memory
    pipeline = None if inputs.pipeline is None else Pipeline()
    free = replace(
        inputs,
        micro_batches=None,
        zero=None,
        recompute=None,
        constraints={},
        memory_limit=limit,
        pipeline=pipeline,
    )
    try:
        plan = planned(free, any_shape=True).plan
    except InfeasibleError:
        return published
    if plan.step_s >= own.step_s:
        return published
    changes = tuple(_changes(inputs, own, plan)) or ("layouts of its own",)
    return Planned(item.run.id, own.step_s, plan.step_s, sum(plan.memory.values()), changes)


def _changes(inputs: Inputs, own: ProgramPlan, plan: ProgramPlan) -> Iterator[str]:
    recompute = next(iter(plan.stages[0].recompute.values()), "none")
    if recompute != inputs.recompute:
        yield f"recompute {recompute!r} instead of {inputs.recompute!r}"
    if plan.micro_batches != own.micro_batches:
        yield f"{plan.micro_batches} micro-batches instead of {own.micro_batches}"
    if (plan.gather_once, plan.reduce_once) != (own.gather_once, own.reduce_once):
        yield "parameters gathered and gradients reduced at other times"
