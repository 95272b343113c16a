"""ParetoFrontiers of random networks with limits against trying every choice."""

from itertools import product

import numpy as np
import pytest

from passes.solve.active_constraints import LimitedNetwork, SharedAmounts
from passes.solve.elimination.network import Network
from passes.solve.optimum import network_of
from passes.solve.pareto.frontiers import ParetoFrontiers, Surrogate, TooManyError, undominated_rows
from tests.passes.solve.test_optimum import random_arrays


def random_limited(seed: int) -> LimitedNetwork:
    """A random network with two amounts besides seconds, and shared amounts of which some may be taken in two ways."""
    arrays = random_arrays(seed, nodes=6)
    draw = np.random.default_rng(seed)
    network = network_of(arrays)
    amounts = {}
    for node, costs in network.costs.items():
        amounts[node] = np.zeros((len(costs), 3))
        amounts[node][:, 1:] = draw.integers(0, 4, size=(len(costs), 2))
    shared = []
    for group in arrays.groups[::2]:
        first, second = np.zeros((2, *group.seconds.shape, 3))
        first[..., 1] = draw.integers(0, 5, size=group.seconds.shape)
        second[..., 0] = draw.random(group.seconds.shape)
        second[..., 2] = draw.integers(0, 2, size=group.seconds.shape)
        is_open = draw.random(group.seconds.shape) < 0.5
        consumers = [(edge.consumer, edge.wanted) for edge in group.edges]
        shared.append(SharedAmounts(group.producer, group.made, consumers, first, second, is_open))
    return LimitedNetwork(network, amounts, shared, 3)


def every_choice(limited: LimitedNetwork) -> list[np.ndarray]:
    """The amounts of every choice of labels and of ways to take shared amounts."""
    network: Network = limited.network
    nodes = sorted(network.costs)
    found = []
    for labels in product(*(range(len(network.costs[node])) for node in nodes)):
        picks = dict(zip(nodes, labels, strict=True))
        base = np.array([network.value(picks), 0.0, 0.0])
        base += sum(amounts[picks[node]] for node, amounts in limited.amounts.items())
        ways = []
        for item in limited.shared:
            made = item.made[picks[item.producer]]
            for target in {wanted[picks[node]] for node, wanted in item.consumers}:
                options = [item.first[made, target]]
                if item.open[made, target]:
                    options.append(item.second[made, target])
                ways.append(options)
        found += [base + sum(taken) for taken in product(*ways)]
    return found


def amounts_of(limited: LimitedNetwork, picks: dict[int, int], ways: frozenset[tuple[int, int]]) -> np.ndarray:
    """The amounts of one choice."""
    total = np.array([limited.network.value(picks), 0.0, 0.0])
    total += sum(amounts[picks[node]] for node, amounts in limited.amounts.items())
    for number, item in enumerate(limited.shared):
        made = item.made[picks[item.producer]]
        for target in {int(wanted[picks[node]]) for node, wanted in item.consumers}:
            total += (item.second if (number, target) in ways else item.first)[made, target]
    return total


@pytest.mark.parametrize("seed", range(24))
def test_frontiers_have_the_best_choice_within_every_limit(seed: int) -> None:
    limited = random_limited(seed)
    every = np.array(every_choice(limited))
    for part in (0.0, 0.3, 0.7):
        limits = np.quantile(every[:, 1:], part, axis=0, method="lower")
        fitting = every[(every[:, 1:] <= limits).all(axis=1)]
        aim = np.inf if seed % 2 else every[:, 0].mean()
        surrogates = [Surrogate(np.eye(3)[1 + index], limit * (1 + 1e-9)) for index, limit in enumerate(limits)]
        price = np.array([1.0, 0.1, 0.2])
        surrogates += [Surrogate(np.eye(3)[0], aim), Surrogate(price, aim + price[1:] @ limits)]
        frontiers = ParetoFrontiers(limited, surrogates)
        within = [row for row, own in enumerate(frontiers.rows.amounts) if (own[1:] <= limits * (1 + 1e-9)).all()]
        best = min(fitting[:, 0], default=np.inf)
        found = min(within, key=lambda row: frontiers.rows.amounts[row, 0], default=None)
        if best >= aim:
            assert found is None or frontiers.rows.amounts[found, 0] >= best * (1 - 1e-9)
            continue
        assert found is not None, "no choice is left"
        choice = frontiers.choice(found)
        amounts = frontiers.rows.amounts[found]
        assert amounts[0] == pytest.approx(best, rel=1e-9)
        assert amounts_of(limited, dict(choice.picks), choice.second) == pytest.approx(amounts, rel=1e-9)


@pytest.mark.parametrize("name", ["ROWS", "CELLS"])
def test_too_many_rows_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limited = random_limited(3)
    monkeypatch.setattr(f"passes.solve.pareto.frontiers.{name}", 10)
    with pytest.raises(TooManyError):
        ParetoFrontiers(limited, [Surrogate(np.array([1.0, 0.0, 0.0]), np.inf)])


def test_rows_that_others_beat_go() -> None:
    """Rows of each key that no other row dominates stay; the first of equal ones."""
    keys = np.array([1, 0, 0, 0, 1])
    amounts = np.array([[1.0, 5.0], [2.0, 2.0], [1.0, 3.0], [2.0, 3.0], [1.0, 5.0]])
    assert undominated_rows(keys, amounts).tolist() == [2, 1, 0]
