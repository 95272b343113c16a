"""Names in generated source: imported and reserved names, and identifiers made from text."""

import re
from collections.abc import Callable
from itertools import chain, count

COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "convert", "reduce_scatter")
FORMS = (
    "blockwise_attention",
    "chunked_attention",
    "linear_cross_entropy",
    "ring_attention",
    "split_batch_norm",
    "split_cumsum",
    "split_delta_scan",
    "split_group_norm",
    "split_layer_norm",
    "split_log_softmax",
    "split_logsumexp",
    "split_rms_norm",
    "split_selective_scan",
    "split_softmax",
    "split_updating_batch_norm",
    "vocabulary_cross_entropy",
    "vocabulary_embedding",
    "with_halo",
)
BASES = ("Generated", "RegionCopy")
HELPERS = ("gathered", "local", "recomputed")
PLACEMENTS = ("I", "P", "R", "S")

# Reserved: names that no variable or axis of generated source may have.
RESERVED = {"self", "torch", "F", "copy", "index", "layer", *COLLECTIVES, *FORMS, *HELPERS, *PLACEMENTS}


def import_order(name: str) -> tuple[int, str]:
    """The sort key of an imported name: placements first, then classes."""
    return (0 if name in PLACEMENTS else 1 if name in BASES else 2, name)


def identifier(text: str) -> str:
    """An identifier made of the name of a value, a module or a path: "%q_proj_2" -> "q_proj"."""
    name = re.sub(r"\W+", "_", re.sub(r"_n\d+$|_\d+$", "", text.lstrip("%"))).strip("_").lower()
    return name if name and not name[0].isdigit() else f"value_{name}".rstrip("_")


def plain(name: str) -> str:
    """A variable's name without its disambiguating number: "q_proj_2" -> "q_proj"."""
    return re.sub(r"_\d+$", "", name)


def numbered(base: str, taken: Callable[[str], bool], separator: str = "_") -> str:
    """`base`, or the first of "base_2", "base_3", … that is not taken."""
    others = (f"{base}{separator}{number}" for number in count(2))
    return next(name for name in chain([base], others) if not taken(name))
