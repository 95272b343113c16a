"""Autograd functions as people write them, whose backward is not the derivative of their forward."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import get_world_size

Context = torch.autograd.function.FunctionCtx


class StraightThrough(torch.autograd.Function):
    """Rounds; the gradient passes as if it did not (Bengio et al., arXiv 1308.3432)."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        """To whole numbers."""
        return torch.round(x)

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> Tensor:
        """As it is."""
        return gradients[0]


class Reversal(torch.autograd.Function):
    """Does nothing; the gradient is turned around (Ganin and Lempitsky, arXiv 1409.7495)."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, strength: float) -> Tensor:
        """As it is."""
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor, None]:
        """The other way."""
        return -ctx.strength * gradients[0], None


class Clipped(torch.autograd.Function):
    """Does nothing; every element of the gradient is clipped, which is not linear."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, most: float) -> Tensor:
        """As it is."""
        ctx.most = most
        return x.clone()

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor, None]:
        """Not more than `most`."""
        return gradients[0].clamp(-ctx.most, ctx.most), None


class Normed(torch.autograd.Function):
    """Does nothing; the gradient is brought to length one, for which all of it is needed."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        """As it is."""
        return x.clone()

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> Tensor:
        """Divided by its length."""
        return gradients[0] / gradients[0].norm()


class Centered(torch.autograd.Function):
    """Rows less their mean, and the means, which have no gradient; the backward forgets the mean."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [..., n]; results: [..., n], [..., 1]."""
        mean = x.mean(-1, keepdim=True)
        ctx.mark_non_differentiable(mean)
        return x - mean, mean

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> Tensor:
        """As it is."""
        return gradients[0]


class Scaled(torch.autograd.Function):
    """A product; the second factor gets a gradient of its own making, and only if it needs one."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, scale: Tensor, options: dict[str, float]) -> Tensor:
        """x and scale: of one shape."""
        ctx.save_for_backward(x, scale)
        ctx.options = options
        return x * scale

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Of `scale` the sign of x, weighted."""
        x, scale = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1]
        return gradients[0] * scale, gradients[0] * x.sign() * ctx.options["weight"] if wanted else None, None


class Sized(torch.autograd.Function):
    """Elementwise, but for a size that it reads: not the same function on a part."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        """By the number of rows."""
        return x / x.shape[0]

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> Tensor:
        """As it is."""
        return gradients[0]


class Noisy(torch.autograd.Function):
    """Drops elements at random, and lets the gradients of the others pass, doubled."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        """A half of them."""
        mask = torch.rand_like(x) < 0.5
        ctx.save_for_backward(mask)
        return x * mask * 2

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> Tensor:
        """The gradients of the elements that were not dropped."""
        (mask,) = ctx.saved_tensors
        return gradients[0] * mask * 4


class Changing(torch.autograd.Function):
    """Changes what it is given."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        """In place."""
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> Tensor:
        """As it is."""
        return gradients[0]


class Counting(torch.autograd.Function):
    """Remembers how often it was called: not a function of its arguments."""

    calls = 0

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        """Another one each time."""
        Counting.calls += 1
        return x + Counting.calls

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> Tensor:
        """As it is."""
        return gradients[0]


class Deciding(torch.autograd.Function):
    """Looks at values in its backward, which cannot be followed."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        """As it is."""
        return x.clone()

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> Tensor:
        """One way or the other."""
        return gradients[0] if gradients[0].sum() > 0 else -gradients[0]


class Counted(torch.autograd.Function):
    """A tensor, how many elements it has, and nothing."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> tuple[Tensor, int, None]:
        """x: any shape."""
        return x.clone(), x.numel(), None

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor | None) -> Tensor | None:
        """Twice."""
        return None if gradients[0] is None else 2 * gradients[0]


class Gathering(torch.autograd.Function):
    """Does nothing; gradients are added up over ranks."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        """As it is."""
        return x.clone()

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> Tensor:
        """Summed."""
        gradient = gradients[0].clone()
        dist.all_reduce(gradient)
        return gradient


class Sharing(torch.autograd.Function):
    """Does nothing; the gradient is divided by the number of ranks."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        """As it is."""
        return x.clone()

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> Tensor:
        """A part of it."""
        return gradients[0] / get_world_size()
