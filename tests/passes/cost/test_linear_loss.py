"""Seconds of a linear layer with its cross entropy: products as those of linear layers, passes over logits, sums."""

from dataclasses import replace

import pytest
import torch

from passes.cost.bound import least_by_op
from passes.cost.cluster import CLUSTERS
from passes.cost.compute import product_seconds
from passes.cost.linear_loss import linear_loss_seconds
from passes.ir.linear_loss import LinearLoss, token_chunks
from passes.ir.program import with_scalars_alone
from passes.normalize.linear_loss import with_linear_losses
from passes.regions import fold
from tests.models import llama
from tests.passes.helpers import normalized

H100 = CLUSTERS["h100"].device
TRAINED = (True, True, False)
BIG = LinearLoss(32768, 4096, 128256, token_chunks(32768, 4096), torch.bfloat16, torch.float32, TRAINED)


def test_chunks_follow_the_width() -> None:
    """At most as many tokens as the width, rounded up to a power of two."""
    assert [token_chunks(tokens, 4096) for tokens in (1, 4096, 4097, 131072)] == [1, 1, 2, 32]
    assert token_chunks(8192, 3584) == 2
    assert token_chunks(0, 8) == 0


@pytest.mark.parametrize("chunks", [1, 8])
def test_three_products_and_passes(chunks: int) -> None:
    """All products are in it, and the rest is less than the least number of passes would take five times."""
    loss = replace(BIG, chunks=chunks)
    rows, flops = 32768 / chunks, 2.0 * 32768 * 4096 * 128256 / chunks
    elements = rows * 128256, rows * 4096, 4096 * 128256
    products = chunks * sum(product_seconds(flops, each, torch.bfloat16, H100) for each in elements)
    forward, backward = linear_loss_seconds(loss, H100)
    passes = 32768 * 128256 * 2 / H100.stream
    assert 6 * passes < forward + backward - products < 24 * passes


def test_chunks_cost_sums_of_the_weight() -> None:
    """More chunks take longer, by what each adds to the gradient of the weight at least; at once the gradient of the
    weight is computed backward, and in chunks nothing but factors is."""
    whole, halves, chunks = (linear_loss_seconds(replace(BIG, chunks=count), H100) for count in (1, 2, 8))
    added = 4096 * 128256 * 10 / H100.stream
    assert sum(whole) < sum(halves) < sum(chunks) - 6 * added
    assert halves[1] == chunks[1] < 0.1 * whole[1]


def test_frozen_operands_have_no_gradients() -> None:
    forward, backward = linear_loss_seconds(replace(BIG, flows=(False, False, False)), H100)
    assert backward == 0.0
    assert 2.5 < linear_loss_seconds(BIG, H100)[0] / forward < 4
    assert linear_loss_seconds(replace(BIG, flows=(True, False, False)), H100)[0] < linear_loss_seconds(BIG, H100)[0]


@pytest.mark.parametrize("chunks", [1, 8])
@pytest.mark.parametrize("is_capped", [False, True])
def test_workspace_is_what_is_held(chunks: int, is_capped: bool) -> None:
    """In chunks: the gradients of hidden states and weight, and one chunk; at once: logits."""
    saved, temporaries = replace(BIG, chunks=chunks, is_capped=is_capped).workspace()
    states, logits = 32768 * 4096 * 2, 32768 * 128256 * 2
    if chunks == 1:
        assert saved == 32768 + 2 * states + logits
    else:
        assert saved == 32768 + states + 4096 * 128256 * 4
        assert temporaries < 6 * logits / chunks
    assert replace(BIG, flows=(False,) * 3).workspace() == (0.0, 0.0)


@pytest.mark.parametrize("devices", [1, 8])
def test_the_bound_is_below(devices: int) -> None:
    """Of all products and of the bytes of operands and gradients."""
    ids = torch.zeros(64, 32, dtype=torch.long)
    program = normalized(llama(num_hidden_layers=1, vocab_size=4096), input_ids=ids, labels=ids, use_cache=False)
    folded = fold(with_linear_losses(with_scalars_alone(program)))
    (key,) = (op.key for op in folded.ops if op.kind == "linear_cross_entropy")
    tokens = 64 * 32 // devices
    for chunks in (1, token_chunks(tokens, 32)):
        loss = LinearLoss(tokens, 32, 4096, chunks, torch.float32, torch.float32, TRAINED)
        least = least_by_op(folded, CLUSTERS["h100"], devices)[key]
        assert 0 < least < sum(linear_loss_seconds(loss, H100))
