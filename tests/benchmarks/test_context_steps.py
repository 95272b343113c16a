"""Steps of a long sequence by each method of attention."""

import pytest

from benchmarks.context_steps import methods, table


@pytest.mark.slow
def test_methods_compute_the_same() -> None:
    """A line for each, with a loss and gradients as of one device, in single precision."""
    alone, _, *lines = table(64)
    assert alone.startswith("one device")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [name for name, *_ in cells] == list(methods(64))
    assert all(float(loss) < 1e-5 and float(worst) < 1e-4 for *_, loss, worst in cells)
