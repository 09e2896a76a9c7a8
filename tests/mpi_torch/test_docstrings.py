"""The examples in docstrings of mpiagg.torch and mpiagg.horovod.torch."""

import doctests
import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpiagg
import mpiagg.horovod.torch as hvd
import mpiagg.torch

pytestmark = pytest.mark.mpi

VARIABLES = {
    "np": np,
    "torch": torch,
    "mpiagg": mpiagg,
    "MPI": MPI,
    "comm": MPI.COMM_WORLD,
    "rank": MPI.COMM_WORLD.rank,
    "size": MPI.COMM_WORLD.size,
}


@pytest.fixture(scope="module")
def horovod():
    hvd.init(process_sets="dynamic")
    yield
    hvd.shutdown()


@pytest.mark.parametrize("name", doctests.public(mpiagg.torch))
def test_examples_of_torch(name):
    assert not doctests.examples_that_fail(name, getattr(mpiagg.torch, name), VARIABLES)


@pytest.mark.usefixtures("horovod")
@pytest.mark.parametrize("name", doctests.public(hvd))
def test_examples_of_horovod(name):
    assert not doctests.examples_that_fail(name, getattr(hvd, name), {**VARIABLES, "hvd": hvd})
