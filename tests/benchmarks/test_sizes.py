"""The table of published sizes."""

from benchmarks import sizes


def test_rows_are_of_many_architectures() -> None:
    """Thirty rows of twenty architectures, each under a name of its own."""
    assert len({row.name for row in sizes.ROWS}) == len(sizes.ROWS) >= 30
    assert len({row.kind for row in sizes.ROWS}) >= 20


def test_a_row_is_planned() -> None:
    """A row that fits has its figures, another its error."""
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    row = sizes.Row("small", "Bert", small, 2, 8, 16, "{}ForMaskedLM")
    found = {"model": "small", "devices": 2, "batch": "8 x 16", "dtype": "bfloat16", **sizes.measure(row)}
    assert found["fits"]
    line = sizes.line(found)
    assert line.count("|") == len(sizes.TITLES) + 1
    assert f"{found['tokens_per_second_per_device']:,.0f} tokens" in line
    failed = {**found, "fits": False, "error": "InfeasibleError: too large"}
    assert "| no |" in sizes.line(failed)
    assert "InfeasibleError: too large" in sizes.line(failed)
    assert sizes.line(failed).count("|") == line.count("|")
