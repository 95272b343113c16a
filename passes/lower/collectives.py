"""collectives: the collectives that steps over several axes run as: one, or one after the other, as is fastest.

FSDP units run their steps as they are.
"""

from dataclasses import replace

from passes.cost.step_costs import StepCosts
from passes.ir.lowered import Compute, Redistribution, Stage, Statement


def fastest_collectives(stage: Stage, costs: StepCosts) -> Stage:
    """`stage` with the steps of the generated code in the parts that are cheapest by `costs`."""
    statements = tuple(_of_statement(item, costs) for item in stage.body.statements)
    return replace(stage, body=replace(stage.body, statements=statements))


def _of_statement(item: Statement, costs: StepCosts) -> Statement:
    if isinstance(item, Compute):
        return item
    if isinstance(item, Redistribution):
        return _of_change(item, costs)
    inner = tuple(_of_statement(each, costs) for each in item.body.statements)
    between = tuple(change and _of_change(change, costs) for change in item.between)
    return replace(item, body=replace(item.body, statements=inner), between=between)


def _of_change(change: Redistribution, costs: StepCosts) -> Redistribution:
    by_unit, own = change.steps[: change.unit_steps], change.steps[change.unit_steps :]
    gradient_size = change.gradient_itemsize if change.gradient else None
    return replace(
        change, steps=(*by_unit, *costs.cheapest_steps(own, change.type.dtype.itemsize, gradient_size, change.sharing))
    )
