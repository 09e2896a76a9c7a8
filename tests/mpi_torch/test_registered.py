"""Parameters of a torch module are moved into registered memory, as docs/guide.md says."""

import re
from pathlib import Path

import pytest
import torch
from mpi4py import MPI
from torch_models import Net, batch, optimizer_of, part

import mpiagg
from mpiagg.transport import NOWHERE, channel_of

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()
GUIDE = Path(__file__).parents[2] / "docs" / "guide.md"
(EXAMPLE,) = (text for text in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL) if "from_numpy" in text)


def move(module):
    exec(EXAMPLE, {"module": module, "mpiagg": mpiagg, "torch": torch})  # noqa: S102 - what users are told to do


def registered(module):
    memory = channel_of(None).memory.host
    return [memory.position(parameter.detach().numpy()) != NOWHERE for parameter in module.parameters()]


def train(module, optimizer, step):
    """Go one step on this rank's part of a batch, and average the weights where they lie."""
    optimizer.zero_grad()
    module.loss(part(batch(step), RANK, SIZE)).backward()
    optimizer.step()
    for parameter in module.parameters():
        weights = parameter.detach().numpy()
        mpiagg.allreduce(weights, "avg", out=weights)


def test_moved_parameters_are_the_same_objects_in_registered_memory():
    moved, plain = Net(), Net()
    optimizers = optimizer_of(moved), optimizer_of(plain)
    objects = [id(parameter) for parameter in moved.parameters()]
    assert not any(registered(moved))
    train(moved, optimizers[0], 0)  # so that the optimizer remembers something
    train(plain, optimizers[1], 0)
    move(moved)
    assert [id(parameter) for parameter in moved.parameters()] == objects
    assert registered(moved) == [SIZE > 1] * len(objects)
    assert moved.decoder.weight is moved.embedding.weight
    for step in (1, 2):
        for module, optimizer in zip((moved, plain), optimizers, strict=True):
            train(module, optimizer, step)
        for x, y in zip(moved.parameters(), plain.parameters(), strict=True):
            assert torch.equal(x, y)
