"""Horovod's interface: ranks that wait for each other in vain, and what waits with them."""

import sys
import time
from io import StringIO
from types import SimpleNamespace

import pytest
import torch
from mpi4py import MPI

from mpiagg.errors import DeviceError
from mpiagg.horovod.engine import Engine
from mpiagg.horovod.exceptions import HorovodInternalError
from mpiagg.horovod.requests import TensorRequest, Terms
from mpiagg.transport.waiting import limited

pytestmark = pytest.mark.mpi

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
OWN = f"'own {RANK}' of rank {RANK}"


def several(test):
    """Leave a test out where there is one rank."""
    return test if SIZE > 1 else None


def request(name):
    return TensorRequest(Terms(name, "allreduce", ("torch.float32",), ((2,),)), [torch.ones(2)])


def names_all(text, first=0):
    """Whether a text names what each rank has asked for, apart from the first ones."""
    return all(f"'own {rank}' of rank {rank}" in text for rank in range(first, SIZE))


@pytest.fixture
def engine():
    """Return what makes an engine of all ranks with a time limit, and ends it after the test."""
    made = []

    def make(seconds):
        with limited(seconds):
            made.append(Engine(MPI.COMM_WORLD))
        return made[0]

    yield make
    made[0].end()
    if not made[0].usable and made[0].failed is not None:
        made[0].comm.Free()


@pytest.fixture
def hands(monkeypatch):
    """Set the clock that engines look at: it stands still, apart from what the test does."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("mpiagg.horovod.engine.time", SimpleNamespace(monotonic=lambda: clock.now, sleep=time.sleep))
    return clock


@several
def test_what_others_never_ask_for_is_an_error_on_all_ranks(engine):
    made = engine(0.5)
    mine = made.submit(request(f"own {RANK}"))
    with pytest.raises(HorovodInternalError, match=r"waited 0\.5 s in vain") as caught:
        made.wait(mine)
    assert names_all(str(caught.value))
    with pytest.raises(HorovodInternalError, match="not together any more"):
        made.submit(request("later"))


def test_what_all_ask_for_is_no_stall(engine):
    made = engine(0.5)
    for order in range(4):
        names = ["a", "b", "c"][:: 1 if (RANK + order) % 2 else -1]
        mine = [made.submit(request(name)) for name in names]
        assert all(torch.equal(made.wait(each)[0], torch.full((2,), float(SIZE))) for each in mine)
    assert made.usable


@several
def test_requests_wait_as_long_as_something_goes_on(engine, hands):
    made = engine(10)
    early = made.submit(request(f"own {RANK}"))
    for step in range(5):
        made.wait(made.submit(request(f"step {step}")))
        hands.now += 8
    late = [made.submit(request(f"own {rank}")) for rank in range(SIZE) if rank != RANK]
    for each in (early, *late):
        assert torch.equal(made.wait(each)[0], torch.full((2,), float(SIZE)))
    # Nothing goes on any more.
    last = made.submit(request(f"own {RANK}"))
    while not made.is_over(last):
        hands.now += 11
        time.sleep(1e-3)
    with pytest.raises(HorovodInternalError, match="waited 10 s in vain") as caught:
        made.wait(last)
    assert names_all(str(caught.value))


@several
def test_a_rank_that_has_joined_is_named(engine):
    made = engine(0.5)
    mine = made.join() if RANK == 0 else made.submit(request(f"own {RANK}"))
    if SIZE == 2:  # rank 0 takes part with zeros
        assert RANK == 0 or torch.equal(made.wait(mine)[0], torch.ones(2))
        assert made.wait(mine if RANK == 0 else made.join()) == 1
        return
    with pytest.raises(HorovodInternalError, match=r"in vain for .*join\(\) of rank 0,") as caught:
        made.wait(mine)
    assert names_all(str(caught.value), 1)


@several
def test_who_waits_for_long_is_warned_of(engine, hands, monkeypatch):
    monkeypatch.setenv("MPIAGG_WARN", "1")
    monkeypatch.setattr(sys, "stderr", said := StringIO())
    made = engine(1e9)
    mine = made.submit(request(f"own {RANK}"))
    if RANK == 0:
        more = [made.submit(request(f"more {i}")) for i in range(9)]
        while said.getvalue().count("\n") < 2:
            hands.now += 2
            assert not made.is_over(mine)
            time.sleep(1e-3)
    made.wait(made.submit(request("go on")))
    if RANK:
        more = [made.submit(request(f"more {i}")) for i in range(9)]
    others = [made.submit(request(f"own {rank}")) for rank in range(SIZE) if rank != RANK]
    for each in (mine, *more, *others):
        made.wait(each)
    text = said.getvalue()
    assert text.startswith("mpiagg: waiting for ") if RANK == 0 else not text
    assert RANK or (names_all(text) and f"{SIZE + 2} more" in text)


def test_tensors_that_cannot_be_made_are_an_error_of_ours():
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    terms = Terms("x", "allreduce", ("torch.float32",), ((2,),), "cuda")
    with pytest.raises(DeviceError, match="no tensor of 'x' cannot take part"):
        terms.stand_ins(devices + 3)  # there is no such GPU
