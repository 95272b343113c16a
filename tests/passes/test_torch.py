from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar._torch import OVERRIDDEN
from passes import _torch
from tests.private_names import private_names

ROOT = Path(autopar.__file__).parents[1]
DOORS = {ROOT / "passes/_torch.py", ROOT / "autopar/_torch.py", ROOT / "autopar/runtime/fsdp/_torch.py"}
SOURCES = [path for room in ("autopar", "passes") for path in sorted((ROOT / room).rglob("*.py"))]


def test_private_names_of_torch_are_used_behind_the_doors_alone():
    assert set(SOURCES) >= DOORS
    found = [use for path in SOURCES if path not in DOORS for use in private_names(path, set(OVERRIDDEN))]
    assert found == []


@pytest.mark.parametrize("path", sorted(DOORS), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_door_says_for_which_versions_it_was_checked(path: Path):
    assert "2.11" in path.read_text().split('"""')[1]
    assert "2.13" in path.read_text().split('"""')[1]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch.utils import _pytree as pytree", "torch.utils._pytree"),
        ("from torch.fx.experimental.proxy_tensor import make_fx", "torch.fx.experimental.proxy_tensor.make_fx"),
        ("torch._C.DisableTorchFunction()", "_C"),
        ("torch.fx.experimental.symbolic_shapes", "torch.fx.experimental"),
        ("def f(tensor):\n    return tensor._version", "_version"),
        ("class M(nn.Module):\n    def f(self):\n        return self._parameters", "_parameters"),
        ("class M(nn.Module):\n    def _apply(self, fn):\n        pass", "_apply"),
        ('getattr(tensor, "_spec")', "_spec"),
        ('vars(module)["_buffers"]', "_buffers"),
        ('names = ["torch._inductor"]', "torch._inductor"),
    ],
)
def test_private_names_are_found(text: str, name: str, tmp_path: Path):
    path = tmp_path / "source.py"
    path.write_text(text)
    assert [use.split(": ")[1] for use in private_names(path, set())] == [name]


def test_own_private_names_are_no_finding(tmp_path: Path):
    path = tmp_path / "source.py"
    path.write_text("class A:\n    def __init__(self, other):\n        self._kept = other._kept\n")
    assert list(private_names(path, set())) == []


# --- each name is what it is taken for -------------------------------------------------------------------------------


def test_schemas_and_names_of_operators():
    add = torch.ops.aten.add_.Tensor
    assert isinstance(add, _torch.OpOverload)
    assert [item.name for item in _torch.schema_of(add).arguments] == ["self", "other", "alpha"]
    assert _torch.schema_of(add).is_mutable
    assert _torch.operator_name(add) == "add_"
    assert _torch.operator_name(len) == ""
    assert isinstance(_torch.AUTOGRAD_FUNCTION_APPLY, _torch.HigherOrderOperator)
    assert _torch.decomposition_table[torch.ops.aten.addcmul.default] is not None
    for attention in (_torch.FLASH_ATTENTION, _torch.EFFICIENT_ATTENTION):
        assert [item.name for item in _torch.schema_of(attention).arguments[:3]] == ["query", "key", "value"]


def test_versions_and_storages_of_tensors():
    tensor = torch.zeros(4, device="meta")
    before = _torch.version_of(tensor)
    tensor[1:].add_(1)
    assert _torch.version_of(tensor) == before + 1
    assert _torch.storage_id(tensor[2:]) == _torch.storage_id(tensor) != _torch.storage_id(tensor.clone())
    assert _torch.storage_number(tensor.untyped_storage()) == _torch.storage_id(tensor)


def test_tables_of_modules():
    module = nn.BatchNorm1d(2)
    assert set(_torch.TABLES) <= set(vars(module))
    assert vars(module)[_torch.PARAMETERS] is _torch.parameters_of(module)
    assert _torch.parameters_of(module)["weight"] is module.weight
    assert _torch.buffers_of(module)["running_mean"] is module.running_mean


class _Seen(_torch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.functions.append(function)
        return function(*args, **(kwargs or {}))


def test_modes():
    tensor = torch.ones(())
    with _Seen() as seen:
        tensor.item()
        with _torch.without_modes():
            tensor.item()
    assert seen.functions == [_torch.NUMBER_OF_TENSOR]


def test_function_modes():
    class Refusing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            raise AssertionError(function)

    with Refusing(), _torch.without_function_modes():
        assert torch.ones(2).sum() == 2


def test_symbols_of_a_trace():
    shapes = _torch.ShapeEnv()
    mode = _torch.FakeTensorMode(shape_env=shapes)
    context = _torch.StatelessSymbolicContext(dynamic_sizes=[_torch.DimDynamic.DYNAMIC])
    assert isinstance(context, _torch.SymbolicContext)
    tensor = mode.from_tensor(torch.ones(6), symbolic_context=context)
    assert isinstance(tensor.shape[0], torch.SymInt)
    assert not _torch.free_unbacked_symbols(tensor.shape[0])
    with mode:
        number = torch.ones((), dtype=torch.int64).add(tensor.shape[0]).item()
        assert _torch.free_unbacked_symbols(number)
        with pytest.raises(_torch.GuardOnDataDependentSymNode):
            bool(number > 3)
    with _torch.FakeTensorMode():
        with pytest.raises(_torch.DataDependentOutputException):
            torch.ones(()).item()
        with pytest.raises(_torch.DynamicOutputShapeException):
            torch.ones(2).nonzero()


def test_graphs_of_functions():
    graph = _torch.make_fx(lambda x: x.relu() + 1)(torch.ones(2))
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert targets == [torch.ops.aten.relu.default, torch.ops.aten.add.Tensor]


def test_trees():
    leaves, tree = _torch.pytree.tree_flatten({"a": [1, 2], "b": (3,)})
    assert leaves == [1, 2, 3]
    assert _torch.pytree.tree_unflatten(leaves, tree) == {"a": [1, 2], "b": (3,)}
