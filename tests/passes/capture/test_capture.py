"""capture: what a trace holds, and what it refuses."""

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.utils.checkpoint import checkpoint

from passes.capture import Tracing, capture, capture_symbolic
from passes.ir.errors import CaptureError
from passes.ir.layout import Shape
from passes.ir.leaves import input_leaves
from tests.passes import custom
from tests.passes.helpers import Apply, captured, normalized, op_lines, printed


class Branches(nn.Module):
    """Looks at values."""

    def forward(self, x: Tensor) -> Tensor:
        """Positive or negative."""
        if x.sum() > 0:  # the line that the error names
            return x
        return -x


class Item(nn.Module):
    """Reads a value."""

    def forward(self, x: Tensor) -> Tensor:
        """Scale by a number."""
        return x * x.sum().item()


class Selects(nn.Module):
    """Has a size that depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        """The positive elements."""
        return x[x > 0]


class Conditional(nn.Module):
    """Has control flow on tensors."""

    def forward(self, x: Tensor) -> Tensor:
        """One of two."""
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


class Autocast(nn.Module):
    """Enters autocast."""

    def forward(self, x: Tensor) -> Tensor:
        """A product in bfloat16."""
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x.T


X = torch.ones(4, 6)


def _straight(x: Tensor) -> Tensor:
    return custom.StraightThrough.apply(x) * 2


def test_custom_autograd_functions_become_operators() -> None:
    """With what is known of them; a trace would keep their forward alone."""
    assert op_lines(captured(Apply(_straight), x=X)) == [
        "%autograd_function = autograd_function(tensors=[x], function=tests.passes.custom:StraightThrough, "
        "arguments=(x0), pointwise=True, linear=True)",
        "%mul = mul(%autograd_function, other=2)",
    ]


def test_without_gradients_their_forward_is_all() -> None:
    """A function that never has a backward needs no operator of its own."""
    program = capture(Apply(_straight), {"x": X}, Tracing(False, False, contextlib.nullcontext()))
    assert op_lines(program) == ["%round = round(x)", "%mul = mul(%round, other=2)"]


def test_custom_autograd_functions_work_as_ever_afterwards() -> None:
    """They are operators only while tracing."""
    captured(Apply(_straight), x=X)
    result = _straight(X.clone().requires_grad_())
    assert type(result.grad_fn.next_functions[0][0]).__name__ == "StraightThroughBackward"


def test_all_that_a_custom_autograd_function_returns() -> None:
    """Tensors are results of the operator; all else is as it was."""

    def forward(x: Tensor) -> Tensor:
        result, count, nothing = custom.Counted.apply(x)
        assert nothing is None
        return result * count

    assert op_lines(captured(Apply(forward), x=X))[1] == "%mul = mul(%autograd_function, other=24)"


def test_sizes_that_a_custom_autograd_function_is_given_may_vary() -> None:
    """They are arguments of the operator, and it is no function of single elements then."""

    def forward(x: Tensor) -> Tensor:
        return custom.Reversal.apply(x, x.shape[0]) + custom.StraightThrough.apply(x)

    tracing = Tracing(True, True, contextlib.nullcontext())
    symbolic = capture_symbolic(Apply(forward), {"x": X}, tracing, frozenset({("x", 0)}))
    reversal, straight = symbolic.program.ops[:2]
    assert str(reversal.arguments["sizes"]) == "(x.0,)"
    assert reversal.arguments["arguments"] == "(x0, n0)"
    assert (reversal.arguments["pointwise"], straight.arguments["pointwise"]) == (False, True)
    assert not symbolic.conditions


class Counts(nn.Module):
    """Calls what is no function of its arguments."""

    def forward(self, x: Tensor) -> Tensor:
        """One more each time."""
        return custom.Counting.apply(x)


def test_the_line_of_a_refused_custom_autograd_function_is_named() -> None:
    """The error names file and line, as all errors of a trace do."""
    with pytest.raises(CaptureError, match=r"test_capture.py:\d+: the autograd.Function .*:Counting does not give"):
        captured(Counts(), x=X)


def _local(x: Tensor) -> Tensor:
    class Local(torch.autograd.Function):
        """A function that is defined inside of another one."""

        @staticmethod
        def forward(ctx: custom.Context, x: Tensor) -> Tensor:
            """As it is."""
            return x.clone()

    return Local.apply(x)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (_local, r"test_capture.py:\d+: the autograd.Function .*Local .* define it at the top level"),
        (lambda x: custom.Reversal.apply(x, object()), r"test_capture.py:\d+: .* Reversal is given a object"),
        (lambda x: custom.Changing.apply(x * 1), r"test_capture.py:\d+: .* Changing changes a tensor that it is given"),
        (
            lambda x: checkpoint(torch.sin, x, use_reentrant=True),
            r"test_capture.py:\d+ checkpoints reentrantly.* pass use_reentrant=False",
        ),
    ],
    ids=["local", "argument", "in place", "checkpoint"],
)
def test_custom_autograd_functions_that_a_program_cannot_call(
    forward: Callable[[Tensor], Tensor], message: str
) -> None:
    """Each is refused with its line and its reason."""
    with pytest.raises(CaptureError, match=message):
        captured(Apply(forward), x=X)


def test_checkpoints_that_are_not_reentrant_are_left_out() -> None:
    """They change nothing that a program has."""
    program = normalized(Apply(lambda x: checkpoint(torch.sin, x, use_reentrant=False)), x=X)
    assert op_lines(program) == ["%sin = sin(x)"]


def test_the_line_of_an_untraceable_model_is_named() -> None:
    """The error says where in the model, what is in that line, and what a model must not do."""
    with pytest.raises(CaptureError) as caught:
        captured(Branches(), x=X)
    message = str(caught.value)
    assert "cannot trace Branches" in message
    assert "test_capture.py:" in message
    assert "if x.sum() > 0:  # the line that the error names" in message
    assert "it branches on the values of a tensor" in message
    assert "data parallelism needs no trace" in message


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Selects(), r"test_capture.py:\d+ \(return x\[x > 0\]\): a size depends on the values of a tensor"),
        (Conditional(), r"test_capture.py:\d+ \(return torch.cond.*: cond takes functions of tensors"),
        (Autocast(), r"test_capture.py:\d+ \(return x @ x.T\): it enters autocast, .*pass precision="),
    ],
    ids=lambda item: type(item).__name__ if isinstance(item, nn.Module) else "",
)
def test_what_depends_on_values_is_refused(module: nn.Module, message: str) -> None:
    """Each by its own message."""
    with pytest.raises(CaptureError, match=message):
        captured(module, x=X)


def test_a_number_out_of_a_tensor_goes_on_as_a_tensor() -> None:
    """It has no gradient, as the number has none."""
    assert printed(captured(Item(), x=X))[1:] == [
        "%sum = sum(x)",
        "%reshape = reshape(%sum, shape=[])",
        "%detach = detach(%reshape)",
        "%mul = mul(x, %detach)",
        "output : %mul",
    ]


class Clamps(nn.Module):
    """Changes a parameter before it uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        """Scaled by at most 0.5."""
        self.scale.data.clamp_(max=0.5)
        return x * self.scale


class ClampsWithoutGradient(Clamps):
    """The same in other words."""

    def forward(self, x: Tensor) -> Tensor:
        """Scaled by at most 0.5."""
        with torch.no_grad():
            self.scale.clamp_(max=0.5)
        return x * self.scale


@pytest.mark.parametrize("module", [Clamps(), ClampsWithoutGradient()], ids=lambda module: type(module).__name__)
def test_changes_of_parameters_come_first(module: nn.Module) -> None:
    """The parameter itself is used afterwards, so that it has its gradient."""
    lines = printed(captured(module, x=X))
    assert "change clamp_(scale, min=None, max=0.5)" in lines
    assert "%mul = mul(x, scale)" in lines


class ClampsLate(Clamps):
    """Changes a parameter that it has used."""

    def forward(self, x: Tensor) -> Tensor:
        """Scaled by what was and what is."""
        y = x * self.scale
        self.scale.data.clamp_(max=0.5)
        return y * self.scale


class Normalizes(Clamps):
    """Changes a parameter by what is in the others of its elements."""

    def forward(self, x: Tensor) -> Tensor:
        """Scaled by a unit vector."""
        self.scale.data.div_(self.scale.data.norm())
        return x * self.scale


class ClampsSome(Clamps):
    """Changes a part of a parameter."""

    def forward(self, x: Tensor) -> Tensor:
        """Scaled, the first one by at most 0.5."""
        self.scale.data[:1].clamp_(max=0.5)
        return x * self.scale


@pytest.mark.parametrize("module", [ClampsLate(), Normalizes(), ClampsSome()], ids=lambda item: type(item).__name__)
def test_other_changes_of_parameters_are_refused(module: nn.Module) -> None:
    """Made first, or to each part of the parameter, they would be other changes."""
    with pytest.raises(CaptureError, match=r"test_capture.py:\d+ \(self.scale.data.*the parameter 'scale' in place"):
        captured(module, x=X)


class Tied(nn.Module):
    """One weight under two names, a frozen one, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.embed.weight
        self.twin = nn.Parameter(torch.ones(6), requires_grad=False)
        self.register_buffer("scale", torch.ones(6))
        self.register_buffer("shift", torch.ones(6), persistent=False)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, ids: Tensor) -> Tensor:
        """There and back."""
        return self.head(self.embed(ids) * self.scale * self.twin + self.shift)


def test_ties_are_found_by_identity() -> None:
    """A parameter stands once with all its names, and both uses refer to it; equal values alone make no tie."""
    model = Tied()
    program = captured(model, ids=torch.zeros(3, dtype=torch.long))
    assert [item.names for item in program.parameters] == [("twin",), ("unused",), ("embed.weight", "head.weight")]
    lines = printed(program)
    assert "%embedding = embedding(embed.weight, ids)" in lines
    assert any(line.startswith("%linear = linear(") and line.endswith(", embed.weight)") for line in lines)
    assert torch.equal(model.twin, model.scale)


def test_parameters_and_buffers_are_told_apart() -> None:
    """Frozen parameters are not trainable, and buffers are no parameters."""
    program = captured(Tied(), ids=torch.zeros(3, dtype=torch.long))
    assert {item.name: item.trainable for item in program.parameters} == {
        "twin": False,
        "unused": True,
        "embed.weight": True,
    }
    assert [item.name for item in program.buffers] == ["scale", "shift"]


class Nested(nn.Module):
    """Takes and gives nested values."""

    def forward(self, xs: list[object], flag: bool, y: Tensor | None = None) -> dict[str, object]:
        """A sum, what was given, and plain values."""
        first, second = xs
        assert isinstance(first, Tensor)
        assert isinstance(second, dict)
        return {"sum": [first + second["k"], 3], "rest": (first if flag else y, None, "text")}


def test_names_of_nested_inputs_and_outputs() -> None:
    """Leaves are named by their place; values that are no tensors become part of the program."""
    program = captured(Nested(), xs=[X, {"k": X.clone()}], flag=True, y=X.clone())
    assert printed(program) == [
        "input xs[0]: float32[4, 6]",
        "input xs[1]['k']: float32[4, 6]",
        "input y: float32[4, 6]",
        "%add = add(xs[0], xs[1]['k'])",
        "output sum[0]: %add",
        "output sum[1]: 3",
        "output rest[0]: xs[0]",
        "output rest[1]: None",
        "output rest[2]: text",
    ]


def test_input_leaves_name_each_leaf() -> None:
    """The same names, from the inputs alone."""
    names = [name for name, _ in input_leaves({"a": [1, {"b": 2}], "c": 3})]
    assert names == ["a[0]", "a[1]['b']", "c"]


def test_inputs_that_are_one_tensor_stay_two() -> None:
    """Two inputs do not become one because the example passes the same tensor."""
    program = captured(Nested(), xs=[X, {"k": X}], flag=True)
    assert "%add = add(xs[0], xs[1]['k'])" in printed(program)


class Shadowed(nn.Module):
    """Has a parameter with the name of an input."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        """Their product."""
        return x * self.x


def test_an_input_with_the_name_of_a_parameter() -> None:
    """The two are told apart; the input still knows the argument that it is."""
    program = captured(Shadowed(), x=X)
    assert [item.argument for item in program.inputs] == ["x"]
    (line,) = [line for line in printed(program) if line.startswith("%mul")]
    assert line == "%mul = mul(x (input), x)"


class Detached(nn.Module):
    """Computes a part without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Results inside no_grad are constants to the backward pass."""
        with torch.no_grad():
            scale = self.proj(x).exp()
            top = scale.argmax(-1)
        return self.proj(x) * scale + top.unsqueeze(-1)


def test_no_grad_regions_are_written_out_and_detached() -> None:
    """Their ops stand in the program; what leaves them is detached where it could have a gradient."""
    lines = printed(captured(Detached(), x=X))
    assert "%exp = exp(%linear)" in lines
    assert "%detach = detach(%exp)" in lines
    assert "%mul = mul(%linear_1, %detach)" in lines
    assert sum(line.startswith("%detach") for line in lines) == 1


class Handing(nn.Module):
    """Makes of its features, without gradients, what they are already; then they go on."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 6, bias=False)
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        """Features weighted by numbers that have no gradient."""
        features = x.exp()
        with torch.no_grad():
            weights = self.make(features).softmax(-1)
        return self.proj(features) * weights


@pytest.mark.parametrize(
    "make",
    [
        Tensor.float,
        Tensor.contiguous,
        lambda x: x.to(x.device, torch.float32, non_blocking=True),
        lambda x: x.type_as(x).flatten(1, 1),
        lambda x: torch.broadcast_tensors(x, x[:1])[0],
        lambda x: nn.functional.dropout(x.real, 0.5, training=False),
    ],
    ids=["float", "contiguous", "to", "several", "broadcast", "dropout"],
)
def test_a_tensor_that_no_grad_hands_on_keeps_its_gradient(make: Callable[[Tensor], Tensor]) -> None:
    """It is the same tensor within and after: a trace calls it by the op that handed it on."""
    lines = printed(captured(Handing(make), x=X))
    assert "%linear = linear(%exp, proj.weight)" in lines
    assert [line for line in lines if line.startswith("%detach")] == ["%detach = detach(%softmax)"]


def test_copies_and_views_of_no_grad_are_detached() -> None:
    """They are other tensors than what they are made of."""
    for make in (Tensor.clone, Tensor.double, lambda x: x[:], lambda x: x.view(x.shape), lambda x: x.flatten(0)):

        def part(x: Tensor, make: Callable[[Tensor], Tensor] = make) -> Tensor:
            features = x.exp()
            with torch.no_grad():
                made = make(features)
            return features.sum() + made.sum()

        lines = printed(captured(Apply(part), x=X))
        assert sum(line.startswith("%detach") for line in lines) == 1
        assert "%sum = sum(%exp)" in lines


class Modes(nn.Module):
    """Does something else in evaluation, and checkpoints in training."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Dropout(0.5)
        self.inner.gradient_checkpointing = True

    def forward(self, x: Tensor) -> Tensor:
        """Depends on the mode."""
        assert not self.inner.gradient_checkpointing
        return x.relu() if self.training else x.tanh()


@pytest.mark.parametrize(("training", "kind"), [(True, "relu"), (False, "tanh")])
def test_the_mode_is_that_of_the_trace(training: bool, kind: str) -> None:
    """The module is traced in the mode asked for, and is afterwards as it was, mixed modes included."""
    model = Modes()
    model.inner.eval()
    program = captured(model, training, x=X)
    assert [op.kind for op in program.ops] == [kind]
    assert model.training
    assert not model.inner.training
    assert model.inner.gradient_checkpointing is True


def test_the_module_is_left_as_it_was() -> None:
    """Parameters, buffers and their values do not change, although the forward pass would change a buffer."""
    model = nn.BatchNorm1d(6)
    before = copy.deepcopy(model.state_dict())
    identities = [id(item) for item in model.parameters()]
    captured(model, input=torch.randn(4, 6))
    assert [id(item) for item in model.parameters()] == identities
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 6)])
def test_types_of_results(shape: Shape) -> None:
    """Every result has the type that running the module gives; meta parameters and inputs will do."""
    with torch.device("meta"):
        model = nn.Linear(6, 5)
    program = captured(model, input=torch.empty(shape, device="meta"))
    (op,) = program.ops
    assert program.types[op.results[0]].shape == (*shape[:-1], 5)


class Hides(nn.Module):
    """It computes with a trainable tensor that is none of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.hidden = [torch.ones(4, requires_grad=True)]

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 4]."""
        return (self.linear(x) * self.hidden[0]).sum()


def test_trainable_tensors_that_are_no_parameters_are_refused() -> None:
    """They would get no gradient."""
    with pytest.raises(
        CaptureError, match=r"Hides computes with a trainable tensor of shape \[4\] that is none of its"
    ):
        capture(Hides(), {"x": torch.ones(2, 4)}, Tracing(True, True, contextlib.nullcontext()))
    capture(Hides(), {"x": torch.ones(2, 4)}, Tracing(False, False, contextlib.nullcontext()))


class _Communicating(nn.Module):
    """Passes what a layer gives to a function."""

    def __init__(self, function: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(6, 6), function

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, 6]."""
        y: Tensor = self.linear(x)
        found = self.function(y)
        return y if found is None else found


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda y: dist.all_reduce(y), "all_reduce"),
        (lambda y: dist.all_gather_into_tensor(torch.empty_like(y), y), "all_gather_into_tensor"),
        (lambda y: all_gather_tensor_autograd(y, 0, [0]), "all_gather_into_tensor"),
        (lambda _: dist.barrier(), "barrier"),
        (lambda y: dist.broadcast(y.detach(), 0), "broadcast"),
    ],
)
def test_collectives_are_refused(function: Callable[[Tensor], Tensor | None], name: str) -> None:
    """A distributed module computes with the whole batch: they would count it once for each rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(
            CaptureError, match=rf"at .*test_capture.py:\d+ .*communicates between ranks by itself \({name}\)"
        ):
            captured(_Communicating(function), x=torch.ones(4, 6))
    finally:
        dist.destroy_process_group()


class _Sparse(nn.Module):
    """Multiplies a weight with a sparse tensor that it holds, or that it makes of its values."""

    def __init__(self, holds: bool) -> None:
        super().__init__()
        self.weight, self.mask = nn.Parameter(torch.ones(6, 6)), torch.eye(6).to_sparse() if holds else None

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, 6]."""
        mask = x.new_ones(6, 6).tril().to_sparse() if self.mask is None else self.mask
        return x @ torch.sparse.mm(mask, self.weight)


@pytest.mark.parametrize(("holds", "message"), [(True, "computes with a sparse_coo"), (False, "makes a sparse_coo")])
def test_sparse_tensors_are_refused(holds: bool, message: str) -> None:
    """With the line."""
    with pytest.raises(CaptureError, match=rf"cannot trace _Sparse at .*test_capture.py:\d+ .*: it {message} tensor"):
        captured(_Sparse(holds), x=torch.ones(4, 6))


def test_nothing_trains_without_gradients() -> None:
    """A program for inference has no trainable parameter, whatever the module's parameters are."""
    for gradients in (True, False):
        tracing = Tracing(True, gradients, contextlib.nullcontext())
        program = capture(nn.Linear(4, 4), {"input": torch.ones(2, 4)}, tracing)
        assert [item.trainable for item in program.parameters] == [gradients, gradients]
