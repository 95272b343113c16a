"""Sharding rules, one file per family of operators. Importing this package fills the registry."""

from passes.rules import attention, embedding, loss, matmul, norm, pointwise, reduce, view
from passes.rules.registry import find_rule, registered, rule_for

__all__ = [
    "attention",
    "embedding",
    "find_rule",
    "loss",
    "matmul",
    "norm",
    "pointwise",
    "reduce",
    "registered",
    "rule_for",
    "view",
]
