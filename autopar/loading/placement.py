"""Placement of a model's parameters and buffers on one rank."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.request import Request
from autopar.runtime import Container
from autopar.runtime.fsdp.manager import FSDPManager
from autopar.runtime.generated.bases import place
from autopar.runtime.state import from_local, local_part
from passes.ir.layout import I, Layout
from passes.ir.lowered import FSDPUnit


def placed_parts(
    model: nn.Module,
    stored: Mapping[str, Layout],
    groups: Sequence[FSDPUnit],
    request: Request,
    mesh: DeviceMesh,
    device: torch.device,
    manager: FSDPManager,
) -> Container:
    """Parameters as this rank's parts, and buffers, under the model's names; ties stay ties.

    Parameters have the layouts `stored`; `manager` takes those in `groups`.
    """
    root = Container()
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    placed: dict[int, nn.Parameter | torch.Tensor] = {}

    def part(parameter: nn.Parameter, layout: Layout) -> torch.Tensor:
        """This rank's part in `layout`: a copy, because training must not change the model."""
        whole = parameter.detach()
        dtype = request.precision.master if whole.is_floating_point() else None
        found = local_part(whole, layout, coordinate, request.mesh)
        return found.to(device, dtype or whole.dtype, copy=True).contiguous()

    for group in groups:
        members = {name: model.get_parameter(name) for name in group.parameters}
        parts = {
            name: nn.Parameter(
                part(parameter, group.gathered_layout(group.copy_layout(name, stored[name]))), parameter.requires_grad
            )
            for name, parameter in members.items()
        }
        shown = manager.add(group, parts, stored)
        placed.update((id(parameter), shown[name]) for name, parameter in members.items())
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in placed:
            layout = stored.get(name, (I,) * len(request.mesh.sizes))
            distributed = from_local(part(parameter, layout), layout, parameter.shape, mesh, request.mesh)
            placed[id(parameter)] = nn.Parameter(distributed, parameter.requires_grad)
        place(root, name, placed[id(parameter)])
    persistent = set(model.state_dict(keep_vars=True))
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if id(buffer) not in placed:
            placed[id(buffer)] = buffer.detach().clone().to(device)
        place(root, name, placed[id(buffer)], name in persistent)
    return root
