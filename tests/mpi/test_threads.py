"""Several threads of a rank: one in a communicator at a time, or each with one of its own."""

import threading
import time

import numpy as np
import pytest
from mpi4py import MPI

import mpiagg
from mpiagg.transport import channel_of
from mpiagg.watch import END
from mpiagg.watch.recorder import SUBJECT

pytestmark = pytest.mark.mpi

LENGTHS = (10, 10_000, 200_000)


def by_function(comm, length, **arguments):
    del length

    def call(x):
        return mpiagg.allreduce(x, out=x, comm=comm, **arguments)

    return call


def by_method(comm, length):
    del length

    def call(x):
        comm.Allreduce(MPI.IN_PLACE, x)
        return x

    return call


def by_aggregation(comm, length):
    aggregation = mpiagg.AllReduce(comm, op="sum")
    aggregation.aggregate([np.zeros(length), np.zeros(length)])

    def call(x):
        other = x.copy()
        aggregation.aggregate([other, x])
        assert np.array_equal(other, x)
        return x

    return call


def by_plan(comm, length):
    kept = np.zeros(length)
    plan = mpiagg.allreduce_init(kept, comm=comm)

    def call(x):
        kept[...] = x
        x[:] = plan()
        return x

    return call


def by_plan_of_an_aggregation(comm, length):
    kept = np.zeros(length)
    plan = mpiagg.AllReduce(comm, op="sum").aggregate_init([kept])

    def call(x):
        if not np.array_equal(kept, x):  # else another thread may be in the plan, and this array its
            kept[...] = x
        plan()
        x[:] = kept
        return x

    return call


def by_ddp(comm, length):
    ddp = mpiagg.DDP([np.zeros(length), np.zeros(3)], comm, mpiagg.AllReduce(comm, op="sum"))

    def call(x):
        gradients = [x, np.zeros(3)]
        ddp.sync_gradients(gradients)
        return x

    return call


def by_library(comm, length):
    del length

    def call(x):
        comm.Alltoall(np.repeat(x[:1], comm.size), everyone := np.empty(comm.size))
        x[:] = everyone.sum()
        return x

    return call


def by_agreeing(comm, length):
    return by_function(comm, length, check=True)


def of_blocks(comm, length):
    def call(x):
        sent = np.repeat(x[:1], comm.size)
        x[:] = mpiagg.alltoallv(sent, [1] * comm.size, [1] * comm.size, comm=comm).sum()
        return x

    del length
    return call


CALLS = {
    "function": by_function,
    "ring": lambda comm, length: by_function(comm, length, algorithm="ring"),
    "method": by_method,
    "aggregation": by_aggregation,
    "plan": by_plan,
    "plan of an aggregation": by_plan_of_an_aggregation,
    "DDP": by_ddp,
    "library": by_library,
    "blocks": of_blocks,
    "check": by_agreeing,
}


@pytest.mark.few_ranks
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", CALLS)
def test_a_second_thread_is_refused_and_changes_nothing(world, rank, size, kind, length):
    comm = mpiagg.Comm(world)
    call = CALLS[kind](comm, length)
    assert call(np.full(length, 1.0))[0] == size
    if rank > 0:
        # The others come when a thread of rank 0 has been refused; then the other one's call ends well.
        world.Recv(np.empty(1), 0)
        assert call(np.full(length, 1.0)).tolist() == [size] * length
    elif size > 1:
        refused, results = threading.Event(), {}

        def use(name):
            x = np.full(length, 1.0)
            try:
                results[name] = call(x).tolist()
            except mpiagg.PlanError as error:
                results[name] = str(error)
                assert x.tolist() == [1.0] * length
                refused.set()

        threads = [threading.Thread(target=use, args=(name,), name=name) for name in ("first", "second")]
        for thread in threads:
            thread.start()
        assert refused.wait(50)
        for other in range(1, size):
            world.Send(np.zeros(1), other)
        for thread in threads:
            thread.join(50)
        good = next(name for name in results if not isinstance(results[name], str))
        (bad,) = set(results) - {good}
        assert results[good] == [size] * length
        assert f"thread '{bad}' cannot use a communicator while thread '{good}' is in " in results[bad]
        assert "comm.Dup()" in results[bad]
    # The communicator is as good as before, also when the ranks tell one another again how long blocks are.
    for _ in range(70):
        assert call(np.full(length, 1.0))[-1] == size
    comm.Free()


@pytest.mark.few_ranks
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", CALLS)
def test_what_was_refused_works_later(world, rank, size, kind, length):
    comm = mpiagg.Comm(world)
    call = CALLS[kind](comm, length)
    call(np.full(length, 1.0))
    if rank == 0 and size > 1:
        other = threading.Thread(target=comm.Alltoall, args=(np.ones(size), np.empty(size)))
        other.start()
        last = channel_of(comm).log
        while last.blocking[END] or last.blocking[SUBJECT].what[:8] != "alltoall":
            time.sleep(1e-3)
        with pytest.raises(mpiagg.PlanError, match="is in alltoall by native"):
            call(np.full(length, 1.0))
        for rank_ in range(1, size):
            world.Send(np.zeros(1), rank_)
        other.join(50)
    elif size > 1:
        world.Recv(np.empty(1), 0)
        comm.Alltoall(np.ones(size), np.empty(size))
    for _ in range(2):
        assert call(np.full(length, 1.0)).tolist() == [size] * length
    comm.Free()


@pytest.mark.few_ranks
@pytest.mark.parametrize("kind", CALLS)
def test_each_thread_has_a_communicator_of_its_own(world, size, kind):
    comms = [mpiagg.Comm(world) for _ in range(3)]
    calls = [CALLS[kind](comm, 3000) for comm in comms]
    wrong = []

    def use(number):
        for turn in range(20):
            expected = size * (number + turn)
            found = calls[number](np.full(3000, number + turn + 0.0))
            if not (found == expected).all():
                wrong.append((number, turn))

    threads = [threading.Thread(target=use, args=(number,)) for number in range(len(comms))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)
    for comm in comms:
        comm.Free()


def test_the_first_call_on_a_communicator_is_one_thread_s(world, rank, size):
    comm = world.Dup()
    if rank > 0:
        world.Recv(np.empty(1), 0)
        mpiagg.broadcast(np.ones(3), comm=comm)
    else:
        refused, results = threading.Event(), []

        def use():
            try:
                results.append(mpiagg.broadcast(np.ones(3), comm=comm).tolist())
            except mpiagg.PlanError as error:
                results.append(str(error))
                refused.set()

        threads = [threading.Thread(target=use) for _ in range(2 if size > 1 else 1)]
        for thread in threads:
            thread.start()
        if size > 1:
            assert refused.wait(50)
            assert "another thread is in the first call" in results[0] or "cannot use a communicator" in results[0]
            for other in range(1, size):
                world.Send(np.zeros(1), other)
        for thread in threads:
            thread.join(50)
        assert results[-1] == [1.0] * 3
    comm.Free()


def test_a_thread_may_make_a_call_within_another(comm, rank, size):
    # An aggregation that has no program of its own is called from within its plan.
    with mpiagg.LocalSGD(comm, period=1) as local:
        x = np.full(5, float(rank))
        plan = local.aggregate_init([x])
        for _ in range(3):
            plan()
        assert np.allclose(x, (size - 1) / 2)
        plan.free()
