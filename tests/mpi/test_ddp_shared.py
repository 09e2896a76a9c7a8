"""DDP's buckets lie in memory that the ranks of a node share: no gradient is copied on its way."""

import tracemalloc
from functools import partial

import numpy as np
import pytest
from mpi4py import MPI

import mpiagg
from mpiagg.plans import mailboxes
from mpiagg.transport import LINE, NOWHERE, SharedMemory, channel_of

pytestmark = pytest.mark.mpi
COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
MEAN = (SIZE - 1) / 2
SHAPES = [(300, 70), (), (5,), (100_000,)]
"""More than a bucket, and buckets below and above the length at which a copy through a mailbox is quicker."""


def plans(ddp):
    return ddp._steps._plans


def test_gradients_are_reduced_where_they_are(monkeypatch):
    written = []
    monkeypatch.setattr(mailboxes.ThroughMailboxes, "_write_of", lambda *given: partial(written.append, given))
    channel = channel_of(COMM)
    with mpiagg.DDP([np.zeros(shape, np.float32) for shape in SHAPES], bucket_bytes=200_000) as ddp:
        views = ddp.gradient_views()
        # A rank that is alone has nobody to share memory with.
        assert all((channel.memory.host.position(view) != NOWHERE) == (SIZE > 1) for view in views)
        # A plan has a barrier, but no mailbox.
        assert all(plan.nbytes == (LINE if SIZE > 1 else 0) for plan in plans(ddp))
        for plan in plans(ddp):
            for view in views:
                view[...] = RANK
            plan()
    assert not written


@pytest.mark.parametrize("method", ["sync_gradients", "overlapped_sync_gradients"])
def test_a_step_allocates_nothing(method):
    with mpiagg.DDP([np.zeros(shape, np.float32) for shape in SHAPES]) as ddp:
        views, step = ddp.gradient_views(), getattr(ddp, method)
        for repeat in range(12):
            if repeat == 2:
                tracemalloc.start()
            for view in views:
                view.fill(RANK)
            step()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert all((view == MEAN).all() for view in views)
    assert peak < 64 * 2**10  # bookkeeping; the gradients have half a megabyte


def test_views_outlive_ddp_and_their_memory_comes_back_after_them():
    channel = channel_of(COMM)
    for round_ in range(3):
        with mpiagg.DDP([np.zeros(50_000, np.float32)]) as ddp:
            (view,) = ddp.gradient_views()
            view.fill(RANK)
            ddp.sync_gradients()
        assert (view == MEAN).all()
        del ddp
        with mpiagg.DDP([np.zeros(50_000, np.float32)]) as other:
            other.gradient_views()[0].fill(7)
            other.sync_gradients()
        assert (view == MEAN).all()
        del view, other
        if round_ == 1:
            windows = len(channel.memory.host._windows)
    assert len(channel.memory.host._windows) == windows


def test_without_room_buckets_are_in_memory_like_any_other(monkeypatch):
    comm = COMM.Dup()
    monkeypatch.setattr(SharedMemory, "_room", lambda _: 0)
    with mpiagg.DDP([np.zeros(50_000, np.float32)], comm=comm) as ddp:
        (view,) = ddp.gradient_views()
        view.fill(RANK)
        ddp.sync_gradients()
        assert (view == MEAN).all()
        assert channel_of(comm).memory.host.position(view) == NOWHERE
    comm.Free()
