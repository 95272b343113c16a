"""Lengths of a sequence that do not divide over an axis of the mesh, and sequences that differ between ranks: what is
refused, what is said, and what stays exact."""

import logging
import re

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import autopar
from tests.autopar.plans.test_dynamic_shapes import on_ranks
from tests.autopar.test_other_inputs import off
from tests.models import llama, mistral, tokens

ATTENTION = "@scaled_dot_product_attention"


@pytest.mark.parametrize(
    ("mesh", "methods", "length", "said"),
    [
        ({"cp": 2}, {"cp": "ring"}, 17, "'cp' cannot be met at model.layers.*.self_attn/scaled_dot_product_attention: "
                                        "queries of size 17 is not divisible into 2 devices: pad to 18, with labels"),
        ({"cp": 4}, {"cp": "queries"}, 17, "queries of size 17 is not divisible into 4 devices: pad to 20"),
        ({"cp": 2}, {"cp": "ring@8"}, 17, "queries of size 17 is not divisible into 8 x 2 parts: pad to 32"),
        ({"a": 2, "b": 2}, {"a": "ring", "b": "ring@2"}, 18, "'b' cannot be met at model.layers.*.self_attn/scaled_dot_"
                                                             "product_attention: queries of size 18 is not divisible "
                                                             "into 2 x 2 parts: pad to 20"),
    ],
)  # fmt: skip
def test_forced_methods_say_what_to_pad_to(
    mesh: dict[str, int], methods: dict[str, str], length: int, said: str
) -> None:
    """The op, the length, the axis, its size, and the length to pad to."""
    constraints = {ATTENTION: {"method": methods}}
    with pytest.raises(autopar.ConstraintError, match=re.escape(said)):
        autopar.plan(llama(), mesh, tokens(1, length), cluster="ideal", constraints=constraints)


def _packed(length: int) -> dict[str, torch.Tensor]:
    """Documents of 8 tokens."""
    return {**tokens(1, length), "position_ids": torch.arange(length)[None] % 8}


def _calls(mesh: DeviceMesh, method: str, lengths: tuple[int, ...]) -> tuple[dict[int, float], list[str], str, str]:
    """A planned module at lengths that divide and that do not: calls that are off, warnings; and what it raises where
    ranks pass other documents, and other lengths."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("autopar").addHandler(handler)
    model = mistral(max_position_embeddings=64, sliding_window=15).double()
    constraints = {ATTENTION: {"method": {"dp": method}}}
    batches = [_packed(length) for length in lengths]
    dist_model = autopar.parallelize(model, mesh, batches[0], cluster="ideal", constraints=constraints)
    rank = mesh.get_local_rank()
    errors = []
    for own in (
        {**_packed(16), "position_ids": torch.arange(16)[None] % (8 + rank)},
        {**tokens(1, 16 + 2 * rank), "position_ids": torch.arange(16 + 2 * rank)[None]},
    ):
        with pytest.raises(autopar.InputError) as raised:
            dist_model(**own)
        errors.append(str(raised.value))
    wrong = off(dist_model, model, batches, True)
    return wrong, said, errors[0], errors[1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "lengths"),
    [
        ("ring", (16, 17)),
        *(pytest.param(name, (16, 17, 24, 17), marks=pytest.mark.slow) for name in ("ring", "queries", "ring@8")),
    ],
)
def test_lengths_at_calls(method: str, lengths: tuple[int, ...]) -> None:
    """A length that does not divide is computed whole, exactly, with one warning for each length; what differs between
    ranks is refused on each."""
    for rank, (wrong, said, documents, unequal) in enumerate(on_ranks(_calls, method, lengths, mesh="2")):
        assert not wrong, wrong
        whole = [text for text in said if "computes all of" in text]
        assert len(whole) == (rank == 0), whole
        assert all("17 is not divisible into 2 devices: pad to 18" in text and "axis 'dp'" in text for text in whole)
        assert "position_ids had other values on rank 1 of the mesh than on rank 0" in documents
        assert "rank 1 of the mesh has input_ids int64[1, 18], rank 0 has input_ids int64[1, 16]" in unequal
