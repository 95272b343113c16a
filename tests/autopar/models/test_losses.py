"""A loss outside of the model: planned with it, equal to one device, and refused where it cannot be."""

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.models.fingerprint import callable_fingerprint
from autopar.models.losses import with_loss
from autopar.testing import LiftFloat32, compare_on_mesh, run_ranks
from tests.autopar.models import test_losses as test_loss
from tests.models import Stack, llama, tokens

Loss = Callable[..., object]


def next_token(output: Any, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """The cross entropy of logits and tokens."""
    logits = output.logits.flatten(0, 1).float()
    return nn.functional.cross_entropy(logits, targets.flatten(), label_smoothing=smoothing)


class Weighted:
    """A callable object that holds weights of classes."""

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights

    def __call__(self, output: Any, targets: Tensor) -> Tensor:
        """The weighted sum of the losses of all tokens."""
        logits = output.logits.flatten(0, 1).float()
        losses = nn.functional.cross_entropy(logits, targets.flatten(), reduction="none")
        return (losses * self.weights[targets.flatten()]).sum() / 64


class Bare(nn.Module):
    """Logits alone, as a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(8, 16)
        self.head = nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 8]."""
        return self.head(self.up(x).relu())


def batch(size: int = 4) -> dict[str, Tensor]:
    """Tokens, and the next ones under a name that the model does not take."""
    ids = tokens(batch=size, labels=False)["input_ids"]
    targets = ids.roll(-1, 1)
    targets[0, :3] = -100
    return {"input_ids": ids, "targets": targets}


def _equal(cases: list[tuple[Loss, tuple[int, ...], Mapping[str, object]]]) -> list[tuple[str, float, list[str]]]:
    found = []
    for loss, sizes, options in cases:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[-len(sizes) :])
        inputs = {"input_ids": batch()["input_ids"], "targets": batch()["input_ids"].roll(-1, 1)}
        if loss is next_token:
            inputs = batch()
        given = {"cluster": "ideal", "loss": loss, **options}
        with LiftFloat32(torch.float64):
            comparison = compare_on_mesh(llama().double(), mesh, inputs, torch.float64, **given)
        found.append((*comparison.worst, sorted(comparison.errors)))
    return found


VOCABULARY = {"lm_head": {"out": {"tp": "S(2)"}}, "@cross_entropy_loss": {"method": {"tp": "classes"}}}
FAST: list[tuple[Loss, tuple[int, ...], Mapping[str, object]]] = [
    (functools.partial(next_token, smoothing=0.1), (2, 2), {"outputs": "full"}),
]
SLOW: list[tuple[Loss, tuple[int, ...], Mapping[str, object]]] = [
    (next_token, (2, 2), {"constraints": VOCABULARY}),
    (next_token, (4,), {}),
    (next_token, (2, 2), {"micro_batches": 2}),
    (Weighted(torch.linspace(0.5, 1.5, 64, dtype=torch.float64)), (2, 2), {"micro_batches": 2, "recompute": "full"}),
    (Weighted(torch.linspace(0.5, 1.5, 64, dtype=torch.float64)), (4,), {}),
]


@pytest.mark.long
@pytest.mark.parametrize("cases", [FAST, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["fast", "slow"])
def test_equal_to_one_device(cases: list[tuple[Loss, tuple[int, ...], Mapping[str, object]]]) -> None:
    """The loss, the output and every gradient."""
    for (worst, error, names), case in zip(run_ranks(_equal, 4, cases)[0], cases, strict=True):
        assert error <= 1e-9, (case, worst, error)
        assert "gradient of lm_head.weight" in names


def _training() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, inputs = llama().double(), batch()
    before = copy.deepcopy(model.state_dict())
    with LiftFloat32(torch.float64):
        dist_model = autopar.parallelize(
            model, mesh, inputs, cluster="ideal", loss=next_token, micro_batches=2, constraints=VOCABULARY
        )
        assert list(dict(dist_model.named_parameters())) == list(dict(model.named_parameters()))
        assert list(dist_model.state_dict()) == list(model.state_dict())
        for size in (4, 8):
            # The second batch is of another size than planned.
            output = dist_model.forward_backward(**batch(size))
            expected = with_loss(model, next_token)(**batch(size))
            expected.loss.backward()
            assert type(output) is autopar.LossOutput
            assert torch.allclose(output.loss, expected.loss, rtol=1e-12)
            assert isinstance(output.output.logits, DTensor)
        for name, parameter in model.named_parameters():
            own = dist_model.get_parameter(name).grad
            assert isinstance(own, DTensor)
            assert parameter.grad is not None
            assert torch.allclose(own.full_tensor(), parameter.grad, rtol=1e-9, atol=1e-12), name
        # The model is what it was, and has no loss.
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert "forward" not in vars(model)
        dist_model.eval()
        with torch.no_grad():
            evaluated = dist_model(**inputs)
            expected = with_loss(model.eval(), next_token)(**inputs)
            assert torch.allclose(evaluated.loss, expected.loss, rtol=1e-12)
            without = dist_model(input_ids=inputs["input_ids"])
            assert without.loss is None
            assert torch.allclose(without.output.logits.full_tensor(), expected.output.logits, rtol=1e-9, atol=1e-12)


@pytest.mark.long
def test_training() -> None:
    """Micro-batches, other sizes, and evaluation with and without targets; parameters keep the model's names."""
    run_ranks(_training, 4)


def test_the_loss_is_split_over_the_vocabulary() -> None:
    """As the model's own cross entropy is: no device has all logits of a token."""
    plan = autopar.plan(llama(), {"tp": 4}, batch(), cluster="ideal", loss=next_token, constraints=VOCABULARY)
    rows = [row for block in plan.programs["train"].stages[0].blocks for row in block.rows]
    (cross_entropy,) = [row for row in rows if row.kind == "op" and row.name.endswith("/cross_entropy_loss")]
    assert cross_entropy.before[0] == "tp S(1)"
    assert not [row for row in rows if row.kind == "change" and row.name.endswith("lm_head/linear")]
    assert plan.programs["train"].stages[0].decisions["output output.logits"] == ("S(2)",)
    assert "with a loss outside of the model" in str(plan)


def test_modules_and_functions_of_torch_are_losses() -> None:
    """The output goes to their first argument, whatever its name."""
    inputs = {"x": torch.randn(4, 8), "target": torch.randint(0, 32, (4,))}
    for loss in (nn.CrossEntropyLoss(), nn.functional.cross_entropy, nn.CrossEntropyLoss(weight=torch.rand(32))):
        plan = autopar.plan(Bare(), {"dp": 2}, inputs, cluster="ideal", loss=loss)
        names = list(plan.programs["train"].stages[0].decisions)
        assert {"output loss", "output output"} <= set(names)


def test_arguments_go_where_they_are_named() -> None:
    """A name in both signatures goes to both; a loss whose arguments are left out is None."""

    def both(output: Mapping[str, Tensor], target: Tensor, scale: float = 2.0) -> Tensor:
        return scale * output["loss"] + target.sum()

    model = Stack()
    joined, inputs = with_loss(model, both), {"x": torch.ones(2, 16), "target": torch.ones(2, 16)}
    own = model(**inputs)
    found = joined(**inputs, scale=3.0)
    assert torch.equal(found.loss, 3 * own["loss"] + 32)
    assert torch.equal(found.output["loss"], own["loss"])
    assert torch.equal(joined(*inputs.values()).loss, 2 * own["loss"] + 32)
    bare = with_loss(Bare(), lambda output, target: output.sum() + target)
    assert bare(x=torch.ones(2, 8)).loss is None
    assert with_loss(model, None) is model


# --- what is refused --------------------------------------------------------------------------------------------------

_SCALE = nn.Parameter(torch.ones(()))


def _trainable() -> dict[str, Loss]:
    head = nn.Linear(32, 1)
    return {
        "closure": lambda output, target: head(output).sum(),
        "global": lambda output, target: _SCALE * output.sum(),
        "module of one's own": lambda output, target: test_loss._SCALE * output.sum(),
        "default": lambda output, target=_SCALE: output.sum() * target,
        "partial": functools.partial(
            lambda output, scale: output.sum() * scale, scale=torch.ones(1, requires_grad=True)
        ),
        "object": Weighted(_SCALE),
        "module": nn.Sequential(nn.Linear(32, 1)),
    }


@pytest.mark.parametrize("name", _trainable())
def test_parameters_inside_are_refused(name: str) -> None:
    """Parameters inside a loss are refused at any depth, and the error gives their name there."""
    with pytest.raises(autopar.CaptureError, match=r"refers to the parameter or trainable tensor \S+: a loss"):
        with_loss(Bare(), _trainable()[name])


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (
            lambda output, target: output,
            autopar.CaptureError,
            r"the loss returns a tensor of shape \[4, 32\] and torch.fl",
        ),
        (
            lambda output, target: {"loss": output.sum()},
            autopar.CaptureError,
            "the loss returns {'loss': .*must return a",
        ),
        (
            lambda output, target: output.argmax(),
            autopar.CaptureError,
            r"the loss returns a tensor of shape \[\] and torch.in",
        ),
        (lambda: 0, autopar.InputError, "loss must take the model's output as its first argument"),
        (lambda *, output: 0, autopar.InputError, "loss must take the model's output as its first argument"),
        ("mse", autopar.InputError, "loss is 'mse': give a callable"),
        (lambda output, labels: 0, autopar.InputError, "the loss needs labels: add it to example_inputs"),
    ],
    ids=["logits", "dict", "integer", "no argument", "by name", "text", "missing"],
)
def test_what_is_no_loss_is_refused(loss: Any, error: type[Exception], message: str) -> None:
    """By what it returns, or takes."""
    inputs = {"x": torch.randn(4, 8), "target": torch.randint(0, 32, (4,))}
    if message.endswith("example_inputs"):
        del inputs["target"]
    with pytest.raises(error, match=message) as caught:
        autopar.plan(Bare(), {"dp": 2}, inputs, cluster="ideal", loss=loss)
    assert "\n" not in str(caught.value)


def test_a_plan_belongs_to_its_loss() -> None:
    """It is replayed with the same loss only: its code and what it holds."""
    inputs = {"x": torch.randn(4, 8), "target": torch.randint(0, 32, (4,))}
    options: dict[str, Any] = {"cluster": "ideal"}

    def planned(**given: Any) -> autopar.Plan:
        return autopar.plan(Bare(), {"dp": 2}, inputs if "loss" in given else {"x": inputs["x"]}, **options, **given)

    plan = planned(loss=nn.CrossEntropyLoss())
    assert autopar.Plan.from_json(plan.to_json()) == plan
    assert planned(plan=plan, loss=nn.CrossEntropyLoss()) == plan
    for loss, message in (
        (None, "made with a loss outside of the model: pass the same one"),
        (nn.CrossEntropyLoss(label_smoothing=0.1), "made with another loss=: its code, or a value that it holds"),
    ):
        with pytest.raises(autopar.PlanMismatchError, match=message):
            planned(plan=plan, loss=loss)
    with pytest.raises(autopar.PlanMismatchError, match="the plan was made without one"):
        planned(plan=planned(), loss=nn.CrossEntropyLoss())


def made(scale: float) -> Loss:
    """A loss with a number in its closure."""
    return lambda output, target: scale * nn.functional.cross_entropy(output, target)


def test_fingerprints_of_losses() -> None:
    """Equal for equal code and values, whoever made them; different otherwise."""
    same = [
        (made(1.0), made(1.0)),
        (functools.partial(next_token, smoothing=0.1), functools.partial(next_token, smoothing=0.1)),
        (nn.CrossEntropyLoss(weight=torch.ones(4)), nn.CrossEntropyLoss(weight=torch.ones(4))),
        (Weighted(torch.ones(4)), Weighted(torch.ones(4))),
        (Weighted(torch.ones(4)).__call__, Weighted(torch.ones(4)).__call__),
    ]
    different: list[Loss] = [
        made(1.0),
        made(2.0),
        next_token,
        functools.partial(next_token, smoothing=0.1),
        functools.partial(next_token, smoothing=0.2),
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(weight=torch.ones(4)),
        nn.CrossEntropyLoss(weight=torch.zeros(4)),
        nn.CrossEntropyLoss(ignore_index=0),
        Weighted(torch.ones(4)),
        Weighted(torch.zeros(4)),
        lambda output, target: output.sum(),
        lambda output, target: output.mean(),
        lambda output, target: output.sum() * 2,
        lambda output, target=1: output.sum() * 2,
    ]
    assert all(callable_fingerprint(one) == callable_fingerprint(other) for one, other in same)
    # Where the code stands does not count: a loss may be planned in one script, and used in another.
    scripts: list[dict[str, Any]] = [{"__name__": "__main__"}, {"__name__": "train"}]
    for names in scripts:
        exec("def helper(x):\n    return x.sum()\ndef loss(output, target):\n    return helper(output) * 2", names)
    assert callable_fingerprint(scripts[0]["loss"]) == callable_fingerprint(scripts[1]["loss"])
    assert len({callable_fingerprint(loss) for loss in different}) == len(different)


def _different() -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    inputs = {"x": torch.zeros(4, 8), "target": torch.zeros(4, dtype=torch.int64)}
    with pytest.raises(autopar.PlanMismatchError) as caught:
        autopar.parallelize(Bare(), mesh, inputs, cluster="ideal", loss=made(1.0 + mesh.get_rank()))
    with pytest.raises(autopar.CaptureError, match="the loss returns None") as refused:
        autopar.parallelize(Bare(), mesh, inputs, cluster="ideal", loss=lambda output, target: None)
    return f"{caught.value} {refused.value}"


def test_different_losses_are_refused_on_all_ranks() -> None:
    """With the rank; and a loss that is none is refused everywhere."""
    messages = run_ranks(_different, 2)
    assert len(set(messages)) == 1
    assert "ranks pass different losses: the code of the one on rank 1" in messages[0]
