"""Arrays in new places at each call, as programs make them: they are copied until they come again."""

import numpy as np
import pytest
from mpi4py import MPI
from support import kept_plans

import mpiagg
from mpiagg.transport import channel_of

pytestmark = pytest.mark.mpi

LENGTHS = (9_000, 60_000, 800_000)
"""Elements of float32: of two lengths that are copied where they are new, and of one that never is."""

VERBS = (
    *("Allreduce", "Reduce", "Bcast", "Scan", "Exscan"),
    *("Allgather", "Alltoall", "Gather", "Scatter", "Reduce_scatter_block"),
)


def arguments(verb, make, length):
    """Return what a method is called with, and what of it has the result: of whole numbers, whose sums are exact."""
    rank, size, turn = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, make.turn
    chunk = length // size

    def values(n):
        array = make(n)
        array[:] = np.arange(n) % 7 + 10 * rank + turn
        return array

    def room(n):
        array = make(n)
        array[:] = -1
        return array

    if verb == "Bcast":
        x = values(length)
        return (x, size - 1), x
    if verb in ("Allgather", "Gather"):
        out = room(chunk * size)
        return (values(chunk), out) if verb == "Allgather" else (values(chunk), out if rank == 0 else None), out
    if verb in ("Alltoall", "Scatter", "Reduce_scatter_block"):
        x, out = values(chunk * size), room(chunk * size if verb == "Alltoall" else chunk)
        return (x if rank == 0 or verb != "Scatter" else None, out), out
    if verb == "Allreduce" and turn % 2:
        x = values(length)
        return (MPI.IN_PLACE, x), x
    out = room(length)
    return (values(length), out), out


class Places:
    """Makes arrays: of some turns in the place of those before, of others in new ones, on each rank in its own way."""

    def __init__(self, comm, rank, *, registered):
        self._kept, self._again, self._rank = [], {}, rank
        self._comm = comm if registered else None

    def begin(self, turn):
        self.turn, self._number = turn, 0

    def __call__(self, length):
        self._number += 1
        again = (self.turn + self._rank) % 3 == 0
        new = np.empty(length, np.float32)
        if self._comm is not None:  # which all ranks ask for it together
            shared = mpiagg.empty(length, np.float32, comm=self._comm)
            new = shared if (self.turn + self._rank) % 2 else new
        if again:
            return self._again.setdefault((self._number, length), new)
        self._kept.append(new)  # as long as it is there, no other can have its place
        return new


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("verb", VERBS)
def test_results_are_those_of_the_mpi_library(world, rank, verb, registered, length):
    comm, there = mpiagg.Comm(world), []
    if registered:
        there.append(mpiagg.empty(1, np.float32, comm=comm))
    ours, theirs = (Places(comm, rank, registered=registered and own) for own in (True, False))
    for turn in range(8):
        found = []
        for where, places in ((comm, ours), (world, theirs)):
            places.begin(turn)
            given, result = arguments(verb, places, length)
            getattr(where, verb)(*given)
            found.append(result.copy())
        assert np.array_equal(*found), turn
    del there, ours
    comm.Free()


@pytest.mark.parametrize("verb", ["Allreduce", "Reduce", "Bcast", "Allgather"])
def test_requests_have_the_same_results(world, rank, verb):
    comm = mpiagg.Comm(world)
    ours, theirs = (Places(comm, rank, registered=False) for _ in range(2))
    for length in LENGTHS:
        for turn in range(6):
            ours.begin(turn)
            theirs.begin(turn)
            asked = [arguments(verb, ours, length) for _ in range(2)]
            requests = [getattr(comm, f"I{verb.lower()}")(*given) for given, _ in asked]
            MPI.Request.Waitall(requests)
            given, wanted = arguments(verb, theirs, length)
            getattr(world, verb)(*given)
            assert all(np.array_equal(result, wanted) for _, result in asked)
    comm.Free()


def test_a_plan_is_made_for_a_place_that_comes_again(comm, size):
    def called(x):
        x[:] = 1
        assert np.all(mpiagg.allreduce(x, comm=comm, out=x, algorithm="ring") == size)
        return len(kept_plans(channel_of(comm)))

    arrays = [np.empty(LENGTHS[1], np.float32) for _ in range(20)]
    first, *others = [called(x) for x in arrays]
    assert len({first + 1, *others}) == 1  # all others are copied by one call
    assert [called(arrays[0]) for _ in range(3)] == [others[0]] * 3
    assert [called(arrays[1]) for _ in range(3)] == [others[0] + 1] * 3
