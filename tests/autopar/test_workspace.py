"""Sizes of saved tensors and temporaries, by rules and `passes.cost.price`, equal what is allocated, on tensors
without values: for all local forms, for attention by the kernels of both devices, and for the ops of the table."""

import re

import pytest
import torch
from torch import Tensor

from autopar.plans.probing import FakeProber
from passes.cost.liveness.graph import Event, Form, Task
from passes.cost.workspace import REPEATED, TEMPORARIES, workspace
from passes.ir.layout import local_shape
from passes.rules.local_forms import LOCAL_FORMS
from passes.rules.pointwise import TABLE
from passes.rules.strategies import combine, named_choices
from tests.passes.helpers import mesh_of
from tests.passes.rules.one_op import OneOp, lowered_one, one_op, statement_of
from tests.passes.rules.samples import Sample

ROWS, WIDTH = 64, 1024


def _wide(*shape: int) -> Tensor:
    return torch.ones(*(shape or (ROWS, WIDTH)))


def _ids(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long)


_SPACE = _wide(4, 16, 32, 32)
_CHANNELS = _wide(16)
_ATTENTION = "aten.scaled_dot_product_attention.default"
_NORM = "aten.layer_norm.default"
# Half the width, so that attention is whole only without a fused kernel of the CPU.
_LONG, _KEYS, _VALUES = _wide(1, 4, 512, 16), _wide(1, 2, 512, 16), _wide(1, 4, 512, 8)
_QKV = (_LONG, _LONG, _LONG)
_CAUSAL = (None, 0.0, True)
_HIDING = "autopar.scaled_dot_product_attention.default"
_CHUNKED = "autopar.chunked_attention.default"
_LOSS = "autopar.linear_cross_entropy.default"
_TOKENS, _HEAD, _LABELS, _ONE_CHUNK = _wide(256, 32), _wide(4096, 32), _ids(256), _wide(32, 32)
_SHORT, _LONG_ROW = torch.ones(1, 1, 1, 512, dtype=torch.bool), _ids(2, 1, 1, 512)
_LONGER = _wide(1, 2, 8192, 8)
_SAMPLES = (_wide(2, 4, 512, 16),) * 3
_HALF = tuple(each.bfloat16() for each in _QKV)
_PADDED = (_SHORT, 0.0, True)
_DOCUMENTS = (_ids(2, 1, 512, 1), _LONG_ROW)
_SCAN = "autopar.delta_scan.default"
# Six chunks of eight places, keys as wide as 16, values as 24.
_CHUNKED_PLACES = (
    *(_wide(2, 4, 12, 8, width) for width in (16, 16, 24, 16)),
    _wide(2, 4, 12, 8, 8),
)
_DECAYS = (_wide(2, 4, 12, 1), _wide(2, 4, 12, 16))
_SELECTIVE = "autopar.selective_scan.default"
# 32 channels with states of 16.
_STATE_SPACE = (*(_wide(2, 32, 400),) * 2, _wide(32, 16), *(_wide(2, 16, 400),) * 2)
# The number of arguments that are no keywords, and keywords.
_CONVOLUTION = "autopar.padded_conv1d.default"
_KEYWORDS = {
    _CONVOLUTION: (3, ("padding", "groups")),
    _HIDING: (6, ("window", "query_documents", "key_documents")),
    _CHUNKED: (7, ("soft_cap", "window")),
    _LOSS: (4, ("soft_cap",)),
}
# Pointwise ops of one tensor with temporaries.
_OF_ONE = tuple(kind for kind in TEMPORARIES if kind in TABLE and kind != "pow")
# By the local form, or a name: the operator, its arguments, and the methods on axes of two.
CASES: dict[str, tuple[str, tuple[object, ...], str]] = {
    "mean": ("aten.mean.dim", (_wide(), [1]), "in1"),
    "vocabulary_embedding": ("aten.embedding.default", (_wide(512, 64), _ids(256)), "vocab"),
    "vocabulary_cross_entropy": (
        "aten.cross_entropy_loss.default",
        (_wide(), _ids(ROWS), None, 2),
        "classes",
    ),
    "blockwise_attention": (_ATTENTION, (*_QKV, *_CAUSAL), "queries"),
    "ring_attention": (_ATTENTION, _QKV, "ring"),
    "ring_attention, causal": (_ATTENTION, (*_QKV, *_CAUSAL), "ring"),
    "haloed": ("aten.conv2d.default", (_SPACE, _wide(16, 16, 3, 3), None, [1, 1], [1, 1]), "space0"),
    "haloed, padded before": (
        _CONVOLUTION,
        (_wide(4, 64, 256), _wide(64, 1, 4), None, (3, 0), 64),
        "space0",
    ),
    "layer_norm": (_NORM, (_wide(), [WIDTH], _wide(WIDTH), _wide(WIDTH)), "inner1"),
    "rms_norm": ("aten.rms_norm.default", (_wide(), [WIDTH], _wide(WIDTH), 1e-5), "inner1"),
    "softmax": ("aten.softmax.int", (_wide(), 1), "along"),
    "log_softmax": ("aten.log_softmax.int", (_wide(), 1), "along"),
    "logsumexp": ("aten.logsumexp.default", (_wide(), [1]), "along"),
    "group_norm": ("aten.group_norm.default", (_SPACE, 4, _CHANNELS, _CHANNELS), "space0"),
    "batch_norm": (
        "aten.batch_norm.default",
        (_SPACE, _CHANNELS, _CHANNELS, None, None, True, 0.1, 1e-5, False),
        "space0",
    ),
    "cumsum": ("aten.cumsum.default", (_wide(), 1), "along"),
    "delta_scan": (_SCAN, (*_CHUNKED_PLACES, _DECAYS[0], None), "chunks"),
    "delta_scan with decays of channels": (_SCAN, (*_CHUNKED_PLACES, _DECAYS[1], None), "chunks"),
    "delta_scan from a state": (_SCAN, (*_CHUNKED_PLACES, _DECAYS[0], _wide(2, 4, 16, 24)), "chunks"),
    "delta_scan of parts of the values": (_SCAN, (*_CHUNKED_PLACES, _DECAYS[0], None), "chunks out"),
    "selective_scan": (_SELECTIVE, _STATE_SPACE, "places"),
    "scan of all places": (_SELECTIVE, _STATE_SPACE, "channels"),
    "selective_scan of places of samples": (_SELECTIVE, _STATE_SPACE, "batch places"),
    "layer_norm without weight": (_NORM, (_wide(), [WIDTH]), "inner1"),
    "rms_norm without weight": ("aten.rms_norm.default", (_wide(), [WIDTH], None, 1e-5), "inner1"),
    "blockwise_attention of groups": (_ATTENTION, (_LONG, _KEYS, _KEYS, *_CAUSAL), "queries"),
    "blockwise_attention of unequal widths": (_ATTENTION, (_LONG, _LONG, _VALUES, *_CAUSAL), "queries"),
    "ring_attention of groups": (_ATTENTION, (_LONG, _KEYS, _KEYS), "ring"),
    "ring_attention of unequal widths, causal": (_ATTENTION, (_LONG, _LONG, _VALUES, *_CAUSAL), "ring"),
    "blockwise_attention in a window": (_HIDING, (*_QKV, *_CAUSAL, (63, 0)), "queries"),
    "blockwise_attention of samples in a window": (_HIDING, (*_SAMPLES, *_CAUSAL, (63, 0)), "queries"),
    "blockwise_attention with padding": (_HIDING, (*_QKV, *_PADDED), "queries"),
    "blockwise_attention of documents": (_HIDING, (*_SAMPLES, *_CAUSAL, None, *_DOCUMENTS), "queries"),
    "ring_attention in a window": (_HIDING, (*(_LONGER,) * 3, *_CAUSAL, (63, 0)), "ring"),
    "ring_attention with padding": (_HIDING, (*_QKV, *_PADDED), "ring"),
    "ring_attention of parts of queries": (_ATTENTION, (*_QKV, *_CAUSAL), "queries ring@2"),
    "ring_attention, and parts of queries": (_ATTENTION, (_LONG, _LONG, _VALUES, *_CAUSAL), "ring queries@2"),
    "ring_attention in stripes of parts of queries": (_ATTENTION, (*_QKV, *_CAUSAL), "queries@128 ring@256"),
    "ring_attention of parts of queries in a window": (_HIDING, (*(_LONGER,) * 3, *_CAUSAL, (63, 0)), "ring queries@2"),
    "ring_attention of parts of queries of documents": (
        _HIDING,
        (*_SAMPLES, *_CAUSAL, None, *_DOCUMENTS),
        "queries ring@2",
    ),
    "ring_attention of parts of queries to all keys": (_ATTENTION, _QKV, "queries ring@2"),
    "ring_attention of documents": (_HIDING, (*_SAMPLES, *_CAUSAL, None, *_DOCUMENTS), "ring"),
    "blockwise_attention in half precision": (_ATTENTION, (*_HALF, *_CAUSAL), "queries"),
    "blockwise_attention in a window in half precision": (_HIDING, (*_HALF, *_CAUSAL, (63, 0)), "queries"),
    "attention in half precision": (_HIDING, (*_HALF, *_PADDED), "heads"),
    "attention in a window": (_HIDING, (*(_LONGER,) * 3, *_CAUSAL, (63, 0)), "heads"),
    "attention with padding": (_HIDING, (*_QKV, *_PADDED), "heads"),
    "attention of documents": (_HIDING, (*_SAMPLES, *_CAUSAL, None, *_DOCUMENTS), "heads"),
    "chunked_attention": (_CHUNKED, (*_QKV, None, None, None, True), "queries"),
    "chunked_attention with a soft cap": (_CHUNKED, (*_QKV, None, None, None, True, 2.0), "queries"),
    "chunked_attention of groups with a sink": (_CHUNKED, (_LONG, _KEYS, _KEYS, None, _wide(1, 4, 1, 1)), "queries"),
    "chunked_attention with a bias": (_CHUNKED, (*_SAMPLES, _wide(1, 4, 512, 512)), "queries"),
    "chunked_attention in a window": (_CHUNKED, (*(_LONGER,) * 3, None, None, None, True, None, (63, 0)), "queries"),
    "attention in chunks": (_CHUNKED, (*_QKV, None, None, _SHORT, True, 2.0), "heads"),
    "attention": (_ATTENTION, (*_QKV, *_CAUSAL), "heads"),
    "attention of groups": (_ATTENTION, (_LONG, _KEYS, _KEYS, *_CAUSAL), "heads"),
    "attention, a part of the width": (_ATTENTION, (*_QKV, *_CAUSAL), "value_width"),
    "attention, a part of the width of groups": (
        _ATTENTION,
        (_LONG, _KEYS, _KEYS, *_CAUSAL),
        "value_width",
    ),
    "attention with dropout": (_ATTENTION, (*_QKV, None, 0.1), "heads"),
    "attention with a mask": (_ATTENTION, (*_QKV, torch.ones(512, 512, dtype=torch.bool)), "heads"),
    "attention of groups with a mask": (
        _ATTENTION,
        (_LONG, _KEYS, _KEYS, torch.ones(512, 512, dtype=torch.bool)),
        "heads",
    ),
    "pow": ("aten.pow.Tensor_Scalar", (_wide(), 2), "d1"),
    "gather": ("aten.gather.default", (_wide(), 1, _ids(ROWS, 16)), "d0"),
    "index_select": ("aten.index_select.default", (_wide(), 0, _ids(16)), "d1"),
    "linalg_vector_norm": ("aten.linalg_vector_norm.default", (_wide(), 2, [1]), "d0"),
    "std": ("aten.std.correction", (_wide(), [1]), "d0"),
    "var": ("aten.var.correction", (_wide(), [1]), "d0"),
    "prod": ("aten.prod.dim_int", (_wide(), 1), "d0"),
    "whole cumsum": ("aten.cumsum.default", (_wide(), 1), "d0"),
    "whole logsumexp": ("aten.logsumexp.default", (_wide(), [1]), "d0"),
    **{kind: (f"aten.{kind}.default", (_wide(),), "d1") for kind in _OF_ONE},
    "cross_entropy_loss": ("aten.cross_entropy_loss.default", (_wide(), _ids(ROWS), None, 2), "tokens"),
    "split_loss": (_LOSS, (_TOKENS, _HEAD, _LABELS), "classes"),
    "split_loss with a soft cap and a bias": (_LOSS, (_TOKENS, _HEAD, _LABELS, _wide(4096), 2.0), "classes"),
    "split_loss of one chunk": (_LOSS, (_ONE_CHUNK, _HEAD, _ids(32)), "classes"),
    "at_once": (_LOSS, (_TOKENS, _HEAD, _LABELS), "tokens_at_once"),
    "split_at_once": (_LOSS, (_TOKENS, _HEAD, _LABELS), "tokens_at_once classes_at_once"),
    "loss in chunks": (_LOSS, (_TOKENS, _HEAD, _LABELS), "tokens"),
    "loss in chunks with a soft cap": (_LOSS, (_TOKENS, _HEAD, _LABELS, None, 2.0), "tokens"),
    "loss of a frozen head": (_LOSS, (_TOKENS, _HEAD, _LABELS), "tokens"),
    "mul": ("aten.mul.Tensor", (_wide(), _wide(ROWS, 1)), "d1"),
    "div": ("aten.div.Tensor", (_wide(), _wide(ROWS, 1)), "d1"),
}


def _form(name: str) -> str:
    """The local form that a case is called after."""
    first = re.split("[ ,]", name)[0]
    return first if first in LOCAL_FORMS else ""


def _most(events: tuple[Event, ...], kept: dict[int, int]) -> int:
    """The most bytes that are live of what a statement allocates, and what is `kept`."""
    there = dict(kept)
    most = 0
    for event in events:
        if event.what == "allocate":
            there[event.index] = event.bytes
        elif event.what == "free":
            there.pop(event.index, None)
        most = max(most, sum(there.values()))
    return most


def _case(name: str, dtype: torch.dtype) -> tuple[OneOp, list[str]]:
    target, arguments, methods = CASES[name]
    given = [item.to(dtype) if isinstance(item, Tensor) and item.dtype is torch.float32 else item for item in arguments]
    # The last arguments of attention in blocks and in chunks are keywords.
    count, names = _KEYWORDS.get(target, (len(given), ()))
    given, named = given[:count], given[count:]
    options = dict(zip(names, named, strict=False))
    groups = {"enable_gqa": True} if "groups" in name else {}
    trainable = (0,) if "frozen" in name else range(100)
    return one_op(Sample(target, tuple(given), {**options, **groups}), trainable), methods.split()


def test_every_form_is_compared() -> None:
    """And every op of the tables."""
    assert {*LOCAL_FORMS, *TEMPORARIES, *REPEATED} <= set(CASES)


# Cases that are like others, and one that takes long.
_NIGHTLY = {*_OF_ONE[3:], "chunked_attention in a window", "selective_scan of places of samples"}
_LONG = {"scan of all places", "selective_scan", "delta_scan", "attention in a window", "ring_attention in a window"}


@pytest.mark.parametrize(
    ("dtype", "device"),
    [
        (torch.float32, "cpu"),
        (torch.bfloat16, "cuda"),
        pytest.param(torch.float32, "cuda", marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, "cpu", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in _NIGHTLY else pytest.mark.long if name in _LONG else [])
        for name in CASES
    ],
)
def test_workspace(name: str, dtype: torch.dtype, device: str) -> None:
    """Bytes that are saved in all, and bytes of the backward pass besides them and the gradients of operands."""
    one, methods = _case(name, dtype)
    context, mesh = one.context, mesh_of(**dict.fromkeys("ab"[: len(methods)], 2))
    choices = named_choices(context, methods, mesh)
    assert choices is not None
    strategy = combine(context, choices)
    statement = statement_of(lowered_one(one, strategy, mesh))
    assert statement.body == (_form(name))
    prober = FakeProber(mesh, device)
    text = prober.compute(statement, one.folded.types, frozenset())
    operands = tuple(
        Form.contiguous(local_shape(type.shape, layout, mesh), type.dtype)
        for type, layout in zip(context.operands, strategy.operands, strict=True)
    )
    task = Task(text, operands, context.flowing_operands)
    forward = prober.forward(task)
    sizes = {event.index: event.bytes for event in forward.events if event.what == "allocate"}
    places = {place for place in forward.saved if place}
    kept = {place.index: sizes[place.index] for place in places if place.origin == "own"}
    read = sum(operands[place.index].bytes for place in places if place.origin == "operand")
    given_to = tuple(result.form if result.flows else None for result in forward.results)
    backward = prober.backward(task, given_to)
    given = sum(item.form.bytes for item in backward.given.values())
    temporaries = _most(backward.events, kept) - sum(kept.values()) - given
    if one.op.kind == "linear_cross_entropy":
        # The forward pass computes gradients, and has more besides these than the backward pass.
        temporaries = max(temporaries, _most(forward.events, {}) - sum(kept.values()) - given)

    saved, said = workspace(context, choices, strategy, mesh, device)
    assert one.rule is not None
    results = [result.form.bytes for result in forward.results]
    said_saved = saved + sum(
        results[item.index] if item.result else operands[item.index].bytes for item in one.rule.saved
    )
    scale = operands[0].bytes + max(sum(kept.values()), abs(temporaries))
    assert said_saved == pytest.approx(sum(kept.values()) + read, abs=0.03 * scale), "saved"
    assert said == pytest.approx(max(temporaries, 0), abs=0.03 * scale), "temporaries"
