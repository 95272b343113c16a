"""Values that are known while tracing: of what a model makes itself, and of inputs that are constants."""

import contextlib
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from passes.capture.source import Loops
from passes.capture.values import MOST, Read, Values, is_readable


def followed(
    function: Callable[..., object], constants: Sequence[str] = (), **inputs: Tensor | None
) -> tuple[object, Read]:
    """The result of `function` while its values are followed, and its reads. Inputs are tensors without values."""
    read = Read()
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True) as mode:
        fakes = {name: mode.from_tensor(values.clone(), static_shapes=True) for name, values in inputs.items()}
        given = [(name, fakes[name], values) for name, values in inputs.items() if not values.is_floating_point()]
        with Values(given, frozenset(constants), read, Loops([], __file__)):
            return function(**fakes), read


GRID = torch.tensor([[1, 2], [3, 4]])


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda: torch.ones(3).sum().item(), 3.0),
        (lambda: torch.arange(6).reshape(2, 3).t()[1].tolist(), [1, 4]),
        (lambda: bool(torch.full((2, 2), 7).eq(7).all()), True),
        (lambda: torch.tensor([3, 1, 2]).sort().values.tolist(), [1, 2, 3]),
        (lambda: torch.zeros(4, dtype=torch.bool).logical_not().nonzero().shape, (4, 1)),
        (lambda: torch.arange(5)[torch.arange(5) % 2 == 0].tolist(), [0, 2, 4]),
        (lambda: torch.unique(torch.tensor([2, 2, 5])).tolist(), [2, 5]),
        (lambda: torch.linspace(0, 1, 3, device="meta").to("cpu").tolist(), [0.0, 0.5, 1.0]),
    ],
)
def test_what_is_made_of_sizes_is_known(function: Callable[..., object], expected: object) -> None:
    """Numbers, branches and sizes, as they are without a trace."""
    got, read = followed(function)
    assert got == expected
    assert read == Read()


def _changed_in_place() -> list[int]:
    base = torch.zeros(4, dtype=torch.int64)
    view = base[1:3]
    view += torch.tensor([5, 6])
    base.mul_(2)
    return base.tolist()


def test_changes_in_place_are_followed() -> None:
    """Through views, as memory is shared."""
    assert followed(_changed_in_place)[0] == [0, 10, 12, 0]


def _overwritten(x: Tensor) -> tuple[bool, ...]:
    base = torch.zeros(4)
    view, other = base[1:3], torch.zeros(4)
    before = is_readable(view)
    view.copy_(x)
    return before, is_readable(view), is_readable(base), is_readable(base[:1]), is_readable(other)


def test_what_is_overwritten_is_known_no_longer() -> None:
    """Tensors that share its memory are not readable any more either."""
    assert followed(_overwritten, x=torch.ones(2))[0] == (True, False, False, False, True)


@pytest.mark.parametrize(
    "function",
    [
        lambda: torch.rand(3),
        lambda: torch.empty(3),
        lambda: torch.ones(3).bernoulli(),
        lambda: torch.ones(MOST + 1),
        lambda x: x + torch.ones(3),
        lambda x: torch.ones(3) * x.sum(),
    ],
)
def test_what_is_not_known(function: Callable[..., Tensor]) -> None:
    """Random numbers, open ones, too many, and what depends on activations."""
    inputs = {"x": torch.ones(3)} if function.__code__.co_argcount else {}
    assert followed(lambda **given: is_readable(function(**given)), **inputs)[0] is False


def test_random_numbers_are_not_drawn() -> None:
    """Following values leaves the generator as it is."""
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    followed(lambda: torch.ones(3).bernoulli() + torch.rand(3))
    assert torch.equal(torch.rand(2), expected)


def test_values_of_inputs_are_read_where_these_are_constants() -> None:
    """Any value that is read of an input marks the input as read."""

    def function(grid: Tensor, other: Tensor) -> list[int]:
        return (grid.prod(-1) + torch.arange(2)).tolist()

    got, read = followed(function, ["grid", "other"], grid=GRID, other=GRID)
    assert got == [2, 13]
    assert list(read.inputs) == ["grid"]
    line = read.inputs["grid"]
    assert line is not None
    assert line.text == "return (grid.prod(-1) + torch.arange(2)).tolist()"


def test_sizes_of_constants_are_read() -> None:
    """A size that depends on values needs them as a number does."""

    def function(grid: Tensor) -> torch.Size:
        return torch.repeat_interleave(grid[:, 0]).shape

    got, read = followed(function, ["grid"], grid=GRID)
    assert got == (4,)
    assert list(read.inputs) == ["grid"]


@pytest.mark.parametrize("constants", [[], ["other"]])
def test_inputs_behind_a_number_are_noted(constants: Sequence[str]) -> None:
    """If an input is no constant, a symbol stands for the number, and the input behind it is known."""

    def function(grid: Tensor, other: Tensor) -> object:
        return (grid.sum() + other.sum()).item()

    got, read = followed(function, constants, grid=GRID, other=GRID)
    assert isinstance(got, torch.SymInt)
    assert read.wanted == {got.node.expr: frozenset({"grid", "other"} - set(constants))}
    assert not read.inputs


def test_inputs_behind_a_size_are_noted() -> None:
    """The same for sizes."""
    got, read = followed(lambda grid: grid.nonzero().shape[0], grid=GRID)
    assert isinstance(got, torch.SymInt)
    assert read.wanted == {got.node.expr: frozenset({"grid"})}


def test_inputs_without_values_are_known_by_name() -> None:
    """On meta there are no values, but it can be said whose are missing."""
    read = Read()
    with FakeTensorMode(shape_env=ShapeEnv()):
        grid = torch.empty(2, 2, dtype=torch.int64)
        with Values([("grid", grid, None)], frozenset({"grid"}), read, Loops([], __file__)):
            assert not is_readable(grid + 1)
            number = (grid + 1).sum().item()
    assert isinstance(number, torch.SymInt)
    assert not read.inputs


def test_nothing_is_readable_outside() -> None:
    """Without a trace there is no answer."""
    assert not is_readable(torch.ones(2))


def _asserting(x: Tensor) -> Tensor:
    if x.max() > 3:
        raise ValueError("too large")
    return x


def test_checks_are_noted() -> None:
    """A check that only raises is passed over, by its line."""
    _, read = followed(_asserting, x=torch.ones(3))
    assert [line.text for line in read.checks if line is not None] == ["if x.max() > 3:"]


def test_checks_on_constants_are_made() -> None:
    """A check on known values is made."""
    with pytest.raises(ValueError, match="too large"):
        followed(_asserting, ["x"], x=GRID)


def test_an_unknown_branch_is_an_error() -> None:
    """The trace cannot go on."""

    def function(x: Tensor) -> int:
        return 1 if x.max() > 3 else 2

    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.raises(RuntimeError, match="data-dependent"))
        followed(function, x=torch.ones(3))
