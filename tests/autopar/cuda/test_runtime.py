"""The distributed module on CUDA devices: it does not wait for them, draws what it should, and raises in time."""

import os
import warnings
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.testing import RankError, run_ranks
from tests.autopar.test_dropout import PROBABILITY, ROWS, WIDTH, Dropping
from tests.models import gpt2, llama, tokens


def _batch() -> dict[str, Tensor]:
    return {name: tensor.cuda() for name, tensor in tokens().items()}


def _waits(sizes: dict[str, int], recompute: str) -> list[str]:
    """The warnings of steps that waited for the device, but for the first three: values are compared there."""
    mesh = init_device_mesh("cuda", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    module = autopar.parallelize(llama().cuda(), mesh, _batch(), cluster="ideal", recompute=recompute)
    optimizer = torch.optim.AdamW(module.parameters(), foreach=True)
    batch = _batch()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(6):
            torch.cuda.set_sync_debug_mode("warn" if number > 2 else "default")
            module(**batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.set_sync_debug_mode("default")
    return [str(item.message) for item in caught if "called a synchronizing" in str(item.message)]


@pytest.mark.parametrize("sizes", [{"dp": 1}, {"dp": 2}, {"dp": 2, "tp": 2}])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_steps_do_not_wait_for_the_device(sizes: dict[str, int], recompute: str) -> None:
    """Forward, backward and optimizer."""
    count = prod(sizes.values())
    assert run_ranks(_waits, count, sizes, recompute, device_type="cuda") == [[]] * count


def _dropped(rows: str, columns: str) -> list[Tensor]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.ones(ROWS, WIDTH, dtype=torch.float64, device="cuda")
    constraints = {"drop/dropout": {"out": {"dp": rows, "tp": columns}}}
    module = autopar.parallelize(Dropping().cuda(), mesh, {"x": x}, cluster="ideal", constraints=constraints)
    found = []
    for _ in range(2):
        output = module(x=x)["dropped"]
        found.append((output.full_tensor() if isinstance(output, DTensor) else output).detach().cpu())
    return found


@pytest.mark.parametrize(("rows", "columns"), [("R", "R"), ("S(0)", "S(1)"), ("R", "S(1)")])
def test_dropout(rows: str, columns: str) -> None:
    """Equal on replicas, independent on shards and between passes, of the right share."""
    ranks = run_ranks(_dropped, 4, rows, columns, device_type="cuda")
    for number in range(2):
        assert all(torch.equal(rank[number], ranks[0][number]) for rank in ranks)
    first, second = ranks[0]
    assert not torch.equal(first, second)
    for whole in (first, second):
        assert float((whole == 0).double().mean()) == pytest.approx(PROBABILITY, abs=0.015)
        if columns == "S(1)":
            assert not torch.equal(whole[:, : WIDTH // 2], whole[:, WIDTH // 2 :])


def _recomputed(recompute: str) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("dp",))
    model = gpt2(resid_pdrop=0.2, attn_pdrop=0.2, embd_pdrop=0.2).cuda()
    module = autopar.parallelize(model, mesh, _batch(), cluster="ideal", recompute=recompute)
    loss = module(**_batch())["loss"]
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    return float(loss), {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).cpu() for name, each in gradients.items()
    }


def test_dropout_is_the_same_when_it_is_recomputed() -> None:
    """Attention's too, which a fused kernel draws."""
    none, full = (run_ranks(_recomputed, 2, level, device_type="cuda")[0] for level in ("none", "full"))
    assert none[0] == pytest.approx(full[0], rel=1e-6)
    for name, gradient in none[1].items():
        torch.testing.assert_close(full[1][name], gradient, rtol=1e-4, atol=1e-6)


def _fused() -> float:
    """The largest difference between a fused and a plain AdamW after three steps."""
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for fused in (True, False):
        module = autopar.parallelize(llama().cuda(), mesh, _batch(), cluster="ideal")
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=fused)
        for _ in range(3):
            module(**_batch())["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: item.to_local().detach() for name, item in module.named_parameters()})
    return max(float((found[0][name] - found[1][name]).abs().max()) for name in found[0])


def test_fused_optimizers() -> None:
    assert max(run_ranks(_fused, 4, device_type="cuda")) < 1e-5


def _dying() -> str:
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("tp",))
    module = autopar.parallelize(llama().cuda(), mesh, _batch(), cluster="ideal")
    module(**_batch())["loss"].backward()
    torch.cuda.synchronize()
    if dist.get_rank() == 1:
        os._exit(3)
    module(**_batch())["loss"].backward()
    torch.cuda.synchronize()
    return "finished"


def test_a_rank_that_dies_is_told() -> None:
    """The other one does not finish as if nothing had been."""
    with pytest.raises(RankError, match="died with exit code 3"):
        run_ranks(_dying, 2, timeout=120.0, device_type="cuda")
