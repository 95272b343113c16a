"""One simulated step: the batch runs through the program micro-batch by micro-batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from passes.cost.liveness.backward import run_backward
from passes.cost.liveness.forward import Forward, Frame
from passes.cost.liveness.fsdp_units import FSDPSimulation
from passes.cost.liveness.graph import Value
from passes.cost.liveness.ledger import BUFFERS, GATHERED, INPUTS, OUTPUTS, PARAMETERS, Ledger, Storage
from passes.cost.liveness.profile import Prober
from passes.ir.lowered import BEFORE, Stage
from passes.ir.program import references
from passes.ir.variables import Variables


@dataclass(frozen=True)
class MicroBatchInputs:
    """A batch in `count` micro-batches: the `inputs` that are split, those whose parts are `copied`, and the `outputs`
    that are concatenated; other outputs are the same in all, or sums. With `gathered_once` the parameters that FSDP
    units gather for a backward pass stay gathered from the first micro-batch to the last; with `reduced_once` gradients
    accumulate unsharded."""

    count: int = 1
    inputs: frozenset[str] = frozenset()
    copied: frozenset[str] = frozenset()
    outputs: frozenset[str] = frozenset()
    gathered_once: bool = False
    reduced_once: bool = False

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
            self.fsdp.holds = self.batches.reduced_once and number < count - 1
            returned = self._micro_batch(given)
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
        if self.training:
            run_backward(_roots(outputs, sent), self.ledger, self.prober, self.fsdp.end_backward)
        return outputs

    def _put_together(self, returned: dict[str, Value]) -> None:
        """Concatenate the outputs of all micro-batches, while the parts are live."""
        self.ledger.moment = "outputs of micro-batches"
        count = self.batches.count
        joined = {
            name: Value(Storage(self.ledger, value.form.bytes * count, OUTPUTS), value.form)
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
