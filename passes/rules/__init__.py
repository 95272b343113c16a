"""Sharding rules, one file per family of operators. Importing this package fills the registry."""

from passes.rules import (
    attention,
    convolution,
    indexing,
    linalg,
    loss,
    matmul,
    norm,
    pointwise,
    recurrent,
    reduce,
    transform,
    view,
)
from passes.rules.parts import find_rule, registered, rule_for, signature, written_rule

__all__ = [
    "attention",
    "convolution",
    "find_rule",
    "indexing",
    "linalg",
    "loss",
    "matmul",
    "norm",
    "pointwise",
    "recurrent",
    "reduce",
    "registered",
    "rule_for",
    "signature",
    "transform",
    "view",
    "written_rule",
]
