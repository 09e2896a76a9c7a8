"""The examples in the docstrings of public names pass on every rank."""

import docstrings
import pytest

pytestmark = pytest.mark.mpi

MODULES = ("mpiagg", "mpiagg.optimizers", "mpiagg.checkpoints")
NAMES = [name for name, _ in docstrings.public(MODULES)]


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_an_example(name):
    assert docstrings.has_example(docstrings.docstring_of(docstrings.find(name)))


@pytest.mark.parametrize("name", NAMES)
def test_examples_pass(name):
    names = docstrings.preset()
    for member, something in docstrings.members(name, docstrings.find(name)):
        failed = docstrings.failed(member, docstrings.docstring_of(something), names)
        assert not failed, failed
