"""Planning small modules step by step, and the best choice found by trying all."""

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import prod

import torch
from torch import Tensor, nn

from passes.capture import Tracing, capture
from passes.constrain import Constraints, constrain
from passes.cost.cluster import CLUSTERS, Cluster
from passes.cost.live_ranges import saved_edges
from passes.cost.memory import memory_use
from passes.cost.walk import Optimizer, walk
from passes.ir.choices import Problem, Solution
from passes.ir.configuration import RECOMPUTE, Configuration
from passes.ir.folded import Folded
from passes.ir.grouping import grouped
from passes.ir.layout import I, Layout, R
from passes.ir.levels import Level
from passes.ir.lowered import Stage
from passes.ir.mesh import Mesh
from passes.lower.recompute import recompute
from passes.lower.straight import Casts, straight_code
from passes.lower.units import fsdp_units
from passes.normalize import normalize
from passes.regions import fold
from passes.strategies import Setting, planning_problem

STATES = 2


def same_tensor(source: Layout, target: Layout) -> bool:
    """Whether the redistribution is free in the forward pass: placements differ between R and I only."""
    return all(
        before == after or (before in (R, I) and after in (R, I)) for before, after in zip(source, target, strict=True)
    )


@dataclass(frozen=True)
class Planning:
    """A planning problem with what it was made from."""

    folded: Folded
    problem: Problem
    mesh: Mesh
    cluster: Cluster

    def lowered(self, solution: Solution) -> Stage:
        """The program that a solution stands for, with all redistributions in its own code."""
        lowered = straight_code(self.folded, self.problem, solution, self.mesh, Casts())
        return recompute(lowered, solution.configuration.recompute)

    def seconds(self, solution: Solution) -> float:
        """The step time of a solution, from the program that it stands for, with its FSDP units."""
        configuration = solution.configuration
        lowered = fsdp_units(self.lowered(solution), self.mesh, gather_once=configuration.gather_once)
        return walk(lowered, self.folded, self.cluster, Optimizer(STATES), configuration).total

    def peak(self, solution: Solution) -> float:
        """The memory of a solution."""
        return memory_use(self.problem, solution, STATES).peak

    @property
    def configuration(self) -> Configuration:
        """The default configuration on the mesh."""
        return Configuration(self.mesh)

    def with_picks(self, picks: Sequence[int]) -> Solution:
        """The solution with these strategies, in which nothing is made again."""
        return Solution(tuple(picks), frozenset(), 0.0, 0.0, self.configuration)

    def changed_and_kept(
        self, picks: tuple[int, ...], configuration: Configuration | None = None
    ) -> list[tuple[int, Layout]]:
        """The redistributions whose result has to be there in the backward pass under `picks`, so that they could be
        made again instead."""
        chosen = Solution(picks, frozenset(), 0.0, 0.0, self.configuration)
        found: dict[tuple[int, Layout], None] = {}
        for own in grouped((edge.group, edge) for edge in self.problem.edges).values():
            for edge in saved_edges(self.problem, configuration or self.configuration, own):
                before = chosen.strategy(self.problem, edge.producer).results[edge.result]
                after = chosen.strategy(self.problem, edge.consumer).operands[edge.operand]
                if not same_tensor(before, after):
                    found[edge.group, after] = None
        return list(found)

    def choices(self, again: bool, configuration: Configuration | None = None) -> Iterator[Solution]:
        """Every solution in a configuration; with `again` in every way to make redistributions again."""
        for picks in product(*(range(len(node.strategies)) for node in self.problem.nodes)):
            redone = self.changed_and_kept(picks, configuration) if again else []
            for count in range(len(redone) + 1):
                for chosen in combinations(redone, count):
                    yield Solution(picks, frozenset(chosen), 0.0, 0.0, configuration or self.configuration)


def planning(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    mesh: Mesh,
    cluster: str | Cluster = "cpu",
    constraints: Constraints | None = None,
) -> Planning:
    """The planning problem of a module in training."""
    program = normalize(capture(module, inputs, Tracing(True, True, contextlib.nullcontext())))
    demands = constrain(program, constraints or {}, mesh)
    folded = fold(program, demands.label)
    devices = CLUSTERS[cluster] if isinstance(cluster, str) else cluster
    return Planning(folded, planning_problem(folded, demands, Setting(mesh, devices, STATES)), mesh, devices)


def thinned(
    problem: Problem, budget: int, choose: random.Random, given: Mapping[int, list[int]] | None = None
) -> Problem:
    """`problem` with a few random strategies per node, so that there are at most `budget` solutions, or as many as
    nodes have with the strategies that are `given` for some."""
    kept = [[choose.randrange(len(node.strategies))] for node in problem.nodes]
    for index, own in (given or {}).items():
        kept[index] = list(own)
    total, stuck = prod(len(own) for own in kept), 0
    while stuck < 200:
        index = choose.randrange(len(kept))
        rest = sorted(set(range(len(problem.nodes[index].strategies))) - set(kept[index]))
        larger = total // len(kept[index]) * (len(kept[index]) + 1)
        if not rest or larger > budget:
            stuck += 1
            continue
        kept[index].append(choose.choice(rest))
        total = larger
    nodes = [node.only(sorted(own)) for node, own in zip(problem.nodes, kept, strict=True)]
    return replace(problem, nodes=nodes)


def stored_both_ways(case: Planning, choose: random.Random, most: int) -> dict[int, list[int]]:
    """For `most` parameters, a strategy that stores the parameter whole on every device and one that stores parts."""
    found: dict[int, list[int]] = {}
    parameters = [index for index, node in enumerate(case.problem.nodes) if node.kind == "parameter"]
    for index in choose.sample(parameters, len(parameters)):
        held = [(memory.held, way) for way, memory in enumerate(case.problem.nodes[index].memory)]
        whole = max(held)[0]
        parts = [way for size, way in held if size < whole]
        if parts and len(found) < most:
            found[index] = [choose.choice([way for size, way in held if size == whole]), choose.choice(parts)]
    return found


class RandomModel(nn.Module):
    """Three to six random ops on tensors of [batch, length, width]; `blocks` repeats them as layers of a list."""

    def __init__(self, seed: int, blocks: int = 0) -> None:
        super().__init__()
        choose = random.Random(seed)
        count = choose.randrange(3, 7) if not blocks else 3
        width = 8
        self.layers = nn.ModuleList(Steps(choose.getrandbits(30), count, width) for _ in range(blocks and 1))
        if blocks:
            recipe = choose.getrandbits(30)
            self.layers = nn.ModuleList(Steps(recipe, count, width) for _ in range(blocks))
        self.steps = Steps(choose.getrandbits(30), count, width) if not blocks else None

    def forward(self, x: Tensor) -> Tensor:
        """Run the steps, and sum what comes out."""
        for layer in self.layers:
            x = layer(x)
        if self.steps is not None:
            x = self.steps(x)
        return x.sum()


class Steps(nn.Module):
    """Random ops one after the other; some take an earlier tensor besides the last one."""

    KINDS = ("linear", "add", "mul", "relu", "norm", "matmul", "reshape", "softmax", "mean")

    def __init__(self, seed: int, count: int, width: int) -> None:
        super().__init__()
        choose = random.Random(seed)
        self.kinds = [choose.choice(self.KINDS) for _ in range(count)]
        self.kinds[choose.randrange(count)] = "linear"
        self.others = [choose.randrange(number + 1) for number in range(count)]
        self.parts = nn.ModuleDict()
        for number, kind in enumerate(self.kinds):
            if kind == "linear":
                self.parts[str(number)] = nn.Linear(width, width, bias=bool(choose.getrandbits(1)))
            elif kind == "norm":
                self.parts[str(number)] = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Run them."""
        seen = [x]
        for number, (kind, other) in enumerate(zip(self.kinds, self.others, strict=True)):
            last, earlier = seen[-1], seen[other]
            match kind:
                case "linear" | "norm":
                    result = self.parts[str(number)](last)
                case "add":
                    result = last + earlier
                case "mul":
                    result = last * earlier
                case "relu":
                    result = last.relu()
                case "matmul":
                    result = last @ earlier.transpose(1, 2) @ last
                case "reshape":
                    result = last.reshape(-1, 2, 4).transpose(1, 2).reshape(last.shape)
                case "softmax":
                    result = last.softmax(-1)
                case "mean":
                    result = last - last.mean(1, keepdim=True)
            seen.append(result)
        return seen[-1]


def _some_level(case: Planning, choose: random.Random, seed: int) -> dict[str, str]:
    """A level of recompute for each region, for some of which the first copies have another one than the others."""
    found = {region.name: choose.choice(RECOMPUTE) for region in case.folded.regions}
    some = random.Random(f"some {seed}")
    for region in case.folded.regions:
        if some.random() < 0.3:
            found[region.name] = str(Level(some.choice(RECOMPUTE[:-1]), some.randrange(1, region.count)))
    return found


def random_configuration(case: Planning, seed: int) -> Configuration:
    """Some micro-batches, something to compute again of each region, and parameters that travel once or each time."""
    choose = random.Random(seed)
    again = _some_level(case, choose, seed)
    return Configuration(case.mesh, choose.choice([1, 1, 2, 4]), again, choose.random() < 0.3, choose.random() < 0.3)


def zero_configuration(case: Planning, seed: int) -> Configuration:
    """Two or four micro-batches, one of the ways in which parameters travel, and something to compute again."""
    choose = random.Random(seed)
    again = _some_level(case, choose, seed)
    once = [(False, False), (True, False), (True, True), (False, True)][seed % 4]
    return Configuration(case.mesh, choose.choice([2, 4]), again, *once)


def random_planning(seed: int, blocks: int = 0) -> Planning:
    """A random module on a random mesh, cluster and batch."""
    choose = random.Random(seed)
    mesh = choose.choice([Mesh(("a",), (2,)), Mesh(("a",), (4,)), Mesh(("a", "b"), (2, 2))])
    cluster = CLUSTERS[choose.choice(["cpu", "h100", "a100", "ideal"])]
    if choose.random() < 0.3:
        cluster = replace(cluster, node_size=2)
    scale = choose.choice([1, 4, 64])
    inputs = {"x": torch.empty(4 * scale, 4 * choose.choice([1, 16]), 8, device="meta")}
    with torch.device("meta"):
        model = RandomModel(seed, blocks)
    return planning(model, inputs, mesh, cluster)
