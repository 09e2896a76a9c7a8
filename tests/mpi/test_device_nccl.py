"""Collectives by NCCL, through the stand-in's: what is asked for, in which order, and what is refused."""

import numpy as np
import pytest
import standin
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI
from standin_nccl import StandInNccl
from support import refused

import mpiagg
from mpiagg.arrays import Accelerator, reduction
from mpiagg.plans.bound import bind_operation
from mpiagg.plans.choices import NCCL, Choice
from mpiagg.plans.operation import Operation
from mpiagg.plans.plan import Plan
from mpiagg.schedules import Collective
from mpiagg.transport import channel_of

pytestmark = pytest.mark.mpi

COLLECTIVES = ("allreduce", "reduce", "broadcast", "allgather", "reduce_scatter")
REDUCING = ("allreduce", "reduce", "reduce_scatter")


@pytest.fixture
def shared_device(comm):
    """A device that is the same for all ranks; its memory is none that messages reach."""
    channel_of(comm).aware = False
    with standin.installed() as device, standin.watch(device_messages=False):
        yield device
        channel_of(comm).free()


@pytest.fixture
def device(shared_device, rank, monkeypatch):
    """A device of this rank alone."""
    monkeypatch.setattr(standin.StandIn, "identity", property(lambda self: f"STANDIN-{rank}-{self.name}"))
    return shared_device


def called(name, x, comm, **keywords):
    result = getattr(mpiagg, name)(x, comm=comm, **keywords)
    return standin.peek(result) if isinstance(result, standin.DeviceArray) else result


def work():
    """Return what was asked for, without waiting."""
    return [(entry.what, entry.name) for entry in standin.LOG if entry.what not in ("wait", "done")]


# -- results


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_results_of_messages(comm, rank, size, device, vectors, bits, collective):  # noqa: PLR0917 - fixtures
    for dtype in (np.float64, np.float16, np.int16) if collective not in REDUCING else (np.float64, np.float16):
        for length in (0, 1, size, 37, 10_000):
            x = vectors(dtype, length)[rank]
            keywords = {"root": size - 1} if collective in ("reduce", "broadcast") else {}
            wanted = called(collective, x, comm, algorithm="direct", **keywords)
            result = called(collective, device.from_host(x), comm, algorithm="nccl", **keywords)
            assert (result is None) == (wanted is None)
            if wanted is not None:
                assert (result.shape, result.dtype) == (wanted.shape, wanted.dtype)
                assert bits(result) == bits(wanted)


def test_every_op_and_dtype_or_a_refusal_on_all_ranks(comm, rank, device, vectors, bits):
    accepted = set()
    for char in "?bBhHiIlLqQefdgFD":
        x = vectors(char, 13)[rank]
        there = device.from_host(x)
        for op in ("sum", "avg", "min", "max", "prod"):
            try:
                wanted = called("allreduce", x, comm, op=op, algorithm="direct")
            except TypeError:
                continue
            if char in "hHg" or (char in "FD" and op == "prod"):
                refused(TypeError, "'nccl' has no op", mpiagg.allreduce, there, comm=comm, op=op, algorithm="nccl")
                continue
            result = called("allreduce", there, comm, op=op, algorithm="nccl")
            accepted.add(char)
            assert result.dtype == wanted.dtype
            assert bits(result) == bits(wanted), (char, op)
    assert accepted == set("?bBiIlLqQefdFD")


@given(st.lists(st.integers(0, 5), min_size=8, max_size=8), st.sampled_from(["f8", "F", "i2"]))
@settings(max_examples=6)
def test_any_counts(counts, dtype):
    world = MPI.COMM_WORLD
    rank, size = world.rank, world.size
    counts = tuple(counts[:size])
    cuts = np.cumsum((0, *counts))
    values = [(np.arange(cuts[-1]) * (peer + 1) % 7).astype(dtype) for peer in range(size)]
    own = slice(cuts[rank], cuts[rank + 1])
    comm = world.Dup()
    with pytest.MonkeyPatch.context() as patch, standin.installed() as device:
        patch.setattr(standin.StandIn, "identity", property(lambda _: str(rank)))
        channel = channel_of(comm)
        for collective in (Collective.ALLGATHER, Collective.REDUCE_SCATTER):
            how = reduction("sum", np.dtype(dtype), size)
            operation = Operation(collective, rank, channel.layout, 0, counts, how, Choice(NCCL), MPI.SUM)
            buffer = device.from_host(values[rank])
            if dtype == "i2" and collective.reduces:
                refused(TypeError, "'sum' for dtype int16", bind_operation, channel, operation, buffer)
                continue
            program = bind_operation(channel, operation, buffer)
            with Plan(channel, program, result=buffer, label=operation.label) as plan:
                result = standin.peek(plan())
            if collective.reduces:
                assert (result[own] == sum(values)[own]).all()
            else:
                parts = [values[peer][cuts[peer] : cuts[peer + 1]] for peer in range(size)]
                assert (result == np.concatenate(parts)).all()
    comm.Free()


def test_arrays_of_other_layouts(comm, rank, size, device):
    out = device.empty((40, 2), float).T
    x = device.from_host(np.arange(80.0).reshape(40, 2) + rank).T
    total = size * np.arange(80.0).reshape(40, 2).T + sum(range(size))
    assert (standin.peek(mpiagg.allreduce(x, out=out, comm=comm, algorithm="nccl")) == total).all()
    assert (called("allreduce", x, comm, algorithm="nccl") == total).all()
    assert (standin.peek(mpiagg.allreduce(x, out=x, comm=comm, algorithm="nccl")) == total).all()


def test_an_aggregation(comm, rank, size, device):
    for by_layer in (False, True):
        with mpiagg.AllReduce(comm, algorithm="nccl", by_layer=by_layer) as aggregation:
            for planned in (False, True):
                tensors = [
                    device.from_host(np.full(shape, rank + number, dtype))
                    for number, (shape, dtype) in enumerate((((3, 4), "f4"), (50_000, "f4"), (2, "f2"), ((), "f8")))
                ]
                if planned:
                    with aggregation.aggregate_init(tensors) as plan:
                        plan()
                else:
                    aggregation.aggregate(tensors)
                for number, x in enumerate(tensors):
                    assert (standin.peek(x) == np.mean(range(size)) + number).all()
    with mpiagg.AllReduce(comm, algorithm="nccl") as aggregation:
        refused(ValueError, "for arrays on CUDA", aggregation.aggregate, [np.ones(3)])


# -- what is done in which order


@pytest.mark.parametrize("rest", [0, 1])
def test_one_collective_is_asked_for_and_nothing_is_copied_or_sent(comm, rank, size, device, rest):
    x = device.from_host(np.full(12 * size + rest, rank + 1.0))
    uneven = rest and size > 1
    scattered = ["nccl " + (" ".join(["reduce"] * size) if uneven else "reduce_scatter"), "divide"]
    scattered += ["convert"] if size > 1 else []  # of a rank alone the part is the whole
    for collective, names in (
        ("allreduce", ["nccl all_reduce", "divide"]),
        ("reduce_scatter", scattered),
        ("allgather", ["nccl all_gather"]),
    ):
        op = {"op": "avg"} if collective in REDUCING else {}
        with getattr(mpiagg, f"{collective}_init")(x, comm=comm, algorithm="nccl", **op) as plan:
            standin.LOG.clear()
            plan()
            assert work() == [("kernel", name) for name in ("convert", *names)]


def test_a_vector_in_its_place_is_reduced_there(comm, rank, size, device):
    x = device.from_host(np.full(1000, rank, np.int64))
    with mpiagg.allreduce_init(x, "max", out=x, comm=comm, algorithm="nccl") as plan:
        standin.LOG.clear()
        plan()
        assert work() == [("kernel", "nccl all_reduce")]
        assert (plan.nbytes, plan.sent_bytes) == (0, 0)
    standin.LOG.clear()
    mpiagg.allreduce(x, out=x, comm=comm, algorithm="nccl")
    assert work() == [("kernel", "nccl all_reduce")]
    assert (standin.peek(x) == (size - 1) * size).all()


def test_plans_are_under_way_together_and_waited_for_in_any_order(comm, rank, size, device):
    xs = [device.empty(length, float) for length in (10, 30_000, 77)]
    stream = device.stream()
    plans = [mpiagg.allreduce_init(x, out=x, comm=comm, algorithm="nccl") for x in xs]
    for step in range(3):
        with stream:
            for x, plan in zip(xs, plans, strict=True):
                np.copyto(x, device.from_host(np.full(x.size, rank + step + 0.0)))
                plan.start()
        # What is asked for does not wait to be tested, so that it is asked for in one order.
        for plan in plans if (rank + step) % 2 else plans[::-1]:
            plan.wait()
        for x in xs:
            # On the default stream, which has waited for nothing.
            assert device.to_host(x + 0).tolist() == [sum(range(size)) + step * size] * x.size
    for plan in plans:
        plan.free()


# -- the connection


def test_a_channel_connects_once_and_disconnects_before_it_goes(comm, device, monkeypatch):
    channel = channel_of(comm)
    assert channel.nccl is None
    there = []
    close = StandInNccl.close
    monkeypatch.setattr(
        StandInNccl, "close", lambda self, abort: there.append(bool(channel.comm)) or close(self, abort=abort)
    )
    for _ in range(2):
        mpiagg.allreduce(device.from_host(np.ones(3)), comm=comm, algorithm="nccl")
        mpiagg.broadcast(device.from_host(np.ones(3)), comm=comm, algorithm="nccl")
        connection = channel.nccl
    channel.free()
    assert (there, connection.state, channel.nccl) == ([True], "closed", None)


def test_what_an_error_has_left_under_way_is_aborted(comm, device):
    channel = channel_of(comm)
    x = device.from_host(np.ones(3))
    plan = mpiagg.allreduce_init(x, out=x, comm=comm, algorithm="nccl")
    connection = channel.nccl
    device.polls = 1000
    plan.start()
    channel.free()
    assert connection.state == "aborted"
    device.polls = 1
    plan.wait()
    plan.free()
    channel.free()


def test_ranks_that_share_a_device_are_told(comm, size, shared_device, rank, monkeypatch):
    x = shared_device.from_host(np.full(3, rank))
    if size > 1:
        everyone = ", ".join(map(str, range(size)))
        words = f"ranks {everyone} share STANDIN-standin:0, and algorithm 'nccl' is for ranks that have a GPU each"
        for _ in range(2):
            refused(mpiagg.DeviceError, words, mpiagg.allreduce, x, comm=comm, algorithm="nccl")
            refused(mpiagg.DeviceError, words, mpiagg.allreduce_init, x, comm=comm, algorithm="nccl")
    monkeypatch.setattr(standin.StandIn, "identity", property(lambda _: str(rank)))
    assert called("allreduce", x, comm, algorithm="nccl").tolist() == [sum(range(size))] * 3


@pytest.mark.parametrize("step", ["nccl", "unique_id", "connect"])
def test_what_fails_on_one_rank_is_an_error_on_all(comm, rank, size, device, monkeypatch, step):  # noqa: PLR0917 - fixtures
    failing = 0 if step == "unique_id" else size - 1

    def fail(*_):
        if step == "connect":
            raise RuntimeError("nobody answers")
        return Accelerator.nccl(device)

    if rank == failing:
        monkeypatch.setattr(standin.StandIn if step == "nccl" else StandInNccl, step, fail)
    elif step == "connect":  # which would wait for the one that fails
        monkeypatch.setattr(StandInNccl, step, lambda *_: None)
    x = device.from_host(np.full(3, rank))
    reason = "nobody answers" if step == "connect" else "standin:0 has no NCCL"
    words = f"'nccl' cannot be used; rank {failing}: {reason}$"
    refused(mpiagg.DeviceError, words, mpiagg.allreduce, x, comm=comm, algorithm="nccl")
    assert channel_of(comm).nccl is None
    monkeypatch.undo()
    monkeypatch.setattr(standin.StandIn, "identity", property(lambda _: str(rank)))
    assert called("allreduce", x, comm, algorithm="nccl").tolist() == [sum(range(size))] * 3


# -- arguments


def test_what_it_is_not_for(comm, device):
    there = device.from_host(np.ones(3, np.float32))
    user = MPI.Op.Create(lambda *_: None)
    for x, error, words, keywords in (
        (np.ones(3), ValueError, "algorithm 'nccl' is for arrays on CUDA devices", {}),
        (there, ValueError, "'nccl' sends values as they are, not with wire 'fp16'", {"wire": "fp16"}),
        (there, ValueError, "'nccl' cannot apply an op that is not predefined", {"op": user}),
        (device.from_host(np.ones(3, int)), TypeError, "'nccl' has no op 'bxor'", {"op": MPI.BXOR}),
    ):
        for call in (mpiagg.allreduce, mpiagg.allreduce_init):
            refused(error, words, call, x, comm=comm, algorithm="nccl", **keywords)
    user.Free()
    assert channel_of(comm).nccl is None
    refused(ValueError, "not with wire 'fp16'", mpiagg.AllReduce, comm, algorithm="nccl", wire="fp16")
    assert "nccl" not in mpiagg.algorithms()


def test_another_device_than_the_first_is_refused(comm, device):
    mpiagg.allreduce(device.from_host(np.ones(3)), comm=comm, algorithm="nccl")
    other = standin.device(1).from_host(np.ones(3))
    refused(mpiagg.DeviceError, "here it is standin:0", mpiagg.allreduce, other, comm=comm, algorithm="nccl")


def test_the_stand_in_refuses_what_nccl_does(comm, device):
    mpiagg.allreduce(device.from_host(np.ones(3)), comm=comm, algorithm="nccl")
    nccl, whole = channel_of(comm).nccl, device.empty(4 * comm.size, np.int64)
    for vector in (whole.view(np.int16), whole[::2], whole[:0]):
        with pytest.raises(AssertionError):
            nccl.all_reduce(vector, "sum")
    with pytest.raises(AssertionError):
        nccl.all_gather(whole, device.empty(4, np.int64))
