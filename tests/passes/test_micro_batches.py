"""micro_batches: what one micro-batch runs, what is summed over the batch before, and what is refused."""

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from passes.capture import Tracing, capture
from passes.ir.errors import MicroBatchError
from passes.ir.layout import P, R, S
from passes.ir.program import Program
from passes.micro_batches import Batch, batch_size, micro_batches, nearest_count
from passes.normalize import normalize


def _program(model: nn.Module, **inputs: Tensor) -> Program:
    return normalize(capture(model, inputs, Tracing(True, True, contextlib.nullcontext())))


class _Model(nn.Module):
    """A linear layer and a function of what it gives."""

    def __init__(self, loss: object, width: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width, bias=False)
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """x: [batch, width], y: labels or anything."""
        return {"loss": self.loss(self.inner(x), y)}


def _traced(loss: object, y: Tensor | None = None, x: Tensor | None = None) -> Program:
    given = torch.randn(8, 4) if x is None else x
    return _program(_Model(loss), x=given, y=torch.zeros(8, dtype=torch.int64) if y is None else y)


def _lines(program: Program | None) -> list[str]:
    return [line for line in str(program).splitlines() if not line.startswith("parameter")]


def test_the_mean_over_labels_divides_by_the_count_of_the_batch() -> None:
    """The count is a program of its own over the labels, and an input of the micro-batch."""
    found = micro_batches(_traced(nn.functional.cross_entropy), 2)
    assert _lines(found.program) == [
        "input x: float32[4, 4]",
        "input y: int64[4]",
        "input total: int64[]",
        "%linear = linear(x, inner.weight)  # float32[4, 4]  inner",
        "%cross_entropy_loss_n0 = cross_entropy_loss(%linear, y, reduction=2)  # float32[]",
        "%div_n3 = div(%cross_entropy_loss_n0, total)  # float32[]",
        "output loss: %div_n3",
    ]
    assert _lines(found.totals) == [
        "input y: int64[4]",
        "%ne_n1 = ne(y, other=-100)  # bool[4]",
        "%sum_n2 = sum(%ne_n1)  # int64[]",
        "output total: %sum_n2",
    ]
    assert (found.count, found.samples, found.loss) == (2, 4, 0)
    assert found.inputs == {"x": S(0), "y": S(0)}
    assert found.outputs == (P,)


def test_a_mean_divides_by_the_size_of_the_batch() -> None:
    """A number in a trace is that of the whole batch."""
    found = micro_batches(_traced(lambda x, y: x.mean()), 4)
    assert _lines(found.program)[2:] == [
        "%linear = linear(x, inner.weight)  # float32[2, 4]  inner",
        "%mean_summed = sum(%linear)  # float32[]",
        "%mean = div(%mean_summed, other=32)  # float32[]",
        "output loss: %mean",
    ]
    assert found.totals is None


def test_sizes_are_those_of_a_micro_batch() -> None:
    """Views, and what is made as large as the batch."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        mask = torch.ones(8, 1, dtype=x.dtype).expand(8, 4)
        return (x.reshape(8, 2, 2).transpose(1, 2).reshape(16, 2) * mask.reshape(16, 2)).sum()

    text = str(micro_batches(_traced(loss), 2).program)
    for shape in ("shape=[4, 2, 2]", "shape=[8, 2]", "size=[4, 1]", "size=[4, 4]"):
        assert shape in text, text
    assert "[16" not in text


def test_parts_stand_where_the_whole_is_made() -> None:
    """The part of a mask that layers read is made before all of them, so that the first one is as the others."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            mask = torch.ones(8, 4)
            for layer in self.layers:
                x = layer(x) * mask
            return {"loss": x.sum()}

    found = micro_batches(_program(Model(), x=torch.randn(8, 4)), 2)
    assert [line.split("  #")[0] for line in _lines(found.program)] == [
        "input x: float32[4, 4]",
        "%ones_part = ones(size=[4, 4], device=cpu, pin_memory=False)",
        "%linear = linear(x, layers.0.weight)",
        "%mul = mul(%linear, %ones_part)",
        "%linear_1 = linear(%mul, layers.1.weight)",
        "%mul_1 = mul(%linear_1, %ones_part)",
        "%sum = sum(%mul_1)",
        "output loss: %sum",
    ]


@pytest.mark.parametrize(
    ("shapes", "size"),
    [
        ([(8, 16), (8,)], 8),
        ([(1, 16), (8, 16)], 8),
        ([(3, 8, 16), (8, 16), (8, 16)], 8),
        ([(), (1, 4)], 1),
        ([], 1),
    ],
)
def test_the_batch_is_what_most_inputs_begin_with(shapes: list[tuple[int, ...]], size: int) -> None:
    """An input that serves all samples has a first dim of 1."""
    assert batch_size(shapes) == size


def test_inputs_may_have_the_batch_second() -> None:
    """Positions of several kinds come before it; those of one sample for all have none."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor, positions: Tensor, shared: Tensor) -> dict[str, Tensor]:
            return {"loss": (self.inner(x) * y * positions[0] * positions[2] + shared).sum()}

    given = {"x": torch.randn(4, 4), "y": torch.randn(4, 4), "positions": torch.randn(3, 4, 4)}
    found = micro_batches(_program(Model(), **given, shared=torch.randn(1, 4)), 2)
    assert found.inputs == {"x": S(0), "y": S(0), "positions": S(1), "shared": R}


def test_inputs_without_a_batch_stay_whole() -> None:
    """Positions are the same for all samples."""
    found = micro_batches(_traced(lambda x, y: (x + y).sum(), torch.randn(1, 4)), 2)
    assert found.inputs == {"x": S(0), "y": R}
    assert "input y: float32[1, 4]" in str(found.program)


def test_outputs_lie_side_by_side_or_are_summed() -> None:
    """Logits have samples, a sum has not, and what follows from parameters is the same in all."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            hidden = self.inner(x)
            turned = hidden.t()
            return {"loss": hidden.sum(), "turned": turned, "each": hidden.sum(0), "weights": self.inner.weight * 2}

    assert micro_batches(_program(Model(), x=torch.randn(8, 4)), 2).outputs == (P, S(1), P, R)


@pytest.mark.parametrize(
    ("loss", "op"),
    [
        (lambda x, y: x.softmax(0).sum(), "softmax"),
        (lambda x, y: x.sum() * x.sum(), "mul"),
        (lambda x, y: x.sum().exp(), "exp"),
        (lambda x, y: x.sum() + 1.0, "add"),
        (lambda x, y: x.sum() / (x > 0).sum(), "div"),
        (lambda x, y: x[0].sum(), "select"),
        (lambda x, y: x.sort(0).values.sum(), "sort"),
        (lambda x, y: (x @ x.t()).sum(), "matmul"),
        (lambda x, y: (x * torch.arange(8.0)[:, None]).sum(), "mul"),
        (lambda x, y: x.cumsum(0).sum(), "cumsum"),
    ],
)
def test_what_crosses_the_batch_is_refused(loss: object, op: str) -> None:
    """The message names the op."""
    with pytest.raises(MicroBatchError, match=rf"/{op}.* needs the whole batch"):
        micro_batches(_traced(loss), 2)


def test_outputs_of_single_samples_are_refused() -> None:
    """They can be left out, as the loss cannot."""

    class Apart(_Model):
        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            return {**super().forward(x, y), "first": self.inner(x)[0]}

    inputs = {"x": torch.randn(8, 4), "y": torch.zeros(8, dtype=torch.int64)}
    with pytest.raises(MicroBatchError, match=r"select, an output, needs the whole batch \(outputs='scalars' returns"):
        micro_batches(_program(Apart(nn.functional.cross_entropy), **inputs), 2)
    with pytest.raises(MicroBatchError) as refused:
        micro_batches(_traced(lambda x, y: x.sum(0).prod()), 2)
    assert "outputs=" not in str(refused.value)


def test_pairs_of_samples_are_refused() -> None:
    """They could be cut so that pairs stay together, but samples must stand for themselves."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        pairs = x.reshape(4, 2, 4)
        return (pairs[:, 0] * pairs[:, 1]).sum()

    with pytest.raises(MicroBatchError, match="/reshape needs the whole batch"):
        micro_batches(_traced(loss), 2)


def test_buffers_that_each_pass_changes_are_refused() -> None:
    """Two passes change them twice, and by parts of the batch."""
    model = nn.Sequential(nn.BatchNorm1d(4))
    model.forward = lambda input: {"loss": nn.Sequential.forward(model, input).sum()}  # type: ignore[method-assign]
    with pytest.raises(MicroBatchError, match=r"changes the buffer 0\.\w+"):
        micro_batches(_program(model, input=torch.randn(8, 4)), 2)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda x, y: x, "no output called loss"),
        (lambda x, y: y.float().sum(), "no output called loss"),
    ],
)
def test_without_a_loss_there_is_nothing_to_cut(loss: object, message: str) -> None:
    """The loss is a scalar that has a gradient."""
    with pytest.raises(MicroBatchError, match=message):
        micro_batches(_traced(loss), 2)


def test_numbers_must_divide() -> None:
    """The batch is cut into equal parts."""
    with pytest.raises(MicroBatchError, match="a batch of 8 cannot be cut into 3"):
        micro_batches(_traced(nn.functional.cross_entropy), 3)


@pytest.mark.parametrize(
    ("batch", "least", "expected"),
    [(16, 1, 4), (12, 1, 4), (6, 1, 3), (5, 1, 5), (2, 1, 1), (2, 2, 2), (9, 1, 9), (1, 2, None), (18, 1, 9)],
)
def test_numbers_for_other_batches(batch: int, least: int, expected: int | None) -> None:
    """A batch of 8 was planned in four parts of two samples: a part of another batch has no more of them, unless it is
    cut in four as well; `least` is what the schedule asks for."""
    assert nearest_count(batch, 4, 2, lambda count: count >= least) == expected


def test_a_schedule_may_ask_for_larger_micro_batches() -> None:
    """Nine samples in parts of two: a schedule that does not run nine parts gets three."""
    assert nearest_count(9, 4, 2, lambda count: count < 9) == 3


def test_micro_batches_add_up() -> None:
    """Losses and gradients of the program's own ops, run one by one."""
    torch.manual_seed(0)
    model = _Model(lambda x, y: nn.functional.cross_entropy(x.tanh(), y, label_smoothing=0.1)).double()
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.tensor([0, -100, 2, -100, -100, 1, 3, 0])
    expected = model(x, y)["loss"]
    expected.backward()
    found = micro_batches(_program(model, x=x, y=y), 4)
    weight = model.inner.weight.detach().clone().requires_grad_()
    parts = [{"x": x[at : at + 2], "y": y[at : at + 2]} for at in range(0, 8, 2)]
    assert found.totals is not None
    total = sum(_run(found.totals, part)[0] for part in parts)
    losses = [_run(found.program, {**part, "total": total, "inner.weight": weight})[0] for part in parts]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(torch.stack(losses).sum().detach(), expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(weight.grad, model.inner.weight.grad, rtol=1e-12, atol=1e-15)


class _Seen(nn.Module):
    """Words, some of which are places for rows of images; `rows` makes these from all images."""

    def __init__(self, rows: Callable[[Tensor], Tensor] = torch.tanh, of_words: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 4)
        self.rows, self.of_words = rows, of_words

    def forward(self, ids: Tensor, images: Tensor) -> dict[str, Tensor]:
        """ids: [batch, words], images: [batch, rows, 4]."""
        words = self.words(ids)
        places = (words[..., :1] > 0 if self.of_words else ids[..., None] == 7).expand_as(words)
        return {"loss": words.masked_scatter(places, self.rows(images)).square().sum()}


_IDS = torch.tensor([[7, 1, 7], [7, 7, 2], [3, 7, 7], [7, 4, 7]])
_IMAGES = torch.arange(32.0).reshape(4, 2, 4)


def test_places_are_counted_in_each_micro_batch() -> None:
    """Rows of images replace places among words: samples with more or fewer of them than others are counted before."""
    found = micro_batches(_program(_Seen(), ids=_IDS, images=_IMAGES), 2)
    assert [line.split("  #")[0] for line in _lines(found.program)[2:-3]] == [
        "%embedding = embedding(words.weight, ids)",
        "%reshape_n0 = reshape(ids, shape=[2, 3, 1])",
        "%eq = eq(%reshape_n0, other=7)",
        "%tanh = tanh(images)",
        "%reshape_n2 = reshape(%eq, shape=[6])",
        "%cumsum_n3 = cumsum(%reshape_n2, dim=0)",
        "%sub_n4 = sub(%cumsum_n3, other=1)",
        "%clamp_n5 = clamp(%sub_n4, min=0, max=3)",
        "%reshape_n6 = reshape(%tanh, shape=[4, 4])",
        "%index_select_n7 = index_select(%reshape_n6, dim=0, %clamp_n5)",
        "%reshape_n8 = reshape(%index_select_n7, shape=[2, 3, 4])",
        "%where_n9 = where(%eq, %reshape_n8, %embedding)",
    ]
    assert [line.split("  #")[0] for line in _lines(found.totals)[-7:-1]] == [
        "%reshape_n2 = reshape(%eq, shape=[6])",
        "%clamp_n5_unmatched_0 = reshape(%reshape_n2, shape=[2, 3])",
        "%clamp_n5_unmatched_1 = sum(%clamp_n5_unmatched_0, dim=[1])",
        "%clamp_n5_unmatched_2 = sub(%clamp_n5_unmatched_1, other=2)",
        "%clamp_n5_unmatched_3 = abs(%clamp_n5_unmatched_2)",
        "%clamp_n5_unmatched_4 = sum(%clamp_n5_unmatched_3)",
    ]
    (check,) = found.checks
    assert "each sample must have 2 of them" in check
    assert found.totals is not None
    assert _run(found.totals, {"ids": _IDS[:2]})[0] == 0
    assert _run(found.totals, {"ids": torch.tensor([[7, 7, 7], [7, 1, 1]])})[0] == 2


@pytest.mark.parametrize(
    ("model", "op"),
    [
        (_Seen(of_words=True), "cumsum"),
        (_Seen(lambda images: images.flip(0)), "flip"),
        (_Seen(lambda images: images.transpose(0, 1)), "index_select"),
        (_Seen(lambda images: images.flatten()[:20].reshape(5, 4)), "slice"),
    ],
)
def test_places_and_rows_that_cross_the_batch_are_refused(model: nn.Module, op: str) -> None:
    """Places that depend on parameters, and rows that are not those of the sample."""
    with pytest.raises(MicroBatchError, match=rf"/{op} needs the whole batch"):
        micro_batches(_program(model, ids=_IDS, images=_IMAGES), 2)


def _balanced(x: Tensor, y: Tensor) -> Tensor:
    """A cross entropy, and a product of means over the samples, of which one counts those with a label alone."""
    counted = (y != -100).to(x.dtype)[:, None]
    share = (x.softmax(-1) * counted).sum(0) / (counted.sum() + 0.0)
    return nn.functional.cross_entropy(x, y) + 0.5 * ((x > 0).to(x.dtype).mean(0) * share).sum().sqrt()


def test_terms_that_couple_samples_are_averaged() -> None:
    """They are those of each micro-batch by itself, and all else is that of the whole batch."""
    torch.manual_seed(0)
    model = _Model(_balanced).double()
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.tensor([0, -100, 2, 3, -100, -100, 3, 0])
    program, parts = _program(model, x=x, y=y), [slice(0, 4), slice(4, 8)]
    with pytest.raises(MicroBatchError, match=r"/mul.* needs the whole batch .*aux_loss='micro_batch'"):
        micro_batches(program, 2)
    count = (y != -100).sum()
    entropy = nn.functional.cross_entropy(model.inner(x), y, reduction="sum") / count
    inner = [model.inner(x[part]) for part in parts]
    own = [nn.functional.cross_entropy(each, y[part]) for each, part in zip(inner, parts, strict=True)]
    terms = [_balanced(each, y[part]) - mean for each, part, mean in zip(inner, parts, own, strict=True)]
    expected = entropy + sum(terms) / 2
    expected.backward()
    found = micro_batches(program, 2, couples=True)
    assert [name.rpartition("/")[2].partition(".")[0] for name in found.coupled] == ["mul", "sqrt"]
    weight = model.inner.weight.detach().clone().requires_grad_()
    given = [{"x": x[part], "y": y[part], "inner.weight": weight} for part in parts]
    names = [item.name for item in found.program.inputs if item.name not in ("x", "y")]
    assert found.totals is not None
    totals = [sum(each) for each in zip(*(_run(found.totals, part) for part in given), strict=True)]
    losses = [_run(found.program, {**part, **dict(zip(names, totals, strict=True))})[0] for part in given]
    sum(losses).backward()
    torch.testing.assert_close(sum(losses).detach(), expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(weight.grad, model.inner.weight.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda x, y: (x - x.mean(0)).square().sum(), "/sub"),
        (lambda x, y: (x.sum() * x.mean()).exp(), "the loss as a whole couples the samples"),
        (lambda x, y: (x @ x.t()).sum(), "/matmul"),
    ],
)
def test_samples_that_depend_on_others_are_refused(loss: object, message: str) -> None:
    """Only terms of the loss may couple samples, and only by sums over them."""
    with pytest.raises(MicroBatchError, match=message):
        micro_batches(_traced(loss), 2, couples=True)


def test_zeros_are_a_sum_of_zeros() -> None:
    """Terms that are added to zeros are a sum; terms that are added to ones are not."""
    assert micro_batches(_traced(lambda x, y: (torch.zeros(4) + x.sum(0)).sum()), 2).outputs == (P,)
    for loss in (lambda x, y: (torch.ones(4) + (torch.zeros(4) + x.sum(0))).sum(),):
        with pytest.raises(MicroBatchError, match="/add"):
            micro_batches(_traced(loss), 2)


def _run(program: Program, given: dict[str, Tensor]) -> list[Tensor]:
    """The outputs of a program, op by op."""
    from passes.ir.arguments import Argument, Ref

    values = dict(given)

    def value(argument: Argument) -> object:
        if isinstance(argument, Ref):
            return values[argument.name]
        return [value(item) for item in argument] if isinstance(argument, tuple) else argument

    for op in program.ops:
        result = op.overload(**{name: value(item) for name, item in op.arguments.items()})
        values[op.results[0]] = result
    return [values[item.name] for item in program.outputs if isinstance(item, Ref)]


def test_one_batch_is_cut_in_several_ways() -> None:
    """Each cut is what it is alone, whatever was cut before; so is each refusal."""
    program = _traced(nn.functional.cross_entropy)
    batch = Batch(program)
    for count in (2, 8, 4, 2):
        found, alone = batch.cut(count), micro_batches(program, count)
        assert (found.count, found.samples) == (count, 8 // count)
        assert (str(found.program), str(found.totals)) == (str(alone.program), str(alone.totals))
    refused = Batch(_traced(lambda x, y: x.cumsum(0).sum()))
    for count in (2, 8, 4):
        with pytest.raises(MicroBatchError, match=rf"into {count} micro-batches.*needs the whole batch"):
            refused.cut(count)
