"""The module that `parallelize` returns and its uses, on gloo ranks."""

import copy
import io
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.testing import LiftFloat32, compare_on_mesh, run_ranks
from passes.ir.layout import parse_placement
from tests.models import Stack, gpt2, llama, tokens

OPTIONS: Mapping[str, object] = {"cluster": "ideal"}


def mesh_of_four(sizes: tuple[int, ...] = (2, 2)) -> DeviceMesh:
    """The mesh of a rank's process group."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp", "cp")[: len(sizes)])


def on_ranks(function: Callable[..., object], *args: object, lifted: bool = True) -> list[object]:
    """Run on four ranks; what each returns. Casts of the models to float32 are lifted to float64."""
    return run_ranks(_lifting, 4, function, *args) if lifted else run_ranks(function, 4, *args)


def _lifting(function: Callable[..., object], *args: object) -> object:
    with LiftFloat32(torch.float64):
        return function(*args)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal but for rounding in float64."""
    return torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)


# --- parameters, gradients, optimizers --------------------------------------------------------------------------------


def _training() -> None:
    model = gpt2().double()
    before = copy.deepcopy(model.state_dict())
    inputs = tokens()
    dist_model = autopar.parallelize(model, mesh_of_four(), inputs, **OPTIONS)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert list(dict(dist_model.named_parameters())) == list(dict(model.named_parameters()))
    assert dist_model.lm_head.weight is dist_model.transformer.wte.weight
    for _ in range(2):
        dist_model.forward_backward(**inputs)
        model(**inputs, use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        assert close(dist_model.get_parameter(name).grad.full_tensor(), parameter.grad), name
    for optimizer in (torch.optim.AdamW, torch.optim.SGD):
        _three_steps(optimizer, dist_model, model, inputs)


def _three_steps(
    optimizer: Callable[..., torch.optim.Optimizer],
    dist_model: nn.Module,
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
) -> None:
    ours, theirs = optimizer(dist_model.parameters(), lr=1e-2), optimizer(model.parameters(), lr=1e-2)
    for _ in range(3):
        for module, chosen in ((dist_model, ours), (model, theirs)):
            chosen.zero_grad()
            if module is dist_model:
                output = module.forward_backward(**inputs)
            else:
                expected = module(**inputs, use_cache=False)
                expected.loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            chosen.step()
        assert type(output) is type(expected)
        assert close(output.loss, expected.loss)
    weights = dict(dist_model.named_parameters())
    for name, parameter in model.named_parameters():
        assert isinstance(weights[name], DTensor)
        assert close(weights[name].full_tensor(), parameter), name
        assert close(weights[name].grad.full_tensor(), parameter.grad), name


def test_training_with_clipping():
    """A second backward pass adds to what the first left, fused projections and ties included. Three steps of each of
    torch's optimizers with clipped gradients are those of one device; the model is left as it was while the parallel
    one is made; ties stay ties."""
    on_ranks(_training)


def _state_dict() -> None:
    model = llama(tie_word_embeddings=True)
    dist_model = autopar.parallelize(model, mesh_of_four(), tokens(), **OPTIONS)
    state, expected = dist_model.state_dict(), model.state_dict()
    assert list(state) == list(expected)
    for name, value in expected.items():
        whole = state[name].full_tensor() if isinstance(state[name], DTensor) else state[name]
        assert torch.equal(whole, value), name
    changed = {name: value * 0 for name, value in state.items()}
    dist_model.load_state_dict(changed)
    assert all(not parameter.full_tensor().any() for parameter in dist_model.parameters())


@pytest.mark.long
def test_state_dict():
    """Names, order and values are the model's; it loads again."""
    on_ranks(_state_dict, lifted=False)


class Partial(nn.Module):
    """A layer that trains, one that is frozen and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(8, 16).requires_grad_(False)
        self.trained = nn.Linear(16, 8)
        self.unused = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, 8]."""
        return self.trained(torch.relu(self.frozen(x))).pow(2).sum()


def _partial() -> None:
    model, x = Partial().double(), torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    dist_model = autopar.parallelize(model, mesh_of_four(), {"x": x}, **OPTIONS)
    loss = dist_model(x=x)
    expected = model(x)
    assert not isinstance(loss, DTensor)
    assert close(loss, expected)
    loss.backward()
    expected.backward()
    for name, parameter in model.named_parameters():
        ours = dist_model.get_parameter(name)
        assert ours.requires_grad == parameter.requires_grad
        assert (ours.grad is None) == (parameter.grad is None), name
        if parameter.grad is not None:
            assert close(ours.grad.full_tensor(), parameter.grad)


# --- outputs and inputs -----------------------------------------------------------------------------------------------


def _calls() -> None:
    model, inputs = llama().double(), tokens()
    dist_model = autopar.parallelize(model, mesh_of_four(), inputs, **OPTIONS)
    _logits_are_differentiable(dist_model, model, inputs)
    _each_rank_gives_its_own_part(dist_model, model, inputs)
    _other_inputs_than_planned(dist_model, inputs)


def _logits_are_differentiable(
    dist_model: autopar.DistributedModule, model: nn.Module, inputs: Mapping[str, torch.Tensor]
) -> None:
    """A loss of one's own on the logits, which come in the plan's layout."""
    expected = model(**inputs, use_cache=False)
    output = dist_model(**inputs)
    assert isinstance(output.logits, DTensor)
    assert not isinstance(output.loss, DTensor)
    weight = torch.randn(output.logits.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (output.logits.full_tensor() * weight).sum().backward()
    (expected.logits * weight).sum().backward()
    for name, parameter in model.named_parameters():
        assert close(dist_model.get_parameter(name).grad.full_tensor(), parameter.grad), name
    again = dist_model(inputs["input_ids"], labels=inputs["labels"])
    assert close(again.loss, expected.loss)


def _each_rank_gives_its_own_part(
    dist_model: autopar.DistributedModule, model: nn.Module, inputs: Mapping[str, torch.Tensor]
) -> None:
    mesh = dist_model.mesh
    layouts = dist_model.input_layouts
    assert set(layouts) == {"input_ids", "labels"}
    own = {}
    for name, whole in inputs.items():
        part = whole
        splits = [(parse_placement(text), axis) for axis, text in layouts[name].items() if text.startswith("S")]
        for placement, axis in sorted(splits, key=lambda item: item[0].major):
            part = part.chunk(mesh[axis].size(), placement.dim)[mesh[axis].get_local_rank()]
        own[name] = part.clone()
    given = dist_model.from_local(own)
    assert all(torch.equal(given[name].full_tensor(), inputs[name]) for name in inputs)
    assert close(dist_model(**given).loss, model(**inputs, use_cache=False).loss)
    assert close(dist_model.forward_backward(**given).loss, model(**inputs, use_cache=False).loss)
    with pytest.raises(autopar.InputError, match="this rank's part of input_ids is"):
        dist_model.from_local({**own, "input_ids": own["input_ids"].float()})


def _other_inputs_than_planned(dist_model: autopar.DistributedModule, inputs: Mapping[str, torch.Tensor]) -> None:
    with pytest.raises(autopar.InputError, match="You must specify exactly one of input_ids or inputs_embeds"):
        dist_model(labels=inputs["labels"])
    with pytest.raises(autopar.InputError, match="additional argument mask: the model's forward does not name it"):
        dist_model(**inputs, mask=torch.ones_like(inputs["input_ids"]))
    with pytest.raises(autopar.InputError, match=r"input_ids is int64\[16\], but was planned as int64\[4, 16\]"):
        dist_model(input_ids=inputs["input_ids"][0], labels=inputs["labels"])
    with pytest.raises(autopar.InputError, match="labels is float64"):
        dist_model(input_ids=inputs["input_ids"], labels=inputs["labels"].double())
    with pytest.raises(autopar.InputError, match="input_ids must be a tensor, got int"):
        dist_model(input_ids=7, labels=inputs["labels"])
    with pytest.raises(autopar.InputError, match="does not take these arguments"):
        dist_model(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)


def test_calls():
    """Outputs are differentiable; inputs are the whole batch or each rank's part; others than planned are errors."""
    on_ranks(_calls)


def _inference() -> None:
    model, inputs = gpt2().double(), tokens(labels=False)
    dist_model = autopar.parallelize(model, mesh_of_four(), inputs, objective="infer", **OPTIONS)
    output = dist_model(**inputs)
    assert not output.logits.requires_grad
    assert output.past_key_values.get_seq_length() == 16
    with pytest.raises(autopar.InputError, match="planned for inference"):
        dist_model.train()
    with pytest.raises(autopar.InputError, match="no loss"):
        dist_model.forward_backward(**inputs)


@pytest.mark.long
def test_inference_has_no_gradients_and_returns_the_cache():
    on_ranks(_inference)


# --- modes and buffers ------------------------------------------------------------------------------------------------


class Normalized(nn.Module):
    """Batch statistics in training, running ones in evaluation, and dropout in evaluation only on paper."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, 8]."""
        return self.dropout(self.norm(self.linear(x))).pow(2).mean()


def _modes() -> None:
    model = Normalized().double().eval()
    x = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    dist_model = autopar.parallelize(model, mesh_of_four(), {"x": x}, **OPTIONS)
    assert not model.training
    model.train()
    for _ in range(2):
        assert close(dist_model(x=x), model(x))
    buffers = dict(dist_model.named_buffers())
    for name, buffer in model.named_buffers():
        assert close(buffers[name], buffer), name
    model.eval()
    dist_model.eval()
    assert close(dist_model(x=x), model(x))
    dist_model.train()
    model.train()
    assert close(dist_model(x=x), model(x))


class Hardening(nn.Module):
    """In evaluation it changes its own weight, which no trace can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, 8]."""
        if not self.training:
            with torch.no_grad():
                self.weight.div_(self.weight.norm())
        return x * self.weight


def _hardens() -> None:
    x = torch.ones(8, 8)
    dist_model = autopar.parallelize(Hardening(), mesh_of_four(), {"x": x}, **OPTIONS)
    dist_model(x=x).full_tensor().sum().backward()
    assert torch.equal(dist_model.weight.grad.full_tensor(), torch.full((8,), 8.0))
    with pytest.raises(autopar.CaptureError, match=r"can be trained, but not evaluated: .*changes the parameter"):
        dist_model.eval()


# --- precision --------------------------------------------------------------------------------------------------------


def _precision() -> None:
    model, inputs = llama(), tokens()
    precision = autopar.Precision(compute=torch.bfloat16, reduce=torch.float32)
    dist_model = autopar.parallelize(model, mesh_of_four(), inputs, precision=precision, **OPTIONS)
    output = dist_model.forward_backward(**inputs)
    assert output.logits.dtype == torch.bfloat16
    for parameter in dist_model.parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad.dtype == torch.float32
    expected = model(**inputs, use_cache=False)
    expected.loss.backward()
    assert abs(output.loss.item() - expected.loss.item()) < 0.02 * expected.loss.item()
    ours = torch.cat([parameter.grad.full_tensor().flatten() for parameter in dist_model.parameters()])
    theirs = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert torch.nn.functional.cosine_similarity(ours, theirs, dim=0) > 0.999


@pytest.mark.long
def test_precision():
    """Computes in bfloat16, reduces and keeps in float32: gradients point where those in float32 do."""
    on_ranks(_precision, lifted=False)


# --- ranks that differ ------------------------------------------------------------------------------------------------


def _different(what: str) -> str:
    import torch.distributed as dist

    model = llama(num_hidden_layers=3) if what == "layers" and dist.get_rank() == 1 else llama()
    if what == "values" and dist.get_rank() == 2:
        with torch.no_grad():
            model.get_parameter("model.norm.weight").mul_(2)
    if what == "meta" and dist.get_rank() == 2:
        model = model.to("meta")
    # An error while planning, which only rank 0 does, and one that only another rank meets.
    options: dict[str, object] = {}
    if what == "constraint":
        options = {"constraints": {"nothing.here": {"stored": {"dp": "S(0)"}}}}
    if what == "limit" and dist.get_rank() == 3:
        options = {"memory_limit": -1.0}
    with pytest.raises(autopar.AutoparError) as error:
        autopar.parallelize(model, mesh_of_four(), tokens(), **{**OPTIONS, **options})
    return f"{error.type.__name__}: {error.value}"


def _faults() -> tuple[str, ...]:
    return tuple(_different(what) for what in ("layers", "values", "meta", "constraint", "limit"))


def test_errors_come_on_every_rank_alike():
    results = on_ranks(_faults, lifted=False)
    assert len(set(results)) == 1
    layers, values, meta, constraint, limit = results[0]
    assert layers.startswith("PlanMismatchError: ranks hold different models")
    assert "rank 1 of the mesh has a different structure from rank 0's" in layers
    assert values.startswith("PlanMismatchError")
    assert "model.norm.weight" in values
    assert "rank 2" in values
    assert meta.startswith("PlanMismatchError: ranks hold different models: 'model.embed_tokens.weight' is on meta on")
    assert "on rank 2 of the mesh, and has values on rank 0" in meta
    assert constraint.startswith("ConstraintError")
    assert "'nothing.here'" in constraint
    assert limit.startswith("InputError: memory_limit")


# --- code -------------------------------------------------------------------------------------------------------------


def _code() -> tuple[str, str]:
    dist_model = autopar.parallelize(Stack(depth=3), mesh_of_four(), _stack_inputs(), **OPTIONS)
    assert dist_model.code == dist_model.code_path.read_text()
    return dist_model.code, dist_model.plan.to_json()


def _stack_inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(8, 16, generator=generator) for name in ("x", "target")}


def test_code_is_the_same_on_all_ranks_and_has_one_class_per_layer():
    results = on_ranks(_code, lifted=False)
    assert len(set(results)) == 1
    code, _ = results[0]
    assert code.count("class ") == 2
    assert "class Block(RegionCopy)" in code
    assert "blocks.*.up  (Linear)" in code


def _two_meshes() -> None:
    first = autopar.parallelize(Stack().double(), mesh_of_four((2, 2)), _doubled(), **OPTIONS)
    second = autopar.parallelize(Stack().double(), mesh_of_four((4,)), _doubled(), **OPTIONS)
    expected = Stack().double()(**_doubled())["loss"]
    assert close(first(**_doubled())["loss"], expected)
    assert close(second(**_doubled())["loss"], expected)


def _doubled() -> dict[str, torch.Tensor]:
    return {name: value.double() for name, value in _stack_inputs().items()}


# --- replay -----------------------------------------------------------------------------------------------------------


def _replay(text: str) -> None:
    plan = autopar.Plan.from_json(text)
    model, inputs = llama().double(), tokens()
    dist_model = autopar.parallelize(model, mesh_of_four(), inputs, plan=plan, **OPTIONS)
    assert dist_model.plan.to_json() == text
    assert close(dist_model(**inputs).loss, model(**inputs, use_cache=False).loss)


@pytest.mark.long
def test_a_saved_plan_runs(tmp_path):
    """Planned elsewhere, saved, loaded and run: the same plan, and the right loss."""
    with LiftFloat32(torch.float64):
        plan = autopar.plan(llama().double(), {"dp": 2, "tp": 2}, tokens(), **OPTIONS)
    plan.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json") == plan
    on_ranks(_replay, (tmp_path / "plan.json").read_text())


# --- defaults ---------------------------------------------------------------------------------------------------------


def _defaults() -> list[object]:
    model = llama(max_position_embeddings=16).double()
    dist_model = autopar.parallelize(model, mesh_of_four())
    inputs = tokens(batch=4, length=16)
    assert {name: item.shape for name, item in dist_model.plan.inputs.items()} == {
        "input_ids": (4, 16),
        "labels": (4, 16),
    }
    assert close(dist_model(**inputs).loss, model(**inputs, use_cache=False).loss)
    return [dist_model.plan.cluster, dist_model.training]


@pytest.mark.long
def test_a_stock_model_needs_no_more():
    """Without inputs and options: inputs from the config, the cluster from the mesh's devices."""
    assert on_ranks(_defaults) == [["cpu", True]] * 4


def test_messages_go_through_logging(caplog):
    with caplog.at_level(logging.WARNING, logger="autopar"), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        autopar.plan(Stack(), {"dp": 5}, _stack_inputs(), cluster="ideal")
    assert any("'dp' of size 5 splits nothing" in record.message for record in caplog.records)


@pytest.mark.long
def test_a_plan_needs_no_values():
    """Parameters on meta plan just as real ones do."""
    with torch.device("meta"):
        empty = llama()
    real = autopar.plan(llama(), {"dp": 2, "tp": 2}, tokens(), **OPTIONS)
    assert autopar.plan(empty, {"dp": 2, "tp": 2}, tokens(), **OPTIONS) == real
    buffer = io.StringIO()
    print(real, file=buffer)
    assert "predicted step" in buffer.getvalue()


# --- models that are built otherwise ----------------------------------------------------------------------------------


class Counting(nn.Module):
    """Returns what its buffer was before it changed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """x: [batch, 8]."""
        old = self.count.clone()
        self.count.add_(1)
        return {"old": old, "loss": (self.linear(x) * self.count).pow(2).mean()}


class Attribute(nn.Module):
    """A tensor that is no buffer, with the name of an input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.scale = torch.full((8,), 3.0, dtype=torch.float64)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """x: [batch, 8]; scale: [8]."""
        return (self.linear(x) * scale + self.scale).pow(2).mean()


class Masked(nn.Module):
    """Classes that are ruled out, with logits of minus infinity."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """x: [batch, 8]; target: [batch], odd classes."""
        logits = self.head(x).masked_fill(torch.arange(16) % 2 == 0, -torch.inf)
        return nn.functional.cross_entropy(logits, target)


class Spectrum(nn.Module):
    """Goes through complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, 8]."""
        return torch.fft.fft(self.linear(x)).abs().pow(2).sum()


class Scored(nn.Module):
    """Scores without gradients, of features that are converted there to what they are, and go on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.gate = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, 8]."""
        features = self.first(x)
        with torch.no_grad():
            best = self.gate(features.to(self.gate.weight.dtype)).argmax(-1, keepdim=True)
        return self.gate(features).gather(-1, best).pow(2).mean()


class Keyed(nn.Module):
    """Parts whose keys look like numbers, and weights that layers share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleDict({"01": nn.Linear(8, 8), "1": nn.Linear(8, 8)})
        self.axes = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.axes[2].weight = self.axes[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, 8]."""
        for part in (*self.parts.values(), *self.axes):
            x = torch.tanh(part(x))
        return x.pow(2).sum()


def _unusual(sizes: tuple[int, ...]) -> dict[str, str]:
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cases = {
        "counting": (Counting(), {"x": x}),
        "attribute": (Attribute(), {"x": x, "scale": x[0]}),
        "masked": (Masked(), {"x": x, "target": torch.tensor([1, 15, 7, 9])}),
        "spectrum": (Spectrum(), {"x": x}),
        "scored": (Scored(), {"x": x}),
        "keyed": (Keyed(), {"x": x}),
        # No biases before batch statistics: their gradients are zero, and rounding would be all there is to compare.
        "normalized": (nn.Sequential(nn.Linear(8, 8, bias=False), Normalized()), {"input": x}),
    }
    wrong = {}
    for name, (model, inputs) in cases.items():
        comparison = compare_on_mesh(model.double(), mesh_of_four(sizes), inputs, **OPTIONS)
        if not comparison.worst[1] <= 1e-9:
            wrong[name] = str(comparison)
    return wrong


@pytest.mark.long
@pytest.mark.parametrize("sizes", [pytest.param((4,), marks=pytest.mark.slow), (2, 2)], ids=str)
def test_models_that_are_built_otherwise(sizes):
    """Buffers that change, attributes that are tensors, complex numbers, infinities, scores without gradients, shared
    weights, odd names."""
    assert on_ranks(_unusual, sizes, lifted=False) == [{}] * 4


def _input_gradient() -> None:
    model = Stack().double()
    ours, theirs = _doubled(), _doubled()
    ours["x"].requires_grad_()
    theirs["x"].requires_grad_()
    dist_model = autopar.parallelize(model, mesh_of_four(), ours, **OPTIONS)
    dist_model(**ours)["loss"].backward()
    model(**theirs)["loss"].backward()
    with pytest.raises(autopar.InputError, match="target requires a gradient"):
        dist_model(x=ours["x"], target=ours["target"].clone().requires_grad_())
    assert close(ours["x"].grad, theirs["x"].grad)


class Flagged(nn.Module):
    """Another result with a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, double: bool = False) -> torch.Tensor:
        """x: [batch, 8]."""
        return self.linear(x).sum() * (2 if double else 1)


def _flags() -> None:
    x = torch.ones(4, 8)
    dist_model = autopar.parallelize(Flagged(), mesh_of_four(), {"x": x, "double": True}, **OPTIONS)
    dist_model(x=x, double=True)
    with pytest.raises(autopar.InputError, match="double is left out, which means False"):
        dist_model(x=x)
    with pytest.raises(autopar.InputError, match="double is False, but was planned as True"):
        dist_model(x=x, double=False)


def _in_turn(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()


@pytest.mark.long
def test_small_modules():
    """Frozen and unused parameters; running statistics, which evaluation uses; a module that can be trained but not
    evaluated; gradients of inputs; constants, which are not assumed; two models on two meshes."""
    on_ranks(_in_turn, [_partial, _modes, _hardens, _input_gradient, _flags, _two_meshes])
