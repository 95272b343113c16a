"""Models that map functions by vmap: their programs are ops on all elements."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from autopar.testing import compare
from tests.passes.helpers import Apply, captured, normalized, op_lines

X = torch.ones(4, 6)


def test_a_level_is_ops_on_all_elements() -> None:
    """Nothing is left of the functions that begin and end it."""
    program = captured(Apply(lambda x: torch.vmap(lambda row: row * row.sum())(x) + 1), x=X)
    assert [line.split("  #")[0].split(" = ")[1] for line in op_lines(program)] == [
        "sum(x, dim=[1])",
        "view(%sum, size=[4, 1])",
        "mul(x, %view)",
        "add(%mul, other=1)",
    ]


def test_ops_say_where_they_come_from() -> None:
    """The module whose function is mapped."""
    program = normalized(nn.Sequential(_Ensemble()), input=X)
    assert {op.module for op in program.ops if "sum" not in op.kind} == {"0"}


class _Ensemble(nn.Module):
    """Three networks of equal structure, whose parameters are stacked: one is called for all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        networks = [nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2)) for _ in range(3)]
        stacked, _ = torch.func.stack_module_state(networks)
        self.stacked = nn.ParameterList([value.detach() for value in stacked.values()])
        self.names = tuple(stacked)
        # It is no part of this module.
        self.base = [networks[0].to("meta")]

    def forward(self, input: Tensor) -> dict[str, Tensor]:
        """input: [rows, 6]."""

        def one(parameters: Mapping[str, Tensor], rows: Tensor) -> Tensor:
            result: Tensor = torch.func.functional_call(self.base[0], parameters, (rows,))
            return result

        parameters = dict(zip(self.names, self.stacked, strict=True))
        return {"loss": torch.vmap(one, in_dims=(0, None))(parameters, input).square().sum()}


class _Nested(nn.Module):
    """Two levels, constants and a buffer inside, and a result that is an output as it is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.rand(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [batch, rows, 4]."""

        def pair(row: Tensor, first: Tensor) -> Tensor:
            chosen = torch.where(row.sum() > 0, row * first, row - first)
            return (chosen.softmax(-1) + torch.tensor([1.0, 2.0, 3.0, 4.0]) + self.scale) @ self.linear.weight

        rows = self.linear(x)
        mapped = torch.vmap(torch.vmap(pair, in_dims=(0, None)))(rows, x[:, 0])
        return mapped, mapped.square().sum()


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 2, "tp": 2}])
@pytest.mark.parametrize(("model", "inputs"), [(_Ensemble, {"input": (4, 6)}), (_Nested, {"x": (4, 6, 4)})])
def test_equal_to_one_device(
    model: type[nn.Module], inputs: Mapping[str, tuple[int, ...]], mesh: Mapping[str, int]
) -> None:
    """Outputs and all gradients, in float64."""
    given = {name: torch.randn(shape, generator=torch.Generator().manual_seed(0)) for name, shape in inputs.items()}
    comparison = compare(model(), mesh, given, torch.float64, cluster="ideal")
    assert comparison.worst[1] <= 1e-12, str(comparison)


def test_levels_without_gradients() -> None:
    """Around a level, and inside of one."""

    def around(x: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.vmap(lambda row: row * row.sum())(x)

    def inside(row: Tensor) -> Tensor:
        with torch.no_grad():
            scale = row.sum()
        return row * scale

    for function in (around, lambda x: torch.vmap(inside)(x)):
        kinds = [op.kind for op in normalized(Apply(function), x=X).ops]
        assert [kind for kind in kinds if kind not in ("detach", "reshape")] == ["sum", "mul"]
