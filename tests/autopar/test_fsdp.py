"""Data axes on `fully_shard`: the same numbers as on one device, and as many collectives as the plan says."""

import contextlib
import copy
import gc
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import ViTConfig, ViTForImageClassification

import autopar
from autopar.runtime import DistributedModule
from autopar.runtime.generated.collectives import exchange
from autopar.testing import LiftFloat32, compare_on_mesh, run_ranks
from tests.autopar.stored import Spy, storage
from tests.autopar.without_engine import without_engine
from tests.models import Block, Stack, gpt2, llama, phi3, tokens

AXES: Mapping[int, tuple[str, ...]] = {1: ("dp",), 2: ("dp", "tp")}


def vit() -> nn.Module:
    """Two layers on images of 8 x 8."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    images = {"image_size": 8, "patch_size": 4, "num_labels": 4}
    config = ViTConfig(**sizes, **images, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return ViTForImageClassification(config)


def images() -> dict[str, torch.Tensor]:
    """Four images and their labels."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.tensor([0, 1, 2, 3])}


class Exits(nn.Module):
    """Three blocks with a head on what the first one gives, and one on the sum of all: both read it as it is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.early, self.late = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """x: [batch, 16]."""
        kept = []
        for block in self.blocks:
            x = block(x)
            kept.append(x)
        return {"loss": self.early(kept[0]).pow(2).mean() + self.late(kept[0] + kept[1] + x).pow(2).mean()}


def rows() -> dict[str, torch.Tensor]:
    """Eight rows of 16 features."""
    return {"x": torch.randn(8, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)}


MODELS: Mapping[str, tuple[Callable[..., nn.Module], Callable[..., dict[str, torch.Tensor]]]] = {
    "llama": (llama, tokens),
    "tied llama": (lambda: llama(tie_word_embeddings=True), tokens),
    "gpt2": (gpt2, tokens),
    "vit": (vit, images),
    "exits": (Exits, rows),
}


def mesh_of(sizes: tuple[int, ...]) -> DeviceMesh:
    """The mesh of a rank's process group."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=AXES[len(sizes)])


# --- equality ---------------------------------------------------------------------------------------------------------


def _equal(
    cases: list[tuple[str, tuple[int, ...], Mapping[str, str], bool]],
) -> list[tuple[str, str, float, set[object]]]:
    found = []
    for name, sizes, stored, again in cases:
        make, inputs = MODELS[name]
        model, mesh = make().double(), mesh_of(sizes)
        with Spy(again) as spy:
            comparison = compare_on_mesh(
                model, mesh, inputs(), torch.float64, cluster="ideal", constraints=storage(**stored), memory_limit=1e12
            )
        if not spy.seen:
            # The first rank plans.
            continue
        groups = spy.seen[0].units.units
        layers = [group for group in groups if group.sharded and len(group.parameters) > 3]
        assert {group.regathered for group in layers} <= {again}
        taken = {(group.sharded, group.replicated) for group in groups}
        given = {name for group in groups for name in group.parameters}
        left = sorted({parameter.name for parameter in spy.seen[0].program.parameters} - given)
        found.append((*comparison.worst, left, taken))
    return found


# Read in two places, or turned and cut before it is used.
ELSEWHERE: Mapping[str, list[str]] = {
    "tied llama": ["model.embed_tokens.weight"],
    "gpt2": ["transformer.wte.weight"],
    "vit": ["vit.embeddings.cls_token"],
}

FAST = [
    # ZeRO-3 over two axes as one; hybrid.
    ("llama", (2, 2), {"dp": "S(0)", "tp": "S(0, 2)"}, True, {((0, 1), ())}),
    ("gpt2", (2, 2), {"dp": "I", "tp": "S(0)"}, False, {((1,), (0,))}),
    # Parameters that are gathered around an op which reads an element of a list.
    ("exits", (4,), {"dp": "S(0)"}, True, {((0,), ())}),
]
SLOW = [
    # ZeRO-2 and ZeRO-3, plain data parallel.
    ("llama", (4,), {"dp": "S(0)"}, False, {((0,), ())}),
    ("llama", (4,), {"dp": "S(0)"}, True, {((0,), ())}),
    ("llama", (4,), {"dp": "I"}, False, {((), (0,))}),
    ("tied llama", (4,), {"dp": "S(0)"}, True, {((0,), ())}),
    ("gpt2", (4,), {"dp": "S(0)"}, True, {((0,), ())}),
    ("gpt2", (4,), {"dp": "I"}, False, {((), (0,))}),
    ("vit", (4,), {"dp": "I"}, False, {((), (0,))}),
    # Both axes; both ways at once.
    ("llama", (2, 2), {"dp": "I", "tp": "S(0)"}, True, {((1,), (0,))}),
    ("gpt2", (2, 2), {"dp": "S(0)", "tp": "I"}, True, {((0,), (1,))}),
    ("vit", (2, 2), {"dp": "I", "tp": "I"}, False, {((), (0, 1))}),
]


@pytest.mark.parametrize("cases", [FAST, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["fast", "slow"])
def test_equal_to_one_device(cases: list[tuple[str, tuple[int, ...], Mapping[str, str], bool, set[object]]]) -> None:
    """Outputs, loss and all gradients; every parameter is held by the engine that is read in one place."""
    for case, found in zip(cases, run_ranks(_equal, 4, [case[:4] for case in cases])[0], strict=True):
        worst, error, left, taken = found
        assert error <= 1e-9, (case, worst, error)
        assert left == ELSEWHERE.get(case[0], []), case
        assert taken == case[4], case


@pytest.mark.slow
def test_with_another_axis() -> None:
    """The other axis is what it pays to be; the engine has the first one, but for the bias of fused projections, whose
    split in the middle of each part leaves none for the first axis that would be consecutive."""
    cases = [(name, (2, 2), {"dp": "S(0)"}, again) for name, again in (("llama", True), ("gpt2", False))]
    cases.append(("llama", (2, 2), {"dp": "I"}, False))
    for worst, error, left, taken in run_ranks(_equal, 4, cases)[0]:
        assert error <= 1e-9, worst
        assert all(name.endswith("c_attn.bias") or name in ELSEWHERE["gpt2"] for name in left)
        assert all(0 in (*sharded, *replicated) for sharded, replicated in taken)


# --- what runs --------------------------------------------------------------------------------------------------------


class Counting(TorchDispatchMode):
    """Counts collectives by name while it is entered, but for those that compare calls, over a CPU group."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        name = func._opname.strip("_")
        compares = any(isinstance(arg, str) and arg.startswith("autopar_cpu") for arg in args)
        if func.namespace in ("c10d", "_c10d_functional") and name != "wait_tensor" and not compares:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def _calls(run: Callable[[], object]) -> Counter[str]:
    """Collectives by name."""
    with Counting() as counting:
        run()
    return counting.counts


def _passes(again: bool) -> dict[str, object]:
    model, inputs = llama().double(), tokens()
    with Spy(again) as spy, LiftFloat32(torch.float64):
        # Where links are free a ring over the sequence is as good.
        batch = {"@scaled_dot_product_attention": {"method": {"dp": "batch"}}}
        constraints = {**storage(dp="S(0)"), **batch}
        dist_model = autopar.parallelize(model, mesh_of((2,)), inputs, cluster="ideal", constraints=constraints)
    outputs = []
    return {
        "groups": len(spy.seen[0].units.units) if spy.seen else 0,
        "forward": _calls(lambda: outputs.append(dist_model(**inputs))),
        "backward": _calls(lambda: outputs[0].loss.backward()),
        "no gradient": _calls(lambda: _without_gradient(dist_model, inputs)),
        "code": dist_model.code,
        "kinds": {type(parameter) for parameter in (*dist_model.parameters(), *dist_model.state_dict().values())},
    }


def _without_gradient(dist_model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        dist_model(**inputs)


@pytest.mark.parametrize("again", [pytest.param(False, marks=pytest.mark.slow), True])
def test_one_collective_for_each_group(again: bool) -> None:
    """Parameters are gathered once a group and pass, in the backward pass only where the plan says again, and their
    gradients are reduced together. What users see stays what it is."""
    found = run_ranks(_passes, 2, again)[0]
    # Two layers of nine parameters, the embedding, the norm and the head.
    assert found["groups"] == 5
    assert found["code"].count("gathered(") == 12
    assert not re.search(r"local\(.*weight\)", found["code"])
    assert found["forward"]["allgather_base"] == 5
    # All but the embedding, which the backward pass does not read.
    assert found["backward"] == {"reduce_scatter_base": 5, **({"allgather_base": 4} if again else {})}
    assert found["no gradient"] == found["forward"]
    assert found["kinds"] == {DTensor}


class Issued(TorchDispatchMode):
    """Writes down gathers and products of matrices in the order in which they are issued: the elements of a gather, 0
    for a product."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        if func._opname == "_allgather_base_":
            self.events.append(args[0].numel())
        elif func._opname in ("mm", "addmm"):
            self.events.append(0)
        return func(*args, **(kwargs or {}))


def _order() -> tuple[list[list[int]], bool]:
    model, inputs = Stack(depth=3).double(), _batch(0)
    # Split over one axis, and over both: two groups around each block.
    one, both = storage(dp="I", tp="S(0)")["*"], storage(dp="S(0)", tp="S(0, 2)")["*"]
    with Spy(again=True):
        dist_model = _made(model, (2, 2), inputs, constraints={"*.norm.*": one, "*.up.*": one, "*.down.*": both})
    found = []
    for _ in range(2):
        with Issued() as forward:
            output = dist_model(**inputs)
        with Issued() as backward:
            output["loss"].backward()
        found += [forward.events, backward.events]
    model(**inputs)["loss"].backward()
    return found, _close({name: item / 2 for name, item in _gradients(dist_model).items()}, _gradients(model))


def test_groups_of_one_place_are_gathered_ahead_together() -> None:
    """Before the backward pass computes a block, all groups of the block before it are being gathered. In the forward
    pass those of a block are gathered one after the other, with nothing in between."""
    gathers = (16 * 64 + 16, 16 * 64 + 64 + 2 * 16)
    block = [*gathers, 0, 0]
    for events, close in run_ranks(_order, 4):
        for forward, backward in (events[:2], events[2:]):
            assert forward in (block * 3, [*gathers[::-1], 0, 0] * 3)
            ahead = backward[:2]
            assert sorted(ahead) == sorted(gathers)
            # The last block and the one before it; the first block; none.
            assert backward == [*ahead, *ahead, 0, 0, 0, 0, *ahead, 0, 0, 0, 0, 0, 0, 0, 0]
        assert close


def _kept_bytes() -> int:
    """Bytes of all tensors that there are."""
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, nn.Parameter) and not item.is_meta:
            storage = item.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def _kept(again: bool) -> dict[str, list[int]]:
    found = {}
    for name, way in (("engine", contextlib.nullcontext()), ("generated", without_engine())):
        generator = torch.Generator().manual_seed(0)
        model = Stack(width=256, depth=4)
        batch = {name: torch.randn(8, 256, generator=generator) for name in ("x", "target")}
        with Spy(again), way:
            dist_model = _made(model, (2,), batch, memory_limit=1e12)
        del model
        counts = [_kept_bytes()]
        output = dist_model(**batch)
        counts.append(_kept_bytes())
        output["loss"].backward()
        counts.append(_kept_bytes())
        found[name] = [count - counts[0] for count in counts[1:]]
        del dist_model, output
    return found


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_as_much_is_kept_as_planned(again: bool) -> None:
    """After the forward pass there are all parameters or none, but for small ones; after the backward pass there are
    the gradients. It is what generated gathers keep, within a hundredth of the parameters."""
    parameters = 4 * sum(parameter.numel() for parameter in Stack(width=256, depth=4).parameters())
    for found in run_ranks(_kept, 2, again):
        forward, backward = found["engine"]
        other_forward, other_backward = found["generated"]
        assert forward < 0.02 * parameters if again else forward > 0.98 * parameters
        assert abs(forward - other_forward) <= 0.01 * parameters
        assert abs(backward - other_backward) <= 0.01 * parameters
        assert abs(backward - parameters // 2) <= 0.02 * parameters


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole gradients by name."""
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {name: item.full_tensor() if isinstance(item, DTensor) else item for name, item in found.items()}


def _close(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> bool:
    """Equal but for rounding in float64."""
    return set(ours) == set(theirs) and all(
        torch.allclose(ours[name], theirs[name], rtol=1e-9, atol=1e-12) for name in theirs
    )


def _made(
    model: nn.Module, sizes: tuple[int, ...], inputs: Mapping[str, torch.Tensor], **options: Any
) -> DistributedModule:
    """A distributed model, its parameters stored in parts on the first axis."""
    options = {"cluster": "ideal", "constraints": storage(dp="S(0)"), **options}
    return autopar.parallelize(model, mesh_of(sizes), inputs, **options)


def _batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(8, 16, generator=generator, dtype=torch.float64) for name in ("x", "target")}


def _micro_batches() -> dict[str, object]:
    model, batches = Stack().double(), [_batch(seed) for seed in range(3)]
    dist_model = _made(model, (2,), batches[0])
    found: dict[str, object] = {}
    for batch in batches:
        model(**batch)["loss"].backward()
    for batch in batches:
        dist_model(**batch)["loss"].backward()
    found["added up"] = _close(_gradients(dist_model), _gradients(model))
    dist_model.zero_grad()

    def held() -> None:
        with dist_model.keeping_parameters():
            with dist_model.holding_gradients():
                for batch in batches[:-1]:
                    dist_model(**batch)["loss"].backward()
                # They are there, as sums that are not reduced.
                found["not reduced"] = {item.grad.placements[0] for item in dist_model.parameters()} == {Partial()}
            dist_model(**batches[-1])["loss"].backward()

    calls = _calls(held)
    found["held back"] = _close(_gradients(dist_model), _gradients(model))
    found["calls"] = calls["allgather_base"], calls["reduce_scatter_base"]
    # Several forward passes before the backward passes.
    dist_model.zero_grad()
    outputs = [dist_model(**batch) for batch in batches]
    sum(output["loss"] for output in outputs).backward()
    found["several at once"] = _close(_gradients(dist_model), _gradients(model))
    return found


def test_micro_batches() -> None:
    """Gradients add up; they can be reduced once for all backward passes, and parameters be gathered once."""
    for found in run_ranks(_micro_batches, 2):
        assert found == {
            "added up": True,
            "not reduced": True,
            "held back": True,
            "calls": (2, 2),
            "several at once": True,
        }


def _steps() -> dict[str, bool]:
    with LiftFloat32(torch.float64):
        model = gpt2().double()
        inputs, shorter = tokens(), {name: value[:, :8] for name, value in tokens().items()}
        dist_model = _made(model, (2, 2), inputs)
        optimizers = [torch.optim.AdamW(item.parameters(), lr=1e-2) for item in (dist_model, model)]
        found: dict[str, bool] = {}
        for step, batch in enumerate((inputs, shorter, inputs)):
            losses = []
            for item, optimizer in zip((dist_model, model), optimizers, strict=True):
                optimizer.zero_grad()
                # A forward pass whose gradient nobody wants leaves nothing of old values.
                item(**batch)
                item.eval()
                with torch.no_grad():
                    losses.append(item(**batch).loss)
                item.train()
                item(**batch).loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(item.parameters(), 0.1)
                losses.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
                optimizer.step()
            pairs = zip(losses[:2], losses[2:], strict=True)
            found[f"step {step}"] = all(torch.allclose(ours, theirs, rtol=1e-9) for ours, theirs in pairs)
        own = {name: parameter.full_tensor() for name, parameter in dist_model.named_parameters()}
        found["parameters"] = _close(own, dict(model.named_parameters()))
        # Other values: copied in, and with other memory.
        start = copy.deepcopy(gpt2(tie_word_embeddings=True).double().state_dict())
        for way in ("copied", "given"):
            model.load_state_dict({name: value * (2.0 if way == "given" else 1.0) for name, value in start.items()})
            values = {
                name: distribute_tensor(model.get_parameter(name).detach(), parameter.device_mesh, parameter.placements)
                for name, parameter in dist_model.named_parameters()
            }
            dist_model.load_state_dict(values, strict=False, assign=way == "given")
            with torch.no_grad():
                found[way] = torch.allclose(dist_model(**inputs).loss, model(**inputs).loss, rtol=1e-9)
        return found


@pytest.mark.slow
def test_steps_of_an_optimizer() -> None:
    """Training with clipping, evaluation in between, batches of other sizes, and other values of parameters."""
    for found in run_ranks(_steps, 4):
        assert all(found.values()), found


def _after_an_error() -> bool:
    model, inputs = Stack().double(), _batch(0)
    dist_model = _made(model, (2,), inputs)
    with mock.patch("torch.relu", side_effect=ValueError("torn")), pytest.raises(ValueError, match="torn"):
        dist_model(**inputs)
    with torch.inference_mode():
        evaluated = dist_model(**inputs)["loss"].item()
    output = dist_model(**inputs)
    assert output["loss"].item() == evaluated
    output["loss"].backward()
    model(**inputs)["loss"].backward()
    return _close(_gradients(dist_model), _gradients(model))


def test_after_an_error() -> None:
    """A call that raises leaves nothing behind, nor does one in inference mode, even if it is the first."""
    assert all(run_ranks(_after_an_error, 2))


def _mixed(reduce: torch.dtype | None) -> dict[str, object]:
    precision = autopar.Precision(compute=torch.bfloat16, reduce=reduce, master=torch.float32)
    model, inputs = Stack(), {name: value.float() for name, value in _batch(0).items()}
    found = {}
    for name, way in (("engine", contextlib.nullcontext()), ("generated", without_engine())):
        with way:
            dist_model = _made(model, (2,), inputs, precision=precision)
        output = dist_model(**inputs)
        output["loss"].backward()
        kind = output["prediction"].dtype
        found[name] = (output["loss"], kind, _gradients(dist_model), "gathered(" in dist_model.code)
    (loss, kind, ours, by_engine), (other_loss, other_kind, theirs, otherwise) = found["engine"], found["generated"]
    return {
        "engine": (by_engine, otherwise),
        "loss": torch.equal(loss, other_loss),
        "kind": kind == other_kind == torch.bfloat16,
        "gradients": {item.dtype for item in ours.values()},
        "errors": max(float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in theirs),
    }


@pytest.mark.parametrize("reduce", [torch.float32, None])
def test_mixed_precision(reduce: torch.dtype | None) -> None:
    """Computed in bfloat16, the engine gives what the generated code gives without it: gradients of two ranks, which
    are the same however they are added up."""
    for found in run_ranks(_mixed, 2, reduce):
        assert found["engine"] == (True, False)
        assert found["loss"]
        assert found["kind"]
        assert found["gradients"] == {torch.float32}
        assert found["errors"] == 0.0


# --- copies in other layouts ------------------------------------------------------------------------------------------

# Used as parts of both fused projections, which no checkpoint stores: split over the other dim when stored.
TURNED = [
    {"stored": {"dp": "S(1)", "tp": "S(1, 2)"}, "used": {"dp": "R", "tp": "S(0, 2)"}},
    {"stored": {"dp": "I", "tp": "S(1)"}, "used": {"dp": "R", "tp": "S(0, 2)"}},
]


def _take_steps(model: nn.Module, dist_model: DistributedModule, batch: Mapping[str, torch.Tensor]) -> None:
    """Two steps of both models, each with gradients of three passes: one is held back, two keep parameters."""
    optimizers = [torch.optim.SGD(item.parameters(), lr=0.1) for item in (model, dist_model)]
    for _ in range(2):
        for _ in range(3):
            model(**batch).loss.backward()
        with dist_model.holding_gradients():
            dist_model(**batch).loss.backward()
        with dist_model.keeping_parameters():
            for _ in range(2):
                dist_model(**batch).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _hook_calls(dist_model: DistributedModule) -> list[bool]:
    """A list that grows with each call of a hook of a fused projection: whether there is a gradient then."""
    calls: list[bool] = []
    for name, parameter in dist_model.named_parameters():
        if "gate_up_proj" in name:
            parameter.register_post_accumulate_grad_hook(lambda item: calls.append(item.grad is not None))
    return calls


def _turned(constraints: list[Mapping[str, Mapping[str, str]]]) -> list[dict[str, object]]:
    """For each way to store the fused projections: what the engine keeps, how far it is from one device, how many
    all-to-alls a step takes, and how many gradients hooks see."""
    found = []
    mesh, batch = mesh_of((2, 2)), tokens()
    for demanded in constraints:
        options: dict[str, Any] = {"cluster": "ideal", "constraints": {"*.gate_up_proj.weight": demanded}}
        with Spy() as spy:
            model = phi3(num_hidden_layers=2).double()
            error = compare_on_mesh(model, mesh, batch, torch.float64, memory_limit=1e12, **options).worst
        with LiftFloat32(torch.float64):
            model = phi3(num_hidden_layers=2).double()
            dist_model = autopar.parallelize(model, mesh, batch, **options)
            with mock.patch("autopar.runtime.fsdp.turns.exchange", wraps=exchange) as exchanges:
                dist_model(**batch).loss.backward()
            dist_model.zero_grad()
            hooked = _hook_calls(dist_model)
            _take_steps(model, dist_model, batch)
        weights = dict(model.named_parameters())
        far = max(
            (parameter.full_tensor() - weights[name]).abs().max().item()
            for name, parameter in dist_model.named_parameters()
        )
        kept = {
            name: [str(placement) for placement in layout]
            for seen in spy.seen
            for group in seen.units.units
            for name, layout in group.turned.items()
        }
        found.append({"error": error, "far": far, "kept": kept, "sent": exchanges.call_count, "hooked": hooked})
    return found


def test_copies_in_other_layouts_are_gathered() -> None:
    """A parameter that is turned by an all-to-all before it is gathered: gradients, accumulation with gradients held
    back and parameters kept, and steps of an optimizer are those of one device. Those of all layers share one
    all-to-all forward and one backward."""
    results = run_ranks(_turned, 4, TURNED)
    names = [f"model.layers.{number}.mlp.gate_up_proj.weight" for number in range(2)]
    for found, placements in zip(results[0], (["S(1)", "S(0, 2)"], ["I", "S(0, 2)"]), strict=True):
        assert found["kept"] == dict.fromkeys(names, placements)
        assert found["sent"] == 2
        # Two of the three backward passes of each of two steps reduce gradients, of two parameters.
        assert found["hooked"] == [True] * 8
        assert found["error"][1] <= 1e-9, found
    assert all(found["far"] <= 1e-9 for result in results for found in result)


# Gathered over one axis by a unit, over the other one by the code that reads it.
COPIED = {"*.o_proj.weight": {"stored": {"dp": "S(0, 2)", "tp": "S(0)"}, "used": {"dp": "R", "tp": "I"}}}


def _copied() -> dict[str, object]:
    mesh, batch = mesh_of((2, 2)), tokens()
    options: dict[str, Any] = {"cluster": "ideal", "constraints": COPIED}
    with Spy() as spy:
        error = compare_on_mesh(llama().double(), mesh, batch, torch.float64, memory_limit=1e12, **options).worst
    with LiftFloat32(torch.float64):
        model = llama().double()
        dist_model = autopar.parallelize(model, mesh, batch, **options)
        _take_steps(model, dist_model, batch)
    weights = dict(model.named_parameters())
    far = max(
        (parameter.full_tensor() - weights[name]).abs().max().item()
        for name, parameter in dist_model.named_parameters()
    )
    units = [
        unit for seen in spy.seen for unit in seen.units.units if any("o_proj" in name for name in unit.parameters)
    ]
    return {"error": error[1], "far": far, "read": {(unit.saved, unit.regathered) for unit in units}}


def test_parameters_that_are_copied_after_their_gather_are_freed() -> None:
    """The backward pass reads the copy: gradients, accumulation and steps of an optimizer are those of one device."""
    results = run_ranks(_copied, 4)
    assert results[0]["read"] == {(False, True)}
    assert results[0]["error"] <= 1e-9, results[0]
    assert all(found["far"] <= 1e-9 for found in results)


def _held_in(reduce: torch.dtype) -> dict[str, object]:
    precision = autopar.Precision(compute=torch.bfloat16, reduce=reduce, master=torch.float32)
    first, second = ({name: value.float() for name, value in _batch(seed).items()} for seed in (0, 1))
    dist_model = _made(Stack(), (2,), first, precision=precision)
    for batch in (first, second):
        dist_model(**batch)["loss"].backward()
    expected = _gradients(dist_model)
    found: dict[str, object] = {"largest": max(float(item.abs().max()) for item in expected.values())}
    for name in ("zeros", "none"):
        dist_model.zero_grad(set_to_none=name == "none")
        with dist_model.holding_gradients():
            for _ in range(2):
                dist_model.zero_grad(set_to_none=name == "none")
                dist_model(**first)["loss"].backward()
            found["held"] = {item.grad.dtype for item in dist_model.parameters()}
        dist_model(**second)["loss"].backward()
        found["reduced"] = {item.grad.dtype for item in dist_model.parameters()}
        found[name] = max(float((item - expected[key]).abs().max()) for key, item in _gradients(dist_model).items())
    return found


@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16])
def test_gradients_are_held_in_the_dtype_of_the_reduction(reduce: torch.dtype) -> None:
    """They are as exact as that, and can be zeroed."""
    for found in run_ranks(_held_in, 2, reduce):
        assert found["held"] == {reduce}
        assert found["reduced"] == {torch.float32}
        # A sum of two, rounded twice.
        allowed = 2 * torch.finfo(reduce).eps * found["largest"]
        assert found["zeros"] <= allowed
        assert found["none"] <= allowed
