"""Calls of a module that runs in pipeline stages: training steps by a schedule, inference stage by stage."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from autopar.runtime.calls.programs import RunnableProgram
from autopar.runtime.calls.steps import joined, micro_batch_inputs
from autopar.runtime.generated.bases import GeneratedProgram, GeneratedStage, MicroBatching, PlannedOutput
from autopar.runtime.pipeline.ranks import PipelineRanks, empty_like
from autopar.runtime.pipeline.schedule import RunStage, ScheduledStages, StageRun
from autopar.runtime.pipeline.shared import SharedParameters
from autopar.runtime.ranks.agreement import Agreement, Raised
from autopar.runtime.ranks.heartbeats import start_heartbeat
from autopar.runtime.state import mesh_of
from passes.ir.layout import local_shape


class PipelineRunner:
    """Runs programs of several stages. Each rank runs its own; the leaves of outputs are on the ranks of the stage that
    computes them, scalars on all, and with `whole` outputs all are."""

    def __init__(
        self, ranks: PipelineRanks, device: torch.device, schedule: str, shared: SharedParameters, *, whole: bool
    ) -> None:
        self.ranks = ranks
        self._device = device
        self._schedule = schedule
        self.shared = shared
        self._whole = whole
        self._agreement = Agreement(ranks.mesh)
        start_heartbeat()
        self._scheduled: WeakKeyDictionary[RunnableProgram, ScheduledStages] = WeakKeyDictionary()

    def forward(self, serving: RunnableProgram, inputs: Sequence[Tensor], runs: Mapping[int, RunStage]) -> list[object]:
        """The leaves of the output of one forward pass; `runs` are the stages of this rank by number.

        Raises on all ranks where the code of a stage raises on one.
        """
        ranks, found = self.ranks, dict[int, list[object]]()
        handed: list[Tensor] = []
        error: Exception | None = None
        for number, stage in enumerate(serving.program.stages):
            if number not in runs:
                continue
            if number and ranks.places[number - 1] != ranks.rank:
                try:
                    handed = self._buffers(stage)
                except RuntimeError as raised:
                    # Memory ran out. The message comes all the same.
                    error = error or raised
                    found.clear()
                    handed.clear()
                    handed = self._buffers(stage)
                ranks.receive(handed, number - 1)
            try:
                results = runs[number]([*handed, *(inputs[at] for at in stage.reads)]) if error is None else ()
            except Exception as raised:
                error = raised
            if error is None:
                handed = [item for item in results[: stage.sent] if isinstance(item, Tensor)]
                found[number] = list(results[stage.sent :])
            elif number + 1 < len(ranks.places):
                # The other stages run on, and know afterwards.
                handed = [item.zero_() for item in self._buffers(serving.program.stages[number + 1])]
            if number + 1 < len(ranks.places) and ranks.places[number + 1] != ranks.rank:
                ranks.send(handed, number + 1)
        leaves = self._settled(serving.program, error, lambda: found)
        return self._spread(serving.program, leaves)

    def _buffers(self, stage: GeneratedStage) -> list[Tensor]:
        """Memory for the tensors that a stage receives."""
        return [empty_like(item.shape, item.dtype, self._device) for item in stage.received]

    def _settled(
        self,
        program: GeneratedProgram,
        error: Exception | None,
        outputs: Callable[[], Mapping[int, Sequence[object]]],
    ) -> list[object]:
        """The leaves of the output in order as this rank has them, from those of its stages in `outputs`, and memory
        for those that other ranks send it; None for others. Raises as `_settle` does, for what that raises as well."""
        leaves: list[object] = []
        if error is None:
            try:
                leaves = self._leaves(program, outputs())
            except Exception as raised:
                error = raised
        self._settle(error)
        return leaves

    def _settle(self, error: Exception | None) -> None:
        """Raise the exception of a stage's code on this rank, or RankFailedError for that of another one. Collective
        over the mesh."""
        said: Mapping[str, object] | Raised = {} if error is None else replace(Raised.of(error), expected=False)
        self._agreement.compared("a pass through pipeline stages", "its pipeline stages", said)
        if error is not None:
            raise error

    def forward_backward(
        self,
        serving: RunnableProgram,
        inputs: Sequence[Tensor],
        runs: Mapping[int, RunStage],
        batching: MicroBatching,
    ) -> list[object]:
        """The leaves of the output for a batch, without gradient; gradients are added to `.grad`.

        Raises on all ranks where the code of a stage raises on one; then no parameter has a gradient.
        """
        batches = micro_batch_inputs(batching, inputs, self.ranks.inner, serving.totals)
        program = serving.program
        stages = _stage_runs(serving, runs, batching)
        if serving not in self._scheduled:
            received = {number: on_meta(stage) for number, stage in enumerate(program.stages) if number}
            received[len(program.stages)] = (_loss_on_meta(program.outputs[batching.loss]),)
            self._scheduled[serving] = ScheduledStages(
                self._schedule, stages, self.ranks, self._device, batching.count, received
            )
        try:
            with self.shared.summed():
                of_stages, error = self._scheduled[serving].step(batches, stages)
                leaves = self._settled(program, error, partial(_joined, program, of_stages, batching))
        except BaseException:
            # It may have sent what nobody received, and gradients of zeros that stood for activations.
            del self._scheduled[serving]
            self.shared.drop_gradients()
            raise
        return self._spread(program, leaves)

    def _leaves(self, program: GeneratedProgram, found: Mapping[int, Sequence[object]]) -> list[object]:
        """The leaves of the output in order, from those of this rank's stages; memory for those that all ranks get from
        another one, and None for others."""
        leaves: list[object] = []
        for item, (number, at) in _places(program):
            leaf = found[number][at] if number in found else None
            if item.layout is None:
                leaves.append(item.value)
            elif not self._is_on_all(item):
                leaves.append(leaf)
            elif isinstance(leaf, Tensor):
                leaves.append(leaf.detach().contiguous())
            else:
                assert item.dtype is not None
                shape = local_shape(item.shape, item.layout, mesh_of(self.ranks.inner))
                leaves.append(empty_like(shape, item.dtype, self._device))
        return leaves

    def _is_on_all(self, item: PlannedOutput) -> bool:
        """Whether all ranks of the pipeline's axis have a leaf of the output."""
        return self._whole or not item.shape

    def _spread(self, program: GeneratedProgram, leaves: Sequence[object]) -> list[object]:
        """The leaves of the output in order, with those that other ranks send. Collective over the pipeline's axis."""
        return [
            self.ranks.broadcast(leaf, number)
            if item.layout is not None and self._is_on_all(item) and isinstance(leaf, Tensor)
            else leaf
            for leaf, (item, (number, _)) in zip(leaves, _places(program), strict=True)
        ]


def _places(program: GeneratedProgram) -> Iterator[tuple[PlannedOutput, tuple[int, int]]]:
    """The leaves of the output of a program in order, each with its stage and its place among what that returns."""
    places = {
        item.name: (number, at)
        for number, stage in enumerate(program.stages)
        for at, item in enumerate(stage.program.outputs)
    }
    return ((item, places[item.name]) for item in program.outputs)


def _joined(
    program: GeneratedProgram, of_stages: Mapping[int, Sequence[Sequence[object]]], batching: MicroBatching
) -> dict[int, list[object]]:
    """The leaves of the outputs of stages for the whole batch, from those of each micro-batch."""
    numbers = {item.name: at for at, item in enumerate(program.outputs)}
    return {
        number: [
            joined(each, batching.outputs[numbers[item.name]])
            for each, item in zip(zip(*of_batches, strict=True), program.stages[number].program.outputs, strict=True)
        ]
        for number, of_batches in of_stages.items()
    }


def _stage_runs(serving: RunnableProgram, runs: Mapping[int, RunStage], batching: MicroBatching) -> list[StageRun]:
    """The stages of this rank as the schedule runs them."""
    return [
        StageRun(
            number,
            serving.program.stages[number],
            run,
            serving.stages[number],
            _loss_place(serving.program, number, batching.loss),
            batching.reduce_once,
        )
        for number, run in runs.items()
    ]


def _loss_on_meta(loss: PlannedOutput) -> Tensor:
    """The loss of a micro-batch without values."""
    return torch.empty(loss.shape, dtype=loss.dtype, device="meta", requires_grad=True)


def _loss_place(program: GeneratedProgram, number: int, loss: int) -> int | None:
    """The place of the loss among the outputs of a stage."""
    names = [item.name for item in program.stages[number].program.outputs]
    name = program.outputs[loss].name
    return names.index(name) if name in names else None


def on_meta(stage: GeneratedStage) -> tuple[Tensor, ...]:
    """The tensors that a stage receives, without values."""
    return tuple(
        torch.empty(item.shape, dtype=item.dtype, device="meta", requires_grad=item.differentiable)
        for item in stage.received
    )
