"""`is_storable` against torch: which placements its checkpoints store exactly, found out by running them."""

import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from autopar.runtime.state import from_local, local_part, mesh_of
from autopar.testing.ranks import run_ranks
from passes.ir.layout import Layout, Placement, R, S, Shape, is_storable
from passes.ir.mesh import Mesh
from tests.passes.helpers import layouts_on

FULL = StateDictOptions(full_state_dict=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class One(nn.Module):
    """A module of one parameter."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


class Trial:
    """One layout on a mesh: every way in which torch stores a tensor that lies like this."""

    def __init__(self, layout: Layout, shape: Shape, device_mesh: DeviceMesh, folder: Path) -> None:
        self.layout, self.device_mesh, self.mesh = layout, device_mesh, mesh_of(device_mesh)
        self.whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
        self.part = self.part_of(self.whole)
        self.folder = folder

    def part_of(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor."""
        coordinate = self.device_mesh.get_coordinate()
        assert coordinate is not None
        return local_part(whole, self.layout, coordinate, self.mesh)

    def distributed(self, whole: Tensor) -> DTensor:
        """A tensor in the layout."""
        return from_local(self.part_of(whole), self.layout, whole.shape, self.device_mesh, self.mesh)

    def load(self) -> bool:
        """A checkpoint of the whole tensor is loaded into the layout."""
        state = {"weight": self.distributed(-self.whole)}
        dcp.load(state, checkpoint_id=self.folder / "stock")
        return torch.equal(state["weight"].to_local(), self.part)

    def save(self) -> bool:
        """A checkpoint of the layout is loaded whole, into the layout, and on another mesh."""
        folder = self.folder / str(self.layout)
        dcp.save({"weight": self.distributed(self.whole)}, checkpoint_id=folder)
        whole = {"weight": torch.zeros_like(self.whole)}
        dcp.load(whole, checkpoint_id=folder)
        same = {"weight": self.distributed(-self.whole)}
        dcp.load(same, checkpoint_id=folder)
        flat = init_device_mesh("cpu", (self.mesh.size,))
        other = {"weight": distribute_tensor(-self.whole, flat, [Shard(0)])}
        dcp.load(other, checkpoint_id=folder)
        return (
            torch.equal(whole["weight"], self.whole)
            and torch.equal(same["weight"].to_local(), self.part)
            and torch.equal(other["weight"].full_tensor(), self.whole)
        )

    def set_whole(self) -> bool:
        """`set_model_state_dict` takes the whole tensor on all ranks."""
        module = One(self.distributed(-self.whole))
        set_model_state_dict(module, {"weight": self.whole.clone()}, options=FULL)
        return torch.equal(module.weight.to_local(), self.part)  # type: ignore[attr-defined]

    def broadcast(self) -> bool:
        """`set_model_state_dict` takes the whole tensor on the first rank."""
        module = One(self.distributed(-self.whole))
        state = {"weight": self.whole.clone()} if dist.get_rank() == 0 else {}
        set_model_state_dict(module, state, options=BROADCAST)
        return torch.equal(module.weight.to_local(), self.part)  # type: ignore[attr-defined]

    def get_whole(self) -> bool:
        """`get_model_state_dict` gives the whole tensor."""
        state = get_model_state_dict(One(self.distributed(self.whole)), options=FULL)
        return torch.equal(state["weight"], self.whole)

    def states_of_adamw(self) -> bool:
        """States of AdamW: those of one device are set, and those of the layout are had whole."""
        stock, own, other = (
            One(self.whole.clone()),
            One(self.distributed(self.whole)),
            One(self.distributed(-self.whole)),
        )
        optimizers = [torch.optim.AdamW(module.parameters()) for module in (stock, own, other)]
        for number in (1.0, 3.0):
            stock.weight.grad, own.weight.grad = self.whole * number, self.distributed(self.whole * number)
            optimizers[0].step()
            optimizers[1].step()
        expected = optimizers[0].state[stock.weight]["exp_avg_sq"]
        found = get_optimizer_state_dict(own, optimizers[1], options=FULL)
        set_state_dict(
            other,
            optimizers[2],
            model_state_dict={"weight": self.whole},
            optim_state_dict=get_optimizer_state_dict(stock, optimizers[0]),
            options=FULL,
        )
        state = optimizers[2].state[other.weight]["exp_avg_sq"]
        return torch.equal(found["state"]["weight"]["exp_avg_sq"], expected) and torch.equal(
            state.to_local(), self.part_of(expected)
        )


WAYS: Sequence[Callable[[Trial], bool]] = (
    Trial.load, Trial.save, Trial.set_whole, Trial.broadcast, Trial.get_whole, Trial.states_of_adamw
)  # fmt: skip


def _on_all(good: bool) -> bool:
    found = torch.tensor(int(good))
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return bool(found.item())


def _works(way: Callable[[Trial], bool], trial: Trial) -> bool:
    try:
        return way(trial)
    except (RuntimeError, ValueError, dcp.api.CheckpointException):
        return False


def _stored_exactly(sizes: tuple[int, ...], shape: Shape, layouts: list[Layout], folder: Path) -> list[bool]:
    """Runs on every rank: for each layout whether every way is exact on all ranks."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    device_mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple("abc"[: len(sizes)]))
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    dcp.save({"weight": whole}, checkpoint_id=folder / "stock")
    found = []
    for layout in layouts:
        trial = Trial(layout, shape, device_mesh, folder)
        found.append(all(_on_all(_works(way, trial)) for way in WAYS))
    return found


def _compare(sizes: tuple[int, ...], shape: Shape, placements: Sequence[Placement], folder: Path) -> None:
    mesh = Mesh(tuple("abc"[: len(sizes)]), sizes)
    layouts = list(layouts_on(shape, placements, mesh))
    said = [is_storable(layout, mesh) for layout in layouts]
    assert True in said
    assert False in said
    exact = run_ranks(_stored_exactly, mesh.size, sizes, shape, layouts, folder)[0]
    for layout, storable, found in zip(layouts, said, exact, strict=True):
        assert storable == found, layout


def test_torch_stores_what_is_said_on_one_axis(tmp_path: Path) -> None:
    """Every layout that `is_storable` allows is saved, loaded, resharded and broadcast bit for bit, with its states of
    AdamW, and no other layout is."""
    _compare((2,), (12, 8), [R, S(0), S(0, 3), S(1), S(1, 2)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (3, 2)], ids=str)
def test_torch_stores_what_is_said_on_two_axes(sizes: tuple[int, ...], tmp_path: Path) -> None:
    """The same where a dim may have two digits, in both orders and with gaps."""
    _compare(sizes, (24, 6), [R, *(S(0, major) for major in (1, 2, 3, 4, 6)), S(1)], tmp_path)


@pytest.mark.slow
def test_torch_stores_what_is_said_on_three_axes(tmp_path: Path) -> None:
    """The same where two dims are split, with up to three digits."""
    placements = [R, *(S(0, major) for major in (1, 2, 4)), *(S(1, major) for major in (1, 2, 3))]
    _compare((2, 2, 2), (8, 24), placements, tmp_path)
