"""FSDP units: modules that hold parameters, gathered by torch's `fully_shard` around the code that reads them."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial

from torch import Tensor, nn

from autopar._torch import parts_of
from passes._torch import parameters_of, storage_id


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
        held = {storage_id(part) for part in parameters_of(self).values() if part is not None}
        return tuple(_apart(item, held) for item in result) if isinstance(result, tuple) else _apart(result, held)

    def current(self, number: int) -> Tensor:
        """A parameter as it is now: gathered while the group runs, or else this rank's part."""
        found = parameters_of(self)[str(number)]
        assert found is not None
        return found


def _apart(result: object, held: Set[int]) -> object:
    """Return `result`, copied if it shares one of the storages `held`."""
    return result.clone() if isinstance(result, Tensor) and storage_id(result) in held else result


def within(groups: Sequence[nn.Module], run: Callable[..., object], inputs: Sequence[Tensor]) -> object:
    """`run(*inputs)` with the parameters of `groups` gathered."""
    for group in groups:
        run = partial(group, run)
    return run(*inputs)


class PartView:
    """The view of a submodule that generated code reads: parameters of FSDP units and given tensors replace its own."""

    def __init__(self, part: nn.Module, held: Mapping[str, tuple[ParameterGroup, int] | Tensor]) -> None:
        own: dict[str, tuple[ParameterGroup, int]] = {}
        inner: dict[str, dict[str, tuple[ParameterGroup, int] | Tensor]] = {}
        for path, reading in held.items():
            name, _, rest = path.partition(".")
            if rest:
                inner.setdefault(name, {})[rest] = reading
            elif isinstance(reading, Tensor):
                self.__dict__[name] = reading
            else:
                own[name] = reading
        self.__part = part
        # Without paths, so that what is compiled for one copy of a region serves the others.
        self.__own = own
        for name, module in parts_of(part).items():
            if module is not None:
                self.__dict__[name] = PartView(module, inner.get(name, {}))

    def __getattr__(self, name: str) -> object:
        reading = self.__own.get(name)
        if reading is not None:
            group, number = reading
            return group.current(number)
        result: object = getattr(self.__part, name)
        return result

    def leaves(self) -> Iterator[Tensor]:
        """The parameters that are read here as leaves of autograd."""
        for item in vars(self).values():
            if isinstance(item, PartView):
                yield from item.leaves()
            elif isinstance(item, Tensor):
                yield item

    def __getitem__(self, name: int | str) -> object:
        """The part under a name that is no identifier, as in `layers[0]`; None where there is none."""
        return getattr(self, str(name), None)
