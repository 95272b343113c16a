"""When statements take memory and let go of it, as running them on tensors without values shows."""

import torch

from autopar.plans.probing import FakeProber
from passes.cost.liveness.graph import Form, Task
from passes.ir.mesh import Mesh


def test_what_was_read_is_let_go_before_gradients_are_summed() -> None:
    """Of a bias that was broadcast, autograd sums the gradient when the op's backward pass is over: what that read is
    held by the graph alone then, which holds nothing that was made again."""
    bias, rows = (Form.contiguous(shape, torch.float32) for shape in ((32,), (16, 32)))
    task = Task("torch.addmm(x0, x1, x2)", (bias, rows, Form.contiguous((32, 32), torch.float32)), (True,) * 3)
    prober = FakeProber(Mesh.of({"a": 2}))
    saved = range(len(prober.forward(task).saved))
    events = prober.backward(task, (rows,)).events
    order = [(event.what, event.index) for event in events]
    summed = next(place for place, event in enumerate(events) if (event.what, event.bytes) == ("allocate", bias.bytes))
    for index in saved:
        read, done, release = (order.index((what, index)) for what in ("use", "done", "release"))
        assert read < done < summed < release
