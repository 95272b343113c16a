"""Random models in random pipeline stages: made, run on all ranks of a job, and held against one device.

A `Staged` is a model whose samples do not see each other, written down line by line, with what its parts are; how it
is cut, scheduled and laid out is drawn as well. A seed gives the same every time, on every rank.
"""

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from passes.cost.schedules import SCHEDULES, check_schedule
from passes.ir.choices import Problem, Solution
from passes.ir.configuration import RECOMPUTE
from passes.ir.errors import PipelineError
from tests.autopar.fuzzing import random_solution
from tests.autopar.solving import solved_by

TOLERANCE = 1e-9
# Sizes of tokens, of features, and of the vocabulary.
_TOKENS, _WIDE, _WORDS = 6, 8, 12
# Errors are relative to at least this, and to this part of the largest gradient.
_FLOOR, _PART = 1e-3, 1e-3

# --- parts of models --------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A product with what is left of its input, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDE, _WIDE)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, _WIDE, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, tokens, features], as the result."""
        return x + self.linear(x * self.scale).tanh()


class Attending(nn.Module):
    """Attention over tokens, with a mask of those that count."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDE)
        self.inner, self.out = nn.Linear(_WIDE, 3 * _WIDE), nn.Linear(_WIDE, _WIDE, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x: [batch, tokens, features], as the result; mask: bool [batch, tokens], True where a token counts."""
        q, k, v = (item.unflatten(-1, (2, -1)).transpose(1, 2) for item in self.inner(self.norm(x)).chunk(3, -1))
        # A token always sees itself, so that no row is empty.
        seen = None if mask is None else mask[:, None, None, :] | torch.eye(x.shape[1], dtype=torch.bool)
        found = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return x + self.out(found.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """A product that another tensor opens and closes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(_WIDE, _WIDE), nn.Linear(_WIDE, _WIDE)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        """Both [batch, tokens, features], as the result."""
        return self.linear(x) * self.gate(other).sigmoid() + x * 0.5


class Choosing(nn.Module):
    """The word that every token is nearest to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDE, _WORDS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [batch, tokens, features]; words [batch, tokens] and their scores [batch, tokens]."""
        scores = self.linear(x)
        words = scores.argmax(-1)
        return words, scores.gather(-1, words.unsqueeze(-1)).squeeze(-1)


class Frozen(nn.Module):
    """A product whose weights do not train."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDE, _WIDE)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, tokens, features], as the result."""
        return self.linear(x).relu() + x


class Layer(nn.Module):
    """A layer of a stack: it reads another tensor, which is the same for all layers, where there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(_WIDE), nn.Linear(_WIDE, 16), nn.Linear(16, _WIDE)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """Both [batch, tokens, features], as the result."""
        inner = self.norm(x) if other is None else self.norm(x) + other * 0.3
        return x + self.down(nn.functional.gelu(self.up(inner)))


PARTS = {kind.__name__: kind for kind in (Mixed, Attending, Gated, Choosing, Frozen, Layer)}

# --- models -----------------------------------------------------------------------------------------------------------


@dataclass
class Drawing:
    """A model while it is drawn: its tensors by kind, its parts as code, and its lines."""

    choose: random.Random
    floats: list[str] = field(default_factory=lambda: ["x"])
    words: list[str] = field(default_factory=lambda: ["ids"])
    flags: list[str] = field(default_factory=lambda: ["mask"])
    rows: list[str] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    count: int = 0

    def fresh(self, letter: str) -> str:
        """A new name."""
        self.count += 1
        return f"{letter}{self.count}"

    def part(self, made: str) -> str:
        """A new part of the model, made by this code."""
        name = self.fresh("part")
        self.parts.append(f"self.{name} = {made}")
        return f"self.{name}"

    def x(self) -> str:
        """A tensor of features: mostly the newest, else an early one, which then skips stages."""
        return self.floats[-1] if self.choose.random() < 0.6 else self.choose.choice(self.floats)

    def write(self, kind: list[str], text: str) -> None:
        """A line that gives a tensor of a kind."""
        name = self.fresh("v")
        self.lines.append(f"{name} = {text}")
        kind.append(name)


def _part(kind: str) -> Callable[[Drawing], None]:
    return lambda draw: draw.write(draw.floats, f"{draw.part(f'{kind}()')}({draw.x()})")


def _attending(draw: Drawing) -> None:
    mask = f", {draw.choose.choice(draw.flags)}" if draw.choose.random() < 0.6 else ""
    draw.write(draw.floats, f"{draw.part('Attending()')}({draw.x()}{mask})")


def _gated(draw: Drawing) -> None:
    draw.write(draw.floats, f"{draw.part('Gated()')}({draw.x()}, {draw.choose.choice(draw.floats)})")


def _choosing(draw: Drawing) -> None:
    words, scores = draw.fresh("v"), draw.fresh("v")
    draw.lines.append(f"{words}, {scores} = {draw.part('Choosing()')}({draw.x()})")
    draw.words.append(words)
    draw.rows.append(f"{scores}.mean(1)")


def _lookup(draw: Drawing) -> None:
    """A table: a new one, one that is called again, or another part with the same weights."""
    way = draw.choose.random()
    if not draw.tables or way < 0.4:
        draw.tables.append(draw.part("nn.Embedding(WORDS, WIDE)"))
        table = draw.tables[-1]
    else:
        table = draw.choose.choice(draw.tables)
        if way < 0.7:
            other = draw.part("nn.Embedding(WORDS, WIDE)")
            draw.parts.append(f"{other}.weight = {table}.weight")
            table = other
    draw.write(draw.floats, f"{table}({draw.choose.choice(draw.words)}) + {draw.x()} * 0.5")


def _head(draw: Drawing) -> None:
    """Scores of words by a table, which an embedding may share."""
    head = draw.part("nn.Linear(WIDE, WORDS, bias=False)")
    if draw.tables and draw.choose.random() < 0.8:
        draw.parts.append(f"{head}.weight = {draw.choose.choice(draw.tables)}.weight")
    scores = draw.fresh("v")
    draw.lines.append(f"{scores} = {head}({draw.x()})")
    if draw.choose.random() < 0.5:
        draw.rows.append(f"{scores}.logsumexp(-1).mean(1)")
    else:
        draw.rows.append(f"cross_entropy({scores}.flatten(0, 1), labels.flatten(), ignore_index=-100)")


def _layers(draw: Drawing) -> None:
    """A stack of equal layers, each with its own parameters, or one layer several times."""
    count = draw.choose.randint(2, 5)
    shared = "[Layer()] * {0}" if draw.choose.random() < 0.15 else "[Layer() for _ in range({0})]"
    stack = draw.part(f"nn.ModuleList({shared.format(count)})")
    other = f", {draw.choose.choice(draw.floats)}" if draw.choose.random() < 0.5 else ""
    name, inner = draw.fresh("v"), draw.fresh("v")
    draw.lines += [f"{name} = {draw.x()}", f"{inner} = []", f"for layer in {stack}:"]
    draw.lines += [f"    {name} = layer({name}{other})", f"    {inner}.append({name})"]
    draw.floats.append(name)
    if draw.choose.random() < 0.3:
        draw.write(draw.floats, f"{inner}[0] * 0.3 + {inner}[{draw.choose.randrange(count)}].cos()")


def _flag(draw: Drawing) -> None:
    """Flags that follow from features, from words, or from other flags."""
    made = (f"{draw.x()}.mean(-1) > 0", f"{draw.choose.choice(draw.words)} % 3 != 0", f"~{draw.flags[-1]}")
    draw.write(draw.flags, draw.choose.choice(made))


def _masked(draw: Drawing) -> None:
    mask, other = f"{draw.choose.choice(draw.flags)}.unsqueeze(-1)", draw.choose.choice(draw.floats)
    draw.write(draw.floats, f"torch.where({mask}, {draw.x()}, {other} * 0.5)")


def _plain(draw: Drawing) -> None:
    """An op outside of all parts."""
    x, other = draw.x(), draw.choose.choice(draw.floats)
    made = (
        f"{x}.sin() + {other}",
        f"{x}.detach() * 0.5",
        f"{x} * {other}.sigmoid()",
        f"{x}.roll(1, 1) + {other} * 0.1",
    )
    draw.write(draw.floats, draw.choose.choice(made))


def _pooled(draw: Drawing) -> None:
    """One number for each sample, over the tokens that count."""
    mask = draw.choose.choice(draw.flags)
    draw.rows.append(f"({draw.x()}.square().mean(-1) * {mask}).sum() / {mask}.sum()")


def _own(draw: Drawing) -> None:
    """A parameter of the model itself."""
    name = draw.fresh("own")
    draw.parts.append(f"self.{name} = nn.Parameter(torch.randn(WIDE))")
    draw.write(draw.floats, f"{draw.x()} * self.{name}")


# By name how often a step is drawn, and what it writes.
STEPS: Mapping[str, tuple[int, Callable[[Drawing], None]]] = {
    "mixed": (3, _part("Mixed")),
    "attending": (3, _attending),
    "gated": (3, _gated),
    "choosing": (2, _choosing),
    "lookup": (4, _lookup),
    "head": (2, _head),
    "frozen": (1, _part("Frozen")),
    "layers": (4, _layers),
    "flag": (2, _flag),
    "masked": (2, _masked),
    "plain": (3, _plain),
    "pooled": (1, _pooled),
    "own": (1, _own),
}


@dataclass(frozen=True)
class Staged:
    """A random model, its inputs, and how it runs: `samples` in `micro_batches` on a mesh of these `sizes`."""

    seed: int
    source: str
    steps: frozenset[str]
    inputs: Mapping[str, Tensor]
    sizes: Mapping[str, int]
    schedule: str
    per_rank: int
    options: Mapping[str, Any]

    def __str__(self) -> str:
        how = f"{dict(self.sizes)}, {self.schedule} with {self.per_rank} stages a rank, {dict(self.options)}"
        return f"# seed {self.seed}: {how}\n{self.source}"

    def model(self) -> nn.Module:
        """The model, with the same values every time."""
        torch.manual_seed(self.seed)
        cross_entropy = nn.functional.cross_entropy
        names: dict[str, Any] = {**PARTS, "nn": nn, "torch": torch, "cross_entropy": cross_entropy}
        names |= {"WORDS": _WORDS, "WIDE": _WIDE}
        exec(compile(self.source, "<staged>", "exec"), names)
        model: nn.Module = names["Program"]()
        return model.double()


def _is_read(name: str, lines: Sequence[str]) -> bool:
    """Whether a line makes another tensor of a name."""
    made = (line.strip().split(" = ", 1) for line in lines if " = " in line)
    return any(name in re.findall(r"\w+", text) for other, text in made if other != name)


def _source(draw: Drawing) -> str:
    """The code of a model: its loss, and some of its tensors, early ones among them."""
    choose = draw.choose
    every = [*draw.floats[1:], *draw.words[1:], *draw.flags[1:]]
    shown = choose.sample(every, min(len(every), choose.randint(0, 3)))
    terms = [f"({term}).mean()" for term in draw.rows]
    left = [name for name in draw.floats[1:] if not _is_read(name, draw.lines)] or draw.floats[-1:]
    terms += [f"{name}.{choose.choice(('square().mean()', 'mean()', 'sum() * 0.01'))}" for name in left]
    lines = ["class Program(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    lines += [f"        {text}" for text in draw.parts]
    lines += ["    def forward(self, x, ids, mask, labels):"]
    lines += [f"        {text}" for text in draw.lines]
    outputs = ", ".join(f'"{name}": {name}' for name in shown)
    lines += [f'        return {{{outputs}{", " if outputs else ""}"loss": {" + ".join(terms)}}}']
    return "\n".join(lines) + "\n"


def _inputs(seed: int, samples: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, _WORDS, (samples, _TOKENS), generator=generator)
    labels = torch.randint(0, _WORDS, (samples, _TOKENS), generator=generator)
    skipped = torch.rand(samples, _TOKENS, generator=generator) < 0.2
    mask = torch.rand(samples, _TOKENS, generator=generator) < 0.7
    mask[:, 0] = True
    x = torch.randn(samples, _TOKENS, _WIDE, generator=generator, dtype=torch.float64)
    return {"x": x, "ids": ids, "mask": mask, "labels": labels.masked_fill(skipped, -100)}


# --- a seed -----------------------------------------------------------------------------------------------------------

# Meshes by number of ranks.
MESHES: Mapping[int, Sequence[Mapping[str, int]]] = {
    2: ({"pp": 2},),
    3: ({"pp": 3},),
    4: ({"pp": 4}, {"pp": 2, "dp": 2}, {"pp": 2, "tp": 2}),
}


def make_staged(seed: int, ranks: int) -> Staged:
    """The model of a seed, whose loss trains something, and how it runs on so many ranks."""
    choose = random.Random(f"{seed} {ranks}")
    while True:
        staged = _drawn(seed, choose, ranks)
        loss = staged.model()(**staged.inputs)["loss"]
        if loss.requires_grad and loss.isfinite():
            return staged


def _drawn(seed: int, choose: random.Random, ranks: int) -> Staged:
    draw, used = Drawing(choose), set[str]()
    names, weights = list(STEPS), [weight for weight, _ in STEPS.values()]
    drawn = ["layers", *choose.choices(names, weights, k=choose.randint(6, 14))]
    choose.shuffle(drawn)
    for name in drawn:
        STEPS[name][1](draw)
        used.add(name)
    sizes = choose.choice(MESHES[ranks])
    schedule, per_rank, count = _schedule(choose, sizes["pp"])
    inner = ranks // sizes["pp"]
    options: dict[str, Any] = {
        "micro_batches": count,
        "outputs": choose.choice(("planned", "full")),
        "recompute": choose.choice(RECOMPUTE),
    }
    inputs = _inputs(seed, count * inner * choose.choice((1, 2)))
    return Staged(seed, _source(draw), frozenset(used), inputs, sizes, schedule, per_rank, options)


def _schedule(choose: random.Random, ranks: int) -> tuple[str, int, int]:
    """A schedule that runs, the stages that each rank has, and a number of micro-batches that it takes."""
    while True:
        schedule = choose.choice(list(SCHEDULES))
        kind = SCHEDULES[schedule]
        per_rank = choose.randint(kind.least, kind.most or 3)
        count = choose.choice((1, 2, 3, 4, 6, 8))
        try:
            check_schedule(schedule, ranks, ranks * per_rank, count)
        except PipelineError:
            continue
        return schedule, per_rank, count


@contextmanager
def random_plan(staged: Staged) -> Iterator[None]:
    """Plans of a staged model are random: its layouts, when parameters are gathered, and its cuts, half of them at any
    op, the others where the search would cut."""
    choose = random.Random(staged.seed)
    anywhere = choose.random() < 0.5

    def solver(problem: Problem, *given: object) -> Solution:
        return random_solution(choose, problem, *given, coherent=0.5)

    def cuts(pieces: Sequence[object], boundaries: Sequence[object], *given: Any) -> object:
        stages = given[2]
        offered = [at for at in range(1, len(pieces)) if anywhere or boundaries[at] is not None]
        return SimpleNamespace(starts=tuple(sorted(choose.sample(offered, stages - 1))))

    once = choose.random() < 0.5
    with (
        solved_by(solver, gather_once=once, reduce_once=once and choose.random() < 0.5),
        mock.patch("passes.search.pipelines.program.best_cuts", cuts),
    ):
        yield


@dataclass(frozen=True)
class Outcome:
    """The result of a seed: the cuts (none where there is no plan, and `refused` says why), and the largest error of
    this rank with the tensor that has it."""

    cuts: tuple[str, ...] = ()
    worst: tuple[str, float] = ("", 0.0)
    refused: str = ""


def run_staged(staged: Staged) -> Outcome:
    """Train a step and evaluate on all ranks of this job, beside one device."""
    mesh = init_device_mesh("cpu", tuple(staged.sizes.values()), mesh_dim_names=tuple(staged.sizes))
    pipeline = autopar.Pipeline(schedule=staged.schedule, virtual_stages=staged.per_rank)
    stock = staged.model()
    try:
        with random_plan(staged):
            options = {"cluster": "ideal", "memory_limit": 1e15, "pipeline": pipeline, **staged.options}
            module = autopar.parallelize(stock, mesh, dict(staged.inputs), **options)
    except (PipelineError, autopar.MicroBatchError) as error:
        return Outcome(refused=str(error))
    errors = dict(_errors(staged, module, stock))
    worst = max(errors.items(), key=lambda item: item[1] if item[1] == item[1] else float("inf"))
    return Outcome(module.plan.programs["train"].cuts, worst)


def _errors(staged: Staged, module: autopar.DistributedModule, stock: nn.Module) -> Iterator[tuple[str, float]]:
    """The errors of two steps, whose gradients add up, and of an evaluation."""
    for number in range(2):
        held = number == 0 and staged.seed % 2
        with module.holding_gradients() if held else nullcontext():
            found = module.forward_backward(**staged.inputs)
        expected = stock(**staged.inputs)
        expected["loss"].backward()
        yield from _outputs(f"step {number}", found, expected)
    largest = max(float(item.grad.abs().max()) for item in stock.parameters() if item.grad is not None)
    gradients = {name: item.grad for name, item in stock.named_parameters(remove_duplicate=False)}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield f"gradient of {name}", _error(parameter.grad, gradients[name], max(_FLOOR, _PART * largest))
    module.eval()
    stock.eval()
    with torch.no_grad():
        yield from _outputs("evaluation", module(**staged.inputs), stock(**staged.inputs))
    held = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    every: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(every, held)
    trained = {name for name, gradient in gradients.items() if gradient is not None}
    yield "parameters that no rank has", float("inf") if trained - {name for own in every for name in own} else 0.0


def _outputs(what: str, found: Any, expected: Mapping[str, Tensor]) -> Iterator[tuple[str, float]]:
    """The errors of what this rank has of an output; what no rank has is infinitely wrong."""
    for name, item in expected.items():
        here = found[name] is not None
        every = [here] * dist.get_world_size()
        dist.all_gather_object(every, here)
        if not any(every) or (name == "loss" and not here):
            yield f"{what}: {name}", float("inf")
        elif here:
            yield f"{what}: {name}", _error(found[name], item, _FLOOR)


def _error(found: Tensor | None, expected: Tensor | None, floor: float) -> float:
    """The error relative to the largest element; a gradient that is zero may be missing."""
    if found is None or expected is None:
        given = found if found is not None else expected
        return 0.0 if given is None else float(_whole(given).abs().max()) / floor
    found, expected = _whole(found), expected.detach()
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if not expected.is_floating_point():
        return 0.0 if torch.equal(found, expected) else float("inf")
    return float((found - expected).abs().max()) / max(float(expected.abs().max()), floor)


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def run_seeds(seeds: Sequence[int]) -> dict[int, Outcome]:
    """The outcome on this rank of each seed, as many ranks as there are."""
    return {seed: run_staged(make_staged(seed, dist.get_world_size())) for seed in seeds}
