"""One trace for all plans of a model: tests that plan one in many ways ask what becomes of its program."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import nn

from autopar.models.fingerprint import structure_fingerprint
from passes.capture import Tracing, capture
from passes.ir.leaves import Inputs, input_leaves
from passes.ir.program import Program


@contextmanager
def traced_once() -> Iterator[None]:
    """Within, models of one structure are traced once for inputs of the same types and one mode. Classes of one name
    are taken to be one."""
    traces: dict[object, Program] = {}

    def traced(module: nn.Module, inputs: Inputs, tracing: Tracing) -> Program:
        leaves = [
            (name, leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else (name, repr(leaf))
            for name, leaf in input_leaves(inputs)
        ]
        settings = tracing.training, tracing.gradients, tracing.dtype, tracing.device
        key = (structure_fingerprint(module), *settings, *leaves)
        if key not in traces:
            traces[key] = capture(module, inputs, tracing)
        return traces[key]

    with mock.patch("autopar.models.info.capture", traced):
        yield
