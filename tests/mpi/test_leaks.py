"""What is made and freed is gone: memory, Python's objects, and what the package has open."""

import gc
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI
from support import kept_plans

import mpiagg
from mpiagg.transport import channel_of, channels, process
from mpiagg.transport.kept import MOST

pytestmark = pytest.mark.mpi

MARGIN = 4 * 2**20
"""Bytes by which memory may differ: what allocators keep. A leak of one request a plan would be several times that."""


def resident():
    """How many bytes this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def grown(times, action):
    """Return by how many bytes and objects the process has grown over so many actions, after some to warm up."""
    ring = process().recorder._ring
    for _ in range(min(times // 5, 200)):
        action()
    ring.clear()
    gc.collect()
    before = resident(), len(gc.get_objects()), len(channels._channels)
    for _ in range(times):
        action()
    ring.clear()
    gc.collect()
    after = resident(), len(gc.get_objects()), len(channels._channels)
    return [now - then for then, now in zip(before, after, strict=True)]


@pytest.mark.timeout(180)
def test_plans(comm, size):
    times = 10_000 if size <= 2 else 300  # ranks that outnumber the cores take long to agree
    x = np.ones(16)
    channel = channel_of(comm)
    kinds = [("ring", 1), ("direct", 2), ("native", 1), ("recursive_doubling", 1)]
    turns = count()

    def make_and_free():
        turn = next(turns)
        algorithm, lanes = kinds[turn % len(kinds)]
        with mpiagg.allreduce_init(x, comm=comm, algorithm=algorithm, lanes=lanes) as plan:
            assert turn % 10 or plan()[0] == size

    memory, objects, channels = grown(times, make_and_free)
    assert (len(channel.open), len(channel.calls), channels) == (0, 0, 0)
    assert objects < 50
    assert memory < MARGIN


def test_kept_plans(comm, size):
    channel = channel_of(comm)
    lengths = count()

    def call():
        assert mpiagg.allreduce(np.ones(next(lengths) % 31 + 1), comm=comm)[0] == size

    memory, objects, _ = grown(1000 if size <= 2 else 200, call)
    assert len(channel.open) == len(kept_plans(channel)) <= MOST
    assert objects < 500
    assert memory < MARGIN


def test_errors_leave_nothing_open(comm):
    channel = channel_of(comm)

    def fail():
        with pytest.raises(ValueError, match="unknown op"):
            mpiagg.allreduce_init(np.ones(3), "mean", comm=comm)

    _, objects, _ = grown(50, fail)
    assert objects < 50
    assert not channel.open


@pytest.mark.parametrize("kind", ["mpi4py's", "ours"])
def test_communicators(world, size, kind):
    times = 400 if size <= 2 else 150

    def duplicate_and_free():
        comm = world.Dup() if kind == "mpi4py's" else mpiagg.Comm(world)
        assert mpiagg.allreduce(np.ones(5), comm=comm)[0] == size
        comm.Free()
        assert comm == MPI.COMM_NULL

    memory, objects, channels = grown(times, duplicate_and_free)
    assert channels == 0
    assert objects < times / 2 + 50  # what the last communicator leaves, and threads that watch, may be there
    assert memory < MARGIN
