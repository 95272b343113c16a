"""Prices of attention in blocks count the kernels that run besides those of attention, and the bytes that these read
and write."""

from collections.abc import Mapping
from math import prod

import pytest
import torch
from torch import Tensor

from autopar.runtime import Axis
from autopar.runtime.generated import ring_attention as rings
from autopar.runtime.generated.attention import blockwise_attention
from autopar.runtime.generated.chunked_attention import chunked_attention
from passes.cost.forms import forms_of
from passes.rules.form_context import Traffic
from passes.rules.strategies import combine, named_choices
from tests.autopar.runtime.generated.kernels import Kernels
from tests.passes.helpers import mesh_of
from tests.passes.rules.one_op import one_op
from tests.passes.rules.samples import Sample

LENGTH, HEADS, WIDTH = 512, 4, 32
PLAIN, HIDING = "aten.scaled_dot_product_attention.default", "autopar.scaled_dot_product_attention.default"
CHUNKED = "autopar.chunked_attention.default"


def _tensors(queries: int, keys: int, key_heads: int = HEADS) -> tuple[Tensor, ...]:
    shapes = (HEADS, queries), (key_heads, keys), (key_heads, keys)
    return tuple(torch.ones(1, *shape, WIDTH, dtype=torch.bfloat16, requires_grad=True) for shape in shapes)


def _said(
    target: str, methods: str, sizes: tuple[int, ...], options: Mapping[str, object], key_heads: int = HEADS
) -> tuple[Traffic, list[int]]:
    """The traffic of attention under these methods on axes of these sizes, and the majors of the axes."""
    mesh = mesh_of(**dict(zip("abc", sizes, strict=False)))
    given = {"is_causal": True, "enable_gqa": key_heads < HEADS, **options}
    one = one_op(Sample(target, tuple(each.detach() for each in _tensors(LENGTH, LENGTH, key_heads)), given))
    choices = named_choices(one.context, methods.split(), mesh)
    assert choices is not None
    ((form, about),) = list(forms_of(one.context, choices, combine(one.context, choices), mesh, "cpu"))[-1:]
    assert form.traffic is not None
    return form.traffic(about), [choice.major for choice in choices]


def _ran(function: object, given: tuple[Tensor, ...], options: Mapping[str, object]) -> tuple[Kernels, Kernels]:
    with Kernels() as forward:
        result = function(*given, **options)  # type: ignore[operator]
    gradient = torch.ones_like(result)
    with Kernels() as backward:
        torch.autograd.backward(result, gradient)
    return forward, backward


def _last(sizes: tuple[int, ...], majors: list[int]) -> tuple[tuple[Axis, int], ...]:
    """The digits of the last rank."""
    axes = (Axis(name, size, size - 1, "0") for name, size in zip("abc", sizes, strict=False))
    return tuple(sorted(zip(axes, majors, strict=True), key=lambda item: item[1]))


SPLIT = [
    ("queries", (4,)),
    ("queries queries@2", (2, 4)),
    ("queries@128", (4,)),
    ("queries@32", (16,)),
    ("queries@64 queries@128", (2, 4)),
    ("queries queries@128", (2, 4)),
    ("queries@8", (4,)),
]


@pytest.mark.parametrize("row", [False, True], ids=["", "row"])
@pytest.mark.parametrize(("methods", "sizes"), SPLIT)
def test_split_queries(methods: str, sizes: tuple[int, ...], row: bool) -> None:
    """In order, in stripes, and in between; with a row of hidden keys, too. Kernels are exact, bytes to a tenth; to
    three where keys are hidden, whose flags are not counted."""
    shown = {"attn_mask": torch.ones(1, 1, 1, LENGTH, dtype=torch.bool)} if row else {}
    said, majors = _said(HIDING if row else PLAIN, methods, sizes, shown)
    digits = _last(sizes, majors)
    options = {"digits": digits, "causal": True, "mask": shown.get("attn_mask")}
    forward, backward = _ran(blockwise_attention, _tensors(LENGTH // prod(sizes), LENGTH), options)
    _check(said, forward, backward, 0.3 if row else 0.1)


def _check(said: Traffic, forward: Kernels, backward: Kernels, off: float, kernels: float = 0.0) -> None:
    # Attention is one op on the CPU, in both passes; on CUDA three in the backward pass.
    assert said.forward_kernels == pytest.approx(forward.others + forward.attention - 1, rel=kernels)
    assert said.backward_kernels == pytest.approx(backward.others + 3 * (backward.attention - 1), rel=kernels)
    assert said.forward == pytest.approx(forward.bytes, rel=off)
    assert said.backward == pytest.approx(backward.bytes, rel=off)


RINGS = [
    ("ring", (4,)),
    ("ring@128", (4,)),
    ("ring@32", (16,)),
    ("ring ring@2", (2, 4)),
    ("ring@128 queries@64", (4, 2)),
    ("ring queries@4", (4, 2)),
]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("methods", "sizes"), RINGS)
def test_rings(methods: str, sizes: tuple[int, ...], causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which shifts are no kernels; queries may be split further."""
    monkeypatch.setattr(rings, "start_shift", lambda tensor, axis, by: lambda: tensor)
    said, majors = _said(PLAIN, methods, sizes, {"is_causal": causal})
    digits = _last(sizes, majors)
    around = {name for name, method in zip("abc", methods.split(), strict=False) if method.startswith("ring")}
    own = tuple(each for each in digits if each[0].name in around)
    keys = LENGTH // prod(axis.size for axis, _ in own)
    options = {"digits": own, "causal": causal, "queries": digits}
    _check(said, *_ran(rings.ring_attention, _tensors(LENGTH // prod(sizes), keys), options), 0.1)


@pytest.mark.parametrize("methods", ["R", "queries", "queries@128"])
@pytest.mark.parametrize("window", [16, 64, 200])
def test_windows(window: int, methods: str) -> None:
    """To a half of what runs: the blocks at both ends of a sequence are others."""
    said, majors = _said(HIDING, methods, (4,), {"window": (window - 1, 0)})
    split = methods != "R"
    digits = _last((4,), majors) if split else ()
    given = _tensors(LENGTH // 4 if split else LENGTH, LENGTH)
    forward, backward = _ran(blockwise_attention, given, {"digits": digits, "causal": True, "window": (window - 1, 0)})
    _check(said, forward, backward, 0.5, kernels=0.5)


CHUNKS: dict[str, Mapping[str, object]] = {
    "causal": {},
    "full": {"is_causal": False},
    "soft cap": {"soft_cap": 5.0},
    "window": {"window": (99, 0)},
    "sink": {"sink": torch.ones(1, HEADS, 1, 1)},
    "bias": {"bias": torch.ones(1, HEADS, LENGTH, LENGTH)},
    "flags": {"attn_mask": torch.ones(1, 1, 1, LENGTH, dtype=torch.bool)},
    "documents": {
        "query_documents": torch.zeros(1, 1, LENGTH, 1, dtype=torch.int32),
        "key_documents": torch.zeros(1, 1, 1, LENGTH, dtype=torch.int32),
    },
}


@pytest.mark.parametrize("name", CHUNKS)
def test_chunks(name: str) -> None:
    """Kernels, to within two for each of the four chunks of each pass."""
    options = CHUNKS[name]
    said, _ = _said(CHUNKED, "R", (2,), options, key_heads=2)
    names = {"attn_mask": "mask", "is_causal": "causal"}
    given = {names.get(key, key): value for key, value in options.items() if not key.endswith("documents")}
    if "query_documents" in options:
        given["documents"] = options["query_documents"], options["key_documents"]
    if isinstance(sink := given.get("sink"), Tensor):
        given["sink"] = sink.clone().requires_grad_()
    if isinstance(bias := given.get("bias"), Tensor):
        given["bias"] = bias.clone().requires_grad_()
    forward, backward = _ran(chunked_attention, _tensors(LENGTH, LENGTH, key_heads=2), {"causal": True, **given})
    assert said.forward_kernels + 1 == pytest.approx(forward.others, abs=8)
    assert said.backward_kernels + 3 == pytest.approx(backward.others, abs=8)
