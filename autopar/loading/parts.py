"""Parallelized submodules in a model that is otherwise unchanged."""

from collections.abc import Set

from torch import nn

from autopar.plans.dynamic_shapes import structure_of
from autopar.runtime import DistributedModule
from passes.ir.errors import InputError


def replace_part(model: nn.Module, name: str, part: DistributedModule) -> None:
    """Replace the submodule `name` of `model` by `part`, which was made from it.

    The rest of the model runs unchanged on every rank: `part` returns whole tensors from now on, and has the attributes
    and methods of the submodule that it replaces. Children of that submodule that were not traced (an embedding, where
    the trace begins after it) are kept, with their own parameters.

    Raises InputError where there is no such submodule, where `part` was made from another one, and where it shares a
    parameter with the rest of the model.
    """
    try:
        original = model.get_submodule(name)
    except AttributeError:
        original = None
    if original is None or original is model:
        raise InputError(f"{type(model).__name__} has no part called {name!r}")
    if type(original).__name__ != part.plan.model:
        raise InputError(f"{name} is {type(original).__name__}, but the part was made of {part.plan.model}")
    # Both give all parameters under all their names.
    whole = model.named_parameters(remove_duplicate=False)
    outside = {id(item): other for other, item in whole if not other.startswith(f"{name}.")}
    for own, item in original.named_parameters(remove_duplicate=False):
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


def _left_out(original: nn.Module, used: Set[str]) -> list[str]:
    """The largest parts that have parameters, and none that is used."""
    found: list[str] = []
    for path, inner in original.named_modules():
        names = [f"{path}.{parameter}" for parameter, _ in inner.named_parameters(remove_duplicate=False)]
        above = any(path.startswith(f"{other}.") for other in found)
        if path and names and not above and not used & set(names):
            found.append(path)
    return found
