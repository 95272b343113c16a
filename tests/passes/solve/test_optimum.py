"""The solver's parts on random networks of costs, against trying every choice."""

from itertools import product

import numpy as np
import pytest
import torch

from passes.ir.choices import EdgeGroup
from passes.ir.program import TensorType
from passes.solve.arrays import Arrays, EdgeArrays, GroupArrays
from passes.solve.elimination.network import eliminate, restore
from passes.solve.optimum import MessagePassing, network_of, optimum

GROUP = EdgeGroup("x", TensorType((1,), torch.float32), 1, 0, True, 4, False, False)


def random_arrays(seed: int, nodes: int = 7, layouts: int = 3) -> Arrays:
    """Random costs: a few nodes with a few labels, tensors with one to three consumers, many costs zero or equal."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 5, size=nodes)
    coarse = seed % 2

    def cost(*shape: int) -> np.ndarray:
        values = draw.integers(0, 4, size=shape).astype(float) if coarse else draw.random(shape)
        return np.where(draw.random(shape) < 0.3, 0.0, values)

    groups = []
    for producer in range(nodes - 1):
        for _ in range(draw.integers(1, 3)):
            count = int(draw.integers(1, min(4, nodes - producer)))
            consumers = draw.choice(np.arange(producer + 1, nodes), size=count, replace=False)
            made = draw.integers(0, layouts, size=sizes[producer])
            edges = [EdgeArrays(int(node), draw.integers(0, layouts, size=sizes[node]), False) for node in consumers]
            seconds = cost(layouts, layouts)
            none = np.zeros((layouts, layouts))
            groups.append(
                GroupArrays(
                    GROUP, producer, made, edges, tuple(() for _ in range(layouts)), seconds, none,
                    none > 0, none.astype(int), none, none,
                )
            )  # fmt: skip
    costs = [cost(size) + 0.1 for size in sizes]
    return Arrays(costs, [np.zeros(size, dtype=int) for size in sizes], groups)


def least(arrays: Arrays) -> float:
    """The cost of the best choice, by trying all."""
    return min(arrays.value(picks) for picks in product(*(range(len(costs)) for costs in arrays.costs)))


@pytest.mark.parametrize("seed", range(60))
def test_optimum_of_random_networks(seed: int) -> None:
    """No choice costs less, and the bound is below it and close to it."""
    arrays = random_arrays(seed)
    found = optimum(arrays)
    best = least(arrays)
    assert arrays.value([found.picks[node] for node in range(len(arrays.costs))]) == pytest.approx(best, rel=1e-9)
    assert best * (1 - 1e-6) <= found.bound <= best * (1 + 1e-6)


@pytest.mark.parametrize("few", [1, 30])
@pytest.mark.parametrize("seed", range(20))
def test_optimum_where_tables_are_too_large(seed: int, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Message passing prunes first: the bound is below the least cost and the choice above it, and no strategy of a
    choice below the cutoff is lost."""
    monkeypatch.setattr("passes.solve.optimum.FEW", few)
    arrays = random_arrays(seed)
    best = least(arrays)
    for enough in (np.inf, best * 1.1):
        found = optimum(arrays, enough)
        cost = arrays.value([found.picks[node] for node in range(len(arrays.costs))])
        assert best * (1 - 1e-9) <= cost
        assert 0 < found.bound <= best * (1 + 1e-6)
        for picks in product(*(range(len(costs)) for costs in arrays.costs)):
            if arrays.value(picks) < enough:
                assert all(pick in found.remaining[node] for node, pick in enumerate(picks))


@pytest.mark.parametrize("seed", range(20))
def test_what_is_in_no_better_choice_is_not_hopeful(seed: int) -> None:
    """With a price that is enough, every choice that costs less has remaining strategies only, and others have gone."""
    arrays = random_arrays(seed)
    every = list(product(*(range(len(costs)) for costs in arrays.costs)))
    values = sorted(arrays.value(picks) for picks in every)
    enough = values[len(values) // 100] * (1 + 1e-6)
    remaining = optimum(arrays, enough=enough).remaining
    assert all(
        pick in remaining[node] for picks in every if arrays.value(picks) < enough for node, pick in enumerate(picks)
    )
    assert optimum(arrays, enough=values[0]).bound >= values[0] * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_eliminating_variables_keeps_the_optimum(seed: int) -> None:
    """The best choice of the nodes that are not eliminated, restored, is as good as the best of all."""
    arrays = random_arrays(seed)
    network = network_of(arrays)
    eliminate(network)
    nodes = sorted(network.costs)
    every = product(*(range(len(network.costs[node])) for node in nodes))
    picks = min((dict(zip(nodes, labels, strict=True)) for labels in every), key=network.value)
    chosen = restore(network, network.strategies(picks))
    strategies = [chosen[node] for node in range(len(arrays.costs))]
    assert arrays.value(strategies) == pytest.approx(least(arrays), rel=1e-9)
    assert network.value(picks) == pytest.approx(least(arrays), rel=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_bounds_are_below_the_optimum_and_keep_it(seed: int) -> None:
    """Message passing never exceeds the least cost, and does not rule out the labels of a best choice."""
    arrays = random_arrays(seed)
    best = least(arrays)
    bounds = MessagePassing(network_of(arrays))
    for _ in range(8):
        before = bounds.bound
        bounds.sweep(best * (1 + 1e-9))
        assert bounds.bound <= best * (1 + 1e-9)
        assert bounds.bound >= before - 1e-9 * abs(best)
    alive = [np.flatnonzero(bounds.alive[node]) for node in range(len(arrays.costs))]
    assert min(arrays.value(picks) for picks in product(*alive)) == pytest.approx(best, rel=1e-9)
