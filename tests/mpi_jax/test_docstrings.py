"""The examples in docstrings of mpiagg.jax."""

import doctests
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import mpiagg
import mpiagg.jax

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("name", doctests.public(mpiagg.jax))
def test_examples(name, rank, size):
    variables = {"np": np, "jax": jax, "jnp": jnp, "mpiagg": mpiagg, "MPI": MPI, "comm": MPI.COMM_WORLD}
    assert not doctests.examples_that_fail(name, getattr(mpiagg.jax, name), {**variables, "rank": rank, "size": size})
