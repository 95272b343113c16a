"""Modules that do what a trace cannot follow, or seem to. Lines that end in `# here` are those that errors name."""

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint


class Scaled(nn.Module):
    """The base of all modules here: a linear layer and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor([0.5, 1.5, -1.0, 0.25]))


# --- refused ----------------------------------------------------------------------------------------------------------


class Branches(Scaled):
    """It branches on the values of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 4]."""
        if x.sum() > 0:  # here
            return self.linear(x)
        return x


class BranchesOnNumbers(Scaled):
    """It branches on the values of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 4]."""
        largest = x.max().item()
        return self.linear(x) if largest > 1 else x  # here


class Catches(Scaled):
    """It branches on the values of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 4]."""
        try:
            if x.max() > 1:  # here
                raise ValueError("too large")
        except ValueError:
            x = x.clamp(max=1)
        return self.linear(x)


class Repeats(Scaled):
    """How often it loops depends on the values of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 4]."""
        while x.norm() > 1:  # here
            x = self.linear(x)
        return x


class Counts(Scaled):
    """How often it loops depends on the values of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 4]."""
        for _ in range(int(x.sum())):  # here
            x = self.linear(x)
        return x


class Selects(Scaled):
    """A size depends on the values of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 4]."""
        return self.linear(x)[x > 0].sum()  # here


class SelectsMasked(Scaled):
    """A size depends on the values of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 4]."""
        return torch.masked_select(self.linear(x), x > 0).sum()  # here


class Finds(Scaled):
    """A size depends on the values of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 4]."""
        rows = torch.nonzero(x[:, 0] > 0)[:, 0]  # here
        return self.linear(x)[rows].sum()


class Sizes(Scaled):
    """It takes a size, or a number to compute with, out of the values of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 4]."""
        size = x.sum().long().item()  # here
        return self.linear(x) + torch.zeros(size, 4).sum()


class TakesTruth(Scaled):
    """It takes a size, or a number to compute with, out of the values of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 4]."""
        positive = bool((x > 0).all())  # here
        return self.linear(x) if positive else x


class ChangesInput(Scaled):
    """It changes the input 'x' in place (work on a copy of it)."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 4]."""
        x.mul_(2)  # here
        return self.linear(x)


class ChangesPartOfInput(Scaled):
    """It changes the input 'x' in place (work on a copy of it)."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 4]."""
        x[:, 0] = 1.0  # here
        return self.linear(x)


class ChangesParameterByItself(Scaled):
    """It changes the parameter 'scale' in place."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 4]."""
        with torch.no_grad():
            self.scale.div_(self.scale.norm())  # here
        return self.linear(x) * self.scale


class ChangesActivation(Scaled):
    """It changes a tensor in place under no_grad."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 4]."""
        y = self.linear(x)
        with torch.no_grad():
            y.clamp_(0, 1)  # here
        return y * self.scale


class Autocasts(Scaled):
    """It enters autocast."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 4]."""
        with torch.autocast("cpu", torch.bfloat16):
            return self.linear(x)  # here


class Conditional(Scaled):
    """cond takes functions of tensors, for which there is no plan."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 4]."""
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (self.linear(x),))  # here


class Flexible(Scaled):
    """NotImplementedError: FlexAttention does not support backward on CPU."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 4]."""
        heads = self.linear(x).reshape(1, 1, *x.shape)
        return flex_attention(heads, heads, heads)  # here


class Addresses(Scaled):
    """RuntimeError: Cannot access data pointer of Tensor."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 4]."""
        return self.linear(x) * (x.data_ptr() % 2)  # here


class Wrong(Scaled):
    """RuntimeError: shape '[3, 3]' is invalid for input of size 8."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 4]."""
        return self.linear(x.view(3, 3))  # here


REFUSED = (
    *(
        Branches,
        BranchesOnNumbers,
        Catches,
        Repeats,
        Counts,
        Selects,
        SelectsMasked,
        Finds,
        Sizes,
        TakesTruth,
        ChangesInput,
    ),
    *(ChangesPartOfInput, ChangesParameterByItself, ChangesActivation, Autocasts, Conditional, Flexible, Addresses),
    Wrong,
)


# --- followed ---------------------------------------------------------------------------------------------------------


class Prints(Scaled):
    """A model that prints in `forward`: neither the trace nor later calls print."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 4]."""
        y = self.linear(x)
        print("mean", y.mean())
        return y * self.scale


class Asserts(Scaled):
    """It checks values, in all ways there are."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 4]."""
        assert (x < 100).all(), "too large"
        assert not (x > 100).any()
        assert torch.all(x < 100).item() or not (x > 200).any()
        if x.max() > 100 or not x.min() > -100:
            raise ValueError(f"out of range: {x.max()}")
        if x.sum().item() < 1000:
            y = self.linear(x)
        else:
            raise ValueError("too much")
        torch._assert((y < 1000).all(), "too large")
        torch._check(y.max().item() < 1000)
        return y * self.scale


class Multiplies(Scaled):
    """It computes with a number out of a tensor, which has no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 4]."""
        y = self.linear(x)
        return (y * self.scale).sum() / (x > 0).sum().item() + y * y.max().item()


class Unrolls(Scaled):
    """It loops over the numbers of a tensor, of which there is a fixed number."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 4]."""
        y = self.linear(x) * self.scale
        for number in x[:, 0].tolist():
            y = y * number
        return y


class Clamps(Scaled):
    """It changes a parameter in place, each element by itself."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 4]."""
        self.scale.data.clamp_(-0.5, 0.5)
        return self.linear(x) * self.scale


class ClampsWithoutGradient(Scaled):
    """It changes a parameter in place, each element by itself."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 4]."""
        with torch.no_grad():
            self.scale.clamp_(-0.5, 0.5)
        return self.linear(x) * self.scale


class KnowsItsOwn(Scaled):
    """It branches on what it makes itself, and takes sizes from it."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x: [batch, 4]."""
        given = mask is not None
        mask = torch.ones(x.shape[0], dtype=torch.bool) if mask is None else mask
        y = self.linear(x) * self.scale
        if not mask.all() or given:
            y = y[mask]
        lengths = torch.tensor([1, x.shape[0] - 1])
        first, second = y.split(lengths.tolist())
        return torch.cat([second, first]) * torch.arange(4)[torch.arange(4) > 0].sum()


class Checkpoints(Scaled):
    """It checkpoints, in the way that a trace leaves out."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 4]."""
        return checkpoint(self.linear, x, use_reentrant=False) * self.scale


class ThroughNumpy(Scaled):
    """It leaves torch for a while: only one of the ways to trace follows it there."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 4]."""
        return self.linear(x) * self.scale * torch.from_numpy(x.detach().numpy().clip(0, 1))


FOLLOWED = (
    *(Prints, Asserts, Multiplies, Unrolls, Clamps, ClampsWithoutGradient, KnowsItsOwn, Checkpoints, ThroughNumpy),
)
