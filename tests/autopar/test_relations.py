"""Relations between random plans: with more freedom, or more means, no plan is slower, and none is refused."""

import itertools
from collections.abc import Sequence
from itertools import islice

import pytest
from _pytest.mark import ParameterSet

from tests.autopar.relations import LARGE, RELATIONS, SMALL, Scope, clean_traces, outcome, pair, violation

# A seed of a relation that takes the least time; others take too long for the fast suite.
FAST = {
    "more_memory": 2,
    "finer_mesh": 2,
    "searched_mesh": 1,
    "free_recompute": 1,
    "constraint_less": 1,
    "more_devices": 1,
    "fewer_layers": 1,
}


def _cases(relations: Sequence[str], first: int, count: int) -> list[ParameterSet]:
    """The first `count` pairs of relation and seed, with seeds from `first` on; all but `FAST` ones are slow."""
    found = islice(((name, seed) for seed in itertools.count(first) for name in relations), count)
    return [pytest.param(name, seed, marks=[] if FAST.get(name) == seed else pytest.mark.slow) for name, seed in found]


def _check(name: str, seed: int, scope: Scope) -> None:
    """A relation holds for the pair of a seed; the message has the calls."""
    with clean_traces():
        restricted, relaxed = pair(name, seed, scope)
        first, second = outcome(restricted), outcome(relaxed)
    broken = violation(first, second)
    assert not broken, f"{name}, seed {seed}: {broken}\n{restricted}\n  {first}\n{relaxed}\n  {second}"


@pytest.mark.parametrize(("name", "seed"), _cases(list(RELATIONS), 1, 22))
def test_relation_holds(name: str, seed: int) -> None:
    """On small meshes."""
    _check(name, seed, SMALL)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), _cases(list(RELATIONS), 1000, 300))
def test_relation_holds_on_large_meshes(name: str, seed: int) -> None:
    """On up to 64 devices and three given axes, for all architectures."""
    _check(name, seed, LARGE)
