"""Methods of attention on long sequences."""

import pytest

import autopar
from benchmarks import context
from tests.models import llama, tokens


@pytest.mark.long
def test_methods_are_read_from_a_plan() -> None:
    """Of an axis that splits attention the method, also where others split nothing."""
    for mesh, method in (({"dp": 2, "cp": 2}, {"cp": "ring"}), ({"cp": 2}, {"cp": "queries"})):
        demand = {f"@{context.ATTENTION}": {"method": method}}
        plan = autopar.plan(llama(), mesh, tokens(), cluster="h100", constraints=demand)
        assert context.methods_of(plan)["cp"] == method["cp"]


def test_rows_are_of_known_models() -> None:
    """Each under a name of its own, and as lines with what was found or why not."""
    names = [row.name for row in context.ROWS]
    assert len(set(names)) == len(names)
    assert {row.model for row in context.ROWS} <= {row.name for row in context.SIZES}
    found = {"row": "a", "mesh": {"cp": 2}, "methods": {"cp": "ring"}, "step_s": 1.0, "memory_gib": 2.0}
    assert "2 ring" in context.line(found)
    assert "no such method" in context.line({"row": "a", "forced": "cp heads", "error": "no such method"})
