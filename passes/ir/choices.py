"""The planning problem: the strategies of each op, parameter, input and output, with their costs. `strategies` builds
it, `solve` solves it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from passes.ir.configuration import Configuration
from passes.ir.exchanges import ALONE, Sharing
from passes.ir.layout import Layout
from passes.ir.program import TensorType

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run an op: its method on every axis, and the resulting layouts of its operands and results.

    For a parameter, input or output the methods are the placements of its layout.
    """

    methods: tuple[str, ...]
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class StrategyBytes:
    """Bytes that a strategy of a node allocates, in all its copies together.

    `held` is live throughout the step; `gradient` from the node's backward pass to the optimizer step; `transient` is
    the workspace of the backward pass of one copy, `update` that of the optimizer step.
    """

    held: float = 0.0
    gradient: float = 0.0
    transient: float = 0.0
    update: float = 0.0


@dataclass(frozen=True)
class Node:
    """A node of the planning problem: an op, or the layout of a parameter, input, carried tensor or output.

    `key` names it in the plan; `kind` is "op", "parameter", "input", "buffer", "carry" or "output". `count` is the
    number of times that it occurs in a micro-batch, `block` the block of the program that it belongs to. `seconds` and
    `memory` are per strategy, for all copies together; of an op's seconds `forward` are those of the forward pass.
    `light` says for each strategy whether selective recompute recomputes it, `cheap` whether it recomputes any of the
    op's strategies, `second` that recompute of "ops" recomputes all of them. `saves_result` says that autograd saves
    its result, of `results` bytes per strategy; `copies` are the bytes of other tensors that autograd saves; `views`
    says that its result is a view of its operand.
    """

    key: str
    kind: str
    name: str
    count: int
    block: int
    strategies: tuple[Strategy, ...]
    seconds: tuple[float, ...]
    memory: tuple[StrategyBytes, ...]
    saves_result: bool = False
    results: tuple[float, ...] = ()
    copies: tuple[float, ...] = ()
    forward: tuple[float, ...] = ()
    light: tuple[bool, ...] = ()
    cheap: bool = False
    second: bool = False
    views: bool = False

    def only(self, picks: Sequence[int]) -> "Node":
        """The node restricted to these strategies."""

        def chosen(values: tuple[T, ...]) -> tuple[T, ...]:
            return tuple(values[pick] for pick in picks) if values else values

        return replace(
            self,
            strategies=chosen(self.strategies),
            seconds=chosen(self.seconds),
            memory=chosen(self.memory),
            results=chosen(self.results),
            copies=chosen(self.copies),
            forward=chosen(self.forward),
            light=chosen(self.light),
        )


@dataclass(frozen=True)
class Edge:
    """A use of a tensor: result `result` of node `producer` as operand `operand` of node `consumer`, `count` times.

    Edges of one `group` are in the same block of the program: they share one redistribution to each layout. `saved`
    says that autograd saves the operand, `remade` at which levels of recompute saved tensors are recomputed from it,
    `passed` at which they are and it is recomputed itself: only what a redistribution makes of it is saved.
    """

    producer: int
    result: int
    consumer: int
    operand: int
    group: int
    saved: bool
    remade: frozenset[str] = frozenset()
    passed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class EdgeGroup:
    """Uses of one tensor in one block, `count` times in a step.

    `gradient` says that a gradient flows back, in elements of `gradient_itemsize` bytes; `parameter` that the tensor is
    a parameter, whose stored shard is resident anyway; `strided` that its memory is not in the order of its dims;
    `inside` that the uses are inside the copies of a region. `joined` are the numbers of tensors that share
    a collective.
    """

    tensor: str
    type: TensorType
    count: int
    block: int
    gradient: bool
    gradient_itemsize: int
    parameter: bool
    strided: bool
    inside: bool = False
    joined: Sharing = ALONE


@dataclass(frozen=True)
class Cover:
    """Seconds of computation of all copies of a region in one micro-batch, on one of all devices without redundant
    computation: forward, backward, and the parts of the forward pass that selective recompute, and that of "ops", run
    again."""

    forward: float = 0.0
    backward: float = 0.0
    light: float = 0.0
    ops: float = 0.0

    def again(self, recompute: str) -> float:
        """The backward pass, with the part of the forward pass that it recomputes."""
        again = {"none": 0.0, "selective": self.light, "ops": self.ops, "full": self.forward}
        return self.backward + again[recompute]


@dataclass(frozen=True)
class Problem:
    """All nodes, and the edges between them in groups. `blocks` names the blocks of the program, each of which runs
    `counts` times; `covers` is the computation of each that hides communication; `index` maps the key of a node to its
    number. Nodes that are mapped to one key by `alike` take the same strategy, where they have the same strategies."""

    nodes: Sequence[Node]
    edges: Sequence[Edge]
    groups: Sequence[EdgeGroup]
    blocks: Sequence[str]
    counts: Sequence[int]
    index: Mapping[str, int]
    covers: Sequence[Cover]
    alike: Mapping[str, str] = field(default_factory=dict)

    def only(self, picks: Sequence[int]) -> "Problem":
        """The problem restricted to one strategy per node."""
        return replace(self, nodes=[node.only([pick]) for node, pick in zip(self.nodes, picks, strict=True)])


@dataclass(frozen=True)
class Solution:
    """A solution under one configuration: for every node the number of its strategy (`picks`), and the redistributions
    (group, target layout) that run again in the backward pass instead of saving their result (`regathered`).

    `seconds` is the step time of the choice, `bound` a lower bound on that of every choice.
    """

    picks: tuple[int, ...]
    regathered: frozenset[tuple[int, Layout]]
    seconds: float
    bound: float
    configuration: Configuration

    def strategy(self, problem: Problem, node: int) -> Strategy:
        """The chosen strategy of a node."""
        return problem.nodes[node].strategies[self.picks[node]]
