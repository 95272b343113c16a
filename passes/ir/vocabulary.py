"""Names that generated source takes from the runtime, or has for something of its own."""

COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "convert", "reduce_scatter")
FORMS = (
    "causal_attention",
    "split_batch_norm",
    "split_cumsum",
    "split_group_norm",
    "split_layer_norm",
    "split_log_softmax",
    "split_logsumexp",
    "split_rms_norm",
    "split_softmax",
    "split_updating_batch_norm",
    "vocabulary_cross_entropy",
    "vocabulary_embedding",
    "with_halo",
)
BASES = ("Generated", "Region")
HELPERS = ("gathered", "local", "recomputed")
LETTERS = ("I", "P", "R", "S")

# What no variable of generated source is called, and no axis, as it is one.
RESERVED = {"self", "torch", "F", "copy", "index", "layer", *COLLECTIVES, *FORMS, *HELPERS, *LETTERS}


def import_order(name: str) -> tuple[int, str]:
    """Where an imported name stands: letters first, then classes."""
    return (0 if name in LETTERS else 1 if name in BASES else 2, name)
