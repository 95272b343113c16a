"""normalize: each rewrite on the printed program, and that all of them compute what the module does."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from passes.ir.errors import CaptureError
from passes.ir.program import TensorType
from tests.passes.helpers import Apply, captured, normalized, op_lines, printed
from tests.passes.normalize.running import run

X = torch.arange(24.0).reshape(4, 6) / 7 - 1


def lines_of(function: Callable[..., object], **inputs: Tensor) -> list[str]:
    """The ops of a function in normal form."""
    return op_lines(normalized(Apply(function), **(inputs or {"x": X})))


# --- no in-place ops ---


def test_in_place_ops_give_new_tensors() -> None:
    """A chain of in-place ops becomes one of plain ones, and later reads see the last value."""

    def function(x: Tensor) -> Tensor:
        y = x * 2
        y.mul_(3).relu_()
        return y.sum()

    assert lines_of(function) == [
        "%mul = mul(x, other=2)",
        "%mul_n0 = mul(%mul, other=3)",
        "%relu_n1 = relu(%mul_n0)",
        "%sum = sum(%relu_n1)",
    ]


def test_copies_into_a_tensor_cast_and_expand() -> None:
    """`copy_` is what is copied, in the shape and dtype of the target."""

    def function(x: Tensor) -> Tensor:
        y = x * 2
        y.copy_(torch.ones(6, dtype=torch.float64))
        return y

    lines = lines_of(function)
    assert lines[-1] == "%expand_n2 = expand(%to_n1, size=[4, 6])"
    assert lines[-2].startswith("%to_n1 = to(")


class Counts(nn.Module):
    """Changes a buffer twice and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        """Scale by what was added up."""
        self.total.add_(x.sum(0))
        self.total.mul_(0.5)
        return x * self.total


def test_buffers_that_change_are_updates() -> None:
    """The last value is the update, and reads after a change see it."""
    program = normalized(Counts(), x=X)
    assert printed(program)[2:] == [
        "%sum = sum(x, dim=[0])",
        "%add_n0 = add(total, %sum)",
        "%mul_n1 = mul(%add_n0, other=0.5)",
        "%mul = mul(x, %mul_n1)",
        "update total: %mul_n1",
        "output : %mul",
    ]


def test_changes_that_cannot_be_followed_are_refused() -> None:
    """A change through a view that no op puts back is refused by the names of both."""

    def function(x: Tensor) -> Tensor:
        y = torch.complex(x, x)
        torch.view_as_real(y).add_(1)
        return y

    with pytest.raises(CaptureError, match=r"add_ at .*that view_as_real at .*write it without in-place"):
        lines_of(function)


def test_changes_of_detached_tensors() -> None:
    """They change the tensor itself where it has no gradient, and are refused where it has one."""

    def counted(x: Tensor) -> Tensor:
        ones = torch.ones(4, 6)
        ones.detach().add_(x.detach())
        return x * ones

    model = nn.Linear(6, 6)
    model.forward = lambda x: _clamped(nn.functional.linear(x, model.weight))  # type: ignore[method-assign]
    assert "add(%ones" in lines_of(counted)[1]
    with pytest.raises(CaptureError, match=r"clamp_ at .*that detach at .*write it without in-place"):
        normalized(model, x=X)


def _clamped(x: Tensor) -> Tensor:
    x.detach().clamp_(0)
    return x * 2


class Normed(nn.Module):
    """A direction that each pass writes into its memory, as spectral norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("direction", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, 6]."""
        with torch.no_grad():
            F.normalize(x.sum(0), dim=0, out=self.direction)
        return x @ self.direction.clone()


def test_results_in_given_memory_are_new_tensors() -> None:
    """Those of ops with `out=`."""
    program = normalized(Normed(), x=X)
    (division,) = (op for op in program.ops if op.kind == "div")
    assert not any("out" in op.target for op in program.ops)
    assert division.target == "aten.div.Tensor"
    assert [(update.buffer, update.value) for update in program.updates] == [("direction", division.results[0])]


def test_the_dtype_of_a_result_in_given_memory_is_kept() -> None:
    """That of an op which takes one with `out=`, too."""

    def function(x: Tensor) -> Tensor:
        summed = torch.sum(x, 0, dtype=torch.float64, out=torch.empty(6, dtype=torch.float64))
        return torch.cumsum(x, 1, dtype=torch.float64, out=torch.empty(4, 6, dtype=torch.float64)) + summed

    program = normalized(Apply(function), x=X)
    kept = {op.kind: op.arguments["dtype"] for op in program.ops if op.kind in ("sum", "cumsum")}
    assert kept == dict.fromkeys(("sum", "cumsum"), torch.float64)
    assert not any("out" in op.target for op in program.ops)


def test_tensors_made_of_numbers_in_given_memory_have_its_dtype() -> None:
    """Also one that is not the default."""

    def function(x: Tensor) -> Tensor:
        same = torch.eye(4, 4, out=torch.empty(4, 4, dtype=torch.float64))
        return same @ x.double() + torch.arange(0, 12, 2, out=torch.empty(6))

    program = normalized(Apply(function), x=X)
    made = {op.kind: program.types[op.results[0]] for op in program.ops if op.kind in ("eye", "arange")}
    assert made == {"eye": TensorType((4, 4), torch.float64), "arange": TensorType((6,), torch.float32)}
    assert not any("out" in op.target for op in program.ops)


def test_several_results_in_given_memory_are_refused() -> None:
    """With the line."""

    def function(x: Tensor) -> Tensor:
        values, places = torch.empty(4, 6), torch.empty(4, 6, dtype=torch.int64)
        torch.sort(x, out=(values, places))
        return values * places

    with pytest.raises(CaptureError, match=r"sort at .*writes into several tensors that are given: leave out `out=`"):
        lines_of(function)


def test_changes_of_views_that_nobody_sees_are_fine() -> None:
    """A view may be changed where the tensor itself is not read again."""

    def function(x: Tensor) -> Tensor:
        y = (x * 2).view(-1)
        return y.add_(1)

    assert [line.split(" = ")[1] for line in lines_of(function)] == [
        "mul(x, other=2)",
        "reshape(%mul, shape=[24])",
        "add(%reshape_n0, other=1)",
    ]


def test_changes_of_inputs_and_parameters_are_refused() -> None:
    """Both by name."""

    def function(x: Tensor) -> Tensor:
        return x.add_(1)

    with pytest.raises(CaptureError, match=r"changes the input 'x' in place \(work on a copy of it\)"):
        lines_of(function)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.mul_(self.weight.sum())
            return x * self.weight

    with pytest.raises(CaptureError, match="changes the parameter 'weight' in place"):
        normalized(Model(), x=X)


def test_bounds_of_inputs_are_new_tensors(caplog: pytest.LogCaptureFixture) -> None:
    """A change that would be the same the next time is followed, of a view of the input too; what is read later has it,
    and a warning says that the caller's tensor stays as it is."""

    def function(x: Tensor) -> Tensor:
        flat = x.view(24)
        flat.clamp_(0, 1)
        return x + x.clamp_(max=0.5)

    program = normalized(Apply(function), x=X.clone())
    outputs, _ = run(program, {"x": X.clone()})
    (found,) = outputs.values()
    assert isinstance(found, Tensor)
    assert torch.equal(found, function(X.clone()))
    warned = [record.message for record in caplog.records if "changes its input 'x' in place" in record.message]
    assert len(warned) == 2
    assert "leaves the caller's tensor as it is" in warned[0]


def test_batch_norm_updates() -> None:
    """Training: batch statistics as results, running ones as updates of their buffers. Evaluation: as it is."""
    program = normalized(nn.BatchNorm1d(6), input=X)
    lines = printed(program)
    assert any(
        line.startswith(
            "%batch_norm, %batch_norm_mean, %batch_norm_invstd, %batch_norm_running_mean, %batch_norm_running_var"
            " = _native_batch_norm_legit_functional(input, weight, bias, running_mean, running_var, training=True"
        )
        for line in lines
    )
    assert "update running_mean: %batch_norm_running_mean" in lines
    assert "update running_var: %batch_norm_running_var" in lines
    assert "update num_batches_tracked: %add_n0" in lines
    program = normalized(nn.BatchNorm1d(6), training=False, input=X)
    assert [op.kind for op in program.ops] == ["batch_norm"]
    assert program.updates == ()


# --- what is dropped ---


def test_assertions_are_dropped() -> None:
    """The trace holds assertions, the normal form does not."""

    def function(x: Tensor) -> Tensor:
        return x.double() + 1

    before = captured(Apply(function), x=X)
    assert any(op.kind.startswith("_assert") for op in before.ops)
    assert lines_of(function) == ["%to_n0 = to(x, dtype=torch.float64)", "%add = add(%to_n0, other=1)"]


def test_ops_that_do_nothing_are_dropped() -> None:
    """Clones, casts to the same dtype, views to the same shape, whole slices, permutes that keep the order."""

    def function(x: Tensor) -> Tensor:
        x = x.clone().contiguous().to(torch.float32).type_as(x).view(4, 6)
        x = x[:, :].expand(4, 6).permute(0, 1)
        return x + 1

    assert lines_of(function) == ["%add = add(x, other=1)"]


def test_unused_ops_are_removed() -> None:
    """An op that no output and no update needs is removed, with its type and constants."""

    def function(x: Tensor) -> Tensor:
        (x.exp() * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])).sum()
        return x + 1

    program = normalized(Apply(function), x=X)
    assert op_lines(program) == ["%add = add(x, other=1)"]
    assert set(program.types) == {"x", "%add"}
    assert not program.constants


class _Joined(nn.Module):
    """Two layers whose results are joined, and functions of that."""

    def __init__(self, *functions: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.functions = functions

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """x: [rows, 4]."""
        joined = torch.cat([self.left(x), self.right(x)], 1)
        return tuple(function(joined) for function in self.functions)


def test_parameters_of_parts_that_are_cut_off_stay() -> None:
    """Their gradients are zeros, as those of the module are; where another output needs them, the loss needs them too.
    Without them a part is taken from what it was joined from."""
    cut, tail = (lambda joined: joined[:, :3].sum()), (lambda joined: joined[:, 4:])
    for functions in ((cut,), (cut, tail), (cut, lambda joined: joined)):
        lines = op_lines(normalized(_Joined(*functions), x=torch.ones(2, 4)))
        assert any("= cat(" in line for line in lines), lines
    for functions in ((lambda joined: joined[:, :3] * joined[:, 4:7],), (tail, lambda joined: joined.detach()[:, :4])):
        lines = op_lines(normalized(_Joined(*functions), x=torch.ones(2, 4)))
        assert any("= cat(" in line for line in lines) == (len(functions) > 1), lines
    frozen = _Joined(cut)
    frozen.right.requires_grad_(False)
    assert [line.split(" = ")[1].split("(")[0] for line in op_lines(normalized(frozen, x=torch.ones(2, 4)))] == [
        "linear",
        "slice",
        "sum",
    ]


def test_detach_stays_only_where_a_gradient_ends() -> None:
    """A detach of something without gradient does nothing; one of something with gradient stays."""

    def function(x: Tensor) -> Tensor:
        return x + x.detach()

    assert lines_of(function) == ["%add = add(x, x)"]
    assert lines_of(function, x=X.clone().requires_grad_()) == ["%detach = detach(x)", "%add = add(x, %detach)"]


class Dropping(nn.Module):
    """Dropout under a name."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        """Drop, and add one."""
        return self.drop(x) + 1


def test_dropout_that_is_on_stays() -> None:
    """It draws its numbers where it stands."""
    assert op_lines(normalized(Dropping(0.1), x=X))[0] == "%dropout = dropout(x, p=0.1, train=True)"


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.1, False)])
def test_dropout_that_does_nothing_is_dropped(p: float, training: bool) -> None:
    """With p = 0, and in evaluation."""
    assert op_lines(normalized(Dropping(p), training, x=X)) == ["%add = add(x, other=1)"]


# --- one way to write each thing ---


@pytest.mark.parametrize("options", [{}, {"ignore_index": 3}, {"label_smoothing": 0.1}], ids=str)
def test_mean_cross_entropy_is_a_sum_by_a_count(options: dict[str, float]) -> None:
    """The count comes from the labels alone."""

    def function(x: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(x, t, **options)

    ignored = options.get("ignore_index", -100)
    extra = f", ignore_index={ignored}" if "ignore_index" in options else ""
    extra += ", label_smoothing=0.1" if "label_smoothing" in options else ""
    assert lines_of(function, x=X, t=torch.zeros(4, dtype=torch.long)) == [
        f"%cross_entropy_loss_n0 = cross_entropy_loss(x, t, reduction=2{extra})",
        f"%ne_n1 = ne(t, other={ignored})",
        "%sum_n2 = sum(%ne_n1)",
        "%div_n3 = div(%cross_entropy_loss_n0, %sum_n2)",
    ]


@pytest.mark.parametrize("options", [{"reduction": "sum"}, {"reduction": "none"}], ids=str)
def test_other_cross_entropies_stay(options: dict[str, object]) -> None:
    """A sum is one already."""

    def function(x: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(x, t, **options)  # type: ignore[arg-type]

    kinds = [line.split(" = ")[1].split("(")[0] for line in lines_of(function, x=X, t=torch.zeros(4, dtype=torch.long))]
    assert kinds[-1] == "cross_entropy_loss"


@pytest.mark.parametrize(
    ("split", "parts"),
    [
        (lambda x: x.chunk(2, 1), [(0, 3), (3, 6)]),
        (lambda x: x.chunk(4, -1), [(0, 2), (2, 4), (4, 6)]),
        (lambda x: x.split(4, 1), [(0, 4), (4, 6)]),
        (lambda x: x.split([1, 5], -1), [(0, 1), (1, 6)]),
        (lambda x: x.tensor_split(3, 1), [(0, 2), (2, 4), (4, 6)]),
    ],
    ids=["chunk", "chunk uneven", "split", "split with sizes", "tensor_split"],
)
def test_splits_are_slices(split: Callable[[Tensor], list[Tensor]], parts: list[tuple[int, int]]) -> None:
    """One slice for each part, with its bounds."""
    slices = [line for line in lines_of(lambda x: [part * 2 for part in split(x)]) if " = slice(" in line]
    expected = [f"slice(x, dim=1, start={start}, end={end})" for start, end in parts]
    assert [line.split(" = ")[1] for line in slices] == expected


def test_unbind_is_selects() -> None:
    """One select for each part."""
    lines = lines_of(lambda x: x.unbind(0)[2] + x.unbind(0)[-1])
    assert [line.split(" = ")[1] for line in lines[:2]] == [
        "select(x, dim=0, index=2)",
        "select(x, dim=0, index=3)",
    ]


@pytest.mark.parametrize(
    ("view", "shape"),
    [
        (lambda x: x.view(2, -1), "2, 12"),
        (lambda x: x.flatten(), "24"),
        (lambda x: x.unflatten(1, (2, -1)), "4, 2, 3"),
        (lambda x: x.reshape(8, 3), "8, 3"),
        (lambda x: x.unsqueeze(-1), "4, 6, 1"),
        (lambda x: x[None], "1, 4, 6"),
        (lambda x: x.view_as(torch.empty(24)), "24"),
    ],
    ids=["view", "flatten", "unflatten", "reshape", "unsqueeze", "index None", "view_as"],
)
def test_views_are_reshapes(view: Callable[[Tensor], Tensor], shape: str) -> None:
    """A view is a reshape under any name, with every size written out."""
    lines = lines_of(lambda x: view(x) + 1)
    assert lines[0] == f"%reshape_n0 = reshape(x, shape=[{shape}])"
    assert lines[-1] == "%add = add(%reshape_n0, other=1)"


@pytest.mark.parametrize(
    "view", [lambda x: x.t(), lambda x: x.T, lambda x: x.permute(-1, 0)], ids=["t", "T", "permute"]
)
def test_orders_of_dims_are_permutes(view: Callable[[Tensor], Tensor]) -> None:
    """With dims counted from the front."""
    assert lines_of(lambda x: view(x) + 1)[0] == "%permute_n0 = permute(x, dims=[1, 0])"


def test_casts_are_to() -> None:
    """Every way to change a dtype is one op."""
    for cast in (lambda x: x.double(), lambda x: x.type(torch.float64), lambda x: x.to(torch.float64)):
        assert lines_of(lambda x, cast=cast: cast(x) + 1)[0] == "%to_n0 = to(x, dtype=torch.float64)"


def test_indexing_with_whole_ranges_is_a_reshape() -> None:
    """Ranges over every dim in order read the tensor as it is; any other index stays one."""

    def whole(x: Tensor) -> Tensor:
        return x[torch.arange(4)[:, None], torch.arange(6)] + 1

    def reordered(x: Tensor) -> Tensor:
        return x[torch.arange(4)[:, None], torch.arange(6).flip(0)] + 1

    def transposed(x: Tensor) -> Tensor:
        return x[torch.arange(4), torch.arange(6)[:, None]] + 1

    assert lines_of(whole) == ["%add = add(x, other=1)"]
    assert any(" = index(" in line for line in lines_of(reordered))
    assert any(" = index(" in line for line in lines_of(transposed))


def test_keys_name_ops_by_module() -> None:
    """Module path and operator, and a number from the second call on."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.proj(self.proj(x)) + x + x

    keys = [op.key for op in normalized(Model(), x=X).ops]
    assert keys == ["proj/linear", "proj/linear.1", "/add", "/add.1"]


# --- the same function ---


class Everything(nn.Module):
    """Uses most rewrites at once."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.proj = nn.Linear(6, 12)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, t: Tensor) -> dict[str, Tensor]:
        """A loss, and things on the way."""
        self.seen.add_(x.mean())
        y = self.norm(x).clone()
        y.mul_(1.5).add_(self.seen)
        gate, up = self.proj(y).chunk(2, -1)
        z = (F.silu(gate) * up).view(2, 2, 6).transpose(0, 1).flatten(0, 1)
        first, *_ = z.split([2, 4], 1)
        z = z + first.sum(1, keepdim=True).expand(4, 6) + z.unbind(1)[3][:, None]
        return {"loss": F.cross_entropy(z, t), "z": z.double().t()[:, 1:3]}


def test_normal_form_computes_what_the_module_does() -> None:
    """Values of all outputs and of the buffers afterwards, to the last bits of float32."""
    torch.manual_seed(0)
    model, labels = Everything(), torch.tensor([0, -100, 5, 2])
    program = normalized(model, x=X, t=labels)
    kinds = {op.kind for op in program.ops}
    assert not kinds & {"view", "chunk", "split_with_sizes", "unbind", "clone", "mul_", "add_", "t", "flatten"}
    tensors = {"x": X, "t": labels, **dict(model.named_parameters()), **dict(model.named_buffers())}
    outputs, updates = run(program, {name: tensor.detach().clone() for name, tensor in tensors.items()})
    expected = model(X, labels)
    for name, value in expected.items():
        torch.testing.assert_close(outputs[name], value)
    assert set(updates) == {"seen", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    for name, value in updates.items():
        torch.testing.assert_close(value, dict(model.named_buffers())[name])


def test_an_empty_tensor_adds_nothing_to_others() -> None:
    """The empty cache before the first tokens is left out, so that layers with caches are as alike as without."""

    class Cached(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            """x: [batch, length, width]."""
            return torch.cat([x.new_zeros(0), torch.cat([x.new_zeros(2, 0, 4), x, x], 1)], 1)

    program = normalized(Cached(), x=torch.ones(2, 3, 4))
    assert [op.kind for op in program.ops] == ["cat"]
    assert len(program.ops[0].operands) == 2
