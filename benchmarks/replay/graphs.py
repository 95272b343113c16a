"""The traced graph of a run's model with the run's splits forced on it, and what one micro-batch of it costs."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

import torch

from autopar.models import huggingface
from benchmarks.models import Dimensions, Family, build
from benchmarks.replay.reasons import Reason, SkippedError
from passes.capture import Tracing, capture
from passes.constrain import Constraints, constrain
from passes.cost.cluster import CLUSTERS
from passes.ir.choices import Problem, Solution
from passes.ir.configuration import Configuration
from passes.ir.errors import AutoparError, ConstraintError
from passes.ir.folded import Folded, Region
from passes.ir.lowered import Stage
from passes.ir.mesh import Mesh
from passes.ir.program import Program
from passes.lower.straight import Casts, straight_code
from passes.normalize import normalize
from passes.regions import fold
from passes.rules import written_rule
from passes.solve import solve
from passes.solve.limits import Limits
from passes.strategies import Setting, planning_problem

# Layers that are traced: the region that they fold to is the same for any number (a test holds it).
TRACED = 3
TENSOR, CONTEXT = "tp", "cp"


@dataclass(frozen=True)
class Split:
    """The split of one micro-batch over the devices that share it."""

    context: int
    tensor: int
    sequence_parallel: bool
    context_method: str


@dataclass(frozen=True, eq=False)
class Graph:
    """A program whose layers are folded; `layers` is how many the model has."""

    program: Program
    family: Family
    layers: int


@dataclass(frozen=True, eq=False)
class Forced:
    """A graph with the splits of a run: everything that prices and memory are read from."""

    graph: Graph
    folded: Folded
    mesh: Mesh
    problem: Problem
    solution: Solution
    stage: Stage


@cache
def trace(family: Family, dimensions: Dimensions, batch: int, flash: bool, dropout: float, frozen: bool) -> Graph:
    """The graph of `batch` samples. With `frozen` only the norms are trained, as with adapters of no size.

    Raises SkippedError where the model cannot be built or traced.
    """
    ids = torch.empty(batch, dimensions.sequence, dtype=torch.long, device="meta")
    inputs = {"input_ids": ids, "labels": ids}
    try:
        model = build(family, dimensions, TRACED, flash, dropout)
        if frozen:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("norm" in name)
        program = normalize(capture(model, inputs, Tracing(True, True, huggingface.tracing(model, inputs, "train"))))
    except Exception as error:  # Whatever a stock class raises for sizes that do not fit each other.
        raise SkippedError(Reason.TRACE, str(error).splitlines()[-1].strip()) from error
    return Graph(program, family, dimensions.layers)


def demands_of(graph: Graph, split: Split) -> Constraints:
    """The run's splits in the words of constraints: weights by columns, then by rows, and between the blocks split over
    the sequence or whole. What stands between follows, and the solver fills it in."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    between: dict[str, str] = {}
    if split.tensor > 1:
        for row in graph.family.rows:
            found[row] = {"method": {TENSOR: "in"}}
        # Within the part of the sequence that the context axis leaves.
        between[TENSOR] = f"S(1, {split.context})" if split.sequence_parallel else "I"
    if split.context > 1:
        # Parameters lie whole on these devices; their gradients are reduced with those of the data axis.
        found["*"] = {"stored": {CONTEXT: "I"}}
        between[CONTEXT] = "S(1)"
        if any(fnmatchcase(op.key, graph.family.scores) for op in graph.program.ops):
            method = "heads" if split.context_method == "a2a" else "queries"
            found[graph.family.scores] = {"method": {CONTEXT: method}}
    if between:
        found[graph.family.norm] = {"in": between}
        found[graph.family.layer] = {"out": between}
    return found


@cache
def force(graph: Graph, split: Split, cluster: str) -> Forced:
    """Plan `graph` with the run's splits. The data axis is left out: it splits the samples only, so that what one rank
    computes is the graph of its own.

    Where the demands cannot all be met (fewer heads of keys than devices), those on the attention block are left out:
    the solver finds the best there. Raises SkippedError where a pass refuses.
    """
    demands = demands_of(graph, split)
    rows = graph.family.rows[0]
    try:
        return _forced(graph, split, cluster, demands)
    except ConstraintError as error:
        if rows not in demands:
            raise SkippedError(Reason.TRACE, str(error)) from error
    except AutoparError as error:
        raise SkippedError(Reason.TRACE, str(error)) from error
    kept = (*graph.family.rows[1:], graph.family.norm)
    try:
        return _forced(graph, split, cluster, {name: demands[name] for name in kept if name in demands})
    except AutoparError as error:
        raise SkippedError(Reason.TRACE, str(error)) from error


def _forced(graph: Graph, split: Split, cluster: str, constraints: Constraints) -> Forced:
    mesh = Mesh((CONTEXT, TENSOR), (split.context, split.tensor))
    found = CLUSTERS[cluster]
    demands = constrain(graph.program, constraints, mesh)
    folded = fold(graph.program, demands.label)
    problem = planning_problem(folded, demands, Setting(mesh, found, 2, master=torch.float32))
    solution = solve(problem, found, Limits(1e18, 2), Configuration(mesh))
    if not folded.regions:
        raise SkippedError(Reason.TRACE, "its layers differ from each other")
    stage = straight_code(folded, problem, solution, mesh, Casts(torch.float32, None))
    return Forced(graph, folded, mesh, problem, solution, stage)


@dataclass(frozen=True)
class Multiplications:
    """FLOPs of a forward pass of all layers: products with weights, the attention core, and the head."""

    products: float
    attention: float
    head: float


_ATTENTION = ("scaled_dot_product_attention", "matmul", "bmm")


def multiplications(graph: Graph) -> Multiplications:
    """FLOPs that the rules count, for the whole depth; causal attention counted in full."""
    folded = fold(graph.program)
    products = attention = head = 0.0
    for item in folded.items:
        for op in item.ops if isinstance(item, Region) else (item,):
            count = graph.layers if isinstance(item, Region) else 1
            rule = written_rule(op, folded.types)
            flops = rule.multiplications * count if rule else 0.0
            if not isinstance(item, Region):
                head += flops
            elif op.kind in _ATTENTION:
                attention += flops * (2 if op.arguments.get("is_causal") else 1)
            else:
                products += flops
    return Multiplications(products, attention, head)
