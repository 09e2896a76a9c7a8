"""The examples in docstrings of mpiagg.jax."""

import docstrings
import jax
import jax.numpy as jnp
import pytest

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("name", [name for name, _ in docstrings.public(["mpiagg.jax"])])
def test_every_public_name_has_examples_that_pass(name):
    assert not docstrings.wrong(name, {**docstrings.preset(), "jax": jax, "jnp": jnp})
