"""What the tests of the ranks share."""

import hashlib

import numpy as np
import pytest
from mpi4py import MPI

import mpiagg
from mpiagg.transport import OtherMemory, process
from mpiagg.watch.recorder import SUBJECT


@pytest.fixture(scope="session")
def world():
    return MPI.COMM_WORLD


@pytest.fixture(scope="session")
def rank(world):
    return world.Get_rank()


@pytest.fixture(scope="session")
def size(world):
    return world.Get_size()


@pytest.fixture
def comm(world):
    """A communicator of the test's own, without plans that other tests have left."""
    duplicate = world.Dup()
    yield duplicate
    duplicate.Free()


class Carried:
    """The collectives that have been carried out by our own algorithms since a moment, as the recorder has them."""

    def __init__(self):
        self.clear()

    def clear(self):
        self._before = {id(entry) for entry in process().recorder.entries}
        self._kept = process().recorder.entries  # so that no other entry has the id of one of these

    def _list(self):
        new = [entry[SUBJECT] for entry in process().recorder.entries if id(entry) not in self._before]
        return [subject.collective for subject in new if subject.collective and "native" not in subject.what]

    def __eq__(self, other):
        return self._list() == other

    __hash__ = None

    def __len__(self):
        return len(self._list())

    def __repr__(self):
        return repr(self._list())


@pytest.fixture
def carried(comm):
    """Return the list of the collectives that we have carried out; what the MPI library did is not in it."""
    del comm  # which is made first
    return Carried()


@pytest.fixture
def reads(monkeypatch):
    """Return the list of the vectors of other processes that this one was to read."""
    made, reading = [], OtherMemory.reading
    monkeypatch.setattr(OtherMemory, "reading", lambda vector, out: (made.append(vector), reading(vector, out))[1])
    return made


@pytest.fixture(scope="session")
def vectors(size):
    """Return a function that makes the vectors of all ranks: small whole numbers, so that every order gives one sum."""

    def vectors(dtype, length=5):
        dtype = np.dtype(dtype)
        made = []
        for rank in range(size):
            values = (np.arange(length) * 7 + rank * 3) % 5 + (rank % 2)
            if dtype.kind == "c":
                values = values + 1j * ((np.arange(length) + rank) % 3)
            made.append(values.astype(dtype))
        return made

    return vectors


@pytest.fixture
def compare(world, rank, size, bits):
    """Return a function that compares a result with the simulation's; at the end all ranks compare theirs.

    Ranks take turns in simulating: that is slow, and one of them is enough, since all results are the same.
    """
    results = []

    def compare(result, inputs, op, algorithm, lanes=None):
        if len(results) % size == rank:
            simulated = mpiagg.simulate(inputs, op, algorithm, lanes=lanes)[rank]
            assert result.dtype == simulated.dtype
            assert result.shape == simulated.shape
            assert bits(result) == bits(simulated), (op, result.dtype, algorithm, lanes)
        results.append(bits(result))

    yield compare
    together = world.allgather(hashlib.sha256(b"".join(results)).digest())
    assert results
    assert together == [together[0]] * size
