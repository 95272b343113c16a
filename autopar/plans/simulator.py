"""The memory simulator as the search calls it."""

from dataclasses import dataclass

import torch

from autopar.plans.batches import lying_batches
from autopar.plans.probing import FakeProber
from autopar.plans.programs import planned_outputs
from autopar.request import Request
from passes.cost.cluster import Cluster
from passes.cost.liveness import MACHINES, Machine, MemoryPeak, MicroBatchInputs, Stored, peak_memory
from passes.ir.configuration import Configuration
from passes.ir.leaves import input_leaves
from passes.ir.lowered import Lowered
from passes.ir.variables import Variables
from passes.micro_batches import MicroBatches


@dataclass(frozen=True)
class Simulator:
    """Peak memory of programs for one request."""

    request: Request

    def __call__(
        self, lowered: Lowered, variables: Variables, micro: MicroBatches | None, configuration: Configuration
    ) -> MemoryPeak:
        """Bytes on one device at the peak of a step of `lowered`, whose generated code has these variables; `micro` is
        None where the batch is not split."""
        request = self.request
        leaves = dict(input_leaves(request.inputs))
        given = {
            item.name: leaf.dtype
            for item in lowered.program.inputs
            if isinstance(leaf := leaves.get(item.argument), torch.Tensor)
        }
        stored = Stored(request.casts.master, given, request.optimizer if request.objective == "train" else None)
        batches = MicroBatchInputs()
        if micro is not None:
            batches = lying_batches(micro, lowered, planned_outputs(lowered), configuration)
        machine, mesh = machine_of(request.cluster), configuration.mesh
        return peak_memory(lowered, variables, stored, machine, FakeProber(mesh, machine.device), mesh, batches)


def machine_of(cluster: Cluster) -> Machine:
    """The allocator and optimizers of a cluster's devices; those of unknown devices are taken to be CUDA's."""
    return MACHINES["cpu" if cluster.name in ("cpu", "ideal") else "cuda"]
