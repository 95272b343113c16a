"""Analysis of a custom `torch.autograd.Function` that a graph calls: its properties, derived from its operators and
checked on random data.

A function is *pointwise* if every element of every result, and of every gradient, depends on the elements at the same
place alone: it is the same function on any part. It is *linear* if its gradients are linear in the gradients of its
results, as those of an operator are and those of a function that clips them are not: a sum of gradients goes through it
addend by addend.

Forward and backward run on fake tensors with symbolic sizes, and every ATen operator that they call is analyzed. The
analysis is conservative.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod

import torch
from torch import Tensor

from passes._torch import (
    DimDynamic,
    FakeTensorMode,
    OpOverload,
    ShapeEnv,
    StatelessSymbolicContext,
    SymbolicContext,
    TorchDispatchMode,
    pytree,
    schema_of,
    storage_id,
    without_function_modes,
    without_modes,
)
from passes.capture.ranks import refused_in
from passes.ir.errors import CaptureError
from passes.ir.program import TensorType, has_gradient
from passes.ops import read, run

# Elements on fresh data: how many are tried as they are, and how long a dim may be where there would be more.
_MOST, _LONGEST = 2**20, 64


@dataclass(frozen=True)
class Properties:
    """Properties of a call, as defined above; `drawn` says that it draws random numbers."""

    pointwise: bool
    linear: bool
    drawn: bool


@cache
def properties_of(
    function: str, arguments: str, operands: tuple[TensorType, ...], sizes: tuple[int, ...]
) -> Properties:
    """The properties of a call with operands of these types; forward and backward are run on random data.

    Raises CaptureError where they cannot be run, where they do not give the same twice, and where they ask for ranks or
    communicate between them.
    """
    # Without the modes of the caller.
    with without_modes(), without_function_modes(), torch.enable_grad():
        followed = _followed(function, arguments, operands, sizes)
        with refused_in(function):
            return _tried(function, arguments, operands, sizes, followed)


# --- following operators ---------------------------------------------------------------------------------------------

# Operators of one operand, or of several of one shape, that torch does not mark as pointwise.
_POINTWISE = {
    "_to_copy", "alias", "bernoulli", "bernoulli_", "copy_", "detach", "detach_", "elu_backward", "empty_like",
    "fill_", "full_like", "hardtanh_backward", "leaky_relu_backward", "lift_fresh", "masked_fill", "masked_fill_",
    "native_dropout", "ones_like", "rand_like", "randn_like", "scalar_tensor", "softplus_backward", "uniform_", "zero_",
    "zeros_like",
}  # fmt: skip

_VIEWS = {"_unsafe_view", "expand", "reshape", "view"}

# Linear in their first operand, if no other one depends on a gradient.
_FIRST = {
    *_VIEWS, "_softmax_backward_data", "_log_softmax_backward_data", "_to_copy", "alias", "clone", "cumsum", "detach",
    "diagonal", "div", "flip", "gather", "index", "index_select", "mean", "neg", "permute", "roll", "select", "slice",
    "split", "squeeze", "sum", "t", "transpose", "unbind", "unsqueeze",
}  # fmt: skip

# Linear in any one operand, if no other one depends on a gradient.
_PRODUCTS = {"bmm", "dot", "mm", "mul", "mv"}

# Linear in all operands together: each must depend on a gradient, or be zero. For some the first is no summand.
_SUMS = {"add": 0, "sub": 0, "cat": 0, "stack": 0, "where": 1, "scatter_add": 0, "index_add": 0, "copy": 0}

# Ways to divide that are not linear.
_ROUNDED = ("floor", "trunc")

_ZEROS = {"new_zeros", "zeros", "zeros_like"}
_FILLED = {"full", "full_like", "new_full"}

# Of these operands only the shape matters.
_LIKE = {*_ZEROS, *_FILLED, "empty_like", "new_empty", "new_ones", "ones_like", "rand_like", "randn_like"}

# Operators whose result of zero is zero; in place only a part of what lies in memory may be meant.
_SAME = {*_VIEWS, "alias", "clone", "detach", "zero"}


class _Following(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at every operator. `gradients` are the storages of tensors that depend on a gradient, `zeros` of those that
    are zero; both are kept alive, so that nothing else takes their place."""

    def __init__(self, shape: Sequence[object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shape = shape
        self.pointwise = True
        self.linear = True
        self.drawn = False
        self.gradients: dict[int, Tensor] = {}
        self.zeros: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self,
        function: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        options = kwargs or {}
        result = function(*args, **options)
        given = pytree.tree_leaves((args, options))
        returned = [item for item in pytree.tree_leaves(result) if isinstance(item, Tensor)]
        if not returned:
            # A question about a tensor (one about its values cannot be answered here), or a change of a whole list.
            self.pointwise = self.pointwise and not schema_of(function).is_mutable
            self.linear = self.linear and not schema_of(function).is_mutable
            return result
        name = schema_of(function).name.partition("::")[2]
        self.drawn |= torch.Tag.nondeterministic_seeded in function.tags
        self.pointwise = self.pointwise and self._is_pointwise(function, name, given, returned)
        self._follow_gradients(name, args, given, returned)
        return result

    def _is_pointwise(
        self, function: OpOverload, name: str, given: Sequence[object], returned: Sequence[Tensor]
    ) -> bool:
        """Whether an operator keeps to places; numbers among its operands must not be sizes."""
        operands = [item for item in given if isinstance(item, Tensor)]
        shaped = all(tuple(item.shape) in (self.shape, ()) for item in [*operands, *returned])
        if shaped and name in _VIEWS and operands[0].shape == returned[0].shape:
            return True
        sized = any(isinstance(item, (torch.SymInt, torch.SymFloat)) for item in given)
        return shaped and not sized and (torch.Tag.pointwise in function.tags or name in _POINTWISE)

    def _follow_gradients(
        self, name: str, args: tuple[object, ...], given: Sequence[object], returned: Sequence[Tensor]
    ) -> None:
        """Note which results depend on a gradient, or are zero, and whether the former are linear in it."""
        tensors = [item for item in given if isinstance(item, Tensor)]
        name = name.removesuffix("_")
        depending = [item for item in tensors if name not in _LIKE and storage_id(item) in self.gradients]
        zero = not depending and self._is_zero(name, given, tensors)
        if depending:
            kept = all(has_gradient(item.dtype) for item in returned)
            rounded = any(isinstance(item, str) and item in _ROUNDED for item in given)
            self.linear = self.linear and kept and not rounded and self._is_linear(name, args, tensors, depending)
        for item in returned:
            place = storage_id(item)
            self.zeros.pop(place, None)
            if depending:
                self.gradients[place] = item
            elif zero:
                self.zeros[place] = item

    def _is_zero(self, name: str, given: Sequence[object], tensors: Sequence[Tensor]) -> bool:
        """Whether the result of an operator is zero."""
        if name in _FILLED:
            return given[-1] == 0
        same = name in _SAME and all(storage_id(item) in self.zeros for item in tensors)
        return name in _ZEROS or same

    def _is_linear(
        self, name: str, args: tuple[object, ...], tensors: Sequence[Tensor], depending: Sequence[Tensor]
    ) -> bool:
        first = depending[0] is tensors[0] and len(depending) == 1
        if name in _FIRST or name.endswith("_backward"):
            return first
        if name in _PRODUCTS:
            return len(depending) == 1
        if name in _SUMS:
            numbers = [item for item in args[:2] if isinstance(item, (int, float)) and name in ("add", "sub")]
            summands = [item for item in tensors[_SUMS[name] :] if item.is_floating_point() or item.is_complex()]
            allowed = {*self.gradients, *self.zeros}
            return not any(numbers) and all(storage_id(item) in allowed for item in summands)
        if name in ("masked_fill", "fill"):
            return first and isinstance(args[-1], (int, float)) and args[-1] == 0
        return name == "zero"


def _followed(function: str, arguments: str, operands: tuple[TensorType, ...], sizes: tuple[int, ...]) -> Properties:
    """The properties that follow from the operators of a call."""
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    fakes = [_symbolic(type, mode) for type in operands]
    following = _Following(tuple(fakes[0].shape) if fakes else ())
    try:
        with mode, following, refused_in(function):
            results = run(fakes, function, arguments, sizes)
            flowing = [item for item in results if item.requires_grad]
            cotangents = [torch.empty_like(item) for item in flowing]
            following.gradients = {storage_id(item): item for item in cotangents}
            gradients = _gradients(flowing, fakes, cotangents)
    except CaptureError:
        raise
    except Exception:
        # It cannot be followed: it has a kernel of its own, or reads values.
        return Properties(False, False, following.drawn)
    found = [item for item in gradients if item is not None]
    alike = bool(fakes) and all(tuple(item.shape) == following.shape for item in (*fakes, *results, *found))
    # A condition on sizes is another function for other sizes.
    pointwise = following.pointwise and alike and not sizes and not environment.guards
    reached = {*following.gradients, *following.zeros}
    linear = following.linear and all(storage_id(item) in reached for item in found)
    return Properties(pointwise, linear, following.drawn)


def _symbolic(type: TensorType, mode: FakeTensorMode) -> Tensor:
    """A tensor without values whose sizes, but for those that are 1, are symbols."""
    real = torch.empty(type.shape, dtype=type.dtype, device="meta")
    context: SymbolicContext = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DUCK] * len(type.shape))
    fake: Tensor = mode.from_tensor(real, symbolic_context=context)
    with mode:
        return torch.empty_like(fake, device="cpu", requires_grad=has_gradient(type.dtype))


def _gradients(
    results: Sequence[Tensor], operands: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """The gradients of operands; none where no gradient flows."""
    wanted = [item for item in operands if item.requires_grad]
    if not results or not wanted:
        return ()
    return torch.autograd.grad(results, wanted, cotangents, allow_unused=True)


# --- trying on fresh data --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Outcome:
    """The outcome of a call on some data: results, their given gradients, and the gradients of operands."""

    results: tuple[Tensor, ...]
    cotangents: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]
    drawn: bool


_Runner = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def _tried(
    function: str, arguments: str, operands: tuple[TensorType, ...], sizes: tuple[int, ...], properties: Properties
) -> Properties:
    """`properties` that hold on fresh data too. Raises CaptureError if a call does not give what the function gives."""
    cls, _, _ = read(function, arguments, operands, sizes)

    def itself(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        _, args, kwargs = read(function, arguments, tensors, sizes)
        result = cls.apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        return [item for item in (result if isinstance(result, tuple) else (result,)) if isinstance(item, Tensor)]

    def written(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return run(tensors, function, arguments, sizes)

    data, first = _first(itself, operands, function)
    if not _same(first, _outcome(written, data, first.cotangents)):
        raise CaptureError(
            f"the autograd.Function {function} does not give the same twice: a program cannot call it "
            "(it must depend on its arguments alone)"
        )
    if properties.drawn or first.drawn:
        return replace(properties, drawn=True)
    doubled = _outcome(itself, data, tuple(2 * item for item in first.cotangents))
    proportional = all(
        _equal(None if item is None else 2 * item, other)
        for item, other in zip(first.gradients, doubled.gradients, strict=True)
    )
    parted = properties.pointwise and _holds_on_parts(itself, data, first)
    return replace(properties, pointwise=parted, linear=properties.linear and proportional)


def _first(runner: _Runner, operands: tuple[TensorType, ...], function: str) -> tuple[list[Tensor], _Outcome]:
    """Fresh data and what the function gives on it: of smaller sizes where there would be much of it."""
    total = sum(prod(type.shape) for type in operands)
    small = tuple(TensorType(tuple(min(size, _LONGEST) for size in type.shape), type.dtype) for type in operands)
    reason: Exception | None = None
    for types in (operands,) if total <= _MOST else (small, operands):
        data = _fresh(types)
        try:
            return data, _outcome(runner, data)
        except CaptureError:
            raise
        except Exception as error:
            reason = error
    raise CaptureError(
        f"the autograd.Function {function} cannot be run on fresh data, to see that its backward is kept: "
        f"{type(reason).__name__}: {reason}"
    ) from reason


def _fresh(types: Sequence[TensorType]) -> list[Tensor]:
    """Random tensors; whole numbers are 0 and 1, so that they are good indices."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for type in types:
        if has_gradient(type.dtype):
            found.append(torch.randn(type.shape, generator=generator, dtype=torch.float64).to(type.dtype))
        else:
            found.append(torch.randint(0, 2, type.shape, generator=generator).to(type.dtype))
    return found


def _outcome(runner: _Runner, data: Sequence[Tensor], cotangents: tuple[Tensor, ...] | None = None) -> _Outcome:
    """Run forward and backward on copies of `data`; random numbers begin anew."""
    own = [item.clone().requires_grad_(has_gradient(item.dtype)) for item in data]
    with torch.random.fork_rng(devices=[]):
        # Of the CPU alone: `torch.manual_seed` seeds every device, and these go on where the user has left them.
        torch.default_generator.manual_seed(0)
        before = torch.random.get_rng_state()
        results = tuple(runner(own))
        drawn = not torch.equal(before, torch.random.get_rng_state())
        flowing = [item for item in results if item.requires_grad]
        if cotangents is None:
            generator = torch.Generator().manual_seed(1)
            cotangents = tuple(
                torch.randn(item.shape, generator=generator, dtype=torch.float64).to(item.dtype) for item in flowing
            )
        gradients = _gradients(flowing, own, cotangents)
    return _Outcome(tuple(item.detach() for item in results), cotangents, gradients, drawn)


def _same(one: _Outcome, other: _Outcome) -> bool:
    pairs = [*zip(one.results, other.results, strict=True), *zip(one.gradients, other.gradients, strict=True)]
    return all(_equal(a, b) for a, b in pairs)


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and one.dtype == other.dtype and torch.allclose(one, other, 0, 0, equal_nan=True)


def _holds_on_parts(runner: _Runner, data: Sequence[Tensor], whole: _Outcome) -> bool:
    """Whether the halves of every dim give the halves of all results and gradients."""
    for dim in range(data[0].dim()):
        if data[0].shape[dim] % 2 or not data[0].numel():
            continue
        halves: list[_Outcome] = []
        for half in range(2):
            part = [item.chunk(2, dim)[half] for item in data]
            halves.append(_outcome(runner, part, tuple(item.chunk(2, dim)[half] for item in whole.cotangents)))
        joined = [
            *(torch.cat(pair, dim) for pair in zip(*(item.results for item in halves), strict=True)),
            *(_joined(pair, dim) for pair in zip(*(item.gradients for item in halves), strict=True)),
        ]
        if not all(_equal(a, b) for a, b in zip(joined, (*whole.results, *whole.gradients), strict=True)):
            return False
    return True


def _joined(halves: tuple[Tensor | None, ...], dim: int) -> Tensor | None:
    found = [item for item in halves if item is not None]
    return torch.cat(found, dim) if len(found) == 2 else None
