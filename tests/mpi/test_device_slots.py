"""Arrays of devices that ranks cannot map, through slots that they can: nothing crosses the bus."""

import warnings
from functools import partial

import ml_dtypes
import numpy as np
import pytest
import standin
from device_cases import assert_same
from mpi4py import MPI

import mpiagg
from mpiagg.plans import bound, choices, on_node, slots
from mpiagg.transport import channel_of, node_memory

pytestmark = pytest.mark.mpi

SLOT = 2**16
LENGTH = 26_001
"""Elements of 8 bytes: four slots of this length, and too many to go by way of the host."""

REDUCING = ("allreduce", "reduce", "reduce_scatter")
ROOTED = ("reduce", "broadcast", "gather", "scatter")
COLLECTIVES = (*REDUCING, "broadcast", "allgather", "gather", "scatter", "alltoall")


@pytest.fixture
def device(comm, monkeypatch):
    """A device that messages do not reach, and short slots, so that there are several pieces."""
    monkeypatch.setattr(node_memory, "SLOT", SLOT)
    channel_of(comm).aware = False
    with standin.installed() as device, standin.watch(device_messages=False):
        yield device
        channel_of(comm).free()


@pytest.fixture
def staged(monkeypatch):
    """Return a function that lets arrays be staged from now on, as where there are no slots."""

    def staged():
        for module in (on_node, slots):
            monkeypatch.setattr(module, "by_slots", lambda *_: False)

    return staged


def irregular(shape, rank, dtype=float):
    """Values whose sum depends on the order."""
    return (np.random.default_rng(rank).standard_normal(shape) * 3).astype(dtype)


def seen(x):
    return standin.peek(x) if isinstance(x, standin.DeviceArray) else x


def log_of(call):
    """Return what a call has returned, and the log of what it has asked for."""
    standin.LOG.clear()
    result = call()
    return result, type(standin.LOG)(standin.LOG)


def stays_on_the_device(log):
    return not log.nbytes("out", "in") and not log.of("send", "receive")


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_nothing_leaves_the_devices_and_the_bits_are_those_of_the_host(comm, device, bits, collective):
    rank, size = comm.rank, comm.size
    function, prepare = getattr(mpiagg, collective), getattr(mpiagg, f"{collective}_init")
    reduces = collective in REDUCING
    for dtype, op in ((np.float64, "sum"), (np.float32, "avg"), (np.int64, "max"))[: 3 if reduces else 1]:
        x = irregular((size, LENGTH) if collective in ("scatter", "alltoall") else LENGTH, rank, dtype)
        keywords = {"comm": comm} | ({"op": op} if reduces else {})
        for root in range(size) if collective in ROOTED else (None,):
            rooted = keywords if root is None else keywords | {"root": root}
            wanted = function(x, **rooted, algorithm="shared")
            there = device.from_host(x)
            for algorithm in ("auto", "shared"):

                def call(there=there, rooted=rooted, algorithm=algorithm):
                    return function(there, **rooted, algorithm=algorithm)

                with prepare(there, **rooted, algorithm=algorithm) as plan:
                    for run in (call, plan):
                        for _ in range(2):
                            found, log = log_of(run)
                            assert_same(seen(found), wanted, bits)
                            assert stays_on_the_device(log)
            assert_same(seen(there), x, bits)


def test_arrays_that_are_worked_on_in_place(comm, rank, size, device, bits):
    x = irregular(LENGTH, rank)
    wanted = mpiagg.allreduce(x, comm=comm, algorithm="shared")
    vector = device.from_host(x)
    _, log = log_of(lambda: mpiagg.allreduce(vector, out=vector, comm=comm))
    assert_same(seen(vector), wanted, bits)
    assert stays_on_the_device(log)
    for root in range(size):
        vector, reduced = device.from_host(x), mpiagg.reduce(x, root=root, comm=comm, algorithm="shared")
        mpiagg.reduce(vector, out=vector if rank == root else None, root=root, comm=comm)
        assert_same(seen(vector), reduced if rank == root else x, bits)
        # Of the root's vector in a broadcast nothing is copied back.
        _, log = log_of(partial(mpiagg.broadcast, vector, out=vector, root=root, comm=comm))
        if size > 1:
            assert log.nbytes("on") == vector.nbytes
    whole = device.from_host(np.zeros((size, LENGTH)))
    np.copyto(whole[rank], device.from_host(x))
    gathered = mpiagg.allgather(x, comm=comm)
    _, log = log_of(lambda: mpiagg.allgather(whole[rank], out=whole, comm=comm))
    assert_same(seen(whole), gathered, bits)
    if size > 1:
        assert log.nbytes("on") == whole.nbytes  # of this rank's own chunk only to its slot
    rows = irregular((size, LENGTH), rank)
    wanted = mpiagg.alltoall(rows, comm=comm)
    there = device.from_host(rows)
    assert_same(seen(mpiagg.alltoall(there, out=there, comm=comm)), wanted, bits)


def test_an_input_that_partly_lies_in_the_output(comm, rank, device, bits):
    values = irregular(LENGTH + 7, rank)
    for first, second in ((slice(7, None), slice(-7)), (slice(-7), slice(7, None))):
        wanted = mpiagg.allreduce(values[first], comm=comm, algorithm="shared")
        there = device.from_host(values)
        assert_same(seen(mpiagg.allreduce(there[first], out=there[second], comm=comm)), wanted, bits)
        mapped = mpiagg.empty(LENGTH + 7, np.float64, comm=comm, device="standin")
        memory = there if rank == 0 else mapped  # where the input is brought to the output first
        np.copyto(memory, device.from_host(values))
        assert_same(seen(mpiagg.allreduce(memory[first], out=memory[second], comm=comm)), wanted, bits)
        with mpiagg.allreduce_init(memory[first], out=memory[second], comm=comm) as plan:
            np.copyto(memory, device.from_host(values))
            assert_same(seen(plan()), wanted, bits)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.complex64, np.int8])
def test_dtypes_and_layouts(comm, rank, device, bits, dtype):
    x = irregular((300, 400), rank, np.float32).round().astype(dtype)
    for collective in ("allreduce", "reduce_scatter", "reduce"):
        wanted = getattr(mpiagg, collective)(x, comm=comm, algorithm="shared")
        for there in (device.from_host(x), device.from_host(np.asfortranarray(x))):
            found, log = log_of(partial(getattr(mpiagg, collective), there, comm=comm))
            assert_same(seen(found), wanted, bits)
            assert stays_on_the_device(log)


def test_bytes_over_the_bus_before_and_now(comm, rank, size, device, staged):
    """Copies of an all-reduce of B bytes: staged by ring 2(n-1)/n B each way; now B to the slot and B from it."""
    x = device.from_host(irregular(4 * LENGTH, rank))

    def call():
        return mpiagg.allreduce(x, out=x, comm=comm)

    call()
    _, log = log_of(call)
    pieces = -(-x.nbytes // SLOT)
    if size > 1:
        assert log.nbytes("on") == 2 * x.nbytes
        assert log.counts()["fold"] == pieces
        assert log.counts()["done"] <= pieces + 3  # one a piece, two for the first and the last, one of the caller's
    assert stays_on_the_device(log)
    staged()
    y = device.from_host(irregular(4 * LENGTH, rank))
    _, log = log_of(lambda: mpiagg.allreduce(y, out=y, comm=comm))
    if size > 1:
        each_way = 2 * (size - 1) * y.nbytes // size
        assert all(abs(log.nbytes(way) - each_way) <= 64 for way in ("out", "in"))


@pytest.mark.parametrize("slot", [2**9, 2**10])
def test_any_length_and_any_slot(comm, rank, size, device, bits, monkeypatch, slot):  # noqa: PLR0917 - fixtures and cases
    monkeypatch.setattr(node_memory, "SLOT", slot)
    for module in (bound, choices):
        monkeypatch.setattr(module, "BY_WAY_OF_HOST", -1)
    for length in (0, 1, size, 63, 64, 65, 129, 1001):
        for collective in COLLECTIVES:
            shape = (size, length) if collective in ("scatter", "alltoall") else length
            x = irregular(shape, rank)
            wanted = getattr(mpiagg, collective)(x, comm=comm, algorithm="shared")
            found, log = log_of(partial(getattr(mpiagg, collective), device.from_host(x), comm=comm))
            assert_same(seen(found), wanted, bits)
            assert not log.of("out", "send", "receive")


def test_slots_grow_with_the_vectors_and_shorter_ones_go_by_them(comm, rank, size, device):
    made = []
    lengths = [9_000, 30_000, 9_000, 12_000, 30_000]  # on the first rank always the same arrays
    arrays = {length: device.from_host(np.full(length, rank + 1.0)) for length in lengths}
    for length in lengths:
        x = arrays[length] if rank == 0 else device.from_host(np.full(length, rank + 1.0))
        found, log = log_of(partial(mpiagg.allreduce, x, comm=comm))
        assert (seen(found) == size * (size + 1) / 2).all()
        assert not log.of("out", "send", "receive")
        made.append(getattr(channel_of(comm).memory._slots_for_calls, "nbytes", 0))
    assert made == ([2**17] * 5 if size > 1 else [0] * 5)
    node_memory.SLOT *= 4  # of which the fixture knows
    for length in (9_000, 30_000, 9_000):
        x = arrays[length] if rank == 0 else device.from_host(np.full(length, rank + 1.0))
        assert (seen(mpiagg.allreduce(x, comm=comm)) == size * (size + 1) / 2).all()
        made.append(getattr(channel_of(comm).memory._slots_for_calls, "nbytes", 0))
    assert made[5:] == ([2**18, 2**19, 2**19] if size > 1 else [0] * 3)


def test_mapped_and_other_arrays_in_one_call(comm, rank, size, device, bits):
    x = irregular(LENGTH, rank)
    wanted = mpiagg.allreduce(x, comm=comm, algorithm="shared")
    mapped = mpiagg.empty(LENGTH, np.float64, comm=comm, device="standin")
    for mixed in (mapped if rank else device.from_host(x), device.from_host(x) if rank else mapped, mapped):
        np.copyto(mixed, device.from_host(x))
        found, log = log_of(lambda mixed=mixed: mpiagg.allreduce(mixed, out=mixed, comm=comm))
        assert_same(seen(found), wanted, bits)
        assert stays_on_the_device(log)
    assert size == 1 or (log.counts()["fold"], log.counts()["on"]) == (1, 0)


def test_ranks_on_devices_of_their_own(comm, rank, size, device, bits):
    del device
    own = standin.device(rank % 2)
    x = irregular(LENGTH, rank)
    there = own.from_host(x)
    found, log = log_of(lambda: mpiagg.allreduce(there, comm=comm))
    assert_same(seen(found), mpiagg.allreduce(x, comm=comm, algorithm="shared"), bits)
    assert stays_on_the_device(log)
    # Later one rank comes with an array on another device than its slots: all send messages.
    other = standin.device(1 - rank % 2 if rank == 0 else rank % 2)
    for make in (mpiagg.allreduce, lambda x, comm: mpiagg.allreduce_init(x, comm=comm)):
        y = other.from_host(np.full(LENGTH, rank + 1.0))
        standin.LOG.clear()
        found = make(y, comm=comm)
        found = found() if isinstance(found, mpiagg.Plan) else found
        assert (seen(found) == size * (size + 1) / 2).all()
        assert (standin.LOG.nbytes("out") > 0) == (size > 1)
    # Memory that ranks map may lie there all the same.
    mapped = mpiagg.empty(LENGTH, np.float64, comm=comm, device=other.name)
    mapped.fill(1)
    found, log = log_of(lambda: mpiagg.allreduce(mapped, out=mapped, comm=comm))
    assert (seen(found) == size).all()
    assert stays_on_the_device(log)
    # And where some have that, and others an array beside their slots, there are messages.
    mixed = mapped if rank == 0 else own.from_host(np.ones(LENGTH))
    mixed.fill(1)
    assert (seen(mpiagg.allreduce(mixed, out=mixed, comm=comm)) == size).all()
    with mpiagg.allreduce_init(mixed, out=mixed, comm=comm) as plan:
        mixed.fill(1)
        assert (seen(plan()) == size).all()


@pytest.mark.parametrize("what", ["allocate", "export", "open"])
@pytest.mark.parametrize("planned", [False, True])
def test_where_there_are_no_slots_all_are_staged_and_warn_once(comm, device, monkeypatch, what, planned):
    rank, size = comm.rank, comm.size
    x = device.from_host(irregular(LENGTH, rank))
    wanted = mpiagg.allreduce(irregular(LENGTH, rank), comm=comm, algorithm="direct")

    def call():
        if not planned:
            return mpiagg.allreduce(x, comm=comm)
        with mpiagg.allreduce_init(x, comm=comm) as plan:
            return plan()

    if rank == 1:
        monkeypatch.setattr(device, what, lambda *_: 1 / 0)
    if size > 1:
        with pytest.warns(RuntimeWarning, match="go by messages on this communicator.*rank 1 raised"):
            found = call()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, log = log_of(call)
    np.testing.assert_allclose(seen(found), wanted, rtol=1e-12, atol=1e-12)
    assert (log.nbytes("out") > 0) == (size > 1)


def test_a_warning_that_is_an_error_leaves_no_call_in_the_middle(comm, rank, size, device, monkeypatch):
    x = device.from_host(np.full(LENGTH, rank + 1.0))
    monkeypatch.setattr(device, "allocate", lambda *_: 1 / 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if size > 1:
            with pytest.raises(RuntimeWarning, match="go by messages"):
                mpiagg.allreduce(x, comm=comm)
        assert (seen(mpiagg.allreduce(x, comm=comm)) == size * (size + 1) / 2).all()
        with mpiagg.allreduce_init(x, comm=comm) as plan:
            assert (seen(plan()) == size * (size + 1) / 2).all()


def test_plans_of_their_own_slots_run_at_once_and_give_them_back(comm, rank, size, device):
    arrays = [device.empty(length, float) for length in (LENGTH, 2 * LENGTH, LENGTH)]
    made = []
    for _ in range(2):
        plans = [mpiagg.allreduce_init(x, out=x, comm=comm) for x in arrays]
        for step in range(2):
            for number, x in enumerate(arrays):
                x.fill(rank + number + step)
            for plan in plans:
                plan.start()
            for plan in plans[::-1]:
                plan.wait()
            for number, x in enumerate(arrays):
                assert (seen(x) == sum(range(size)) + size * (number + step)).all()
        for plan in plans:
            plan.free()
        made.append([block.memory.nbytes for block in device._blocks if block.descriptor is not None])
    # Memory of the first plans serves the next, but for what may still be read when the first of these is made.
    assert sum(made[1]) <= sum(made[0]) + 2 * 2**22


def test_an_array_that_its_producer_still_writes_is_waited_for(comm, rank, size, device):
    stream = device.stream()
    for _ in range(3):
        with stream:
            x = device.from_host(np.full(LENGTH, rank + 1.0))
            found = mpiagg.allreduce(x, comm=comm)
        assert device.to_host(found + 0).tolist() == [size * (size + 1) / 2] * LENGTH  # in the default stream


def test_methods_of_the_communicator_and_aggregations(comm, rank, size, device):
    ours = mpiagg.Comm(comm)
    channel_of(ours).aware = False
    total = size * (size + 1) / 2
    try:
        x, y = device.from_host(np.full(LENGTH, rank + 1.0)), device.empty(LENGTH, float)
        _, log = log_of(lambda: ours.Allreduce(x, y, MPI.SUM))
        assert stays_on_the_device(log)
        persistent = ours.Allreduce_init(x, y, MPI.SUM)
        for _ in range(2):
            y.fill(0)
            persistent.Start()
            persistent.Wait()
            assert (seen(y) == total).all()
        persistent.Free()
        y.fill(0)
        ours.Iallreduce(x, y, MPI.SUM).Wait()  # which must not wait for others to map memory, and is staged
        assert (seen(y) == total).all()
        with mpiagg.AllReduce(comm, op="sum") as aggregation:
            _, log = log_of(lambda: aggregation.aggregate([x]))
            assert (seen(x) == total).all()
            assert stays_on_the_device(log)
    finally:
        ours.Free()


def test_a_cuda_aware_library_s_messages_are_taken(comm, rank, size):
    channel_of(comm).aware = True
    with standin.installed() as device, standin.watch(device_messages=True):
        x = device.from_host(np.full(LENGTH, rank + 1.0))
        found, log = log_of(lambda: mpiagg.allreduce(x, comm=comm))
        assert (seen(found) == size * (size + 1) / 2).all()
        channel_of(comm).free()
    assert size == 1 or {entry.memory for entry in log.of("send", "receive")} == {"device"}


def test_ranks_in_different_calls_are_told(comm, rank, size, device):
    x = device.from_host(np.full(LENGTH, rank + 1.0))
    mpiagg.allreduce(x, comm=comm)
    if size > 1:
        with pytest.raises(mpiagg.Error):
            mpiagg.allreduce(x[: LENGTH - rank], comm=comm)
