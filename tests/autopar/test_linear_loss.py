"""A linear layer and its cross entropy as one op: losses and gradients on ranks are those of one device, whichever of
its methods axes have; logits are in no plan's memory."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.testing import LiftFloat32, compare, run_ranks
from tests.autopar.runtime.generated.largest import Largest
from tests.autopar.simulated import predicted_and_measured
from tests.models import gemma2, gpt2, llama

LOSS = "@linear_cross_entropy"


class LossAlone(nn.Module):
    """A model that returns its loss, with a frozen head if `frozen`."""

    def __init__(self, model: nn.Module, *, frozen: bool = False) -> None:
        super().__init__()
        self.model = model
        if frozen:
            model.lm_head.weight.requires_grad_(False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The loss alone."""
        return {"loss": self.model(input_ids=input_ids, labels=labels, use_cache=False).loss}


class Own(nn.Module):
    """A head with a bias, whose loss is of the tokens after the first two, a sum by a number."""

    def __init__(self, width: int = 16, classes: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(classes, width)
        self.head = nn.Linear(width, classes)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The loss of the last tokens."""
        logits = self.head(self.embed(input_ids).tanh())[:, 2:]
        wanted = labels[:, 2:].flatten()
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), wanted, reduction="sum") / 1000}


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "llama": lambda: LossAlone(llama(num_hidden_layers=1)),
    "gpt2, tied": lambda: LossAlone(gpt2(n_layer=1)),
    "gemma2, soft cap": lambda: LossAlone(gemma2(num_hidden_layers=2)),
    "llama, frozen head": lambda: LossAlone(llama(num_hidden_layers=1), frozen=True),
    "own, bias": Own,
}
# A model, the sizes of axes, the method of each, and the number of micro-batches.
Case = tuple[str, tuple[int, ...], tuple[str, ...], int]
TWO: Sequence[Case] = (
    ("gpt2, tied", (2,), ("classes",), 2),
    ("llama", (2,), ("tokens",), 1),
    ("own, bias", (2,), ("classes_at_once",), 1),
)
FOUR: Sequence[Case] = (
    ("llama", (2, 2), ("tokens", "classes"), 2),
    ("llama", (4,), ("tokens@4",), 1),
    ("gpt2, tied", (2, 2), ("tokens_at_once", "classes_at_once"), 1),
    ("gpt2, tied", (4,), ("classes",), 4),
    ("gemma2, soft cap", (2, 2), ("tokens", "classes"), 1),
    ("gemma2, soft cap", (2, 2), ("classes", "tokens@4"), 2),
    ("llama, frozen head", (2, 2), ("tokens", "classes"), 2),
    ("llama, frozen head", (2, 2), ("tokens_at_once", "tokens_at_once"), 1),
    ("own, bias", (2, 2), ("tokens", "classes"), 1),
    ("own, bias", (2, 2), ("classes", "classes"), 2),
)


def _batch(ignored: str = "some") -> dict[str, Tensor]:
    """Eight samples of which labels are ignored, as many as make the number uneven: of whole samples and chunks."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 64, (8, 16), generator=generator)
    labels = ids.clone()
    labels[0, :9] = labels[3] = labels[5, 4:] = -100
    return {"input_ids": ids, "labels": torch.full_like(labels, -100) if ignored == "all" else labels}


def _compared(cases: Sequence[Case]) -> None:
    with LiftFloat32(torch.float64):
        for name, sizes, methods, micro_batches in cases:
            _equal(MODELS[name]().double(), sizes, methods, micro_batches)


def _equal(model: nn.Module, sizes: tuple[int, ...], methods: tuple[str, ...], micro_batches: int) -> None:
    axes = ("a", "b")[: len(sizes)]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    constraints = {LOSS: {"method": dict(zip(axes, methods, strict=True))}}
    options: dict[str, Any] = {"cluster": "ideal", "micro_batches": micro_batches, "constraints": constraints}
    batch = _batch()
    found = autopar.parallelize(model, mesh, batch, **options)
    for ignored in ("some", "all"):
        given = _batch(ignored)
        expected = model(**given)["loss"]
        expected.backward()
        own = found.forward_backward(**given)["loss"]
        torch.testing.assert_close(_whole(own), expected.detach(), rtol=1e-12, atol=1e-12, equal_nan=True)
        parameters = dict(found.named_parameters())
        for key, parameter in model.named_parameters():
            if parameter.requires_grad:
                gradient = _whole(parameters[key].grad)
                torch.testing.assert_close(gradient, parameter.grad, rtol=1e-9, atol=1e-12, equal_nan=True)
                parameter.grad = parameters[key].grad = None
    found.eval()
    with torch.no_grad():
        torch.testing.assert_close(_whole(found(**batch)["loss"]), model.eval()(**batch)["loss"], rtol=1e-12, atol=0)
    model.train()


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach()


@pytest.mark.long
def test_two_ranks() -> None:
    """Classes split; micro-batches; labels that are all ignored; evaluation."""
    run_ranks(_compared, 2, TWO[:1])


@pytest.mark.slow
def test_other_methods_on_two_ranks() -> None:
    """Tokens split, and logits at once."""
    run_ranks(_compared, 2, TWO[1:])


@pytest.mark.slow
def test_four_ranks() -> None:
    """The same on two axes, and of other heads."""
    run_ranks(_compared, 4, FOUR)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_one_rank(name: str) -> None:
    """In chunks, without any axis."""
    run_ranks(_compared, 1, [(name, (1,), ("R",), 1)])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_in_pipelines(schedule: str) -> None:
    """In the last stage, whose weight gradients other schedules defer."""
    options: dict[str, Any] = {"pipeline": autopar.Pipeline(axis="pp", schedule=schedule), "micro_batches": 2}
    found = compare(
        LossAlone(gpt2(n_layer=4)), {"pp": 2, "dp": 2}, _batch(), lifted=True, cluster="ideal",
        constraints=_forced(dp="tokens"), **options,
    )  # fmt: skip
    assert found.worst[1] < 1e-9


@pytest.mark.slow
def test_sharded_parameters() -> None:
    """ZeRO-3 and full recompute."""
    options: dict[str, Any] = {"zero": 3, "recompute": "full", "constraints": _forced(dp="tokens")}
    model = LossAlone(llama(num_hidden_layers=2))
    found = compare(model, {"dp": 4}, _batch(), lifted=True, cluster="ideal", micro_batches=2, **options)
    assert found.worst[1] < 1e-9


def _wide(tokens: int = 512) -> dict[str, Tensor]:
    """Tokens of a vocabulary that is much larger than their width."""
    ids = torch.zeros(tokens // 32, 32, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def _forced(**methods: str) -> dict[str, dict[str, dict[str, str]]]:
    return {LOSS: {"method": methods}}


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"dp": 2}, {"constraints": _forced(dp="tokens")}),
        *(
            pytest.param(mesh, options, marks=pytest.mark.slow)
            for mesh, options in (
                ({"dp": 2, "tp": 2}, {"constraints": _forced(dp="tokens", tp="classes"), "micro_batches": 2}),
                ({"dp": 2, "tp": 2}, {"constraints": _forced(dp="tokens_at_once", tp="classes_at_once")}),
                ({"dp": 2}, {"zero": 3, "precision": autopar.Precision(compute=torch.bfloat16)}),
                ({"dp": 2}, {"constraints": {"@cross_entropy_loss": {"method": {"dp": "tokens"}}}}),
            )
        ),
    ],
)
def test_memory_is_as_planned(mesh: dict[str, int], options: dict[str, Any]) -> None:
    """Byte by byte."""
    given = {"micro_batches": 1, "recompute": "none", "cluster": "ideal", "outputs": "scalars", **options}
    model = llama(num_hidden_layers=1, vocab_size=512)
    predicted, measured, _ = predicted_and_measured(model, mesh, _wide(), **given)
    assert predicted == measured


@pytest.mark.slow
def test_plans_have_no_logits() -> None:
    """In chunks the peak is below the logits alone; where classes are split, too. Whole logits are there where an axis
    has that method, and where a constraint names the linear layer both ops stay."""
    model, batch = llama(num_hidden_layers=1, vocab_size=4096), _wide()
    logits = 512 // 2 * 4096 * 4
    options: dict[str, Any] = {"cluster": "h100", "outputs": "scalars", "micro_batches": 1, "optimizer": "sgd"}
    peaks = {}
    for name, constraints in (
        ("tokens", _forced(dp="tokens")),
        ("classes", _forced(dp="classes")),
        ("tokens_at_once", _forced(dp="tokens_at_once")),
        ("two ops", {"lm_head/linear": {"method": {"dp": "d0"}}}),
    ):
        plan = autopar.plan(model, {"dp": 2}, batch, constraints=constraints, **options)
        peaks[name] = sum(plan.programs["train"].memory.values())
        assert ("/linear_cross_entropy" in str(plan)) == (name != "two ops")
        again = autopar.plan(model, {"dp": 2}, batch, plan=plan)
        assert again.programs == plan.programs, name
    assert peaks["tokens"] < logits < peaks["tokens_at_once"] < peaks["two ops"]
    assert peaks["classes"] < peaks["tokens_at_once"]


@pytest.mark.slow
def test_chunks_where_memory_binds() -> None:
    """The planner takes whole logits where these are faster, and chunks where they do not fit."""
    model, batch = llama(num_hidden_layers=1, vocab_size=4096, dtype=torch.bfloat16), _wide(4096)
    options: dict[str, Any] = {"cluster": "h100", "outputs": "scalars", "micro_batches": 1}
    methods = {}
    for limit in (1.0, 60 * 2**20 / 80e9):
        plan = autopar.plan(model, {"dp": 2}, batch, memory_limit=limit * 80e9, **options)
        (methods[limit],) = {
            row.how for block in plan.programs["train"].stages[0].blocks for row in block.rows
            if row.name == "/linear_cross_entropy" and row.kind == "op"
        }  # fmt: skip
    found = [how.partition(" (")[0].partition("@")[0] for how in methods.values()]
    assert found == ["dp tokens_at_once", "dp tokens"]


def _largest() -> int:
    """Bytes of the largest tensor that a step of a planned module makes."""
    model = LossAlone(llama(num_hidden_layers=1, vocab_size=2048))
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    module = autopar.parallelize(model, mesh, _wide(), cluster="cpu", micro_batches=1)
    with Largest() as largest:
        module.forward_backward(**_wide())
    return largest.bytes


def test_a_step_makes_no_logits() -> None:
    """Nothing is larger than the table, which has 2,048 rows; there are 512 tokens, of 32 elements as well."""
    (found,) = run_ranks(_largest, 1)
    assert found <= 2048 * 32 * 4 < 512 * 2048 * 4
