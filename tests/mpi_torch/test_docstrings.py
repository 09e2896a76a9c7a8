"""The examples in docstrings of mpiagg.torch and mpiagg.horovod.torch."""

import docstrings
import pytest
import torch

import mpiagg.horovod.torch as hvd

pytestmark = pytest.mark.mpi

MODULES = ("mpiagg.torch", "mpiagg.horovod.torch", "mpiagg.horovod.torch.elastic")
NAMES = [name for name, _ in docstrings.public(MODULES)]
CLASSES = ["mpiagg.ddp.torch_ddp.TorchDDP", "mpiagg.sharded.torch_sharded.TorchSharded"]
"""What ``mpiagg.DDP`` and ``mpiagg.Sharded`` return for a module."""


@pytest.fixture(scope="module", autouse=True)
def horovod():
    hvd.init(process_sets="dynamic")
    yield
    hvd.shutdown()


@pytest.mark.parametrize("name", [*NAMES, *CLASSES])
def test_every_public_name_has_examples_that_pass(name):
    assert not docstrings.wrong(name, {**docstrings.preset(), "torch": torch, "hvd": hvd})
