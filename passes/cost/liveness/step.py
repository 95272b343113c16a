"""Peak memory of one step, or of one evaluation, on one device: the batch runs through the program micro-batch by
micro-batch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from passes.cost.liveness.backward import run_backward
from passes.cost.liveness.forward import Expressions, Forward, Frame
from passes.cost.liveness.fsdp_units import FSDPSimulation
from passes.cost.liveness.graph import (
    ACTIVATIONS,
    BUFFERS,
    COMMUNICATION,
    GATHERED,
    INPUTS,
    OPTIMIZER,
    OUTPUTS,
    PARAMETERS,
    STAYING,
    TRANSIENT,
    Form,
    Leaf,
    Ledger,
    LiveBytes,
    Prober,
    Storage,
    Value,
)
from passes.cost.liveness.peaks import PartPeak, StepPeaks
from passes.cost.optimizers import NO_OPTIMIZER, OPTIMIZERS
from passes.ir.arguments import references
from passes.ir.layout import Layout, local_shape
from passes.ir.lowered import BEFORE, Compute, Loop, Stage, Variables, after
from passes.ir.mesh import Mesh
from passes.ir.program import TensorType


@dataclass(frozen=True)
class MicroBatchInputs:
    """A batch in `count` micro-batches: the `inputs` that are split, those whose parts are `copied`, and the `outputs`
    that are concatenated; other outputs are the same in all, or sums. With `gathered_once` the parameters that FSDP
    units gather for a backward pass stay gathered from the first micro-batch to the last; with `reduced_once` gradients
    accumulate unsharded. If it `defers` them, gradients of weights are computed after the backward pass, and reduced
    after the step. Of so many micro-batches `messages` that were sent are held: tensors, and gradients."""

    count: int = 1
    inputs: frozenset[str] = frozenset()
    copied: frozenset[str] = frozenset()
    outputs: frozenset[str] = frozenset()
    gathered_once: bool = False
    reduced_once: bool = False
    defers: bool = False
    messages: tuple[int, int] = (0, 0)

    def different(self) -> list[int]:
        """The micro-batches that differ in live memory: the first, the last, and the one before it if it does not
        reduce gradients as the last one does."""
        kinds = {0, self.count - 1}
        if self.reduced_once and self.count > 2:
            kinds.add(self.count - 2)
        return sorted(kinds)


# A batch in one piece.
WHOLE = MicroBatchInputs()

# Kinds of tensors that live within the passes of one micro-batch.
_PASSING = (ACTIVATIONS, TRANSIENT)


@dataclass
class StepSimulation:
    """The simulation of a step of `stage`. `resident` are parameters, buffers and constants by name, `received` the
    forms of the tensors received and whether they have a gradient; without `training` there is no backward pass.
    `stays` are the bytes that skipped copies of regions hold from one micro-batch to the next."""

    stage: Stage
    variables: Variables
    batches: MicroBatchInputs
    resident: Mapping[str, Value]
    received: Mapping[str, tuple[Form, bool]]
    fsdp: FSDPSimulation
    ledger: Ledger
    expressions: Expressions
    training: bool
    stays: dict[str, Storage] = field(default_factory=dict)
    parts: list[PartPeak] = field(default_factory=list)
    # Bytes that the forward pass of a micro-batch leaves, those of the tensors that it sends, and of the gradients that
    # its backward pass receives.
    saved: LiveBytes = field(default_factory=dict)
    sent: list[int] = field(default_factory=list)
    given: list[int] = field(default_factory=list)
    # Bytes that a micro-batch holds from its backward pass until its gradients of weights are computed.
    left: int = 0

    def run(self, inputs: dict[str, Value]) -> list[Value]:
        """Run the micro-batches that differ; returns the outputs. `inputs` are empty afterwards."""
        count = self.batches.count
        returned: dict[str, Value] = {}
        earlier: list[Storage] = []
        done = 0
        for number in self.batches.different():
            given = dict(inputs)
            if number == count - 1:
                inputs.clear()
            if done:
                # All micro-batches return outputs of the same size.
                sizes = _sizes(returned)
                returned.clear()
                earlier += [Storage(self.ledger, size, OUTPUTS) for size in sizes for _ in range(done, number + 1)]
            self.fsdp.holds = self.batches.defers or (self.batches.reduced_once and number < count - 1)
            returned = self._micro_batch(given, first=number == 0)
            done = number + 1
            if count > 1:
                # Outputs that stay have no gradient.
                returned = {name: Value(value.storage, value.form) for name, value in returned.items()}
        self.fsdp.drop()
        self.stays.pop(GATHERED, None)
        if count > 1:
            self._put_together(returned)
        return list(returned.values())

    def finish(self) -> StepPeaks:
        """The peaks of all parts, the last of which ends now."""
        self._end_part()
        return StepPeaks(tuple(self.parts))

    def _micro_batch(self, inputs: dict[str, Value], *, first: bool) -> dict[str, Value]:
        """Run one micro-batch; returns its outputs by name. When the forward pass of the first one runs, no other
        micro-batch holds tensors; when that of another one runs, backward passes have run before it."""
        if not first:
            self._end_part()
        before = Counter(self.ledger.live)
        received = self._receive()
        messages = [] if first else self._messages(received)
        given = [] if first else [Storage(self.ledger, size, COMMUNICATION) for size in self.given]
        idle = self._passing()
        outputs, sent = self._forward(inputs, received)
        given.clear()
        if first:
            self._end_part()
            grown = Counter(self.ledger.live)
            grown.subtract(before)
            self.saved = {place: size for place, size in grown.items() if place[0] not in STAYING and size > 0}
            self.sent = [value.form.bytes for value in sent]
            self.given = [value.form.bytes for value in sent if value.flows]
        if self.training:
            roots = _roots(outputs, sent)
            del sent
            waiting = run_backward(roots, self.ledger, self.expressions.prober, self.fsdp)
            self._end_part(self.saved, 0 if first else self.left)
            if first and self.batches.defers:
                self.left = max(0, sum(waiting[kind] for kind in _PASSING) - idle)
        del received, messages
        return outputs

    def _passing(self) -> int:
        live = self.ledger.by_kind()
        return sum(live[kind] for kind in _PASSING)

    def _messages(self, received: Mapping[str, Value]) -> list[Storage]:
        """Messages sent that are held: tensors, and gradients of tensors like those `received`."""
        returned = [value.form.bytes for value in received.values() if value.flows]
        return [
            Storage(self.ledger, times * size, COMMUNICATION)
            for times, sizes in zip(self.batches.messages, (self.sent, returned), strict=True)
            for size in sizes
            if times
        ]

    def _receive(self) -> dict[str, Value]:
        """The tensors that a micro-batch receives, which its stage holds until its backward pass is over."""
        self.ledger.block = BEFORE
        return {
            name: Value(Storage(self.ledger, form.bytes, ACTIVATIONS), form, Leaf(form) if has_gradient else None)
            for name, (form, has_gradient) in self.received.items()
        }

    def _end_part(self, saved: LiveBytes | None = None, left: int = 0) -> None:
        self.parts.append(PartPeak(self.ledger.take_peak(), saved or {}, left))

    def _forward(self, inputs: dict[str, Value], received: Mapping[str, Value]) -> tuple[dict[str, Value], list[Value]]:
        """Run the forward pass of one micro-batch; returns its outputs by name, and the tensors that it sends."""
        self.ledger.block = BEFORE
        forward = Forward(
            self.stage,
            self.ledger,
            self.expressions,
            self.variables,
            self.resident,
            self.fsdp,
            self.training,
            self.stays,
        )
        frame = self._frame(inputs, received)
        forward.body(self.stage.body, frame, forward.updated)
        outputs = {output.name: frame.read(name) for output in self.stage.outputs for name in references(output.value)}
        sent = [frame.read(name) for name in self.stage.sent]
        forward.noted = None
        self.fsdp.end_forward()
        # The caller held the arguments.
        inputs.clear()
        del frame
        for value in outputs.values():
            if value.storage.kind not in (PARAMETERS, BUFFERS, INPUTS):
                value.storage.turn(OUTPUTS)
        return outputs, sent

    def _frame(self, inputs: Mapping[str, Value], received: Mapping[str, Value]) -> Frame:
        """A frame of variables at the beginning of a forward pass."""
        frame = Frame(self.variables.whole, self.resident, self.fsdp.parameters)
        for name, value in (*inputs.items(), *received.items()):
            frame.assign(name, value)
        return frame

    def _put_together(self, returned: dict[str, Value]) -> None:
        """Concatenate the outputs of all micro-batches, while the parts are live."""
        self.ledger.moment = "outputs of micro-batches"
        joined = {
            name: Value(Storage(self.ledger, value.form.bytes * self.batches.count, OUTPUTS), value.form)
            for name, value in returned.items()
            if name in self.batches.outputs
        }
        returned.update(joined)


def _sizes(returned: Mapping[str, Value]) -> list[int]:
    """Bytes of the storages of the outputs, except those that are resident anyway."""
    own = {id(value.storage): value.storage for value in returned.values()}
    return [storage.bytes for storage in own.values() if storage.kind == OUTPUTS]


def _roots(outputs: Mapping[str, Value], sent: Sequence[Value]) -> list[Value]:
    """The roots of the backward pass: the tensors sent to later stages, or else the loss, or else all outputs, as far
    as they have a gradient."""
    if any(value.flows for value in sent):
        return [value for value in sent if value.flows]
    flowing = {name: value for name, value in outputs.items() if value.flows}
    if "loss" in flowing:
        return [flowing["loss"]]
    scalars = [value for value in flowing.values() if not value.form.shape]
    return scalars if len(scalars) == 1 else list(flowing.values())


@dataclass(frozen=True)
class Machine:
    """Memory behaviour of torch on a kind of `device`: storages take multiples of `unit` bytes; an optimizer updates
    all parameters `together` (multi-tensor implementations, the default on CUDA) or one after the other. Gradients
    that are reduced together are put into one tensor if it `joins` them; otherwise they are reduced in place. Autograd
    adds gradients `in_place` where it can, which it cannot on tensors without values."""

    device: str = "cpu"
    unit: int = 1
    together: bool = False
    joins: bool = True
    in_place: bool = True


# Behaviour of torch's allocator and optimizers. (https://docs.pytorch.org/docs/stable/notes/cuda.html: blocks of 512
# bytes; torch/optim: multi-tensor forms where all parameters are on CUDA. The runtime joins gradients for gloo.)
MACHINES = {"cpu": Machine(), "cuda": Machine("cuda", unit=512, together=True, joins=False)}


@dataclass(frozen=True)
class Stored:
    """Tensors that outlive a step: the dtype that floating-point parameters are stored in (None: that of the program),
    the dtypes of inputs as they are given, and the optimizer (None: nothing is trained). `others` are inputs that only
    other stages read, with their layouts: callers pass all inputs on all ranks."""

    master: torch.dtype | None
    given: Mapping[str, torch.dtype]
    optimizer: str | None
    others: Mapping[str, tuple[TensorType, Layout]] = field(default_factory=dict)


def peak_memory(
    stage: Stage,
    variables: Variables,
    stored: Stored,
    machine: Machine,
    prober: Prober,
    mesh: Mesh,
    batches: MicroBatchInputs = WHOLE,
) -> StepPeaks:
    """The peak memory on one device during a step that is not the first (or an evaluation), for all numbers of
    micro-batches that hold tensors at a time: the batch and the outputs of the model are live until the step ends."""
    ledger, blocks = Ledger(machine.unit, machine.in_place), _blocks(stage)
    program = stage.program
    training = stored.optimizer is not None
    updated = {parameter.name for parameter in program.updated}
    resident: dict[str, Value] = {}
    leaves: dict[str, Leaf] = {}
    states: list[Storage] = []
    update = OPTIMIZERS[stored.optimizer] if stored.optimizer is not None else NO_OPTIMIZER
    for parameter in program.parameters:
        dtype = parameter.type.dtype
        if dtype.is_floating_point and stored.master is not None:
            dtype = stored.master
        form = _local(parameter.type, stage.parameters[parameter.name], mesh, dtype)
        leaf = Leaf(form) if parameter.trainable and training else None
        ledger.block = blocks.get(parameter.name, BEFORE)
        resident[parameter.name] = Value(Storage(ledger, form.bytes, PARAMETERS), form, leaf)
        if leaf is not None and parameter.name in updated:
            leaves[parameter.name] = leaf
            states += [Storage(ledger, form.bytes, OPTIMIZER) for _ in range(update.states)]
            states += [Storage(ledger, 4, OPTIMIZER) for _ in range(update.counting)]
    ledger.block = BEFORE
    for name in (*(buffer.name for buffer in program.buffers), *program.constants):
        form = Form.contiguous(program.types[name].shape, program.types[name].dtype)
        resident[name] = Value(Storage(ledger, form.bytes, BUFFERS), form)
    fsdp = FSDPSimulation(stage, resident, mesh, ledger, keeps=batches.gathered_once, joins=machine.joins)
    received = {
        item.name: (_local(item.type, stage.body.layouts[item.name], mesh, item.type.dtype), item.trainable)
        for item in stage.received
    }
    step = StepSimulation(stage, variables, batches, resident, received, fsdp, ledger, Expressions(prober), training)
    batch, local = _inputs(stage, stored, batches, ledger, mesh)
    returned = step.run(local)
    if training:
        ledger.moment = ledger.block = "optimizer step"
        sizes = [leaves[name].form.bytes for name in _with_gradient(stage, leaves)]
        # The last tensor made for one parameter stays until that for the next one is there.
        before = [0, *sizes] if update.per_parameter else [0] * len(sizes)
        each = [update.per_parameter * size + last for size, last in zip(sizes, before, strict=False)]
        more = update.for_all * sum(sizes) if machine.together else max(each, default=0)
        Storage(ledger, more, TRANSIENT)
    del batch, states, returned
    return step.finish()


def _with_gradient(stage: Stage, leaves: Mapping[str, Leaf]) -> list[str]:
    """The parameters that have a gradient after the backward pass. Copies of regions that are not run have those of the
    copies that are."""
    found = {name for name, leaf in leaves.items() if leaf.gradient is not None}
    for statement in stage.body.statements:
        if isinstance(statement, Loop):
            for names in statement.owned.values():
                found.update(name for name in names if not found.isdisjoint(names))
    return [name for name in leaves if name in found]


def _blocks(stage: Stage) -> dict[str, str]:
    """The block that each parameter is in: the region that owns it, or else the first block that reads it."""
    found: dict[str, str] = {}
    block = BEFORE
    for statement in stage.body.statements:
        if isinstance(statement, Loop):
            owned = (name for names in statement.owned.values() for name in names)
            found.update(dict.fromkeys(owned, statement.block))
            block = after(statement.block)
        else:
            read = statement.op.operands if isinstance(statement, Compute) else (statement.source,)
            for name in read:
                found.setdefault(name, block)
    return found


def _local(type: TensorType, layout: Layout, mesh: Mesh, dtype: torch.dtype) -> Form:
    return Form.contiguous(local_shape(type.shape, layout, mesh), dtype)


def _inputs(
    stage: Stage, stored: Stored, batches: MicroBatchInputs, ledger: Ledger, mesh: Mesh
) -> tuple[list[Storage], dict[str, Value]]:
    """The whole batch as it is given, and this rank's part of every input in the dtype of computation. Of an input in
    micro-batches the rank's part is live throughout, as are its micro-batches unless they are views of it."""
    batch: list[Storage] = []
    local: dict[str, Value] = {}

    def hold(name: str, type: TensorType, layout: Layout) -> tuple[Storage, Form]:
        dtype = stored.given.get(name, type.dtype)
        count = batches.count if name in batches.inputs else 1
        storage = Storage(ledger, count * prod(type.shape) * dtype.itemsize, INPUTS)
        batch.append(storage)
        form = _local(type, layout, mesh, type.dtype)
        if dtype != type.dtype or form.shape != type.shape:
            storage = Storage(ledger, count * form.bytes, INPUTS)
        if batches.count > 1:
            batch.append(storage)
        if name in batches.copied:
            copies = [Storage(ledger, form.bytes, INPUTS) for _ in range(count)]
            batch.extend(copies)
            storage = copies[-1]
        return storage, form

    for name, (type, layout) in stored.others.items():
        hold(name, type, layout)
    for item in stage.program.inputs:
        storage, form = hold(item.name, item.type, stage.inputs[item.name])
        local[item.name] = Value(storage, form, Leaf(form) if item.trainable else None)
    return batch, local
