"""Each rank's own rows of a batch, as data loaders give them, on gloo ranks."""

from collections.abc import Callable, Mapping
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import autopar
from autopar.testing import LiftFloat32, run_ranks
from tests.models import Stack, gpt2, tokens

Batch = Mapping[str, torch.Tensor]


def mesh_of_four() -> DeviceMesh:
    """The mesh of a rank's process group."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def batch(samples: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Inputs of a `Stack`."""
    generator = torch.Generator().manual_seed(seed)
    x, target = torch.randn(2, samples, 16, dtype=torch.float64, generator=generator)
    return {"x": x, "target": target}


def said(run: Callable[[], object]) -> str:
    """The InputError that is raised."""
    with pytest.raises(autopar.InputError) as caught:
        run()
    return str(caught.value)


def rows(whole: Batch, counts: list[int], number: int) -> dict[str, torch.Tensor]:
    """The rows of one of several, who have so many of them."""
    return {name: leaf.split(counts)[number].clone() for name, leaf in whole.items()}


def same_step(dist_model: nn.Module, model: nn.Module, given: Mapping[str, object], whole: Batch) -> None:
    """The loss and every gradient of `given` are those of one device on the whole batch."""
    for module in (dist_model, model):
        module.zero_grad()
    ours, theirs = dist_model.forward_backward(**given)["loss"], model(**whole)["loss"]
    theirs.backward()
    assert torch.allclose(ours, theirs, rtol=1e-9)
    for name, parameter in model.named_parameters():
        got = dist_model.get_parameter(name).grad.full_tensor()
        assert torch.allclose(got, parameter.grad, rtol=1e-9, atol=1e-12), name


def _rows() -> dict[str, tuple[int, int]]:
    mesh, model = mesh_of_four(), Stack().double()
    dist_model = autopar.parallelize(model, mesh, batch(8), cluster="ideal")
    shares = {}
    for axes, counts in (
        (("dp",), [4, 4]),
        (("dp",), [5, 3]),
        (("dp",), [0, 3]),
        (("tp",), [4, 4]),
        (("dp", "tp"), [2, 2, 2, 2]),
        (("tp", "dp"), [1, 1, 0, 1]),
        ("dp", [4, 4]),
    ):
        whole = batch(sum(counts), seed=len(shares))
        number, size = dist_model.data_rank(axes), dist_model.data_size(axes)
        assert size == len(counts)
        shares[f"{axes} {counts}"] = (number, size)
        given = dist_model.from_local(rows(whole, counts, number), axes=axes)
        assert all(isinstance(leaf, DTensor) for leaf in given.values())
        assert all(torch.equal(given[name].full_tensor(), leaf) for name, leaf in whole.items())
        same_step(dist_model, model, given, whole)
    # Whatever layout inputs have, they are brought to that of the program.
    whole = batch(8)
    for layout in ([Shard(1), Replicate()], [Replicate(), Shard(0)], [Shard(0), Shard(1)]):
        given = {name: distribute_tensor(leaf, mesh, layout) for name, leaf in whole.items()}
        same_step(dist_model, model, given, whole)
    return shares


@pytest.mark.long
def test_rows_of_each_rank() -> None:
    """Even, uneven and no rows, over one axis and several in either order, are the batch in the order of the ranks."""
    every = run_ranks(_rows, 4)
    assert [list(shares.values()) for shares in every] == [
        [(0, 2), (0, 2), (0, 2), (0, 2), (0, 4), (0, 4), (0, 2)],
        [(0, 2), (0, 2), (0, 2), (1, 2), (1, 4), (2, 4), (0, 2)],
        [(1, 2), (1, 2), (1, 2), (0, 2), (2, 4), (1, 4), (1, 2)],
        [(1, 2), (1, 2), (1, 2), (1, 2), (3, 4), (3, 4), (1, 2)],
    ]


class Positions(nn.Module):
    """Takes its samples in another dim than the first, a table that has none, and a flag; in a dict inside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)

    def forward(self, inner: dict[str, torch.Tensor], table: torch.Tensor, double: bool = False) -> torch.Tensor:
        """inner: x [kinds, batch, 8], y [batch, 8], weight [batch]; table: [5, 8]."""
        made = self.linear(inner["x"].sum(0)) * (inner["y"] + table.sum(0))
        return {"loss": (made.pow(2).sum(-1) * inner["weight"]).sum() * (2 if double else 1)}


def positions(samples: int) -> dict[str, object]:
    """Inputs of `Positions`."""
    generator = torch.Generator().manual_seed(0)
    x, y, weight, table = (
        torch.randn(shape, dtype=torch.float64, generator=generator)
        for shape in ((3, samples, 8), (samples, 8), (samples,), (5, 8))
    )
    return {"inner": {"x": x, "y": y, "weight": weight}, "table": table, "double": True}


def _other_dims() -> None:
    mesh, model, whole = mesh_of_four(), Positions().double(), positions(8)
    dist_model = autopar.parallelize(model, mesh, whole, cluster="ideal")
    number = dist_model.data_rank(("dp",))
    dims = {"x": 1, "y": 0, "weight": 0}
    own = {**whole, "inner": {name: whole["inner"][name].split([5, 3], dim)[number] for name, dim in dims.items()}}
    given = dist_model.from_local(own, axes=("dp",))
    assert given["double"] is True
    assert given["inner"]["x"].shape == (3, 8, 8)
    same_step(dist_model, model, given, whole)


def _micro_batches() -> None:
    """In micro-batches of ids, masks and labels, with mixed shares."""
    mesh, model, whole = mesh_of_four(), gpt2().double(), tokens(8, padding=True)
    with LiftFloat32(torch.float64):
        dist_model = autopar.parallelize(model, mesh, whole, cluster="ideal", micro_batches=2)
        number = dist_model.data_rank(("dp",))
        for counts in ([4, 4], [5, 3]):
            same_step(dist_model, model, dist_model.from_local(rows(whole, counts, number), axes=("dp",)), whole)


def _each(*functions: Callable[[], None]) -> None:
    for function in functions:
        function()


@pytest.mark.long
def test_rows_in_other_dims_and_in_micro_batches() -> None:
    run_ranks(_each, 4, _other_dims, _micro_batches)


def _refused() -> dict[str, str]:
    mesh, model = mesh_of_four(), Stack().double()
    dist_model = autopar.parallelize(model, mesh, batch(8), cluster="ideal")
    rank = mesh.get_rank()
    number = dist_model.data_rank(("dp",))
    own = rows(batch(8), [4, 4], number)
    found = {}

    def refuse(name: str, given: object, axes: object = ("dp",)) -> None:
        found[name] = said(lambda: dist_model.from_local(given, axes=axes))

    refuse("unknown", own, ("dp", "cp"))
    refuse("twice", own, ("dp", "dp"))
    refuse("none", own, ())
    refuse("unknown on one", own, ("dp",) if rank else ("pp",))
    refuse("dtype on one", {**own, "x": own["x"].float()} if rank == 2 else own)
    refuse("other dims", {name: leaf[:, : 8 + 8 * (rank != 1)] for name, leaf in own.items()})
    refuse("left out", own if rank != 3 else {"x": own["x"]})
    refuse("lengths", {**own, "x": own["x"][:2]})
    refuse("values", batch(4, seed=rank))
    refuse("rows", rows(batch(8), [4, 4], number) if rank != 1 else rows(batch(8), [3, 5], number))
    refuse("empty", batch(0))
    refuse("text", list(own.values()))
    refuse("gradient", {**own, "x": own["x"].clone().requires_grad_()})
    refuse("planned, dtype on one", {**own, "x": own["x"].float()} if rank == 2 else own, None)
    refuse("sparse", {**own, "x": own["x"].to_sparse()})
    found["sparse call"] = said(lambda: dist_model(**{**batch(8), "x": batch(8)["x"].to_sparse()}))
    found["list call"] = said(lambda: dist_model(**{**batch(8), "x": batch(8)["x"].tolist()}))
    refuse("planned, sizes", rows(batch(8), [4, 4], number) if rank < 2 else batch(2), None)
    with mock.patch("autopar.runtime.ranks.values.EVERY", 4):
        dist_model.from_local(rows(batch(8), [4, 4], number), axes=("dp",))
        dist_model.from_local(rows(batch(8), [4, 4], number), axes=("dp",))
        dist_model.from_local(batch(4, seed=rank), axes=("dp",))
        found["values later"] = said(lambda: dist_model.from_local(own, axes=("dp",)))
    with pytest.raises(autopar.InputError, match="axes is"):
        dist_model.data_rank(("cp",))
    same_step(dist_model, model, dist_model.from_local(own, axes=("dp",)), batch(8))
    return found


def test_rows_that_cannot_be() -> None:
    """One sentence on every rank; the ranks whose own error it is say it themselves."""
    every = run_ranks(_refused, 4)
    first = every[0]
    own = {"unknown on one": 0, "dtype on one": 2, "planned, dtype on one": 2}
    for name, message in first.items():
        others = [found[name] for rank, found in enumerate(every) if rank != own.get(name)]
        assert len(set(others)) == 1, (name, others)
        assert name in own or others[0] == message
    axes = "it must name axes of the mesh (dp, tp), each once, the outermost first"
    assert first["unknown"] == f"axes is ('dp', 'cp'): {axes}"
    assert first["twice"] == f"axes is ('dp', 'dp'): {axes}"
    assert first["none"] == f"axes is (): {axes}"
    assert every[0]["unknown on one"] == f"axes is ('pp',): {axes}"
    assert every[1]["unknown on one"].startswith("rank 0 of the mesh raised in from_local(): InputError: axes is ('pp'")
    assert every[2]["dtype on one"].startswith("this rank's rows of x is float32[4, 16], but was planned as float64")
    assert first["dtype on one"].startswith("rank 2 of the mesh raised in from_local(): InputError: this rank's rows")
    assert "rank 1 of the mesh has target float64[rows, 8], rank 0 has target float64[rows, 16]" in first["other dims"]
    assert "rank 3 of the mesh has target left out, rank 0 has target float64[rows, 16]" in first["left out"]
    assert first["lengths"] == "the inputs have different numbers of rows: x has 2, target has 4"
    assert first["values"].startswith(
        "target had other values on rank 1 of the mesh than on rank 0 in from_local() 1 of this module: it is split "
        "over dp, so ranks along tp must give the same part"
    )
    assert "rank 1 of the mesh gives from_local() 3 rows, rank 0 gives 4, but both have the same" in first["rows"]
    assert first["empty"] == "no rank gives from_local() any row: the global batch would be empty"
    assert first["text"] == "from_local takes a dict of the model's arguments by name, not list"
    assert first["gradient"].startswith("x requires a gradient: pass the whole tensor to the call")
    assert every[2]["planned, dtype on one"].startswith("this rank's part of x is float32")
    assert first["planned, dtype on one"].startswith("rank 2 of the mesh raised in from_local(): InputError: this rank")
    assert first["sparse"] == "this rank's rows of x is a sparse_coo tensor: pass a dense one (to_dense)"
    assert first["sparse call"] == "x is a sparse_coo tensor: pass a dense one (to_dense)"
    assert first["list call"] == "x must be a tensor, got list"
    assert first["planned, sizes"].startswith("ranks give from_local() what does not fit together: rank 2 of the mesh")
    assert "in from_local() 4 of this module" in first["values later"]
