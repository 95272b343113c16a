"""Programs as data: how they print, and what depends on what."""

import torch
from torch import nn

from passes.ir.arguments import Ref, find_overload, freeze, references, rename
from passes.ir.folded import dependents
from passes.ir.layout import I
from passes.ir.program import Op, TensorType
from passes.regions import fold
from tests.passes.helpers import Apply, captured, normalized, printed


class Model(nn.Module):
    """A parameter with two names, a buffer, a constant, and a plain value among the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 3)
        self.again = self.proj
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        """A projection, scaled and shifted by positions."""
        positions = torch.arange(3)
        return {"out": self.proj(x) * self.scale + positions, "count": 3}


def test_a_program_prints_one_line_per_thing() -> None:
    """Inputs, parameters under all names, buffers, ops with only what is not default, outputs."""
    assert printed(captured(Model(), x=torch.ones(2, 4))) == [
        "input x: float32[2, 4]",
        "parameter proj.weight = again.weight: float32[3, 4]",
        "parameter proj.bias = again.bias: float32[3]",
        "buffer scale: float32[3]",
        "%arange = arange(end=3, device=cpu, pin_memory=False)",
        "%linear = linear(x, proj.weight, proj.bias)",
        "%mul = mul(%linear, scale)",
        "%add = add(%mul, %arange)",
        "output out: %add",
        "output count: 3",
    ]


def test_comments_have_types_and_modules() -> None:
    """Each op says what it gives and where in the model it stands."""
    lines = str(captured(Model(), x=torch.ones(2, 4))).splitlines()
    (linear,) = [line for line in lines if line.startswith("%linear")]
    assert linear.split("  # ")[1].split("  ")[0] == "float32[2, 3]"
    assert linear.endswith(("  proj", "  again"))


def test_dependents_leave_out_what_no_batch_changes() -> None:
    """Positions and what is made of them and buffers alone are the same for every batch."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(4).float()
        return x * places.cos()

    folded = fold(normalized(Apply(forward), x=torch.ones(2, 4)))
    dependent = dependents(folded)
    made = {op.kind: op.results[0] in dependent for op in folded.ops}
    assert made == {"arange": False, "to": False, "cos": False, "mul": True}


def test_references_and_rename() -> None:
    """References are found in nested arguments, in order, and replaced there."""
    argument = (Ref("a"), 3, (Ref("b"), None), Ref("a"))
    assert list(references(argument)) == ["a", "b", "a"]
    assert rename(argument, lambda name: Ref(name + "!")) == (Ref("a!"), 3, (Ref("b!"), None), Ref("a!"))
    assert freeze([1, [2, Ref("a")]]) == (1, (2, Ref("a")))


def test_operands_in_the_order_of_the_schema() -> None:
    """A tensor that is read twice stands twice."""
    op = Op("aten.add.Tensor", {"self": Ref("x"), "other": Ref("x"), "alpha": 1}, ("%y",))
    assert op.operands == ("x", "x")
    assert op.kind == "add"
    assert op.overload is torch.ops.aten.add.Tensor
    assert find_overload("aten.mm.default") is torch.ops.aten.mm.default


def test_types_know_their_size() -> None:
    """Elements and bytes of a whole tensor."""
    type = TensorType((2, 3), torch.bfloat16)
    assert (type.size, type.bytes, str(type)) == (6, 12, "bfloat16[2, 3]")
    assert TensorType((), torch.int64).size == 1
    assert str(I) == "I"
