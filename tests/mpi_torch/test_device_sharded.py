"""Sharded training of modules on a device, through the stand-in: what it does to modules on the host."""

import time

import numpy as np
import pytest
import standin
import torch
import torch_on_standin
from mpi4py import MPI
from torch_models import Net, batch, part

import mpiagg
from mpiagg.transport import channel_of

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()
STEPS = 3
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
}


@pytest.fixture(params=["aware", "staged"])
def comm(request):
    duplicate = COMM.Dup()
    channel_of(duplicate).aware = request.param == "aware"
    yield duplicate
    channel_of(duplicate).free()
    duplicate.Free()


def mine(step):
    """Return this rank's part of a batch, of which all ranks compute all submodules."""
    tokens, rare, wanted = part(batch(step), RANK, SIZE)
    return tokens, torch.ones_like(rare), wanted


def train(made, make, *, wait=True, **keywords):
    """Train a model, from one checkpoint of its state to another, and return its weights; ``made`` is None on the host.

    Torch computes at once on the stand-in, which finishes what mpiagg has asked for before an optimizer steps: on a
    device that is the order of the stream.
    """

    def optimizer(parameters):
        found = make(parameters)
        if made is not None:
            found.register_step_pre_hook(lambda *_: made.device.finish())
        return found

    model = Net(seed=RANK)
    given = {"bucket_bytes": 300, "algorithm": "direct", "share": False, **keywords}
    with mpiagg.Sharded(model, optimizer, **given) as sharded:
        for step in range(2 * STEPS):
            if step == STEPS:
                sharded.load_state_dict(sharded.state_dict())
            if step % 2:
                with sharded.no_sync():
                    model.loss(mine(step)).backward()
            model.loss(mine(step)).backward()
            sharded.step(wait=wait)
        memory = sharded.memory()
        return sharded.weights(), memory["state"]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("name", "keywords"), [("adamw", {}), ("fused", {"prefetch": 0}), ("sgd", {"clip_norm": 0.1})], ids=str
)
def test_modules_on_a_device_are_trained_as_on_the_host(comm, monkeypatch, stage, name, keywords):
    keywords = {"comm": comm, "stage": stage, **keywords}
    wanted, state = train(None, OPTIMIZERS[name], **keywords)
    with (
        torch_on_standin.installed(monkeypatch) as made,
        standin.watch(device_messages=channel_of(comm).aware),
    ):
        for wait in (True, False):
            found, same = train(made, OPTIMIZERS[name], wait=wait, **keywords)
            assert same == state > 0
            for key, x in found.items():
                np.testing.assert_allclose(x, wanted[key], rtol=1e-9, atol=1e-12)
        channel_of(comm).free()


@pytest.mark.parametrize("prefetch", [0, 1])
def test_gradients_of_several_streams_are_copied_where_they_come_from(comm, monkeypatch, prefetch):
    layers = torch.nn.ParameterList(torch.zeros(3000) for _ in range(6))
    with (
        torch_on_standin.installed(monkeypatch) as made,
        standin.watch(device_messages=channel_of(comm).aware),
    ):
        for index, each in enumerate(layers):

            def turn(_, index=index):
                made.stream = 4096 * (index % 3)

            each.register_hook(turn)
        given = {"stage": 2, "comm": comm, "bucket_bytes": 24_000, "prefetch": prefetch}
        with mpiagg.Sharded(layers, lambda parameters: torch.optim.SGD(parameters, lr=1.0), **given) as sharded:
            for step in range(STEPS):
                made.copied.clear()
                standin.LOG.clear()
                time.sleep(0.05 * (step % SIZE == RANK))  # one is late: what the others have sent must stay meanwhile
                sum((each * (RANK + step) * index).sum() for index, each in enumerate(layers)).backward()
                where = {each.grad.data_ptr(): index for index, each in enumerate(layers) if each.grad is not None}
                made.stream = 4096 * 5  # in which the optimizer computes, and parameters are gathered
                sharded.step()
                assert {stream for stream, _ in made.copied} == {0, 4096, 8192}
                assert sum(len(pointers) for _, pointers in made.copied) == len(layers)
                followed = {entry.name for entry in standin.LOG.of("wait")}
                assert followed >= {
                    0,
                    *(made.made(4096 * number).number for number in (1, 2)),
                    sharded._copies._copied.number,
                }
                assert made.made(made.stream).number in followed or SIZE == 1
                mean = sum((SIZE - 1) / 2 + each for each in range(step + 1))
                assert all((x == -mean * index).all() for index, x in enumerate(sharded.weights().values()))
                assert len(where) <= 2  # those of the last unit, which has nothing to hide behind
        channel_of(comm).free()


def test_parameters_are_gathered_behind_the_stream_of_torch_s_that_computes(comm, monkeypatch):
    """Which may still read others in the same memory."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(30, 30) for _ in range(3)))
    with (
        torch_on_standin.installed(monkeypatch) as made,
        standin.watch(device_messages=channel_of(comm).aware),
    ):
        given = {"stage": 3, "comm": comm, "bucket_bytes": 4000, "prefetch": 0}
        with mpiagg.Sharded(layers, OPTIMIZERS["sgd"], **given) as sharded:
            made.stream = 4096
            standin.LOG.clear()
            loss = sharded(torch.ones(2, 30)).sum()
            forward = {entry.name for entry in standin.LOG.of("wait")}
            standin.LOG.clear()
            loss.backward()
            backward = {entry.name for entry in standin.LOG.of("wait")}
            for followed in (forward, backward):
                assert made.made(4096).number in followed or SIZE == 1
                assert 0 not in followed
        channel_of(comm).free()


def test_what_is_not_on_the_module_s_device_is_refused(comm):
    module = torch.nn.Linear(3, 2)
    module.register_buffer("elsewhere", torch.empty(2, device="meta") if RANK == 0 else torch.empty(2))
    with pytest.raises(TypeError if RANK == 0 else mpiagg.MismatchError):
        mpiagg.Sharded(module, OPTIMIZERS["sgd"], comm=comm)
