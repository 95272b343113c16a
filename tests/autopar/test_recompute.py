"""Recomputed values are not kept, draw the same random numbers, and run the collectives that they need."""

import time
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar import DistributedModule, parallelize
from autopar.testing.ranks import run_ranks
from passes.ir.configuration import RECOMPUTE
from tests.autopar.traces import traced_once
from tests.models import Stack, gpt2, llama, tokens

_MODELS = {"llama": llama, "gpt2": gpt2}


# So many equal counts of bytes, a pause after each.
_ALIKE, _PAUSE_S = 20, 0.02
_OPERATORS = {
    "all_gather_into_tensor": "all_gather",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
    "reduce_scatter_tensor": "reduce_scatter",
}


class _Watching(TorchDispatchMode):
    """The bytes of all tensors made while it is entered that are still there, and the collectives that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = str(function).split(".")
        if name[0] == "_c10d_functional" and name[1] in _OPERATORS:
            self.sent[_OPERATORS[name[1]]] += 1
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
                storage = StorageWeakRef(leaf.untyped_storage())
                self.made[storage.cdata] = (storage, leaf.untyped_storage().nbytes())
        return result

    @property
    def bytes(self) -> int:
        """The bytes that are allocated.

        A thread of gloo lets go of what it sent a moment after the rank has waited for it, so this counts until the
        bytes have not changed for a while.
        """
        counts: list[int] = []
        while len(counts) < _ALIKE or len(set(counts[-_ALIKE:])) > 1:
            assert len(counts) < 50 * _ALIKE, counts
            counts.append(sum(size for storage, size in self.made.values() if not storage.expired()))
            time.sleep(_PAUSE_S)
        return counts[-1]


def _module(name: str, sizes: dict[str, int], level: str, constraints: object, **config: object) -> DistributedModule:
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    torch.manual_seed(0)
    model = _MODELS[name](num_hidden_layers=4, **config) if name == "llama" else _MODELS[name](n_layer=4, **config)
    return parallelize(model.double(), mesh, tokens(), cluster="ideal", recompute=level, constraints=constraints)


def _measured(name: str, sizes: dict[str, int], constraints: object, config: dict[str, object]) -> list[dict[str, Any]]:
    """For every level what is alive after the forward pass, the collectives of both passes, and the gradients."""
    found = []
    with traced_once():
        modules = [_module(name, sizes, level, constraints, **config) for level in RECOMPUTE]
    for module in modules:
        with _Watching() as living:
            loss = module(**tokens())["loss"]
        kept = living.bytes
        # What a second pass draws is its own.
        module(**tokens())
        loss.backward()
        gradients = {name: _whole(item.grad).clone() for name, item in module.named_parameters()}
        module.zero_grad()
        with _Watching() as forward:
            loss = module(**tokens())["loss"]
        with _Watching() as backward:
            loss.backward()
        found.append(
            {
                "kept": kept,
                "forward": forward.sent,
                "backward": backward.sent,
                "gradients": gradients,
                "code": module.code,
            }
        )
    return found


def _whole(value: object) -> Tensor:
    assert isinstance(value, Tensor)
    return value.full_tensor() if isinstance(value, DTensor) else value


def _inside(code: str) -> Counter[str]:
    """The collectives that stand in the region of generated code before the last op that keeps something."""
    names = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
    lines = code.partition("(RegionCopy):")[2].partition("(Generated):")[0].splitlines()
    keeping = ("F.linear(", "torch.addmm(", "aten.dropout.default(")
    last = max(number for number, line in enumerate(lines) if any(call in line for call in keeping))
    return Counter(name for line in lines[:last] for name in names if f"= {name}(" in line)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "sizes", "constraints", "config"),
    [
        pytest.param(
            "llama",
            {"dp": 2, "tp": 2},
            {
                "model.layers.*.mlp.gate_proj/linear": {"method": {"tp": "out", "dp": "d0"}},
                "model.layers.*.mlp.up_proj.weight": {"stored": {"dp": "S(0)"}},
                "model.layers.*.input_layernorm": {"out": {"tp": "S(1)"}},
            },
            {},
            id="llama on 2x2",
            marks=pytest.mark.slow,
        ),
        pytest.param("gpt2", {"dp": 2}, {}, {"resid_pdrop": 0.25}, id="gpt2 with dropout on 2"),
    ],
)
def test_levels(name: str, sizes: dict[str, int], constraints: object, config: dict[str, object]) -> None:
    """Gradients are those of keeping everything; less is kept; what is kept of collectives is not sent again."""
    ranks = 1
    for size in sizes.values():
        ranks *= size
    for none, selective, ops, full in run_ranks(_measured, ranks, name, sizes, constraints, config):
        for other in (selective, ops, full):
            for parameter, gradient in none["gradients"].items():
                torch.testing.assert_close(other["gradients"][parameter], gradient, rtol=1e-12, atol=1e-14)
        # Nothing keeps what gives gpt2 its second product: dropout keeps its mask.
        assert full["kept"] < ops["kept"] <= selective["kept"] < none["kept"]
        assert (ops["kept"] < selective["kept"]) == (name == "llama")
        assert full["kept"] < 0.5 * none["kept"]
        assert selective["forward"] == ops["forward"] == full["forward"] == none["forward"]
        assert selective["backward"] == ops["backward"] == none["backward"]
        again = full["backward"] - none["backward"]
        assert again == Counter({key: 4 * count for key, count in _inside(full["code"]).items()})
        assert "recomputed(lambda" in selective["code"]
        # Of four or seven products of a layer the second, the fourth and the sixth.
        again = [line for line in ops["code"].splitlines() if "lambda " in line]
        products = ("F.linear(", "torch.addmm(")
        assert sum(any(product in line for product in products) for line in again) == {"gpt2": 2, "llama": 3}[name]
        assert "self.recomputed(copy, " in full["code"]


def _batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(4, 16, generator=generator, dtype=torch.float64) for name in ("x", "target")}


def _pending(split: str) -> None:
    """Backward passes of one graph, and a step of the optimizer before them, at every level."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("axis",))
    by_rows = {"blocks.*.up/linear": {"method": {"axis": "d0"}}, "blocks.*.up.weight": {"stored": {"axis": "S(0)"}}}
    by_columns = {"blocks.*.up/linear": {"method": {"axis": "out"}}}
    constraints = {"rows": by_rows, "columns": by_columns}[split]
    stock = Stack(depth=3).double()
    stock(**_batch())["loss"].backward()
    for level in RECOMPUTE:
        module = parallelize(
            Stack(depth=3).double(), mesh, _batch(), cluster="ideal", recompute=level, constraints=constraints
        )
        loss = module(**_batch())["loss"]
        for count in range(1, 4):
            loss.backward(retain_graph=True)
            for (name, expected), parameter in zip(stock.named_parameters(), module.parameters(), strict=True):
                assert expected.grad is not None
                about = f"{name} after {count} backward passes, recompute {level}"
                assert torch.allclose(_whole(parameter.grad), count * expected.grad, rtol=1e-10, atol=1e-12), about
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        first, second = module(**_batch())["loss"], module(**_batch())["loss"]
        first.backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|changed in place after the forward"):
            second.backward()
        module.zero_grad()
        module(**_batch())["loss"].backward()


@pytest.mark.long
@pytest.mark.parametrize("split", ["rows", pytest.param("columns", marks=pytest.mark.slow)])
def test_pending_backward_passes(split: str) -> None:
    """One graph can be gone through again, and not after the parameters have changed, as with autograd's own saving."""
    run_ranks(_pending, 2, split)
