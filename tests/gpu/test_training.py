"""DDP on one GPU that all ranks share: what it does on the host, but for rounding.

test_gpu_ranks.py starts the ranks. MPI is imported by what needs it: this file is looked at by others, too.
"""

import sys
from pathlib import Path

import kernel_checks as checks
import numpy as np
import pytest
from device_cases import SHAPES, Item, Module

import mpiagg
from mpiagg.arrays import HOST

checks.gpu()

pytestmark = [pytest.mark.mpi, pytest.mark.gpu, pytest.mark.filterwarnings("default")]

TOP = Path(__file__).parents[2]
STEPS = 3


@pytest.fixture
def comm():
    from mpi4py import MPI

    duplicate = MPI.COMM_WORLD.Dup()
    yield duplicate
    duplicate.Free()


def gradients(rank, step):
    random = np.random.default_rng((rank, step))
    return [random.standard_normal(shape).astype(np.float32) for shape in SHAPES]


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("bucket_bytes", [0, 2**25])
def test_gradients_are_averaged_as_on_the_host(comm, device, overlapped, bucket_bytes):
    rank, size = comm.rank, comm.size
    items = [Item(device.from_host(np.full(shape, rank, np.float32))) for shape in SHAPES]
    on_host = [np.full(shape, rank, np.float32) for shape in SHAPES]
    with (
        mpiagg.DDP(Module(items), comm, bucket_bytes=bucket_bytes) as ddp,
        mpiagg.DDP(on_host, comm, bucket_bytes=bucket_bytes) as host_ddp,
    ):
        ddp.broadcast_parameters(size - 1)
        assert all((device.to_host(item.data) == size - 1).all() for item in items)
        for step in range(STEPS):
            wanted = gradients(rank, step)
            for item, gradient, view in zip(items, gradients(rank, step), ddp.gradient_views(), strict=True):
                item.grad = device.from_host(gradient)
                if step == 1:  # in its place in the bucket already
                    device.convert(view, item.grad)
                    item.grad = view
            if step == 2 and rank:
                items[1].grad, wanted[1] = None, None
            (ddp.overlapped_sync_gradients if overlapped else ddp.sync_gradients)()
            host_ddp.sync_gradients(wanted)
            for item, expected in zip(items, wanted, strict=True):
                np.testing.assert_allclose(device.to_host(item.grad), expected, rtol=1e-6, atol=1e-6)


def test_gradients_that_another_stream_still_computes_are_waited_for(comm, device, barrier):
    parameters = [device.from_host(np.zeros(shape, np.float32)) for shape in SHAPES]
    stream, mean = device.stream(), (comm.size - 1) / 2
    stream.follow()
    with mpiagg.DDP(parameters, comm) as ddp:
        for step in range(STEPS):
            with stream:
                if step:  # at first everything is loaded, which waits for the device
                    barrier.close()
                for view in ddp.gradient_views():
                    view.fill(comm.rank + step)
                barrier.open()
                ddp.sync_gradients()
            assert all((device.to_host(view) == mean + step).all() for view in ddp.gradient_views())
            barrier.flag[0] = 0


def test_the_digits_are_learned_as_on_the_host(comm, device, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(TOP), *sys.path])
    from bench.gpu_report import ROUNDINGS
    from bench.gpu_training import accuracy, train
    from mpiagg.cli.training import load

    digits = load(seed=0)
    exact = train(comm, HOST, np.float64, digits, epochs=2).weights
    on_host = train(comm, HOST, np.float32, digits, epochs=2).weights
    on_device = train(comm, device, np.float32, digits, epochs=2).weights
    assert np.abs(on_device - on_host).max() <= ROUNDINGS * np.abs(on_host - exact).max()
    assert accuracy(on_device, digits) > 0.85
    everyone = comm.allgather(on_device.tobytes())
    assert everyone == [everyone[0]] * comm.size
    precise = train(comm, device, np.float64, digits, epochs=1).weights
    np.testing.assert_allclose(precise, train(comm, HOST, np.float64, digits, epochs=1).weights, rtol=0, atol=1e-10)
