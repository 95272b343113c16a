"""Whole planning problems solved a second time, by HiGHS: `python benchmarks/second_opinion.py [NAME ...]`.

Each problem is that of one model on one mesh under one configuration. It is written as one mixed integer program for
OR-Tools MathOpt, straight from the costs and bytes of all strategies: without the dominance, elimination, relaxation
and branches of `passes/solve`. The table has the optimum of both, the bound and the incumbent of HiGHS where it does
not finish in `--seconds`, and whether they agree: equal to a millionth where HiGHS finished, else between its bound and
its incumbent. Needs no accelerator and no weights.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from ortools.math_opt.python import mathopt

sys.path.insert(0, str(Path(__file__).parent.parent))

from passes.cost.memory import MemoryModel, memory_model
from passes.cost.redistributions import RedistributionCosts
from passes.ir.arrays import Floats, Integers
from passes.ir.choices import Problem, Solution
from passes.ir.configuration import Configuration
from passes.ir.errors import InfeasibleError
from passes.ir.layout import Layout
from passes.ir.mesh import Mesh
from passes.solve import solve
from passes.solve.arrays import Arrays, GroupArrays, arrays, find_uses
from passes.solve.integer_program import SCALE, MixedIntegerModel
from passes.solve.limits import Limits
from tests.passes.planning import Planning, planning

# Both are equal up to this, relative to the step.
EQUAL = 1e-6
STATES = 2


@dataclass(frozen=True)
class Case:
    """One problem: a class of transformers with its sizes, a batch of samples and tokens, a mesh, a level of recompute,
    and the memory limit as a part of the peak without one (None: no limit; where nothing fits, more). `most` keeps at
    most so many strategies of each node."""

    name: str
    kind: str
    sizes: Mapping[str, Any]
    batch: tuple[int, int]
    mesh: Mapping[str, int]
    recompute: str = "none"
    limit: float | None = None
    most: int | None = None


_LLAMA = {"num_hidden_layers": 4, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
          "num_key_value_heads": 8, "vocab_size": 128256}  # fmt: skip
_QWEN = {**_LLAMA, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4,
         "vocab_size": 152064}  # fmt: skip
_GPT2 = {"n_embd": 1600, "n_layer": 4, "n_head": 25, "vocab_size": 50257}
_OPT = {"hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 4, "num_attention_heads": 32,
        "word_embed_proj_dim": 2048, "vocab_size": 50272, "dropout": 0.0}  # fmt: skip
_BERT = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 16}
_SMALL, _NODES = {"dp": 2, "tp": 4}, {"dp": 8, "tp": 8}

CASES = (
    Case("llama 8x8", "LlamaForCausalLM", _LLAMA, (128, 2048), _NODES),
    Case("llama 8x8 limited", "LlamaForCausalLM", _LLAMA, (128, 2048), _NODES, limit=0.8),
    Case("llama 8x8 full", "LlamaForCausalLM", _LLAMA, (128, 2048), _NODES, recompute="full"),
    Case("llama 8x8 selective limited", "LlamaForCausalLM", _LLAMA, (128, 2048), _NODES, "selective", 0.8),
    Case("llama 2x4", "LlamaForCausalLM", _LLAMA, (8, 2048), _SMALL),
    Case("llama 2x4 limited", "LlamaForCausalLM", _LLAMA, (8, 2048), _SMALL, limit=0.7),
    Case("qwen2 8x8", "Qwen2ForCausalLM", _QWEN, (64, 4096), _NODES),
    Case("qwen2 8x8 full limited", "Qwen2ForCausalLM", _QWEN, (64, 4096), _NODES, "full", 0.9),
    Case("gpt2 8x8", "GPT2LMHeadModel", _GPT2, (64, 1024), _NODES),
    Case("gpt2 8x8 limited", "GPT2LMHeadModel", _GPT2, (64, 1024), _NODES, limit=0.8),
    Case("gpt2 2x4 selective", "GPT2LMHeadModel", _GPT2, (16, 1024), _SMALL, "selective"),
    Case("opt 8x8", "OPTForCausalLM", _OPT, (64, 2048), _NODES),
    Case("opt 2x4 limited", "OPTForCausalLM", _OPT, (16, 2048), _SMALL, limit=0.8),
    Case("bert 8x8", "BertForMaskedLM", _BERT, (128, 512), _NODES),
    Case("bert 2x4 full limited", "BertForMaskedLM", _BERT, (32, 512), _SMALL, "full", 0.9),
    Case("llama 2x4x8", "LlamaForCausalLM", _LLAMA, (64, 2048), {"a": 2, "b": 4, "c": 8}, most=12),
    Case("llama 2x4x8 limited", "LlamaForCausalLM", _LLAMA, (64, 2048), {"a": 2, "b": 4, "c": 8}, "none", 0.8, 12),
    Case("gpt2 2x4x8", "GPT2LMHeadModel", _GPT2, (64, 1024), {"a": 2, "b": 4, "c": 8}, most=12),
    Case("opt 2x2x8 limited", "OPTForCausalLM", _OPT, (64, 2048), {"a": 2, "b": 2, "c": 8}, "none", 0.8, 12),
    Case("bert 2x2x4 selective", "BertForMaskedLM", _BERT, (64, 512), {"a": 2, "b": 2, "c": 4}, "selective", None, 12),
)  # fmt: skip


# --- the integer program ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Columns:
    """The columns of one group of uses, [source, target]: `paid` is 1 where the tensor is redistributed, `kept` where
    its result has to be there in the backward pass, `rerun` where the redistribution runs again for that (-1: nowhere).
    Only a memory limit asks for the latter two."""

    paid: Integers
    kept: Integers | None
    rerun: Integers | None


class WholeProgram:
    """A problem under one configuration as a mixed integer program; seconds are multiplied by `scale`.

    A node takes one of its strategies. The flow of an edge from source to target layouts has the sums that its nodes'
    strategies give; a group pays for each pair with a flow once. Exposed traffic is at least the traffic of a window
    minus the computation that hides it. At the program `points` (by number) the bytes are within `limit`.
    """

    def __init__(self, found: Arrays, memory: MemoryModel, limit: float, points: Sequence[int], scale: float) -> None:
        self.model, self.scale = MixedIntegerModel(), scale
        self.labels = [self.model.add_columns(costs * scale, integer=True) for costs in found.costs]
        for columns in self.labels:
            self._row(columns, np.ones(len(columns)), 1.0, 1.0)
        self.groups = [self._group(group, limit < float("inf")) for group in found.groups]
        self._overlaps(found)
        for live in memory.fractions.at(points) if points else ():
            columns, values = (np.concatenate(each) for each in zip(*self._bytes(memory, live), strict=True))
            self._row(columns, values * (1000.0 / limit), -np.inf, 1000.0)

    def _row(self, columns: Integers, values: Floats, lower: float, upper: float) -> None:
        places, numbers = np.unique(columns, return_inverse=True)
        sums = np.bincount(numbers, values)
        used = sums != 0
        self.model.add_rows(1, np.zeros(used.sum(), dtype=np.int64), places[used], sums[used], lower, upper)

    def _group(self, group: GroupArrays, has_limit: bool) -> Columns:
        costs = group.seconds * self.scale
        flows = [self.model.add_columns(np.zeros_like(costs) if group.edges[1:] else costs) for _ in group.edges]
        for edge, own in zip(group.edges, flows, strict=True):
            self._marginals(own, group.made, self.labels[group.producer])
            self._marginals(own.T, edge.wanted, self.labels[edge.consumer])
        paid = flows[0] if len(flows) == 1 else self._most(flows, costs)
        saved = [own for own, edge in zip(flows, group.edges, strict=True) if edge.saved]
        if not saved or not has_limit:
            return Columns(paid, None, None)
        kept = saved[0] if len(saved) == 1 else self._most(saved, np.zeros_like(costs))
        rerun = np.full(costs.shape, -1)
        rerun[~group.same] = self.model.add_columns(group.rerun[~group.same] * self.scale, integer=True)
        self.model.at_least(kept[~group.same][:, None], rerun[~group.same])
        return Columns(paid, kept, rerun)

    def _most(self, flows: Sequence[Integers], costs: Floats) -> Integers:
        """Columns that are at least each of several flows."""
        most = self.model.add_columns(costs)
        for own in flows:
            self.model.at_least(most.reshape(-1, 1), own.ravel())
        return most

    def _marginals(self, flows: Integers, layouts: Integers, labels: Integers) -> None:
        for layout, row in enumerate(flows):
            own = labels[layouts == layout]
            self._row(np.concatenate([row, own]), np.repeat([1.0, -1.0], [len(row), len(own)]), 0.0, 0.0)

    def _overlaps(self, found: Arrays) -> None:
        for overlap in found.overlaps:
            parts = [(self.model.add_columns(np.array([overlap.weight])), np.array([-1.0]))]
            for group, columns in zip(found.groups, self.groups, strict=True):
                traffic, rerun = overlap.traffic(group), overlap.rerun_traffic(group)
                if traffic is not None:
                    parts.append((columns.paid.ravel(), traffic.ravel() * self.scale))
                if rerun is not None and columns.rerun is not None:
                    is_open = columns.rerun >= 0
                    parts.append((columns.rerun[is_open], rerun[is_open] * self.scale))
            columns_of, values = (np.concatenate(each) for each in zip(*parts, strict=True))
            self._row(columns_of, values, -np.inf, overlap.cover * self.scale)

    def _bytes(self, memory: MemoryModel, live: Floats) -> Iterator[tuple[Integers, Floats]]:
        """The columns with their bytes where these fractions of all live ranges are `live`."""
        for columns, node in zip(self.labels, memory.nodes, strict=True):
            yield columns, live[node.ranges] @ node.sizes
        for columns, group in zip(self.groups, memory.groups, strict=True):
            sizes = [live[number] * size for number, size in zip(group.ranges, group.sizes, strict=True)]
            yield columns.paid.ravel(), np.broadcast_to(sum(sizes, np.zeros(1)), columns.paid.shape).ravel()
            if columns.kept is None or columns.rerun is None:
                continue
            source = np.zeros(len(group.same)) if group.source is None else live[group.source].sum(axis=0)
            before = (source * group.source_bytes)[:, None]
            kept = np.where(group.same, before, live[group.target].sum() * group.target_bytes)
            again = before + live[group.rerun].sum() * group.target_bytes
            is_open = columns.rerun >= 0
            yield columns.kept.ravel(), kept.ravel()
            yield columns.rerun[is_open], (again - kept)[is_open]

    def choice(self, found: Arrays, values: Mapping[int, float]) -> tuple[list[int], frozenset[tuple[int, Layout]]]:
        """The strategies, and the redistributions (group, target) that run again, where columns have these values."""
        picks = [int(np.argmax([values[column] for column in columns.tolist()])) for columns in self.labels]
        again = {
            (number, group.targets[target])
            for number, (group, columns) in enumerate(zip(found.groups, self.groups, strict=True))
            if columns.rerun is not None
            for target, column in enumerate(columns.rerun[group.made[picks[group.producer]]].tolist())
            if column >= 0 and values[column] > 0.5
        }
        return picks, frozenset(again)


# --- both opinions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Opinions:
    """The results of both solvers for one problem, in seconds of the step.

    `passes/solve` found a choice of `own_s` in `own_planning_s`. HiGHS found the lower bound `bound_s` and a choice of
    `incumbent_s` (None: none) in `planning_s`, and `finished` says whether it proved that choice optimal. Its program
    has so many `columns`.
    """

    own_s: float
    own_planning_s: float
    bound_s: float
    incumbent_s: float | None
    finished: bool
    columns: int
    planning_s: float

    @property
    def agree(self) -> bool:
        """Whether the optimum is the same, or where HiGHS did not finish, lies between its bound and its incumbent."""
        incumbent = float("inf") if self.incumbent_s is None else self.incumbent_s
        if self.finished:
            return abs(self.own_s - incumbent) <= EQUAL * incumbent
        return self.bound_s * (1 - EQUAL) <= self.own_s <= incumbent * (1 + EQUAL)


def planned(case: Case) -> tuple[Planning, Configuration]:
    """The problem of a case and its configuration."""
    kind = getattr(transformers, case.kind)
    with torch.device("meta"):
        model = kind(kind.config_class(**case.sizes, use_cache=False)).to(torch.bfloat16).train()
    ids = torch.empty(*case.batch, dtype=torch.long, device="meta")
    mesh = Mesh(tuple(case.mesh), tuple(case.mesh.values()))
    found = planning(model, {"input_ids": ids, "labels": ids}, mesh, "h100")
    if case.most is not None:
        found = replace(found, problem=restricted(found.problem, case.most))
    levels = {region.name: case.recompute for region in found.folded.regions}
    return found, Configuration(mesh, recompute=levels)


def restricted(problem: Problem, most: int) -> Problem:
    """The problem with at most so many strategies of each node: evenly spread over all, the first one included."""
    nodes = [
        node.only(sorted({round(place) for place in np.linspace(0, len(node.strategies) - 1, most)}))
        for node in problem.nodes
    ]
    return replace(problem, nodes=nodes)


def opinions(found: Planning, configuration: Configuration, limit: float | None, seconds: float) -> Opinions:
    """Solve a problem twice; `limit` is a part of the peak of the choice without limit."""
    began = time.perf_counter()
    own = solve(found.problem, found.cluster, Limits(1e30, STATES), configuration)
    bytes = float("inf")
    if limit is not None:
        own, bytes, began = _limited(found, configuration, limit * found.peak(own), found.peak(own))
    own_planning_s = time.perf_counter() - began
    began = time.perf_counter()
    second = _second(found, configuration, bytes, own.seconds, seconds)
    return Opinions(own.seconds, own_planning_s, *second, time.perf_counter() - began)


def _second(
    found: Planning, configuration: Configuration, limit: float, about_s: float, seconds: float
) -> tuple[float, float | None, bool, int]:
    """Solve the problem by HiGHS in so many seconds. Returns a bound, the best choice that fits (None: none), whether
    it is the optimum, and the columns of the program. `about_s` scales the step.

    Rows are added for the point with most bytes in each block, as long as a choice does not fit there: without the
    others the optimum is a bound, and where it fits it is the optimum with them.
    """
    uses = find_uses(found.problem, RedistributionCosts(found.cluster, found.mesh))
    memory = memory_model(found.problem, configuration, [each.tensor for each in uses])
    whole, scale, points = arrays(found.problem, uses, configuration), SCALE / about_s, list[int]()
    ends = time.perf_counter() + seconds
    bound = 0.0
    while (left := ends - time.perf_counter()) > 0:
        program = WholeProgram(whole, memory, limit, points, scale)
        parameters = mathopt.SolveParameters(relative_gap_tolerance=EQUAL / 10, time_limit=timedelta(seconds=left))
        result = mathopt.solve(program.model.built(), mathopt.SolverType.HIGHS, params=parameters)
        bound = max(bound, result.best_objective_bound() / scale)
        if not result.has_primal_feasible_solution():
            break
        values = {variable.id: value for variable, value in result.variable_values().items()}
        picks, again = program.choice(whole, values)
        bytes = memory.totals(memory.allocations(picks, again))
        broken = {memory.points[number].block: number for number in np.argsort(bytes).tolist() if bytes[number] > limit}
        is_optimal = result.termination.reason == mathopt.TerminationReason.OPTIMAL
        if not broken:
            return bound, whole.value(picks, again), is_optimal, program.model.columns
        points += broken.values()
    return bound, None, False, program.model.columns


def _limited(found: Planning, configuration: Configuration, bytes: float, most: float) -> tuple[Solution, float, float]:
    """The best choice within `bytes`, or where none fits within more, below `most`; the limit, and when solving it
    began."""
    began = time.perf_counter()
    try:
        return solve(found.problem, found.cluster, Limits(bytes, STATES), configuration), bytes, began
    except InfeasibleError:
        return _limited(found, configuration, (bytes + most) / 2, most)


def _line(name: str, found: Opinions) -> str:
    incumbent = "-" if found.incumbent_s is None else f"{found.incumbent_s * 1e3:.6g}"
    return (
        f"| {name} | {found.columns:,} | {found.own_s * 1e3:.6g} ms | {found.own_planning_s:.1f} s | "
        f"{found.bound_s * 1e3:.6g} to {incumbent} ms | {found.planning_s:.0f} s | "
        f"{'yes' if found.finished else 'no'} | {'yes' if found.agree else 'NO'} |"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Solve the cases whose names contain one of those given, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seconds", type=float, default=600.0, help="the time that HiGHS has for each")
    given = parser.parse_args(arguments)
    print(
        "| problem | columns | ours | in | HiGHS | in | finished | agree |\n|---|---|---|---|---|---|---|---|",
        flush=True,
    )
    for case in CASES:
        if not given.names or any(name in case.name for name in given.names):
            print(_line(case.name, opinions(*planned(case), case.limit, given.seconds)), flush=True)


if __name__ == "__main__":
    main()
