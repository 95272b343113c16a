"""The autograd graph of an abstract run: values, the nodes that made them, and what the nodes keep."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import ReferenceType, WeakKeyDictionary, ref

from passes.cost.liveness.ledger import ACTIVATIONS, COMMUNICATION, STAYING, TRANSIENT, Ledger, Storage
from passes.cost.liveness.profile import Event, EventKind, Form, Prober, StorageOrigin, StorageRef, Task


@dataclass(frozen=True, slots=True)
class Gradient:
    """A tensor: where it lies and its form."""

    storage: Storage
    form: Form


@dataclass(eq=False, slots=True)
class Leaf:
    """What gradients end in: a parameter, or an input. `remaining` counts the uses whose backward pass is to come,
    `gradient` is what stays in `.grad`; `accumulated` is called when it is there."""

    form: Form
    remaining: int = 0
    incoming: Gradient | None = None
    gradient: Storage | None = None
    accumulated: Callable[[], None] | None = None


@dataclass(eq=False, slots=True)
class Value:
    """A tensor of the run. If a gradient flows, `maker` and `slot` say from which result of what it comes."""

    storage: Storage
    form: Form
    maker: "AutogradNode | Leaf | Skip | Boundary | None" = None
    slot: int = 0

    @property
    def flows(self) -> bool:
        """Whether it has a gradient."""
        return self.maker is not None


@dataclass(eq=False, slots=True)
class Recomputable:
    """A result that the backward pass makes again: how and of what, how often it is kept, and itself while it is there
    again."""

    task: Task
    sources: "tuple[Storage | Recomputable, ...]"
    uses: int = 0
    again: Storage | None = None

    def use(self) -> None:
        """It is kept, by what it is made of."""
        if not self.uses:
            for source in self.sources:
                if isinstance(source, Recomputable):
                    source.use()
        self.uses += 1


@dataclass(eq=False, slots=True)
class Copy:
    """A copy of a region of which only the inputs are kept: `run` runs it again, and gives what it keeps, by the number
    of the statement and of the tensor. `nodes` are the statements that keep anything."""

    inputs: "list[Storage | Recomputable | None]"
    run: Callable[["Copy"], dict[tuple[int, int], Storage]]
    nodes: list[int] = field(default_factory=list)
    kept: dict[tuple[int, int], Storage] | None = None


@dataclass(frozen=True, slots=True)
class Recomputed:
    """A tensor that a copy keeps when it is run again."""

    copy: Copy
    place: tuple[int, int]


Kept = Storage | Recomputable | Recomputed


class Noted:
    """The results of one forward pass that are made again. Each holds what it is made of, until the next one is noted
    after its end."""

    def __init__(self) -> None:
        self._by_result: WeakKeyDictionary[Storage, Recomputable] = WeakKeyDictionary()
        self._all: list[tuple[ReferenceType[Storage], Recomputable]] = []

    def note(self, result: Storage, task: Task, sources: Sequence[Storage]) -> None:
        """Let `result` be made again wherever it would be kept."""
        if all(result is not source for source in sources):
            self._all = [item for item in self._all if item[0]() is not None]
            made = Recomputable(task, tuple(self._by_result.get(source, source) for source in sources))
            self._by_result[result] = made
            self._all.append((ref(result), made))

    def keep(self, storage: Storage) -> Storage | Recomputable:
        """What is kept instead of a storage."""
        made = self._by_result.get(storage)
        if made is None:
            return storage
        made.use()
        return made


@dataclass(eq=False, slots=True)
class AutogradNode:
    """A statement in the backward pass.

    `edges` lead to what made its operands, `kept` is what it keeps, `attached` what stays as long as it. `gradients`
    are those of its results that have come so far. Later statements have larger numbers. `before` is done first.
    """

    number: int
    name: str
    task: Task
    edges: Sequence["Edge | None"]
    kept: list[Kept | None]
    results: int
    attached: Sequence[Storage] = ()
    gradients: dict[int, Gradient] = field(default_factory=dict)
    before: list[Callable[[], None]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Skip:
    """Copies of a region that are like their neighbours: in the forward pass each adds as much as the copy before them,
    in the backward pass as the copy after them. `above` is the number of the first node after that copy; `bulk` is what
    all hold until this pass is over, `stays` what they hold longer, both by kind."""

    number: int
    above: int
    copies: int
    edges: Sequence["Edge | None"]
    stays: dict[str, Storage]
    bulk: dict[str, Storage] = field(default_factory=dict)
    gradients: dict[int, Gradient] = field(default_factory=dict)
    held_before: Mapping[str, int] | None = None
    before: list[Callable[[], None]] = field(default_factory=list)

    def count(self, ledger: Ledger, grown: Mapping[str, int]) -> None:
        """Let every copy add so many bytes by kind (fewer, below zero)."""
        for kind, size in sorted(grown.items(), key=lambda item: item[1]):
            if size:
                held = self.stays if kind in STAYING else self.bulk
                if kind not in held:
                    held[kind] = Storage(ledger, 0, kind)
                held[kind].resize(held[kind].bytes + size * self.copies)


@dataclass(eq=False, slots=True)
class Boundary:
    """Where values go into something of which the backward pass is over when they have their gradients: then `run` is
    called, and the gradients are passed on; where there is none, zeros. `forms` are those of the values."""

    number: int
    edges: Sequence["Edge | None"]
    forms: Sequence[Form]
    run: Callable[[], None]
    gradients: dict[int, Gradient] = field(default_factory=dict)
    before: list[Callable[[], None]] = field(default_factory=list)


# What a gradient goes to, and to which of its results.
Edge = tuple[AutogradNode | Leaf | Skip | Boundary, int]


def play(events: Sequence[Event], own: dict[int, Storage], ledger: Ledger, kind: str = TRANSIENT) -> None:
    """Let allocations and frees happen."""
    for event in events:
        if event.what is EventKind.ALLOCATE:
            own[event.index] = Storage(ledger, event.bytes, kind)
        elif event.what is EventKind.FREE:
            own.pop(event.index, None)


def place_of(place: StorageRef, own: Mapping[int, Storage], operands: Sequence[Storage | None]) -> Storage:
    """The storage at a place of a forward profile."""
    found = own[place.index] if place.origin is StorageOrigin.OWN else operands[place.index]
    assert found is not None
    return found


def make_again(made: Recomputable, ledger: Ledger, prober: Prober) -> Storage:
    """The result once more: until its last use it stays."""
    result = made.again
    if result is None:
        sources = [fetch(source, ledger, prober) for source in made.sources]
        profile = prober.forward(made.task)
        own: dict[int, Storage] = {}
        play(profile.events, own, ledger, COMMUNICATION)
        result = place_of(profile.results[0].place, own, sources)
    made.uses -= 1
    made.again = result if made.uses > 0 else None
    return result


def fetch(kept: Kept, ledger: Ledger, prober: Prober) -> Storage:
    """What was kept, or what is made of it."""
    if isinstance(kept, Storage):
        return kept
    if isinstance(kept, Recomputable):
        return make_again(kept, ledger, prober)
    if kept.copy.kept is None:
        kept.copy.kept = kept.copy.run(kept.copy)
    return kept.copy.kept.pop(kept.place)


def settle(storages: Sequence[Storage]) -> None:
    """What stays of a statement is an activation."""
    for storage in storages:
        if storage.kind == TRANSIENT:
            storage.turn(ACTIVATIONS)
