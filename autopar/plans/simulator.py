"""The memory simulator as the search calls it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autopar.models.info import ModelInfo
from autopar.plans.batches import micro_batch_inputs
from autopar.plans.probing import FakeProber
from autopar.plans.programs import planned_outputs
from autopar.request import Request
from passes.cost.cluster import Cluster
from passes.cost.liveness import MACHINES, Machine, MemoryPeak, MicroBatchInputs, Stored, peak_memory
from passes.ir.configuration import Configuration
from passes.ir.leaves import input_leaves
from passes.ir.lowered import Lowered, Variables
from passes.micro_batches import MicroBatches


@dataclass(frozen=True)
class Simulator:
    """Peak memory of programs for one request."""

    info: ModelInfo
    request: Request

    def __call__(
        self, lowered: Lowered, variables: Sequence[Variables], micro: MicroBatches | None, configuration: Configuration
    ) -> tuple[MemoryPeak, ...]:
        """Bytes on one device of each stage at the peak of a step of `lowered`; the stages' generated code has these
        variables. `micro` is None where the batch is not split."""
        request = self.request
        leaves = dict(input_leaves(self.info.inputs))
        given = {
            item.name: leaf.dtype
            for item in lowered.program.inputs
            if isinstance(leaf := leaves.get(item.argument), torch.Tensor)
        }
        stored = Stored(
            self.info.casts(request.precision).master,
            given,
            request.optimizer if request.objective == "train" else None,
        )
        batches = MicroBatchInputs()
        if micro is not None:
            batches = micro_batch_inputs(micro, lowered, planned_outputs(lowered), configuration)
        machine, mesh = machine_of(request.cluster), configuration.mesh
        prober = FakeProber(mesh, machine.device)
        return tuple(
            peak_memory(stage, own, stored, machine, prober, mesh, batches)
            for stage, own in zip(lowered.stages, variables, strict=True)
        )


def machine_of(cluster: Cluster) -> Machine:
    """The allocator and optimizers of a cluster's devices; those of unknown devices are taken to be CUDA's."""
    return MACHINES[cluster.device.type]
