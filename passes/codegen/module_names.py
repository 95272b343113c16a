"""Expressions by which generated code reads submodules of the model, and names of regions and their copies."""

import keyword
from collections.abc import Sequence

from passes.ir.lowered import Loop
from passes.ir.vocabulary import identifier

# Names that generated classes define themselves.
_ATTRIBUTES = {
    "axes",
    "build",
    "constants",
    "copies",
    "copy_groups",
    "device",
    "drawn",
    "forward",
    "gathering",
    "groups",
    "random",
    "recomputed",
    "root",
    "totals",
}


def class_name(loop: Loop, taken: set[str]) -> str:
    """The class of the region's entries, or a name after the list that they stand in."""
    depth = loop.region.name.count(".") + 1
    owners = [op.module_class for op in loop.region.ops if op.module.split("[")[0].count(".") + 1 == depth]
    base = owners[0] if owners else "".join(part.title() for part in loop.region.name.split(".") if part.isidentifier())
    if len(loop.region.copies[0]) > 1:
        base += f"Group{len(loop.region.copies[0])}"
    name, count = base or "Layer", 1
    while name in taken:
        count += 1
        name = f"{base}{count}"
    return name


def loop_name(index: int, loops: Sequence[Loop]) -> str:
    """The name of a loop's copies: that of the module list that contains them."""
    owner = _owner(loops[index])
    name = identifier(owner or "copies")
    same = [identifier(_owner(loop)) for loop in loops]
    alone = same.count(name) == 1 and name not in _ATTRIBUTES
    return name if alone else f"{name}_{index}"


def copy_path(own: str, region: str, entries: int) -> str:
    """The path of a copy's own parameter: "layer.mlp.down_proj.weight"."""
    rest = own.removeprefix(region)
    index, _, rest = rest.removeprefix("[").partition("]") if entries > 1 else ("", "", rest)
    return (f"layer_{index}" if entries > 1 else "layer") + attribute(rest.removeprefix(".").split("."))


def attribute(path: Sequence[str]) -> str:
    """The attribute expression of a submodule: ".layers[0].mlp"."""
    return "".join(
        f".{part}"
        if part.isidentifier() and not keyword.iskeyword(part)
        else f"[{part if part.isdecimal() and str(int(part)) == part else repr(part)}]"
        for part in path
    )


def unpacked(names: Sequence[str]) -> str:
    """The left side of an assignment from a tuple."""
    return f"({names[0]},)" if len(names) == 1 else ", ".join(names)


def _owner(loop: Loop) -> str:
    """The list that a region is of, without the path to it."""
    return loop.region.name.rpartition(".")[0].rsplit(".", 1)[-1]
