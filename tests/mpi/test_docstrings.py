"""The examples in the docstrings of public names pass on every rank."""

import docstrings
import pytest

pytestmark = pytest.mark.mpi

NAMES = [name for name, _ in docstrings.public(("mpiagg", "mpiagg.optimizers", "mpiagg.checkpoints"))]


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_examples_that_pass(name):
    assert not docstrings.wrong(name, docstrings.preset())
