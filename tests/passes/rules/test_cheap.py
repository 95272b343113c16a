"""The tensors that are kept of values that are views of each other."""

from passes.rules.cheap import with_viewed


def test_views_are_followed_to_what_they_are_of() -> None:
    """Views of views, from the last op to the first; what others are views of is none of it."""
    views = [(("d",), ("c",)), (("other",), ("else",)), (("c", "c2"), ("b",)), (("b",), ("a",))]
    assert with_viewed(["d", "x"], views) == {"a", "b", "c", "d", "x"}
    assert with_viewed(["c2"], views) == {"a", "b", "c2"}
    assert with_viewed([], views) == set()
