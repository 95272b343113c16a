"""One step of a pipeline: `torch.distributed.pipelining` runs the schedule, and calls stages with micro-batches."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import P2POp
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from autopar.runtime.calls.programs import RunnableStage
from autopar.runtime.generated.bases import GeneratedStage
from autopar.runtime.generated.deferred import WeightGradient
from autopar.runtime.pipeline.messages import SentMessages
from autopar.runtime.pipeline.ranks import PipelineRanks
from passes._torch import pytree
from passes.cost.schedules import SCHEDULES, Message, arrivals, schedule_actions
from passes.ir.configuration import SPLITTING

T = TypeVar("T")

# Runs a stage on the tensors that it receives and on this rank's parts of its inputs, and returns what its code does.
RunStage = Callable[[Sequence[Tensor]], Sequence[object]]

# Schedules that take one stage of each rank, and those that take a list of them.
_SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_MULTIPLE = {
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zb_h1": ScheduleInterleavedZeroBubble,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


@dataclass(frozen=True)
class StageRun:
    """A stage that this rank runs: its description, its code, its instance and parameters, and the place of the loss
    among the leaves of its outputs (None: it has no loss). With `reduces_once`, gradients are reduced after the last
    micro-batch."""

    number: int
    generated: GeneratedStage
    run: RunStage
    runnable: RunnableStage
    loss: int | None
    reduces_once: bool

    def accumulate(self, due: deque[WeightGradient]) -> None:
        """Compute gradients of weights that backward passes have left, and drop what they are computed from."""
        with self.runnable.manager.adding_gradients(), self.runnable.parameters.adding_gradients():
            while due:
                due.popleft().accumulate()


@dataclass
class Batches:
    """The micro-batches of one step: the `inputs` of each, the `stages` that run on them by number, and, by stage, the
    leaves that each has returned.

    `error` is the first exception of a stage's own code, or of a buffer for what a stage receives. The schedule goes on
    after it with zeros in place of tensors, and without running stages of this rank, so that no other rank waits for
    messages. `running` are by stage the outputs and inputs of micro-batches whose backward pass is to come, as torch
    keeps them.
    """

    inputs: Sequence[Sequence[Tensor]]
    stages: Mapping[int, StageRun]
    leaves: dict[int, dict[int, list[object]]] = field(default_factory=dict)
    error: Exception | None = None
    running: list[dict[int, tuple[Any, Any]]] = field(default_factory=list)

    def allocated(self, make: Callable[[], T]) -> T:
        """The tensors that `make` allocates. Where memory runs out, all that this rank has saved for backward passes is
        given up, as after an exception of a stage, and `make` is called again: other ranks wait for the messages."""
        try:
            return make()
        except RuntimeError as error:
            self.error = self.error or error
        self.leaves.clear()
        for micro_batches in self.running:
            for number, (outputs, given) in micro_batches.items():
                micro_batches[number] = pytree.tree_map_only(Tensor, Tensor.detach, outputs), given
        return make()


_NONE = Batches((), {})


class _StageModule(nn.Module):
    """A stage as `PipelineStage` calls it: with received tensors, and the number of the micro-batch as a tensor.

    It knows its code only while a step runs: torch's schedules have cycles, which would keep parameters alive.
    """

    def __init__(self, number: int, device: torch.device, sent: Sequence[Tensor]) -> None:
        super().__init__()
        self._number = number
        self._device, self._sent = device, tuple(sent)
        self.batches = _NONE

    @property
    def stage(self) -> StageRun:
        """The stage that runs."""
        return self.batches.stages[self._number]

    def forward(self, *received: Tensor, number: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The tensors for the next stage; of the last stage the loss of the micro-batch. Zeros after an exception."""
        stage, batches, place = self.stage, self.batches, int(number)
        results: Sequence[object] | None = None
        if batches.error is None:
            try:
                given = batches.inputs[place]
                results = stage.run([*received, *(given[at] for at in stage.generated.reads)])
            except Exception as error:
                batches.error = error
        if results is None:
            zeros = batches.allocated(lambda: tuple(zeros_like(item, self._device) for item in self._sent))
            for zero, item in zip(zeros, self._sent, strict=True):
                zero.requires_grad_(item.requires_grad)
            return zeros[0] if stage.loss is not None else zeros
        sent, leaves = results[: stage.generated.sent], results[stage.generated.sent :]
        batches.leaves.setdefault(stage.number, {})[place] = [
            leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves
        ]
        if stage.loss is not None:
            loss = leaves[stage.loss]
            assert isinstance(loss, Tensor)
            # torch detaches it after the backward pass, so that its graph is freed: a view it could not detach.
            return loss.clone()
        # What is handed on unchanged is a tensor of its own: its gradient is sent back. No gradient comes back for what
        # only chooses indices.
        tensors = (_own(item, received) for item in sent if isinstance(item, Tensor))
        pairs = zip(tensors, self._sent, strict=True)
        return tuple(item if meta.requires_grad else item.detach() for item, meta in pairs)


def _own(tensor: Tensor, given: Sequence[Tensor]) -> Tensor:
    return tensor.clone() if any(tensor is other for other in given) else tensor.contiguous()


class _Stage(PipelineStage):
    """A stage whose gradients are held until its last micro-batch, where they are reduced once. If the schedule
    `splits`, gradients of weights are computed apart, and all are reduced after the step.

    torch allocates what a stage receives for all micro-batches at the first step. Here each buffer is dropped after the
    backward pass of its micro-batch, and made anew for the next message. Messages that are actions of their own go
    through `messages`; others are sent by torch.
    """

    def __init__(
        self,
        stage: StageRun,
        ranks: PipelineRanks,
        device: torch.device,
        sent: Sequence[Tensor],
        messages: SentMessages | None,
        *,
        splits: bool,
    ) -> None:
        received = tuple(
            torch.empty(item.shape, dtype=item.dtype, device="meta", requires_grad=item.differentiable)
            for item in stage.generated.received
        )
        self.module = _StageModule(stage.number, device, sent)
        super().__init__(
            self.module,
            stage.number,
            len(ranks.places),
            device,
            input_args=received,
            output_args=tuple(sent),
            group=ranks.group,
            dw_builder=self._weights_left if splits else None,
        )
        self._messages = messages
        self._splits = splits
        self._left = 0

    def begin(self, batches: Batches) -> None:
        """Take the micro-batches of the next step."""
        self.module.batches = batches
        self._left = len(batches.inputs)
        if batches.stages:
            batches.running.append(self.fwd_cache)
            # Of a step that ended with an exception.
            self.module.stage.runnable.instance.deferred.take()

    def end(self) -> None:
        """Reduce gradients that are held back, after the last action of the schedule."""
        stage = self.module.stage.runnable
        if stage.instance.deferred.take():
            raise RuntimeError(f"the schedule has left gradients of weights of pipeline stage {self.stage_index}")
        if self._splits:
            stage.manager.reduce_gradients()

    def _weights_left(self) -> Callable[[], None]:
        """A function that computes the gradients of weights which the backward pass before has left."""
        batches, stage = self.module.batches, self.module.stage
        left = stage.runnable.instance.deferred.take()

        def accumulate() -> None:
            if batches.error is None:
                try:
                    stage.accumulate(left)
                except Exception as error:
                    batches.error = error

        return accumulate

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        """The operations that receive the tensors of a micro-batch."""
        self._with_buffers(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        """The operations that receive the gradients of the tensors that a micro-batch has sent."""
        self._with_buffers(self.grad_recv_info.get(bwd_chunk_id, ()), self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """Take the gradients of a stage on this rank; zeros where a tensor has none."""
        messages = zip(self.grad_recv_info[mb_index], next_stage_bwd_outputs, strict=True)
        self._with_buffers([message for message, given in messages if given is None], self.device)
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        """The operations that send the tensors of a micro-batch; none if they are sent already."""
        return self._sent(Message("F", self.stage_index, fwd_chunk_id), super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        """The operations that send gradients of what a micro-batch received; none if they are sent already."""
        return self._sent(Message("B", self.stage_index, bwd_chunk_id), super().get_bwd_send_ops(bwd_chunk_id))

    def _sent(self, message: Message, operations: list[P2POp]) -> list[P2POp]:
        if self._messages is None:
            return operations
        self._messages.start(message, operations)
        return []

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of one micro-batch, with the arguments of torch's version."""
        if self._messages is not None:
            self._messages.begin(self.stage_index, fwd_chunk_id, forward=True)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """The backward pass of one micro-batch, with the arguments of torch's version."""
        if self._messages is not None:
            self._messages.begin(self.stage_index, bwd_chunk_id, forward=False)
        self._left -= 1
        stage = self.module.stage
        holds = self._splits or (stage.reduces_once and self._left > 0)
        with stage.runnable.manager.holding_gradients() if holds else nullcontext():
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._with_buffers(self.args_recv_info[bwd_chunk_id], torch.device("meta"))
        self._with_buffers(self.grad_recv_info.get(bwd_chunk_id, ()), torch.device("meta"))

    def _with_buffers(self, messages: Iterable[Any], device: torch.device) -> None:
        """Give messages new buffers on a device; what a stage is called with has none."""
        for message in messages:
            buffer = getattr(message, "buffer", None)
            if buffer is not None:
                message.buffer = self.module.batches.allocated(partial(empty_like, buffer, device))

    def backward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """The gradients of a micro-batch, with the arguments of torch's version; after an exception zeros."""
        batches = self.module.batches
        if batches.error is None:
            try:
                return super().backward_maybe_with_nosync(*args, **kwargs)
            except RuntimeError as error:
                # torch raises its own, which lists all tensors, from what was raised.
                batches.error = error.__cause__ if isinstance(error.__cause__, Exception) else error
        _, given = args
        values = given["input_values"]
        zeros = batches.allocated(
            lambda: tuple(zeros_like(item, item.device) if item.requires_grad else None for item in values)
        )
        return zeros, None


class ScheduledStages:
    """The stages of this rank in the order of a schedule, for steps of `count` micro-batches. `received` are by stage
    the tensors that it receives, on meta, and after the last stage the loss. Collective over the pipeline's ranks at
    the first step."""

    def __init__(
        self,
        schedule: str,
        stages: Sequence[StageRun],
        ranks: PipelineRanks,
        device: torch.device,
        count: int,
        received: Mapping[int, Sequence[Tensor]],
    ) -> None:
        self._messages = _sent_messages(schedule, ranks, count)
        self._stages: list[_Stage] = [
            _Stage(stage, ranks, device, received[stage.number + 1], self._messages, splits=schedule in SPLITTING)
            for stage in stages
        ]
        self._numbers = torch.arange(count)
        self._target = self._numbers if any(stage.loss is not None for stage in stages) else None
        self._schedule = (
            _SINGLE[schedule](self._stages[0], count, loss_fn=_loss, scale_grads=False)
            if schedule in _SINGLE
            else _MULTIPLE[schedule]([*self._stages], count, loss_fn=_loss, scale_grads=False)
        )

    def step(
        self, inputs: Sequence[Sequence[Tensor]], stages: Sequence[StageRun]
    ) -> tuple[dict[int, list[list[object]]], Exception | None]:
        """Forward and backward of all micro-batches, whose inputs are given, through the `stages` that this was made
        for. Gradients are added to `.grad`.

        Returns, by stage, the leaves of its outputs for each micro-batch, without gradient; and the exception that a
        stage's code has raised, after which other ranks have got zeros.
        """
        batches = Batches(inputs, {stage.number: stage for stage in stages})
        for stage in self._stages:
            stage.begin(batches)
        try:
            self._schedule.step(number=self._numbers, target=self._target, return_outputs=False)
            if self._messages is not None:
                self._messages.finish()
            if batches.error is None:
                self._end(batches)
        finally:
            for stage in self._stages:
                stage.begin(_NONE)
            if self._messages is not None:
                self._messages.clear()
        if batches.error is not None:
            return {}, batches.error
        found = {number: [leaves[place] for place in range(len(inputs))] for number, leaves in batches.leaves.items()}
        return found, None

    def _end(self, batches: Batches) -> None:
        try:
            for stage in self._stages:
                stage.end()
        except Exception as error:
            # Other ranks are told of it.
            batches.error = error


def _sent_messages(schedule: str, ranks: PipelineRanks, count: int) -> SentMessages | None:
    """The messages of this rank where they are actions of their own."""
    if not SCHEDULES[schedule].sends_alone:
        return None
    places = ranks.places
    actions = schedule_actions(schedule, max(places) + 1, len(places), count)
    return SentMessages(arrivals(actions, places, ranks.rank))


def empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor without values on a device, which has a gradient where `tensor` has one."""
    return torch.empty_like(tensor, device=device, requires_grad=tensor.requires_grad)


def zeros_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Zeros on a device."""
    return torch.zeros_like(tensor, device=device)


def _loss(output: Tensor, _: Tensor) -> Tensor:
    """The loss of a micro-batch: stages compute it themselves."""
    return output
