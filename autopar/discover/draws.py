"""Small calls of an op with random values, and the results of the whole op."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from autopar.discover.calls import Call, resized, taken
from passes._torch import schema_of
from passes.ir.program import Op, Ref, TensorType, find_overload, has_gradient

# Sizes divide by 2 and by 3; what is left of the first when cut divides by 2, for ops that take elements in pairs.
_UNITS = (12, 6)
_DRAWS = 3
_SMALLEST = 1e-5
# Elements of all operands and results up to which an op is also run as it is.
_LARGE = 1 << 22

# A draw of values for an operand.
Values = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True)
class Drawn:
    """A call with its results and, for random gradients of these, the gradients of its operands (None without one)."""

    call: Call
    results: tuple[Tensor, ...]
    cotangents: tuple[Tensor | None, ...]
    gradients: tuple[Tensor | None, ...]
    flowing: frozenset[int]

    @property
    def operands(self) -> list[Tensor]:
        """The operands."""
        return self.call.tensors


def call_of(op: Op, tensors: Sequence[Tensor]) -> Call:
    """The call that `op` is with these operands, in float64."""
    rest = iter(tensors)

    def made(argument: object) -> object:
        if isinstance(argument, tuple):
            return [made(item) for item in argument]
        if isinstance(argument, torch.dtype):
            return _double(argument)
        return next(rest) if isinstance(argument, Ref) else argument

    schema = schema_of(op.overload).arguments
    arguments = {name: made(value) for name, value in op.arguments.items()}
    return Call(
        op.target,
        tuple(arguments[item.name] for item in schema if not item.kwarg_only),
        {item.name: arguments[item.name] for item in schema if item.kwarg_only},
    )


def draws_of(op: Op, types: Mapping[str, TensorType]) -> tuple[list[Drawn], list[Drawn]]:
    """Draws of the form of `op` with small sizes, where it takes these, and draws with its own, where these are not
    large. Empty where the op does not run or is random."""
    operands = [types[name] for name in op.operands]
    call = call_of(op, [torch.zeros((), dtype=_double(type.dtype)).expand(type.shape) for type in operands])
    small = next(filter(None, (draws(item, kinds_of_values(item)) for item in _small_calls(call))), [])
    elements = sum(prod(types[name].shape) for name in (*op.operands, *op.results))
    return small, draws(call, kinds_of_values(call)) if small and elements <= _LARGE else []


def draws(call: Call, kinds: Sequence[Values]) -> list[Drawn]:
    """Several draws of values, each of the first of `kinds` that the op takes; empty where it takes none."""
    found = []
    flowing = _flowing(call, kinds)
    for seed in range(_DRAWS):
        generator = torch.Generator().manual_seed(seed)
        for values in kinds:
            drawn = _drawn(call, [values(tensor, generator) for tensor in call.tensors], flowing, generator)
            if drawn is not None:
                found.append(drawn)
                break
    return found if len(found) == _DRAWS and not _is_random(found[0]) else []


def _small_calls(call: Call) -> Iterator[Call]:
    """Calls of the form of `call` with small sizes that divide; at last the call itself."""
    if taken(call) and all(size == 1 or size % _UNITS[-1] == 0 for tensor in call.tensors for size in tensor.shape):
        yield call
    yield from (small for unit in _UNITS if taken(small := resized(call, unit)))
    if taken(call):
        yield call


def _flowing(call: Call, kinds: Sequence[Values]) -> frozenset[int]:
    """Operands that torch can give a gradient for: all floating ones, unless it says so."""
    floating = frozenset(slot for slot, tensor in enumerate(call.tensors) if tensor.is_floating_point())
    generator = torch.Generator().manual_seed(0)
    for values in kinds:
        operands = [values(tensor, generator) for tensor in call.tensors]
        if _runs_with(call, operands, frozenset()):
            if _runs_with(call, operands, floating):
                return floating
            return frozenset(slot for slot in floating if _runs_with(call, operands, frozenset({slot})))
    return floating


def _runs_with(call: Call, operands: Sequence[Tensor], flowing: frozenset[int]) -> bool:
    try:
        results, owned = run_with(call, operands, flowing)
        gradients_of(results, owned, [torch.ones_like(tensor) if tensor.requires_grad else None for tensor in results])
    except Exception:
        return False
    return True


def _is_random(drawn: Drawn) -> bool:
    """Whether the op gives different results when it is rerun."""
    if torch.Tag.nondeterministic_seeded not in find_overload(drawn.call.target).tags:
        return False
    again, _ = run_with(drawn.call, drawn.operands, drawn.flowing)
    return not all(torch.allclose(new.detach(), old) for new, old in zip(again, drawn.results, strict=True))


def _double(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype


def kinds_of_values(call: Call) -> list[Values]:
    """Ways to draw values, of which an op may take one only: any sign or positive, indices up to each size."""
    sizes = sorted({size for tensor in call.tensors for size in tensor.shape if size > 1}, reverse=True)
    return [partial(_values, high=high, least=least) for high in [*sizes, 2, 1] for least in (None, 0.25)]


def _values(tensor: Tensor, generator: torch.Generator, high: int, least: float | None) -> Tensor:
    shape = tuple(tensor.shape)
    if tensor.dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if not tensor.is_floating_point():
        return torch.randint(0, high, shape, generator=generator).to(tensor.dtype)
    if least is None:
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    return least + torch.rand(shape, generator=generator, dtype=torch.float64) / 2


def _drawn(call: Call, operands: Sequence[Tensor], flowing: frozenset[int], generator: torch.Generator) -> Drawn | None:
    """The results of the whole op; None where it rejects the values, or where its results are degenerate."""
    try:
        results, owned = run_with(call, operands, flowing)
        cotangents = tuple(
            torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) if tensor.requires_grad else None
            for tensor in results
        )
        gradients = gradients_of(results, owned, cotangents)
    except Exception:
        return None
    found = [tensor.detach() for tensor in (*results, *gradients) if tensor is not None]
    if not all(map(_tells, found)) or not any(
        bool(tensor.any()) or not has_gradient(tensor.dtype) for tensor in results
    ):
        return None
    same = call.with_tensors(operands)
    return Drawn(same, tuple(tensor.detach() for tensor in results), cotangents, gradients, flowing)


def _tells(tensor: Tensor) -> bool:
    """Whether values can be compared: all are finite, and they are not all so small that anything would be right."""
    if not has_gradient(tensor.dtype) or not tensor.numel():
        return True
    largest = float(tensor.abs().max())
    return bool(tensor.isfinite().all()) and (largest == 0 or largest > _SMALLEST)


def run_with(call: Call, operands: Sequence[Tensor], flowing: frozenset[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Run a call with these operands; those in `flowing` have a gradient."""
    owned = [tensor.clone().requires_grad_(slot in flowing) for slot, tensor in enumerate(operands)]
    return call.run(owned), owned


def gradients_of(
    results: Sequence[Tensor], operands: Sequence[Tensor], cotangents: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The gradients of operands for those of results; zeros where none flows."""
    pairs = [(tensor, given) for tensor, given in zip(results, cotangents, strict=True) if given is not None]
    if not pairs:
        return (None,) * len(operands)
    flowing = [tensor for tensor in operands if tensor.requires_grad]
    outputs, given = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outputs, flowing, given, allow_unused=True))
    return tuple(
        None if not tensor.requires_grad else torch.zeros_like(tensor) if (item := next(found)) is None else item
        for tensor in operands
    )
