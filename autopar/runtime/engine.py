"""The engine of data axes: `fully_shard` of torch gathers parameters and reduces their gradients.

Each group of parameters is a module of its own that holds nothing else, and is called around what reads them. The
model's own parameters, which users see, share memory with what the engine stores, and take the gradients when it has
reduced them. So they are the same before, during and after a step, whatever the engine has gathered.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from autopar.runtime.groups import axes_group, axes_ranks
from autopar.runtime.state import from_local, mesh_of
from passes.ir.layout import Layout, Shape, whole_shape
from passes.ir.lowered import Group, Held

T = TypeVar("T")


class Reading(Protocol):
    """What parameters are read from."""

    def current(self, number: int) -> Tensor:
        """A parameter as it is now."""


class ParameterGroup(nn.Module):
    """Parameters that are gathered while it runs what it is called with. `kept` are their names."""

    def __init__(self, parts: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.kept = tuple(parts)
        for number, part in enumerate(parts.values()):
            self.register_parameter(str(number), part)

    def forward(self, run: Callable[..., object], *inputs: Tensor) -> object:
        """`run(*inputs)`, with the parameters there."""
        result = run(*inputs)
        # Their memory is given back: what is a view of one needs its own.
        held = {part.untyped_storage()._cdata for part in self._parameters.values() if part is not None}
        if isinstance(result, tuple):
            return tuple(_apart(item, held) for item in result)
        return _apart(result, held)

    def current(self, number: int) -> Tensor:
        """A parameter as it is now: gathered while the group runs, or else this rank's part."""
        found = self._parameters[str(number)]
        assert found is not None
        return found


def _apart(result: object, held: Set[int]) -> object:
    """`result`, as a copy if it lies in one of the storages `held`."""
    return result.clone() if isinstance(result, Tensor) and result.untyped_storage()._cdata in held else result


def within(groups: Sequence[nn.Module], run: Callable[..., object], inputs: Sequence[Tensor]) -> object:
    """`run(*inputs)` with the parameters of `groups` gathered."""
    for group in groups:
        run = partial(group, run)
    return run(*inputs)


class PartView:
    """A part of the model as generated code sees it: what a group holds is read from there, all else from the part."""

    def __init__(self, part: nn.Module, held: Mapping[str, tuple[Reading, int]]) -> None:
        own: dict[str, tuple[Reading, int]] = {}
        inner: dict[str, dict[str, tuple[Reading, int]]] = {}
        for path, reading in held.items():
            name, _, rest = path.partition(".")
            if rest:
                inner.setdefault(name, {})[rest] = reading
            else:
                own[name] = reading
        self.__part = part
        # Without paths, so that what is compiled for one copy of a region serves the others.
        self.__own = own
        for name, module in part._modules.items():
            if module is not None:
                self.__dict__[name] = PartView(module, inner.get(name, {}))

    def __getattr__(self, name: str) -> object:
        reading = self.__own.get(name)
        if reading is not None:
            group, number = reading
            return group.current(number)
        result: object = getattr(self.__part, name)
        return result

    def __getitem__(self, name: int | str) -> object:
        """What lies here under a name that is no identifier, `layers[0]`; None where there is nothing."""
        return getattr(self, str(name), None)


@dataclass(frozen=True)
class _Shown:
    """A parameter that users see under a path, how it lies, and what the engine stores of it."""

    path: str
    layout: Layout
    shape: Shape
    kept: Tensor


class Engine:
    """The groups of a model, and the parameters that users see of them."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._shape = mesh_of(mesh)
        self._meshes: dict[tuple[tuple[int, ...], tuple[int, ...]], DeviceMesh] = {}
        self._groups: list[ParameterGroup] = []
        self._shown: list[_Shown] = []
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        self._root: FSDPModule | None = None
        self._keeping = False

    # --- what it holds ---

    def add(
        self, plan: Group, parts: Mapping[str, nn.Parameter], stored: Mapping[str, Layout]
    ) -> dict[str, nn.Parameter]:
        """Take over the parameters of a group, given whole on its axes; every rank calls it alike.

        Returns the parameters that users see, which lie as `stored` says.
        """
        assert self._root is None, "the engine has run"
        shapes = {
            name: whole_shape(tuple(part.shape), plan.used(stored[name]), self._shape) for name, part in parts.items()
        }
        dims = {id(part): plan.parameters[name] for name, part in parts.items()}
        group = ParameterGroup(parts)
        compute, reduce = plan.dtypes
        sharded = fully_shard(
            group,
            mesh=self._data_mesh(plan.sharded, plan.replicated),
            reshard_after_forward=plan.again,
            shard_placement_fn=lambda parameter: Shard(dims[id(parameter)]),
            mp_policy=MixedPrecisionPolicy(compute, reduce, cast_forward_inputs=False),
        )
        # Gradients are addends, because the loss is that of the whole batch. Not every backend has a sum that scales.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        # What the backward pass does not read is not gathered for it.
        sharded.set_unshard_in_backward(plan.saved)
        self._groups.append(group)
        added = [
            _Shown(name, stored[name], shapes[name], group.current(number))
            for number, name in enumerate(plan.parameters)
        ]
        for shown in added:
            if shown.kept.requires_grad:
                shown.kept.register_post_accumulate_grad_hook(partial(self._hand_over, shown))  # type: ignore[no-untyped-call]
        self._shown += added
        return {
            shown.path: nn.Parameter(self._whole_tensor(_part_of(shown.kept), shown), shown.kept.requires_grad)
            for shown in added
        }

    def bind(self, root: nn.Module) -> None:
        """Find in `root` what users see: there gradients go, and values come from."""
        for shown in self._shown:
            path, _, name = shown.path.rpartition(".")
            self._owners[shown.path] = root.get_submodule(path), name

    def _parameter(self, shown: _Shown) -> nn.Parameter:
        """What users see now: they may put another one in its place."""
        owner, name = self._owners[shown.path]
        found = owner._parameters[name]
        assert found is not None
        return found

    def _whole_tensor(self, part: Tensor, shown: _Shown) -> DTensor:
        return from_local(part, shown.layout, shown.shape, self._mesh, self._shape)

    def _data_mesh(self, sharded: tuple[int, ...], replicated: tuple[int, ...]) -> DeviceMesh:
        """The mesh of `fully_shard`: one axis that shards, and before it one that replicates, if there is any."""
        found = self._meshes.get((sharded, replicated))
        if found is None:
            shard, shard_ranks = axes_group(self._mesh, sharded)
            if replicated:
                replicate, _ = axes_group(self._mesh, replicated)
                ranks = axes_ranks(self._mesh, (*replicated, *sharded)).reshape(replicate.size(), shard.size())
                names = ("replicate", "shard")
                found = DeviceMesh.from_group([replicate, shard], self._mesh.device_type, ranks, mesh_dim_names=names)
            else:
                found = DeviceMesh.from_group(shard, self._mesh.device_type, shard_ranks, mesh_dim_names=("shard",))
            self._meshes[sharded, replicated] = found
        return found

    def _hand_over(self, shown: _Shown, kept: Tensor) -> None:
        """Hand a reduced gradient over to the parameter that users see."""
        gradient, kept.grad = kept.grad, None
        parameter = self._parameter(shown)
        if gradient is None or not parameter.requires_grad:
            return
        part = _part_of(gradient)
        if parameter.grad is None:
            parameter.grad = self._whole_tensor(part, shown)
        else:
            _part_of(parameter.grad).add_(part)
        # Autograd does not know this parameter, so what waits for its gradient is called here.
        hooks: Mapping[int, Callable[[Tensor], None]] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        for hook in tuple(hooks.values()):
            hook(parameter)

    # --- programs ---

    def view(self, root: nn.Module, held: Held) -> nn.Module | PartView:
        """The model as a program with `held` sees it."""
        table = {
            name: (self._groups[number], place)
            for number, group in enumerate(held.groups)
            for place, name in enumerate(group.parameters)
            if name in held.parameters
        }
        return PartView(root, table) if table else root

    def groups(self, held: Held) -> dict[str, ParameterGroup]:
        """The groups by their first parameter."""
        return {next(iter(plan.parameters)): group for plan, group in zip(held.groups, self._groups, strict=True)}

    def around_copies(self, held: Held) -> tuple[tuple[tuple[ParameterGroup, ...], ...], ...]:
        """The groups around each copy of each region."""
        return tuple(tuple(tuple(self._groups[item] for item in copy) for copy in loop) for loop in held.copies)

    def run(self, held: Held, forward: Callable[..., T], inputs: Sequence[Tensor]) -> T:
        """`forward(*inputs)` of the program with `held`."""
        if not held.parameters:
            return forward(*inputs)
        root = self._whole()
        if not self._keeping:
            # What was gathered for a backward pass that never came may be of old values.
            self._drop()
        self._take_values()
        try:
            with _without_inference_mode():
                result = cast(nn.Module, root)(forward, *inputs)
        except BaseException:
            # What the engine was about to do is not to be done in the next call.
            _forget(root)
            raise
        if not torch.is_grad_enabled() and not self._keeping:
            self._drop()
        return cast(T, result)

    @contextlib.contextmanager
    def holding_gradients(self) -> Iterator[None]:
        """Backward passes within add up gradients without reducing them; the first one afterwards reduces the sum."""
        root = self._whole()
        root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)

    @contextlib.contextmanager
    def keeping_parameters(self) -> Iterator[None]:
        """Parameters that are kept for the backward pass stay gathered after it, until this is left."""
        root = self._whole()
        self._drop()
        self._keeping = True
        root.set_reshard_after_backward(False)
        try:
            yield
        finally:
            root.set_reshard_after_backward(True)
            self._keeping = False
            self._drop()

    def _whole(self) -> FSDPModule:
        """The module around all groups, which is called around every program: `fully_shard` needs to know them all."""
        if self._root is None:
            root = ParameterGroup({})
            root.add_module("groups", nn.ModuleList(self._groups))
            self._root = fully_shard(root, mesh=self._data_mesh((0,), ()))
        return self._root

    def _drop(self) -> None:
        """Keep nothing gathered."""
        for group in self._groups:
            assert isinstance(group, FSDPModule)
            group.reshard()

    def _take_values(self) -> None:
        """Take over values that came with other memory, as `load_state_dict(..., assign=True)` brings them."""
        for shown in self._shown:
            given, kept = _part_of(self._parameter(shown)), _part_of(shown.kept)
            if given.data_ptr() != kept.data_ptr():
                kept.copy_(given)


def _part_of(tensor: Tensor) -> Tensor:
    """This rank's part of a `DTensor`, without gradient."""
    assert isinstance(tensor, DTensor)
    with torch.no_grad():
        return tensor.to_local().detach()


@contextlib.contextmanager
def _without_inference_mode() -> Iterator[None]:
    """What is gathered for the first time makes the memory for all times: that must be fit for training."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def _forget(root: FSDPModule) -> None:
    """Let the engine begin anew after an exception; older versions of torch do so by themselves, as far as they can."""
    forget = getattr(root, "reset_iter_state", None)
    if forget is not None:
        forget()
