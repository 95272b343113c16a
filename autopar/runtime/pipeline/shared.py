"""Parameters that stages on different ranks read, such as tied embeddings: each rank holds a copy, all with the sum of
their gradients."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.runtime.pipeline.ranks import PipelineRanks
from autopar.runtime.ranks.failures import naming_collectives
from autopar.runtime.ranks.groups import ranks_group


@dataclass(frozen=True)
class Shared:
    """A parameter that ranks of the pipeline's axis share, by its name on `root`; `group` are these ranks."""

    name: str
    group: dist.ProcessGroup


class SharedParameters:
    """The parameters of a module that other ranks of the pipeline hold, too."""

    def __init__(self, root: nn.Module, shared: Sequence[Shared]) -> None:
        self._root = root
        self._shared = tuple(shared)

    @property
    def counted_elsewhere(self) -> frozenset[str]:
        """The names of the parameters here of which another rank holds the first copy."""
        return frozenset(item.name for item in self._shared if dist.get_rank(item.group))

    @contextlib.contextmanager
    def summed(self) -> Iterator[None]:
        """A context of a training step: what it adds to the gradients of shared parameters is summed over their
        ranks at its end. Parameters that are frozen keep what they have."""
        named = [(item, self._root.get_parameter(item.name)) for item in self._shared]
        shared = [(item, parameter) for item, parameter in named if parameter.requires_grad]
        parameters = [parameter for _, parameter in shared]
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
        except BaseException:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
            raise
        for (item, parameter), earlier in zip(shared, before, strict=True):
            self._add_up(item, parameter, earlier)

    def drop_gradients(self) -> None:
        """Leave no parameter of the module a gradient, as after a step that has ended with an exception."""
        for parameter in self._root.parameters():
            parameter.grad = None

    def _add_up(self, item: Shared, parameter: nn.Parameter, earlier: Tensor | None) -> None:
        if parameter.grad is None:
            parameter.grad = parameter.detach().clone().zero_()
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            # One that is held back is a sum still to be made, on this stage alone perhaps.
            parameter.grad = gradient.redistribute(placements=parameter.placements)
        part = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        with naming_collectives("adding up gradients of parameters that pipeline stages share"):
            dist.all_reduce(part, group=item.group)
        if earlier is not None:
            parameter.grad += earlier


def shared_groups(holders: Mapping[str, Sequence[int]], ranks: PipelineRanks) -> tuple[Shared, ...]:
    """The parameters of this rank that other ranks hold, too, with the groups of these; `holders` are the stages that
    hold each. Collective over the ranks of the pipeline's axis."""
    line = dist.get_process_group_ranks(ranks.group)
    found = []
    for name, stages in holders.items():
        places = sorted({ranks.places[stage] for stage in stages})
        if len(places) > 1 and ranks.rank in places:
            found.append(Shared(name, ranks_group([line[place] for place in places], "shared")))
    return tuple(found)


def shared_parameters(root: nn.Module, holders: Mapping[str, Sequence[int]], ranks: PipelineRanks) -> SharedParameters:
    """The parameters on `root` that other ranks hold, too (see `shared_groups`)."""
    return SharedParameters(root, shared_groups(holders, ranks))
