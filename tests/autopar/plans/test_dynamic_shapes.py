"""One plan serves other sizes: a last, smaller batch, and sequences of other lengths. On gloo ranks."""

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import autopar
from autopar.models.info import structure_of
from autopar.plans import dynamic_shapes as sizes
from autopar.testing import LiftFloat32, run_ranks
from tests.architectures import ARCHITECTURES
from tests.autopar.comparing import MESHES, TOLERANCE
from tests.models import Stack, gemma2, gpt2, llama, mistral, qwen3, tokens

Batch = Mapping[str, torch.Tensor]

# As planned, fewer samples, more than half of them, shorter ones, samples that no axis divides, and as planned again.
PLANNED = (8, 16)
CALLS = (PLANNED, (4, 16), (6, 16), (8, 12), (3, 16), PLANNED)
MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "gpt2": gpt2,
    "qwen3": qwen3,
    "gemma2": lambda: gemma2(num_hidden_layers=2),
    "mistral": mistral,
}


def mesh_of(sizes: Mapping[str, int]) -> DeviceMesh:
    """The mesh of a rank's process group."""
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def on_ranks(function: Callable[..., object], *args: object, mesh: str = "2x2", lifted: bool = True) -> list[object]:
    """Run on the ranks of a mesh; what each returns. Casts of the models to float32 are lifted to float64."""
    axes = MESHES[mesh]
    ranks = 1
    for size in axes.values():
        ranks *= size
    return run_ranks(_lifting, ranks, function, axes, lifted, *args)


def _lifting(function: Callable[..., object], axes: Mapping[str, int], lifted: bool, *args: object) -> object:
    context: AbstractContextManager[object] = LiftFloat32(torch.float64) if lifted else nullcontext()
    with context:
        return function(mesh_of(axes), *args)


def worst(ours: object, theirs: object) -> float:
    """The largest error of the leaves of two outputs, relative to the largest value of each leaf."""
    mine, others = pytree.tree_leaves(ours), pytree.tree_leaves(theirs)
    assert len(mine) == len(others)
    return max(error(got, expected) for got, expected in zip(mine, others, strict=True))


def error(got: object, expected: object) -> float:
    """The largest error of one leaf."""
    if not isinstance(expected, torch.Tensor):
        return 0.0 if got == expected else float("inf")
    whole = got.full_tensor() if isinstance(got, DTensor) else got
    assert isinstance(whole, torch.Tensor)
    assert whole.shape == expected.shape
    return float((whole - expected).abs().max() / expected.abs().max().clamp(min=1e-300))


def gradient_error(dist_model: nn.Module, model: nn.Module) -> float:
    """The largest error of the gradients of all parameters, relative to the largest gradient of the model."""
    largest = max(float(item.grad.abs().max()) for item in model.parameters() if item.grad is not None)
    found = 0.0
    for name, parameter in model.named_parameters():
        ours = dist_model.get_parameter(name).grad
        assert (ours is None) == (parameter.grad is None), name
        if ours is not None and parameter.grad is not None:
            found = max(found, float((ours.full_tensor() - parameter.grad).abs().max()) / largest)
    return found


def compared(
    mesh: DeviceMesh, model: nn.Module, batches: Sequence[Batch], objective: str, **settings: object
) -> dict[int, float]:
    """The calls, by number, that are off: outputs, loss or a gradient. The first batch is what is planned for."""
    dist_model = autopar.parallelize(model, mesh, dict(batches[0]), cluster="ideal", objective=objective)
    training = objective == "train"
    model.train(training)
    wrong = {}
    for number, batch in enumerate(batches):
        dist_model.zero_grad()
        model.zero_grad()
        ours = dist_model(**batch)
        with torch.set_grad_enabled(training):
            theirs = model(**batch, **settings)
        off = worst(ours, theirs)
        if training:
            ours["loss"].backward()
            theirs["loss"].backward()
            off = max(off, gradient_error(dist_model, model))
        if not off <= TOLERANCE:
            wrong[number] = off
    return wrong


def _stock(mesh: DeviceMesh, name: str, objective: str, padding: bool) -> dict[int, float]:
    model = MODELS[name]().double()
    training = objective == "train"
    batches = [tokens(*size, labels=training, padding=padding) for size in CALLS]
    settings = {"use_cache": False} if training else {}
    traces = []
    original = sizes.capture_symbolic
    with mock.patch.object(sizes, "capture_symbolic", lambda *given: traces.append(given) or original(*given)):
        wrong = compared(mesh, model, batches, objective, **settings)
    # One trace for other numbers of samples, one for other lengths too; the first rank makes them for all.
    assert len(traces) == (0 if any(mesh.get_coordinate() or ()) else 2)
    return wrong


FAST = [
    ("gpt2", "2", "train", True),
]
ALL = [
    (name, mesh, objective, padding)
    for name in MODELS
    for mesh in ("2", "2x2")
    for objective in ("train", "infer")
    for padding in (False, True)
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "mesh", "objective", "padding"),
    [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in FAST)],
)
def test_stock_models(name: str, mesh: str, objective: str, padding: bool) -> None:
    """Outputs, loss and every gradient are those of one device, at all sizes and back again."""
    found = on_ranks(_stock, name, objective, padding, mesh=mesh)
    assert all(wrong == {} for wrong in found), found


def _architecture(mesh: DeviceMesh, name: str) -> dict[int, float]:
    stock = ARCHITECTURES[name]
    batches = [stock.inputs(samples) for samples in (8, 4, 6, 3, 8)]
    shorter = {key: leaf[:, :12].contiguous() for key, leaf in batches[0].items()}
    return compared(mesh, stock.make().double(), [*batches, shorter], "train", use_cache=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_encoders_with_decoders(name: str) -> None:
    assert on_ranks(_architecture, name) == [{}] * 4


# --- what one does with it --------------------------------------------------------------------------------------------


def stack_batch(samples: int) -> dict[str, torch.Tensor]:
    """Random inputs of a `Stack`."""
    generator = torch.Generator().manual_seed(samples)
    shape = (2, samples, 16)
    x, target = torch.randn(shape, generator=generator, dtype=torch.float64)
    return {"x": x, "target": target}


def _parallel_stack(mesh: DeviceMesh, **inputs: torch.Tensor) -> tuple[nn.Module, nn.Module]:
    model = Stack().double()
    return autopar.parallelize(model, mesh, inputs or stack_batch(8), cluster="ideal"), model


def _epochs(mesh: DeviceMesh) -> None:
    """Two epochs of 8, 8 and 3 samples."""
    dist_model, model = _parallel_stack(mesh)
    ours, theirs = (torch.optim.SGD(module.parameters(), lr=1e-2) for module in (dist_model, model))
    for samples in (8, 8, 3) * 2:
        for module, optimizer in ((dist_model, ours), (model, theirs)):
            optimizer.zero_grad()
            module(**stack_batch(samples))["loss"].backward()
            optimizer.step()
    for name, parameter in model.named_parameters():
        assert error(dist_model.get_parameter(name), parameter) <= TOLERANCE, name


def _micro_batches(mesh: DeviceMesh) -> None:
    """Batches that four micro-batches, as planned, do not divide."""
    model = Stack().double()
    dist_model = autopar.parallelize(model, mesh, stack_batch(8), cluster="ideal", micro_batches=4)
    for samples, count in ((6, 3), (7, 7), (2, 1), (1, 1)):
        batch = stack_batch(samples)
        dist_model.zero_grad()
        model.zero_grad()
        expected = model(**batch)["loss"]
        expected.backward()
        with mock.patch.object(sizes.logger, "warning") as told:
            assert error(dist_model.forward_backward(**batch)["loss"], expected) <= TOLERANCE
        numbers = [call.args[1:] for call in told.call_args_list if "micro-batches" in call.args[0]]
        # The first rank plans.
        assert numbers == ([] if any(mesh.get_coordinate() or ()) else [(count, 4, samples)])
        assert gradient_error(dist_model, model) <= TOLERANCE, samples


class _Scored(nn.Module):
    """A `Stack` that has a loss where a target is given."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack()

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """x, target: [batch, width]."""
        output = self.stack(x, x if target is None else target)
        return output if target is not None else {"prediction": output["prediction"]}


def _no_target(mesh: DeviceMesh) -> None:
    """Without a loss there is nothing to run backward from, in one micro-batch or many."""
    dist_model = autopar.parallelize(_Scored().double(), mesh, stack_batch(8), cluster="ideal", micro_batches=4)
    for samples in (1, 8):
        with pytest.raises(autopar.AutoparError, match=r"pass labels|no output called loss"):
            dist_model.forward_backward(x=stack_batch(samples)["x"])
        assert set(dist_model(x=stack_batch(samples)["x"])) == {"prediction"}


def _surrounded(mesh: DeviceMesh) -> None:
    """Contexts around the first call of a size do not apply to later calls."""
    dist_model, model = _parallel_stack(mesh)
    batch = stack_batch(4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert not dist_model(**batch)["loss"].requires_grad
    with torch.inference_mode():
        assert worst(dist_model(**stack_batch(6)), model(**stack_batch(6))) <= TOLERANCE
    for samples in (4, 6):
        dist_model.zero_grad()
        model.zero_grad()
        dist_model(**stack_batch(samples))["loss"].backward()
        model(**stack_batch(samples))["loss"].backward()
        assert gradient_error(dist_model, model) <= TOLERANCE


def _own_parts(mesh: DeviceMesh) -> None:
    """Each rank gives its own part of four samples."""
    dist_model, model = _parallel_stack(mesh)
    batch = stack_batch(4)
    own = {}
    for name, layout in dist_model.input_layouts.items():
        own[name] = batch[name]
        for axis, placement in layout.items():
            if placement.startswith("S"):
                dim = int(placement[2])
                own[name] = own[name].chunk(mesh[axis].size(), dim)[mesh[axis].get_local_rank()]
    assert any(part.shape != batch[name].shape for name, part in own.items())
    given = dist_model.from_local(own)
    assert all(torch.equal(given[name].full_tensor(), batch[name]) for name in batch)
    assert worst(dist_model(**given), model(**batch)) <= TOLERANCE


def _input_gradient(mesh: DeviceMesh) -> None:
    planned, ours, theirs = (stack_batch(samples) for samples in (8, 6, 6))
    for batch in (planned, ours, theirs):
        batch["x"].requires_grad_()
    dist_model, model = _parallel_stack(mesh, **planned)
    dist_model(**ours)["loss"].backward()
    model(**theirs)["loss"].backward()
    assert error(ours["x"].grad, theirs["x"].grad) <= TOLERANCE


def _no_weights(mesh: DeviceMesh) -> None:
    """The cache for other sizes does not keep the model alive."""
    dist_model, model = _parallel_stack(mesh)
    weights = [weakref.ref(parameter) for parameter in model.parameters()]
    expected = copy.deepcopy(model)
    del model
    gc.collect()
    assert all(weight() is None for weight in weights)
    assert worst(dist_model(**stack_batch(6)), expected(**stack_batch(6))) <= TOLERANCE


def _every(mesh: DeviceMesh) -> None:
    for case in (_epochs, _micro_batches, _no_target, _surrounded, _own_parts, _input_gradient, _no_weights):
        case(mesh)


@pytest.mark.long
def test_training_with_other_sizes() -> None:
    """A last, smaller batch in every epoch; calls without gradients; parts of a batch; gradients of inputs."""
    on_ranks(_every)


class Normalized(nn.Module):
    """Does something else in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, 8]."""
        return self.norm(self.linear(x)).pow(3).mean()


def _modes(mesh: DeviceMesh) -> None:
    model = Normalized().double()
    batches = [
        torch.randn(size, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(size)) for size in (8, 6, 3)
    ]
    dist_model = autopar.parallelize(model, mesh, {"x": batches[0]}, cluster="ideal")
    for mode in (True, False, True):
        dist_model.train(mode)
        model.train(mode)
        for batch in batches:
            assert error(dist_model(x=batch), model(x=batch)) <= TOLERANCE
    buffers = dict(dist_model.named_buffers())
    assert all(torch.allclose(buffers[name], buffer, rtol=1e-9) for name, buffer in model.named_buffers())


@pytest.mark.long
def test_both_modes_have_other_sizes() -> None:
    """Running statistics are those of all samples, however many there were."""
    on_ranks(_modes)


# --- traces that serve these sizes alone, and none --------------------------------------------------------------------


class Odd(nn.Module):
    """A linear layer, and whatever a subclass does with its result."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """x: [batch, length, 8]."""
        return {"loss": self.odd(self.linear(x)).pow(2).sum()}

    def odd(self, x: torch.Tensor) -> torch.Tensor:
        """The unusual part of the model."""
        return x


class Scan(Odd):
    """Goes through the places one by one, so that a trace is for one length."""

    def odd(self, x: torch.Tensor) -> torch.Tensor:
        """A running mean."""
        state, states = x[:, 0], []
        for place in range(x.shape[1]):
            state = (state + x[:, place]) / 2
            states.append(state)
        return torch.stack(states, 1)


class Hashed(Odd):
    """Looks its length up, which no symbol can be."""

    def odd(self, x: torch.Tensor) -> torch.Tensor:
        """Scaled by what is found."""
        return x * {16: 1.0, 12: 2.0}.get(x.shape[1], 3.0)


class Locked(Odd):
    """Holds what cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Bounded(Odd):
    """Has a longest length."""

    def odd(self, x: torch.Tensor) -> torch.Tensor:
        """As it is."""
        if x.shape[1] > 16:
            raise ValueError(f"too long: {x.shape[1]} places")
        return x


def _odd_batch(samples: int, length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.randn(samples, length, 8, dtype=torch.float64, generator=generator)}


def _fallbacks(mesh: DeviceMesh) -> list[dict[int, float]]:
    batches = [_odd_batch(*size) for size in CALLS]
    return [compared(mesh, kind().double(), batches, "train") for kind in (Scan, Hashed)]


@pytest.mark.long
def test_traces_for_one_size_alone() -> None:
    """A model whose trace cannot serve several sizes gets one trace per size."""
    assert on_ranks(_fallbacks) == [[{}, {}]] * 4


def _refused(mesh: DeviceMesh) -> list[str]:
    messages = []

    def refuses(module: nn.Module, *args: object, **kwargs: object) -> None:
        with pytest.raises(autopar.InputError) as caught:
            module(*args, **kwargs)
        messages.append(str(caught.value))

    dist_model, model = _parallel_stack(mesh)
    refuses(dist_model, x=stack_batch(4)["x"], target=stack_batch(3)["target"])
    refuses(dist_model, x=stack_batch(4)["x"][:, :8], target=stack_batch(4)["target"])
    for kind in (Bounded, Locked):
        odd = autopar.parallelize(kind().double(), mesh, _odd_batch(8, 16), cluster="ideal")
        refuses(odd, **_odd_batch(8, 20))
    refuses(dist_model, **stack_batch(4 + mesh.get_rank()))
    # All of that leaves the module as it was.
    assert worst(dist_model(**stack_batch(4)), model(**stack_batch(4))) <= TOLERANCE
    return messages


@pytest.mark.long
def test_sizes_that_cannot_be() -> None:
    """One sentence that names the sizes and says why, on every rank alike."""
    found = on_ranks(_refused)
    assert all(messages == found[0] for messages in found)
    samples, width, longer, uncopied, ranks = found[0]  # type: ignore[misc]
    planned = "are not the planned ones, and the model cannot"
    assert samples.startswith(f"the sizes of the inputs (x [4, 16], target [3, 16]) {planned} run at them: ")
    assert width.startswith(f"the sizes of the inputs (x [4, 8], target [4, 16]) {planned} run at them: ")
    assert longer.startswith(f"the sizes of the inputs (x [8, 20, 8]) {planned} run at them: ")
    assert "too long: 20 places" in longer
    assert "test_dynamic_shapes.py" in longer
    assert uncopied.startswith(
        f"the sizes of the inputs (x [8, 20, 8]) {planned} be traced for them, because it cannot"
    )
    assert "lock" in uncopied
    assert "rank 1 of the mesh has target float64[5, 16], rank 0 has target float64[4, 16]" in ranks
    assert "from_local(batch, axes=('" in ranks


# --- what is kept of a model ------------------------------------------------------------------------------------------


class Built(nn.Module):
    """Ties, buffers, and tensors that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(3, 2).t(), requires_grad=False)
        self.register_buffer("scale", torch.ones(6), persistent=False)
        self.table = torch.arange(6)
        self.apply_head = self.head.forward
        self.eval()


def test_the_structure_of_a_model() -> None:
    """Names, ties, shapes and modes are the model's; there are no values, and the model is left as it was."""
    model = Built()
    before = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    found = structure_of(model)
    assert all(tensor.is_meta for tensor in (*found.parameters(), *found.buffers()))
    for ours, theirs in zip(found.named_parameters(), model.named_parameters(), strict=True):
        assert ours[0] == theirs[0]
        assert ours[1].requires_grad == theirs[1].requires_grad
        assert (ours[1].shape, ours[1].stride()) == (theirs[1].shape, theirs[1].stride())
    assert found.head.weight is found.embed.weight
    assert found.table is model.table
    assert found.apply_head.__self__ is found.head
    assert not found.training
    assert list(found.state_dict()) == list(model.state_dict())
    assert before == {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
