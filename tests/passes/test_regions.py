"""regions: what folds, into how many copies, and under which names."""

import pytest
import torch
from torch import Tensor, nn

from passes.ir.folded import Folded, Region
from passes.ir.program import Op
from passes.regions import fold
from tests.passes.helpers import normalized, op_lines

X = torch.ones(2, 6)


class Block(nn.Module):
    """A layer: linear and relu, with a residual."""

    def __init__(self, width: int = 6, inner: int = 6, gate: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.gate = gate

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """One layer."""
        hidden = self.up(x).relu()
        if self.gate:
            hidden = hidden.tanh()
        out = x + self.down(hidden)
        return out if scale is None else out * scale


class Stack(nn.Module):
    """Layers between two other ops; with `scale` a tensor from outside is used by all of them."""

    def __init__(self, *layers: nn.Module, scale: bool = False, collect: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.scale = scale
        self.collect = collect

    def forward(self, x: Tensor) -> object:
        """One layer after the other."""
        scale = x.exp() if self.scale else None
        seen = []
        for layer in self.layers:
            x = layer(x) if scale is None else layer(x, scale)
            seen.append(x)
        return (x.sum(), seen) if self.collect else x.sum()


def folded(*layers: nn.Module, scale: bool = False, collect: bool = False) -> Folded:
    """A stack of layers, folded."""
    return fold(normalized(Stack(*layers, scale=scale, collect=collect), x=X))


@pytest.mark.parametrize("count", [2, 3, 7])
def test_equal_blocks_are_one_region(count: int) -> None:
    """A stack of equal layers folds to one region with that many copies; the rest stays as it is."""
    result = folded(*(Block() for _ in range(count)))
    region, last = result.items
    assert isinstance(region, Region)
    assert isinstance(last, Op)
    assert region.count == count
    assert region.copies == tuple((f"layers.{index}",) for index in range(count))
    assert [op.kind for op in region.ops] == ["linear", "relu", "linear", "add"]
    assert last.kind == "sum"


def test_a_region_prints_as_its_first_copy() -> None:
    """Carried tensors and the region's own parameters have names of their own; all copies' names are listed."""
    text = str(folded(Block(), Block(), Block()))
    assert text.splitlines() == [
        "region layers.* x 3",
        "  carry %carry_0: x, then %add",
        "  own layers.*.up.weight: layers.0.up.weight, ..., layers.2.up.weight",
        "  own layers.*.up.bias: layers.0.up.bias, ..., layers.2.up.bias",
        "  own layers.*.down.weight: layers.0.down.weight, ..., layers.2.down.weight",
        "  own layers.*.down.bias: layers.0.down.bias, ..., layers.2.down.bias",
        "  %linear = linear(%carry_0, layers.*.up.weight, layers.*.up.bias)",
        "  %relu = relu(%linear)",
        "  %linear_1 = linear(%relu, layers.*.down.weight, layers.*.down.bias)",
        "  %add = add(%carry_0, %linear_1)",
        "  export %add: %add_2",
        "%sum = sum(%add_2)",
    ]


def test_keys_of_ops_in_a_region() -> None:
    """The copy's number is a star, so that one key stands for all copies."""
    (region,) = folded(Block(), Block()).regions
    assert [op.key for op in region.ops] == [
        "layers.*.up/linear",
        "layers.*/relu",
        "layers.*.down/linear",
        "layers.*/add",
    ]


def test_alternating_layers_make_one_longer_region() -> None:
    """A A' A A' is two copies of the pair; each of the pair has its own number in the names."""
    pairs = [Block(gate=bool(index % 2)) for index in range(6)]
    (region,) = folded(*pairs).regions
    assert region.count == 3
    assert region.copies[1] == ("layers.2", "layers.3")
    assert [op.kind for op in region.ops].count("tanh") == 1
    assert "layers.*[0].up/linear" in [op.key for op in region.ops]
    assert "layers.*[1]/tanh" in [op.key for op in region.ops]
    assert region.owned["layers.*[1].up.weight"] == ("layers.1.up.weight", "layers.3.up.weight", "layers.5.up.weight")


def test_a_different_block_breaks_the_run() -> None:
    """Equal layers before and after a different one are two regions, and the different one stays as its ops."""
    result = folded(Block(), Block(), Block(inner=9), Block(), Block(), Block())
    assert [item.count for item in result.items if isinstance(item, Region)] == [2, 3]
    outside = [op for op in result.items if isinstance(op, Op)]
    assert [op.module for op in outside if op.kind == "linear"] == ["layers.2.up", "layers.2.down"]


def _alternating(count: int, period: int) -> list[Block]:
    """Layers of which the last of every `period` has a gate."""
    return [Block(gate=index % period == period - 1) for index in range(count)]


def test_the_period_that_covers_most_is_folded() -> None:
    """A A B A A B A is two copies of three layers, and one layer that is left over; not three runs of equal layers."""
    result = folded(*_alternating(7, 3))
    assert [line for line in str(result).splitlines() if " own " not in line] == [
        "region layers.* x 2",
        "  carry %carry_0: x, then %add_2",
        "  %linear = linear(%carry_0, layers.*[0].up.weight, layers.*[0].up.bias)",
        "  %relu = relu(%linear)",
        "  %linear_1 = linear(%relu, layers.*[0].down.weight, layers.*[0].down.bias)",
        "  %add = add(%carry_0, %linear_1)",
        "  %linear_2 = linear(%add, layers.*[1].up.weight, layers.*[1].up.bias)",
        "  %relu_1 = relu(%linear_2)",
        "  %linear_3 = linear(%relu_1, layers.*[1].down.weight, layers.*[1].down.bias)",
        "  %add_1 = add(%add, %linear_3)",
        "  %linear_4 = linear(%add_1, layers.*[2].up.weight, layers.*[2].up.bias)",
        "  %relu_2 = relu(%linear_4)",
        "  %tanh = tanh(%relu_2)",
        "  %linear_5 = linear(%tanh, layers.*[2].down.weight, layers.*[2].down.bias)",
        "  %add_2 = add(%add_1, %linear_5)",
        "  export %add_2: %add_5",
        "%linear_12 = linear(%add_5, layers.6.up.weight, layers.6.up.bias)",
        "%relu_6 = relu(%linear_12)",
        "%linear_13 = linear(%relu_6, layers.6.down.weight, layers.6.down.bias)",
        "%add_6 = add(%add_5, %linear_13)",
        "%sum = sum(%add_6)",
    ]


def test_the_shortest_of_the_periods_that_cover_as_much_is_folded() -> None:
    """Six equal layers are six copies of one, and a layer before them does not change that."""
    result = folded(Block(inner=9), *(Block() for _ in range(6)))
    assert [(region.name, region.count) for region in result.regions] == [("layers.*", 6)]


def test_equal_layers_decide_as_the_first() -> None:
    """Ops and parameters of equal layers, in the copies' body and outside of it, are mapped to those of the first."""
    alike = folded(*_alternating(7, 3)).alike
    assert alike["layers.*[1]/relu"] == alike["layers.6/relu"] == "layers.*[0]/relu"
    assert alike["layers.6.up.weight"] == "layers.*[0].up.weight"
    assert not any("[2]" in name or "[0]" in name for name in alike)
    assert {name.split(".")[1] for name in alike} == {"*[1]", "*[1]/relu", "*[1]/add", "6", "6/relu", "6/add"}


def test_layers_of_different_lists_or_labels_decide_for_themselves() -> None:
    """Layers of another list, and layers with other constraints, may take other strategies."""
    assert not folded(Pairs(2), Pairs(3)).alike
    program = normalized(Stack(*_alternating(7, 3)), x=X)
    alike = fold(program, lambda op: op.module.startswith("layers.6")).alike
    assert {name.split(".")[1].partition("/")[0] for name in alike} == {"*[1]"}


def test_the_number_of_ops_is_that_of_different_depths_with_equal_remainders() -> None:
    """Ten more periods add nothing to the folded program, and nothing to decide."""
    few, many = (folded(*_alternating(count, 6)) for count in (14, 74))
    assert [op.kind for op in many.ops] == [op.kind for op in few.ops]
    assert len(many.alike) == len(few.alike)


def test_single_layers_and_different_ones_do_not_fold() -> None:
    """Nothing repeats, nothing folds."""
    assert not folded(Block()).regions
    assert not folded(Block(inner=6), Block(inner=7), Block(inner=8)).regions


def test_frozen_layers_do_not_fold_with_trained_ones() -> None:
    """Layers of which only some have gradients do not fold together."""
    layers = [Block() for _ in range(4)]
    for parameter in [*layers[0].parameters(), *layers[1].parameters()]:
        parameter.requires_grad_(False)
    assert [region.count for region in folded(*layers).regions] == [2, 2]


def test_labels_keep_ops_apart() -> None:
    """Layers whose ops are labelled differently do not fold together."""
    program = normalized(Stack(*(Block() for _ in range(4))), x=X)
    result = fold(program, lambda op: op.module.startswith("layers.0"))
    assert [region.count for region in result.regions] == [3]


def test_tensors_from_outside_are_shared() -> None:
    """A tensor from outside that all copies read keeps its name, and is neither carried nor owned."""
    (region,) = folded(Block(), Block(), Block(), scale=True).regions
    assert [carry.initial for carry in region.carries] == ["x"]
    outside = {name for op in region.ops for name in op.operands} - {name for op in region.ops for name in op.results}
    assert "%exp" in outside - set(region.owned)


def test_tied_parameters_are_shared() -> None:
    """A parameter that all copies have in common is the same tensor in every copy, and not one of the region's own."""
    layers = [Block() for _ in range(3)]
    for layer in layers[1:]:
        layer.up.weight = layers[0].up.weight
    (region,) = folded(*layers).regions
    assert set(region.owned) == {"layers.*.up.bias", "layers.*.down.weight", "layers.*.down.bias"}
    assert "layers.0.up.weight" in region.ops[0].operands


def test_results_of_every_copy_are_exported() -> None:
    """A result that each copy exports has a name per copy; a result of the last copy alone, one name."""
    (region,) = folded(Block(), Block(), Block(), collect=True).regions
    (export,) = region.exports
    assert export.names == ("%add", "%add_1", "%add_2")
    (region,) = folded(Block(), Block(), Block()).regions
    (export,) = region.exports
    assert export.names == (None, None, "%add_2")


class Pairs(nn.Module):
    """A layer with a list of parts in it."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(parts))

    def forward(self, x: Tensor) -> Tensor:
        """All parts."""
        for part in self.parts:
            x = part(x)
        return x


def test_lists_in_a_layer_that_does_not_repeat_fold_inside() -> None:
    """If layers differ, the lists inside them are folded."""
    result = folded(Pairs(2), Pairs(3))
    assert [(region.name, region.count) for region in result.regions] == [
        ("layers.0.parts.*", 2),
        ("layers.1.parts.*", 3),
    ]


def test_layers_that_repeat_fold_as_a_whole() -> None:
    """If layers are equal, they fold, with the lists inside them written out."""
    (region,) = folded(Pairs(2), Pairs(2)).regions
    assert (region.name, region.count, len(region.ops)) == ("layers.*", 2, 4)


def test_gradients_flow_through_carries() -> None:
    """A carry has a gradient from the first copy that has trained parameters, although the input has none."""
    result = folded(Block(), Block(), Block())
    (region,) = result.regions
    assert region.carries[0].argument in result.flowing
    assert set(region.owned) <= result.flowing
    assert "x" not in result.flowing
    assert "%sum" in result.flowing


def test_unfolding_gives_the_program_again() -> None:
    """The ops of all copies, with their own names put back, are the ops of the program, in order."""
    program = normalized(Stack(*(Block(gate=bool(index % 2)) for index in range(4)), scale=True), x=X)
    result = fold(program)
    lines = []
    for item in result.items:
        if isinstance(item, Op):
            lines.append((item.target, item.operands[:0], len(item.operands)))
            continue
        for _ in range(item.count):
            lines += [(op.target, op.operands[:0], len(op.operands)) for op in item.ops]
    assert lines == [(op.target, op.operands[:0], len(op.operands)) for op in program.ops]
    assert len(op_lines(result.ops)) < len(op_lines(program))


def test_the_work_grows_with_the_number_of_ops() -> None:
    """Twice the layers ask for twice the labels, not for four times as many."""

    def asked(layers: int) -> int:
        program = normalized(Stack(*(Block() for _ in range(layers))), x=X)
        seen = []
        fold(program, lambda op: seen.append(op))
        return len(seen)

    assert asked(32) <= 2.2 * asked(16)


class Turns(nn.Module):
    """Layers that take turns: one without anything from outside, one that reads the input once more."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Tanh() if index % 2 == 0 else Again() for index in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """One layer after the other."""
        hidden = x
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden) if index % 2 == 0 else layer(hidden, x)
        return hidden


class Again(nn.Module):
    """A sum with what is read again."""

    def forward(self, hidden: Tensor, x: Tensor) -> Tensor:
        """One layer."""
        return hidden * 2 + x


def test_layers_that_read_the_same_twice_are_no_copies_of_layers_that_do_not() -> None:
    """The first two layers are given one tensor for both that later ones are given: they stand by themselves."""
    result = fold(normalized(Turns(8), x=X))
    (region,) = result.regions
    assert region.count == 3
    assert [op.kind for op in region.ops] == ["mul", "add", "tanh"]
    assert [op.kind for op in result.items if isinstance(op, Op)] == ["tanh", "mul", "add"]


class Twice(nn.Module):
    """All layers, and then those from `start` on once more."""

    def __init__(self, count: int, start: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(count))
        self.start = start

    def forward(self, x: Tensor) -> Tensor:
        """One layer after the other."""
        for layer in self.layers:
            x = layer(x)
        x = x.sin()
        for layer in self.layers[self.start :]:
            x = layer(x)
        return x


@pytest.mark.parametrize(("start", "copies"), [(0, []), (4, [4]), (5, [5])])
def test_layers_that_run_again_elsewhere_do_not_fold(start: int, copies: list[int]) -> None:
    """Their parameters can be stored in one way only, and a region would choose for itself."""
    assert [region.count for region in fold(normalized(Twice(6, start), x=X)).regions] == copies


class Picks(nn.Module):
    """A layer that makes constants of its own: it picks two features and adds them to all."""

    def __init__(self, first: int = -2) -> None:
        super().__init__()
        self.first = first
        self.up = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        hidden = self.up(x)
        return hidden + hidden[..., [self.first]] + hidden[..., [-1]]


def test_layers_that_make_equal_constants_fold() -> None:
    """Constants of the same values are one; layers with other values stay apart."""
    alike = folded(Picks(), Picks(), Picks())
    assert [region.count for region in alike.regions] == [3]
    assert len(alike.program.constants) == 2
    assert not folded(Picks(), Picks(-3), Picks(-4)).regions


class Chooses(nn.Module):
    """A layer that multiplies the features with the highest scores; scores get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.up = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        best = self.score(x).topk(2).indices
        return x + self.up(x) * torch.zeros_like(x).scatter(-1, best, 1.0)


def test_gradients_flow_only_to_what_an_output_depends_on() -> None:
    """Not through indices, neither in layers that fold nor in those that do not."""
    for model in (folded(Chooses(), Chooses(), Chooses()), folded(Chooses(), Picks())):
        flowing = {op.key.rpartition("/")[0].rpartition(".")[2] for op in model.ops if set(op.results) & model.flowing}
        assert "up" in flowing
        assert "score" not in flowing
        assert not {name for name in model.flowing if "score" in name}
