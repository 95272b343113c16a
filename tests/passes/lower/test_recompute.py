"""recompute: which level holds for which region, and which statements a level marks."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from passes.ir.configuration import Configuration
from passes.ir.errors import ConstraintError
from passes.ir.folded import Region
from passes.ir.lowered import Compute, Loop, Stage
from passes.lower.recompute import check_patterns, levels, recompute
from passes.solve import solve
from passes.solve.limits import Limits
from tests.passes.helpers import mesh_of, source_of
from tests.passes.planning import STATES, planning

MESH = mesh_of(dp=2)


class Layer(nn.Module):
    """Something of each kind: a product, what is cheap, a view, a draw, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        hidden = self.up(self.norm(x)).relu().transpose(0, 1)
        return x + nn.functional.dropout(hidden.transpose(0, 1), 0.5)


class Model(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers, and sum."""
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def _lowered() -> Stage:
    plan = planning(Model(), {"x": torch.empty(4, 8, device="meta")}, MESH)
    return plan.lowered(solve(plan.problem, plan.cluster, Limits(1e12, STATES), Configuration(MESH)))


def _loop(lowered: Stage) -> Loop:
    (loop,) = (item for item in lowered.body.statements if isinstance(item, Loop))
    return loop


def test_selective_marks_what_is_cheap() -> None:
    """Norms and activations; no products, no views, no draws, and not what the layer gives to the next."""
    loop = _loop(recompute(_lowered(), {"layers.*": "selective"}))
    computed = [item for item in loop.body.statements if isinstance(item, Compute)]
    marked = [item.op.kind for item in computed if item.recomputed]
    assert marked == ["layer_norm", "relu"]
    assert [item.op.kind for item in computed if not item.recomputed] == [
        "linear",
        "transpose",
        "transpose",
        "dropout",
        "add",
    ]
    assert loop.recompute == "selective"


def test_ops_mark_every_second_product() -> None:
    """Of products in a row the second; attention and what the layer gives to the next stay."""
    loop = _loop(_lowered())
    (linear,) = (item for item in loop.body.statements if isinstance(item, Compute) and item.op.kind == "linear")
    several = [replace(linear, whole=replace(linear.whole, key=name)) for name in "abcde"]
    several = [replace(item, op=replace(item.op, key=item.whole.key)) for item in several]
    body = replace(loop.body, statements=(*several, *loop.body.statements))
    lowered = _lowered()
    statements = tuple(replace(item, body=body) if item == loop else item for item in lowered.body.statements)
    lowered = replace(lowered, body=replace(lowered.body, statements=statements))
    for level, expected in (("selective", set()), ("ops", {"b", "d", linear.op.key})):
        marked = _loop(recompute(lowered, {"layers.*": level})).body.statements
        found = {item.op.key for item in marked if isinstance(item, Compute) and item.recomputed}
        assert {key for key in found if key in "abcde" or key == linear.op.key} == expected


def test_other_levels_mark_no_statement() -> None:
    """A region is run again as a whole, or not at all."""
    lowered = _lowered()
    assert recompute(lowered, {}) == lowered
    full = _loop(recompute(lowered, {"layers.*": "full"}))
    assert full == replace(_loop(lowered), recompute="full")


def test_source_says_it() -> None:
    """Recomputed ops are a function of their operands, and a region is called through the program."""
    lowered = _lowered()
    selective = source_of(recompute(lowered, {"layers.*": "selective"}), MESH)
    assert " = recomputed(lambda up: " in selective
    assert ", recomputed" in next(line for line in selective.splitlines() if "autopar.runtime" in line)
    full = source_of(recompute(lowered, {"layers.*": "full"}), MESH)
    assert " = self.recomputed(copy, " in full
    compile(selective, "selective", "exec")
    compile(full, "full", "exec")


def _regions(*names: str) -> list[Region]:
    return [Region(name, (("a",), ("b",)), (), (), {}, ()) for name in names]


def test_the_longest_pattern_holds() -> None:
    """Of several that match."""
    asked = {"*": "selective", "encoder.*": "full", "encoder.blocks.*": "none"}
    regions = ["encoder.layers.*", "encoder.blocks.*", "decoder.layers.*"]
    assert levels(regions, asked) == {
        "encoder.layers.*": "full",
        "encoder.blocks.*": "none",
        "decoder.layers.*": "selective",
    }
    assert levels(regions[:1], {}) == {"encoder.layers.*": "none"}


def test_patterns_that_match_nothing_are_refused() -> None:
    """By name, with those that there are; all there are may be none."""
    with pytest.raises(ConstraintError, match=r"'layer' matches no region: these repeat: layers\.\*"):
        check_patterns(_regions("layers.*"), {"layer": "full"})
    with pytest.raises(ConstraintError, match="nothing repeats in the model"):
        check_patterns([], {"layers.*": "full"})
    check_patterns([], {"*": "full"})


def test_some_copies_are_a_loop_of_their_own() -> None:
    """The first two of three layers are recomputed; the third takes what the second gives. Both loops together run what
    one did, and other statements stay as they are."""
    lowered = _lowered()
    some = recompute(lowered, {"layers.*": "full:2, selective"})
    first, second = (item for item in some.body.statements if isinstance(item, Loop))
    whole = _loop(lowered)
    assert [(each.block, list(each.copies), each.recompute) for each in (first, second)] == [
        ("layers.0-1", [0, 1], "full"),
        ("layers.2", [2], "selective"),
    ]
    assert first.initial == whole.initial
    carried = dict(first.exports)[whole.region.carries[0].next][-1]
    assert second.initial in ((carried,), (f"{carried}~carried",))
    assert carried in some.body.types
    assert some.body.layouts[second.initial[0]] == second.body.layouts[second.body.arguments[0]]
    assert second.exports == tuple((value, names[2:]) for value, names in whole.exports)
    others = [[item for item in each.body.statements if not isinstance(item, Loop)] for each in (lowered, some)]
    assert [item for item in others[1] if item in others[0]] == others[0]
    assert recompute(lowered, {"layers.*": "full:3"}) == recompute(lowered, {"layers.*": "full"})
    text = source_of(some, MESH)
    assert text.count(" = self.recomputed(copy, ") == 1
    assert "# layers.0-1 x 2" in text
    assert "# layers.2 x 1" in text


def test_more_copies_than_there_are_are_refused() -> None:
    """The sentence says how many there are."""
    regions = [item.region for item in _lowered().body.statements if isinstance(item, Loop)]
    check_patterns(regions, {"layers.*": "full:3"})
    with pytest.raises(ConstraintError, match=r"recompute of 'layers.\*' is 'full:4', but it has 3 copies"):
        check_patterns(regions, {"layers.*": "full:4"})
