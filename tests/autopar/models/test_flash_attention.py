"""Models that run the kernels of flash attention are traced without them, and compute the same."""

from collections.abc import Callable, Mapping
from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import modeling_flash_attention_utils

import autopar
from autopar.models.flash_attention import flash_attention
from passes.ir.errors import InputError
from tests.autopar.models.reference_kernels import with_kernels
from tests.autopar.plans.test_dynamic_shapes import on_ranks
from tests.models import llama, mistral, tokens

ENDS = torch.tensor([0, 5, 6, 12, 12], dtype=torch.int32)
LENGTHS = {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, "max_length_q": 6, "max_length_k": 6}
RIGHT = torch.arange(12)[None] < torch.tensor([[12], [7]])


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    ("batch", "options"),
    [
        pytest.param(2, {}, id="one length"),
        pytest.param(2, {"sliding_window": 4}, id="window"),
        pytest.param(2, {"sliding_window": 12}, id="window of all"),
        pytest.param(2, {"softmax_scale": 0.3, "softcap": 2.0}, id="soft cap"),
        pytest.param(2, {"s_aux": torch.linspace(-1, 1, 4, dtype=torch.float64)}, id="sink"),
        pytest.param(1, LENGTHS, id="lengths"),
        pytest.param(1, {**LENGTHS, "sliding_window": 3}, id="lengths and window"),
        pytest.param(1, {**LENGTHS, "softcap": 2.0}, id="lengths and soft cap"),
        pytest.param(1, {"position_ids": torch.tensor([[*range(5), *range(7)]])}, id="positions"),
        pytest.param(1, {"position_ids": torch.tensor([[*range(2, 8), *range(2, 8)]])}, id="positions from 2"),
        pytest.param(1, {"position_ids": torch.arange(12)[None]}, id="one document"),
        pytest.param(2, {"position_ids": torch.tensor([[*range(5), *range(7)]] * 2)}, id="positions of two samples"),
        pytest.param(2, {"attention_mask": RIGHT}, id="padding"),
        pytest.param(2, {"attention_mask": RIGHT.flip(1)}, id="padding on the left"),
        pytest.param(2, {"attention_mask": RIGHT, "sliding_window": 3}, id="padding and window"),
        pytest.param(2, {"attention_mask": RIGHT.flip(1), "sliding_window": 3}, id="left padding and window"),
    ],
)
def test_equal_to_kernels(batch: int, options: Mapping[str, object], is_causal: bool) -> None:
    """Results and gradients, as `transformers` calls kernels for these options."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, 12, 4, 8), (batch, 12, 2, 8), (batch, 12, 2, 8)]
    given = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    call = {"attention_mask": None, "query_length": 12, "is_causal": is_causal, **options}
    stock = modeling_flash_attention_utils._flash_attention_forward
    with with_kernels():
        expected = stock(*given, **call, attn_implementation="flash_attention_2")
    found = flash_attention(*given, **call)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    gradients = [torch.autograd.grad((each * weights).sum(), given) for each in (found, expected)]
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_causal", [True, False])
def test_more_keys_than_queries(is_causal: bool) -> None:
    """The last query is at the last key."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, size, 4, 8, generator=generator, dtype=torch.float64) for size in (3, 8))
    call = {"attention_mask": None, "query_length": 3, "is_causal": is_causal, "sliding_window": 5}
    with with_kernels():
        expected = modeling_flash_attention_utils._flash_attention_forward(
            query, key, key, **call, attn_implementation="flash_attention_2"
        )
    torch.testing.assert_close(flash_attention(query, key, key, **call), expected, rtol=1e-12, atol=1e-12)  # type: ignore[arg-type]


def test_paged_caches_are_refused() -> None:
    query = torch.ones(1, 2, 1, 4)
    with pytest.raises(InputError, match="paged cache"):
        flash_attention(query, query, query, None, is_causal=True, block_table=torch.zeros(1, 1))


def test_documents_with_more_keys_are_refused() -> None:
    """Kernels count from the end of each document, a mask of places from that of all."""
    query, key = torch.ones(1, 3, 1, 4), torch.ones(1, 5, 1, 4)
    with pytest.raises(InputError, match="5 keys and 3 queries"):
        flash_attention(query, key, key, None, is_causal=True, **LENGTHS)


def _flash(model: nn.Module) -> nn.Module:
    """The model as if it was made with `attn_implementation="flash_attention_2"`, where that is installed."""
    model.config._attn_implementation = "flash_attention_2"
    return model.double()


def _ends(*ends: int) -> dict[str, object]:
    cumulative = torch.tensor([0, *ends], dtype=torch.int32)
    longest = int(cumulative.diff().max())
    return {"cu_seq_lens_q": cumulative, "cu_seq_lens_k": cumulative, "max_length_q": longest, "max_length_k": longest}


CASES: Mapping[str, tuple[Callable[[], nn.Module], dict[str, object]]] = {
    "causal": (llama, tokens()),
    "padding": (llama, tokens(padding=True)),
    "lengths": (llama, {**tokens(1, 32), **_ends(10, 16, 32)}),
    "lengths and window": (lambda: mistral(sliding_window=5), {**tokens(1, 32), **_ends(10, 16, 32)}),
    "positions": (llama, {**tokens(1, 32), "position_ids": torch.cat([torch.arange(13), torch.arange(19)])[None]}),
}


def _error(mesh: DeviceMesh, name: str, method: str) -> float:
    build, inputs = CASES[name]
    model = _flash(build())
    with with_kernels():
        loss = model(**inputs).loss
    loss.backward()
    constraints = {"@scaled_dot_product_attention": {"method": {"dp": method}}}
    dist_model = autopar.parallelize(_flash(build()), mesh, inputs, cluster="ideal", constraints=constraints)
    found = dist_model(**inputs)["loss"]
    found.backward()
    worst = float((found.detach() - loss.detach()).abs() / loss.detach().abs())
    for (key, own), (_, other) in zip(dist_model.named_parameters(), model.named_parameters(), strict=True):
        expected = other.grad
        assert expected is not None, key
        worst = max(worst, float((own.grad.full_tensor() - expected).norm() / expected.norm()))
    return worst


FAST = {("lengths and window", "queries")}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "method"),
    [
        case if case in FAST else pytest.param(*case, marks=pytest.mark.slow)
        for case in product(CASES, ("ring", "queries"))
    ],
)
def test_stock_models(name: str, method: str) -> None:
    """Whole models with the sequence split over two ranks, against the stock model with the kernels."""
    assert max(on_ranks(_error, name, method, mesh="2")) < 1e-9


def _other_documents(mesh: DeviceMesh) -> list[float]:
    model, inputs = _flash(llama()), {**tokens(1, 32), **_ends(10, 16, 32)}
    constraints = {"@scaled_dot_product_attention": {"method": {"dp": "ring"}}}
    dist_model = autopar.parallelize(_flash(llama()), mesh, inputs, cluster="ideal", constraints=constraints)
    errors = []
    for batch in ({**tokens(1, 32), **_ends(4, 30, 32)}, {**tokens(1, 48), **_ends(10, 48)}):
        with with_kernels():
            expected = model(**batch).loss
        errors.append(float((dist_model(**batch)["loss"] - expected).abs()))
    with pytest.raises(InputError, match=r"max_length_q is .* more than int64 holds"):
        dist_model(**{**inputs, "max_length_q": 2**70})
    return errors


@pytest.mark.slow
def test_other_documents() -> None:
    """One program serves documents of all lengths; another number of them, or of tokens, is planned at first use."""
    assert max(map(max, on_ranks(_other_documents, mesh="2"))) < 1e-12
