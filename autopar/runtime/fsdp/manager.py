"""The FSDP manager: gathers parameters over data axes and reduces their gradients.

`fully_shard` of torch gathers parameters. Each FSDP unit is a module of its own that holds nothing but parameters, and
is called around the code that reads them (`units.py`). Of parameters that are read as they are stored, gradients are
reduced, and that is all (`reductions.py`). The parameters that users see share memory with those that the units store,
and take the gradients when they are reduced (`gradients.py`). So they are the same before, during and after a step,
whatever is gathered.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from autopar.runtime.fsdp import _torch as fsdp
from autopar.runtime.fsdp.gradients import OwnPart, UnitGradients, UnitParameter
from autopar.runtime.fsdp.reductions import BackwardPasses, Reductions
from autopar.runtime.fsdp.turns import Turn, transfer_all, way_between
from autopar.runtime.fsdp.units import ParameterGroup, PartView
from autopar.runtime.ranks.groups import axes_group, data_mesh
from autopar.runtime.state import mesh_of
from passes.ir.layout import Layout, whole_shape
from passes.ir.lowered import FSDPUnit, FSDPUnits

T = TypeVar("T")


class FSDPManager:
    """The FSDP units of a model, and the parameters that users see of them."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._shape = mesh_of(mesh)
        self._meshes: dict[tuple[tuple[int, ...], tuple[int, ...]], DeviceMesh] = {}
        # By the groups of plans: an FSDP unit, or parameters that are read as they are stored.
        self._units: list[ParameterGroup | tuple[nn.Parameter, ...]] = []
        self._gradients = UnitGradients(mesh)
        self._reductions = Reductions(self._gradients.hand_over)
        self._root: FSDPModule | None = None
        self._has_run = False
        # Places of the program that units are prefetched for.
        self._places: tuple[tuple[int, ...], ...] = ()
        self._keeping = False
        # Whether copies in other layouts were made since parameters are kept.
        self._has_turned = False
        self._backward = BackwardPasses(self._gradients, self._reductions)

    # --- its parameters ---

    def add(
        self, plan: FSDPUnit, parts: Mapping[str, nn.Parameter], stored: Mapping[str, Layout]
    ) -> dict[str, nn.Parameter]:
        """Take ownership of the parameters of a group, given whole on its axes; every rank calls it alike.

        Returns the parameters that users see, which lie as `stored` says.
        """
        assert self._root is None, "the FSDP manager has run"
        return self._add_gathered(plan, parts, stored) if plan.gathers else self._add_replicated(plan, parts, stored)

    def _add_replicated(
        self, plan: FSDPUnit, parts: Mapping[str, nn.Parameter], stored: Mapping[str, Layout]
    ) -> dict[str, nn.Parameter]:
        """Take ownership of parameters that are read as they are stored."""
        group, _ = axes_group(self._mesh, plan.replicated)
        parameters = tuple(parts.values())
        leaves = self._reductions.add(group, len(self._gradients.parameters), parameters)
        self._units.append(parameters)
        first = dist.get_rank(group) == 0
        return {
            name: self._gradients.add(
                UnitParameter(
                    name,
                    whole_shape(tuple(part.shape), plan.gathered_layout(stored[name]), self._shape),
                    stored[name],
                    plan.gradient_layout(stored[name]),
                    OwnPart(0, 0, first),
                    part,
                    leaf,
                    part.requires_grad,
                )
            )
            for (name, part), leaf in zip(parts.items(), leaves, strict=True)
        }

    def _add_gathered(
        self, plan: FSDPUnit, parts: Mapping[str, nn.Parameter], stored: Mapping[str, Layout]
    ) -> dict[str, nn.Parameter]:
        """Take ownership of the parameters of an FSDP unit."""
        kept = {name: plan.copy_layout(name, stored[name]) for name in parts}
        shapes = {
            name: whole_shape(tuple(part.shape), plan.gathered_layout(kept[name]), self._shape)
            for name, part in parts.items()
        }
        dims = {id(part): plan.parameters[name] for name, part in parts.items()}
        group = ParameterGroup(parts)
        compute, reduce = plan.dtypes
        mesh = self._data_mesh(plan.sharded, plan.replicated)
        sharded = fully_shard(
            group,
            mesh=mesh,
            reshard_after_forward=plan.regathered,
            shard_placement_fn=lambda parameter: Shard(dims[id(parameter)]),
            mp_policy=MixedPrecisionPolicy(compute, reduce, cast_forward_inputs=False),
        )
        fsdp.name_failures(group)
        fsdp.allow_views(ParameterGroup)
        # Gradients are addends, because the loss is that of the whole batch. Not every backend has a sum that scales.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        # What the backward pass does not read is not gathered for it.
        sharded.set_unshard_in_backward(plan.saved)
        self._units.append(group)
        first = not plan.replicated or mesh.get_local_rank("replicate") == 0
        members = zip(plan.parameters.items(), fsdp.parameters_of(group), strict=True)
        return {
            name: self._gradients.add_gathered(
                UnitParameter(
                    name,
                    shapes[name],
                    stored[name],
                    plan.gradient_layout(kept[name]),
                    OwnPart(dim, mesh.get_local_rank("shard"), first),
                    group.current(number),
                    gathered,
                    parts[name].requires_grad,
                    Turn(
                        way_between(self._mesh, stored[name], kept[name], shapes[name], compute),
                        way_between(self._mesh, kept[name], stored[name], shapes[name], reduce or compute),
                    ),
                )
            )
            for number, ((name, dim), gathered) in enumerate(members)
        }

    def bind(self, root: nn.Module) -> None:
        """Find in `root` the parameters that users see, which take the gradients and provide the values."""
        self._gradients.bind(root)

    def _data_mesh(self, sharded: tuple[int, ...], replicated: tuple[int, ...]) -> DeviceMesh:
        """The mesh of `fully_shard` over these axes."""
        key = sharded, replicated
        if key not in self._meshes:
            self._meshes[key] = data_mesh(self._mesh, sharded, replicated)
        return self._meshes[key]

    # --- programs ---

    def view(self, root: nn.Module, held: FSDPUnits) -> PartView:
        """The view of the model that a program with the FSDP units `held` reads."""
        table: dict[str, tuple[ParameterGroup, int] | Tensor] = {}
        # Totals depend on inputs alone: they have no FSDP units.
        for plan, unit in zip(held.units, self._units, strict=True) if held.units else ():
            for place, name in enumerate(plan.parameters):
                if name in held.gathered:
                    table[name] = (unit, place) if isinstance(unit, ParameterGroup) else unit[place]
        return PartView(root, table)

    def groups(self, held: FSDPUnits) -> dict[str, ParameterGroup]:
        """The FSDP units by their first parameter."""
        units = zip(held.units, self._units, strict=True) if held.units else ()
        return {next(iter(plan.parameters)): unit for plan, unit in units if isinstance(unit, ParameterGroup)}

    def around_copies(self, held: FSDPUnits) -> tuple[tuple[tuple[ParameterGroup, ...], ...], ...]:
        """The FSDP units around each copy of each region."""
        return tuple(
            tuple(tuple(self._gathering(item) for item in copy) for copy in loop) for loop in held.around_copies
        )

    def run(self, held: FSDPUnits, forward: Callable[..., T], inputs: Sequence[Tensor]) -> T:
        """`forward(*inputs)` of the program with `held`."""
        if not held.gathered:
            return forward(*inputs)
        root = self._whole()
        self._backward.recover(root, self._groups)
        if not self._keeping:
            # Parameters that were gathered for a backward pass that never came may have old values.
            self._drop()
        self._take_values()
        self._prefetch(held)
        self._gradients.take_versions()
        result = forward(*inputs) if root is None else self._in_units(root, forward, inputs)
        self._has_run = True
        if torch.is_grad_enabled():
            self._backward.watch(root, result)
        elif not self._keeping:
            self._drop()
        return result

    def _in_units(self, root: FSDPModule, forward: Callable[..., T], inputs: Sequence[Tensor]) -> T:
        """`forward(*inputs)` of a program around which there are FSDP units."""
        grad = torch.is_grad_enabled()
        try:
            # The first gather allocates the memory of all later ones, which training must use too.
            with torch.inference_mode(False), torch.set_grad_enabled(grad):
                return cast(T, cast(nn.Module, root)(forward, *inputs))
        except BaseException:
            fsdp.reset(root, self._groups)
            raise

    @property
    def within(self) -> str:
        """The contexts that are entered: they decide which collectives run, so all ranks must enter the same ones."""
        entered = {"holding_gradients()": self._backward.holding, "keeping_parameters()": self._keeping}
        return " and ".join(name for name, inside in entered.items() if inside) or "none of its contexts"

    @contextlib.contextmanager
    def holding_gradients(self) -> Iterator[None]:
        """Context in which backward accumulates gradients without reducing them; the next one after it reduces."""
        root = self._whole()
        outer, self._backward.holding = self._backward.holding, True
        if root is not None:
            root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._backward.holding = outer
            if root is not None:
                root.set_requires_gradient_sync(not outer)

    @contextlib.contextmanager
    def adding_gradients(self) -> Iterator[None]:
        """Context in which gradients of parameters are accumulated outside of a backward pass of the program, and held
        back."""
        self._gradients.begin_backward(True)
        self._reductions.begin_backward(True)
        try:
            yield
        except BaseException:
            # The next backward pass would add to what is there.
            self._gradients.drop()
            raise
        self._gradients.settle()
        self._gradients.end_held_backward()

    def reduce_held(self, parameter: nn.Parameter) -> None:
        """Reduce the gradient of a parameter that is held back, if it is: a program without its unit adds to it.
        Collective over the mesh."""
        self._gradients.reduce_held(parameter)

    def reduce_gradients(self) -> None:
        """Reduce all gradients that are held back; within `holding_gradients` they stay so. All ranks of the mesh call
        it alike."""
        if self._backward.holding:
            return
        root = self._whole()
        self._gradients.begin_backward(False)
        self._reductions.begin_backward(False)
        # Units that have not run yet, as where other sizes come first, have none.
        if root is not None and self._has_run:
            fsdp.reduce_gradients(root)
        self._gradients.end_reduced_backward()
        self._reductions.end_backward()

    @contextlib.contextmanager
    def keeping_parameters(self) -> Iterator[None]:
        """Context in which parameters that stay gathered for backward also stay gathered after it."""
        if self._keeping:
            yield
            return
        root = self._whole()
        self._backward.recover(root, self._groups)
        self._drop()
        self._keeping, self._has_turned = True, False
        if root is not None:
            root.set_reshard_after_backward(False)
        try:
            yield
        finally:
            if root is not None:
                root.set_reshard_after_backward(True)
            self._keeping = False
            self._backward.recover(root, self._groups)
            self._drop()

    @property
    def _groups(self) -> list[ParameterGroup]:
        """The FSDP units."""
        return [unit for unit in self._units if isinstance(unit, ParameterGroup)]

    def _gathering(self, number: int) -> ParameterGroup:
        """The FSDP unit of a group that gathers."""
        unit = self._units[number]
        assert isinstance(unit, ParameterGroup)
        return unit

    def _whole(self) -> FSDPModule | None:
        """The module around all FSDP units, which is called around every program: `fully_shard` needs to know them all.
        None where there are none."""
        if self._root is None and self._groups:
            root = ParameterGroup({})
            root.add_module("groups", nn.ModuleList(self._groups))
            self._root = fully_shard(root, mesh=self._data_mesh((0,), ()))
        return self._root

    def _drop(self) -> None:
        """Free all gathered parameters."""
        for group in self._groups:
            _unit(group).reshard()

    def _prefetch(self, held: FSDPUnits) -> None:
        """Let the backward pass gather the units of a whole place ahead of time, as `FSDPUnits.prefetched` has it.

        By itself torch gathers only the one unit that was called before, which may lie around the same place. In the
        forward pass units need no such list: they are gathered on a stream of their own while the device still computes
        the place before.
        """
        if self._places == held.call_order:
            return
        prefetched = held.prefetched
        for number, group in enumerate(self._units):
            if isinstance(group, ParameterGroup):
                others = [_unit(self._gathering(other)) for other in prefetched.get(number, ())]
                _unit(group).set_modules_to_backward_prefetch(others)
        self._places = held.call_order

    def _take_values(self) -> None:
        """Follow the parameters that users see: their values, and whether they are frozen."""
        again = self._keeping and self._has_turned
        self._gradients.follow(gathered=again)
        if self._has_run:
            # torch reads at the first call which parameters are trained at all.
            self._gradients.follow_freezing()
        if not again:
            transfer_all(self._gradients.copies())
        self._has_turned = True


def _unit(group: ParameterGroup) -> FSDPModule:
    """The FSDP module that torch's `fully_shard` made for a group."""
    return cast(FSDPModule, group)
