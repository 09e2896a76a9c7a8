"""The price of schedules."""

from math import ceil, log2

import pytest

from mpiagg.schedules import TABLE, Cluster, Collective, price

SERVED = [(name, collective) for name, entry in TABLE.items() for collective in entry.schedules]
CLUSTER = Cluster(alpha=3e-6, beta=1e-9, gamma=2e-10)
ROUNDS = Cluster(alpha=1.0, beta=0.0, gamma=0.0)
BYTES = Cluster(alpha=0.0, beta=1.0, gamma=0.0)
REDUCED = Cluster(alpha=0.0, beta=0.0, gamma=1.0)
SIZES = (1, 2, 3, 5, 8, 13, 16)


@pytest.mark.parametrize("n", SIZES)
def test_ring(n):
    nbytes = 12345.0
    expected = 2 * (n - 1) * (CLUSTER.alpha + CLUSTER.beta * nbytes / n) + (n - 1) * CLUSTER.gamma * nbytes / n
    assert price("ring", "allreduce", n, nbytes, CLUSTER) == pytest.approx(expected)


@pytest.mark.parametrize("n", SIZES)
def test_critical_path_in_rounds(n):
    def rounds(name, collective="allreduce"):
        return price(name, collective, n, 1000, ROUNDS)

    depth, floor, ceiling = int(log2(n)), int(log2(n)), ceil(log2(n))
    extra = 2 if floor != ceiling else 0
    assert rounds("ring") == 2 * (n - 1)
    assert rounds("ring", "reduce") == rounds("ring", "broadcast") == (n if n > 1 else 0)
    assert rounds("direct") == (2 if n > 1 else 0)
    assert rounds("circulant") == 2 * ceiling
    assert rounds("recursive_doubling") == floor + extra
    assert rounds("halving_doubling") == 2 * floor + extra
    assert rounds("parameter_server") == (n if n > 1 else 0)
    assert rounds("tree", "broadcast") == depth
    assert rounds("tree", "reduce") <= 2 * depth
    assert rounds("tree") <= 3 * depth


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_bytes_on_the_critical_path_at_powers_of_two(n):
    least = 2 * (n - 1) / n * 1000
    for name in ("ring", "direct", "circulant", "halving_doubling"):
        assert price(name, "allreduce", n, 1000, BYTES) == pytest.approx(least), name
    assert price("recursive_doubling", "allreduce", n, 1000, BYTES) == pytest.approx(log2(n) * 1000)
    assert price("parameter_server", "allreduce", n, 1000, BYTES) == pytest.approx(2 * (n - 1) * 1000)


def test_reduced_bytes():
    assert price("ring", "allreduce", 5, 1000, REDUCED) == pytest.approx(4 / 5 * 1000)
    assert price("parameter_server", "reduce", 5, 1000, REDUCED) == pytest.approx(4 * 1000)
    assert price("tree", "broadcast", 5, 1000, REDUCED) == 0


@pytest.mark.parametrize(("name", "collective"), SERVED)
def test_longer_vectors_cost_more(name, collective):
    for n in SIZES:
        prices = [price(name, collective, n, nbytes, CLUSTER) for nbytes in (0, 1, 100, 10_000, 1e9)]
        assert prices == sorted(prices)
        assert n == 1 or prices[0] < prices[-1]


@pytest.mark.parametrize("collective", [c for c in Collective if c.rooted])
def test_every_root_costs_the_same(collective):
    for name in ("ring", "tree", "parameter_server"):
        prices = {price(name, collective, 6, 600, CLUSTER, root=root) for root in range(6)}
        assert len(prices) == 1
