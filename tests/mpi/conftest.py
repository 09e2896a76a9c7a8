"""What the tests of the ranks share."""

import hashlib

import numpy as np
import pytest
from mpi4py import MPI

import mpiagg


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
