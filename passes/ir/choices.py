"""The planning problem: what each op, parameter, input and output may do, at what price. `candidates` writes it,
`solve` chooses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from passes.ir.configuration import Configuration
from passes.ir.layout import Layout
from passes.ir.program import TensorType

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run an op: the method on every axis, and what that makes of its operands and results.

    For a parameter, input or output the methods are the placements of its layout.
    """

    methods: tuple[str, ...]
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class StrategyBytes:
    """Bytes that a strategy of a node holds, all its copies together.

    `held` lies there throughout the step; `gradient` from its backward pass to the optimizer step; `transient` is what
    the backward pass of one copy needs while it runs.
    """

    held: float = 0.0
    gradient: float = 0.0
    transient: float = 0.0


@dataclass(frozen=True)
class Node:
    """Something that decides: an op, or where a parameter, input, carried tensor or output lies.

    `key` names it in the plan; `kind` is "op", "parameter", "input", "buffer", "carry" or "output". `count` is how
    often it occurs in a micro-batch, `block` the place it stands in. `seconds` and `memory` are per strategy, for all
    copies together; of an op's seconds `forward` are those of the forward pass. `light` says of each strategy whether
    it runs again where recompute is selective, `cheap` whether any that the op may have does. `saves_result` says that
    autograd keeps its result, of `results` bytes per strategy; `copies` are the bytes of what else it keeps; `views`
    that its result is a view of its operand.
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
    views: bool = False

    def only(self, picks: Sequence[int]) -> "Node":
        """The node with no strategies but these."""

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

    Edges of one `group` are in one place of the program: a redistribution to the same layout is done once for all.
    `saved` says that autograd keeps the operand, `remade` that what it keeps is made of the operand again where
    recompute is selective.
    """

    producer: int
    result: int
    consumer: int
    operand: int
    group: int
    saved: bool
    remade: bool = False


@dataclass(frozen=True)
class EdgeGroup:
    """Uses of one tensor in one place, `count` times in a step.

    `gradient` says that a gradient flows back, in elements of `gradient_itemsize` bytes; `parameter` that the tensor
    is a parameter, so that it is in memory anyway as it is stored; `strided` that it does not lie in memory in the
    order of its dims; `inside` that the uses are inside the copies of a region. `joined` tensors are sent together, in
    one collective.
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
    joined: int = 1


@dataclass(frozen=True)
class Cover:
    """Seconds that a device computes for all copies of a region in one micro-batch, where nothing is computed twice:
    forward, backward, and of the forward pass what runs again where recompute is selective."""

    forward: float = 0.0
    backward: float = 0.0
    light: float = 0.0

    def again(self, recompute: str) -> float:
        """The backward pass with what it computes again of the forward pass."""
        return self.backward + {"none": 0.0, "selective": self.light, "full": self.forward}[recompute]


@dataclass(frozen=True)
class Problem:
    """All nodes, and the edges between them in groups. `blocks` names the places of nodes, each `counts` times there,
    and `covers` what computation of each hides traffic; `index` finds a node by its key."""

    nodes: Sequence[Node]
    edges: Sequence[Edge]
    groups: Sequence[EdgeGroup]
    blocks: Sequence[str]
    counts: Sequence[int]
    index: Mapping[str, int]
    covers: Sequence[Cover]

    def only(self, picks: Sequence[int]) -> "Problem":
        """The problem that offers one strategy per node."""
        return replace(self, nodes=[node.only([pick]) for node, pick in zip(self.nodes, picks, strict=True)])


@dataclass(frozen=True)
class Solution:
    """A choice under one configuration: for every node the number of its strategy (`picks`), and the redistributions
    (group, target layout) that run again in the backward pass instead of saving their result (`regathered`).

    `seconds` is the step time of the choice, `bound` a lower bound on that of every choice. `by_clock` says that a
    clock ended the search, so that another machine may choose another plan.
    """

    picks: tuple[int, ...]
    regathered: frozenset[tuple[int, Layout]]
    seconds: float
    bound: float
    configuration: Configuration
    by_clock: bool = False

    def strategy(self, problem: Problem, node: int) -> Strategy:
        """The chosen strategy of a node."""
        return problem.nodes[node].strategies[self.picks[node]]
