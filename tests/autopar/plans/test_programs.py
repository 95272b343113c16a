"""The position of a micro-batch's samples on each rank: the same samples in every input, however it is split."""

import functools
import random

import pytest
import torch

from autopar.models.info import read_model
from autopar.options import Options
from autopar.planner import plan_model
from autopar.request import make_request
from autopar.runtime.calls.steps import parts
from autopar.runtime.state import local_part
from passes.ir.mesh import Mesh
from tests.autopar.fuzzing import random_solution
from tests.autopar.solving import solved_by
from tests.models import Stack

_BATCH, _COUNT = 16, 2


@pytest.mark.parametrize("seed", range(6))
def test_micro_batches_have_the_same_samples_on_all_ranks(seed: int) -> None:
    """All ranks together have equally many samples of each micro-batch, and each sample is in one."""
    mesh = Mesh(("dp", "tp"), (2, 4))
    inputs = {name: torch.empty(_BATCH, 16, device="meta") for name in ("x", "target")}
    options = Options(cluster="ideal", memory_limit=1e15, micro_batches=_COUNT)
    with solved_by(functools.partial(random_solution, random.Random(seed))):
        request = make_request(mesh.by_name, options)
        program = plan_model(Stack(), read_model(Stack(), inputs, request), request).programs["train"]
    assert program.micro_batches is not None
    rows = torch.arange(_BATCH)[:, None].expand(_BATCH, 16)
    found = []
    for item, where in zip(program.inputs, program.micro_batches.inputs, strict=True):
        assert item.type.shape == (_BATCH, 16)
        assert where is not None
        samples: list[set[int]] = [set() for _ in range(_COUNT)]
        for coordinate in mesh.coordinates():
            own = local_part(rows.contiguous(), item.layout, coordinate, mesh)
            for number, part in enumerate(parts(own, where, _COUNT)):
                samples[number].update(part.flatten().tolist())
        found.append(samples)
    assert found[0] == found[1]
    assert [len(samples) for samples in found[0]] == [_BATCH // _COUNT] * _COUNT
    assert set().union(*found[0]) == set(range(_BATCH))
