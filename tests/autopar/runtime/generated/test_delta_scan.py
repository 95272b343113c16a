"""The scan of split chunks: its price counts the products and the kernels that run."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from autopar.runtime.generated.delta_scan import gradients_between, states_between
from passes.cost.price import shares
from passes.ir.rule import Rule
from passes.rules.scan_forms import scan_work
from passes.rules.strategies import named_choices
from passes.scans.delta import add_carry_gradients, carry
from tests.autopar.runtime.generated.kernels import Kernels
from tests.passes.helpers import mesh_of
from tests.passes.rules.one_op import one_op
from tests.passes.rules.samples import Sample

BATCH, HEADS, CHUNKS, PLACES, WIDTH, OUT = 2, 3, 8, 4, 6, 10


def _operands(chunks: int, out: int, channels: int = 1) -> tuple[torch.Tensor, ...]:
    above = (BATCH, HEADS, chunks)
    within = (*(torch.randn(*above, PLACES, width) for width in (WIDTH, WIDTH, out, WIDTH)),)
    return (*within, torch.randn(*above, PLACES, PLACES), torch.rand(*above, channels))


@pytest.mark.parametrize(("ranks", "methods"), [((2,), "chunks"), ((4,), "chunks"), ((2, 2), "chunks out")])
def test_products_are_counted(ranks: tuple[int, ...], methods: str) -> None:
    """Those of what chunks do to a state, and of the states between ranks, besides the op on a rank's part, as torch
    counts what runs on the rank with the last chunks."""
    mesh = mesh_of(**dict(zip("ab", ranks, strict=False)))
    one = one_op(Sample("autopar.delta_scan.default", (*_operands(CHUNKS, OUT), None), {}))
    choices = named_choices(one.context, methods.split(), mesh)
    assert choices is not None
    assert one.rule is not None
    over = dict(zip(methods.split(), ranks, strict=True))
    own = _operands(CHUNKS // over["chunks"], OUT // over.get("out", 1))
    _, key, values, reads, _, decay = own
    with FlopCounterMode(display=False) as forward:
        function = carry(key, values, reads, decay)
        every = function.unsqueeze(2).repeat(1, 1, over["chunks"], 1, 1)
        last = states_between(every, None)[-1]
    given = [key, values, reads, decay]
    with FlopCounterMode(display=False) as backward:
        gradients_between(every, None, last, over["chunks"] - 1, last)
        add_carry_gradients(given, function, [torch.zeros_like(each) for each in given])
    part = 1 / mesh.size
    more = [share - part for share in shares(one.rule, choices, mesh.sizes)]
    whole = one.rule.multiplications
    assert forward.get_total_flops() == pytest.approx(whole * more[0])
    assert backward.get_total_flops() == pytest.approx(whole * sum(one.rule.backward) * more[1])


def _counts(chunks: int, ranks: int) -> tuple[int, int]:
    """Kernels of the forward and of the backward pass, besides the op on a rank's part."""
    _, key, values, reads, _, decay = _operands(chunks, OUT)
    given = [key, values, reads, decay]
    found = [torch.zeros_like(each) for each in given]
    with torch.no_grad():
        with Kernels() as forward:
            function = carry(key, values, reads, decay)
        every = function.unsqueeze(2).repeat(1, 1, ranks, 1, 1)
        with forward:
            last = states_between(every, None)[-1]
        with Kernels() as backward:
            gradients_between(every, None, last, ranks - 1, last)
            add_carry_gradients(given, function, found)
    return forward.others, backward.others


def test_kernels_are_counted() -> None:
    """Each further chunk of a rank, and each further rank, launches as many as the price says."""
    one = one_op(Sample("autopar.delta_scan.default", (*_operands(CHUNKS, OUT), None), {}))
    assert one.rule is not None
    for first, second in (((4, 2), (8, 2)), ((4, 2), (4, 6))):
        runs = [_counts(*each) for each in (first, second)]
        said = [scan_work(_with_chunks(one.rule, *each), {"chunks": each[1]}) for each in (first, second)]
        for number, name in enumerate(("forward_kernels", "backward_kernels")):
            grown = getattr(said[1], name) - getattr(said[0], name)
            assert runs[1][number] - runs[0][number] == grown


def _with_chunks(rule: Rule, chunks: int, ranks: int) -> Rule:
    """The rule of so many chunks on each of so many ranks."""
    own = replace(rule.factors["chunks"], size=chunks * ranks)
    return replace(rule, factors={**rule.factors, "chunks": own})
