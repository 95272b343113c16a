"""Planned memory is what the generated module takes when it runs: byte by byte what torch's MemTracker finds on tensors
without values, of which autograd adds no gradient in place, and what is allocated for tensors with values."""

import random
from contextlib import ExitStack
from functools import partial
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor, nn

import autopar
from autopar import InfeasibleError, Precision
from autopar.runtime.fsdp import reductions
from autopar.runtime.state import local_part
from passes.cost.liveness import fsdp_units
from passes.ir.layout import Placement, S
from passes.ir.mesh import Mesh
from tests.autopar.comparing import MESHES
from tests.autopar.fuzzing import random_solution
from tests.autopar.simulated import predicted_and_allocated, predicted_and_measured
from tests.autopar.solving import solved_by
from tests.autopar.stored import Spy, storage
from tests.models import MODELS, phi3, tokens

MIXED = Precision(compute=torch.bfloat16, master=torch.float32)
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def _check(model: nn.Module, mesh: str, inputs: dict[str, torch.Tensor], **options: object) -> None:
    given = {"cluster": "ideal", **options}
    if given.get("objective") != "infer":
        given = {"micro_batches": 1, "recompute": "none", **given}
    axes = {"dp": 4} if mesh == "dp4" else MESHES[mesh]
    predicted, measured, _ = predicted_and_measured(model, axes, inputs, **given)
    assert predicted == measured


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("llama", "2x2", {"precision": MIXED}),
        ("gpt2", "2", {"optimizer": "sgd"}),
        ("qwen3", "2x2", {"objective": "infer"}),
        *(
            (name, mesh, options)
            for name in MODELS
            for mesh in ("2", "2x2")
            for options in ({"optimizer": "adamw"}, {"optimizer": "adam", "precision": MIXED})
        ),
    ],
)
def test_best_plans(name: str, mesh: str, options: dict[str, object]) -> None:
    """The plan that the solver chooses, in training and inference."""
    training = options.get("objective") != "infer"
    _check(MODELS[name](), mesh, tokens(length=8, labels=training), **options)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("llama", {"dp": 2, "tp": 2}, {}),
        ("qwen3", {"dp": 2, "tp": 2}, {"recompute": "full"}),
        pytest.param("llama", {"tp": 2}, {"precision": MIXED}, marks=pytest.mark.slow),
        pytest.param("gemma2", {"dp": 2}, {}, marks=pytest.mark.slow),
        pytest.param("mistral", {"dp": 2, "tp": 2}, {"recompute": "selective"}, marks=pytest.mark.slow),
        pytest.param("llama", {"dp": 2}, {"micro_batches": 4, "zero": 1}, marks=pytest.mark.slow),
        pytest.param("llama", {"dp": 4}, {"zero": 3}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("classes", [pytest.param(64, marks=pytest.mark.slow), 1024])
def test_what_is_allocated(name: str, mesh: dict[str, int], options: dict[str, object], classes: int) -> None:
    """At the peak in a layer, and at that of the loss. Numbers among operands may be tensors for a moment."""
    given = {"micro_batches": 1, "recompute": "none", **options}
    predicted, allocated = predicted_and_allocated(
        MODELS[name](vocab_size=classes), mesh, tokens(8, 64, classes), **given
    )
    assert allocated == pytest.approx(predicted, abs=64)


class _Branches(nn.Module):
    """At its peak, the gradients of two uses of a tensor are added."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        return (hidden * 2).sum() + (hidden * 3).sum()


def test_gradients_are_added_in_place() -> None:
    batch = {"x": torch.ones(64, 8)}
    predicted, allocated = predicted_and_allocated(_Branches(), {"dp": 2}, batch, micro_batches=1)
    assert allocated == pytest.approx(predicted, abs=64)
    without, tracked, _ = predicted_and_measured(_Branches(), {"dp": 2}, batch, micro_batches=1, cluster="ideal")
    assert without == tracked > predicted


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("placement", [S(0), S(1)])
def test_a_part_is_a_tensor_of_its_own(placement: Placement, rank: int) -> None:
    """On every rank, or the whole would stay as long as its part."""
    whole = torch.arange(32.0).reshape(4, 8)
    part = local_part(whole, (placement,), (rank,), Mesh(("dp",), (2,)))
    assert torch.equal(part, whole.chunk(2, placement.dim)[rank])
    assert part.untyped_storage().nbytes() == whole.nbytes // 2


@pytest.mark.long
def test_copies_are_counted() -> None:
    """Of many layers most are counted and not run."""
    _check(MODELS["llama"](num_hidden_layers=7), "2", tokens(length=4), optimizer="sgd")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "seed"),
    [
        ("llama", "2", 1),
        *((name, mesh, seed) for name in MODELS for mesh in ("2", "2x2") for seed in range(6)),
    ],
)
def test_random_plans(name: str, mesh: str, seed: int) -> None:
    """Random strategies, random storage, and random gathers made again in the backward pass."""
    with solved_by(partial(random_solution, random.Random(seed))):
        _check(MODELS[name](), mesh, tokens(length=8))


@pytest.mark.slow
def test_statistics_of_norms() -> None:
    """They are kept in the dtype that is computed in: so the CPU does it, unlike CUDA."""
    with solved_by(partial(random_solution, random.Random(1))):
        _check(MODELS["gpt2"](), "2", tokens(length=8), precision=MIXED)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "mesh", "level"),
    [
        ("llama", "2", "full"),
        pytest.param("llama", "2x2", "full", marks=pytest.mark.slow),
        pytest.param("llama", "2", "selective", marks=pytest.mark.slow),
        pytest.param("llama", "2", "full:3", marks=pytest.mark.slow),
        pytest.param("llama", "2x2", "full:5, selective", marks=pytest.mark.slow),
        pytest.param("llama", "2", "full:2, ops", marks=pytest.mark.slow),
    ],
)
def test_recompute(name: str, mesh: str, level: str) -> None:
    """The memory of recompute in the backward pass, up to the point where all that the pass needs is there."""
    _check(MODELS[name](num_hidden_layers=7), mesh, tokens(length=4), optimizer="sgd", recompute=level, micro_batches=1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "mesh", "level"), [("llama", "2", "none"), pytest.param("gpt2", "2x2", "full", marks=pytest.mark.slow)]
)
def test_micro_batches(name: str, mesh: str, level: str) -> None:
    """Gradients and what earlier micro-batches returned stay."""
    _check(MODELS[name](), mesh, tokens(8, 8), micro_batches=4, recompute=level)


# (model, layers, mesh, how parameters are stored, whether they are gathered again, options)
_Stored = tuple[str, int, str, dict[str, str], bool, dict[str, object]]
_SPLIT: dict[str, str] = {"dp": "S(0)"}
STORED: list[_Stored] = [
    ("llama", 3, "2", _SPLIT, True, {"precision": MIXED}),
]
STORED_TOO: list[_Stored] = [
    ("llama", 3, "2x2", {"dp": "I"}, True, {"optimizer": "sgd"}),
    *(("llama", 8, "dp4", _SPLIT, again, {"optimizer": "sgd"}) for again in (True, False)),
    ("llama", 8, "2", {"dp": "I"}, True, {"optimizer": "sgd", "precision": MIXED}),
    ("llama", 8, "2x2", {"dp": "I"}, True, {"optimizer": "sgd", "precision": MIXED}),
    ("llama", 3, "2x2", {"dp": "I", "tp": "S(0)"}, True, {}),
    ("llama", 3, "2x2", _SPLIT, False, {"precision": MIXED}),
    *(("llama", 8, "2", _SPLIT, True, {"optimizer": "sgd", "recompute": level}) for level in ("selective", "full")),
    ("llama", 8, "2", _SPLIT, False, {"objective": "infer"}),
    *(("gpt2", 8, "dp4", _SPLIT, again, {"optimizer": "adamw"}) for again in (True, False)),
    ("gpt2", 3, "dp4", {"dp": "I"}, False, {"optimizer": "adamw"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layers", "mesh", "stored", "again", "options"),
    [*STORED, *STORED_TOO],
)
def test_data_axes(
    name: str, layers: int, mesh: str, stored: dict[str, str], again: bool, options: dict[str, object]
) -> None:
    """Parameters that the engine gathers, reduces and keeps, on the engine itself."""
    model = MODELS[name](**{"n_layer" if name == "gpt2" else "num_hidden_layers": layers})
    inputs = tokens(8, 8, labels=options.get("objective") != "infer")
    with Spy(again) as spy:
        _check(model, mesh, inputs, constraints=storage(**stored), **options)
    assert len(spy.seen[0].units.units) > layers


# (model, layers, mesh, how parameters are stored, ZeRO stage, micro-batches, whether they are gathered again, options)
_Travel = tuple[str, int, str, dict[str, str], int, int, bool, dict[str, object]]
TRAVELS: list[_Travel] = [
    ("llama", 3, "2x2", {"dp": "I"}, 2, 2, False, {}),
]
TRAVELS_TOO: list[_Travel] = [
    ("llama", 3, "2", _SPLIT, 1, 2, False, {"precision": MIXED}),
    *(
        ("llama", 7, mesh, stored, stage, count, stage == 3, options)
        for mesh in ("2", "dp4", "2x2")
        for stored in (_SPLIT, {"dp": "I"})
        for stage in (1, 2, 3)
        for count in (1, 2, 4)
        for options in ({"optimizer": "sgd"}, {"precision": MIXED})
    ),
    *(
        ("gpt2", 7, "2x2", {"dp": "I", "tp": "S(0)"}, stage, count, again, options)
        for stage in (1, 2)
        for count in (2, 4)
        for again, options in ((False, {}), (True, {}), (True, {"precision": MIXED, "recompute": "full"}))
    ),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "layers", "mesh", "stored", "stage", "count", "again", "options"),
    [*TRAVELS, *(pytest.param(*case, marks=pytest.mark.slow) for case in TRAVELS_TOO)],
)
def test_what_stays_between_micro_batches(
    name: str,
    layers: int,
    mesh: str,
    stored: dict[str, str],
    stage: int,
    count: int,
    again: bool,
    options: dict[str, object],
) -> None:
    """Gathered parameters, and gradients that are still to be reduced."""
    model = MODELS[name](**{"n_layer" if name == "gpt2" else "num_hidden_layers": layers})
    with Spy(again, stage) as spy:
        _check(model, mesh, tokens(8, 8), constraints=storage(**stored), **{"micro_batches": count, **options})
    assert len(spy.seen[0].units.units) > layers


def _vit() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = transformers.ViTConfig(**SMALL, image_size=32, patch_size=8, hidden_dropout_prob=0.1)
    inputs = {"pixel_values": torch.zeros(8, 3, 32, 32), "labels": torch.zeros(8, dtype=torch.long)}
    return transformers.ViTForImageClassification(config), inputs


def _bert() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, vocab_size=64)), tokens()


@pytest.mark.slow
@pytest.mark.parametrize("make", [_vit, _bert])
@pytest.mark.parametrize("mesh", ["2", "2x2"])
def test_other_families(make, mesh: str) -> None:
    """Convolutions, dropout, encoders."""
    model, inputs = make()
    _check(model, mesh, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["2", "2x2"])
def test_on_other_devices(mesh: str) -> None:
    """A plan for CUDA counts whole blocks of its allocator and optimizers that handle all parameters together: never
    less than what is needed, and not much more."""
    for optimizer in ("adam", "adamw", "sgd", "sgd_momentum", "rmsprop", "adagrad"):
        model = MODELS["llama"](hidden_size=64)
        predicted, measured, _ = predicted_and_measured(
            model, MESHES[mesh], tokens(), cluster="h100", optimizer=optimizer
        )
        assert measured <= predicted <= 1.05 * measured + 2**20


@pytest.mark.long
def test_the_optimizer_has_the_peak() -> None:
    """Of many layers with few tokens on a CUDA device, in half precision: all gradients and as much again, and nothing
    of what they were reduced in."""
    model = MODELS["llama"](hidden_size=256, intermediate_size=512, num_hidden_layers=8)
    predicted, measured, planned = predicted_and_measured(
        model, {"dp": 2}, tokens(2, 8), cluster="h100", precision=MIXED, constraints={"*": {"stored": {"dp": "I"}}}
    )
    assert planned.plan.programs["train"].memory["communication buffers"] == 0
    assert measured <= predicted <= 1.01 * measured


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("adagrad", marks=pytest.mark.slow)])
def test_a_refusal_counts_what_the_optimizer_makes(optimizer: str) -> None:
    """The search counts the optimizer step as the simulator does: a plan keeps to the limit that it fills, and a
    smaller one is refused without anything set aside for what only the simulator counts."""
    model = MODELS["llama"](hidden_size=256, intermediate_size=512, num_hidden_layers=8)
    given = {"cluster": "h100", "optimizer": optimizer, "micro_batches": 1, "recompute": "none"}
    made = partial(autopar.plan, model, {"dp": 1}, tokens(2, 8), **given)
    memory = sum(made().programs["train"].memory.values())
    assert sum(made(memory_limit=memory).programs["train"].memory.values()) == memory
    with pytest.raises(InfeasibleError, match=r"are missing \((optimizer step|backward).* set aside 0 GiB\)"):
        made(memory_limit=0.99 * memory)


# How the fused projection of gate and up is stored, and options.
_FUSED: list[tuple[dict[str, str], dict[str, object]]] = [
    ({"dp": "S(1)", "tp": "S(1, 2)"}, {"precision": MIXED}),
    ({"dp": "S(1)", "tp": "S(1, 2)"}, {"optimizer": "sgd", "micro_batches": 2}),
    ({"dp": "I", "tp": "S(1)"}, {"optimizer": "sgd"}),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("stored", "options"), [_FUSED[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in _FUSED[1:])]
)
def test_copies_in_other_layouts(stored: dict[str, str], options: dict[str, object]) -> None:
    """Parameters that all-to-alls turn before they are gathered: the copy stays."""
    constraints = {"*.gate_up_proj.weight": {"stored": stored, "used": {"dp": "R", "tp": "S(0, 2)"}}}
    with Spy(again=False) as spy:
        _check(phi3(num_hidden_layers=3), "2x2", tokens(8, 8), constraints=constraints, **options)
    assert any(group.turned for group in spy.seen[0].units.units)


@pytest.mark.long
@pytest.mark.parametrize("limit", [1, pytest.param(30_000, marks=pytest.mark.slow), 2**20])
def test_reductions_in_batches(limit: int) -> None:
    """Gradients that are reduced where they are, in tensors with those of other units: one by one, some, and all
    together."""
    model = MODELS["llama"](hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    with ExitStack() as stack:
        for module in (fsdp_units, reductions):
            stack.enter_context(mock.patch.object(module, "REDUCTION_BYTES", limit))
        _check(model, "2", tokens(length=8), optimizer="sgd", constraints=storage(dp="I"))
