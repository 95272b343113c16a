"""The inputs of a model, leaf by leaf."""

from collections.abc import Callable, Mapping

from passes._torch import pytree

Inputs = Mapping[str, object]


def input_leaves(inputs: Inputs) -> list[tuple[str, object]]:
    """The leaves of the inputs with their names: "input_ids", or "pixels[0]" inside a list."""
    leaves, _ = pytree.tree_flatten_with_path(dict(inputs))
    return [(_path_name(path), leaf) for path, leaf in leaves]


def map_leaves(inputs: Inputs, change: Callable[[str, object], object]) -> dict[str, object]:
    """The inputs with `change(name, leaf)` in place of each leaf."""
    changed: dict[str, object] = pytree.tree_map_with_path(
        lambda path, leaf: change(_path_name(path), leaf), dict(inputs)
    )
    return changed


def given_name(name: str) -> str:
    """The name in a program of an input that is a constant."""
    return f"{name} (given)"


def _path_name(path: pytree.KeyPath) -> str:
    first, *rest = path
    assert isinstance(first, pytree.MappingKey)
    return str(first.key) + pytree.keystr(tuple(rest))
