"""Random programs under random plans: made, run on all ranks, held against one device, and made small where they fail.

A `Recipe` is a random program: straight code, drawn step by step from `steps`, with what its module holds and what
it is given. A seed gives the same recipe and the same plan every time.
"""

import difflib
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.models.info import read_model
from autopar.options import Options
from autopar.planner import PlannedModel, plan_model
from autopar.request import make_request
from autopar.runtime.generated import collectives
from autopar.runtime.generated.bases import Container, Generated, place
from autopar.runtime.generated.saving import saving
from passes.ir.choices import Node, Problem, Solution, Strategy
from passes.ir.configuration import Configuration
from passes.ir.errors import CaptureError
from passes.ir.layout import Layout
from passes.ir.mesh import Mesh
from tests.autopar.in_process import Threads, axes_at
from tests.autopar.solving import solved_by
from tests.autopar.steps import MOST, NAMES, STEPS, Code, Draw, Held, UnfitError
from tests.autopar.without_engine import step_by_step
from tests.passes.helpers import Coordinate, Values, part, summed

TOLERANCE = 1e-9

# Values of steps lie between these.
_SMALLEST, _LARGEST = 1e-3, 30.0
# An error is relative to at least this, and to this part of the largest gradient.
_FLOOR, _PART = 1e-3, 1e-3

# --- random plans -----------------------------------------------------------------------------------------------------


def _configuration(given: Sequence[object]) -> Configuration:
    """The last argument of a solver behind the problem."""
    configuration = given[-1]
    assert isinstance(configuration, Configuration)
    return configuration


def random_solution(choose: random.Random, problem: Problem, *given: object, coherent: float = 0.0) -> Solution:
    """A random strategy for every node, and none, some or all of the redistributions made again in the backward pass.

    With the probability `coherent` a node gets one of the strategies that agree best with what its neighbours have
    already, so that splits travel from op to op.
    """
    chosen: dict[int, Strategy] = {}
    picks: list[int] = []
    links = _links(problem) if coherent else {}
    for index, node in enumerate(problem.nodes):
        options = list(range(len(node.strategies)))
        if choose.random() < coherent:
            agreeing = [_agreeing(node.strategies[option], links.get(index, ()), chosen) for option in options]
            options = [option for option in options if agreeing[option] == max(agreeing)]
        picks.append(choose.choice(options))
        chosen[index] = node.strategies[picks[-1]]
    part = choose.choice((0.0, 0.0, 0.5, 1.0, 1.0))
    again = {item for item in _kept(problem, picks) if choose.random() < part}
    return Solution(tuple(picks), frozenset(again), 0.0, 0.0, _configuration(given))


# For every node: (the node at the other end, the number of the tensor there, the number here, whether that is read).
_Links = Mapping[int, Sequence[tuple[int, int, int, bool]]]


def _links(problem: Problem) -> _Links:
    links: dict[int, list[tuple[int, int, int, bool]]] = {}
    for edge in problem.edges:
        links.setdefault(edge.consumer, []).append((edge.producer, edge.result, edge.operand, True))
        links.setdefault(edge.producer, []).append((edge.consumer, edge.operand, edge.result, False))
    return links


def _agreeing(strategy: Strategy, links: Sequence[tuple[int, int, int, bool]], chosen: Mapping[int, Strategy]) -> int:
    """With how many neighbours a strategy agrees on the layout of what is between them."""
    count = 0
    for other, there, here, reads in links:
        if other in chosen:
            theirs = chosen[other].results[there] if reads else chosen[other].operands[there]
            count += theirs == (strategy.operands if reads else strategy.results)[here]
    return count


def _kept(problem: Problem, picks: Sequence[int]) -> list[tuple[int, Layout]]:
    """All redistributions whose result autograd keeps."""
    found = (
        (edge.group, problem.nodes[edge.consumer].strategies[picks[edge.consumer]].operands[edge.operand])
        for edge in problem.edges
        if edge.saved
    )
    return list(dict.fromkeys(found))


# --- programs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """The statements of one step, and the names that they define for later ones."""

    kind: str
    code: tuple[str, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class Body:
    """A forward function, and what its module holds. It returns sums of names, in a dict if it is `keyed`."""

    arguments: tuple[str, ...]
    lines: tuple[Line, ...]
    returned: tuple[tuple[str, ...], ...]
    held: Mapping[str, Held]
    keyed: bool = False

    def result(self) -> str:
        """The returned value, as code."""
        shown = [" + ".join(names) for names in self.returned]
        if self.keyed:
            keys = ["loss" if len(names) > 1 else f"y{number}" for number, names in enumerate(self.returned)]
            return "{" + ", ".join(f'"{key}": {text}' for key, text in zip(keys, shown, strict=True)) + "}"
        return shown[0] if len(shown) == 1 else ", ".join(shown)

    def pruned(self, arguments: Sequence[str]) -> "Body":
        """Without what nothing needs."""
        lines = _needed(self.lines, self.returned)
        used = {name for names in self.returned for name in names} | _names(
            [text for line in lines for text in line.code]
        )
        held = {name: item for name, item in self.held.items() if name in used}
        return replace(self, arguments=tuple(name for name in arguments if name in used), lines=lines, held=held)


@dataclass(frozen=True)
class Blocks:
    """A list of blocks that are equal, or take turns: their bodies, and what each of the blocks holds."""

    bodies: tuple[Body, ...]
    copies: tuple[Mapping[str, Held], ...]


@dataclass(frozen=True)
class Recipe:
    """A random program with its inputs; `trained` are those that require a gradient."""

    seed: int
    body: Body
    blocks: Mapping[str, Blocks]
    inputs: Mapping[str, Tensor]
    trained: frozenset[str]
    training: bool

    def given(self) -> dict[str, Tensor]:
        """The inputs, as leaves."""
        return {name: value.clone().requires_grad_(name in self.trained) for name, value in self.inputs.items()}

    def source(self) -> str:
        """The module as code; values are given to it."""
        classes = [
            _class(f"{name.title()}{'AB'[number]}", body, {})
            for name, blocks in self.blocks.items()
            for number, body in enumerate(blocks.bodies)
        ]
        return "\n\n".join([*classes, _class("Program", self.body, self.blocks)])

    def __str__(self) -> str:
        shapes = [f"#   {name}: {_described(value)}{', trained' if name in self.trained else ''}"
                  for name, value in self.inputs.items()]  # fmt: skip
        mode = "training" if self.training else "evaluation"
        return "\n".join([f"# seed {self.seed}, in {mode}, with", *shapes, self.source()])


def _described(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _class(name: str, body: Body, blocks: Mapping[str, Blocks]) -> str:
    lines = [f"class {name}(nn.Module):", "    def __init__(self, held):", "        super().__init__()"]
    for item, held in body.held.items():
        made = {
            "parameter": f'self.{item} = nn.Parameter(held["{item}"])',
            "frozen": f'self.{item} = nn.Parameter(held["{item}"], requires_grad=False)',
            "buffer": f'self.register_buffer("{item}", held["{item}"])',
        }
        lines.append(f"        {made[held.kind]}  # {_described(held.value)}")
    for item, block in blocks.items():
        kinds = [f"{item.title()}{'AB'[number % len(block.bodies)]}" for number in range(len(block.copies))]
        made = [f'{kind}(held["{item}"][{number}])' for number, kind in enumerate(kinds)]
        lines.append(f"        self.{item} = nn.ModuleList([{', '.join(made)}])")
    lines += ["", f"    def forward({', '.join(['self', *body.arguments])}):"]
    lines += [f"        {text}" for line in body.lines for text in line.code]
    lines += [f"        return {body.result()}", ""]
    return "\n".join(lines)


def build(recipe: Recipe) -> nn.Module:
    """The module of a recipe, with the values that it begins with."""
    module = _made(recipe.source(), "Program", _values(recipe.body.held, recipe.blocks))
    module.train(recipe.training)
    # So that it can be sent to other processes and copied.
    type(module).__reduce__ = lambda self: (build, (recipe,))  # type: ignore[method-assign]
    return module


def _values(held: Mapping[str, Held], blocks: Mapping[str, Blocks]) -> dict[str, object]:
    values: dict[str, object] = {name: item.value.clone() for name, item in held.items()}
    for name, block in blocks.items():
        values[name] = [_values(copy, {}) for copy in block.copies]
    return values


def _made(source: str, name: str, held: Mapping[str, object]) -> nn.Module:
    namespace: dict[str, Any] = dict(NAMES)
    exec(compile(source, "<program>", "exec"), namespace)
    module: nn.Module = namespace[name](held)
    return module


# --- drawing ----------------------------------------------------------------------------------------------------------

_NAME = re.compile(r"[A-Za-z_]\w*")


def _names(texts: Sequence[str]) -> set[str]:
    return {name for text in texts for name in _NAME.findall(text)}


_POOL = (2, 3, 4, 4, 6, 6, 6, 8, 8, 12, 12, 12, 12, 16, 24, 5, 7, 9, 1)


@dataclass
class _Drawing:
    """A body while it is drawn: what lives with its values, and what is there already."""

    choose: random.Random
    generator: torch.Generator
    sizes: Sequence[int]
    inner: bool
    training: bool
    count: int
    values: dict[str, Tensor]
    held: dict[str, Held] = field(default_factory=dict)
    blocks: dict[str, Blocks] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)

    def step(self, kinds: Sequence[str]) -> None:
        """Draw one more step, of any of `kinds` that fits."""
        weights = [STEPS[kind][0] if kind in STEPS else 10 for kind in kinds]
        for _ in range(100):
            (kind,) = self.choose.choices(kinds, weights)
            try:
                self.add(kind)
                return
            except (UnfitError, RuntimeError, ValueError, IndexError):
                # What torch refuses is no program.
                continue

    def add(self, kind: str) -> None:
        """Draw a step of `kind`.

        Raises UnfitError where nothing fits, and what torch raises for what it refuses.
        """
        draw = Draw(
            self.choose, self.generator, self.values, self.held, self.sizes, self.inner, self.count
        )  # fmt: skip
        blocks: dict[str, Blocks] = {}
        code = self.repeated(draw, blocks) if kind == "blocks" else STEPS[kind][1](draw)
        if isinstance(code, str):
            code = [f"{draw.result()} = {code}"]
        used = _names(code)
        held = {name: item for name, item in draw.held.items() if name in used}
        inputs = {name: item for name, item in draw.inputs.items() if name in used}
        lists = {
            name: [
                _made(_class("Block", item.bodies[number % len(item.bodies)], {}), "Block", _values(copy, {}))
                for number, copy in enumerate(item.copies)
            ]
            for name, item in blocks.items()
        }
        leaves = {name: _leaf(value, value.is_floating_point()) for name, value in self.values.items() if name in used}
        own = {name: _leaf(item.value, item.kind == "parameter")
               for name, item in {**self.held, **held}.items() if name in used}  # fmt: skip
        scope: dict[str, Any] = {**NAMES, **inputs, **leaves}
        scope["self"] = SimpleNamespace(training=self.training, **own, **lists)
        exec("\n".join(code), scope)
        found = {name: scope[name] for name in draw.results}
        for value in found.values():
            _check(value)
        # What torch cannot differentiate is refused too.
        total = sum(value.sum() for value in found.values() if value.requires_grad)
        if isinstance(total, Tensor):
            total.backward()  # type: ignore[no-untyped-call]
        self.count = draw.count
        self.held.update(held)
        self.blocks.update(blocks)
        self.inputs.update(inputs)
        self.values.update({name: value.detach().clone() for name, value in found.items()})
        self.lines.append(Line(kind, tuple(code), tuple(draw.results)))

    def repeated(self, draw: Draw, blocks: dict[str, Blocks]) -> Code:
        """A list of equal blocks, one after the other; they may read another tensor, and give another one each."""
        carried = draw.tensor(least=1, most=3)
        arguments = {"h": self.values[carried]}
        given = [carried]
        if draw.chance(0.4):
            shared = draw.tensor() if draw.chance(0.7) else draw.parameter(*draw.shape(carried))
            given.append(shared)
            arguments["s"] = draw.value(shared)
        if draw.chance(0.75):
            bodies = [self.block(draw, arguments, draw.choose.randint(1, 4), extra=draw.chance(0.6))]
        else:
            bodies = [self.block(draw, arguments, draw.choose.randint(1, 2), extra=False) for _ in range(2)]
        copies: list[Mapping[str, Held]] = [body.held for body in bodies]
        for number in range(len(bodies), len(bodies) * draw.choose.randint(2, 4)):
            held = bodies[number % len(bodies)].held
            copies.append({name: self.again(item) for name, item in held.items()})
        name = draw.fresh("blocks")
        blocks[name] = Blocks(tuple(bodies), tuple(copies))
        result = draw.result()
        call = f"block({', '.join([result, *given[1:]])})"
        order = draw.choose.choice(("self.{0}",) * 5 + ("reversed(self.{0})", "(*self.{0}, *self.{0})")).format(name)
        lines = [f"{result} = {carried}", f"for block in {order}:"]
        if len(bodies[0].returned) == 1:
            return [*lines, f"    {result} = {call}"]
        every, one, other = draw.local(), draw.local(), draw.result()
        shown = draw.choose.choice((f"{every}[-1]", f"torch.stack({every}).mean(0)", f"{every}[0] + {every}[-1]"))
        lines = [f"{every} = []", *lines, f"    {result}, {one} = {call}", f"    {every}.append({one})"]
        return [*lines, f"{other} = {shown}"]

    def block(self, draw: Draw, arguments: Mapping[str, Tensor], count: int, extra: bool) -> Body:
        """The body of a block with `count` steps and a residual; it may give another tensor, too."""
        inner = _Drawing(self.choose, self.generator, self.sizes, True, self.training, draw.count, dict(arguments))
        for _ in range(count):
            inner.step(_PLAIN)
        inner.count += 1
        draw.count = inner.count
        last, shape = f"v{inner.count}", arguments["h"].shape
        back = [name for name, value in inner.values.items() if value.shape == shape and value.is_floating_point()]
        end = f"{draw.choose.choice(back[-2:])}.tanh() + h * 0.5"
        inner.lines.append(Line("carry", (f"{last} = {end}",), (last,)))
        leaves = [name for name in inner.leaves() if name != last and inner.values[name].is_floating_point()]
        returned = [last, *([draw.choose.choice(leaves)] if leaves and extra else [])]
        body = Body(tuple(arguments), tuple(inner.lines), tuple((name,) for name in returned), inner.held)
        return replace(body.pruned(()), arguments=tuple(arguments))

    def leaves(self) -> list[str]:
        """Results that nothing reads."""
        return [name for line in self.lines for name in line.results if not _read(name, self.lines)]

    def again(self, held: Held) -> Held:
        """Another tensor like one that is held: the same values in another order."""
        if not held.value.is_floating_point():
            return held
        flat = held.value.flatten()
        order = torch.randperm(flat.numel(), generator=self.generator)
        return replace(held, value=flat[order].reshape(held.value.shape))


def _leaf(value: Tensor, trained: bool) -> Tensor:
    """A copy that may have a gradient."""
    return value.clone().requires_grad_(trained)


# Steps within blocks.
_PLAIN = tuple(STEPS)
_ALL = (*STEPS, "blocks")


def _read(name: str, lines: Sequence[Line]) -> bool:
    """Whether a line other than the one that defines it reads `name`."""
    return any(name in _names(line.code) for line in lines if name not in line.results)


def _needed(lines: Sequence[Line], returned: Sequence[Sequence[str]]) -> tuple[Line, ...]:
    """The lines that `returned` needs."""
    used = {name for names in returned for name in names}
    kept: list[Line] = []
    for line in reversed(lines):
        if used & set(line.results):
            kept.append(line)
            used |= _names(line.code)
    return tuple(reversed(kept))


def _check(value: object) -> None:
    """Refuse results that are too large, too small or of a kind that later steps do not take."""
    if not isinstance(value, Tensor) or value.numel() == 0 or value.numel() > MOST or value.dim() > 5:
        raise UnfitError
    if value.dtype not in (torch.float64, torch.int64, torch.bool):
        raise UnfitError
    if value.is_floating_point():
        largest = float(value.detach().abs().max())
        if not _SMALLEST < largest < _LARGEST:
            raise UnfitError


def make_recipe(seed: int, most: int = 25) -> Recipe:
    """The random program of a seed, with five to `most` steps."""
    for attempt in range(100):
        recipe = _draw(seed, random.Random(f"{seed} {attempt}"), most)
        if recipe is not None and _is_sound(recipe):
            return recipe
    raise AssertionError(f"no program for seed {seed}")


def _draw(seed: int, choose: random.Random, most: int) -> Recipe | None:
    generator = torch.Generator().manual_seed(choose.getrandbits(40))
    sizes = [choose.choice(_POOL) for _ in range(choose.randint(2, 4))]
    training = choose.random() < 0.9
    drawing = _Drawing(choose, generator, sizes, False, training, 0, {})
    for number in range(choose.randint(1, 3)):
        shape = [choose.choice(sizes) for _ in range(choose.choice((1, 2, 3, 3, 3, 4)))]
        drawing.inputs[f"x{number}"] = torch.randn(shape, generator=generator, dtype=torch.float64)
        if drawing.inputs[f"x{number}"].numel() > MOST:
            return None
    drawing.count = len(drawing.inputs)
    drawing.values.update(drawing.inputs)
    floats = list(drawing.inputs)
    for _ in range(choose.randint(min(5, most), most)):
        drawing.step(_ALL)
    returned = _returned(choose, drawing)
    body = Body(tuple(drawing.inputs), tuple(drawing.lines), returned, drawing.held, choose.random() < 0.5)
    trained = frozenset(name for name in floats if choose.random() < 0.5) or frozenset(floats)
    recipe = _pruned(Recipe(seed, body, drawing.blocks, drawing.inputs, trained, training))
    return recipe if recipe.inputs else None


def _pruned(recipe: Recipe) -> Recipe:
    """Without what nothing needs."""
    body = recipe.body.pruned(tuple(recipe.inputs))
    used = _names([text for line in body.lines for text in line.code])
    inputs = {name: recipe.inputs[name] for name in body.arguments}
    blocks = {name: item for name, item in recipe.blocks.items() if name in used}
    return replace(recipe, body=body, inputs=inputs, blocks=blocks, trained=recipe.trained & set(inputs))


def _returned(choose: random.Random, drawing: _Drawing) -> tuple[tuple[str, ...], ...]:
    """Some of what nothing reads, and a loss of the others."""
    leaves = drawing.leaves()
    floats = [name for name in leaves if drawing.values[name].is_floating_point()]
    others = [name for name in leaves if name not in floats]
    shown = choose.sample(floats, min(len(floats), choose.randint(1, 3)))
    shown += choose.sample(others, min(len(others), choose.randint(0, 2)))
    if choose.random() < 0.1:
        shown.append(choose.choice(list(drawing.values)))
    terms = []
    for name in floats:
        if name not in shown:
            drawing.count += 1
            terms.append(f"v{drawing.count}")
            text = choose.choice(("{}.mean()", "{}.square().mean()", "{}.sum() * 0.1")).format(name)
            drawing.lines.append(Line("loss", (f"{terms[-1]} = {text}",), (terms[-1],)))
    return (*((name,) for name in shown), *((tuple(terms),) if terms else ()))


def _is_sound(recipe: Recipe) -> bool:
    """Whether it runs, and gradients are finite and not too large."""
    try:
        expected = expectation(recipe)
    except (RuntimeError, IndexError):
        # Views of views may be what torch refuses, which the steps by themselves were not.
        return False
    values = [value for value in (*expected.gradients.values(), *expected.inputs.values()) if value is not None]
    return all(bool(value.isfinite().all()) and float(value.abs().max()) < 1e4 for value in values if value.numel())


# --- one device -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """The results of a program on one device: outputs, gradients of parameters and of inputs from `cotangents` of the
    outputs, and buffers afterwards."""

    outputs: tuple[object, ...]
    cotangents: tuple[Tensor | None, ...]
    gradients: Mapping[str, Tensor | None]
    inputs: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]


def expectation(recipe: Recipe) -> Expected:
    """Run a recipe on one device, forward and backward."""
    model, inputs = build(recipe), recipe.given()
    generator = torch.Generator().manual_seed(recipe.seed)
    with torch.set_grad_enabled(recipe.training):
        outputs = tuple(pytree.tree_leaves(model(**inputs)))
    cotangents = tuple(
        torch.randn(item.shape, generator=generator, dtype=item.dtype)
        if recipe.training and isinstance(item, Tensor) and item.requires_grad
        else None
        for item in outputs
    )
    _backward(outputs, cotangents)
    return Expected(
        tuple(item.detach() if isinstance(item, Tensor) else item for item in outputs),
        cotangents,
        {name: item.grad for name, item in model.named_parameters()},
        {name: item.grad for name, item in inputs.items()},
        {name: item.detach().clone() for name, item in model.named_buffers()},
    )


def _backward(outputs: Sequence[object], cotangents: Sequence[Tensor | None]) -> None:
    pairs = [(item, given) for item, given in zip(outputs, cotangents, strict=True) if given is not None]
    if pairs:
        torch.autograd.backward([item for item, _ in pairs], [given for _, given in pairs])  # type: ignore[misc]


# --- all ranks --------------------------------------------------------------------------------------------------------

Solver = Callable[..., Solution]


@dataclass(frozen=True)
class Trial:
    """A recipe under a plan: the planning problem, what was chosen, what was generated, and the error of every tensor;
    `failure` says what was raised."""

    recipe: Recipe
    mesh: Mesh
    problem: Problem | None
    solution: Solution | None
    source: str
    errors: Mapping[str, float]
    failure: str = ""

    @property
    def worst(self) -> tuple[str, float]:
        """The tensor that is off most, and by how much."""
        if self.failure:
            return self.failure, float("inf")
        return max(self.errors.items(), key=lambda item: item[1] if item[1] == item[1] else float("inf"))

    @property
    def way(self) -> str:
        """In what way it fails: the kind of error that is raised, or nothing for numbers that differ."""
        return self.failure.partition(":")[0]

    @property
    def fails(self) -> bool:
        """Whether it is not what it is on one device."""
        return not self.worst[1] <= TOLERANCE

    def used(self) -> Iterator[tuple[Node, Strategy]]:
        """The chosen strategies, node by node."""
        if self.problem is not None and self.solution is not None:
            for index, node in enumerate(self.problem.nodes):
                yield node, self.solution.strategy(self.problem, index)


def attempt(recipe: Recipe, mesh: Mesh, solver: Solver) -> Trial:
    """Plan a recipe with `solver` and run it on all ranks."""
    noted: list[tuple[Problem, Solution]] = []

    def solve(problem: Problem, *rest: object) -> Solution:
        noted.append((problem, solver(problem, *rest)))
        return noted[-1][1]

    source, errors, failure = "", dict[str, float](), ""
    try:
        compiled = planned(recipe, mesh, solve)
        (program,) = compiled.programs.values()
        source = program.source
        errors = dict(_errors(recipe, mesh, compiled))
    except CaptureError:
        raise
    except Exception as error:
        # Whatever is raised is a failure, and is said.
        failure = f"{type(error).__name__}: {error}"
    problem, solution = noted[0] if noted else (None, None)
    return Trial(recipe, mesh, problem, solution, source, errors, failure)


def planned(recipe: Recipe, mesh: Mesh, solver: Solver) -> PlannedModel:
    """A recipe planned with `solver`."""
    model = build(recipe)
    options = Options(
        cluster="ideal", memory_limit=1e15, objective="train" if recipe.training else "infer"
    )  # fmt: skip
    request = make_request(mesh.by_name, options)
    info = read_model(model, recipe.given(), request)
    with solved_by(solver):
        return plan_model(model, info, request)


@dataclass(frozen=True)
class _Outcome:
    """The results of one rank."""

    outputs: tuple[object, ...]
    gradients: Mapping[str, Tensor | None]
    inputs: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]


def _on_rank(
    recipe: Recipe, compiled: PlannedModel, kind: type[Generated], expected: Expected, mesh: Mesh, rank: int
) -> _Outcome:
    """Run a compiled recipe, whose generated class is `kind`, on one rank."""
    ((_, program),) = compiled.programs.items()
    coordinate, root, model = mesh.coordinates()[rank], Container(), build(recipe)
    for name, parameter in model.named_parameters():
        layout = compiled.stored.get(name)
        own = parameter.detach() if layout is None else part(parameter.detach(), layout, coordinate, mesh)
        place(root, name, nn.Parameter(own.clone().contiguous(), parameter.requires_grad))
    for name, buffer in model.named_buffers():
        place(root, name, buffer.clone())
    given = {}
    for item in program.inputs:
        own = part(recipe.inputs[item.name], item.layout, coordinate, mesh).clone().contiguous()
        given[item.name] = own.requires_grad_(item.name in recipe.trained and recipe.training)
    axes = axes_at(coordinate, mesh)
    seen = step_by_step(model, root, program.held, compiled.stored, mesh, axes, vars(collectives))
    generated = kind(seen, axes, torch.device("cpu"), program.tensors)
    with torch.set_grad_enabled(program.differentiable and recipe.training):
        if program.regathers and torch.is_grad_enabled():
            with saving():
                outputs = generated.forward(*given.values())
        else:
            outputs = generated.forward(*given.values())
    cotangents = [
        part(whole, planned.layout, coordinate, mesh)
        if whole is not None and planned.layout is not None and output.requires_grad
        else None
        for output, whole, planned in zip(outputs, expected.cotangents, program.outputs, strict=True)
    ]
    _backward(outputs, cotangents)
    return _Outcome(
        tuple(item.detach() if isinstance(item, Tensor) else item for item in outputs),
        {name: item.grad for name, item in root.named_parameters()},
        {name: item.grad for name, item in given.items()},
        {name: item.detach() for name, item in root.named_buffers()},
    )


def _errors(recipe: Recipe, mesh: Mesh, compiled: PlannedModel) -> Iterator[tuple[str, float]]:
    """Run on all ranks; the error of every tensor."""
    ((_, program),) = compiled.programs.items()
    expected = expectation(recipe)
    namespace: dict[str, Any] = {}
    exec(compile(program.source, "<generated>", "exec"), namespace)
    kind = namespace[program.class_name]
    outcomes = Threads(mesh.size).run(lambda rank: _on_rank(recipe, compiled, kind, expected, mesh, rank))
    by_place = dict(zip(mesh.coordinates(), outcomes, strict=True))
    whole: Layout = ()
    for number, (planned, other) in enumerate(zip(program.outputs, expected.outputs, strict=True)):
        values = {coordinate: outcome.outputs[number] for coordinate, outcome in by_place.items()}
        yield f"output {planned.name}", _error(values, other, planned.layout or whole, mesh, _FLOOR)
    gradients = [*expected.gradients.values(), *expected.inputs.values()]
    largest = max((float(item.abs().max()) for item in gradients if item is not None and item.numel()), default=0.0)
    floor = max(_FLOOR, _PART * largest)
    for name, gradient in expected.gradients.items():
        found = {coordinate: outcome.gradients[name] for coordinate, outcome in by_place.items()}
        yield f"gradient of {name}", _error(found, gradient, compiled.stored.get(name, whole), mesh, floor)
    for item in program.inputs:
        found = {coordinate: outcome.inputs[item.name] for coordinate, outcome in by_place.items()}
        yield f"gradient of {item.name}", _error(found, expected.inputs[item.name], item.layout, mesh, floor)
    for name, buffer in expected.buffers.items():
        found = {coordinate: outcome.buffers[name] for coordinate, outcome in by_place.items()}
        yield f"buffer {name}", _error(found, buffer, whole, mesh, _FLOOR)


def _error(values: Mapping[Coordinate, object], whole: object, layout: Layout, mesh: Mesh, floor: float) -> float:
    """The largest error of any rank; infinite where what there is is not alike.

    A gradient that is zero may be missing: of what is overwritten torch has zeros, a plan has nothing.
    """
    if whole is None or all(value is None for value in values.values()):
        given = (*values.values(), whole)
        return max((float(value.abs().max()) / floor for value in given if isinstance(value, Tensor)), default=0.0)
    if not isinstance(whole, Tensor):
        return 0.0 if all(value is whole or value == whole for value in values.values()) else float("inf")
    tensors: Values = {}
    for coordinate, value in values.items():
        if not isinstance(value, Tensor):
            return float("inf")
        tensors[coordinate] = value
    worst = 0.0
    for coordinate, value in summed(tensors, layout, mesh).items():
        expected = part(whole, layout, coordinate, mesh)
        if value.shape != expected.shape or value.dtype != expected.dtype:
            return float("inf")
        if not whole.is_floating_point():
            worst = max(worst, 0.0 if torch.equal(value, expected) else float("inf"))
        elif value.numel():
            error = float((value - expected).abs().max()) / max(float(whole.abs().max()), floor)
            worst = error if error != error else max(worst, error)
    return worst


# --- what fails, made small -------------------------------------------------------------------------------------------


def is_plain(strategy: Strategy) -> bool:
    """Whether a strategy computes everything on every rank."""
    return all(placement.kind in "RI" for layout in (*strategy.operands, *strategy.results) for placement in layout)


def _label(node: Node) -> str:
    return f"{node.kind} {node.key}" if node.kind != "op" else re.sub(r"\.\d+$", "", node.key)


@dataclass(frozen=True)
class Carried:
    """A solver that does what a trial did, as far as there are the same nodes: those in `plain` are computed whole, and
    so is what is new."""

    before: Trial
    plain: frozenset[int] = frozenset()
    again: bool = True

    def __call__(self, problem: Problem, *given: object) -> Solution:
        """Choose for `problem`."""
        old, solution = self.before.problem, self.before.solution
        if old is None or solution is None:
            return Solution(
                tuple(_found(node, None) for node in problem.nodes), frozenset(), 0.0, 0.0, _configuration(given)
            )
        labels = [[_label(node) for node in item.nodes] for item in (old, problem)]
        same: dict[int, int] = {}
        for block in difflib.SequenceMatcher(None, *labels, autojunk=False).get_matching_blocks():
            same.update({block.b + offset: block.a + offset for offset in range(block.size)})
        picks = []
        for index, node in enumerate(problem.nodes):
            known = same.get(index)
            wanted = None if known is None or known in self.plain else solution.strategy(old, known)
            picks.append(_found(node, wanted))
        again = _kept(problem, picks) if self.again and solution.regathered else ()
        return Solution(tuple(picks), frozenset(again), 0.0, 0.0, _configuration(given))


def _found(node: Node, wanted: Strategy | None) -> int:
    """The strategy that is `wanted`, or one that is called so, or the first plain one."""
    options = node.strategies
    for like in (lambda item: item == wanted, lambda item: wanted is not None and item.methods == wanted.methods):
        for index, item in enumerate(options):
            if like(item):
                return index
    return next((index for index, item in enumerate(options) if is_plain(item)), 0)


def shrunk(trial: Trial, most: int = 150) -> Trial:
    """The smallest trial that still fails, after at most `most` tries."""
    tries = 0

    def better(recipe: Recipe, solver: Solver) -> Trial | None:
        nonlocal tries
        tries += 1
        if tries > most:
            return None
        try:
            found = attempt(recipe, trial.mesh, solver)
        except CaptureError:
            return None
        return found if found.fails and found.way == trial.way else None

    while True:
        size = _size(trial)
        trial = better(trial.recipe, Carried(trial, again=False)) or trial
        trial = _with_fewer_lines(trial, better)
        trial = _with_plain_nodes(trial, better)
        if _size(trial) == size or tries > most:
            break
    return trial


def _size(trial: Trial) -> tuple[int, int]:
    return len(trial.recipe.body.lines), sum(not is_plain(strategy) for _, strategy in trial.used())


Better = Callable[[Recipe, Solver], Trial | None]


def _with_fewer_lines(trial: Trial, better: Better) -> Trial:
    for output in reversed(trial.recipe.body.returned):
        for name in output:
            smaller = _without_output(trial.recipe, name)
            if smaller is not None:
                trial = better(smaller, Carried(trial)) or trial
    position = len(trial.recipe.body.lines)
    while position > 0:
        position = min(position, len(trial.recipe.body.lines)) - 1
        if position >= 0:
            trial = better(_without_line(trial.recipe, position), Carried(trial)) or trial
    return trial


def _without_output(recipe: Recipe, name: str) -> Recipe | None:
    """The recipe without one of its outputs, or of the terms of its loss, as long as there is another."""
    left = [tuple(item for item in names if item != name) for names in recipe.body.returned]
    returned = tuple(names for names in left if names)
    return _pruned(replace(recipe, body=replace(recipe.body, returned=returned))) if returned else None


def _without_line(recipe: Recipe, position: int) -> Recipe:
    """The recipe without one of its lines: what that gave is given from outside."""
    line = recipe.body.lines[position]
    values = _run(recipe)
    given = {name: values[name].detach() for name in line.results}
    trained = {name for name in line.results if values[name].requires_grad}
    lines = (*recipe.body.lines[:position], *recipe.body.lines[position + 1 :])
    inputs = {**recipe.inputs, **given}
    changed = replace(recipe, body=replace(recipe.body, lines=lines), inputs=inputs, trained=recipe.trained | trained)
    return _pruned(changed)


def _run(recipe: Recipe) -> Mapping[str, Tensor]:
    """The values of all names."""
    scope: dict[str, Any] = {**NAMES, "self": build(recipe), **recipe.given()}
    for line in recipe.body.lines:
        exec("\n".join(line.code), scope)
    return scope


def _with_plain_nodes(trial: Trial, better: Better) -> Trial:
    """Compute whole what need not be split for it to fail: halves, then smaller parts."""

    def special(of: Trial) -> list[int]:
        return [index for index, (_, strategy) in enumerate(of.used()) if not is_plain(strategy)]

    count = len(special(trial))
    while count:
        start = 0
        while start < len(places := special(trial)):
            found = better(trial.recipe, Carried(trial, frozenset(places[start : start + count])))
            if found is None:
                start += count
            else:
                trial = found
        count //= 2
    return trial


def report(trial: Trial, small: Trial) -> str:
    """A readable report of the failure."""
    name, error = trial.worst
    lines = [
        f"seed {trial.recipe.seed} on {trial.mesh}: {name} is off by {error:.1e}",
        "",
        str(trial.recipe),
        "",
        f"the smallest that fails: {small.worst[0]} is off by {small.worst[1]:.1e}",
        str(small.recipe),
        "what is not computed whole in it:",
    ]
    for node, strategy in small.used():
        if not is_plain(strategy):
            shown = f"{strategy.operands} -> {strategy.results}"
            lines.append(f"  {node.kind} {node.key}: {', '.join(strategy.methods)}  {shown}")
    return "\n".join([*lines, "", small.source])


# --- a seed -----------------------------------------------------------------------------------------------------------

# Meshes, how often each is drawn, and how many steps programs have there: planning takes longest on three axes.
_MESHES = (((2,), 5, 25), ((3,), 3, 25), ((4,), 4, 25), ((2, 2), 5, 20), ((2, 3), 3, 16), ((2, 2, 2), 1, 8))


def case(seed: int) -> tuple[Recipe, Mesh, Solver]:
    """The program, the mesh and the plan of a seed."""
    choose = random.Random(seed)
    ((sizes, _, most),) = choose.choices(_MESHES, [weight for _, weight, _ in _MESHES])
    coherent = choose.choice((0.0, 0.0, 0.5, 0.9))
    mesh = Mesh(("dp", "cp", "tp")[: len(sizes)], sizes)

    def solver(problem: Problem, *given: object) -> Solution:
        return random_solution(random.Random(seed), problem, *given, coherent=coherent)

    return make_recipe(seed, most), mesh, solver
