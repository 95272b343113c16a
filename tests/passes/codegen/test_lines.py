"""Long lines of generated source are broken at the arguments of the call that ends them."""

from passes.codegen.lines import broken


def test_arguments_go_below_each_other() -> None:
    """One per line, nested calls stay whole."""
    inner = ", ".join(f"function_{number}(operand, other)" for number in range(5))
    lines = broken(f"    result = torch.cat({inner})", "    ")
    assert lines[0] == "    result = torch.cat("
    assert lines[1:-1] == [f"        function_{number}(operand, other)," for number in range(5)]
    assert lines[-1] == "    )"


def test_commas_in_text_are_text() -> None:
    """The equation of einsum is one argument."""
    lines = broken(f'einsum("bind,bjnd->bnij,(", {"x" * 60}, {"y" * 60})', "")
    assert lines[1] == '    "bind,bjnd->bnij,(",'
    assert len(lines) == 5
