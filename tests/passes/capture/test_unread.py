"""`torch.export` without what nobody reads: the trace is the same, and nothing of it stays."""

import threading

import torch
from torch import nn

from passes.capture.source import lines_of_node
from passes.capture.unread import nothing_unread


class Halves(nn.Module):
    """Computes a part without gradients, for which `torch.export` cuts graphs and joins them again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, 4]."""
        with torch.no_grad():
            scale = x.abs().amax()
        return self.linear(x) / scale


def _exported() -> torch.export.ExportedProgram:
    return torch.export.export(Halves(), (torch.ones(2, 4),))


def test_a_trace_is_what_it_is_otherwise() -> None:
    """Its operators, and the lines of the model that they come from."""
    with nothing_unread():
        ours = _exported()
    theirs = _exported()
    ours.graph.lint()
    assert str(ours.graph) == str(theirs.graph)
    for one, other in zip(ours.graph.nodes, theirs.graph.nodes, strict=True):
        assert lines_of_node(one) == lines_of_node(other)
    lines = [line.text for node in ours.graph.nodes for line in lines_of_node(node)]
    assert "return self.linear(x) / scale" in lines


def test_a_graph_that_was_made_within_is_compiled_when_it_is_called() -> None:
    """Also afterwards, and with what was changed since."""
    with nothing_unread():
        module = torch.fx.symbolic_trace(nn.Sequential(nn.ReLU()))
        (call,) = module.graph.find_nodes(op="call_module", target="0")
        with module.graph.inserting_after(call):
            negative = module.graph.call_function(torch.neg, (call,))
        call.replace_all_uses_with(negative, delete_user_cb=lambda user: user is not negative)
        module.recompile()
        assert not hasattr(module, "_code")
    assert module(torch.tensor([-1.0, 2.0])).tolist() == [0.0, -2.0]
    assert "neg" in module.code


def test_other_threads_have_what_torch_has() -> None:
    def code() -> None:
        found.append(torch.fx.symbolic_trace(nn.Sequential(nn.ReLU())).code)

    found: list[str] = []
    with nothing_unread():
        thread = threading.Thread(target=code)
        thread.start()
        thread.join()
    assert "def forward" in found[0]
