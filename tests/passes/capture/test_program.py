"""Programs from exported graphs."""

import pytest
import torch
from torch import nn

from passes.capture.program import GraphWriter, Symbols
from passes.ir.errors import CaptureError


def _called(value: object) -> torch.fx.Node:
    """The size of a placeholder, of which the trace says that it is `value`."""
    graph = torch.fx.Graph()
    node = graph.call_function(torch.ops.aten.sym_size.int, (graph.placeholder("x"), 0))
    node.meta["val"] = value
    return node


def test_known_numbers_need_no_op() -> None:
    """Torch 2.11 leaves a call for a size in the trace of a mixture of experts."""
    writer = GraphWriter(nn.Module(), Symbols())
    node = _called(4)
    assert writer.call(node, {node.args[0]: None}) == 4
    assert not writer.ops


def test_results_that_are_no_tensors_are_refused() -> None:
    """By the name of the op."""
    writer = GraphWriter(nn.Module(), Symbols())
    node = _called("four")
    with pytest.raises(
        CaptureError, match=r"cannot trace Module.*aten.sym_size.int returns 'four', which is no tensor"
    ):
        writer.call(node, {node.args[0]: None})
