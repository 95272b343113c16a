"""candidates: a folded program, a mesh and a cluster in; the planning problem out.

For every op the strategies that its rule allows and that divide, with their price; for parameters, inputs and outputs
the layouts that they may have; and who reads what from whom.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product
from math import prod

import torch

from passes.cost.cluster import Cluster
from passes.cost.fusion import joined
from passes.cost.price import OpPrices, cover, update_seconds
from passes.cost.workspace import workspace
from passes.ir.choices import Cover, Edge, Group, Memory, Node, Problem, Strategy
from passes.ir.demands import Demand, Demands
from passes.ir.errors import ConstraintError
from passes.ir.figures import as_float
from passes.ir.layout import I, Layout, Letter, R, fits, is_dtensor, local_shape
from passes.ir.mesh import Mesh
from passes.ir.program import Folded, Region, dependents, references
from passes.proposing.demanded import meeting
from passes.proposing.kept import handed_on, is_viewing, kept_by, uses_remade, uses_viewed
from passes.proposing.places import Placed, place
from passes.proposing.storage import storage
from passes.rules.cheap import is_cheap
from passes.rules.rule import replicated
from passes.rules.strategies import Choices, Digit, Offer, Subject, combine, op_strategies, subject
from passes.rules.strides import strided
from passes.rules.travel import travel


@dataclass(frozen=True)
class Setting:
    """What candidates are made for.

    `optimizer_states` is how many tensors of its size the optimizer keeps per parameter; `master` the dtype that
    parameters are stored in (None: as they are), `reduce` the one that their gradients are reduced in. `offers` has,
    for nodes by their keys, what they may do on each axis; nodes that are not among them may do anything.
    """

    mesh: Mesh
    cluster: Cluster
    optimizer_states: int = 2
    master: torch.dtype | None = None
    reduce: torch.dtype | None = None
    offers: Mapping[str, Offer] = field(default_factory=dict)


def candidates(folded: Folded, demands: Demands, setting: Setting) -> Problem:
    """The planning problem of `folded`.

    Raises ConstraintError where a demand leaves an op or parameter without any strategy.
    """
    return _Builder(folded, demands, setting).build()


@dataclass
class _Builder:
    folded: Folded
    demands: Demands
    setting: Setting
    nodes: list[Node] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    group_index: dict[tuple[object, ...], int] = field(default_factory=dict)
    index: dict[str, int] = field(default_factory=dict)
    sizes: dict[tuple[str, Layout], float] = field(default_factory=dict)

    def build(self) -> Problem:
        folded = self.folded
        program = folded.program
        self.types = folded.types
        self.flowing = folded.flowing
        self.fused = joined(folded)
        self.placed, self.blocks = place(folded)
        self.parameters = {item.name: (item.trainable, 1) for item in program.parameters}
        self.fixed = {item.name for item in program.buffers} | set(program.constants)
        trainable = {item.name for item in program.parameters if item.trainable}
        for region in folded.regions:
            for own, names in region.owned.items():
                if names[0] in self.parameters:
                    self.parameters[own] = (names[0] in trainable, region.count)
                else:
                    self.fixed.add(own)
        self.depends = dependents(folded)
        self.strided = strided(folded)
        self.digits, self.letters = self._travel()
        self.producers: dict[str, tuple[int, int]] = {}
        self.followed: dict[Demand, bool] = {}
        self.saved = {item.op.key: kept_by(self._subject(item)) for item in self.placed}
        self.handed_on = handed_on(folded, self.placed, self.strided)
        self._inputs()
        self._fixed()
        self._ops()
        self._refuse_unfollowed()
        self._parameters()
        self._connect()
        self._outputs()
        counts = [1] * len(self.blocks)
        covers = [Cover()] * len(self.blocks)
        mesh, cluster = self.setting.mesh, self.setting.cluster
        for number, region in enumerate(self.folded.regions):
            counts[2 * number + 1] = region.count
            covers[2 * number + 1] = cover(
                region.ops, self.types, self.flowing, cluster, mesh.size, region.count, self.fused
            )
        return Problem(self.nodes, self.edges, self.groups, self.blocks, counts, self.index, covers)

    # --- what may be split where ---

    def _travel(self) -> tuple[dict[int, list[list[Digit]]], dict[int, dict[str, set[Letter]]]]:
        """For every size of axis the digits of each op and the splits of each tensor."""
        same: list[tuple[str, ...]] = []
        for region in self.folded.regions:
            same += [(carry.argument, carry.initial, carry.next) for carry in region.carries]
            same += [(export.value, *(name for name in export.names if name)) for export in region.exports]
        ops = [(placed.op, placed.rule) for placed in self.placed]
        found: dict[int, list[list[Digit]]] = {}
        letters: dict[int, dict[str, set[Letter]]] = {}
        for size in set(self.setting.mesh.sizes) - {1}:
            found[size], letters[size] = travel(ops, same, self._demanded(size), size)
        return found, letters

    def _demanded(self, size: int) -> dict[str, list[Letter]]:
        """Splits that are demanded of tensors on an axis of `size`."""
        offered: dict[str, list[Letter]] = {}
        for placed in self.placed:
            op = placed.op
            for slot, name in enumerate(op.operands):
                places = [self.demands.at("in", op.results[0], str(slot)), self.demands.at("used", self._real(name))]
                for demand in (demand for each in places for demand in each.items()):
                    self._offer(offered, name, demand, size)
            for index, name in enumerate(op.results):
                for demand in self.demands.at("out", op.results[0], str(index)).items():
                    self._offer(offered, name, demand, size)
        return offered

    def _offer(self, offered: dict[str, list[Letter]], name: str, demand: tuple[int, Demand], size: int) -> None:
        axis, wanted = demand
        if wanted.letter is not None and wanted.letter.kind == "S" and self.setting.mesh.sizes[axis] == size:
            offered.setdefault(name, []).append(wanted.letter)

    def _real(self, name: str) -> str:
        """The name in the program of what a region calls `name`."""
        for region in self.folded.regions:
            if name in region.owned:
                return region.owned[name][0]
        return name

    # --- nodes ---

    def _add(self, node: Node) -> int:
        if not node.strategies:
            raise AssertionError(f"{node.key} has no strategy")
        self.index[node.key] = len(self.nodes)
        self.nodes.append(node)
        return len(self.nodes) - 1

    def _layouts(self, name: str, others: Sequence[Letter], key: str) -> list[Layout]:
        """The layouts of a tensor from `others` and the splits that reached it, where they divide and, if there is an
        offer for `key`, are offered."""
        mesh, type = self.setting.mesh, self.types[name]
        offer = self.setting.offers.get(key, (None,) * len(mesh.sizes))
        options = [
            [*others, *sorted(self.letters[size].get(name, ()))] if size != 1 else list(others[:1])
            for size in mesh.sizes
        ]
        options = [
            [letter for letter in letters if offered is None or letter_token(letter) in offered]
            for letters, offered in zip(options, offer, strict=True)
        ]
        return [layout for layout in product(*options) if fits(type.shape, layout, mesh)]

    def _inputs(self) -> None:
        """Inputs may lie in any layout that DTensor can express; what a rank needs of them it must be given."""
        for item in self.folded.program.inputs:
            whole = I if item.name in self.flowing else R
            layouts = [
                layout
                for layout in self._layouts(item.name, [whole], item.name)
                if is_dtensor(layout, self.setting.mesh)
            ]
            seconds = tuple(self._bytes(item.name, layout) / self.setting.cluster.host for layout in layouts)
            # The caller holds the whole batch, beside which this rank's part of it lies.
            batch, split = as_float(self.types[item.name].bytes), [set(layout) - {whole} for layout in layouts]
            memory = tuple(
                Memory(held=batch + (self._bytes(item.name, layout) if parts else 0.0))
                for layout, parts in zip(layouts, split, strict=True)
            )
            self._source(item.name, "input", layouts, seconds, memory)

    def _fixed(self) -> None:
        """Buffers and constants are whole on every rank."""
        layout = (R,) * len(self.setting.mesh.sizes)
        for name in sorted(self.fixed):
            memory = (Memory(held=as_float(self.types[name].bytes)),)
            self._source(name, "buffer", [layout], (0.0,), memory)

    def _source(
        self,
        name: str,
        kind: str,
        layouts: Sequence[Layout],
        seconds: tuple[float, ...],
        memory: tuple[Memory, ...],
        block: int = 0,
        count: int = 1,
    ) -> int:
        strategies = tuple(Strategy(tuple(map(str, layout)), (), (layout,)) for layout in layouts)
        index = self._add(Node(name, kind, name, count, block, strategies, seconds, memory))
        self.producers[name] = (index, 0)
        return index

    def _bytes(self, name: str, layout: Layout) -> float:
        if (name, layout) not in self.sizes:
            type, mesh = self.types[name], self.setting.mesh
            self.sizes[name, layout] = as_float(prod(local_shape(type.shape, layout, mesh)) * type.dtype.itemsize)
        return self.sizes[name, layout]

    def _all_bytes(self, names: Sequence[str], layouts: Sequence[Layout], among: Iterable[int] | None = None) -> float:
        """The bytes of these tensors together, or of those `among` them."""
        return sum(self._bytes(names[slot], layouts[slot]) for slot in (range(len(names)) if among is None else among))

    def _ops(self) -> None:
        """Carried tensors and ops."""
        for number, region in enumerate(self.folded.regions):
            block = 2 * number + 1
            for carry in region.carries:
                letters = [I, R] if carry.argument in self.flowing else [R]
                key = f"{region.name}/carry" + (f".{carry.argument[7:]}" if len(region.carries) > 1 else "")
                layouts = self._layouts(carry.argument, letters, key)
                strategies = tuple(Strategy(tuple(map(str, layout)), (layout,), (layout,)) for layout in layouts)
                zeros = (0.0,) * len(strategies)
                memory = (Memory(),) * len(strategies)
                results = tuple(region.count * self._bytes(carry.argument, layout) for layout in layouts)
                node = Node(
                    key, "carry", carry.argument, region.count, block, strategies, zeros, memory, results=results
                )
                self.producers[carry.argument] = (self._add(node), 0)
        for position, placed in enumerate(self.placed):
            self._op(position, placed)

    def _subject(self, placed: Placed) -> Subject:
        return subject(placed.op, placed.rule, self.types, self.flowing, set(self.parameters), self.strided)

    def _op(self, position: int, placed: Placed) -> None:
        op, count, setting = placed.op, placed.count, self.setting
        mesh = setting.mesh
        about = self._subject(placed)
        if self._negligible(about):
            whole = (replicated(len(op.operands), len(op.results), R),) * len(mesh.sizes)
            choices_of = {combine(about, whole): whole}
            strategies = list(choices_of)
        else:
            digits = {size: found[position] for size, found in self.digits.items()}
            choices_of = op_strategies(about, digits, mesh, setting.offers.get(op.key))
            strategies = meeting(about, list(choices_of), self.demands, self._real, mesh, self.followed)
        prices = OpPrices(about, setting.cluster, mesh, self.fused.get(op.results[0]))
        seconds = [prices.seconds(choices_of[strategy], strategy) for strategy in strategies]
        bodies = [_bodies(placed, choices_of[strategy]) for strategy in strategies]
        results = [self._all_bytes(op.results, strategy.results) for strategy in strategies]
        needs = [
            self._workspace(about, strategy, each, size)
            for strategy, each, size in zip(strategies, bodies, results, strict=True)
        ]
        saved = self.saved[op.key]
        copied = [item.index for item in saved if item.copy]
        copies = [self._all_bytes(op.operands, strategy.operands, copied) for strategy in strategies]
        index = self._add(
            Node(
                op.key,
                "op",
                op.results[0],
                count,
                placed.block,
                tuple(strategies),
                tuple(count * (forward + backward) for forward, backward in seconds),
                tuple(Memory(transient=backward) for _, backward in needs),
                any(item.result for item in saved),
                tuple(count * size for size in results),
                tuple(count * (size + kept) for size, (kept, _) in zip(copies, needs, strict=True)),
                tuple(count * forward for forward, _ in seconds),
                self._light(placed, about, bodies),
                is_viewing(placed, self.strided),
            )
        )
        self.producers.update({name: (index, number) for number, name in enumerate(op.results)})

    def _workspace(
        self, about: Subject, strategy: Strategy, bodies: Sequence[str], result: float
    ) -> tuple[float, float]:
        """What an op keeps, and what its backward pass has there, besides its operands and its `result` bytes."""
        if not about.flows:
            return 0.0, 0.0
        pairs = zip(about.op.operands, strategy.operands, strict=True)
        operands = [self._bytes(name, layout) for name, layout in pairs]
        return workspace(about.op, bodies, operands, about.flowing_operands, result)

    def _light(self, placed: Placed, about: Subject, bodies: Sequence[tuple[str, ...]]) -> tuple[bool, ...]:
        """Whether an op runs again where recompute is selective, for each of its strategies."""
        op, rule = placed.op, placed.rule
        if rule is None or op.results[0] in self.handed_on:
            return (False,) * len(bodies)
        is_light = cache(partial(is_cheap, op, rule, about.copies))
        return tuple(is_light(each) for each in bodies)

    def _negligible(self, about: Subject) -> bool:
        """Whether an op on positions or masks takes no longer whole than starting it does: splitting gains nothing."""
        if about.flows or any(name in self.depends for name in about.op.operands):
            return False
        touched = sum(type.bytes for type in (*about.operands, *about.results))
        return touched / self.setting.cluster.device.bandwidth <= self.setting.cluster.device.launch

    def _refuse_unfollowed(self) -> None:
        """Raise where no op of a module can follow the method that is demanded of it."""
        for demand, followed in self.followed.items():
            if not followed:
                raise ConstraintError(
                    f"constraint {demand.pattern!r}, method {demand.method} on axis "
                    f"{self.setting.mesh.names[demand.axis]!r} cannot be met: no op of the module has that method"
                )

    def _parameters(self) -> None:
        """Parameters may be stored as they are used, and split further on the axes where all ranks use the same."""
        uses: dict[str, set[Layout]] = {}
        blocks: dict[str, int] = {}
        for placed in self.placed:
            index = self.index[placed.op.key]
            for slot, name in enumerate(placed.op.operands):
                if name in self.parameters:
                    uses.setdefault(name, set()).update(item.operands[slot] for item in self.nodes[index].strategies)
                    blocks.setdefault(name, placed.block)
        owned = {name for region in self.folded.regions for names in region.owned.values() for name in names}
        for name, (trainable, count) in self.parameters.items():
            if name in owned:
                continue
            demanded = self.demands.at("stored", self._real(name))
            layouts = storage(
                name, self.types[name].shape, uses.get(name, set()), trainable, demanded, self.setting.mesh
            )
            updated = trainable and name in uses
            seconds = tuple(count * self._update_seconds(name, layout) if updated else 0.0 for layout in layouts)
            memory = tuple(self._parameter_memory(name, layout, updated, count) for layout in layouts)
            self._source(name, "parameter", layouts, seconds, memory, blocks.get(name, 0), count)

    def _stored_itemsize(self, name: str) -> int:
        return (self.setting.master or self.types[name].dtype).itemsize

    def _update_seconds(self, name: str, layout: Layout) -> float:
        size = prod(local_shape(self.types[name].shape, layout, self.setting.mesh)) * self._stored_itemsize(name)
        return update_seconds(size, self.setting.optimizer_states, self.setting.cluster)

    def _parameter_memory(self, name: str, layout: Layout, updated: bool, count: int) -> Memory:
        size = (
            count * prod(local_shape(self.types[name].shape, layout, self.setting.mesh)) * self._stored_itemsize(name)
        )
        if not updated:
            return Memory(held=as_float(size))
        return Memory(held=as_float(size * (1 + self.setting.optimizer_states)), gradient=as_float(size))

    # --- edges ---

    def _group(
        self, key: tuple[object, ...], name: str, count: int, block: int, parameter: bool, inside: bool = False
    ) -> int:
        if key not in self.group_index:
            self.group_index[key] = len(self.groups)
            type = self.types[name]
            itemsize = (self.setting.reduce or type.dtype).itemsize if parameter else type.dtype.itemsize
            flows = name in self.flowing
            strided = name in self.strided
            self.groups.append(Group(name, type, count, block, flows, itemsize, parameter, strided, inside))
        return self.group_index[key]

    def _connect(self) -> None:
        """Every operand of every op to what makes it."""
        exported: dict[str, tuple[Region, str]] = {}
        inner: dict[str, Region] = {}
        for region in self.folded.regions:
            inner.update({name: region for op in region.ops for name in op.results})
            inner.update({carry.argument: region for carry in region.carries})
            for export in region.exports:
                exported.update({name: (region, export.value) for name in export.names if name})
        self.exported = exported
        light = {key: self.nodes[index].light for key, index in self.index.items()}
        remade = {use for region in self.folded.regions for use in uses_remade(self._inside(region), self.saved, light)}
        viewed = uses_viewed(self.placed, self.saved, self.strided)
        for placed in self.placed:
            consumer = self.index[placed.op.key]
            kept = {item.index for item in self.saved[placed.op.key] if not item.result and not item.copy}
            for slot, name in enumerate(placed.op.operands):
                if name in self.parameters:
                    group = self._group(
                        ("use", consumer, slot), name, placed.count, placed.block, True, placed.region is not None
                    )
                elif name in inner:
                    group = self._group(("inside", name), name, placed.count, placed.block, False, True)
                else:
                    group = self._group(("outside", name), name, 1, placed.block, False)
                stays = slot in kept or (placed.op.key, slot) in viewed
                self._edge(name, consumer, slot, group, stays, (placed.op.key, slot) in remade)
        for number, region in enumerate(self.folded.regions):
            block = 2 * number + 1
            for carry in region.carries:
                consumer, _ = self.producers[carry.argument]
                if carry.initial in self.parameters:
                    group = self._group(("use", consumer, "initial"), carry.initial, 1, block - 1, True)
                else:
                    group = self._group(("outside", carry.initial), carry.initial, 1, block, False)
                self._edge(carry.initial, consumer, 0, group, False)
                group = self._group(("carry", carry.argument), carry.next, region.count - 1, block, False)
                self._edge(carry.next, consumer, 0, group, False)

    def _inside(self, region: Region) -> list[Placed]:
        return [placed for placed in self.placed if placed.region is region]

    def _edge(self, name: str, consumer: int, slot: int, group: int, saved: bool, remade: bool = False) -> None:
        producer, result = self.producers[self.exported[name][1] if name in self.exported else name]
        self.edges.append(Edge(producer, result, consumer, slot, group, saved, remade))

    def _outputs(self) -> None:
        """What the program returns, and the new values of buffers, which are whole."""
        program = self.folded.program
        mesh = self.setting.mesh
        wanted: dict[str, list[str]] = {}
        for label, value in zip(program.output_names, program.outputs, strict=True):
            for name in references(value):
                source = self.exported[name][1] if name in self.exported else name
                wanted.setdefault(source, []).append(label)
        for source, labels in wanted.items():
            whole = I if source in self.flowing else R
            layouts = [
                layout for layout in self._layouts(source, [whole], f"output {labels[0]}") if is_dtensor(layout, mesh)
            ]
            self._sink(f"output {labels[0]}", source, layouts, len(labels))
        for update in program.updates:
            source = self.exported[update.value][1] if update.value in self.exported else update.value
            whole = I if source in self.flowing else R
            self._sink(f"update {update.buffer}", source, [(whole,) * len(mesh.sizes)], 1)

    def _sink(self, key: str, source: str, layouts: Sequence[Layout], count: int) -> None:
        strategies = tuple(Strategy(tuple(map(str, layout)), (layout,), ()) for layout in layouts)
        zeros, block = (0.0,) * len(layouts), len(self.blocks) - 1
        memory = tuple(Memory(held=count * self._bytes(source, layout)) for layout in layouts)
        node = self._add(Node(key, "output", source, count, block, strategies, zeros, memory))
        parameter = source in self.parameters
        group = self._group(("output", source), source, count, block, parameter)
        producer, result = self.producers[source]
        self.edges.append(Edge(producer, result, node, 0, group, False))


def letter_token(letter: Letter) -> str:
    """A letter in an offer: a split by its dim alone."""
    return f"S({letter.dim})" if letter.kind == "S" else letter.kind


def _bodies(placed: Placed, choices: Choices) -> tuple[str, ...]:
    """The local forms that run for these choices, by axis."""
    return tuple(placed.rule.bodies.get(choice.factor, "") for choice in choices) if placed.rule else ()
