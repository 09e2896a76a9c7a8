"""Where a rank is on its node, as real launchers say it, and as MPI does."""

import pytest
from mpi4py import MPI

from mpiagg.cuda import placement

pytestmark = pytest.mark.mpi


@pytest.fixture
def node(world):
    together = world.Split_type(MPI.COMM_TYPE_SHARED)
    yield together
    together.Free()


class Runtime:
    """Two devices."""

    def __init__(self):
        self.used = []
        self.limits = []

    def count(self):
        return 2

    def use(self, ordinal):
        self.used.append(ordinal)

    def limit(self, share):
        self.limits.append(share)


def test_the_launcher_says_it(node):
    # In an order of its own: Open MPI counts along the slots, so not always as the ranks follow one another.
    assert sorted(node.allgather(placement.local_rank())) == list(range(node.size))
    assert placement.local_size() == node.size


def test_the_ranks_find_out_where_it_does_not(node, monkeypatch):
    for launcher in placement._LAUNCHERS:
        monkeypatch.delenv(launcher.rank, raising=False)
    monkeypatch.delenv(placement.LIMIT, raising=False)
    cuda = Runtime()
    assert placement.bind(cuda) == node.rank % 2
    assert cuda.used == [node.rank % 2]
    share = len(range(node.rank % 2, node.size, 2))
    assert cuda.limits == [share] * (share > 1)
