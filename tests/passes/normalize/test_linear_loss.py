"""A linear layer and its cross entropy become one op where nothing else reads the logits, or stay as they are."""

import re
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from passes.constrain import is_named
from passes.ir.program import Op, Program, with_scalars_alone
from passes.normalize.linear_loss import with_linear_losses
from tests.models import gemma2, gpt2, llama, tokens
from tests.passes.helpers import Apply, normalized, op_lines
from tests.passes.normalize.running import run

CLASSES, WIDTH, LENGTH = 24, 6, 10
H, W, B = (
    torch.linspace(-1, 1, prod, dtype=torch.float64).sin().reshape(shape)
    for prod, shape in ((60 * 2, (2, LENGTH, WIDTH)), (CLASSES * WIDTH, (CLASSES, WIDTH)), (CLASSES, (CLASSES,)))
)
TURNED = W.T.contiguous()
Y = torch.arange(2 * LENGTH).reshape(2, LENGTH) % CLASSES
Y[0, :4] = -100

Function = Callable[[Tensor, Tensor], Tensor]


def _loss(logits: Tensor, labels: Tensor, **options: object) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, CLASSES), labels.reshape(-1), reduction="sum", **options)  # type: ignore[arg-type]


# By name: a loss, and the op that it becomes, as it prints.
JOINED: Mapping[str, tuple[Function, str]] = {
    "linear": (lambda h, y: _loss(F.linear(h, W), y), "(%reshape, W, %reshape)"),
    "a bias": (lambda h, y: _loss(F.linear(h, W, B), y), "(%reshape, W, %reshape, B)"),
    "a mean": (lambda h, y: _loss(F.linear(h, W), y) / (y != -100).sum(), "(%reshape, W, %reshape)"),
    "matmul": (lambda h, y: _loss(h @ W.T, y), "(%reshape, W, %reshape)"),
    "a matrix of width by classes": (lambda h, y: _loss(h @ TURNED, y), "transpose("),
    "addmm": (lambda h, y: _loss(torch.addmm(B, h.flatten(0, 1), W.T), y), "W, %reshape, B)"),
    "a soft cap": (
        lambda h, y: _loss(torch.tanh(F.linear(h, W) / 3.0) * 3.0, y),
        "(%reshape, W, %reshape, soft_cap=3.0)",
    ),
    "a scale in a soft cap": (
        lambda h, y: _loss(torch.tanh(F.linear(h, W) * 0.5) * 3.0, y),
        "(%reshape, W, %reshape, scale=1.5, soft_cap=3.0)",
    ),
    "a divisor": (lambda h, y: _loss(F.linear(h, W) / 8.0, y), "(%reshape, W, %reshape, scale=0.125)"),
    "another label": (lambda h, y: _loss(F.linear(h, W), y.clamp_min(0), ignore_index=3), "ignore_index=3)"),
    "a cast": (
        lambda h, y: _loss(F.linear(h.float(), W.float()).double(), y),
        "(%reshape, %to, %reshape, dtype=torch.float64)",
    ),
    "the last token dropped": (lambda h, y: _loss(F.linear(h, W)[:, :-1], y[:, 1:]), "(%reshape"),
    "tokens dropped on both sides": (lambda h, y: _loss(F.linear(h, W)[:, 2:7], y[:, :5]), "pad=[2, 3], value=-100.0)"),
    "samples dropped, and tokens": (lambda h, y: _loss(F.linear(h, W)[1:, :-3], y[1:, 3:]), "(%reshape"),
}
# By name: a loss that stays as it is written.
KEPT: Mapping[str, Function] = {
    "logits read": lambda h, y: (lambda logits: _loss(logits, y) + logits.logsumexp(-1).sum())(F.linear(h, W)),
    "smoothed labels": lambda h, y: _loss(F.linear(h, W), y, label_smoothing=0.1),
    "weights of classes": lambda h, y: _loss(F.linear(h, W), y, weight=B.abs()),
    "no sum": lambda h, y: F.cross_entropy(
        F.linear(h, W).reshape(-1, CLASSES), y.reshape(-1), reduction="none"
    ).square().sum(),
    "probabilities": lambda h, y: F.cross_entropy(F.linear(h[0], W), F.linear(h[1], W).softmax(-1), reduction="sum"),
    "another function": lambda h, y: _loss(F.linear(h, W).sin(), y),
    "two soft caps": lambda h, y: _loss((F.linear(h, W).tanh() * 2.0).tanh() * 3.0, y),
    "a negative soft cap": lambda h, y: _loss(F.linear(h, W).tanh() * -3.0, y),
    "every second token": lambda h, y: _loss(F.linear(h, W)[:, ::2], y[:, ::2]),
    "some classes": lambda h, y: F.cross_entropy(F.linear(h, W)[..., :20].reshape(-1, 20), y.reshape(-1) % 20,
                                                 reduction="sum"),
    "few classes": lambda h, y: F.cross_entropy(F.linear(h, W[:4]).reshape(-1, 4), y.reshape(-1).clamp(0, 3),
                                                reduction="sum"),
    "less precision": lambda h, y: _loss(F.linear(h, W).float(), y),
    "half precision": lambda h, y: _loss(F.linear(h.half(), W.half()).float(), y),
}  # fmt: skip


def _programs(function: Function) -> tuple[Program, Program]:
    """The program of a loss before and after the pass, both of which compute it."""
    before = normalized(Apply(lambda h, y: {"loss": function(h, y)}), h=H.clone().requires_grad_(), y=Y)
    after = with_linear_losses(before)
    for program in (before, after):
        (found,) = run(program, {"h": H, "y": Y})[0].values()
        assert isinstance(found, Tensor)
        torch.testing.assert_close(found, function(H, Y), rtol=1e-12, atol=1e-12)
    return before, after


@pytest.mark.parametrize("name", JOINED)
def test_a_linear_layer_and_its_loss_are_one_op(name: str) -> None:
    function, shown = JOINED[name]
    before, after = _programs(function)
    kinds = [op.kind for op in after.ops]
    assert "linear_cross_entropy" in kinds, op_lines(after)
    assert not {"linear", "matmul", "addmm", "cross_entropy_loss", "tanh"} & set(kinds), op_lines(after)
    text = _text(after)
    for constant, value in after.constants.items():
        text = text.replace(constant, {W.shape: "W", B.shape: "B"}.get(value.shape, constant))
    assert shown in text, text
    assert len({op.key for op in after.ops}) == len(after.ops) < len(before.ops) + 3


@pytest.mark.parametrize("name", KEPT)
def test_others_stay(name: str) -> None:
    before, after = _programs(KEPT[name])
    assert after is before


MODELS: Mapping[str, tuple[Callable[[], nn.Module], str]] = {
    "llama": (llama, "linear_cross_entropy(%reshape, lm_head.weight, %reshape)"),
    "gpt2, tied": (gpt2, "linear_cross_entropy(%reshape, transformer.wte.weight, %reshape)"),
    "gemma2": (gemma2, "linear_cross_entropy(%reshape, model.embed_tokens.weight, %reshape, soft_cap=30.0)"),
}


def _of(make: Callable[[], nn.Module]) -> Program:
    return normalized(make(), **tokens(), use_cache=False)


@pytest.mark.parametrize("name", MODELS)
def test_stock_models(name: str) -> None:
    """Models that return scalars alone get the op; where logits are returned, nothing changes."""
    make, shown = MODELS[name]
    program = _of(make)
    assert with_linear_losses(program) is program
    found = with_linear_losses(with_scalars_alone(program))
    assert shown in _text(found)
    assert "linear(" not in _text(found).partition("lm_head")[2]


def _text(program: Program) -> str:
    """The ops of a program, without the numbers of tensors."""
    return re.sub(r"%([a-z_]+?)_n?\d+", r"%\1", "\n".join(op_lines(program)))


def test_ops_that_constraints_name_stay() -> None:
    """And those that a caller keeps for other reasons."""
    program = with_scalars_alone(_of(llama))
    heads: list[Mapping[str, Mapping[str, Mapping[str, str]]]] = [
        {"lm_head": {"out": {"tp": "S(2)"}}},
        {"@cross_entropy_loss": {"method": {"tp": "classes"}}},
        {"*head/linear": {"method": {"tp": "out"}}},
    ]
    for constraints in heads:

        def is_kept(op: Op, named: Mapping[str, Mapping[str, Mapping[str, str]]] = constraints) -> bool:
            return is_named(op, named)

        assert with_linear_losses(program, is_kept) is program
    stored = {"lm_head.weight": {"stored": {"tp": "S(0)"}}}
    found = with_linear_losses(program, lambda op: is_named(op, stored))
    assert [op.key for op in found.ops if "cross_entropy" in op.kind] == ["/linear_cross_entropy"]
