"""One trace: the ways to get it, inputs that become constants in it, and what is taken out of it."""

import contextlib
import logging

import pytest
import torch
from torch import Tensor, nn

from passes.capture import Tracing, capture_symbolic
from passes.capture.exporting import OFFER, export, possible_constants
from passes.ir.errors import CaptureError
from tests.passes.custom import StraightThrough
from tests.passes.helpers import Apply, captured, printed


class Cuts(nn.Module):
    """Cuts rows as an input says, and counts them by another."""

    def forward(self, rows: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        """rows: [sum of lengths, width], labels: [number of lengths]."""
        parts = rows.split(lengths.tolist())
        return torch.stack([part.mean(0) for part in parts]).sum(-1) * labels


ROWS, LENGTHS, LABELS = torch.ones(6, 4), torch.tensor([1, 3, 2]), torch.tensor([0, 1, 2])


def test_inputs_whose_values_are_needed_are_constants(caplog: pytest.LogCaptureFixture) -> None:
    """They are no inputs any more; it is said which, and where. Others stay what they are."""
    with caplog.at_level(logging.WARNING, logger="autopar"):
        program = captured(Cuts(), rows=ROWS, lengths=LENGTHS, labels=LABELS)
    assert [item.name for item in program.inputs] == ["rows", "labels"]
    assert list(program.constants) == ["lengths (given)"]
    assert torch.equal(program.constants["lengths (given)"], LENGTHS)
    (record,) = caplog.records
    assert "the input lengths is a constant of the plan, because Cuts reads its values at" in record.message
    assert "(parts = rows.split(lengths.tolist()))" in record.message


def test_constants_need_values() -> None:
    """An input on meta has none, and the error says so."""
    with pytest.raises(CaptureError, match=r"give lengths with values, not on meta, and the plan is made for these\)"):
        captured(Cuts(), rows=ROWS, lengths=LENGTHS.to("meta"), labels=LABELS)


def test_constants_stay_where_sizes_vary() -> None:
    """Other dims may have other sizes all the same."""
    inputs = {"rows": ROWS, "lengths": LENGTHS, "labels": LABELS}
    tracing = Tracing(True, True, contextlib.nullcontext())
    symbolic = capture_symbolic(Cuts(), inputs, tracing, frozenset({("rows", 1)}))
    assert list(symbolic.ranges) == ["rows.1"]
    assert list(symbolic.program.constants) == ["lengths (given)"]


def test_what_could_be_a_constant() -> None:
    """Whole numbers with values; without, they are known by name."""
    found = possible_constants({"a": torch.ones(2), "b": [torch.tensor([True])], "c": torch.ones(2).long().to("meta")})
    assert list(found) == ["b[0]", "c"]
    assert found["b[0]"] is not None
    assert found["c"] is None


class Weighs(nn.Module):
    """Needs what it does not say to be whole numbers."""

    def forward(self, x: Tensor) -> Tensor:
        """Some of it."""
        return x[: int(x.sum())]


def test_activations_are_no_constants() -> None:
    """They are refused, with an offer."""
    with pytest.raises(CaptureError) as caught:
        captured(Weighs(), x=ROWS)
    assert str(caught.value).endswith(f": a size depends on the values of a tensor; {OFFER}")


# --- ways to trace ----------------------------------------------------------------------------------------------------


class Evades(nn.Module):
    """Leaves out in a trace what it needs."""

    def forward(self, x: Tensor) -> Tensor:
        """Twice."""
        factor = None if torch.compiler.is_compiling() else torch.full((6,), 2.0)
        return x * factor


def test_a_model_may_have_to_be_told_that_it_is_not_traced() -> None:
    """The first way fails, the next one does not."""
    assert "%mul = mul(x, %full)" in printed(captured(Evades(), x=torch.ones(4, 6)))
    assert not torch.compiler.is_compiling()


def _through_numpy(x: Tensor) -> Tensor:
    return x * torch.from_numpy(x.detach().numpy().clip(0, 1))


def test_a_model_may_have_to_be_traced_strictly() -> None:
    """Then what it does in numpy is there too."""
    assert any("clamp" in line for line in printed(captured(Apply(_through_numpy), x=torch.ones(4, 6))))


class Both(nn.Module):
    """Only strictly to be traced, but with a custom function before it or behind it."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        """The same in either order."""
        return _through_numpy(StraightThrough.apply(x)) if self.first else StraightThrough.apply(_through_numpy(x))


@pytest.mark.parametrize("first", [True, False])
def test_custom_functions_are_not_traced_strictly(first: bool) -> None:
    """Their backward would be lost; the error is that of the first way."""
    with pytest.raises(CaptureError, match=r"cannot trace Both at .*test_exporting.py.*numpy"):
        captured(Both(first), x=torch.ones(4, 6).requires_grad_())


def test_the_forward_is_as_it_was() -> None:
    """Whether the trace succeeds or not."""
    for module in (Cuts(), Weighs()):
        for tensor in (ROWS, torch.ones(2)):
            with pytest.raises(CaptureError):
                export(module, {"x": tensor}, {}, frozenset())
        assert "forward" not in vars(module)


# --- what is taken out of a trace -------------------------------------------------------------------------------------


def _numbers(x: Tensor) -> Tensor:
    count = (x > 0).sum().item()
    return torch.add(x, count, alpha=2) / count


def test_numbers_of_several_uses() -> None:
    """One tensor stands for the number in all of them."""
    lines = printed(captured(Apply(_numbers), x=torch.ones(4, 6)))
    assert lines[-3:] == ["%add = add(x, %detach, alpha=2)", "%div = div(%add, %detach)", "output : %div"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.full((4, 6), x.sum().item()),
        lambda x: x.clamp(max=x.mean().item()),
        lambda x: x + (x.sum().item() + 1),
        lambda x: x.sum() * x.double().mean().item(),
    ],
)
def test_numbers_that_have_to_be_numbers(function: object) -> None:
    """A number stays one if an operator takes no tensor, if more is computed with it, or if the dtype would change."""
    with pytest.raises(CaptureError, match="it takes a size, or a number to compute with, out of the values"):
        captured(Apply(function), x=torch.ones(4, 6))


def test_numbers_that_nobody_uses() -> None:
    """They are gone, and so are assertions on them."""

    def function(x: Tensor) -> Tensor:
        number = x.max().item()
        torch._check(number < 3)
        x.nonzero()
        return x.sin()

    assert printed(captured(Apply(function), x=torch.ones(4, 6)))[-2:] == ["%sin = sin(x)", "output : %sin"]


@pytest.mark.parametrize("transposed", [False, True])
def test_places_in_memory_become_places_in_a_row(transposed: bool) -> None:
    """The memory format is written out: the tensor may have another one when the program runs."""

    def function(x: Tensor) -> Tensor:
        y = x.sin().t() if transposed else x.sin()
        return y.as_strided((3, 4), (1, 2), 5)

    lines = printed(captured(Apply(function), x=torch.ones(4, 6)))
    order = "[1, 0]" if transposed else "[0, 1]"
    assert any(f"permute(%t, dims={order})" in line or f"permute(%sin, dims={order})" in line for line in lines)
    assert "%reshape = reshape(%permute, shape=[24])" in lines
    assert "%slice = slice(%reshape, start=5, end=24)" in lines
    assert "%as_strided = as_strided(%slice, size=[3, 4], stride=[1, 2])" in lines


def test_places_in_memory_with_gaps_are_refused() -> None:
    """There is no row that they are places in."""
    with pytest.raises(CaptureError, match="it takes elements by their places in memory out of a tensor with gaps"):
        captured(Apply(lambda x: x[:, ::2].as_strided((2, 2), (1, 1))), x=torch.ones(4, 6))
