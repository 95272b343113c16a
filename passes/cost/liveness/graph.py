"""The autograd graph of an abstract run: values, the nodes that made them, and what the nodes keep."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from passes.cost.liveness.ledger import ACTIVATIONS, COMMUNICATION, TRANSIENT, Ledger, Storage
from passes.cost.liveness.profile import Event, Form, Happening, Origin, Place, Prober, Task


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor: where it lies and its form."""

    storage: Storage
    form: Form


@dataclass(eq=False, slots=True)
class Leaf:
    """What gradients end in: a parameter, or an input. `remaining` counts the uses whose backward pass is to come,
    `gradient` is what stays in `.grad`."""

    form: Form
    remaining: int = 0
    incoming: Held | None = None
    gradient: Storage | None = None


@dataclass(eq=False, slots=True)
class Value:
    """A tensor of the run. If a gradient flows, `maker` and `slot` say from which result of what it comes."""

    storage: Storage
    form: Form
    maker: "Node | Leaf | Skip | None" = None
    slot: int = 0

    @property
    def flows(self) -> bool:
        """Whether it has a gradient."""
        return self.maker is not None


@dataclass(eq=False, slots=True)
class Gathered:
    """A result that the backward pass makes again: how and of what, how often it is kept, and itself while it is there
    again."""

    task: Task
    source: Storage
    uses: int = 0
    kept: "Storage | Gathered | None" = None
    again: Storage | None = None


Kept = Storage | Gathered


class Noted:
    """The results of one forward pass that are made again. What they are made of stays as long as this does."""

    def __init__(self) -> None:
        self._by_result: WeakKeyDictionary[Storage, Gathered] = WeakKeyDictionary()
        self._all: list[Gathered] = []

    def note(self, result: Storage, task: Task, source: Storage) -> None:
        """Let `result` be made again wherever it would be kept."""
        if result is not source:
            gathered = Gathered(task, source)
            self._by_result[result] = gathered
            self._all.append(gathered)

    def keep(self, storage: Storage) -> Kept:
        """What is kept instead of a storage."""
        gathered = self._by_result.get(storage)
        if gathered is None:
            return storage
        if gathered.kept is None:
            gathered.kept = self.keep(gathered.source)
        gathered.uses += 1
        return gathered


@dataclass(eq=False, slots=True)
class Node:
    """A statement in the backward pass.

    `edges` lead to what made its operands, `kept` is what it keeps; `gradients` are those of its results that have come
    so far. Later statements have larger numbers.
    """

    number: int
    name: str
    task: Task
    edges: Sequence[tuple["Node | Leaf | Skip", int] | None]
    kept: list[Kept | None]
    results: int
    gradients: dict[int, Held] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Skip:
    """Copies of a region that are like their neighbours, in the backward pass: each keeps as much as the copy before
    them, and leaves as much in gradients as the copy after them. `above` is the number of the first node after that
    copy; `bulk` is what all keep."""

    number: int
    above: int
    copies: int
    edges: Sequence[tuple["Node | Leaf | Skip", int] | None]
    bulk: list[Storage]
    gradients: dict[int, Held] = field(default_factory=dict)
    before: Mapping[str, int] | None = None


def play(events: Sequence[Event], own: dict[int, Storage], ledger: Ledger, kind: str = TRANSIENT) -> None:
    """Let allocations and frees happen."""
    for event in events:
        if event.what is Happening.ALLOCATE:
            own[event.index] = Storage(ledger, event.bytes, kind)
        elif event.what is Happening.FREE:
            own.pop(event.index, None)


def place_of(place: Place, own: Mapping[int, Storage], operands: Sequence[Storage | None]) -> Storage:
    """The storage at a place of a forward profile."""
    found = own[place.index] if place.origin is Origin.OWN else operands[place.index]
    assert found is not None
    return found


def make_again(gathered: Gathered, ledger: Ledger, prober: Prober) -> Storage:
    """The result once more: until its last use it stays."""
    result = gathered.again
    if result is None:
        assert gathered.kept is not None
        source = make_again(gathered.kept, ledger, prober) if isinstance(gathered.kept, Gathered) else gathered.kept
        profile = prober.forward(gathered.task)
        own: dict[int, Storage] = {}
        play(profile.events, own, ledger, COMMUNICATION)
        result = place_of(profile.results[0].place, own, (source,))
    gathered.uses -= 1
    gathered.again = result if gathered.uses > 0 else None
    return result


def settle(storages: Sequence[Storage]) -> None:
    """What stays of a statement is an activation."""
    for storage in storages:
        if storage.kind == TRANSIENT:
            storage.turn(ACTIVATIONS)
