"""The simulated backward pass, in autograd's order: nodes that were created later run first."""

from collections.abc import Mapping, Sequence

from passes.cost.liveness.fsdp_units import FSDPSimulation
from passes.cost.liveness.graph import (
    GRADIENTS,
    TRANSIENT,
    AutogradNode,
    Boundary,
    Edge,
    Form,
    Gradient,
    GraphNode,
    Leaf,
    Ledger,
    Prober,
    Skip,
    Storage,
    StorageRef,
    Value,
    fetch,
)


def run_backward(roots: Sequence[Value], ledger: Ledger, prober: Prober, fsdp: FSDPSimulation) -> Mapping[str, int]:
    """Run the backward pass from `roots`, whose gradients are new tensors of the same form, and end it for the units of
    `fsdp`. Returns the bytes by kind that are live before that: those that wait for gradients of weights which are
    computed apart among them."""
    waiting: list[Storage] = []
    nodes = _reached(roots)
    for node in nodes:
        for edge in node.edges:
            if edge is not None and isinstance(edge[0], Leaf):
                edge[0].remaining += 1
    skips = [node for node in nodes if isinstance(node, Skip)]
    # The caller of a backward pass holds these until it ends.
    begun = []
    for root in roots:
        assert root.maker is not None
        form = Form.contiguous(root.form.shape, root.form.dtype)
        begun.append(Storage(ledger, form.bytes, TRANSIENT))
        _give((root.maker, root.slot), Gradient(begun[-1], form), ledger)
    nodes.sort(key=lambda node: node.number)
    while nodes:
        node = nodes.pop()
        for skip in skips:
            if skip.live_before is None and node.number < skip.above:
                skip.live_before = ledger.by_kind()
        for act in node.before:
            act()
        node.before.clear()
        if isinstance(node, Boundary):
            _pass(node, ledger)
        elif isinstance(node, Skip):
            _skip(node, ledger)
        elif isinstance(node, AutogradNode):
            ledger.moment, ledger.block = f"backward of {node.name}", node.block
            _run(node, ledger, prober, waiting)
        for edge in node.edges:
            if edge is not None and isinstance(edge[0], Leaf):
                edge[0].remaining -= 1
                if not edge[0].remaining:
                    _accumulate(edge[0], ledger)
    live = ledger.by_kind()
    waiting.clear()
    fsdp.end_backward()
    for skip in skips:
        # What their gradients are reduced in goes with that of the copies that are run.
        skip.bulk.clear()
    fsdp.end_reductions()
    return live


def _reached(roots: Sequence[Value]) -> list[GraphNode]:
    found: dict[int, GraphNode] = {}
    waiting = [root.maker for root in roots]
    while waiting:
        node = waiting.pop()
        if isinstance(node, GraphNode) and id(node) not in found:
            found[id(node)] = node
            waiting += [edge[0] for edge in node.edges if edge is not None]
    return list(found.values())


def _run(node: AutogradNode, ledger: Ledger, prober: Prober, waiting: list[Storage]) -> None:
    """Run the backward pass of a node; what the gradient of a weight needs that is computed apart goes to `waiting`."""
    forms = tuple(node.gradients[slot].form if slot in node.gradients else None for slot in range(node.results))
    if not node.gradients:
        node.saved = [None] * len(node.saved)
        return
    profile = prober.backward(node.task, forms)
    own: dict[int, Storage] = {}
    read: dict[int, Storage] = {}
    # A gradient may be a saved tensor itself.
    places = node.places
    if node.factor is not None:
        waiting += [gradient.storage for gradient in node.gradients.values()]
    passed_on = profile.places.keys() & places
    lingering: dict[StorageRef, Storage] = {}
    ungiven = dict(profile.places)
    for event in profile.events:
        if event.what == "allocate":
            own[event.index] = Storage(ledger, event.bytes, TRANSIENT)
        elif event.what == "free":
            own.pop(event.index, None)
        elif event.what == "moment":
            ledger.pass_through(TRANSIENT, event.bytes)
        elif event.what == "taken":
            node.gradients.pop(event.index, None)
        elif event.what == "use":
            saved = node.saved[event.index]
            if saved is not None and not isinstance(saved, Storage) and event.index not in read:
                moment = ledger.moment
                read[event.index] = fetch(saved, ledger, prober)
                ledger.moment = moment
            if node.factor is not None and places[event.index] == StorageRef("operand", node.factor):
                waiting.append(saved if isinstance(saved, Storage) else read[event.index])
            del saved
        elif event.what in ("done", "release"):
            # A recomputed tensor is held by its reader alone, which may release it before the node does.
            found = read.pop(event.index, None)
            if event.what == "release":
                saved, node.saved[event.index] = node.saved[event.index], None
                found = saved if isinstance(saved, Storage) else found
                del saved
            place = places[event.index]
            if place in passed_on and found is not None and place is not None:
                lingering[place] = found
            del found
        else:
            given = profile.given[event.index]
            edge = node.edges[event.index]
            ungiven[given.place] -= 1
            if edge is not None:
                moved = _give(edge, Gradient(_place(given.place, node, own, lingering), given.form), ledger)
                if moved and given.place.origin == "own" and not ungiven[given.place]:
                    del own[given.place.index]
    node.gradients.clear()


def _place(
    place: StorageRef, node: AutogradNode, own: dict[int, Storage], lingering: dict[StorageRef, Storage]
) -> Storage:
    if place in lingering:
        return lingering[place]
    return node.gradients[place.index].storage if place.origin == "gradient" else own[place.index]


def _give(edge: Edge, gradient: Gradient, ledger: Ledger) -> bool:
    """Accumulate a gradient of a result as torch does (`torch/csrc/autograd/input_buffer.cpp`): the next one is added
    to the first in place, if that is dense and nothing else refers to it, and otherwise the sum is a new tensor.
    Returns whether it is the first."""
    target, slot = edge
    before = target.incoming if isinstance(target, Leaf) else target.gradients.get(slot)
    if before is not None:
        if ledger.in_place and before.form.dense and before.is_alone:
            return False
        form = before.form if not before.form.spread else gradient.form
        if form.spread:
            form = Form.contiguous(form.shape, form.dtype)
        gradient = Gradient(Storage(ledger, form.bytes, TRANSIENT), form)
    if isinstance(target, Leaf):
        target.incoming = gradient
    else:
        target.gradients[slot] = gradient
    return before is None


def _accumulate(leaf: Leaf, ledger: Ledger) -> None:
    """Accumulate the gradient of a leaf: the first one becomes its gradient without a copy if it has the leaf's form; a
    later one is added in place."""
    incoming, leaf.incoming = leaf.incoming, None
    if incoming is None:
        return
    if leaf.gradient is None:
        storage = incoming.storage
        if incoming.form.stride != leaf.form.stride or storage.kind != TRANSIENT:
            storage = Storage(ledger, leaf.form.bytes, GRADIENTS)
        else:
            storage.turn(GRADIENTS)
        leaf.gradient = storage
        del storage
    del incoming
    if leaf.accumulated is not None:
        leaf.accumulated()


def _skip(skip: Skip, ledger: Ledger) -> None:
    """The backward pass of all skipped copies at once: first the releases, then the allocations."""
    assert skip.live_before is not None
    ledger.moment = "backward of equal copies"
    grown = {kind: size - skip.live_before[kind] for kind, size in ledger.by_kind().items()}
    skip.count(ledger, grown)
    for slot, edge in enumerate(skip.edges):
        gradient = skip.gradients.pop(slot, None)
        if edge is not None and gradient is not None:
            _give(edge, gradient, ledger)


def _pass(boundary: Boundary, ledger: Ledger) -> None:
    """Call the boundaries that end here, and pass the gradients on."""
    for slot, form in enumerate(boundary.forms):
        if slot not in boundary.gradients:
            zeros = Form.contiguous(form.shape, form.dtype)
            boundary.gradients[slot] = Gradient(Storage(ledger, zeros.bytes, TRANSIENT), zeros)
    boundary.run()
    for slot, edge in enumerate(boundary.edges):
        gradient = boundary.gradients.pop(slot)
        if edge is not None:
            _give(edge, gradient, ledger)
