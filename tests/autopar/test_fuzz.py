"""Random programs under random plans compute what they do on one device; so does what failed once."""

import random
from collections import Counter
from unittest import mock

import pytest
import torch
from torch import Tensor

import autopar
from autopar.runtime import Axis, all_gather, all_reduce
from autopar.testing import compare
from passes.ir.layout import P, R, S
from passes.rules import registered
from tests.autopar.fuzzing import (
    TOLERANCE,
    Body,
    Line,
    Recipe,
    Solver,
    Trial,
    attempt,
    build,
    case,
    make_recipe,
    random_solution,
    report,
    shrunk,
)
from tests.autopar.in_process import StuckError, Threads, axes_at
from tests.autopar.solving import solved_by
from tests.autopar.steps import STEPS, Held
from tests.autopar.traces import traced_once
from tests.passes.helpers import mesh_of

# Seeds of the programs that run every time, and of those that run every night.
FAST, FEW, NIGHTLY = range(5), range(5, 100), range(1000, 2200)


def _run(seeds: range) -> list[Trial]:
    """Run seeds; those that fail are told, the first one made small."""
    trials, failed = [], []
    for seed in seeds:
        trials.append(attempt(*case(seed)))
        if trials[-1].fails:
            failed.append(trials[-1])
    if failed:
        seen = [f"seed {trial.recipe.seed}: {trial.worst[0]}, {trial.worst[1]:.1e}" for trial in failed]
        pytest.fail("\n".join([report(failed[0], shrunk(failed[0])), *seen]), pytrace=False)
    return trials


def _chunks(seeds: range, size: int) -> list[range]:
    return [seeds[start : start + size] for start in range(0, len(seeds), size)]


@pytest.mark.long
@pytest.mark.parametrize("seeds", [FAST, pytest.param(FEW, marks=pytest.mark.slow)], ids=str)
def test_random_programs(seeds: range) -> None:
    """Outputs, gradients of parameters and inputs, and buffers, on all ranks."""
    _run(seeds)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", _chunks(NIGHTLY, 400), ids=str)
def test_many_random_programs(seeds: range) -> None:
    """The same for many; together they have most of the operators that rules speak for."""
    trials = _run(seeds)
    kinds = Counter(
        node.key.rpartition("/")[2].partition(".")[0]
        for trial in trials
        for node, _ in trial.used()
        if node.kind == "op"
    )
    worst = max(trial.worst[1] for trial in trials)
    print(f"{len(trials)} programs, {sum(kinds.values())} ops of {len(kinds)} kinds, largest error {worst:.1e}")
    assert len(kinds.keys() & set(registered())) > 200


@pytest.mark.long
def test_all_steps_are_drawn() -> None:
    """No step of the table is one that never fits."""
    recipes = [make_recipe(seed) for seed in range(200)]
    bodies = [recipe.body for recipe in recipes]
    bodies += [body for recipe in recipes for blocks in recipe.blocks.values() for body in blocks.bodies]
    seen = {line.kind for body in bodies for line in body.lines}
    assert set(STEPS) - seen == set()
    assert "blocks" in seen


def test_a_seed_gives_the_same_again() -> None:
    """The same program with the same values, and the same plan."""
    one, other = attempt(*case(3)), attempt(*case(3))
    assert str(one.recipe) == str(other.recipe)
    assert all(torch.equal(value, other.recipe.inputs[name]) for name, value in one.recipe.inputs.items())
    assert one.source == other.source
    assert one.errors == other.errors


# --- on processes -----------------------------------------------------------------------------------------------------


def _on_processes(seed: int) -> None:
    """A seed on gloo ranks, as it is called by users."""
    recipe, mesh, solver = case(seed)
    sizes = dict(zip(mesh.names, mesh.sizes, strict=True))
    options = {"cluster": "ideal", "memory_limit": 1e15, "objective": "train" if recipe.training else "infer"}
    inputs = {name: value.requires_grad_(False) for name, value in recipe.given().items()}
    with solved_by(solver):
        comparison = compare(build(recipe), sizes, inputs, lifted=False, **options)
    assert comparison.worst[1] <= TOLERANCE, f"seed {seed}: {comparison}\n{recipe}"


@pytest.mark.parametrize("seed", [1, 2, pytest.param(5, marks=pytest.mark.slow)])
def test_programs_on_processes(seed: int) -> None:
    """On real ranks the same holds: what threads stand in for is no other."""
    _on_processes(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 130))
def test_more_programs_on_processes(seed: int) -> None:
    """The same for more."""
    _on_processes(seed)


# --- what failed once -------------------------------------------------------------------------------------------------


def _recipe(code: str, shapes: dict[str, tuple[int, ...]], held: dict[str, Held] | None = None) -> Recipe:
    """A recipe of the statements `code`, which define `y`, with normal inputs."""
    generator = torch.Generator().manual_seed(0)
    inputs = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    line = Line("by hand", tuple(code.splitlines()), ("y",))
    return Recipe(0, Body(tuple(inputs), (line,), (("y",),), held or {}), {}, inputs, frozenset(inputs), True)


def _label() -> dict[str, Held]:
    return {"label": Held("buffer", torch.tensor(1))}


ONCE: dict[str, Recipe] = {
    "complex numbers of what lies elsewhere": _recipe(
        "y = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (6, 2)).contiguous()) * 1j).flatten(-2)",
        {"x": (4, 12)},
    ),
    "complex numbers from an odd place on": _recipe(
        "y = torch.view_as_complex(x[1:].clone().reshape(-1, 2)).abs()", {"x": (13,)}
    ),
    "running sums along the last dim": _recipe("y = x.cumsum(-1).sin()", {"x": (4, 12)}),
    "changes of views of several tensors": _recipe(
        "a = x * 0.8\nb = a.select(1, 5)\nb.mul_(0.5)\nc = x * 0.3\nd = c.unsqueeze(1)\nd[..., 0].mul_(0.2)\n"
        "y = c.square().sum() + b.mean()",
        {"x": (4, 12)},
    ),
    "a change of what is narrowed": _recipe(
        "a = x * 0.8\na.narrow(1, 4, 6).mul_(0.2)\ny = a * x", {"x": (4, 12)}
    ),
    "a single sample with its label": _recipe(
        "y = torch.nn.functional.cross_entropy(x.cumsum(-1), self.label)", {"x": (12,)}, _label()
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ONCE)
def test_what_failed_once(name: str) -> None:
    """Under several plans on two meshes."""
    with traced_once():
        for seed in range(6):
            for mesh in (mesh_of(a=2, b=2), mesh_of(a=3)):
                trial = attempt(ONCE[name], mesh, _solver(seed))
                assert not trial.fails, report(trial, trial)


def _solver(seed: int) -> Solver:
    return lambda problem, *rest: random_solution(random.Random(seed), problem, *rest, coherent=0.3)


def test_what_is_sent_lies_in_one_piece() -> None:
    """The gradient of a sum is one number, expanded."""

    def run(rank: int) -> Tensor:
        x = torch.ones(4, requires_grad=True)
        all_gather(x, axes_at((rank,), mesh_of(a=2))[0], src=S(0), dst=R).sum().backward()
        assert x.grad is not None
        return x.grad

    assert [gradient.tolist() for gradient in Threads(2).run(run)] == [[2.0] * 4] * 2


def test_blocks_without_parameters_on_processes() -> None:
    """A region whose layers hold nothing at all."""
    blocks = torch.nn.ModuleList(torch.nn.Tanh() for _ in range(3))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), *blocks)
    assert compare(model, {"dp": 2}, {"input": torch.randn(4, 4)}, cluster="ideal").worst[1] <= TOLERANCE


# --- that it can fail -------------------------------------------------------------------------------------------------


def _own_sums(x: Tensor, dim: int, **_: object) -> Tensor:
    """Running sums without what the ranks before have."""
    return x.cumsum(dim)


@pytest.mark.slow
def test_what_is_wrong_is_found_and_made_small() -> None:
    """With a local form that is wrong some program fails, and of that is left what it takes."""
    with mock.patch("autopar.runtime.split_cumsum", _own_sums):
        failed = next(trial for trial in (attempt(*case(seed)) for seed in range(200)) if trial.fails)
        small = shrunk(failed)
        told = report(failed, small)
    assert small.fails
    assert len(small.recipe.body.lines) <= 2
    split = [node.key for node, strategy in small.used() if node.kind == "op" and "along" in strategy.methods]
    assert split == ["/cumsum"]
    assert f"seed {failed.recipe.seed} on {failed.mesh}" in told
    assert "op /cumsum" in told


def test_ranks_that_wait_in_vain_are_told() -> None:
    """A collective that not all ranks take part in, or not with the same, ends at once."""
    mesh = mesh_of(a=2, b=2)

    def axis(rank: int) -> Axis:
        return axes_at(mesh.coordinates()[rank], mesh)[0]

    def absent(rank: int) -> None:
        if rank != 2:
            all_reduce(torch.ones(4), axis(rank), src=P, dst=R)

    def different(rank: int) -> None:
        if rank == 2:
            all_gather(torch.ones(4), axis(rank), src=S(0), dst=R)
        else:
            all_reduce(torch.ones(4), axis(rank), src=P, dst=R)

    with pytest.raises(StuckError, match=r"rank 0 at .*all_reduce"):
        Threads(4).run(absent)
    with pytest.raises(StuckError, match=r"rank 2 calls .*all_gather"):
        Threads(4).run(different)


def test_what_a_rank_raises_is_raised() -> None:
    """Not that the others wait for it."""

    def fail(rank: int) -> None:
        if rank == 1:
            raise autopar.InputError("no")
        all_reduce(torch.ones(4), axes_at((rank,), mesh_of(a=2))[0], src=P, dst=R)

    with pytest.raises(autopar.InputError, match="no"):
        Threads(2).run(fail)
