"""Profiles of statements that cannot be looked into, because they ask for values: what they can do at most."""

from collections.abc import Sequence

from passes.cost.liveness.profile import (
    BackwardProfile,
    Event,
    Form,
    ForwardProfile,
    Given,
    Happening,
    Made,
    Origin,
    Place,
    Task,
)


def assumed_forward(task: Task, results: Sequence[Form]) -> ForwardProfile:
    """Every result is new, and autograd keeps all operands and results."""
    events = tuple(Event(Happening.ALLOCATE, index, form.bytes) for index, form in enumerate(results))
    trained = any(task.flows)
    made = tuple(
        Made(Place(Origin.OWN, index), form, trained and form.dtype.is_floating_point)
        for index, form in enumerate(results)
    )
    operands = tuple(Place(Origin.OPERAND, index) for index in range(len(task.operands)))
    return ForwardProfile(events, made, (*operands, *(result.place for result in made)) if trained else ())


def assumed_backward(task: Task, gradients: Sequence[Form | None], forward: ForwardProfile) -> BackwardProfile:
    """Everything that is kept is read, and every operand gets a new gradient, before anything goes."""
    count = len(gradients)
    kept = range(len(forward.kept))
    given = {
        slot: Given(Place(Origin.OWN, count + slot), Form.contiguous(form.shape, form.dtype))
        for slot, (form, flows) in enumerate(zip(task.operands, task.flows, strict=True))
        if flows
    }
    events = [Event(Happening.USE, index) for index in kept]
    events += [Event(Happening.ALLOCATE, item.place.index, item.form.bytes) for item in given.values()]
    events += [Event(Happening.TAKEN, slot) for slot, form in enumerate(gradients) if form is not None]
    events += [Event(Happening.RELEASE, index) for index in kept]
    events += [Event(Happening.GIVE, slot) for slot in given]
    return BackwardProfile(tuple(events), given)
