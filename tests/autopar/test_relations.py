"""Relations between random plans: with more freedom, or more means, no plan is slower, and none is refused."""

from itertools import cycle, islice

import pytest

from tests.autopar.relations import LARGE, RELATIONS, SMALL, Scope, clean_traces, outcome, pair, violation

FAST = [(name, 1 + seed // len(RELATIONS)) for seed, name in enumerate(islice(cycle(RELATIONS), 20))]
NIGHTLY = [(name, 1000 + seed // len(RELATIONS)) for seed, name in enumerate(islice(cycle(RELATIONS), 300))]


def _check(name: str, seed: int, scope: Scope) -> None:
    """A relation holds for the pair of a seed; the message has the calls."""
    with clean_traces():
        restricted, relaxed = pair(name, seed, scope)
        first, second = outcome(restricted), outcome(relaxed)
    broken = violation(first, second)
    assert not broken, f"{name}, seed {seed}: {broken}\n{restricted}\n  {first}\n{relaxed}\n  {second}"


@pytest.mark.parametrize(("name", "seed"), FAST)
def test_relation_holds(name: str, seed: int) -> None:
    """On small meshes."""
    _check(name, seed, SMALL)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), NIGHTLY)
def test_relation_holds_on_large_meshes(name: str, seed: int) -> None:
    """On up to 64 devices and three given axes, for all architectures."""
    _check(name, seed, LARGE)
