"""Parallelized parts in a model that is otherwise as it was."""

from collections.abc import Iterator, Set

from torch import nn

from autopar.plans.dynamic_shapes import structure_of
from autopar.runtime import DistributedModule
from passes.ir.errors import InputError


def replace_part(model: nn.Module, name: str, part: DistributedModule) -> None:
    """Put `part` in the place of the part of `model` called `name`, of which it was made.

    The rest of the model goes on as it is, on every rank alike: `part` returns whole tensors from now on, and has the
    attributes and methods of the part that it stands for. Parts of that part that were not traced (an embedding, where
    the trace begins behind it) stay what they are, with their own parameters.

    Raises InputError where there is no such part, where `part` was made of another one, and where it has a parameter
    that the rest of the model has too.
    """
    try:
        original = model.get_submodule(name)
    except AttributeError:
        original = None
    if original is None or original is model:
        raise InputError(f"{type(model).__name__} has no part called {name!r}")
    if type(original).__name__ != part.plan.model:
        raise InputError(f"{name} is {type(original).__name__}, but the part was made of {part.plan.model}")
    outside = {id(item): other for other, item in _parameters(model) if not other.startswith(f"{name}.")}
    for own, item in _parameters(original):
        if own in part.used_parameters and id(item) in outside:
            raise InputError(
                f"{own!r} of {name} is also {outside[id(item)]!r} of the model, and would become another parameter: "
                "take a part that has both, or give the part what it makes of it as an input"
            )
    structure = structure_of(original)
    for path in _left_out(original, part.used_parameters):
        left = original.get_submodule(path)
        structure.set_submodule(path, left)
        part.keep(path, left)
    part.stand_for(structure.train(part.training))
    model.set_submodule(name, part)


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """All parameters under all their names."""
    return module.named_parameters(remove_duplicate=False)


def _left_out(original: nn.Module, used: Set[str]) -> list[str]:
    """The largest parts that have parameters, and none that is used."""
    found: list[str] = []
    for path, inner in original.named_modules():
        names = [f"{path}.{parameter}" for parameter, _ in _parameters(inner)]
        above = any(path.startswith(f"{other}.") for other in found)
        if path and names and not above and not used & set(names):
            found.append(path)
    return found
