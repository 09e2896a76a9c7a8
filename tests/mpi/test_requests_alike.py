"""Nonblocking calls that are alike: they run the same few plans, and those under way follow one another."""

import numpy as np
import pytest
from mpi4py import MPI

import mpiagg
from mpiagg.collectives import requests
from mpiagg.collectives.request_lines import RequestLine
from mpiagg.transport import channel_of, kept
from mpiagg.transport.tags import LINES

pytestmark = pytest.mark.mpi

SIZE, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
TOTAL = sum(range(SIZE))
MANY = 5 * LINES + 2


@pytest.fixture
def comm():
    comm = mpiagg.Comm(MPI.COMM_WORLD, reproducible=True)
    yield comm
    comm.Free()


def started(comm, length, count=MANY):
    """Return the outputs of many all-reductions under way, and these."""
    outs = [np.full(length, -1.0) for _ in range(count)]
    return outs, [comm.Iallreduce(np.full(length, RANK + 10.0 * turn), out) for turn, out in enumerate(outs)]


def right(outs):
    return all((out == TOTAL + SIZE * 10.0 * turn).all() for turn, out in enumerate(outs))


WAYS = {
    "in order": lambda pending: [request.Wait() for request in pending],
    "in reverse order": lambda pending: [request.Wait() for request in reversed(pending)],
    "in another order on each rank": lambda pending: [pending[(turn + RANK) % MANY].Wait() for turn in range(MANY)],
    "by MPI": MPI.Request.Waitall,
}


@pytest.mark.parametrize("length", [3, 20_000])
@pytest.mark.parametrize("way", WAYS)
def test_more_are_under_way_than_plans(comm, length, way):
    for _ in range(2):
        outs, pending = started(comm, length)
        WAYS[way](pending)
        assert right(outs)


def test_the_next_one_runs_the_plan_of_one_before(comm):
    for turn in range(3 * LINES):
        outs, pending = started(comm, 5, 1)
        pending[0].Wait()
        assert right(outs)
        assert len(channel_of(comm).open) == min(turn + 1, LINES)


def test_plans_with_copies_are_freed_when_they_are_done(comm):
    column = MPI.DOUBLE.Create_vector(3, 1, 2).Commit()
    before = len(channel_of(comm).open)
    for _ in range(3):
        pending = [comm.Ibcast([np.zeros((3, 2)), 1, column]) for _ in range(5)]
        MPI.Request.Waitall(pending)
    assert len(channel_of(comm).open) == before
    column.Free()


def test_long_arrays_may_lie_elsewhere_each_time(comm):
    """Some lie where others did, on each rank in another order."""
    rooms = [np.empty((2, 20_000)) for _ in range(3)]
    for turn in range(4 * LINES):
        x, out = rooms[(turn * (RANK + 1)) % 3]
        x[:] = RANK + turn
        request = comm.Iallreduce(x, out)
        request.Wait()
        assert (out == TOTAL + SIZE * turn).all()
        comm.Iallreduce(MPI.IN_PLACE, x).Wait()
        assert (x == TOTAL + SIZE * turn).all()


def test_ranks_describe_them_in_their_own_ways(comm):
    column = MPI.DOUBLE.Create_vector(3, 1, 2).Commit()
    pending, arrays = [], []
    for turn in range(MANY):
        x = np.full((3, 2), float(turn if RANK == 0 else -1))
        if (turn + RANK) % 3 == 0:
            given, own = [x, 1, column], x[:, 0]
        else:
            given = own = x.reshape(-1)[:3]
        pending.append(comm.Ibcast(given))
        arrays.append(own)
    requests.Request.Waitall(pending)
    assert all((own == turn).all() for turn, own in enumerate(arrays))
    column.Free()


def test_to_start_one_waits_for_no_other_rank(comm):
    """Rank 1 starts none before it has heard that rank 0 has started all."""
    if RANK == 1:
        comm.Recv(np.empty(1), 0)
    outs, pending = started(comm, 3)
    if RANK == 0 < SIZE - 1:
        comm.Send(np.zeros(1), 1)
    requests.Request.Waitall(pending)
    assert right(outs)


@pytest.mark.parametrize("length", [3, 20_000])
def test_plans_may_be_forgotten_while_they_are_used(comm, monkeypatch, length):
    monkeypatch.setattr(kept, "MOST", 1)
    for _ in range(2):
        outs, pending = started(comm, length)
        requests.Request.Waitall(pending)
        assert right(outs)
    assert len(channel_of(comm).open) <= 1


def test_an_array_may_go_when_its_call_is_done(comm):
    for turn in range(3 * LINES):
        x, out = np.full(20_000, RANK + float(turn)), np.empty(20_000)
        request = comm.Iallreduce(x, out)
        del x  # the request keeps it until then
        request.Wait()
        assert (out == TOTAL + SIZE * turn).all()
        del out


class Plan:
    """A plan that is done, or fails, when it is told to be."""

    def __init__(self):
        self.events, self.end = [], False

    def start(self):
        self.events.append("started")

    def test(self):
        if isinstance(self.end, Exception):
            raise self.end
        return self.end

    def wait(self):
        self.events.append("waited for")
        self.end = self.end or True

    def free(self):
        self.events.append("freed")


def test_each_starts_when_the_one_before_is_done():
    line, plans = RequestLine(), [Plan() for _ in range(3)]
    pending = [requests.Request(plan, line) for plan in plans]
    assert [plan.events for plan in plans] == [["started"], [], []]
    assert not pending[2].Test()
    plans[1].end = True
    assert not pending[2].Test()
    assert [plan.events for plan in plans] == [["started"], [], []]
    plans[0].end = True
    assert not pending[2].Test()
    assert [plan.events for plan in plans] == [["started", "freed"], ["started", "freed"], ["started"]]
    pending[2].Wait()
    assert plans[2].events == ["started", "waited for", "freed"]
    MPI.Request.Waitall(pending)


def test_what_comes_after_one_that_failed_fails_too(monkeypatch):
    monkeypatch.setattr("traceback.print_exc", lambda: None)
    line, plans = RequestLine(), [Plan() for _ in range(3)]
    pending = [requests.Request(plan, line) for plan in plans]
    plans[0].end = RuntimeError("broken")
    for request in reversed(pending):
        with pytest.raises(RuntimeError, match="broken"):
            request.Wait()
    assert [plan.events[:1] for plan in plans] == [["started"], [], []]
    with pytest.raises(mpiagg.PlanError, match="failed before"):
        requests.Request(Plan(), line)
    for request in pending:
        requests._tokens().receive(request._tag)
        MPI.Request.Wait(request)
