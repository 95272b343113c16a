"""Buckets of random networks against trying every choice."""

from itertools import product

import numpy as np
import pytest

from passes.solve.elimination.network import Buckets, Network, Sharing, find_order
from passes.solve.optimum import network_of
from tests.passes.solve.test_optimum import random_arrays


def every_value(network: Network) -> dict[tuple[int, ...], float]:
    """The costs of every choice of labels; nodes in the order of their numbers."""
    nodes = sorted(network.costs)
    sizes = [range(len(network.costs[node])) for node in nodes]
    return {labels: network.value(dict(zip(nodes, labels, strict=True))) for labels in product(*sizes)}


@pytest.mark.parametrize("seed", range(30))
def test_tables_tell_the_least_cost_with_every_label(seed: int) -> None:
    network = network_of(random_arrays(seed, nodes=6))
    values = every_value(network)
    tables = Buckets(network)
    assert tables.bound == pytest.approx(min(values.values()), rel=1e-12)
    assert network.value(tables.picks()) == pytest.approx(tables.bound, rel=1e-12)
    tables.learn()
    for node, least in tables.with_label().items():
        own = [min(value for labels, value in values.items() if labels[node] == label) for label in range(len(least))]
        assert least == pytest.approx(np.array(own), rel=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_what_no_choice_may_have_costs_no_finite_price(seed: int) -> None:
    """Labels and pairs without a price that is finite stay so, and tell nothing about others."""
    network = network_of(random_arrays(seed, nodes=6))
    node = max(network.costs, key=lambda item: len(network.costs[item]))
    network.costs[node] = np.where(np.arange(len(network.costs[node])) == 0, np.inf, network.costs[node])
    values = every_value(network)
    tables = Buckets(network)
    tables.learn()
    for other, least in tables.with_label().items():
        own = [min(value for labels, value in values.items() if labels[other] == label) for label in range(len(least))]
        assert least == pytest.approx(np.array(own), rel=1e-12)


def test_a_chain_has_tables_of_two_nodes() -> None:
    """A chain of any length costs its length times a table of two nodes."""
    for length in (4, 40):
        costs = {node: np.zeros(5) for node in range(length)}
        network = Network(costs, {node: np.arange(5) for node in costs})
        for node in range(length - 1):
            network.add_pair(node, node + 1, np.ones((5, 5)))
        order = find_order(network, dict.fromkeys(costs, 5))
        assert order.cells == 25 * (length - 1) + 5
        assert all(len(scope) <= 2 for scope in order.scopes)


@pytest.mark.parametrize("seed", range(5))
def test_many_consumers_of_one_tensor(seed: int) -> None:
    """Consumers with one label left, more than an array has dims, cost what they do among all others."""
    draw = np.random.default_rng(seed)
    consumers = [(node, draw.integers(0, 4, 3)) for node in range(1, 100)]
    costs = {0: draw.random(3), **{node: draw.random(3) for node, _ in consumers}}
    network = Network(costs, {node: np.arange(3) for node in costs})
    network.add_sharing(Sharing(0, np.arange(3), consumers, draw.random((3, 4))))
    kept = {node: draw.integers(0, 3, 1) if node > 4 else np.arange(3) for node in costs}
    values = {
        labels: network.value(dict(enumerate(labels)))
        for labels in product(*(kept[node].tolist() for node in sorted(kept)))
    }
    network.narrow({node: np.isin(np.arange(3), labels) for node, labels in kept.items()})
    tables = Buckets(network)
    assert tables.bound == pytest.approx(min(values.values()), rel=1e-12)
    assert network.value(tables.picks()) == pytest.approx(tables.bound, rel=1e-12)
