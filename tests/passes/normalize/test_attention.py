"""Attention that is written out becomes one op, or stays as it is."""

from collections.abc import Callable, Mapping
from itertools import product
from math import prod

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import FalconConfig, FalconForCausalLM, MptConfig, MptForCausalLM

from passes.ir.arguments import Ref
from passes.ir.program import Program
from tests.autopar.comparing import marked
from tests.models import bloom, gemma2, gpt_oss, llama, t5, tokens
from tests.passes.helpers import Apply, normalized, op_lines
from tests.passes.normalize.running import run

LENGTH, HEADS = 8, 4
X = torch.linspace(-1, 1, 2 * HEADS * LENGTH * 6, dtype=torch.float64).reshape(2, HEADS, LENGTH, 6).sin()
LEAST, OTHER = torch.finfo(torch.float64).min, torch.finfo(torch.float32).min


def _causal() -> Tensor:
    places = torch.arange(LENGTH)
    return places <= places[:, None]


def _mask() -> Tensor:
    return torch.where(_causal(), torch.zeros((), dtype=torch.float64), LEAST)


def _window() -> Tensor:
    places = torch.arange(LENGTH)
    return torch.where(_causal() & (places[:, None] - places < 3), torch.zeros((), dtype=torch.float64), LEAST)


def _shifted(scores: Tensor, x: Tensor) -> Tensor:
    return _weighted(scores - scores.amax(-1, keepdim=True), x)


def _twice(weights: Tensor, x: Tensor) -> Tensor:
    return weights @ x + weights.sum()


def _weighted(scores: Tensor, x: Tensor) -> Tensor:
    return scores.softmax(-1) @ x


def _doubled(x: Tensor) -> Tensor:
    return x[:, :2, None].expand(2, 2, 2, LENGTH, 6).reshape(2, HEADS, LENGTH, 6)


Function = Callable[[Tensor], Tensor]
# By name: attention that is written out, and the op that it becomes, as it prints.
FUSED: Mapping[str, tuple[Function, str]] = {
    "scaled": (lambda x: _weighted(x @ x.mT / 2.0, x), "(x, x, x, scale=0.5)"),
    "scaled before": (lambda x: _weighted((x * 0.5) @ x.mT, x), "(%mul, x, x, scale=1.0)"),
    "causal": (lambda x: _weighted(x @ x.transpose(2, 3) + _mask(), x), "(x, x, x, is_causal=True, scale=1.0)"),
    "filled": (
        lambda x: _weighted((x @ x.mT).masked_fill(~_causal(), LEAST), x),
        "(x, x, x, is_causal=True, scale=1.0)",
    ),
    "chosen": (
        lambda x: _weighted(torch.where(_causal(), x @ x.mT, LEAST) * 0.5, x),
        "(x, x, x, is_causal=True, scale=0.5)",
    ),
    "in a window": (
        lambda x: _weighted(x @ x.mT + _window(), x),
        "(x, x, x, is_causal=True, scale=1.0, window=[2, 0])",
    ),
    "a triangle": (
        lambda x: _weighted(x @ x.mT + torch.full((LENGTH, LENGTH), LEAST, dtype=x.dtype).triu(1), x),
        "(x, x, x, is_causal=True, scale=1.0)",
    ),
    "in another dtype": (
        lambda x: ((x @ x.mT).softmax(-1, dtype=torch.float32).to(x.dtype)) @ x,
        "(x, x, x, scale=1.0)",
    ),
    "minus the largest": (
        lambda x: _shifted(x @ x.mT, x),
        "(x, x, x, scale=1.0)",
    ),
    "of groups": (
        lambda x: _weighted(x @ _doubled(x).mT, _doubled(x)),
        "(x, %slice_n0, %slice_n0, scale=1.0, enable_gqa=True)",
    ),
    "plus zeros": (
        lambda x: _weighted(x @ x.mT + torch.zeros(LENGTH, LENGTH, dtype=x.dtype) + _mask(), x),
        "(x, x, x, is_causal=True, scale=1.0)",
    ),
    "heads and samples in one dim": (
        lambda x: torch.bmm(
            (torch.bmm(x.flatten(0, 1), x.flatten(0, 1).mT).view(2, HEADS, LENGTH, LENGTH) + _mask())
            .view(2 * HEADS, LENGTH, LENGTH).softmax(-1),
            x.flatten(0, 1),
        ),
        "(x, x, x, is_causal=True, scale=1.0)",
    ),
    "an einsum": (
        lambda x: torch.einsum("bhqk,bhkd->bqhd", torch.einsum("bhqd,bhkd->bhqk", x, x).softmax(-1), x),
        "(x, x, x, scale=1.0)",
    ),
}  # fmt: skip
CHUNKED: Mapping[str, tuple[Function, str]] = {
    "a soft cap": (
        lambda x: _weighted(torch.tanh(x @ x.mT * 0.5 / 3.0) * 3.0 + _mask(), x),
        "(x, x, x, is_causal=True, scale=0.5, soft_cap=3.0)",
    ),
    "a sink": (
        lambda x: torch.cat([x @ x.mT, x[:1, :, :1, :1].expand(2, HEADS, LENGTH, 1)], -1).softmax(-1)[..., :-1] @ x,
        "(x, x, x, %slice_n3, scale=1.0)",
    ),
    "a bias and zeros": (
        lambda x: _weighted(x @ x.mT + x[:1, :, :1, :1] * torch.arange(LENGTH) + torch.zeros(LENGTH, LENGTH), x),
        "(x, x, x, %mul, scale=1.0)",
    ),
    "a bias of keys": (
        lambda x: _weighted(x @ x.mT + x[:1, :, :1, :1] * torch.arange(LENGTH) + _mask(), x),
        "(x, x, x, %mul, is_causal=True, scale=1.0)",
    ),
}
# Of these nothing is one op.
LEFT: Mapping[str, Function] = {
    "weights that are returned": lambda x: _twice((x @ x.mT).softmax(-1), x),
    "dropout": lambda x: F.dropout((x @ x.mT).softmax(-1), 0.5) @ x,
    "another dim": lambda x: (x @ x.mT).softmax(-2) @ x,
    "scores that are read elsewhere": lambda x: _twice((scores := x @ x.mT).softmax(-1) + scores, x),
    "a sink with a value": lambda x: torch.cat([x @ x.mT, x[..., :1]], -1).softmax(-1) @ torch.cat([x, x[:, :, :1]], 2),
    "another function of scores": lambda x: (x @ x.mT).sigmoid().softmax(-1) @ x,
}  # fmt: skip


def _compared(program: Program, function: Function) -> None:
    """The program computes what the function does, and its gradient."""
    x = X.clone().requires_grad_()
    found = next(iter(run(program, {"x": x})[0].values()))
    assert isinstance(found, Tensor)
    expected = function(x)
    cotangent = torch.ones_like(expected).cumsum(-1).sin()
    torch.testing.assert_close(found, expected, rtol=1e-6 if "float32" in str(program) else 1e-12, atol=1e-7)
    own, other = (torch.autograd.grad(each, x, cotangent)[0] for each in (found, expected))
    torch.testing.assert_close(own, other, rtol=1e-6 if "float32" in str(program) else 1e-10, atol=1e-7)


def _attentions(program: Program) -> list[str]:
    return [line.split(" = ")[1] for line in op_lines(program) if "attention(" in line]


@pytest.mark.parametrize("name", [*FUSED, *CHUNKED])
def test_attention_is_one_op(name: str) -> None:
    """And computes the same."""
    kind = "scaled_dot_product_attention" if name in FUSED else "chunked_attention"
    function, expected = {**FUSED, **CHUNKED}[name]
    program = normalized(Apply(function), x=X.requires_grad_())
    assert _attentions(program) == [f"{kind}{expected}"]
    _compared(program, function)


@pytest.mark.parametrize("name", LEFT)
def test_other_products_stay(name: str) -> None:
    assert _attentions(normalized(Apply(LEFT[name]), x=X)) == []


def test_a_padding_mask() -> None:
    """Queries without keys attend to all alike: in chunks, with a row of flags, forward and in gradients."""

    def function(x: Tensor, lengths: Tensor, causal: bool) -> Tensor:
        row = (torch.arange(LENGTH) >= lengths[:, None])[:, None, None]
        seen = row & _causal() if causal else row.expand(2, 1, LENGTH, LENGTH)
        return _weighted(x @ x.mT + torch.where(seen, torch.zeros((), dtype=x.dtype), LEAST), x)

    lengths = torch.tensor([3, 0])
    for causal in (False, True):
        program = normalized(Apply(function), x=X.requires_grad_(), lengths=lengths, causal=causal)
        (op,) = [op for op in program.ops if op.kind == "chunked_attention"]
        assert program.types[str(op.arguments["attn_mask"])].shape == (2, 1, 1, LENGTH)
        assert not any(type.shape[-2:] == (LENGTH, LENGTH) for type in program.types.values())
        _equal(program, lambda x, lengths, causal=causal: function(x, lengths, causal), lengths=lengths)


def _equal(program: Program, function: Callable[..., Tensor], **given: Tensor) -> None:
    """Outputs and gradients of `x`, of the program and the function."""
    results = []
    for compute in (lambda x: next(iter(run(program, {"x": x, **given})[0].values())), lambda x: function(x, **given)):
        x = X.detach().clone().requires_grad_()
        found = compute(x)
        weights = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).view(found.shape)
        results.append((found, *torch.autograd.grad((found * weights).sum(), x)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def _hidden(shown: Tensor) -> Tensor:
    """The least number where a row of flags, or of whole numbers, shows no key."""
    return torch.zeros(shown.shape, dtype=X.dtype).masked_fill(shown == 0, LEAST)


# Of scores, the input, and rows of whole numbers that show keys; of one sample none.
WITHOUT_KEYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "not a whole number": lambda s, x, m: s.masked_fill(torch.logical_not(m), -torch.inf).nan_to_num(neginf=LEAST),
    "chosen by not a whole number": lambda s, x, m: torch.where(torch.logical_not(m), LEAST, s),
    "hidden twice": lambda s, x, m: torch.where(_causal(), s, LEAST) + _hidden(m),
    "two sums": lambda s, x, m: s + _hidden(m) + _mask(),
    "a bias after those that are filled": lambda s, x, m: s.masked_fill(m == 0, LEAST) + x.mean(),
    "a bias beside a filled one": lambda s, x, m: s + (x[..., :1].mT * 2).masked_fill(m == 0, LEAST) + x[..., 1:2],
    "the largest off, and a cap": lambda s, x, m: torch.tanh(s - s.amax(-1, keepdim=True)) * 2 + _hidden(m),
    "other numbers": lambda s, x, m: (s + torch.full((LENGTH, LENGTH), OTHER, dtype=s.dtype).triu(1)).masked_fill(
        m.flip(-1) == 0, OTHER
    ),
    "scaled later": lambda s, x, m: (s + _hidden(m)) * 0.5,
}


@pytest.mark.parametrize("name", WITHOUT_KEYS)
def test_queries_without_keys(name: str) -> None:
    """Whatever becomes of it, outputs and gradients are the same."""

    def function(x: Tensor, shown: Tensor) -> Tensor:
        return _weighted(WITHOUT_KEYS[name](x @ x.mT, x, shown[:, None, None]), x)

    shown = torch.ones(X.shape[0], LENGTH, dtype=torch.int64)
    shown[0, 2:] = 0
    shown[1] = 0
    program = normalized(Apply(function), x=X.requires_grad_(), shown=shown)
    _equal(program, function, shown=shown)


def test_a_mask_of_a_wider_dtype_than_scores() -> None:
    """Its number for hidden keys is below all that scores of bfloat16 with a bias can have: they stay written."""

    def function(x: Tensor, bias: Tensor, shown: Tensor) -> Tensor:
        hidden = torch.zeros_like(shown).masked_fill(shown == 0, torch.finfo(torch.float32).min)
        return (x @ x.mT + bias + hidden).softmax(-1).to(x.dtype) @ x

    half, shown = X.bfloat16(), torch.ones(2, 1, 1, LENGTH)
    bias = torch.zeros(HEADS, 1, LENGTH, dtype=torch.bfloat16)
    assert _attentions(normalized(Apply(function), x=half, bias=bias, shown=shown)) == []
    assert len(_attentions(normalized(Apply(function), x=half, bias=bias.float(), shown=shown))) == 1


def test_fused_attention_with_a_bias() -> None:
    """Kernels have no gradients of biases; others are theirs."""

    class Biased(nn.Module):
        def __init__(self, *, trained: bool) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(HEADS, LENGTH, LENGTH, dtype=X.dtype), requires_grad=trained)

        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, attn_mask=torch.where(_causal(), self.bias[None], LEAST))

    for trained, mask in ((True, "%reshape_n1, is_causal=True"), (False, "%where")):
        kind = "chunked_attention" if trained else "scaled_dot_product_attention"
        program = normalized(Biased(trained=trained), x=X)
        assert _attentions(program) == [f"{kind}(x, x, x, {mask})"]


def _mpt() -> nn.Module:
    return MptForCausalLM(MptConfig(vocab_size=64, d_model=32, n_layers=1, n_heads=4, max_seq_len=32))


def _falcon() -> nn.Module:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    return FalconForCausalLM(FalconConfig(**sizes, alibi=True, new_decoder_architecture=False))


def _eager() -> nn.Module:
    return llama(attn_implementation="eager", num_hidden_layers=1)


_CAUSAL = {"is_causal": True}
_GROUPS = {**_CAUSAL, "enable_gqa": True}
Said = Mapping[str, object]
# By model: what its attention says, without padding and with it; of llama without padding it is fused.
STOCK: Mapping[str, tuple[Callable[[], nn.Module], Said, Said]] = {
    "gemma2": (
        lambda: gemma2(num_hidden_layers=1),
        {**_GROUPS, "soft_cap": 50.0, "window": (7, 0)},
        {**_GROUPS, "soft_cap": 50.0, "window": (7, 0), "attn_mask": (4, 1, 1, 12)},
    ),
    "gpt_oss": (
        lambda: gpt_oss(num_hidden_layers=1, sliding_window=6),
        {**_GROUPS, "window": (5, 0), "sink": (1, 4, 1, 1)},
        {**_GROUPS, "window": (5, 0), "sink": (1, 4, 1, 1), "attn_mask": (4, 1, 1, 12)},
    ),
    "bloom": (
        lambda: bloom(n_layer=1),
        {**_CAUSAL, "bias": (4, 4, 1, 12)},
        {**_CAUSAL, "bias": (4, 4, 1, 12), "attn_mask": (4, 1, 1, 12)},
    ),
    "mpt": (
        _mpt,
        {**_CAUSAL, "bias": (1, 4, 1, 12)},
        {**_CAUSAL, "bias": (1, 4, 1, 12), "attn_mask": (4, 1, 1, 12), "fills": "scores"},
    ),
    "falcon": (
        _falcon,
        {**_GROUPS, "bias": (4, 4, 1, 12)},
        {**_GROUPS, "bias": (4, 4, 1, 12), "attn_mask": (4, 1, 1, 12), "fills": "bias"},
    ),
    "llama": (_eager, _GROUPS, {**_GROUPS, "attn_mask": (4, 1, 1, 12)}),
    "t5": (
        lambda: t5(num_layers=1),
        {"bias": (1, 4, 12, 12)},
        {"bias": (1, 4, 12, 12), "attn_mask": (4, 1, 1, 12), "fills": "bias"},
    ),
}


# Models and dtypes that are fast.
_FAST = {
    **dict.fromkeys(("gemma2", "llama", "t5"), torch.float32),
    **dict.fromkeys(("gpt_oss", "bloom", "mpt"), torch.bfloat16),
}.items()


@pytest.mark.long
@pytest.mark.parametrize(("name", "dtype"), marked(product(STOCK, (torch.float32, torch.bfloat16)), _FAST), ids=str)
def test_stock_models(name: str, dtype: torch.dtype) -> None:
    """Nothing is as large as the scores, nor for all batches but the biases of T5."""
    build, *expected = STOCK[name]
    names = ("is_causal", "enable_gqa", "soft_cap", "window", "sink", "bias", "attn_mask", "fills")
    torch.manual_seed(0)
    model = build().to(dtype)
    for said, padding in zip(expected, (False, True), strict=True):
        program = normalized(model, **tokens(length=12, padding=padding), use_cache=False)
        first = next(op for op in program.ops if op.kind in ("chunked_attention", "scaled_dot_product_attention"))
        given = {each: first.arguments[each] for each in names if first.arguments.get(each)}
        found = {each: program.types[value.name].shape if isinstance(value, Ref) else value
                 for each, value in given.items()}  # fmt: skip
        assert found == said
        assert not any(op.kind == "softmax" and program.types[op.results[0]].shape[-1] == 12 for op in program.ops)
        squares = [type.shape for type in program.types.values() if type.shape[-2:] == (12, 12)]
        assert not squares or (name == "t5" and max(map(prod, squares)) == 4 * 12 * 12)
