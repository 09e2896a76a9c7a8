"""An algorithm that is new is one module and one entry in the table: all else finds it there."""

import numpy as np
import pytest
from walked_prices import finish_times

import mpiagg
from mpiagg.schedules import (
    TABLE,
    Algorithm,
    Cluster,
    Collective,
    Layout,
    Round,
    check,
    finish,
    picture,
    receive,
    reduce_from,
    schedules,
    send,
)
from mpiagg.schedules.model import Pricing

# -- the module


def allreduce(rank, size):
    """Let the upper half of the ranks send to the lower half, and this goes on alone; then the same way back."""
    order, top = [], size - 1
    while top > 0:
        half = top // 2 + 1
        order.append((half, top))
        top = half - 1
    for half, top in order:
        if half <= rank <= top:
            yield Round(send(rank - half))
            yield Round(receive(rank - half))
            break
        if rank + half <= top:
            yield Round(reduce_from(rank + half, received_first=False))
    if rank == 0:
        yield Round(finish())
    for half, top in reversed(order):
        if rank < half and rank + half <= top:
            yield Round(send(rank + half))


def chain(rank, size):
    """Reduce from rank to rank, and send the result back the same way."""
    if rank > 0:
        yield Round(reduce_from(rank - 1))
    if rank < size - 1:
        yield Round(send(rank + 1))
        yield Round(receive(rank + 1))
    else:
        yield Round(finish())
    if rank > 0:
        yield Round(send(rank - 1))


# -- the entry


def entry(name, generator):
    served = {Collective.ALLREDUCE: lambda rank, layout: generator(rank, layout.size)}
    return Algorithm(name, lambda _: 1, served, "scratch of one vector")


@pytest.fixture(params=[allreduce, chain], ids=["folded", "chain"], autouse=True)
def new(request, monkeypatch):
    monkeypatch.setitem(TABLE, "new", entry("new", request.param))
    return request.param


# -- all else


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 8, 13])
def test_it_is_checked_run_and_drawn(n):
    counts = check("new", "allreduce", n)
    assert len(counts) == n
    vectors = [np.full(5, 2.0**rank) for rank in range(n)]
    for result in mpiagg.simulate(vectors, algorithm="new"):
        assert result.tolist() == [2.0**n - 1] * 5
    lines = picture("new", "allreduce", n).splitlines()
    assert lines[0].split()[-1] == str(n - 1)


@pytest.mark.parametrize("sizes", [[1], [2], [5], [6, 7], [1] * 13, [3, 1, 4]])
def test_its_price_is_that_of_the_walk(sizes):
    layout = Layout.of(sizes)
    for cluster in (Cluster(1, 2, 0.5), Cluster(1, 2, 0.5, node_alpha=0.3, node_beta=0.7)):
        expected = finish_times(schedules("new", Collective.ALLREDUCE, layout), 3.0, cluster, layout)
        pricing = Pricing("new", "allreduce", layout, cluster)
        assert pricing.seconds(3.0) == pytest.approx(max(expected), rel=1e-9)


def test_16384_ranks(new):
    n, cluster = 2**14, Cluster(alpha=1.0, beta=0.0, gamma=0.0)
    found = Pricing("new", "allreduce", Layout.of([n]), cluster).predict(100)
    assert found.rounds == found.seconds == (2 * (n - 1) if new is chain else 2 * 14)
    assert found.busiest == 100 * (2 if new is chain else 14)
