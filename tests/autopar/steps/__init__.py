"""The steps that random programs are made of: for each what it takes, how its arguments are drawn, what it gives.

A step reads tensors that live, and returns an expression, or statements that define names of its own. What it gives is
found out by running it. Arguments keep values away from where a gradient jumps (relu at 0, ties of a maximum), so that
in float64 all errors are those of rounding.
"""

import importlib

from tests.autopar.steps.draw import MOST, NAMES, STEPS, Code, Draw, Held, UnfitError

# In this order, which is that of the table: what a seed draws depends on it.
for _family in (
    "pointwise",
    "views",
    "products",
    "reductions",
    "norms",
    "picking",
    "convolutions",
    "attention",
    "losses",
    "in_place",
):
    importlib.import_module(f"tests.autopar.steps.{_family}")

__all__ = ["MOST", "NAMES", "STEPS", "Code", "Draw", "Held", "UnfitError"]
