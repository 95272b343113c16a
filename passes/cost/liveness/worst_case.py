"""Worst-case profiles of statements that cannot be probed because they read values."""

from collections.abc import Sequence

from passes.cost.liveness.graph import (
    BackwardProfile,
    Event,
    EventKind,
    Form,
    ForwardProfile,
    OperandGradient,
    ResultStorage,
    StorageOrigin,
    StorageRef,
    Task,
)


def assumed_forward(task: Task, results: Sequence[Form]) -> ForwardProfile:
    """Every result is a new tensor, and autograd saves all operands and results."""
    events = tuple(Event(EventKind.ALLOCATE, index, form.bytes) for index, form in enumerate(results))
    trained = any(task.flows)
    made = tuple(
        ResultStorage(StorageRef(StorageOrigin.OWN, index), form, trained and form.dtype.is_floating_point)
        for index, form in enumerate(results)
    )
    operands = tuple(StorageRef(StorageOrigin.OPERAND, index) for index in range(len(task.operands)))
    return ForwardProfile(events, made, (*operands, *(result.place for result in made)) if trained else ())


def assumed_backward(task: Task, gradients: Sequence[Form | None], forward: ForwardProfile) -> BackwardProfile:
    """All saved tensors are read, and every operand gets a new gradient, before anything is freed."""
    count = len(gradients)
    saved = range(len(forward.saved))
    given = {
        slot: OperandGradient(StorageRef(StorageOrigin.OWN, count + slot), Form.contiguous(form.shape, form.dtype))
        for slot, (form, flows) in enumerate(zip(task.operands, task.flows, strict=True))
        if flows
    }
    events = [Event(EventKind.USE, index) for index in saved]
    events += [Event(EventKind.ALLOCATE, item.place.index, item.form.bytes) for item in given.values()]
    events += [Event(EventKind.TAKEN, slot) for slot, form in enumerate(gradients) if form is not None]
    events += [Event(EventKind.RELEASE, index) for index in saved]
    events += [Event(EventKind.GIVE, slot) for slot in given]
    return BackwardProfile(tuple(events), given)
