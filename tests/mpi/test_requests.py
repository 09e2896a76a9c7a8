"""Requests: they end by our waits and by MPI's, alone and among others, in any order, again and again."""

import itertools
import sys

import numpy as np
import pytest
from mpi4py import MPI
from support import refused

import mpiagg
from mpiagg.collectives import requests

pytestmark = pytest.mark.mpi

SIZE, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
TOTAL = sum(range(SIZE))


@pytest.fixture
def comm():
    comm = mpiagg.Comm(MPI.COMM_WORLD, reproducible=True)
    yield comm
    comm.Free()


def several(comm, length=50):
    """Return a number of outputs, and the running all-reductions that fill them."""
    outs = [np.full(length, -1) for _ in range(5)]
    return outs, [comm.Iallreduce(np.full(length, RANK + turn), out) for turn, out in enumerate(outs)]


def check(outs):
    for turn, out in enumerate(outs):
        assert (out == TOTAL + SIZE * turn).all()


def until(test):
    while not test():
        pass


WAYS = {
    "in reverse order": lambda pending: [request.Wait() for request in reversed(pending)],
    "in another order on each rank": lambda pending: [pending[(turn + RANK) % 5].Wait() for turn in range(5)],
    "wait": lambda pending: [request.wait() for request in pending],
    "Test": lambda pending: [until(request.Test) for request in pending],
    "test": lambda pending: [until(lambda request=request: request.test()[0]) for request in pending],
    "Get_status, Wait": lambda pending: [until(r.Get_status) or until(r.get_status) or r.Wait() for r in pending],
    "our Waitall": requests.Request.Waitall,
    "our waitall": requests.Request.waitall,
    "our Testall": lambda pending: until(lambda: requests.Request.Testall(pending)),
    "our testall": lambda pending: until(lambda: requests.Request.testall(pending)[0]),
    "MPI's Waitall": MPI.Request.Waitall,
    "MPI's waitall": MPI.Request.waitall,
    "MPI's Testall": lambda pending: until(lambda: MPI.Request.Testall(pending)),
    "MPI's Wait": lambda pending: [MPI.Request.Wait(request) for request in pending],
    "MPI's Waitany": lambda pending: [MPI.Request.Waitany(pending) for _ in pending],
    "MPI's Waitsome": lambda pending: until(lambda: MPI.Request.Waitsome(pending) is None),
    "our Waitany": lambda pending: [requests.Request.Waitany(pending) for _ in pending],
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_wait(comm, way):
    outs, pending = several(comm)
    WAYS[way](pending)
    check(outs)
    assert not any(pending)
    assert all(request.Test() and request.Wait() for request in pending)  # null requests are done


@pytest.mark.parametrize("kind", [MPI.Request, requests.Request], ids=["MPI's", "ours"])
def test_among_requests_of_mpi(comm, kind):
    got = np.zeros(1, int)
    outs, pending = several(comm)
    pending.insert(2, comm.Irecv(got, (RANK - 1) % SIZE))
    pending.append(comm.Isend(np.array([RANK]), (RANK + 1) % SIZE))
    statuses = [MPI.Status() for _ in pending]
    kind.Waitall(pending, statuses)
    check(outs)
    assert got[0] == (RANK - 1) % SIZE
    assert statuses[2].source == (RANK - 1) % SIZE


def test_they_are_ours_and_mpi4pys(comm):
    x, out = np.ones(3), np.empty(3)
    request, persistent = comm.Iallreduce(x, out), comm.Allreduce_init(x, out)
    assert type(request) is requests.Request
    assert type(persistent) is requests.Prequest
    assert isinstance(persistent, MPI.Prequest)
    assert request != MPI.REQUEST_NULL
    request.Wait()
    assert request == MPI.REQUEST_NULL
    persistent.Free()


def test_without_threads_they_are_the_librarys(comm, monkeypatch):
    monkeypatch.setattr("mpiagg.collectives.forms.threads_allowed", lambda: False)
    total = np.array([1])
    request = comm.Iallreduce(MPI.IN_PLACE, total)
    assert type(request) is MPI.Request
    request.Wait()
    assert total == SIZE


def test_they_go_on_while_the_program_does_something_else(comm):
    outs, pending = several(comm, length=30_000)
    # None of these calls drives a plan.
    until(lambda: all(MPI.Request.Get_status(request) for request in pending))
    check(outs)
    MPI.Request.Waitall(pending)


def test_blocking_calls_between(comm):
    outs, pending = several(comm)
    total = np.array([1])
    if RANK % 2:
        pending[0].Wait()
    comm.Allreduce(MPI.IN_PLACE, total)
    requests.Request.Waitall(pending)
    check(outs)
    assert total == SIZE


@pytest.mark.parametrize("form", ["ours", "MPI's"])
def test_persistent_requests_start_again_and_again(comm, form):
    kind = requests.Prequest if form == "ours" else MPI.Prequest
    x, total, word, everything = np.zeros(20), np.zeros(20), np.zeros(3, int), np.zeros((SIZE, 20))
    persistent = [comm.Allreduce_init(x, total), comm.Bcast_init(word, SIZE - 1), comm.Allgather_init(x, everything)]
    for turn in range(20 if form == "ours" else 4):
        x[:], word[:] = RANK + turn, RANK + turn
        if form == "ours" and turn % 2:
            for request in persistent:
                request.Start()
            for request in reversed(persistent):
                request.Wait()
        else:
            kind.Startall(persistent)
            kind.Waitall(persistent)
        assert (total == TOTAL + SIZE * turn).all()
        assert (word == SIZE - 1 + turn).all()
        assert (everything == np.arange(SIZE)[:, None] + turn).all()
        assert all(persistent)
        assert all(request.Test() for request in persistent)  # nothing runs
    for request in persistent:
        request.Free()
        assert request == MPI.REQUEST_NULL


def test_started_by_mpi_and_waited_for_by_us(comm):
    total = np.array([1])
    request = comm.Allreduce_init(MPI.IN_PLACE, total)
    MPI.Prequest.Startall([request])
    request.Wait()
    assert total == SIZE
    request.Free()


def test_a_running_request_is_not_started(comm):
    request = comm.Allreduce_init(MPI.IN_PLACE, np.ones(3))
    if RANK == 0:
        request.Start()
        if SIZE > 1:
            with pytest.raises(MPI.Exception) as caught:
                request.Start()
            assert caught.value.Get_error_class() == MPI.ERR_REQUEST
            with pytest.raises(mpiagg.PlanError):
                request.Free()
    MPI.COMM_WORLD.Barrier()
    if RANK > 0:
        request.Start()
    request.Wait()
    request.Free()


def test_use_after_free(comm):
    request = comm.Allreduce_init(MPI.IN_PLACE, np.ones(3))
    request.free()
    request.free()
    assert request == MPI.REQUEST_NULL
    with pytest.raises(MPI.Exception):
        request.Start()
    with pytest.raises(MPI.Exception):
        request.Free()


@pytest.mark.parametrize("elements", [3, 100_000])
def test_persistent_requests_survive_their_communicator(elements):
    comm = mpiagg.Comm(MPI.COMM_WORLD, reproducible=True)
    x, other, word = np.ones(elements), np.ones(5), np.zeros(4, int)
    persistent = [comm.Allreduce_init(MPI.IN_PLACE, x), comm.Bcast_init(word, SIZE - 1)]
    freed = comm.Allreduce_init(MPI.IN_PLACE, other)
    plan = mpiagg.allreduce_init(other, comm=comm)
    if RANK == 0:
        freed.Free()
    comm.Free()
    for turn in range(3):
        word[:] = RANK + turn
        for request in persistent:
            request.Start()
        for request in persistent:
            request.Wait()
        assert (x == SIZE ** (turn + 1)).all()
        assert (word == SIZE - 1 + turn).all()
    with pytest.raises(mpiagg.PlanError, match="freed"):
        plan()  # a plan of ours goes with its communicator
    for request in persistent:
        request.Free()
        assert request == MPI.REQUEST_NULL
    if RANK > 0:
        freed.Free()
    another = mpiagg.Comm(MPI.COMM_WORLD)
    another.Barrier()
    another.Free()


@pytest.mark.parametrize("apart", [False, True])
def test_requests_under_way_survive_their_communicator(apart):
    column = MPI.DOUBLE.Create_resized(0, 16).Commit()
    for turn in range(10):
        comm = mpiagg.Comm(MPI.COMM_WORLD)
        words = [np.full((3000, 2), RANK + 5.0 + turn + number) for number in range(3)]
        pending = [comm.Ibcast([x, 3000, column] if apart else x, number % SIZE) for number, x in enumerate(words)]
        comm.Free()
        MPI.Request.Waitall(pending)
        for number, x in enumerate(words):
            assert (x[:, 0] == number % SIZE + 5 + turn + number).all()
    column.Free()


def test_a_running_request_is_neither_freed_nor_cancelled(comm):
    request = comm.Iallreduce(MPI.IN_PLACE, np.zeros(3))
    for forbidden in (request.Free, request.free, request.Cancel, request.cancel):
        with pytest.raises(MPI.Exception) as caught:
            forbidden()
        assert caught.value.Get_error_class() == MPI.ERR_REQUEST
    request.Wait()
    request.free()


def test_requests_outlive_the_names_of_their_arrays(comm):
    out = np.zeros(1000)
    pending = [comm.Iallreduce(np.full(1000, float(turn)), out if turn == 3 else np.empty(1000)) for turn in range(4)]
    MPI.Request.Waitall(pending)
    assert (out == 3 * SIZE).all()


class Broken:
    """A plan that fails when it is tested for the second time."""

    def __init__(self):
        self.tests = 0

    def start(self):
        pass

    def test(self):
        self.tests += 1
        if self.tests == 2:
            raise RuntimeError("broken")
        return False

    wait = test


def test_an_error_in_the_thread_is_raised_by_who_waits(monkeypatch):
    told = []
    monkeypatch.setattr("traceback.print_exc", lambda: told.append(sys.exc_info()[0]))
    request = requests.Request(Broken())
    until(lambda: told)
    assert told[0] is RuntimeError
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            request.Wait()
        with pytest.raises(RuntimeError, match="broken"):
            request.Test()
    tokens = requests._tokens()
    monkeypatch.setattr(tokens, "_tags", itertools.cycle([request._tag, request._tag + 1]))
    requests.Request(Done()).Wait()  # by a tag that is free
    tokens.receive(request._tag)
    MPI.Request.Wait(request)
    tokens.remove(request._tag)


class Done:
    """A plan that is done at once."""

    def start(self):
        pass

    def test(self):
        return True

    wait = free = test


def summed(comm, x, out):
    return comm.Allreduce_init(x, out)


def to_root(comm, x, out):
    return comm.Reduce_init(x, out, root=0)


@pytest.mark.parametrize("elements", [3, 100_000])
@pytest.mark.parametrize(
    ("usual", "other"),
    [
        (summed, lambda comm, x, out: comm.Allreduce_init(x, out, MPI.MAX)),
        (summed, lambda comm, x, out: comm.Allreduce_init(x[1:], out[1:])),
        (summed, lambda comm, x, out: comm.Allreduce_init(x.view(int), out.view(int))),
        (summed, lambda comm, x, _: comm.Bcast_init(x)),
        (to_root, lambda comm, x, out: comm.Reduce_init(x, out, root=1)),
        (
            summed,
            lambda comm, x, out: comm.Allreduce_init([x, 1, MPI.DOUBLE_INT], [out, 1, MPI.DOUBLE_INT], MPI.MAXLOC),
        ),
        (summed, lambda comm, x, out: comm.Allreduce_init(x, np.broadcast_to(out, out.shape))),
    ],
    ids=["op", "count", "dtype", "verb", "root", "for the MPI library", "read-only"],
)
def test_ranks_that_prepare_different_requests_are_told(comm, elements, usual, other):
    if SIZE == 1:
        return
    x, out = np.full(elements, RANK + 1.0), np.zeros(elements)
    for _ in range(2):  # also where the call is known
        refused(mpiagg.MismatchError, "ranks disagree", other if RANK == SIZE - 1 else usual, comm, x, out)
        usual(comm, x, out).Free()
    assert not out.any()


def test_ranks_may_describe_the_same_data_in_ways_that_one_alone_can_read():
    """Those of a short broadcast, which is the MPI library's own."""
    comm = mpiagg.Comm(MPI.COMM_WORLD)
    back = MPI.DOUBLE.Create_vector(8, 1, -1).Commit()
    x = np.arange(8.0) if RANK == 0 else np.zeros(8)
    request = comm.Bcast_init([x[7:], 1, back] if RANK == 0 else x, 0)
    request.Start()
    request.Wait()
    request.Free()
    assert x.tolist() == (list(range(8)) if RANK == 0 else list(range(8))[::-1])
    back.Free()
    comm.Free()


def test_ranks_are_told_in_the_first_call_on_a_communicator():
    comm = mpiagg.Comm(MPI.COMM_WORLD)
    twin, request = comm.Idup()
    request.Wait()
    x = np.zeros(3)
    given = (x, np.broadcast_to(x, x.shape)) if RANK == SIZE - 1 > 0 else (x, np.zeros(3))
    if SIZE > 1:
        refused(mpiagg.MismatchError, "ranks disagree", twin.Allreduce_init, *given)
    twin.Free()
    comm.Free()
