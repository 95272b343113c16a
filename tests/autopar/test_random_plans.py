"""Any plan is right, not only the best: random strategies for every op, random storage, random gathers made again."""

import random
from functools import partial
from math import prod

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from autopar.testing import compare_on_mesh, run_ranks
from tests.autopar.fuzzing import random_solution
from tests.autopar.solving import solved_by
from tests.models import MODELS, tokens


def _errors(name: str, padding: bool, sizes: tuple[int, ...], seeds: range) -> list[str]:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "cp", "tp")[: len(sizes)])
    wrong = []
    for seed in seeds:
        solver = partial(random_solution, random.Random(seed))
        with solved_by(solver):
            model = MODELS[name](num_hidden_layers=2).double()
            inputs = tokens(length=8, padding=padding)
            comparison = compare_on_mesh(model, mesh, inputs, torch.float64, cluster="ideal", memory_limit=1e15)
        if not comparison.worst[1] <= 1e-9:
            wrong.append(f"seed {seed}: {comparison}")
    return wrong


CASES = [
    ("llama", False, (2, 2)),
    ("llama", True, (2, 2)),
    ("gpt2", False, (2, 2)),
    ("gemma2", True, (2, 2)),
    ("qwen3", False, (4,)),
    ("mistral", False, (2,)),
    ("gpt2", True, (2, 2, 2)),
]
# One and two axes; the others are tested at night.
FAST = (CASES[1],)


def _check(name: str, padding: bool, sizes: tuple[int, ...], seeds: range) -> None:
    assert run_ranks(_errors, prod(sizes), name, padding, sizes, seeds, timeout=600)[0] == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "padding", "sizes"),
    [case if case in FAST else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_random_plans(name, padding, sizes):
    _check(name, padding, sizes, range(1))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "padding", "sizes"), CASES)
def test_more_random_plans(name, padding, sizes):
    _check(name, padding, sizes, range(1, 10))
