"""The state of the whole model and the norm of its gradients, also where stages of a pipeline hold parts of it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from autopar.runtime.fsdp.gradients import part_of
from autopar.runtime.pipeline.ranks import PipelineRanks
from autopar.runtime.ranks.agreement import Agreement, HeldComparison
from autopar.runtime.ranks.failures import naming_collectives
from passes.ir.errors import InputError

_CLIPPING = "clip_grad_norm_()"


@dataclass(frozen=True)
class _Described:
    """A tensor of a state dict: its global shape, its dtype, and the first name that it has on its rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    first: str


def whole_state(
    state: Mapping[str, Tensor], mesh: DeviceMesh, agreement: Agreement, pipeline: PipelineRanks | None
) -> dict[str, Tensor]:
    """The tensors of a model by name, whole and on the CPU, on the first rank of `mesh`; nothing on the others.

    `state` are those of this rank, under all their names. Tensors that are tied on a rank are one tensor. Collective
    over the mesh.
    """
    firsts: dict[int, str] = {}
    mine = {
        name: _Described(tuple(item.shape), item.dtype, firsts.setdefault(id(item), name))
        for name, item in state.items()
    }
    phase = "collecting the parameters of the model"
    every = agreement.gathered(mine, phase)
    # The ranks of a stage hold the same names; the axis of the pipeline is the first.
    places = [every[0]] if pipeline is None else every[:: len(every) // pipeline.mesh.size(0)]
    holders = {name: place for place, names in reversed([*enumerate(places)]) for name in names}
    own_place = 0 if pipeline is None else pipeline.rank
    coordinate = mesh.get_coordinate() or (0,)
    leads = not any(coordinate if pipeline is None else coordinate[1:])
    found: dict[str, Tensor] = {}
    for name, place in sorted(holders.items(), key=lambda item: item[1]):
        described = places[place][name]
        if described.first != name and holders[described.first] == place:
            if described.first in found:
                found[name] = found[described.first]
            continue
        whole: Tensor | None = None
        if place == own_place:
            item = state[name].detach()
            whole = item.full_tensor() if isinstance(item, DTensor) else item
        if pipeline is not None and place and leads:
            whole = _handed_on(whole, described, place, pipeline, phase)
        if whole is not None and leads and own_place == 0:
            found[name] = whole.cpu().clone()
    return found


def _handed_on(
    whole: Tensor | None, described: _Described, place: int, ranks: PipelineRanks, phase: str
) -> Tensor | None:
    """A tensor of the rank at `place` of the pipeline's axis, on the first rank of the axis."""
    with naming_collectives(phase):
        if whole is not None:
            dist.send(whole.contiguous(), group=ranks.group, group_dst=0)
        elif ranks.rank == 0:
            device = torch.device(ranks.mesh.device_type)
            whole = torch.empty(described.shape, dtype=described.dtype, device=device)
            dist.recv(whole, group=ranks.group, group_src=place)
    return whole


class GradientClipping:
    """Clips the gradients of a model by their norm, over all its pipeline stages."""

    def __init__(self, agreement: Agreement, pipeline: PipelineRanks | None) -> None:
        self._agreement = agreement
        self._held = HeldComparison(agreement)
        self._pipeline = pipeline

    def clip(
        self, parameters: Mapping[str, nn.Parameter], elsewhere: frozenset[str], limits: Sequence[float], strict: bool
    ) -> Tensor:
        """Scale the gradients of `parameters` so that their norm is at most `limits[0]`; returns what it was, in the
        norm of order `limits[1]`.

        `parameters` are those of this rank by name, and `elsewhere` are among them those that another stage counts.
        Raises InputError for limits that are no such numbers, and where ranks differ in them or in which parameters
        have gradients; with `strict` RuntimeError for a norm that is not finite.
        """
        with self._agreement.telling(_CLIPPING, _CLIPPING):
            largest, order = _checked(limits)
        gradients = {name: item.grad for name, item in parameters.items() if item.grad is not None}
        mine: dict[str, object] = {name: name in gradients for name in parameters}
        given = {"max_norm": largest, "norm_type": order, "error_if_nonfinite": strict}
        numbers, difference = self._agreement.compared(_CLIPPING, _CLIPPING, given, self._held.number(mine))
        if difference is not None:
            raise InputError(f"ranks call clip_grad_norm_() differently: {difference}")
        difference = self._held.difference(numbers, mine)
        if difference is not None:
            ranks = (difference.rank, difference.other)
            with_gradient, without = ranks if difference.theirs[difference.name] else ranks[::-1]
            raise InputError(
                f"the parameter {difference.name!r} has a gradient on rank {with_gradient} of the mesh, but not on "
                f"rank {without}: run the same backward passes on all ranks"
            )
        with torch.no_grad():
            norm = self._norm([item for name, item in gradients.items() if name not in elsewhere], order)
            if strict and not math.isfinite(norm.item()):
                raise RuntimeError(
                    f"the norm of order {order:g} of the gradients is {norm.item()}: they are not clipped"
                )
            factor = torch.clamp(largest / (norm + 1e-6), max=1.0)
            for gradient in gradients.values():
                part_of(gradient).mul_(factor)
        return norm

    def _norm(self, gradients: Sequence[Tensor], order: float) -> Tensor:
        """The norm of the gradients of all stages, on every rank."""
        norm = get_total_norm(gradients, order)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if self._pipeline is None:
            return norm
        device = torch.device(self._pipeline.mesh.device_type)
        own = norm.detach().to(device, torch.float64).reshape(1)
        of_places = [torch.empty_like(own) for _ in range(dist.get_world_size(self._pipeline.group))]
        with naming_collectives("adding up the norms of gradients"):
            dist.all_gather(of_places, own, group=self._pipeline.group)
        whole: Tensor = torch.linalg.vector_norm(torch.cat(of_places), order)
        return whole.to(norm.dtype)


def _checked(limits: Sequence[float]) -> tuple[float, float]:
    """The largest norm and the order of the norm, as numbers. Raises InputError for what are none."""
    found = []
    for name, value, least in (("max_norm", limits[0], 0.0), ("norm_type", limits[1], 1.0)):
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not number >= least:
            raise InputError(f"{name} is {value!r}: it must be a number of at least {least:g}")
        found.append(number)
    return found[0], found[1]
