"""Models in stages whose calls update buffers, and whose evaluation has other ops than their training."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.testing import run_ranks

STEPS = 3


class Layer(nn.Module):
    """A linear layer with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, 8]."""
        return x + self.linear(x).tanh()


class Counted(nn.Module):
    """Counts its calls before the first layer, and reads the count, and the mean of the call before, after the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, 8]."""
        self.count += 1
        for layer in self.layers:
            x = layer(x)
        y = x * self.count.sqrt() + self.seen
        self.seen.copy_(x.detach().mean(0))
        return y.pow(2).mean()


class Normed(nn.Module):
    """A batch norm, which is another op in evaluation, behind a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = Layer(), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, 8]."""
        return self.norm(self.layer(x)).pow(3).mean()


class Headed(nn.Module):
    """Has a head for training and another one for evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.auxiliary, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, 8]."""
        for layer in self.layers:
            x = layer(x)
        return (self.auxiliary(x) if self.training else self.head(x)).pow(2).mean()


class Often(nn.Module):
    """Reads a mean at its begin that it updates at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, 8]."""
        x = x - self.seen
        for layer in self.layers:
            x = layer(x)
        self.seen.copy_(x.detach().mean(0))
        return x.pow(2).mean()


def _trained(make: type[nn.Module]) -> tuple[list[float], dict[str, float]]:
    """The differences between the losses of one device and of two stages, and of their buffers at the end."""
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(8, 8, dtype=torch.float64)
    stock = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    module = autopar.parallelize(model, mesh, {"x": x}, cluster="ideal", micro_batches=1)
    optimizers = [torch.optim.SGD(item.parameters(), 0.1) for item in (module, stock)]
    found = []
    for _ in range(STEPS):
        ours, theirs = module.forward_backward(x=x), stock(x)
        theirs.backward()
        found.append(float(ours.detach() - theirs.detach()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    module.eval()
    stock.eval()
    with torch.no_grad():
        found += [float(module(x=x) - stock(x)) for _ in range(2)]
    whole = module.full_state_dict()
    names = dict(stock.named_buffers())
    return found, {name: float((whole[name] - names[name]).abs().max()) for name in names if name in whole}


@pytest.mark.parametrize("make", [Counted, Normed, Headed])
def test_buffers_and_evaluations_of_stages(make: type[nn.Module]) -> None:
    """Steps of training, evaluation afterwards, and the buffers of a checkpoint are those of one device."""
    found = run_ranks(_trained, 2, make)
    for losses, buffers in found:
        assert max(map(abs, losses)) < 1e-12
        assert max(buffers.values(), default=0.0) < 1e-12
    assert len(found[0][1]) == len(list(make().buffers()))


def test_buffers_that_two_stages_would_use_are_refused() -> None:
    """With the reason."""
    with pytest.raises(autopar.PipelineError, match=r"at 0 places \(.*\d others are between uses of .* as 'seen'\)"):
        autopar.plan(Often(), {"pp": 2}, {"x": torch.ones(8, 8)}, micro_batches=1, cluster="ideal")
