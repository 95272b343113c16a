"""Peak memory of one step, or of one evaluation, on one device: the batch runs through the program micro-batch by
micro-batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from passes.cost.liveness.backward import run_backward
from passes.cost.liveness.forward import Forward, Frame
from passes.cost.liveness.fsdp_units import FSDPSimulation
from passes.cost.liveness.graph import (
    ACTIVATIONS,
    BUFFERS,
    GATHERED,
    INPUTS,
    OPTIMIZER,
    OUTPUTS,
    PARAMETERS,
    TRANSIENT,
    Form,
    Leaf,
    Ledger,
    MemoryPeak,
    Prober,
    Storage,
    Value,
)
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
    accumulate unsharded. At most `in_flight` micro-batches have saved tensors at a time: more than one in a
    pipeline. If it `defers` them, gradients of weights are computed after the backward pass, and reduced after the
    step; then `left` more micro-batches have them left to compute."""

    count: int = 1
    inputs: frozenset[str] = frozenset()
    copied: frozenset[str] = frozenset()
    outputs: frozenset[str] = frozenset()
    gathered_once: bool = False
    reduced_once: bool = False
    in_flight: int = 1
    defers: bool = False
    left: int = 0

    def different(self) -> list[int]:
        """The micro-batches that differ in live memory: the first, the last, and the one before it if it does not
        reduce gradients as the last one does."""
        kinds = {0, self.count - 1}
        if self.reduced_once and self.count > 2:
            kinds.add(self.count - 2)
        return sorted(kinds)


# A batch in one piece.
WHOLE = MicroBatchInputs()


@dataclass
class StepSimulation:
    """The simulation of a step of `stage`. `resident` are parameters, buffers and constants by name; without `training`
    there is no backward pass. `stays` are the bytes that skipped copies of regions hold from one micro-batch to the
    next."""

    stage: Stage
    variables: Variables
    batches: MicroBatchInputs
    resident: Mapping[str, Value]
    fsdp: FSDPSimulation
    ledger: Ledger
    prober: Prober
    training: bool
    stays: dict[str, Storage] = field(default_factory=dict)
    # Bytes that a micro-batch holds from its backward pass until its gradients of weights are computed.
    waiting: int = 0

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
            pending = self._pending(given)
            returned = self._micro_batch(given)
            del pending
            done = number + 1
            if count > 1:
                # Outputs that stay have no gradient.
                returned = {name: Value(value.storage, value.form) for name, value in returned.items()}
        self.fsdp.drop()
        self.stays.pop(GATHERED, None)
        if count > 1:
            self._put_together(returned)
        return list(returned.values())

    def _micro_batch(self, inputs: dict[str, Value]) -> dict[str, Value]:
        """Run one micro-batch; returns its outputs by name."""
        before = {kind: self.ledger.live[kind] for kind in (ACTIVATIONS, TRANSIENT)}
        outputs, sent = self._forward(inputs)
        if self.training:
            roots = _roots(outputs, sent)
            del sent
            after = run_backward(roots, self.ledger, self.prober, self.fsdp.end_backward)
            if self.batches.defers:
                self.waiting = max(0, sum(after[kind] - size for kind, size in before.items()))
        return outputs

    def _pending(self, inputs: Mapping[str, Value]) -> list[object]:
        """Storages of the other micro-batches in flight. Two of them are run; each further one holds as much as the
        second."""
        held: list[object] = [Storage(self.ledger, self.batches.left * self.waiting, ACTIVATIONS)]
        for _ in range(min(self.batches.in_flight - 1, 2)):
            before = dict(self.ledger.live)
            held.append(self._forward(self._received_anew(inputs)))
        further = self.batches.in_flight - 3
        if further > 0:
            each = {kind: size - before[kind] for kind, size in self.ledger.live.items()}
            held += [Storage(self.ledger, size * further, kind) for kind, size in each.items() if size > 0]
        return held

    def _received_anew(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """Inputs of another micro-batch: it has received tensors of its own."""
        return {
            name: Value(Storage(self.ledger, value.form.bytes, ACTIVATIONS), value.form, Leaf(value.form))
            if value.storage.kind == ACTIVATIONS
            else value
            for name, value in inputs.items()
        }

    def _forward(self, inputs: dict[str, Value]) -> tuple[dict[str, Value], list[Value]]:
        """Run the forward pass of one micro-batch; returns its outputs by name, and the tensors that it sends."""
        self.ledger.block = BEFORE
        forward = Forward(
            self.stage, self.ledger, self.prober, self.variables, self.resident, self.fsdp, self.training, self.stays
        )
        frame = Frame(self.variables.whole, self.resident, self.fsdp.parameters)
        for name in inputs:
            frame.assign(name, inputs[name])
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
    the dtypes of inputs as they are given, and the optimizer (None: nothing is trained)."""

    master: torch.dtype | None
    given: Mapping[str, torch.dtype]
    optimizer: str | None


def peak_memory(
    stage: Stage,
    variables: Variables,
    stored: Stored,
    machine: Machine,
    prober: Prober,
    mesh: Mesh,
    batches: MicroBatchInputs = WHOLE,
) -> MemoryPeak:
    """The peak memory on one device during a step that is not the first (or an evaluation): the batch and the outputs
    of the model are live until the step ends."""
    ledger, blocks = Ledger(machine.unit, machine.in_place), _blocks(stage)
    program = stage.program
    training = stored.optimizer is not None
    updated = {parameter.name for parameter in program.updated}
    resident: dict[str, Value] = {}
    leaves: list[Leaf] = []
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
            leaves.append(leaf)
            states += [Storage(ledger, form.bytes, OPTIMIZER) for _ in range(update.states)]
            states += [Storage(ledger, 4, OPTIMIZER) for _ in range(update.counting)]
    ledger.block = BEFORE
    for name in (*(buffer.name for buffer in program.buffers), *program.constants):
        form = Form.contiguous(program.types[name].shape, program.types[name].dtype)
        resident[name] = Value(Storage(ledger, form.bytes, BUFFERS), form)
    fsdp = FSDPSimulation(stage, resident, mesh, ledger, keeps=batches.gathered_once, joins=machine.joins)
    step = StepSimulation(stage, variables, batches, resident, fsdp, ledger, prober, training)
    batch, local = _inputs(stage, stored, batches, ledger, mesh)
    returned = step.run(local)
    if training:
        ledger.moment = ledger.block = "optimizer step"
        sizes = [leaf.form.bytes for leaf in leaves if leaf.gradient is not None]
        # The last tensor made for one parameter stays until that for the next one is there.
        before = [0, *sizes] if update.per_parameter else [0] * len(sizes)
        each = [update.per_parameter * size + last for size, last in zip(sizes, before, strict=False)]
        more = update.for_all * sum(sizes) if machine.together else max(each, default=0)
        Storage(ledger, more, TRANSIENT)
    del batch, states, returned
    return ledger.peak


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
    """The whole batch as it is given, and this rank's part of every input in the dtype of computation and of every
    tensor received. Of an input in micro-batches the rank's part is live throughout, as are its micro-batches unless
    they are views of it."""
    batch: list[Storage] = []
    local: dict[str, Value] = {}
    for item in stage.program.inputs:
        dtype = stored.given.get(item.name, item.type.dtype)
        count = batches.count if item.name in batches.inputs else 1
        storage = Storage(ledger, count * prod(item.type.shape) * dtype.itemsize, INPUTS)
        batch.append(storage)
        form = _local(item.type, stage.inputs[item.name], mesh, item.type.dtype)
        if dtype != item.type.dtype or form.shape != item.type.shape:
            storage = Storage(ledger, count * form.bytes, INPUTS)
        if batches.count > 1:
            batch.append(storage)
        if item.name in batches.copied:
            copies = [Storage(ledger, form.bytes, INPUTS) for _ in range(count)]
            batch += copies
            storage = copies[-1]
        local[item.name] = Value(storage, form, Leaf(form) if item.trainable else None)
    for item in stage.received:
        form = _local(item.type, stage.body.layouts[item.name], mesh, item.type.dtype)
        local[item.name] = Value(Storage(ledger, form.bytes, ACTIVATIONS), form, Leaf(form) if item.trainable else None)
    return batch, local
