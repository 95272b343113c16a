"""Replacements for the engine of data axes: step by step for ranks that it does not run on, or by the generated
code."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from unittest import mock

from torch import Tensor, nn

from autopar.runtime import Axis
from autopar.runtime.fsdp.units import PartView
from autopar.runtime.state import product_of
from passes.ir.layout import Layout
from passes.ir.lowered import FSDPUnit, FSDPUnits, Stage
from passes.ir.mesh import Mesh
from passes.ir.redistribution import redistribution


@contextlib.contextmanager
def without_engine() -> Iterator[None]:
    """Plans leave all that parameters need to collectives of the generated code."""

    def engines(lowered: Stage, *_: object) -> Stage:
        return lowered

    with mock.patch("passes.lower.fsdp_units", engines):
        yield


@dataclass(frozen=True)
class StepByStep:
    """A group whose parameters are brought to the layout that the engine gives by a collective for each step."""

    group: FSDPUnit
    root: nn.Module
    stored: Mapping[str, Layout]
    shapes: Mapping[str, tuple[int, ...]]
    mesh: Mesh
    axes: Sequence[Axis]
    collectives: Mapping[str, Callable[..., Tensor]]

    def current(self, number: int) -> Tensor:
        """A parameter as the engine would give it."""
        assert self.group.dtypes == (None, None)
        name = tuple(self.group.parameters)[number]
        tensor: Tensor = self.root.get_parameter(name)
        layout = self.stored[name]
        kept, shape = self.group.copy_layout(name, layout), self.shapes[name]
        used = self.group.gathered_layout(kept)
        for step in (*redistribution(layout, kept, shape, self.mesh), *redistribution(kept, used, shape, self.mesh)):
            change = self.collectives[step.collective]
            axis = product_of([self.axes[member] for member in self.mesh.spans[step.span]])
            tensor = change(tensor, axis, src=step.source, dst=step.target)
        return tensor


def step_by_step(
    model: nn.Module,
    root: nn.Module,
    held: FSDPUnits,
    stored: Mapping[str, Layout],
    mesh: Mesh,
    axes: Sequence[Axis],
    collectives: Mapping[str, Callable[..., Tensor]],
) -> PartView:
    """`root`, which holds the parts of `model`, as a program with `held` sees it."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    table = {
        name: (StepByStep(group, root, stored, shapes, mesh, axes, collectives), number)
        for group in held.units
        for number, name in enumerate(group.parameters)
        if name in held.gathered
    }
    return PartView(root, table)
