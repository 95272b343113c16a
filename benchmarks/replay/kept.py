"""Saved tensors of a program whose pointwise chains are fused.

Products and fused attention keep their operands, as their libraries do. A chain of cheap ops keeps the fewest bytes
that its backward pass can be computed from again: a minimum cut, which is how compilers choose too (He and Yu 2023,
"Transcending runtime-memory tradeoffs in checkpointing by being fusion aware"). Layout changes are made again rather
than kept.
"""

from dataclasses import dataclass, replace
from functools import cache
from math import prod

import networkx as nx

from benchmarks.replay.graphs import Forced
from passes.ir.layout import local_shape
from passes.ir.lowered import Body, Compute, Loop, Redistribution
from passes.ir.rule import Saved
from passes.rules import written_rule

# Ops whose results are not computed again: they cost too much, or draw.
_ANCHORS = frozenset(
    (
        "linear",
        "addmm",
        "matmul",
        "bmm",
        "scaled_dot_product_attention",
        "softmax",
        "layer_norm",
        "dropout",
        "embedding",
    )
)
_VIEWS = frozenset(("reshape", "view", "transpose", "permute", "slice", "select", "split", "unsqueeze", "squeeze"))
_MASK_BYTES = 1


@dataclass(frozen=True)
class Kept:
    """Bytes on one rank for one micro-batch: what one layer keeps, what enters it, what of it are scores of attention,
    what it keeps where recompute is selective by op, and the largest tensors of a layer and of what stands after."""

    layer: float
    entry: float
    scores: float
    selected: float
    before: float
    after: float
    working: float
    loss: float


@cache
def kept_bytes(forced: Forced, fused: bool = True, wide_masks: bool = False) -> Kept:
    """The saved tensors of `forced` by block; without `fused`, those that autograd saves for each op alone. Masks of
    dropout have a byte for each element, or with `wide_masks` as many as what they are of."""
    body = forced.stage.body
    number = next(place for place, item in enumerate(body.statements) if isinstance(item, Loop))
    loop = body.statements[number]
    assert isinstance(loop, Loop)
    region = _Block(loop.body, forced, fused, wide_masks)
    carried = loop.body.arguments[: len(loop.region.carries)]
    entry = sum(region.size(name) for name in carried if loop.body.types[name].dtype.is_floating_point)
    before = _Block(replace(body, statements=body.statements[:number]), forced, fused, wide_masks)
    after = _Block(replace(body, statements=body.statements[number + 1 :]), forced, fused, wide_masks)
    scores = region.scores()
    selected = entry + region.selected()
    return Kept(region.kept(), entry, scores, selected, before.kept(), after.kept(), region.largest(), after.largest())


class _Block:
    """Straight code: who makes each value, and what it takes in memory."""

    def __init__(self, body: Body, forced: Forced, fused: bool, wide_masks: bool) -> None:
        self.body, self.forced, self.fused, self.wide_masks = body, forced, fused, wide_masks
        self.parameters = {item.name for item in forced.stage.program.parameters}
        for region in forced.folded.regions:
            self.parameters.update(region.owned)
        self.made: dict[str, Compute | Redistribution] = {}
        for statement in body.statements:
            if isinstance(statement, Compute):
                self.made.update(dict.fromkeys(statement.whole.results, statement))
            elif isinstance(statement, Redistribution):
                self.made[statement.result] = statement

    def size(self, name: str) -> float:
        """Bytes of a value on one rank."""
        type = self.body.types[name]
        return float(prod(local_shape(type.shape, self.body.layouts[name], self.forced.mesh)) * type.dtype.itemsize)

    def flows(self, name: str) -> bool:
        return name.partition("~")[0] in self.forced.folded.flowing

    def base(self, name: str) -> str:
        """The value that `name` is a view or another layout of."""
        while (made := self.made.get(name)) is not None:
            if isinstance(made, Redistribution):
                name = made.source
            elif made.op.kind in _VIEWS and made.whole.operands:
                name = made.whole.operands[0]
            else:
                break
        return name

    def resident(self, name: str) -> bool:
        """Whether a value is there anyway: a parameter, or one that no gradient flows to (tables, masks)."""
        return not self.flows(name) or self.base(name).partition("~")[0] in self.parameters

    def largest(self) -> float:
        """Bytes of the largest result."""
        return max((self.size(name) for name in self.made if self.flows(name)), default=0.0)

    def scores(self) -> float:
        """Bytes that the attention core keeps where its scores are written out: results of softmax, masks, products."""
        found = 0.0
        width = max(
            (self.body.types[name].shape[-1] for name in self.made if len(self.body.types[name].shape) == 4), default=0
        )
        for statement in self.body.statements:
            if isinstance(statement, Compute) and statement.op.kind in ("softmax", "dropout"):
                name = statement.whole.results[0]
                if len(self.body.types[name].shape) == 4 and self.body.types[name].shape[-1] == width:
                    found += self.size(name)
                    if statement.op.kind == "dropout":
                        found += self.mask(name)
        return found

    def selected(self) -> float:
        """Bytes that torchtitan's policy keeps: the results of attention and of every second product."""
        found, products = 0.0, 0
        for statement in self.body.statements:
            if not isinstance(statement, Compute):
                continue
            if statement.op.kind in ("linear", "addmm"):
                products += 1
                found += self.size(statement.whole.results[0]) * (products % 2)
            elif statement.op.kind == "scaled_dot_product_attention":
                found += self.size(statement.whole.results[0])
        return found

    def kept(self) -> float:
        """Bytes that are kept."""
        held: dict[str, float] = {}
        wanted: set[str] = set()
        for statement in self.body.statements:
            if not isinstance(statement, Compute):
                continue
            op = statement.whole
            if not any(self.flows(name) for name in op.results):
                continue
            for item in self._saved(statement):
                name = op.results[item.index] if item.result else op.operands[item.index]
                if op.kind == "dropout":
                    held[f"mask of {op.results[0]}"] = self.mask(op.results[0])
                elif item.copy:
                    held[f"copy in {op.results[0]}"] = self.size(name)
                elif op.kind in _ANCHORS or not self.fused:
                    found = self.base(name)
                    if not self.resident(found):
                        held[found] = self.size(found)
                else:
                    wanted.add(name)
        return sum(held.values()) + self._cut(wanted, set(held))

    def mask(self, name: str) -> float:
        """Bytes of the mask of dropout that makes a value."""
        size = self.size(name)
        return size if self.wide_masks else size / self.body.types[name].dtype.itemsize * _MASK_BYTES

    def _saved(self, statement: Compute) -> list[Saved]:
        op = statement.whole
        rule = written_rule(op, {name: self.body.types[name] for name in (*op.operands, *op.results)})
        if rule is None:
            return []
        return [
            item
            for item in rule.saved
            if not item.needed_by
            or any(slot < len(op.operands) and self.flows(op.operands[slot]) for slot in item.needed_by)
        ]

    def _cut(self, wanted: set[str], held: set[str]) -> float:
        """The fewest bytes that all of `wanted` can be computed from, with `held` there."""
        graph = nx.DiGraph()
        graph.add_node("source")
        pending, seen = list(wanted), set(wanted)
        for name in wanted:
            graph.add_edge((name, "out"), "sink")
        while pending:
            name = pending.pop()
            free = self.resident(name) or self.base(name) in held or name in held
            graph.add_edge((name, "in"), (name, "out"), capacity=0.0 if free else self.size(name))
            made = self.made.get(name)
            anchored = isinstance(made, Compute) and made.op.kind in _ANCHORS
            if free or made is None or anchored:
                if not free:
                    graph.add_edge("source", (name, "in"))
                continue
            operands = (made.source,) if isinstance(made, Redistribution) else made.whole.operands
            for operand in operands:
                graph.add_edge((operand, "out"), (name, "in"))
                if operand not in seen:
                    seen.add(operand)
                    pending.append(operand)
        if "sink" not in graph:
            return 0.0
        return float(nx.maximum_flow_value(graph, "source", "sink"))
