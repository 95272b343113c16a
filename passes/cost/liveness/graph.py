"""The data of a simulation: the memory profile of one statement, the ledger of live bytes by kind and their peak, and
the autograd graph: values, the nodes that computed them, and the tensors that the nodes save.

A profile has the statement's allocations and frees in order, and its saved tensors. Indices of storages number the
statement's own allocations in order. A statement that cannot be probed because it reads values has a
worst-case profile.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from math import prod
from sys import getrefcount
from typing import Literal, Protocol
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch

from passes.cost.memory import MemoryUse
from passes.ir.lowered import Compute
from passes.ir.program import TensorType
from passes.ir.redistribution import RedistributionStep


@dataclass(frozen=True, slots=True)
class Form:
    """Local shape, strides (in elements) and dtype of a tensor. Profiles are looked up by forms, which hash once."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.shape, self.stride, self.dtype)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def bytes(self) -> int:
        """Bytes of a tensor of this shape without overlapping elements."""
        return prod(self.shape) * self.dtype.itemsize

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], dtype: torch.dtype) -> "Form":
        """The form of a new tensor."""
        stride = (prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))
        return cls(shape, tuple(stride), dtype)

    @property
    def spread(self) -> bool:
        """Whether elements overlap in memory, as in an expanded tensor."""
        return any(step == 0 and size > 1 for size, step in zip(self.shape, self.stride, strict=True))

    @property
    def dense(self) -> bool:
        """Whether elements neither overlap in memory nor leave gaps, in whatever order dims have."""
        expected = 1
        for step, size in sorted((step, size) for size, step in zip(self.shape, self.stride, strict=True) if size > 1):
            if step != expected:
                return False
            expected *= size
        return True


# The origin of a storage: allocated by the statement, an operand's, or that of the gradient of a result.
StorageOrigin = Literal["own", "operand", "gradient"]


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A reference to a storage in a statement: its own allocation, an operand's, or that of a result's gradient."""

    origin: StorageOrigin
    index: int


# Memory events of the forward or backward pass of a statement. They are texts because simulations compare many, and
# Python 3.11 looks the members of an enum up slowly.
EventKind = Literal[
    "allocate",  # own storage
    "free",  # own storage
    "moment",  # own storages that are allocated and freed before the next event: at most so many bytes
    "taken",  # the last read of the gradient of a result
    "keep",  # autograd saves a tensor
    "use",  # a saved tensor is read
    "done",  # the reader of a saved tensor releases it
    "release",  # autograd releases it
    "give",  # an operand's gradient is computed
]


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a storage, a gradient of a result, a saved tensor or an operand's gradient, by index. `bytes` are
    those allocated."""

    what: EventKind
    index: int
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class ResultStorage:
    """A result: its storage, its form, and whether a gradient flows through it."""

    place: StorageRef
    form: Form
    flows: bool


@dataclass(frozen=True, slots=True)
class ForwardProfile:
    """The forward pass of a statement. `saved` are the tensors that autograd saves; None for one without a storage (a
    number). `attached` are held by a function itself and live as long as the graph."""

    events: tuple[Event, ...]
    results: tuple[ResultStorage, ...]
    saved: tuple[StorageRef | None, ...]
    attached: tuple[StorageRef, ...] = ()


@dataclass(frozen=True, slots=True)
class OperandGradient:
    """The gradient of an operand: its storage and form."""

    place: StorageRef
    form: Form


@dataclass(frozen=True)
class BackwardProfile:
    """The backward pass of a statement; `given` has the gradients of the operands that get one."""

    events: tuple[Event, ...]
    given: Mapping[int, OperandGradient]

    @cached_property
    def places(self) -> Mapping[StorageRef, int]:
        """The storages of the gradients that are given, with the number of gradients in each."""
        return dict(Counter(item.place for item in self.given.values()))


@dataclass(frozen=True, slots=True)
class Task:
    """A statement to profile: `text` is its expression, in which `x0`, `x1`, … are the operands; `flows` the
    operands that have a gradient."""

    text: str
    operands: tuple[Form, ...]
    flows: tuple[bool, ...]


class Prober(Protocol):
    """Profiles the memory of statements."""

    def compute(self, statement: Compute, types: Mapping[str, TensorType], copied: frozenset[str]) -> str:
        """The expression of an op; operands in `copied` are read as copies."""

    def change(self, step: RedistributionStep, dtypes: tuple[torch.dtype | None, torch.dtype | None]) -> str:
        """The expression of a step of a redistribution; `dtypes` as those of a `Redistribution`."""

    def forward(self, task: Task) -> ForwardProfile:
        """The profile of the forward pass of a task."""

    def backward(self, task: Task, gradients: tuple[Form | None, ...]) -> BackwardProfile:
        """The profile of its backward pass, given the forms of the gradients of its results."""


PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer states"
BUFFERS = "buffers"
INPUTS = "inputs"
OUTPUTS = "outputs"
ACTIVATIONS = "activations"
GATHERED = "gathered parameters"
COMMUNICATION = "communication buffers"
TRANSIENT = "transient tensors"

KINDS = (PARAMETERS, OPTIMIZER, BUFFERS, INPUTS, OUTPUTS, GRADIENTS, ACTIVATIONS, GATHERED, COMMUNICATION, TRANSIENT)
# Kinds that can be live across micro-batches.
STAYING = (GRADIENTS, GATHERED)


# Bytes by kind and by the block of the program that allocates them.
LiveBytes = Mapping[tuple[str, str], int]


@dataclass(frozen=True)
class MemoryPeak(MemoryUse):
    """Bytes on the busiest device at the peak of a step, by kind and by block of the program, and the statement that
    ran then."""

    bytes_by_block: Mapping[str, int]

    def beside(self, live: LiveBytes) -> "MemoryPeak":
        """The peak if these bytes are live, too."""
        kinds, blocks = Counter(self.bytes_by_kind), Counter(self.bytes_by_block)
        kinds.update(_by_kind(live))
        blocks.update(_by_block(live))
        return MemoryPeak(kinds, self.moment, blocks)


@dataclass
class Ledger:
    """Live bytes by kind and by the block of the program that allocates them. Every storage takes a multiple of `unit`
    bytes; gradients are added `in_place` where nothing else refers to them. `moment` is the statement that runs now,
    `block` the block that it is in."""

    unit: int = 1
    in_place: bool = True
    moment: str = ""
    block: str = ""
    live: Counter[tuple[str, str]] = field(default_factory=Counter)
    total: int = 0
    _peak_total: int = -1
    _peak_moment: str = ""
    _peak_live: LiveBytes = field(default_factory=dict)
    # Whether `live` is that of the peak: it is copied when it changes, not whenever a peak is passed on the way up.
    _is_at_peak: bool = False

    def add(self, kind: str, block: str, size: int) -> None:
        """Add `size` live bytes (negative: release)."""
        self.total += size
        if self.total > self._peak_total:
            self._peak_total, self._peak_moment, self._is_at_peak = self.total, self.moment, True
        elif self._is_at_peak:
            self._copy()
        self.live[kind, block] += size

    def pass_through(self, kind: str, size: int) -> None:
        """Add bytes of the block that runs, and release them."""
        self.add(kind, self.block, size)
        self.add(kind, self.block, -size)

    def turn(self, block: str, size: int, before: str, after: str) -> None:
        """Count `size` live bytes of one kind as another."""
        if self._is_at_peak:
            self._copy()
        self.live[before, block] -= size
        self.live[after, block] += size

    def by_kind(self) -> dict[str, int]:
        """Live bytes by kind."""
        return _by_kind(self.live)

    def take_peak(self) -> MemoryPeak:
        """The live bytes at their peak since the last call; the next one begins with those that are live now."""
        if self._is_at_peak:
            self._copy()
        found = MemoryPeak(_by_kind(self._peak_live), self._peak_moment, _by_block(self._peak_live))
        self._peak_total, self._peak_moment, self._is_at_peak = self.total, self.moment, True
        return found

    def _copy(self) -> None:
        self._peak_live, self._is_at_peak = dict(self.live), False


def _by_kind(live: LiveBytes) -> dict[str, int]:
    found = dict.fromkeys(KINDS, 0)
    for (kind, _), size in live.items():
        found[kind] += size
    return found


def _by_block(live: LiveBytes) -> dict[str, int]:
    found: Counter[str] = Counter()
    for (_, block), size in live.items():
        found[block] += size
    return dict(found)


class Storage:
    """Bytes on the device, live from its creation until nothing refers to it: Python counts its references as it does
    those of a tensor. It belongs to `block`, or else to the one that runs."""

    __slots__ = ("__weakref__", "_ledger", "block", "bytes", "kind")

    def __init__(self, ledger: Ledger, size: int, kind: str, block: str | None = None) -> None:
        self._ledger = ledger
        self.bytes = -(-size // ledger.unit) * ledger.unit
        self.kind = kind
        self.block = ledger.block if block is None else block
        ledger.add(kind, self.block, self.bytes)

    def turn(self, kind: str) -> None:
        """Change the kind of the storage."""
        self._ledger.turn(self.block, self.bytes, self.kind, kind)
        self.kind = kind

    def resize(self, size: int) -> None:
        """Free the memory and allocate another size, as the same storage."""
        change = -(-size // self._ledger.unit) * self._ledger.unit - self.bytes
        self.bytes += change
        if change:
            self._ledger.add(self.kind, self.block, change)

    def __del__(self) -> None:
        self._ledger.add(self.kind, self.block, -self.bytes)


@dataclass(frozen=True, slots=True)
class Gradient:
    """A gradient: its storage and form."""

    storage: Storage
    form: Form

    @property
    def is_alone(self) -> bool:
        """Whether nothing but this gradient refers to its storage."""
        return getrefcount(self.storage) == _ALONE


def _references_of_one() -> int:
    """Result of `getrefcount` for an object that one attribute refers to."""

    class Holder:
        held = object()

    return getrefcount(Holder.held)


_ALONE = _references_of_one()


@dataclass(eq=False, slots=True)
class Leaf:
    """A leaf of the graph: a parameter, or an input. `remaining` counts the uses that have not run backward, `gradient`
    is its `.grad`; `accumulated` is called when that is computed."""

    form: Form
    remaining: int = 0
    incoming: Gradient | None = None
    gradient: Storage | None = None
    accumulated: Callable[[], None] | None = None


@dataclass(eq=False, slots=True)
class Value:
    """A tensor of the simulation. If a gradient flows, `maker` is the node that computed it, as result `slot`."""

    storage: Storage
    form: Form
    maker: "GraphNode | Leaf | None" = None
    slot: int = 0

    @property
    def flows(self) -> bool:
        """Whether it has a gradient."""
        return self.maker is not None

    @property
    def edge(self) -> "Edge | None":
        """The target of its gradient; None where it has none."""
        return None if self.maker is None else (self.maker, self.slot)


@dataclass(eq=False, slots=True)
class Recomputable:
    """A result that the backward pass recomputes: its statement and operands, the number of its uses as a saved tensor,
    and its storage while it is recomputed."""

    task: Task
    sources: "tuple[Storage | Recomputable, ...]"
    uses: int = 0
    result: Storage | None = None

    def use(self) -> None:
        """Save it, by its operands."""
        if not self.uses:
            for source in self.sources:
                if isinstance(source, Recomputable):
                    source.use()
        self.uses += 1


@dataclass(eq=False, slots=True)
class Copy:
    """A copy of a region of which only the inputs are saved: `run` recomputes it and returns its saved tensors, by the
    numbers of statement and tensor. `nodes` are the statements that save tensors."""

    inputs: "list[Storage | Recomputable | None]"
    run: Callable[["Copy"], dict[tuple[int, int], Storage]]
    nodes: list[int] = field(default_factory=list)
    saved: dict[tuple[int, int], Storage] | None = None


@dataclass(frozen=True, slots=True)
class Recomputed:
    """A tensor that the recomputation of a copy saves."""

    copy: Copy
    place: tuple[int, int]


SavedTensor = Storage | Recomputable | Recomputed


class Noted:
    """The results of one forward pass that are recomputed. Each holds its operands until the next one is noted after
    its end."""

    def __init__(self) -> None:
        self._by_result: WeakKeyDictionary[Storage, Recomputable] = WeakKeyDictionary()
        self._all: list[tuple[ReferenceType[Storage], Recomputable]] = []

    def note(self, result: Storage, task: Task, sources: Sequence[Storage]) -> None:
        """Recompute `result` wherever it would be saved."""
        if all(result is not source for source in sources):
            self._all = [item for item in self._all if item[0]() is not None]
            made = Recomputable(task, tuple(self._by_result.get(source, source) for source in sources))
            self._by_result[result] = made
            self._all.append((ref(result), made))

    def keep(self, storage: Storage) -> Storage | Recomputable:
        """The entry to save in place of a storage."""
        made = self._by_result.get(storage)
        if made is None:
            return storage
        made.use()
        return made


@dataclass(eq=False, slots=True)
class GraphNode:
    """A node of the backward pass.

    Later statements have larger numbers. `edges` lead to the nodes that computed its operands. `gradients` are the
    accumulated gradients of its results, `before` runs first.
    """

    number: int
    edges: Sequence["Edge | None"]
    gradients: dict[int, Gradient] = field(default_factory=dict, init=False)
    before: list[Callable[[], None]] = field(default_factory=list, init=False)


@dataclass(eq=False, slots=True)
class AutogradNode(GraphNode):
    """A statement of a `block`. `saved` are its saved tensors, in the storages `places`; `attached` live as long as the
    node. `factor` is the number of the operand that the gradient of a weight is computed from apart; None for no such
    product."""

    name: str
    block: str
    task: Task
    places: Sequence[StorageRef | None]
    saved: list[SavedTensor | None]
    results: int
    attached: Sequence[Storage]
    factor: int | None = None


@dataclass(eq=False, slots=True)
class Skip(GraphNode):
    """Copies of a region that are counted and not run: in the forward pass each adds as much as the copy before them,
    in the backward pass as the copy after them. `above` is the number of the first node after that copy; `bulk` are the
    bytes that all hold until this pass ends, `stays` those that they hold longer, both by kind."""

    above: int
    copies: int
    stays: dict[str, Storage]
    bulk: dict[str, Storage] = field(default_factory=dict)
    live_before: Mapping[str, int] | None = None

    def count(self, ledger: Ledger, grown: Mapping[str, int]) -> None:
        """Add these bytes by kind for every copy (negative: release)."""
        for kind, size in sorted(grown.items(), key=lambda item: item[1]):
            if size:
                live = self.stays if kind in STAYING else self.bulk
                if kind not in live:
                    live[kind] = Storage(ledger, 0, kind)
                live[kind].resize(live[kind].bytes + size * self.copies)


@dataclass(eq=False, slots=True)
class Boundary(GraphNode):
    """Values that enter a unit, whose backward pass ends when they have their gradients: then `run` is called, and the
    gradients are passed on, with zeros for missing ones. `forms` are those of the values."""

    forms: Sequence[Form]
    run: Callable[[], None]


# The target of a gradient, and the number of its result.
Edge = tuple[GraphNode | Leaf, int]


def play(events: Sequence[Event], own: dict[int, Storage], ledger: Ledger, kind: str = TRANSIENT) -> None:
    """Run the allocations and frees of a list of events."""
    for event in events:
        if event.what == "allocate":
            own[event.index] = Storage(ledger, event.bytes, kind)
        elif event.what == "free":
            own.pop(event.index, None)
        elif event.what == "moment":
            ledger.pass_through(kind, event.bytes)


def compacted(events: Sequence[Event], unit: int) -> tuple[Event, ...]:
    """Events in fewer: storages that are allocated and freed with nothing but allocations and frees between count as
    the most bytes that they and those which stay take together, each a multiple of `unit`. So peaks are the same."""
    found: list[Event] = []
    for of_memory, group in groupby(events, lambda event: event.what in ("allocate", "free")):
        run = list(group)
        found += _compacted_run(run, unit) if of_memory and len(run) > 1 else run
    return tuple(found)


def _compacted_run(run: Sequence[Event], unit: int) -> Iterator[Event]:
    """Allocations and frees: the moment at which they take most, what they free, and what they leave."""
    live: dict[int, Event] = {}
    total = most = 0
    for event in run:
        if event.what == "allocate":
            live[event.index] = event
            total += -(-event.bytes // unit) * unit
            most = max(most, total)
        elif event.index in live:
            total -= -(-live.pop(event.index).bytes // unit) * unit
        else:
            # It was allocated earlier, and its bytes are not known here.
            if most > total:
                yield Event("moment", 0, most)
            yield from live.values()
            yield event
            live, total, most = {}, 0, 0
    if most > total:
        yield Event("moment", 0, most)
    yield from live.values()


def place_of(place: StorageRef, own: Mapping[int, Storage], operands: Sequence[Storage | None]) -> Storage:
    """The storage of a reference in a forward profile."""
    found = own[place.index] if place.origin == "own" else operands[place.index]
    assert found is not None
    return found


def rerun(made: Recomputable, ledger: Ledger, prober: Prober) -> Storage:
    """Recompute the result, which is live until its last use."""
    result = made.result
    if result is None:
        sources = [fetch(source, ledger, prober) for source in made.sources]
        profile = prober.forward(made.task)
        own: dict[int, Storage] = {}
        play(profile.events, own, ledger, COMMUNICATION)
        result = place_of(profile.results[0].place, own, sources)
    made.uses -= 1
    made.result = result if made.uses > 0 else None
    return result


def fetch(saved: SavedTensor, ledger: Ledger, prober: Prober) -> Storage:
    """The saved tensor, recomputed if need be."""
    if isinstance(saved, Storage):
        return saved
    if isinstance(saved, Recomputable):
        return rerun(saved, ledger, prober)
    if saved.copy.saved is None:
        saved.copy.saved = saved.copy.run(saved.copy)
    return saved.copy.saved.pop(saved.place)


def settle(storages: Sequence[Storage]) -> None:
    """Count the surviving results of a statement as activations."""
    for storage in storages:
        if storage.kind == TRANSIENT:
            storage.turn(ACTIVATIONS)


def assumed_forward(task: Task, results: Sequence[Form]) -> ForwardProfile:
    """Every result is a new tensor, and autograd saves all operands and results."""
    events = tuple(Event("allocate", index, form.bytes) for index, form in enumerate(results))
    trained = any(task.flows)
    made = tuple(
        ResultStorage(StorageRef("own", index), form, trained and form.dtype.is_floating_point)
        for index, form in enumerate(results)
    )
    operands = tuple(StorageRef("operand", index) for index in range(len(task.operands)))
    return ForwardProfile(events, made, (*operands, *(result.place for result in made)) if trained else ())


def assumed_backward(task: Task, gradients: Sequence[Form | None], forward: ForwardProfile) -> BackwardProfile:
    """All saved tensors are read, and every operand gets a new gradient, before anything is freed."""
    count = len(gradients)
    saved = range(len(forward.saved))
    given = {
        slot: OperandGradient(StorageRef("own", count + slot), Form.contiguous(form.shape, form.dtype))
        for slot, (form, flows) in enumerate(zip(task.operands, task.flows, strict=True))
        if flows
    }
    events = (
        *(Event("use", index) for index in saved),
        *(Event("allocate", item.place.index, item.form.bytes) for item in given.values()),
        *(Event("taken", slot) for slot, form in enumerate(gradients) if form is not None),
        *(Event("release", index) for index in saved),
        *(Event("give", slot) for slot in given),
    )
    return BackwardProfile(events, given)
