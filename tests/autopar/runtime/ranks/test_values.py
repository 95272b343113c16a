"""Models that ask for values of tensors: on ranks they are what they are on one device, for other values too."""

import contextlib
import copy
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.plans import dynamic_shapes as sizes
from autopar.testing import compare_on_mesh, run_ranks
from tests.untraceable import FOLLOWED, Clamps, Scaled


def mesh_of_two() -> DeviceMesh:
    """The mesh of a rank's process group."""
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def whole(tensor: object) -> Tensor:
    """The whole value of a tensor, distributed or not."""
    assert isinstance(tensor, Tensor)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _followed() -> dict[str, float]:
    """The largest error of each module that a trace follows."""
    found = {}
    for kind in FOLLOWED:
        torch.manual_seed(0)
        model, x = kind().double(), torch.randn(4, 4, dtype=torch.float64)
        with contextlib.redirect_stdout(None):
            found[kind.__name__] = compare_on_mesh(model, mesh_of_two(), {"x": x}, cluster="ideal").worst[1]
    return found


@pytest.mark.long
def test_what_a_trace_follows():
    errors = run_ranks(_followed, 2)[0]
    assert set(errors) == {kind.__name__ for kind in FOLLOWED}
    assert max(errors.values()) <= 1e-12, errors


# --- parameters that change -------------------------------------------------------------------------------------------


class ClampsInEvaluation(Scaled):
    """It changes a parameter where it does not train."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 4]."""
        if not self.training:
            self.scale.data.mul_(0.5)
        return self.linear(x) * self.scale


def _changes() -> None:
    """Three steps of training, and three calls in evaluation."""
    for kind in (Clamps, ClampsInEvaluation):
        torch.manual_seed(0)
        model, x = kind().double(), torch.randn(4, 4, dtype=torch.float64)
        dist_model = autopar.parallelize(model, mesh_of_two(), {"x": x}, cluster="ideal", optimizer="sgd")
        for module in (model, dist_model):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
            for _ in range(3):
                whole(module(x=x)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            module.eval()
            for _ in range(3):
                module(x=x)
        assert torch.allclose(whole(dist_model.scale), model.scale, rtol=1e-12)
        assert torch.allclose(whole(dist_model(x=x)), model(x), rtol=1e-12)


def test_changes_of_parameters_last():
    """They are in the parameters afterwards, in training and in evaluation."""
    run_ranks(_changes, 2)


# --- inputs that are constants ----------------------------------------------------------------------------------------


class Cuts(nn.Module):
    """Cuts rows as an input says; a mask says which of the parts count."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, rows: Tensor, lengths: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """rows: [sum of lengths, 8], lengths and mask: [parts]."""
        hidden = self.down(self.up(rows).relu())
        parts = torch.stack([part.mean(0) for part in hidden.split(lengths.tolist())])
        return {"loss": (parts * mask.unsqueeze(-1)).square().sum(), "hidden": hidden}


def batch(*lengths: int) -> dict[str, Tensor]:
    """Rows in parts of these lengths."""
    generator = torch.Generator().manual_seed(sum(lengths))
    rows = torch.randn(sum(lengths), 8, dtype=torch.float64, generator=generator)
    return {"rows": rows, "lengths": torch.tensor(lengths), "mask": torch.arange(len(lengths)) % 2}


def made() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return Cuts().double()


def parallelized(**options: object) -> autopar.DistributedModule:
    """Planned for parts of one and three."""
    return autopar.parallelize(made(), mesh_of_two(), batch(1, 3), cluster="ideal", **options)


def _other_values() -> None:
    model, dist_model = made(), parallelized()
    assert dist_model.plan.constants == {"lengths": "int64 [1, 3]"}
    traced = []
    with mock.patch.object(sizes, "capture", wraps=sizes.capture) as spy:
        _compare_calls(model, dist_model, lambda: traced.append(spy.call_count))
    assert traced == ([0, 1, 2, 3, 4, 4] if mesh_of_two().get_rank() == 0 else [0] * 6)


def _compare_calls(model: nn.Module, dist_model: nn.Module, count: Callable[[], None]) -> None:
    """Call both with several lengths, the planned ones first and last."""
    for lengths in ((1, 3), (2, 2), (3, 1), (2, 6), (1, 1, 2), (1, 3)):
        inputs = batch(*lengths)
        expected, got = model(**inputs), dist_model(**inputs)
        expected["loss"].backward()
        got["loss"].backward()
        assert torch.allclose(got["loss"], expected["loss"], rtol=1e-12)
        assert torch.allclose(whole(got["hidden"]), expected["hidden"], rtol=1e-12)
        for name, parameter in model.named_parameters():
            assert torch.allclose(whole(dist_model.get_parameter(name).grad), parameter.grad, rtol=1e-10), name
        model.zero_grad()
        dist_model.zero_grad()
        count()


@pytest.mark.long
def test_other_values_get_programs_of_their_own():
    """Each is exact, and made once; other sizes go with them."""
    run_ranks(_other_values, 2)


def _parts_of_each_rank() -> None:
    dist_model, inputs = parallelized(), batch(1, 3)
    assert "lengths" not in dist_model.input_layouts
    rank = mesh_of_two().get_rank()
    own = {
        name: leaf.chunk(2)[rank] if dist_model.input_layouts.get(name) == {"tp": "S(0)"} else leaf
        for name, leaf in inputs.items()
    }
    got = dist_model(**dist_model.from_local(own))
    assert torch.allclose(got["loss"], made()(**inputs)["loss"], rtol=1e-12)


def test_constants_are_whole_where_ranks_give_parts():
    run_ranks(_parts_of_each_rank, 2)


def _wrong(change: Callable[[dict[str, Tensor], int], None]) -> str:
    dist_model, inputs = parallelized(), batch(1, 3)
    change(inputs, mesh_of_two().get_rank())
    with pytest.raises(autopar.InputError) as caught:
        dist_model(**inputs)
    return str(caught.value)


def _drop(inputs: dict[str, Tensor], rank: int) -> None:
    del inputs["lengths"]


def _as_int32(inputs: dict[str, Tensor], rank: int) -> None:
    inputs["lengths"] = inputs["lengths"].int()


def _as_list(inputs: dict[str, Tensor], rank: int) -> None:
    inputs["lengths"] = inputs["lengths"].tolist()


def _by_rank(inputs: dict[str, Tensor], rank: int) -> None:
    inputs["lengths"] = torch.tensor([2 + rank, 2 - rank])


def _too_many(inputs: dict[str, Tensor], rank: int) -> None:
    inputs["lengths"] = torch.tensor([2, 3])


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop, "missing argument lengths"),
        (_as_int32, "lengths must be a whole tensor of torch.int64, because the model needs its values"),
        (_as_list, "lengths"),
        (_by_rank, "ranks are called differently in call 1: rank 1 of the mesh has lengths int64 [3, 1]"),
        (_too_many, "the model cannot run at them: cannot trace Cuts at "),
    ],
)
def test_values_that_cannot_be(change: Callable[[dict[str, Tensor], int], None], message: str):
    """All ranks are told."""
    assert all(message in said for said in run_ranks(_wrong, 2, change))


def _replayed(document: str) -> None:
    plan = autopar.Plan.from_json(document)
    dist_model = parallelized(plan=plan)
    inputs = batch(1, 3)
    assert torch.allclose(dist_model(**inputs)["loss"], made()(**inputs)["loss"], rtol=1e-12)


def test_plans_with_constants_are_replayed():
    """With the inputs; without them the constants are missing, which is said."""
    plan = autopar.plan(made(), {"tp": 2}, batch(1, 3), cluster="ideal")
    run_ranks(_replayed, 2, plan.to_json())
    with pytest.raises(autopar.InputError, match="the plan was made for a certain lengths: pass example_inputs too"):
        autopar.plan(made(), {"tp": 2}, cluster="ideal", plan=plan)


class Asks(nn.Module):
    """It branches on the values of its only input."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [batch, length]."""
        hidden = self.embedding(ids)
        return hidden.sum() if (ids > 0).all() else hidden.mean()


def test_a_model_may_have_constants_alone():
    """Then the plan has no inputs."""
    plan = autopar.plan(Asks(), {"tp": 2}, {"ids": torch.ones(2, 4, dtype=torch.int64)}, cluster="ideal")
    assert not plan.inputs
    assert list(plan.constants) == ["ids"]


def test_constants_print_with_the_plan():
    text = str(autopar.plan(made(), {"tp": 2}, batch(1, 3), cluster="ideal"))
    assert "  constant lengths: int64 [1, 3]\n" in text


def test_the_model_is_left_as_it_was():
    model = made()
    before = copy.deepcopy(model.state_dict())
    autopar.plan(model, {"tp": 2}, batch(1, 3), cluster="ideal")
    assert "forward" not in vars(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
