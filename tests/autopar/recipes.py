"""Well-known ways to run a llama on the mesh axes dp and tp, 8 devices each, written as constraints.

A constraint says, by name of parameter, module or op, how what is `stored`, `used`, goes `in` or comes `out` lies on
each axis; what it does not say the planner still chooses. `S(0, 8)` on the second axis is the part of dim 0 that is
left when the first axis has cut it into 8.
"""

from passes.constrain import Constraints

# Tensor and sequence parallel on tp (Korthikanti et al. 2022), data parallel on dp: norms work on a part of the
# sequence; q, k, v, gate and up give a part of the heads or features, of which o and down make pending sums; embedding
# and head are split over the vocabulary. Every dp rank holds a copy of its parameters.
MEGATRON: Constraints = {
    "*": {"stored": {"dp": "I"}, "used": {"dp": "R"}},
    "model.embed_tokens.weight": {"used": {"tp": "S(0)"}},
    "*norm": {"in": {"dp": "S(0)", "tp": "S(1)"}, "out": {"dp": "S(0)", "tp": "S(1)"}},
    "*.[qkv]_proj": {"in": {"tp": "R"}, "out": {"dp": "S(0)", "tp": "S(2)"}},
    "*.o_proj": {"in": {"tp": "S(2)"}, "out": {"dp": "S(0)", "tp": "P"}},
    "*.gate_proj": {"out": {"dp": "S(0)", "tp": "S(2)"}},
    "*.up_proj": {"out": {"dp": "S(0)", "tp": "S(2)"}},
    "*.down_proj": {"in": {"tp": "S(2)"}, "out": {"dp": "S(0)", "tp": "P"}},
    "lm_head": {"in": {"tp": "R"}, "out": {"dp": "S(0)", "tp": "S(2)"}},
}

# What data parallel methods do with activations: every device takes its own part of the batch through all layers.
_BATCH = {"dp": "S(0)", "tp": "S(0, 8)"}
_WHOLE = {"dp": "R", "tp": "R"}
_DATA_PARALLEL: Constraints = {
    "@embedding": {"out": _BATCH},
    "@linear": {"in": _BATCH, "out": _BATCH},
    "@scaled_dot_product_attention": {"in": _BATCH, "out": _BATCH},
}

# Fully sharded data parallel (ZeRO-3): parameters lie split over all devices and are gathered where they are used.
FSDP: Constraints = {"*": {"stored": _BATCH, "used": _WHOLE}, **_DATA_PARALLEL}

# Distributed data parallel: every device holds all parameters, and gradients are all-reduced.
DDP: Constraints = {"*": {"stored": {"dp": "I", "tp": "I"}, "used": _WHOLE}, **_DATA_PARALLEL}
