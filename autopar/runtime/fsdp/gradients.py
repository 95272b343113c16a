"""Gradients of the parameters in FSDP units, handed to the parameters that users see.

Users see `DTensor`s that share memory with the parameters that the units store. Autograd knows those of the units only.
So gradients are transferred by hand, and between two backward passes they are stored only in `.grad` of the parameter
that users see:

- a reduced gradient is added to `.grad`, in the layout of the parameter;
- a gradient that is held back is `.grad` itself: a `DTensor` that is `Partial` on the axes it is not reduced over.
  The next backward pass moves it into the unit, which adds to it. So `zero_grad` of a module or an optimizer, clipping
  and assignment mean for it what they mean for any gradient.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar._torch import DTensorSpec, as_distributed, local_tensor, post_accumulate_hooks, spec_of, tensor_hooks
from autopar.runtime.fsdp._torch import GatheredParameter
from autopar.runtime.fsdp.turns import Transfer, Turn, transfer_batch, way_between
from autopar.runtime.state import from_local, mesh_of, placements
from passes._torch import parameters_of, version_of
from passes.ir.errors import InputError, UnsupportedError
from passes.ir.exchanges import Batching
from passes.ir.layout import Layout, Shape


@dataclass(frozen=True)
class OwnPart:
    """The part of a gathered parameter that this rank stores: the `number`-th along `dim`.

    `first` marks one rank of those that store the same part.
    """

    dim: int
    number: int
    first: bool

    def of(self, gathered: Tensor, part: Tensor) -> Tensor:
        """The view of `gathered` where `part` belongs."""
        size = part.shape[self.dim]
        return gathered.narrow(self.dim, self.number * size, size)


@dataclass(frozen=True)
class LeafParameter:
    """A parameter that generated code reads as it is stored. Its `.grad` is the gradient that is not reduced yet."""

    parameter: nn.Parameter

    def take_gradient(self) -> Tensor | None:
        """Remove and return the gradient that is not reduced, if there is one."""
        gradient, self.parameter.grad = self.parameter.grad, None
        return gradient

    def give_gradient(self, gradient: Tensor) -> None:
        """Let the next backward pass add to a gradient that is not reduced."""
        self.parameter.grad = gradient

    def settle(self) -> None:
        """Autograd has accumulated the gradient in its dtype."""

    def store_in(self, part: Tensor) -> None:
        """Store this rank's part in the memory of `part`."""
        self.parameter.data = part

    def note_change(self) -> None:
        """Let autograd know that the values have changed, through memory that is shared."""
        increment_version(self.parameter)


# The parameter of a unit that autograd differentiates, with its unreduced gradient.
Unreduced = LeafParameter | GatheredParameter


@dataclass(frozen=True)
class UnitParameter:
    """A parameter of an FSDP unit, with the path of the parameter that users see.

    `shape` is global, `layout` that of the parameter and its reduced gradient, `pending` that of a gradient that is not
    reduced. `kept` is the parameter that the unit stores, `unreduced` what autograd knows of it;
    `trainable` says that it took gradients when it was planned, `turn` holds the ways from one to the other.
    """

    path: str
    shape: Shape
    layout: Layout
    pending: Layout
    own: OwnPart
    kept: Tensor
    unreduced: Unreduced
    trainable: bool
    turn: Turn = field(default_factory=Turn)


class UnitGradients:
    """The parameters of all FSDP units of a model, and the transfer of their gradients to users."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._shape = mesh_of(mesh)
        self.parameters: list[UnitParameter] = []
        # The parameters that users see: a table of a module's parameters, and a name in it.
        self._places: list[tuple[Mapping[str, nn.Parameter | None], str]] = []
        # The parameters that were there when a program last ran, with the addresses of their parts and their versions.
        self._seen: list[nn.Parameter] = []
        self._addresses: list[int] = []
        self._versions: list[int] = []
        # The numbers of parameters that share memory with those of units, and of those with a copy in another layout.
        self._shared: list[int] = []
        self._turned: list[int] = []
        # Whether gradients were ever held back: parameters that were replaced since may still have them in `.grad`.
        self._pending = False
        # Reduced gradients that wait for an all-to-all with others, with the numbers of their parameters.
        self._turning: Batching[tuple[int, Tensor]] = Batching()

    def add(self, parameter: UnitParameter) -> nn.Parameter:
        """Add a parameter; returns the one that users see."""
        self.parameters.append(parameter)
        seen = self._distributed(
            parameter.turn.back.through(part_of(parameter.kept)), parameter.layout, parameter.shape
        )
        return nn.Parameter(seen, parameter.trainable)

    def add_gathered(self, parameter: UnitParameter) -> nn.Parameter:
        """Add a parameter whose gradient `fully_shard` reduces; returns the one that users see."""
        if parameter.trainable:
            hook = without_keeping(self.take_over, len(self.parameters))
            parameter.kept.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return self.add(parameter)

    def bind(self, root: nn.Module) -> None:
        """Find in `root` the parameters that users see."""
        paths = (item.path.rpartition(".") for item in self.parameters)
        self._places = [(parameters_of(root.get_submodule(path)), name) for path, _, name in paths]
        self._seen = self._now()
        self._turned = [number for number, item in enumerate(self.parameters) if item.turn.forth.steps]
        self._shared = [number for number, item in enumerate(self.parameters) if not item.turn.forth.steps]
        self._addresses = [address_of(seen) for seen in self._seen]
        self._versions = [0] * len(self.parameters)

    def seen(self, number: int) -> nn.Parameter:
        """The parameter that users saw when a program last ran, which takes the gradients of this run even if they put
        another one in its place."""
        return self._seen[number]

    @property
    def current(self) -> Sequence[nn.Parameter]:
        """All of these parameters."""
        return self._seen

    def check_current(self, read: Sequence[nn.Parameter]) -> None:
        """Raise UnsupportedError where the parameters that a forward pass has `read` are not those of the last run."""
        for item, own, seen in zip(self.parameters, read, self._seen, strict=True):
            if own is not seen:
                raise UnsupportedError(replaced_since(item.path))

    def _now(self) -> list[nn.Parameter]:
        return [found for table, name in self._places if (found := table[name]) is not None]

    def follow(self, gathered: bool) -> None:
        """Follow the parameters that users see now: others than before, values in other memory, which the units take
        over, and parameters that are frozen.

        Memory that is left is not written to any more: a parameter that was replaced may be put back. Raises InputError
        where memory changes while parameters are `gathered`.
        """
        now = self._now()
        changed = [
            (number, address)
            for number in self._shared
            if not (address := address_of(now[number]))
            == self._addresses[number]
            == address_of(self.parameters[number].kept)
        ]
        if changed and gathered:
            path = self.parameters[changed[0][0]].path
            raise InputError(f"the parameter {path!r} was replaced within keeping_parameters(): replace it outside")
        if not all(map(is_, now, self._seen)):
            self._seen = now
        for number, address in changed:
            item, part = self.parameters[number], part_of(now[number])
            if address == self._addresses[number]:
                part_of(item.kept).copy_(part)
            else:
                item.unreduced.store_in(part.contiguous())
                self._addresses[number] = address
            item.unreduced.note_change()

    def copies(self) -> list[Transfer]:
        """Transfers of values to those units that store copies in other layouts."""
        items = ((self.parameters[number], self._seen[number]) for number in self._turned)
        return [Transfer(item.turn.forth, part_of(seen), part_of(item.kept)) for item, seen in items]

    def follow_freezing(self) -> None:
        """Freeze and unfreeze what the units store as users do with the parameters that they see."""
        for item, seen in zip(self.parameters, self._seen, strict=True):
            if item.trainable and item.kept.requires_grad != seen.requires_grad:
                item.kept.requires_grad_(seen.requires_grad)

    def take_versions(self) -> None:
        """Bump the version counters of parameters changed in place: graphs that saved them are invalid."""
        versions = [version_of(seen) for seen in self._seen]
        if versions == self._versions:
            return
        for item, version, before in zip(self.parameters, versions, self._versions, strict=True):
            if version != before:
                item.unreduced.note_change()
        self._versions = versions

    def begin_backward(self, holding: bool) -> bool:
        """Move gradients that are not reduced from `.grad` into the units, but reduce those of parameters that were
        frozen since; returns whether any were moved.

        Raises InputError if gradients are held back of a parameter with tensor hooks.
        """
        self.take_versions()
        for number, item in enumerate(self.parameters if holding else ()):
            if tensor_hooks(self.seen(number)):
                raise InputError(
                    f"parameter {item.path!r} has a tensor hook, which gets gradients that are reduced, but they are "
                    "held back: remove the hook, register a post-accumulate hook, or do not hold gradients"
                )
        if not self._pending:
            return False
        moved = False
        for number, item in enumerate(self.parameters):
            seen = self.seen(number)
            pending = placements(item.pending, self._shape)
            if not isinstance(seen.grad, DTensor) or seen.grad.placements != pending:
                continue
            if not seen.requires_grad:
                # It was frozen since: nothing is added to what it has.
                self.reduce_held(seen)
            else:
                item.unreduced.give_gradient(part_of(seen.grad))
                seen.grad = None
                moved = True
        return moved

    def settle(self) -> None:
        """Take gradients that autograd has accumulated outside of a backward pass of the units."""
        for item in self.parameters:
            item.unreduced.settle()

    def drop(self) -> None:
        """Drop gradients that are not reduced, after an exception."""
        for item in self.parameters:
            item.unreduced.take_gradient()

    def end_held_backward(self) -> None:
        """Move unreduced gradients from the units to `.grad`."""
        for number, item in enumerate(self.parameters):
            gradient, seen = item.unreduced.take_gradient(), self.seen(number)
            if gradient is None or not seen.requires_grad:
                continue
            earlier, seen.grad = seen.grad, None
            if earlier is not None:
                # Collectives, which all ranks take part in; the sum has it once.
                part = item.turn.forth.through(part_of(earlier))
                if item.own.first:
                    item.own.of(gradient, part).add_(part)
            if gradient.dtype != seen.dtype:
                # Not reduced yet, it has the dtype that it is reduced in.
                seen.grad_dtype = None
            seen.grad = self._distributed(gradient, item.pending, item.shape)
            self._pending = True

    def reduce_held(self, parameter: nn.Parameter) -> None:
        """Reduce the gradient of a parameter that is held back, if it is. Collective over the mesh."""
        for number, item in enumerate(self.parameters):
            gradient = parameter.grad
            if self.seen(number) is not parameter or not isinstance(gradient, DTensor):
                continue
            if gradient.placements == placements(item.pending, self._shape) != spec_of(parameter).placements:
                way = way_between(self._mesh, item.pending, item.layout, item.shape)
                part = way.through(part_of(gradient)).to(parameter.dtype)
                parameter.grad = as_distributed(part, spec_of(parameter))

    def take_over(self, number: int, kept: Tensor) -> None:
        """Hand over the reduced gradient that a unit has left in `.grad` of what it stores; that of a copy in another
        layout, when there are enough of them to turn."""
        gradient, kept.grad = kept.grad, None
        if gradient is None:
            return
        part, item, seen = part_of(gradient), self.parameters[number], self.seen(number)
        if not item.turn.back.steps:
            self.hand_over(number, part)
        elif seen.requires_grad:
            self._turn(self._turning.add(*item.turn.back.key(part), (number, part)))

    def end_reduced_backward(self) -> None:
        """Transfer the remaining reduced gradients."""
        for batch in self._turning.rest():
            self._turn(batch)

    def reset(self) -> None:
        """Drop the reduced gradients that are not transferred yet, after an exception."""
        self._turning = Batching()

    def _turn(self, batch: Sequence[tuple[int, Tensor]]) -> None:
        """Transfer a batch of reduced gradients to the layouts of their parameters, and add them there."""
        if not batch:
            return
        transfers = [
            Transfer(self.parameters[number].turn.back, kept, torch.empty_like(part_of(self.seen(number))))
            for number, kept in batch
        ]
        transfer_batch(transfers)
        for (number, _), transfer in zip(batch, transfers, strict=True):
            self.hand_over(number, transfer.after)

    def hand_over(self, number: int, part: Tensor) -> None:
        """Add the reduced gradient of a parameter to that of the parameter that users see, and call its hooks."""
        item, seen = self.parameters[number], self.seen(number)
        if not seen.requires_grad:
            return
        own = spec_of(seen)
        refuse_held_back(item.path, seen.grad, own)
        if tensor_hooks(seen):
            reduced = self._distributed(part, item.layout, item.shape)
            part = part_of(after_tensor_hooks(item.path, seen, reduced))
        if seen.grad is None:
            seen.grad = as_distributed(part, own)
        else:
            part_of(seen.grad).add_(part)
        # Autograd does not know this parameter, so its hooks are called here.
        for hook in post_accumulate_hooks(seen):
            hook(seen)

    def _distributed(self, part: Tensor, layout: Layout, shape: Shape) -> DTensor:
        return from_local(part, layout, shape, self._mesh, self._shape)


def refuse_held_back(path: str, gradient: Tensor | None, own: DTensorSpec) -> None:
    """Raise InputError where the `gradient` of the parameter called `path` has other placements than its `own`."""
    if isinstance(gradient, DTensor) and gradient.placements != own.placements:
        raise InputError(
            f"the gradient of the parameter {path!r} has the placements {gradient.placements}, but the parameter "
            f"{own.placements}: reduce gradients that are held back before other backward passes"
        )


def replaced_since(path: str) -> str:
    """The message where gradients of a forward pass belong to a parameter that a call since has not read."""
    return (
        f"the parameter {path!r} was replaced after this forward pass, and the module has run with another one: call "
        "backward() before the module runs with other parameters"
    )


def without_keeping(method: Callable[..., None], *given: object) -> Callable[[Tensor], None]:
    """A hook that calls `method(*given, tensor)` while the object of the method lives.

    It keeps neither that object nor the parameter alive: no garbage collector sees a cycle through it.
    """
    weak = weakref.WeakMethod(method)

    def hook(tensor: Tensor) -> None:
        found = weak()
        if found is not None:
            found(*given, tensor)

    return hook


def after_tensor_hooks(path: str, parameter: nn.Parameter, gradient: DTensor) -> DTensor:
    """A gradient of the parameter called `path`, as its tensor hooks return it.

    Raises InputError for a hook that returns anything but a `DTensor` with the placements of the gradient.
    """
    for hook in tensor_hooks(parameter):
        result = hook(gradient)
        if result is None:
            continue
        if not isinstance(result, DTensor) or result.placements != gradient.placements:
            kind = (
                f"a DTensor with {result.placements}" if isinstance(result, DTensor) else f"a {type(result).__name__}"
            )
            raise InputError(
                f"a hook of the parameter {path!r} returned {kind}: return a DTensor with the placements of the "
                f"gradient that it is given, {gradient.placements}"
            )
        gradient = result
    return gradient


def part_of(tensor: Tensor | None) -> Tensor:
    """This rank's part of a `DTensor`, or a plain tensor, without gradient."""
    assert tensor is not None
    with torch.no_grad():
        return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def address_of(tensor: Tensor) -> int:
    """The address of this rank's part of a `DTensor`, or of a plain tensor.

    Each call asks it of every parameter. `to_local()` takes 10 us, `local_tensor` one.
    """
    return local_tensor(tensor).data_ptr() if isinstance(tensor, DTensor) else tensor.data_ptr()
