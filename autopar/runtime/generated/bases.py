"""Base classes of generated code, the containers that hold the model's tensors, and descriptions of programs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from autopar._torch import parts_of
from autopar.runtime.checkpoint import Loadable
from autopar.runtime.fsdp.units import ParameterGroup, PartView, within
from autopar.runtime.generated.deferred import DeferredGradients
from autopar.runtime.generated.random import Randomness
from autopar.runtime.generated.saving import CHANGED
from autopar.runtime.refusals import HoldingPart
from autopar.runtime.state import Axis
from passes._torch import pytree, version_of
from passes.ir.layout import Layout, Shape
from passes.ir.lowered import FSDPUnits
from passes.ir.program import StateChange, TensorType
from passes.ir.redistribution import RedistributionStep

Result = TypeVar("Result")


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter, or a buffer as it is. Gradients come back in the same layout."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered(tensor: Tensor) -> Tensor:
    """A parameter as its FSDP unit gathers it over the data axes; the unit reduces its gradient."""
    return tensor


class RegionCopy(nn.Module):
    """One copy of a region; generated subclasses define `forward`. `entries` are its parts of the model, `number`
    counts the copies, `groups` hold parameters that are gathered around it."""

    def __init__(
        self,
        entries: Sequence[nn.Module | PartView],
        program: "Generated",
        number: int,
        groups: Sequence[ParameterGroup] = (),
    ) -> None:
        super().__init__()
        self.entries = tuple(entries)
        # In a tuple, so that they are no submodules.
        self.groups = tuple(groups)
        self.number = number
        self.random = program.random
        self.deferred = program.deferred
        self.axes = program.axes
        self.device = program.device
        # Not a part of this module, which has no parameters of its own.
        object.__setattr__(self, "root", program.root)

    def __call__(self, *inputs: Tensor) -> object:
        """Run the copy, with its parameters gathered."""
        return within(self.groups, super().__call__, inputs)

    def checked(self, versions: list[int], *inputs: Tensor) -> object:
        """Run the copy; `versions` is empty the first time, and then has those of its parameters.

        Raises RuntimeError if a parameter has changed in place since the first time, as autograd does for tensors that
        it saves.
        """
        return within(self.groups, partial(self._unchanged, versions), inputs)

    def _unchanged(self, versions: list[int], *inputs: Tensor) -> object:
        read = [leaf for entry in self.entries if isinstance(entry, PartView) for leaf in entry.leaves()]
        gathered = [parameter for group in self.groups for parameter in group.parameters()]
        found = [version_of(tensor) for tensor in (*read, *gathered)]
        if not versions:
            versions += found
        if versions != found:
            raise RuntimeError(CHANGED)
        return super().__call__(*inputs)

    def drawn(self, key: str, *axes: Axis) -> AbstractContextManager[None]:
        """Let the op called `key` draw random numbers within; they differ on the ranks of `axes` and between copies."""
        return self.random.drawn(f"{key} of copy {self.number}", axes, self.device)


class Generated:
    """A generated program; subclasses define `forward`, which takes local inputs and returns local outputs.

    `root` holds parameters and buffers under the model's names, `axes` are those of the mesh. `groups` are the FSDP
    units by their first parameter, `copy_groups` those around each copy of each region.
    """

    def __init__(
        self,
        root: nn.Module | PartView,
        axes: tuple[Axis, ...],
        device: torch.device,
        constants: Mapping[str, Tensor],
        random: Randomness | None = None,
        groups: Mapping[str, ParameterGroup] | None = None,
        copy_groups: Sequence[Sequence[Sequence[ParameterGroup]]] = (),
    ) -> None:
        self.root = root
        self.groups = groups or {}
        self.copy_groups = iter(copy_groups)
        self.random = random or Randomness(0)
        # Of products whose weight gradients a schedule computes apart.
        self.deferred = DeferredGradients()
        self.axes = axes
        self.device = device
        self.constants = constants
        self.build()

    def build(self) -> None:
        """Make the copies of the regions; generated classes with regions define it."""

    def copies(
        self, kind: type[RegionCopy], entries: Sequence[Sequence[str]], first: int = 0
    ) -> tuple[RegionCopy, ...]:
        """One `kind` for each of `entries`, which are paths in the model; they are numbered from `first` on."""
        groups = next(self.copy_groups, ((),) * len(entries))
        return tuple(
            kind([_part(self.root, path) for path in paths], self, first + number, groups[number])
            for number, paths in enumerate(entries)
        )

    def gathering(self, first: str, run: Callable[..., Result], *inputs: Tensor) -> Result:
        """`run(*inputs)`, while the group of the parameter called `first` is gathered."""
        group = self.groups.get(first)
        return run(*inputs) if group is None else cast(Result, group(run, *inputs))

    def drawn(self, key: str, *axes: Axis) -> AbstractContextManager[None]:
        """Let the op called `key` draw random numbers within; they differ on the ranks of `axes`."""
        return self.random.drawn(key, axes, self.device)

    def recomputed(self, copy: RegionCopy, *given: Tensor) -> object:
        """Run `copy`; the backward pass runs it again, on the same random numbers, instead of saving its tensors.

        It can run again for several backward passes, but not after its parameters have changed.
        """
        versions: list[int] = []
        errors: list[BaseException] = []
        has_run = False

        def run(*inputs: Tensor) -> object:
            try:
                return copy.checked(versions, *inputs)
            except BaseException as error:
                # The backward pass ends this early by an exception. One of the forward pass is kept until checkpoint
                # has returned: up to torch 2.12, its saved-tensor hooks would apply to the next steps otherwise.
                if has_run:
                    raise
                errors.append(error)
                return None

        result: object = checkpoint(
            run, *given, use_reentrant=False, preserve_rng_state=False, context_fn=self.random.contexts
        )
        has_run = True
        if errors:
            raise errors.pop()
        return result

    def forward(self, *inputs: Tensor) -> tuple[object, ...]:
        """Run on local inputs, in the order of the plan; generated classes define it."""
        raise TypeError("a generated class defines forward")


def _part(root: nn.Module | PartView, path: str) -> nn.Module | PartView:
    """The submodule of the model at `path`; submodules without tensors do not exist."""
    for name in path.split("."):
        inner = parts_of(root).get(name) if isinstance(root, nn.Module) else root[name]
        root = inner if isinstance(inner, nn.Module | PartView) else Container()
    return root


@dataclass(frozen=True)
class PlannedInput:
    """An input leaf of the plan: its `type`, the `dtype` that it is computed in, whether it is `differentiable` (may
    require a gradient), and the dim of its `samples` (None: it has none)."""

    name: str
    type: TensorType
    dtype: torch.dtype
    layout: Layout
    differentiable: bool
    samples: int | None = 0


@dataclass(frozen=True)
class PlannedOutput:
    """An output leaf; `layout` and `dtype` are None for a leaf that is not a tensor, which is `value`."""

    name: str
    layout: Layout | None
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    value: object = None


@dataclass(frozen=True)
class Cut:
    """The sample dim of this rank's part of a tensor, viewed as (before, groups, samples and their contents); every
    micro-batch takes an equal share of the samples of each group."""

    dim: int
    before: int
    groups: int


@dataclass(frozen=True)
class MicroBatching:
    """The split of a batch into `count` micro-batches, each of which runs the program once.

    `inputs` are split by a `Cut`, or passed whole to every micro-batch. `outputs` are concatenated (`Cut`), summed
    ("P") or equal in all micro-batches ("R"); `loss` is one of them. `totals`, if any, are sums over the batch that the
    program takes after its inputs; `reads` are the inputs that they are computed from, with the redistribution of each.
    The last of them, as many as there are `checks`, are not for the program: a batch for which one is not zero cannot
    be split, for the reason that its check gives. With `gather_once`, parameters on data axes stay gathered from the
    first micro-batch to the last; with `reduce_once`, their gradients are reduced after the last.
    """

    count: int
    inputs: tuple[Cut | None, ...]
    outputs: tuple[Cut | str, ...]
    loss: int
    totals: "GeneratedProgram | None"
    reads: tuple[tuple[int, tuple[RedistributionStep, ...]], ...]
    gather_once: bool = False
    reduce_once: bool = False
    checks: tuple[str, ...] = ()


@dataclass(frozen=True)
class GeneratedProgram:
    """A program ready to run on every rank: its source and what surrounds it.

    `constants` are constant inputs by name: values that are not tensors, and tensors whose values the trace depends on;
    `assumed` are those that take a default. `tensors` are constant tensors of the model, `parameters` the parameters
    that the program uses, under all their names, `local` those that it reads as they are stored; `buffers` are those
    that it reads. `changes` are applied to parameters before it runs, `held` describes the FSDP units. Inputs and
    outputs are those of the whole batch; with `micro_batches` the program runs on one micro-batch at a time. With
    `compiled`, torch compiles the regions. `spans` are those of several axes that its collectives run over. With
    `stages` it runs in a pipeline, and has no code of its own.
    """

    source: str
    class_name: str
    inputs: tuple[PlannedInput, ...]
    constants: Mapping[str, object]
    assumed: frozenset[str]
    outputs: tuple[PlannedOutput, ...]
    output_tree: pytree.TreeSpec
    tensors: Mapping[str, Tensor]
    parameters: frozenset[str]
    changes: tuple[StateChange, ...]
    regathers: bool
    differentiable: bool
    micro_batches: MicroBatching | None = None
    held: FSDPUnits = field(default_factory=FSDPUnits)
    compiled: bool = False
    spans: frozenset[int] = frozenset()
    local: frozenset[str] = frozenset()
    buffers: frozenset[str] = frozenset()
    stages: "tuple[GeneratedStage, ...]" = ()


@dataclass(frozen=True)
class Received:
    """A tensor that a pipeline stage receives from the one before it: its name, the shape of a rank's part, its dtype,
    and whether its gradient is sent back."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool


@dataclass(frozen=True)
class GeneratedStage:
    """One stage of a program in a pipeline: `program` is its own code, whose forward takes the tensors `received` and
    then those inputs of the whole program, totals included, that have the numbers `reads`. It returns `sent` tensors
    for the next stage, and then its part of the outputs."""

    program: GeneratedProgram
    received: tuple[Received, ...]
    reads: tuple[int, ...]
    sent: int

    @property
    def holds(self) -> frozenset[str]:
        """The names of the parameters and buffers that a rank of the stage holds."""
        return self.program.parameters | self.program.buffers


@dataclass(frozen=True)
class LoadedProgram:
    """A generated program, the path of its source file, its class, the program that computes its totals, and the
    pipeline stages that this rank runs, by number."""

    program: GeneratedProgram
    path: Path
    kind: type[Generated]
    totals: "LoadedProgram | None" = None
    stages: "Mapping[int, LoadedProgram]" = field(default_factory=dict)


@dataclass(frozen=True)
class Wanted:
    """A request for a program for inputs other than planned, with the decisions of the program `name` where they fit.

    `shapes` are those of the inputs and `values` those of the constants, by leaf; `count` is the number of
    micro-batches. Where other arguments are given than planned, `arguments` are those of the call by name, tensors on
    `meta`, and `training` is the mode that the model is traced in; where it is None the arguments are the planned ones.
    """

    name: str
    count: int
    shapes: Mapping[str, Shape]
    values: Mapping[str, Tensor]
    arguments: Mapping[str, object] | None = None
    training: bool = False


# Makes a program for other inputs than planned; every rank calls it alike.
OtherSizes = Callable[[Wanted], LoadedProgram]


class Container(Loadable, HoldingPart):
    """A submodule of the model: holds parameters, buffers and submodules under their names.

    `_length` is the length of a list of modules, None for others. In pipeline stages a rank holds some of them.
    """

    _length: int | None = None

    def __getitem__(self, name: int | str | slice) -> object:
        """The attribute under a name that is not an identifier, as in `layers[0]`; of a list of modules also parts that
        are counted from its end, and slices, as tuples of those that this rank holds."""
        if isinstance(name, slice):
            return tuple(self._listed(name))
        if isinstance(name, int) and name < 0 and self._length is not None:
            name += self._length
        return getattr(self, str(name))

    def __iter__(self) -> Iterator[nn.Module]:
        """The parts of a list of modules that this rank holds."""
        return self._listed(slice(None))

    def __len__(self) -> int:
        """The number of modules in a list, on this rank or not."""
        if self._length is None:
            raise TypeError("this part of the model is no list of modules, and has no length")
        return self._length

    def _listed(self, which: slice) -> Iterator[nn.Module]:
        held = parts_of(self)
        named = (held.get(str(number)) for number in range(len(self))[which])
        return (part for part in named if part is not None)

    def __bool__(self) -> bool:
        return True


def mark_list(container: Container, length: int) -> None:
    """Let a submodule stand for a list of so many modules."""
    container._length = length


def place(container: Container, name: str, tensor: Tensor, persistent: bool = True) -> None:
    """Register a parameter or buffer under its path."""
    *path, last = name.split(".")
    for part in path:
        inner = parts_of(container).setdefault(part, Container())
        assert isinstance(inner, Container)
        container = inner
    # A container refuses what is new to it.
    if isinstance(tensor, nn.Parameter):
        nn.Module.register_parameter(container, last, tensor)
    else:
        nn.Module.register_buffer(container, last, tensor, persistent)
