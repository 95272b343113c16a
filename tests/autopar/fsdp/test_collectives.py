"""Data axes on `fully_shard`: as many collectives, and bytes that are kept, as the plan says."""

import contextlib
import gc
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.testing import LiftFloat32, run_ranks
from tests.autopar.fsdp.shared import are_close, batch_of, calls_in, gradients, made_with, mesh_of
from tests.autopar.stored import Spy, storage
from tests.autopar.without_engine import without_engine
from tests.models import Stack, llama, tokens


def _passes(again: bool) -> dict[str, object]:
    model, inputs = llama().double(), tokens()
    with Spy(again) as spy, LiftFloat32(torch.float64):
        # Where links are free a ring over the sequence is as good.
        batch = {"@scaled_dot_product_attention": {"method": {"dp": "batch"}}}
        constraints = {**storage(dp="S(0)"), **batch}
        dist_model = autopar.parallelize(model, mesh_of((2,)), inputs, cluster="ideal", constraints=constraints)
    outputs = []
    return {
        "groups": len(spy.seen[0].units.units) if spy.seen else 0,
        "forward": calls_in(lambda: outputs.append(dist_model(**inputs))),
        "backward": calls_in(lambda: outputs[0].loss.backward()),
        "no gradient": calls_in(lambda: _without_gradient(dist_model, inputs)),
        "code": dist_model.code,
        "kinds": {type(parameter) for parameter in (*dist_model.parameters(), *dist_model.state_dict().values())},
    }


def _without_gradient(dist_model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        dist_model(**inputs)


@pytest.mark.long
@pytest.mark.parametrize("again", [pytest.param(False, marks=pytest.mark.slow), True])
def test_one_collective_for_each_group(again: bool) -> None:
    """Parameters are gathered once a group and pass, in the backward pass only where the plan says again, and their
    gradients are reduced together. What users see stays what it is."""
    found = run_ranks(_passes, 2, again)[0]
    # Two layers of nine parameters, the embedding, the norm and the head.
    assert found["groups"] == 5
    assert found["code"].count("gathered(") == 12
    assert not re.search(r"local\(.*weight\)", found["code"])
    assert found["forward"]["allgather_base"] == 5
    # All but the embedding, which the backward pass does not read.
    assert found["backward"] == {"reduce_scatter_base": 5, **({"allgather_base": 4} if again else {})}
    assert found["no gradient"] == found["forward"]
    assert found["kinds"] == {DTensor}


class Issued(TorchDispatchMode):
    """Writes down gathers and products of matrices in the order in which they are issued: the elements of a gather, 0
    for a product."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        if func._opname == "_allgather_base_":
            self.events.append(args[0].numel())
        elif func._opname in ("mm", "addmm"):
            self.events.append(0)
        return func(*args, **(kwargs or {}))


def _order() -> tuple[list[list[int]], bool]:
    model, inputs = Stack(depth=3).double(), batch_of(0)
    # Split over one axis, and over both: two groups around each block.
    one, both = storage(dp="I", tp="S(0)")["*"], storage(dp="S(0)", tp="S(0, 2)")["*"]
    with Spy(again=True):
        dist_model = made_with(model, (2, 2), inputs, constraints={"*.norm.*": one, "*.up.*": one, "*.down.*": both})
    found = []
    for _ in range(2):
        with Issued() as forward:
            output = dist_model(**inputs)
        with Issued() as backward:
            output["loss"].backward()
        found += [forward.events, backward.events]
    model(**inputs)["loss"].backward()
    return found, are_close({name: item / 2 for name, item in gradients(dist_model).items()}, gradients(model))


@pytest.mark.long
def test_groups_of_one_place_are_gathered_ahead_together() -> None:
    """Before the backward pass computes a block, all groups of the block before it are being gathered. In the forward
    pass those of a block are gathered one after the other, with nothing in between."""
    gathers = (16 * 64 + 16, 16 * 64 + 64 + 2 * 16)
    block = [*gathers, 0, 0]
    for events, close in run_ranks(_order, 4):
        for forward, backward in (events[:2], events[2:]):
            assert forward in (block * 3, [*gathers[::-1], 0, 0] * 3)
            ahead = backward[:2]
            assert sorted(ahead) == sorted(gathers)
            # The last block and the one before it; the first block; none.
            assert backward == [*ahead, *ahead, 0, 0, 0, 0, *ahead, 0, 0, 0, 0, 0, 0, 0, 0]
        assert close


def _kept_bytes() -> int:
    """Bytes of all tensors that there are."""
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, nn.Parameter) and not item.is_meta:
            storage = item.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def _kept(again: bool) -> dict[str, list[int]]:
    found = {}
    for name, way in (("engine", contextlib.nullcontext()), ("generated", without_engine())):
        generator = torch.Generator().manual_seed(0)
        model = Stack(width=256, depth=4)
        batch = {name: torch.randn(8, 256, generator=generator) for name in ("x", "target")}
        with Spy(again), way:
            dist_model = made_with(model, (2,), batch, memory_limit=1e12)
        del model
        counts = [_kept_bytes()]
        output = dist_model(**batch)
        counts.append(_kept_bytes())
        output["loss"].backward()
        counts.append(_kept_bytes())
        found[name] = [count - counts[0] for count in counts[1:]]
        del dist_model, output
    return found


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_as_much_is_kept_as_planned(again: bool) -> None:
    """After the forward pass there are all parameters or none, but for small ones; after the backward pass there are
    the gradients. It is what generated gathers keep, within a hundredth of the parameters."""
    parameters = 4 * sum(parameter.numel() for parameter in Stack(width=256, depth=4).parameters())
    for found in run_ranks(_kept, 2, again):
        forward, backward = found["engine"]
        other_forward, other_backward = found["generated"]
        assert forward < 0.02 * parameters if again else forward > 0.98 * parameters
        assert abs(forward - other_forward) <= 0.01 * parameters
        assert abs(backward - other_backward) <= 0.01 * parameters
        assert abs(backward - parameters // 2) <= 0.02 * parameters
