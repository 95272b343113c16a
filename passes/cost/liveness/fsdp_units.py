"""The simulation of FSDP units: the allocations and releases of torch's `fully_shard`.

Read from torch 2.13, torch/distributed/fsdp/_fully_shard (`_fsdp_param_group.py`, `_fsdp_collectives.py`): a unit is
gathered into one flat buffer and copied out into its parameters, whose storages are freed and reallocated while the
tensors stay the same; gradients are copied into one flat buffer that is reduced, and the reduced gradients are views of
the output. Streams are taken to run in the order of the program. Gradients of a unit that gathers nothing are
reduced when all are computed: in place by NCCL, for gloo in one tensor with those of other units, of which they are
views from then on.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import count as numbers_from
from itertools import pairwise
from math import prod

import torch

from passes.cost.liveness.graph import (
    COMMUNICATION,
    GATHERED,
    GRADIENTS,
    TRANSIENT,
    Boundary,
    Form,
    Leaf,
    Ledger,
    Storage,
    Value,
)
from passes.ir.exchanges import BATCH_BYTES, REDUCTION_BYTES, Batching, batches
from passes.ir.layout import local_shape
from passes.ir.lowered import BEFORE, FSDPUnit, Stage
from passes.ir.mesh import Mesh
from passes.ir.program import TensorType


class _State(Enum):
    """The last action of a unit."""

    IDLE = "idle"
    BEFORE_BACKWARD = "before backward"
    AFTER_BACKWARD = "after backward"


@dataclass(eq=False)
class _Member:
    """A parameter of a unit by its `name`: the gathered parameter, whose storage is empty while it is sharded, and the
    leaf of the stored one.

    `moved` says that it is split in another dim than the first. `turned` are the axes of the all-to-alls that make it
    from the stored one, if their layouts differ. `sum` is the gradient of earlier micro-batches that is still to be
    reduced, if its dtype differs from that of autograd's accumulation.
    """

    name: str
    whole: Value
    stored: Leaf | None
    moved: bool
    turned: tuple[int, ...] = ()
    sum: Storage | None = None

    @property
    def count(self) -> int:
        """Elements of the gathered parameter."""
        return prod(self.whole.form.shape)


@dataclass(frozen=True, eq=False)
class _Reduced:
    """A reduced gradient, a view of `storage`, that waits to share an all-to-all: the bytes that are `sent`, and those
    that are received."""

    member: _Member
    storage: Storage
    sent: int
    bytes: int


@dataclass(frozen=True, eq=False)
class _Ready:
    """The gradients of a unit that wait to share an all-reduce. Those of a copy that is counted and not run are
    `skipped` bytes, which the copies that are run hold elsewhere."""

    found: list[tuple[_Member, Storage]]
    skipped: int = 0


@dataclass(eq=False)
class _Run:
    """The state of a unit while a program runs: `ranks` is the number of ranks that it is sharded over. `flat` is the
    received buffer that is not copied out yet, `reduced` the buffers that are held until the pass ends. `missing`
    counts the gradients that are to come of a unit that gathers nothing."""

    number: int
    plan: FSDPUnit
    members: tuple[_Member, ...]
    ranks: int
    stored: torch.dtype
    state: _State = _State.IDLE
    there: bool = False
    waiting: bool = False
    flat: Storage | None = None
    reduced: Storage | None = None
    missing: int = 0

    @property
    def name(self) -> str:
        """The name of its first parameter."""
        return next(iter(self.plan.parameters))

    def await_gradients(self) -> None:
        """Expect the gradients of all parameters."""
        self.missing = sum(member.stored is not None for member in self.members)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of computation."""
        return self.members[0].whole.form.dtype

    @property
    def reduction(self) -> torch.dtype:
        """The dtype of gradient reductions."""
        return self.plan.dtypes[1] or self.dtype

    @property
    def casts(self) -> bool:
        """Whether the gathered and the stored dtype differ."""
        return self.dtype != self.stored


class FSDPSimulation:
    """The FSDP units of a program in one step. `stored` are the parameters as they are stored. With `keeps` units that
    were gathered for a backward pass stay gathered after it, `joins` is that of the machine; while `holds` is set,
    gradients accumulate and are not reduced."""

    def __init__(
        self,
        stage: Stage,
        stored: Mapping[str, Value],
        mesh: Mesh,
        ledger: Ledger,
        *,
        keeps: bool = False,
        joins: bool = False,
    ) -> None:
        self.holds = False
        self._keeps = keeps
        self._joins = joins
        self._ledger = ledger
        self.units = stage.units
        # What the backward pass gathers ahead, by the unit that it has just gathered. Copies that are counted and not
        # run are left out; for the others it is `FSDPUnits.prefetched`.
        self._prefetched: dict[int, Sequence[int]] = {}
        self._before: Sequence[int] = ()
        self._received: Storage | None = None
        self._sent: Storage | None = None
        self._turned: list[Storage] = []
        self.parameters: dict[str, Value] = {}
        types = {parameter.name: parameter.type for parameter in stage.program.parameters}
        self._runs: dict[int, _Run] = {}
        # Parameters that go to other layouts: over these axes, in this dtype, so many bytes.
        self._exchanged: list[tuple[tuple[tuple[int, ...], torch.dtype], int]] = []
        self._turning: Batching[_Reduced] = Batching()
        # Gradients of units that gather nothing: those that wait to share an all-reduce, and those in one.
        self._reducing: Batching[_Ready] = Batching(REDUCTION_BYTES)
        self._begun: list[tuple[_Member, Storage]] = []
        # Bytes of all gradients that are turned, and that are reduced in place, over the same axes in the same dtype.
        self._turned_bytes: Counter[tuple[tuple[int, ...], torch.dtype]] = Counter()
        self._reduced_bytes: Counter[tuple[tuple[int, ...], torch.dtype]] = Counter()
        # Parameters that had gradients in this backward pass, and by each those of the same place in all copies.
        self._with_gradient: set[str] = set()
        self._alike = {name: names for loop in stage.loops for names in loop.owned.values() for name in names}
        for number, unit in enumerate(stage.units.units):
            names = [name for name in unit.parameters if name in stage.units.gathered]
            add = partial(self._gathered, stage, mesh) if unit.gathers else partial(self._replicated, number)
            members = tuple(add(unit, name, types[name], stored[name]) for name in names)
            self.parameters.update(zip(names, (member.whole for member in members), strict=True))
            ranks = prod(mesh.sizes[axis] for axis in unit.sharded)
            run = _Run(number, unit, members, ranks, stored[next(iter(unit.parameters))].form.dtype)
            run.await_gradients()
            if members:
                self._runs[number] = run
        ledger.block = BEFORE
        self._exchange()

    def _gathered(
        self, stage: Stage, mesh: Mesh, unit: FSDPUnit, name: str, type: TensorType, stored: Value
    ) -> _Member:
        """A parameter that is gathered."""
        self._ledger.block = stored.storage.block
        layout = unit.copy_layout(name, stage.parameters[name])
        shape = local_shape(type.shape, unit.gathered_layout(layout), mesh)
        axes: tuple[int, ...] = ()
        if name in unit.turned:
            copied = Form.contiguous(local_shape(type.shape, layout, mesh), stored.form.dtype)
            self._turned.append(Storage(self._ledger, copied.bytes, GATHERED))
            dtype = unit.dtypes[0] or stored.form.dtype
            axes = tuple(axis for axis in mesh.dimensions if layout[axis] != stage.parameters[name][axis])
            self._exchanged.append(((axes, dtype), prod(copied.shape) * dtype.itemsize))
            reduced = unit.dtypes[1] or dtype
            self._turned_bytes[axes, reduced] += prod(copied.shape) * reduced.itemsize
        form = Form.contiguous(shape, unit.dtypes[0] or stored.form.dtype)
        leaf = _leaf(stored)
        whole = Value(Storage(self._ledger, 0, GATHERED), form, Leaf(form) if leaf is not None else None)
        return _Member(name, whole, leaf, unit.parameters[name] != 0, axes)

    def _replicated(self, number: int, unit: FSDPUnit, name: str, type: TensorType, stored: Value) -> _Member:
        """A parameter that is read as it is stored."""
        leaf, form = _leaf(stored), stored.form
        self._reduced_bytes[unit.replicated, form.dtype] += form.bytes if leaf is not None else 0
        read = None if leaf is None else Leaf(form, accumulated=partial(self._accumulated, number))
        return _Member(name, Value(stored.storage, form, read), leaf, moved=False)

    def _exchange(self) -> None:
        """Make the copies in other layouts: a buffer is sent and one is received; with a second axis the output of the
        first all-to-all is live too."""
        self._ledger.moment = "all-to-all of parameters"
        for batch in batches((key, size, (key, size)) for key, size in self._exchanged):
            (axes, _), _ = batch[0]
            self._send_and_receive(sum(size for _, size in batch), axes)

    def _send_and_receive(self, size: int, axes: Sequence[int]) -> None:
        """Run an all-to-all of a batch of `size` bytes over each of the axes."""
        buffers = [Storage(self._ledger, size, COMMUNICATION) for _ in range(2)]
        buffers += [Storage(self._ledger, size, TRANSIENT)] * (len(axes) > 1)
        del buffers

    def around_copy(self, loop: int, copy: int) -> tuple[int, ...]:
        """The units around a copy of a loop, the innermost first."""
        return self.units.around_copies[loop][copy] if loop < len(self.units.around_copies) else ()

    # --- forward ---

    def enter(self, numbers: Sequence[int], inputs: Sequence[Value], number_next: Callable[[], int]) -> list[Value]:
        """Gather units around a call with `inputs`; returns the inputs that the call reads. The units' backward pass
        ends when these have their gradients. `number_next` numbers new nodes."""
        values = list(inputs)
        for number in reversed(numbers):
            run = self._runs[number]
            self._ledger.moment = f"gather of {run.name}"
            self._gather(run, forward=True)
            self._copy_out(run, forward=True)
            flowing = [value for value in values if value.flows]
            if not flowing:
                continue
            edges = [value.edge for value in flowing]
            boundary = Boundary(number_next(), edges, [value.form for value in flowing], partial(self._end, run))
            slots = numbers_from()
            values = [
                Value(value.storage, value.form, boundary, next(slots)) if value.flows else value for value in values
            ]
        return values

    def leave(self, numbers: Sequence[int], results: Sequence[Value]) -> None:
        """The call has returned `results`; the backward pass of the first that gets a gradient begins with
        regathering."""
        if not numbers:
            return
        self._prefetched.update((inner, (outer,)) for inner, outer in pairwise(numbers))
        self._prefetched[numbers[-1]], self._before = self._before, numbers
        for number in numbers:
            run = self._runs[number]
            if run.plan.regathered:
                self._empty(run)
            for value in results:
                if value.maker is not None and not isinstance(value.maker, Leaf):
                    value.maker.before.append(partial(self._begin, run))

    def end_forward(self) -> None:
        """End the forward pass."""
        self._received = None

    # --- backward ---

    def _begin(self, run: _Run) -> None:
        if run.state is _State.BEFORE_BACKWARD:
            return
        run.state = _State.BEFORE_BACKWARD
        self._ledger.moment = f"gather of {run.name} for the backward pass"
        self._gather(run, forward=False)
        self._copy_out(run, forward=False)
        for number in self._prefetched.get(run.number, ()):
            self._gather(self._runs[number], forward=False)

    def _end(self, run: _Run) -> None:
        """All gradients of a unit are computed: reduce them, or add them to those of earlier micro-batches."""
        run.state = _State.AFTER_BACKWARD
        self._ledger.moment = f"reduction of gradients of {run.name}"
        for member in run.members:
            if member.sum is not None:
                _take(member)
        if self.holds:
            if not self._keeps:
                self._empty(run)
            self._hold(run)
            return
        reduced, gradients = [], []
        dtype = run.dtype
        for member in run.members:
            gradient, member.sum = member.sum, None
            dtype = run.reduction if gradient is not None else dtype
            gradient = gradient or _take(member)
            if gradient is not None:
                reduced.append(member)
                gradients.append(gradient)
        gradient = None
        if not self._keeps:
            self._empty(run)
        self._sent = None
        if reduced:
            run.reduced = None
            self._sent = self._reduce(run, reduced, gradients, dtype)

    def _hold(self, run: _Run) -> None:
        """Keep unreduced gradients, in the dtype of the reduction."""
        if run.reduction == run.dtype:
            return
        for member in run.members:
            gradient = _take(member)
            if gradient is not None:
                member.sum = Storage(self._ledger, member.count * run.reduction.itemsize, GRADIENTS)

    def _reduce(self, run: _Run, members: Sequence[_Member], gradients: list[Storage], given: torch.dtype) -> Storage:
        """Reduce gradients of dtype `given`. The buffer that is sent stays until the reduction ends, as do the last
        gradient and the last one that an all-to-all redistributed."""
        held = turned = None
        if run.ranks > 1:
            for number, member in enumerate(members):
                held = gradients[number]
                if member.moved:
                    turned = held
                    gradients[number] = Storage(self._ledger, member.count * given.itemsize, TRANSIENT)
        dtype = run.reduction
        count = sum(member.count for member in members)
        sent = Storage(self._ledger, count * dtype.itemsize, COMMUNICATION)
        gradients.clear()
        result = Storage(self._ledger, count // run.ranks * dtype.itemsize, GRADIENTS)
        if run.ranks == 1:
            # What would be received is divided by one into a tensor of its own.
            Storage(self._ledger, count * dtype.itemsize, TRANSIENT)
        if run.plan.replicated:
            run.reduced = result
        if dtype != run.stored:
            result.turn(COMMUNICATION)
            result = Storage(self._ledger, count // run.ranks * run.stored.itemsize, GRADIENTS)
        taken = False
        for member in members:
            if member.stored is None:
                continue
            if member.turned:
                elements = member.count // run.ranks
                waiting = _Reduced(member, result, elements * dtype.itemsize, elements * run.stored.itemsize)
                self._await_turn((member.turned, dtype), waiting)
            elif member.stored.gradient is None:
                member.stored.gradient = result
            else:
                continue
            taken = True
        if not taken and result.kind == GRADIENTS:
            # It was added to the gradients that are there, and does not stay.
            result.turn(COMMUNICATION)
        del held, turned
        return sent

    def _await_turn(self, key: tuple[tuple[int, ...], torch.dtype], gradient: _Reduced) -> None:
        """Queue a reduced gradient for a shared all-to-all. As some copies of regions are not run, any of them may fill
        a batch."""
        batch = self._turning.add(key, gradient.sent, gradient)
        if not batch and self._turned_bytes[key] >= BATCH_BYTES:
            made = Storage(self._ledger, BATCH_BYTES * gradient.bytes // gradient.sent, GRADIENTS)
            self._send_and_receive(BATCH_BYTES, gradient.member.turned)
            del made
        self._turn(batch)

    def _turn(self, batch: Sequence[_Reduced]) -> None:
        """Redistribute a batch of reduced gradients by all-to-alls, and accumulate them into the gradients of the
        stored parameters."""
        if not batch:
            return
        made = [Storage(self._ledger, each.bytes, GRADIENTS) for each in batch]
        self._send_and_receive(sum(each.sent for each in batch), batch[0].member.turned)
        for each, gradient in zip(batch, made, strict=True):
            leaf = each.member.stored
            if leaf is not None and leaf.gradient is None:
                leaf.gradient = gradient

    def _accumulated(self, number: int) -> None:
        """A gradient of a unit that gathers nothing is computed."""
        run = self._runs[number]
        run.missing -= 1
        if not run.missing and not self.holds:
            self._send(run)

    def _send(self, run: _Run) -> None:
        """Begin to reduce the gradients that are computed."""
        self._ledger.moment = f"reduction of gradients of {run.name}"
        found = [(member, gradient) for member in run.members if (gradient := _take(member)) is not None]
        self._with_gradient.update(member.name for member, _ in found)
        if not self._joins:
            self._begun += found
            return
        skipped = 0 if found else self._skipped_bytes(run)
        size, key = skipped + sum(gradient.bytes for _, gradient in found), (run.plan.replicated, run.dtype)
        batch = self._reducing.add(key, size, _Ready(found, skipped)) if size else []
        if found and not batch and self._reduced_bytes[key] >= REDUCTION_BYTES:
            # Any unit may fill a batch, as in `_await_turn`.
            joined = Storage(self._ledger, REDUCTION_BYTES, GRADIENTS)
            del joined
        self._join(batch)

    def _skipped_bytes(self, run: _Run) -> int:
        """Bytes of the gradients of a unit of a copy that is counted and not run: those parameters have one that have
        one in other copies."""
        if not self._with_gradient.isdisjoint(member.name for member in run.members):
            return 0
        return sum(
            member.whole.form.bytes
            for member in run.members
            if member.stored is not None and not self._with_gradient.isdisjoint(self._alike.get(member.name, ()))
        )

    def _join(self, batch: Sequence[_Ready]) -> None:
        """Begin to reduce the gradients of a batch of units, in one tensor if they are several."""
        found = [pair for own in batch for pair in own.found]
        if len(found) > 1:
            beside = Storage(self._ledger, sum(own.skipped for own in batch), GRADIENTS)
            joined = Storage(self._ledger, sum(gradient.bytes for _, gradient in found), GRADIENTS)
            found = [(member, joined) for member, _ in found]
            del beside
        self._begun += found

    def _receive(self, runs: Sequence[_Run]) -> None:
        """Accumulate reduced gradients into those of the stored parameters, when all are there."""
        for run in runs:
            if not self.holds:
                self._send(run)
        for batch in self._reducing.rest():
            self._join(batch)
        for member, reduced in self._begun:
            if member.stored is not None and member.stored.gradient is None:
                member.stored.gradient = reduced
        self._begun = []
        self._with_gradient.clear()
        for run in runs:
            run.await_gradients()

    def end_backward(self) -> None:
        """End the backward pass of the units that gather, and release what their gradients were reduced in."""
        for run in self._runs.values():
            if run.plan.gathers:
                if run.state is not _State.AFTER_BACKWARD:
                    self._end(run)
                run.state = _State.IDLE
                run.reduced = run.flat = None
                run.waiting = False
        self._before = ()
        self._sent = None

    def end_reductions(self) -> None:
        """Redistribute and reduce the remaining gradients."""
        for batch in self._turning.rest():
            self._ledger.moment = "all-to-all of gradients"
            self._turn(batch)
        self._receive([run for run in self._runs.values() if not run.plan.gathers])

    def drop(self) -> None:
        """Reshard all parameters."""
        for run in self._runs.values():
            if run.plan.gathers:
                self._empty(run)

    # --- parameters ---

    def _gather(self, run: _Run, *, forward: bool) -> None:
        """Gather a unit; replicated parameters are not sent."""
        if run.waiting or run.there or not (forward or run.plan.saved):
            return
        run.waiting = True
        if run.ranks > 1:
            size = sum(member.count for member in run.members) * run.dtype.itemsize
            cast = Storage(self._ledger, size // run.ranks, COMMUNICATION) if run.casts else None
            run.flat = Storage(self._ledger, size, COMMUNICATION)
            del cast

    def _copy_out(self, run: _Run, *, forward: bool) -> None:
        """Copy what was received into the parameters. In the forward pass it stays until the next unit is there, whose
        copy-out a local variable of torch's still refers to it."""
        if not run.waiting:
            return
        held: list[Storage] = []
        for member in run.members:
            size = member.count * run.dtype.itemsize
            if run.ranks == 1 and run.casts:
                # One is cast before the one before it is gone.
                held = [Storage(self._ledger, size, TRANSIENT)]
            member.whole.storage.resize(size)
            if run.ranks > 1 and member.moved:
                held.append(Storage(self._ledger, size, COMMUNICATION))
        del held
        run.there, run.waiting = True, False
        if forward:
            self._received = run.flat
        run.flat = None

    def _empty(self, run: _Run) -> None:
        """Give back the memory of gathered parameters."""
        for member in run.members:
            member.whole.storage.resize(0)
        run.there = False


def _leaf(stored: Value) -> Leaf | None:
    """The leaf that takes the gradient of a stored parameter; None where it has none."""
    assert stored.maker is None or isinstance(stored.maker, Leaf)
    return stored.maker


def _take(member: _Member) -> Storage | None:
    """The gradient that autograd has left for a gathered parameter, which then has none."""
    whole = member.whole.maker
    if not isinstance(whole, Leaf):
        return None
    gradient, whole.gradient = whole.gradient, None
    return gradient
