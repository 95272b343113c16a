"""The declared workspace of ops equals the workspace measured on tensors without values."""

import pytest
import torch

from autopar.plans.probing import FakeProber
from passes.cost.liveness.profile import Event, EventKind, Form, StorageOrigin, Task
from passes.cost.workspace import BY_BODY, BY_KIND, REPEATED, Workspace
from passes.ir.mesh import Mesh

ROWS, WIDTH = 64, 512
WIDE = Form.contiguous((ROWS, WIDTH), torch.float32)
ROW = Form.contiguous((ROWS, 1), torch.float32)
LABELS = Form.contiguous((ROWS,), torch.int64)
CASES = {
    "pow": ("x0.pow(2)", (WIDE,)),
    "rsqrt": ("x0.rsqrt()", (WIDE,)),
    "cross_entropy_loss": ("F.cross_entropy(x0, x1, reduction='sum')", (WIDE, LABELS)),
    "vocabulary_cross_entropy": (
        f"vocabulary_cross_entropy(x0, x1, size={2 * WIDTH}, digits=((axis_0, 1),))",
        (WIDE, LABELS),
    ),
    "mul": ("x0 * x1", (WIDE, ROW)),
    "div": ("x0 / x1", (WIDE, ROW)),
}


def _most(events: tuple[Event, ...], kept: dict[int, int]) -> int:
    """The most bytes that lie there of what a statement allocates, and what is `kept`."""
    there = dict(kept)
    most = 0
    for event in events:
        if event.what is EventKind.ALLOCATE:
            there[event.index] = event.bytes
        elif event.what is EventKind.FREE:
            there.pop(event.index, None)
        most = max(most, sum(there.values()))
    return most


@pytest.mark.parametrize("name", CASES)
def test_workspace(name: str) -> None:
    """In tensors of the first operand's size, what is kept of the op's own and what the backward pass has besides."""
    text, operands = CASES[name]
    task = Task(text, operands, tuple(form.dtype.is_floating_point for form in operands), 1)
    prober = FakeProber(Mesh.of({"a": 2}))
    forward = prober.forward(task)
    sizes = {event.index: event.bytes for event in forward.events if event.what is EventKind.ALLOCATE}
    kept = {place.index: sizes[place.index] for place in forward.kept if place and place.origin is StorageOrigin.OWN}
    backward = prober.backward(task, (forward.results[0].form,))
    given = sum(item.form.bytes for item in backward.given.values())
    more = _most(backward.events, kept) - sum(kept.values()) - given
    found = {**BY_KIND, **BY_BODY}.get(name, Workspace(backward=REPEATED.get(name, 0.0)))
    assert more == pytest.approx(found.backward * WIDE.bytes, rel=0.02)
    # Of losses one tensor is in their rule; of a root it is the result.
    said = {"cross_entropy_loss": 1, "vocabulary_cross_entropy": 1, "rsqrt": 1}.get(name, 0)
    assert sum(kept.values()) == pytest.approx((found.kept + said) * WIDE.bytes, rel=0.02)
