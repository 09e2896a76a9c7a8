"""What the tests of the ranks that need JAX share."""

import jax
import pytest
from mpi4py import MPI

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_enable_x64", True)


@pytest.fixture(scope="session")
def rank():
    return MPI.COMM_WORLD.rank


@pytest.fixture(scope="session")
def size():
    return MPI.COMM_WORLD.size
