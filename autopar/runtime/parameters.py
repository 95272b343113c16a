"""Comparison of a module's current parameters with the planned ones."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import is_

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar._torch import local_tensor
from passes._torch import parameters_of
from passes.ir.errors import InputError
from passes.ir.plan import ParameterPlan

# A module's table of parameters, a name in it, and the path of that name.
Place = tuple[Mapping[str, nn.Parameter | None], str, str]


class ParameterWatch:
    """Watches the parameters that programs read, and detects changes that programs cannot follow.

    It runs at every call, so it reads identities and `requires_grad` only. `register_parameter` of distributed modules
    accepts only parameters with the same placements.
    """

    def __init__(self, root: nn.Module, planned: Mapping[str, ParameterPlan], check_values: Callable[[], None]) -> None:
        """Programs read `root`; `planned` says which parameters train, and is empty where nothing does; `check_values`
        raises InputError where one has no values."""
        self._root = root
        self._check_values = check_values
        self._planned = planned
        self.refresh()

    def refresh(self) -> None:
        """Take the current parameters as the planned ones."""
        self._places = list(places_of(self._root))
        self._found = self._now()
        paths: dict[int, str] = {}
        for (_, _, path), item in zip(self._places, self._found, strict=True):
            paths.setdefault(id(item), path)
        # Ties have the name of the first.
        self.names = [paths[id(item)] for item in self._found]
        self._checked = b""

    def flags(self) -> bytes:
        """Whether each parameter requires a gradient now, by one byte; `names` says whose.

        Raises InputError for a parameter that requires a gradient, but was frozen when it was planned, for one without
        values, for parameters whose ties are not those planned, and for one in whose place there is a tensor
        that cannot replace it.
        """
        self._check_values()
        now = self._now()
        if not all(map(is_, now, self._found)):
            self._check_replaced(now)
            self._check_ties(now)
            self._found = now
        flags = bytes([parameter.requires_grad for parameter in now])
        if flags != self._checked:
            self._check_frozen(flags)
            self._checked = flags
        return flags

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters by name; tied ones several times, under the first name."""
        return zip(self.names, self._now(), strict=True)

    def _now(self) -> list[nn.Parameter]:
        return [item for table, name, _ in self._places if (item := table[name]) is not None]

    def _check_replaced(self, now: Sequence[nn.Parameter]) -> None:
        """`torch.func.functional_call` replaces parameters without asking the module."""
        for name, old, new in zip(self.names, self._found, now, strict=True):
            if not alike(new, old):
                raise InputError(
                    f"the parameter {name!r} was replaced by a tensor of another shape, dtype or placements: replace "
                    "it by a DTensor like the parameter"
                )
            if new is not old and _part(new).stride() != _part(old).stride():
                raise InputError(
                    f"the parameter {name!r} was replaced by a tensor with the strides {_part(new).stride()} on this "
                    f"rank, not {_part(old).stride()}: replace it by a contiguous one"
                )
            if new.grad_fn is not None:
                raise InputError(
                    f"the parameter {name!r} was replaced by a computed tensor, to which gradients do not flow: pass "
                    "torch.func.functional_call and its like leaves of autograd, nn.Parameter(tensor.detach())"
                )

    def _check_frozen(self, flags: bytes) -> None:
        for name, requires_grad in zip(self.names, flags, strict=True):
            planned = self._planned.get(name)
            if requires_grad and planned is not None and not planned.trainable:
                raise InputError(
                    f"the parameter {name!r} requires a gradient, but was frozen when it was planned: freeze it again, "
                    "or call parallelize anew with requires_grad_(True)"
                )

    def _check_ties(self, now: list[nn.Parameter]) -> None:
        given: dict[str, nn.Parameter] = {}
        names: dict[int, str] = {}
        for (_, _, path), name, new in zip(self._places, self.names, now, strict=True):
            if given.setdefault(name, new) is not new:
                raise InputError(
                    f"{name!r} and {path!r} were one parameter when it was planned, but are not any more: assign the "
                    "same parameter to both, or untie them before parallelize"
                )
            if names.setdefault(id(new), name) != name:
                raise InputError(
                    f"{names[id(new)]!r} and {path!r} were two parameters when it was planned, but are one now: assign "
                    "two, or tie them before parallelize"
                )


def places_of(root: nn.Module) -> Iterator[Place]:
    """The places of all parameters of a module; parameters that are tied have several."""
    for path, part in root.named_modules(remove_duplicate=False):
        for name, parameter in parameters_of(part).items():
            if parameter is not None:
                yield parameters_of(part), name, f"{path}.{name}" if path else name


def _part(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter."""
    return local_tensor(parameter) if isinstance(parameter, DTensor) else parameter


def alike(one: Tensor | None, other: Tensor) -> bool:
    """Whether a tensor can take the place of another one: of the same shape and dtype, and placed alike."""
    if one is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not isinstance(other, DTensor):
        return not isinstance(one, DTensor)
    return isinstance(one, DTensor) and one.placements == other.placements and one.device_mesh == other.device_mesh
