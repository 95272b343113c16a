"""`autopar::selective_scan`: the selective state spaces of Mamba (Gu and Dao 2023), place after place.

    state = exp(dt * a) * state + dt * x * b
    result = sum of c * state

The state of a channel decays element by element, so the state after some places is `decay * state + end`, where decay
is exp(a * sum of dt) and end the state that these places leave from zero. The sequence is cut into blocks, and the n-th
places of all blocks are computed together: first the ends of all blocks, then the states before them, one block after
the other, then the results. So as many steps as a block has places take the place of one for each place.

Operands are saved and nothing else; the backward pass computes states again, from those before some places of the
blocks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

# The most places of a block, and those between the states that a backward pass has at once, besides all of these.
_PLACES = 64
STRIDE = 8


def scan_places(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The results, in the dtype of x, and the state after the last place, which is at least in single precision, as is
    what is computed. The state before the first place is zero.

    x, dt, results: [batch, channels, length]; a: [channels, width]; b, c: [batch, width, length]; the state: [batch,
    channels, width].
    """
    blocks = Blocks.of(x, dt, a, b, c)
    before, last = blocks.states(None)
    return blocks.results(before).to(x.dtype), last


selective_scan = torch.library.custom_op("autopar::selective_scan", scan_places, mutates_args=())


@selective_scan.register_fake
def _(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(
        (*x.shape[:2], a.shape[1]), dtype=wide_dtype(x)
    )


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs)


def _backward(
    ctx: torch.autograd.function.FunctionCtx, of_results: Tensor | None, of_last: Tensor | None
) -> tuple[Tensor, ...]:
    operands = ctx.saved_tensors  # type: ignore[attr-defined]
    blocks = Blocks.of(*operands)
    before, _ = blocks.states(None)
    of_results = blocks.by_place(torch.zeros_like(operands[0]) if of_results is None else of_results)
    after, _ = blocks.of_states(blocks.of_ends(of_results), of_last)
    return blocks.gradients(operands, before, of_results, after)


torch.library.register_autograd("autopar::selective_scan", _backward, setup_context=_keep)


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype of states."""
    return torch.promote_types(x.dtype, torch.float32)


def block_sizes(length: int) -> tuple[int, int]:
    """The number of blocks of a sequence, and that of their places. The last block is filled with places that leave
    states as they are."""
    count = -(-length // _PLACES)
    return count, -(-length // count)


@dataclass(frozen=True)
class Blocks:
    """The operands of a scan by the places of blocks.

    dt, and inputs, which are dt * x: [places, batch, channels, blocks]; b, c: [places, batch, 1, blocks, width];
    a: [channels, 1, width]; states and their gradients: [batch, channels, blocks, width].

    ends: the state after each block from zero; decays: the factor of the state before it.
    """

    length: int
    dt: Tensor
    inputs: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    ends: Tensor
    decays: Tensor

    @classmethod
    def of(cls, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> "Blocks":
        """The blocks of the operands of `selective_scan`."""
        dtype = wide_dtype(x)
        times = _by_place(dt, dtype)
        inputs = _by_place(x, dtype).mul_(times)
        b, c = (_by_place(each, dtype).transpose(2, 3).contiguous().unsqueeze(2) for each in (b, c))
        a = a.to(dtype).unsqueeze(1)
        ends = torch.zeros((*times.shape[1:], a.shape[-1]), dtype=dtype, device=x.device)
        own = cls(x.shape[-1], times, inputs, a, b, c, ends, (times.sum(0).unsqueeze(-1) * a).exp_())
        for place in range(len(times)):
            own.advance(ends, place)
        return own

    def by_place(self, tensor: Tensor) -> Tensor:
        """[batch, channels, length] as [places, batch, channels, blocks]."""
        return _by_place(tensor, self.dt.dtype)

    def decay(self, place: int) -> Tensor:
        """The factors of states at a place of all blocks."""
        return (self.dt[place].unsqueeze(-1) * self.a).exp_()

    def factor(self) -> Tensor:
        """The factor of a state over all places: [batch, channels, width]."""
        return (self.dt.sum((0, 3)).unsqueeze(-1) * self.a.squeeze(1)).exp_()

    def advance(self, state: Tensor, place: int) -> Tensor:
        """Make `state`, that before a place of all blocks, the one after it."""
        return state.mul_(self.decay(place)).addcmul_(self.inputs[place].unsqueeze(-1), self.b[place])

    def states(self, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """The states before all blocks, and that after the last one, from the `state` before the first (None: zero)."""
        before = torch.empty_like(self.ends)
        now = torch.zeros_like(self.ends[:, :, 0]) if state is None else state
        for block in range(before.shape[2]):
            before[:, :, block] = now
            now = torch.addcmul(self.ends[:, :, block], self.decays[:, :, block], now)
        return before, now

    def results(self, before: Tensor) -> Tensor:
        """[batch, channels, length], from the states before the blocks."""
        found, state = torch.empty_like(self.dt), before.clone()
        for place in range(len(found)):
            torch.sum(self.advance(state, place) * self.c[place], -1, out=found[place])
        return _in_order(found, self.length)

    def of_ends(self, of_results: Tensor) -> Tensor:
        """The gradients of the states before all blocks that the blocks' own results give."""
        found = torch.zeros_like(self.ends)
        for place in reversed(range(len(of_results))):
            found.addcmul_(of_results[place].unsqueeze(-1), self.c[place]).mul_(self.decay(place))
        return found

    def of_states(self, of_ends: Tensor, of_last: Tensor | None) -> tuple[Tensor, Tensor]:
        """The gradients of the states after all blocks, and of that before the first, from `of_ends` and the gradient
        of the state after the last block (None: zero)."""
        after = torch.empty_like(of_ends)
        now = torch.zeros_like(of_ends[:, :, 0]) if of_last is None else of_last
        for block in reversed(range(after.shape[2])):
            after[:, :, block] = now
            now = torch.addcmul(of_ends[:, :, block], self.decays[:, :, block], now)
        return after, now

    def gradients(
        self, operands: Sequence[Tensor], before: Tensor, of_results: Tensor, after: Tensor
    ) -> tuple[Tensor, ...]:
        """The gradients of the operands of `selective_scan`, from the states before the blocks, the gradients of the
        results by place, and those of the states after the blocks, which are overwritten."""
        of_dt, of_inputs = torch.empty_like(self.dt), torch.empty_like(self.inputs)
        of_b, of_c = (torch.empty_like(each.squeeze(2)) for each in (self.b, self.c))
        of_a = torch.zeros_like(self.a.squeeze(1))
        for place, last, now in self._backward_states(before):
            of_result = of_results[place].unsqueeze(-1)
            torch.sum(now * of_result, 1, out=of_c[place])
            after.addcmul_(of_result, self.c[place])
            torch.sum(after * self.b[place], -1, out=of_inputs[place])
            torch.sum(after * self.inputs[place].unsqueeze(-1), 1, out=of_b[place])
            of_exponent = after.mul_(self.decay(place)) * last
            torch.sum(of_exponent * self.a, -1, out=of_dt[place])
            of_a += (of_exponent * self.dt[place].unsqueeze(-1)).sum((0, 2))
            # They are freed before there are further states.
            del last, now, of_exponent
        x, dt, a, b, c = operands
        each_dt, each_input = (_in_order(each, self.length) for each in (of_dt, of_inputs))
        of_x, of_dt = each_input * dt, each_dt.addcmul_(each_input, x.to(each_input.dtype))
        of_b, of_c = (_in_order(each.transpose(2, 3), self.length) for each in (of_b, of_c))
        found = (of_x, of_dt, of_a, of_b, of_c)
        return tuple(own.to(given.dtype) for own, given in zip(found, (x, dt, a, b, c), strict=True))

    def _backward_states(self, before: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Each place of all blocks, from the last to the first, with the states before and after it."""
        places = len(self.dt)
        starts, state = [before], before.clone()
        for place in range((places - 1) // STRIDE * STRIDE):
            self.advance(state, place)
            if (place + 1) % STRIDE == 0:
                starts.append(state.clone())
        del state
        for first in reversed(range(0, places, STRIDE)):
            found = [starts.pop()]
            for place in range(first, min(first + STRIDE, places)):
                found.append(self.advance(found[-1].clone(), place))
            for place in reversed(range(first, min(first + STRIDE, places))):
                yield place, found[-2], found.pop()


def _by_place(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """[batch, rows, length] as [places, batch, rows, blocks], with zeros at the end."""
    *above, length = tensor.shape
    blocks, places = block_sizes(length)
    if length < blocks * places:
        tensor = pad(tensor, (0, blocks * places - length))
    return tensor.reshape(*above, blocks, places).permute(3, 0, 1, 2).to(dtype, copy=True).contiguous()


def _in_order(tensor: Tensor, length: int) -> Tensor:
    """[places, batch, rows, blocks] as [batch, rows, length]."""
    return tensor.permute(1, 2, 3, 0).flatten(2)[..., :length].contiguous()
