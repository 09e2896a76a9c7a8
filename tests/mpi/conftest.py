"""What the tests of the ranks share."""

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


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
def everyones(world):
    """Return a function that gathers an object from all ranks."""
    return world.allgather


@pytest.fixture(scope="session")
def vectors(size):
    """Return a function that makes the vectors of all ranks: small whole numbers, so that every order gives one sum."""

    def vectors(dtype, length=5, shape=None):
        dtype = np.dtype(dtype)
        made = []
        for rank in range(size):
            values = (np.arange(length) * 7 + rank * 3) % 5 + (rank % 2)
            if dtype.kind == "c":
                values = values + 1j * ((np.arange(length) + rank) % 3)
            made.append(values.astype(dtype).reshape(shape if shape is not None else length))
        return made

    return vectors
