"""Running ops on shards finds no split that a written rule should have and lacks."""

import pytest

from passes.rules import registered
from tests.passes.rules.second_opinion import apart

FAST = ("embedding", "linear", "mean", "slice")


def hold(kind: str) -> None:
    """Nothing is missed but what is accepted."""
    assert [line for line in apart(kind) if not line.startswith("accepted")] == []


@pytest.mark.parametrize("kind", FAST)
def test_common_rules_miss_nothing(kind: str) -> None:
    hold(kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in registered() if kind not in FAST])
def test_rules_miss_nothing(kind: str) -> None:
    hold(kind)
