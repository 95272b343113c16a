"""Parameters and buffers whose model was on meta: they have no values until a state dict is loaded, or the model's own
initialization has run.

Until then floating numbers are NaN and integers the least of their dtype (unsigned ones the greatest), so values are
found however they came: tools for checkpoints write to tensors in place.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.runtime.checkpoint import Loadable, copy_part
from autopar.runtime.generated.bases import local
from autopar.runtime.ranks.agreement import Agreement, together
from autopar.runtime.ranks.failures import FailureReports
from passes._torch import (
    NUMBER_OF_TENSOR,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    buffers_of,
    parameters_of,
    pytree,
    schema_of,
    storage_id,
)
from passes.ir.errors import InputError

Initialize = Callable[[nn.Module], None]
# Submodules, each with the function that initializes it, in the order of the model; with one function for all if given.
Initializations = Callable[[nn.Module, Initialize | None], Iterator[tuple[nn.Module, Initialize]]]


def blank(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor without values: see above. Booleans are False."""
    return torch.full(tuple(shape), _blank_of(dtype), dtype=dtype, device=device)


def _blank_of(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return False
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    limits = torch.iinfo(dtype)
    return limits.min or limits.max


def _has_blanks(tensor: Tensor) -> bool:
    """Whether no values were written to some elements of a tensor of `blank`; not known of booleans."""
    if tensor.dtype == torch.bool:
        return False
    known = _blank_of(tensor.dtype)
    return bool((tensor.isnan() if known != known else tensor == known).any())


def _begins_blank(tensor: Tensor) -> bool:
    """Whether no value was written to the first element of a tensor of `blank`; that of booleans never has one."""
    if tensor.dtype == torch.bool or not tensor.numel():
        return tensor.numel() > 0
    return _has_blanks(tensor.detach()[(0,) * tensor.dim()])


@dataclass(frozen=True)
class DeferredModel:
    """A model on meta, and the functions that initialize its submodules."""

    structure: nn.Module
    initializations: Initializations


class MissingValues:
    """The tensors of a distributed module that have no values yet, by the model's names."""

    def __init__(self, root: nn.Module, names: Set[str]) -> None:
        self._root = root
        self._names = set(names)

    def check(self) -> None:
        """Raise InputError where a tensor has no values."""
        if self._names and (names := self.names()):
            others = f" and {len(names) - 1} others have" if len(names) > 1 else " has"
            raise InputError(
                f"{min(names)!r}{others} no values, because the model was on meta: load a state dict, or call "
                "dist_model.init_weights(), which initializes what has none (buffers that no state dict has, too)"
            )

    def names(self) -> Set[str]:
        """The names of tensors without values; tied tensors have several."""
        self._names = {name for name in self._names if _begins_blank(local(self.tensor(name)))}
        return frozenset(self._names)

    def take(self, name: str, value: Tensor) -> None:
        """Copy this rank's part of the whole tensor `value` into the tensor called `name`."""
        copy_part(self.tensor(name), value)
        self._names.discard(name)

    def loaded(self, names: Iterable[str]) -> None:
        """Take note that the tensors called `names` have values."""
        self._names.difference_update(names)

    def tensor(self, name: str) -> Tensor:
        """The parameter or buffer called `name`."""
        path, _, last = name.rpartition(".")
        owner = self._root.get_submodule(path)
        parameter, buffer = parameters_of(owner).get(last), buffers_of(owner).get(last)
        found = buffer if parameter is None else parameter
        assert found is not None, name
        return found


def initialize_missing(
    model: DeferredModel,
    missing: MissingValues,
    agreement: Agreement,
    initialize: Initialize | None,
    seed: int,
    device: torch.device,
) -> None:
    """Initialize the tensors that have no values on any rank. Every rank calls it alike.

    Submodules are initialized one after the other, on every rank alike; the tensors that one writes to are whole for
    that time, on `device`, and each rank keeps its parts. Random numbers are those of the device that follow
    `torch.manual_seed(seed)`; the state of torch's own generators stays as it is.

    Raises InputError for tensors that no function writes to, or only in part, and where ranks have different seeds.
    """
    tensors = _Tensors(model.structure)
    own = missing.names()
    all_names, seeds = zip(*agreement.gathered((own, seed), "finding parameters without values"), strict=True)
    if len(set(seeds)) > 1:
        raise InputError(f"ranks initialize the model with different seeds, {sorted(set(seeds))}: pass the same one")
    wanted = frozenset[str]().union(*all_names)
    left = set(wanted)
    with torch.no_grad(), torch.random.fork_rng([] if device.type == "cpu" else [device]):
        torch.manual_seed(seed)
        for module, function in model.initializations(model.structure, initialize) if wanted else ():
            written = tensors.written(module, function)
            if wanted.isdisjoint(written):
                continue
            for name, value in tensors.initialized(module, function, written, device).items():
                if name in own:
                    missing.take(name, value)
            left -= written
    if left:
        raise InputError(
            f"{type(model.structure).__name__} does not initialize {', '.join(sorted(left))}: pass initialize=, a "
            "function that is called with each submodule and writes to its parameters and buffers, or load a state dict"
        )


class Initializable(Loadable):
    """A module whose model may have been on meta. `_deferred` is that model, None where all has values."""

    _agreement: Agreement
    _deferred: DeferredModel | None
    _device: torch.device
    _failures: FailureReports
    _missing: MissingValues
    _seed: int

    @property
    @abstractmethod
    def mesh(self) -> DeviceMesh:
        """The device mesh that the module runs on."""

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """See `Loadable.load_state_dict`."""
        keys = super().load_state_dict(state_dict, strict, assign)
        self._missing.loaded(state_dict)
        return keys

    def init_weights(self, initialize: Initialize | None = None, seed: int | None = None) -> None:
        """Initialize the parameters and buffers that have no values, because the model was on meta. Others keep theirs,
        so that it may be called before or after a state dict is loaded. Every rank calls it alike.

        - `initialize`: a function that is called with each submodule, in the order of `torch.nn.Module.apply`, and
          writes to its parameters and buffers. None takes the model's own: that of `init_weights` of a Hugging Face
          model, and elsewhere the methods `reset_parameters`.
        - `seed`: that of random numbers; None takes the one that torch had on the first rank when the model was
          planned. Where nothing has values they are those of the model on one device after `torch.manual_seed(seed)`.

        Each rank draws the numbers of the whole model, one submodule at a time, on its own device.

        Raises InputError, on all ranks, for tensors that the functions do not write to, or only in part.
        """
        if self._deferred is not None:
            self._failures.run(self._initialize, self._deferred, initialize, self._seed if seed is None else seed)

    def _initialize(self, model: DeferredModel, initialize: Initialize | None, seed: int) -> None:
        with together(self.mesh, "initializing the model"):
            initialize_missing(model, self._missing, self._agreement, initialize, seed, self._device)


# --- one submodule ---------------------------------------------------------------------------------------------------


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the storages that operators write to. Numbers are not known; they are taken for zero, which ends loops
    that draw again what lies out of bounds."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self,
        function: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        options = kwargs or {}
        arguments = schema_of(function).arguments
        given = [*zip(arguments, args, strict=False), *((item, options.get(item.name)) for item in arguments)]
        for item, value in given:
            if item.alias_info is not None and item.alias_info.is_write:
                leaves = pytree.tree_leaves(value)
                self.storages |= {storage_id(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
        return 0 if function is NUMBER_OF_TENSOR else function(*args, **options)


def _own_places(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """The tables of parameters and buffers of `module` itself, each with the names in it."""
    tables: list[dict[str, Any]] = [parameters_of(module), buffers_of(module)]
    return [(table, name) for table in tables for name, tensor in table.items() if tensor is not None]


class _Tensors:
    """The parameters and buffers of a model without values, which are fake tensors from now on: functions that
    initialize skip tensors on meta. Calls of a function change nothing in the model."""

    def __init__(self, model: nn.Module) -> None:
        self._places: dict[str, tuple[dict[str, Any], str]] = {}
        self._names: dict[int, set[str]] = {}
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        fakes: dict[int, Tensor] = {}
        for module in model.modules():
            for table, key in _own_places(module):
                tensor = table[key]
                with self._mode:
                    fakes.setdefault(id(tensor), _empty_like(tensor, torch.device("cpu")))
        for path, module in model.named_modules(remove_duplicate=False):
            for table, key in _own_places(module):
                table[key] = fakes.get(id(table[key]), table[key])
                name = f"{path}.{key}" if path else key
                self._places[name] = table, key
                self._names.setdefault(storage_id(table[key]), set()).add(name)

    def written(self, module: nn.Module, function: Initialize) -> Set[str]:
        """The names of the tensors that `function` writes to, or replaces in the module itself, when it is called with
        `module`. Tied tensors have several."""
        before = [(table, key, table[key]) for table, key in _own_places(module)]
        with self._mode, _Writes() as writes:
            function(module)
        replaced = {storage_id(tensor) for table, key, tensor in before if table[key] is not tensor}
        for table, key, tensor in before:
            table[key] = tensor
        storages = (writes.storages | replaced) & self._names.keys()
        return frozenset[str]().union(*(self._names[storage] for storage in storages))

    def initialized(
        self, module: nn.Module, function: Initialize, written: Set[str], device: torch.device
    ) -> Mapping[str, Tensor]:
        """The values on `device` that `function`, called with `module`, gives to the tensors called as in `written`.

        Raises InputError where it gives a value to a part of one alone.
        """
        places = {name: self._places[name] for name in written}
        before: dict[str, Tensor] = {name: table[key] for name, (table, key) in places.items()}
        made: dict[int, Tensor] = {}
        for name, (table, key) in places.items():
            table[key] = made.setdefault(id(before[name]), _empty_like(before[name], device))
        try:
            function(module)
            found: dict[str, Tensor] = {name: table[key].detach() for name, (table, key) in places.items()}
        finally:
            for name, (table, key) in places.items():
                table[key] = before[name]
        partly = min((name for name, value in found.items() if _has_blanks(value)), default=None)
        if partly is not None:
            raise InputError(
                f"the initialization of {type(module).__name__} writes to a part of {partly!r} alone, which has no "
                "values yet: load a state dict that has it first"
            )
        return found


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    empty = blank(tensor.shape, tensor.dtype, device)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
