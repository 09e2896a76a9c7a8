"""Collectives and aggregations of arrays on one GPU that all ranks share: the host's results, whatever way they go.

test_gpu_ranks.py starts the ranks. MPI is imported by what needs it: this file is looked at by others, too.
"""

import threading

import kernel_checks as checks
import numpy as np
import pytest
from device_cases import assert_same

import mpiagg

checks.gpu()

pytestmark = [pytest.mark.mpi, pytest.mark.gpu, pytest.mark.filterwarnings("default")]

COLLECTIVES = ("allreduce", "reduce", "broadcast", "allgather", "reduce_scatter")
OPS = ("sum", "avg", "min", "max", "prod")
DTYPES = [np.dtype(char) for char in "?bhiqBHIQefdFD"] + checks.BFLOATS
LONG = 40_001
"""Elements that are too long to go by way of the host."""


@pytest.fixture
def comms():
    """Communicators whose messages are staged, and where the MPI library can, of the device's memory."""
    from mpi4py import MPI

    from mpiagg.transport import channel_of

    made = [MPI.COMM_WORLD.Dup() for _ in range(2)]
    staged, as_found = made
    channel_of(staged).aware = False
    yield made if channel_of(as_found).aware else [staged]
    for comm in made:
        comm.Free()


@pytest.fixture
def short_ones_too(monkeypatch):
    """Let messages of short vectors be messages of a device's, too."""
    from mpiagg.plans import bound
    from mpiagg.plans import choices as tuning

    for module in (bound, tuning):
        monkeypatch.setattr(module, "BY_WAY_OF_HOST", -1)


def irregular(length, seed, dtype=float):
    """Values whose sum depends on the order; none is subnormal in float32, of which CuPy's own functions make zeros."""
    return (np.random.default_rng(seed).standard_normal(length) * 3).astype(dtype)


def compare(device, bits, name, x, **keywords):
    """Show that a collective does to an array on the device what it does to the same on the host."""
    call = getattr(mpiagg, name)
    wanted, found = call(x, **keywords), call(device.from_host(x), **keywords)
    assert_same(None if found is None else device.to_host(found), wanted, bits)


def mapped(device, comm, x):
    """Return an array in memory that all ranks map, with some values."""
    memory = mpiagg.empty(x.shape, x.dtype, comm=comm, device=device.name)
    device.convert(memory, device.from_host(x))
    return memory


# -- bits


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.usefixtures("short_ones_too")
def test_all_algorithms_have_the_bits_of_the_host(comms, device, bits, collective):
    for comm in comms:
        for algorithm in mpiagg.algorithms(collective):  # what "auto" takes is another one on the host
            for length in (0, 1, comm.size, 1001):
                compare(device, bits, collective, irregular(length, comm.rank), comm=comm, algorithm=algorithm)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_long_and_short_vectors_have_the_bits_of_the_host(comms, device, bits, collective):
    for comm in comms:
        for algorithm in ("ring", "direct", "native"):
            for length in (100, LONG):
                x = irregular(length, comm.rank).round()
                compare(device, bits, collective, x, comm=comm, algorithm=algorithm)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.usefixtures("short_ones_too")
def test_every_op_and_dtype(comms, device, bits, op):
    for comm in comms:
        for dtype in DTYPES:
            x = irregular(65, comm.rank, dtype)
            keywords = {"op": op, "comm": comm, "algorithm": "ring"}
            try:
                wanted = mpiagg.allreduce(x, **keywords)
            except TypeError:
                with pytest.raises(TypeError, match="is not for"):
                    mpiagg.allreduce(device.from_host(x), **keywords)
                continue
            found = device.to_host(mpiagg.allreduce(device.from_host(x), **keywords))
            if (op, dtype.kind) == ("prod", "c"):  # which CuPy rounds once where NumPy rounds twice
                np.testing.assert_allclose(found, wanted, rtol=1e-4 if dtype.itemsize == 8 else 1e-12)
            else:
                assert_same(found, wanted, bits)


@pytest.mark.parametrize("wire", ["fp16", "bf16", "u8", "u4", "u2", "exact"])
@pytest.mark.usefixtures("short_ones_too")
def test_wires_have_the_bits_of_the_host(comms, device, bits, wire):
    for comm in comms:
        for dtype in (np.float16, np.float32, np.float64):
            for length in (333, LONG):
                x = irregular(length, comm.rank, dtype)
                compare(device, bits, "allreduce", x, op="avg", comm=comm, wire=wire)


def test_pieces_do_not_change_the_bits(comms, device, monkeypatch, bits):
    from mpiagg.plans import binding

    monkeypatch.setattr(binding, "piece_bytes", lambda *_: 16 * 2**10)
    for comm in comms:
        for keywords in ({}, {"lanes": 3}):
            x = irregular(LONG, comm.rank)
            compare(device, bits, "allreduce", x, comm=comm, algorithm="ring", **keywords)


def test_any_layout_and_other_outputs(comms, device, bits):
    for comm in comms:
        for shape in ((6, 5), (300, 200)):
            x = irregular(shape, comm.rank)
            wanted, there = mpiagg.allreduce(x.T, comm=comm, algorithm="ring"), device.from_host(x)
            for source in (there.T, device.from_host(np.repeat(x, 2, axis=1))[:, ::2].T):
                found = mpiagg.allreduce(source, comm=comm, algorithm="ring")
                assert_same(device.to_host(found), wanted, bits)
            out = device.empty(shape, float).T
            assert mpiagg.allreduce(there.T, out=out, comm=comm, algorithm="ring") is out
            assert_same(device.to_host(out), wanted, bits)


# -- memory that all ranks map


@pytest.mark.parametrize("op", OPS)
def test_mapped_vectors_have_the_bits_of_the_host(comms, device, bits, op):
    comm = comms[0]
    for dtype in map(np.dtype, "bqfdF"):
        for length in (2 * LONG, comm.size * 70_000):
            x = irregular(length, comm.rank, dtype)
            try:
                wanted = mpiagg.allreduce(x, op=op, comm=comm, algorithm="shared")
            except TypeError:
                continue
            vector = mapped(device, comm, x)
            found = device.to_host(mpiagg.allreduce(vector, op=op, out=vector, comm=comm))
            if (op, dtype.kind) == ("prod", "c"):
                np.testing.assert_allclose(found, wanted, rtol=1e-4)
            else:
                assert_same(found, wanted, bits)


@pytest.mark.parametrize("collective", ["broadcast", "allgather"])
def test_mapped_vectors_are_moved(comms, device, bits, collective):
    comm = comms[0]
    x = irregular(LONG, comm.rank)
    wanted = getattr(mpiagg, collective)(x, comm=comm)
    vector = mapped(device, comm, x)
    assert_same(device.to_host(getattr(mpiagg, collective)(vector, comm=comm)), wanted, bits)
    if collective == "broadcast":
        assert_same(device.to_host(mpiagg.broadcast(vector, out=vector, comm=comm)), wanted, bits)


@pytest.fixture
def unstaged(comms, device, monkeypatch):
    """A communicator whose messages would be staged, and on which nothing is: what goes to the host is an error."""
    from mpiagg.transport import node_memory

    monkeypatch.setattr(node_memory, "SLOT", 2**16)  # that there are several pieces
    monkeypatch.setattr(device, "pinned", None)
    return comms[0]


@pytest.mark.parametrize("collective", [*COLLECTIVES, "gather", "scatter", "alltoall"])
def test_vectors_of_any_memory_go_by_slots(unstaged, device, bits, collective):
    comm = unstaged
    function, prepare = getattr(mpiagg, collective), getattr(mpiagg, f"{collective}_init")
    for dtype in map(np.dtype, "dfq"):
        x = irregular((comm.size, LONG) if collective in ("scatter", "alltoall") else LONG, comm.rank, dtype)
        wanted = function(x, comm=comm, algorithm="shared")
        there = device.from_host(x)
        for _ in range(2):
            found = function(there, comm=comm)
            assert_same(None if found is None else device.to_host(found), wanted, bits)
        with prepare(there, comm=comm) as plan:
            for _ in range(2):
                found = plan()
                assert_same(None if found is None else device.to_host(found), wanted, bits)
        assert_same(device.to_host(there), x, bits)


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), *checks.BFLOATS])
def test_half_precision_by_slots(unstaged, device, bits, dtype):
    x = irregular(2 * LONG, unstaged.rank, dtype)
    there = device.from_host(x)
    wanted = mpiagg.allreduce(x, op="avg", comm=unstaged, algorithm="shared")
    assert_same(device.to_host(mpiagg.allreduce(there, op="avg", comm=unstaged)), wanted, bits)


def test_vectors_by_slots_again_and_again_and_some_mapped(unstaged, device, bits):
    comm = unstaged
    memory, plain = mapped(device, comm, np.zeros(LONG)), device.empty(LONG, float)
    for step in range(20):
        vector = memory if (comm.rank + step) % 2 else plain
        x = irregular(LONG, (comm.rank, step))
        device.convert(vector, device.from_host(x))
        wanted = mpiagg.allreduce(x, comm=comm, algorithm="shared")
        assert_same(device.to_host(mpiagg.allreduce(vector, out=vector, comm=comm)), wanted, bits)


def test_mapped_vectors_again_and_again_and_parts_of_them(comms, device, bits):
    comm = comms[0]
    vector = mapped(device, comm, np.zeros(5 * LONG, np.float32))
    for step in range(20):
        part = vector[step * 1000 : step * 1000 + 2 * LONG]
        x = irregular(part.size, (comm.rank, step), np.float32)
        device.convert(part, device.from_host(x))
        wanted = mpiagg.allreduce(x, comm=comm, algorithm="shared")
        assert_same(device.to_host(mpiagg.allreduce(part, out=part, comm=comm)), wanted, bits)


def test_where_one_vector_is_not_mapped_there_are_messages(comms, device, bits):
    for comm in comms:
        x = irregular(LONG, comm.rank)
        wanted = mpiagg.allreduce(x, comm=comm, algorithm="direct")
        memory = mapped(device, comm, x)
        for vector in (memory if comm.rank else device.from_host(x), memory):
            device.convert(memory, device.from_host(x))
            assert_same(
                device.to_host(mpiagg.allreduce(vector, out=vector, comm=comm, algorithm="shared")), wanted, bits
            )


def test_mapped_memory_is_given_back_and_used_again(comms, device):
    comm = comms[0]
    for step in range(30):
        vector = mpiagg.empty(2**20, np.float32, comm=comm, device=device.name)
        vector.fill(comm.rank + step)
        mpiagg.allreduce(vector, out=vector, comm=comm)
        assert float(vector[-1].item()) == sum(range(comm.size)) + step * comm.size


# -- streams


@pytest.mark.parametrize("where", ["any memory", "mapped"])
@pytest.mark.parametrize("length", [10, LONG])
def test_what_another_stream_still_computes_is_waited_for(comms, device, barrier, where, length):
    for comm in comms:
        values = np.zeros(length, np.float32)
        x = mapped(device, comm, values) if where == "mapped" else device.from_host(values)
        stream, total = device.stream(), sum(range(comm.size))
        stream.follow()
        with mpiagg.allreduce_init(x, out=x, comm=comm) as plan:
            for step in range(4):
                with stream:
                    if step:  # at first everything is loaded, which waits for the device
                        barrier.close()
                    x.fill(comm.rank + step)
                    plan.start()
                for _ in range(100 if step else 0):
                    assert not plan.test()
                barrier.open()
                plan.wait()
                # In the default stream, which has waited for nothing.
                assert (device.to_host(x) == total + step * comm.size).all()
                barrier.flag[0] = 0
        for step in range(3):
            with stream:
                barrier.close()
                x.fill(comm.rank + step)
                opener = threading.Timer(0.05, barrier.open)
                opener.start()
                mpiagg.allreduce(x, out=x, comm=comm)
            assert (device.to_host(x) == total + step * comm.size).all()
            opener.join()
            barrier.flag[0] = 0


def test_results_can_be_used_in_any_stream_at_once(comms, device):
    for comm in comms:
        total = sum(range(comm.size))
        for length in (10, LONG):
            x, other = device.from_host(np.full(length, comm.rank, np.float32)), device.stream()
            for _ in range(10):
                result = mpiagg.allreduce(x, comm=comm)
                with other:
                    doubled = device.to_host(result + result)
                assert (doubled == 2 * total).all()


def test_plans_take_turns(comms, device):
    for comm in comms:
        vectors = [device.from_host(np.full(length, comm.rank, np.float32)) for length in (10, LONG, 3 * LONG)]
        plans = [mpiagg.allreduce_init(x, out=x, comm=comm) for x in vectors]
        for _ in range(5):
            for x in vectors:
                x.fill(comm.rank)
            for plan in plans:
                plan.start()
            for plan, x in zip(plans[::-1], vectors[::-1], strict=True):
                plan.wait()
                assert (device.to_host(x) == sum(range(comm.size))).all()
        for plan in plans:
            plan.free()


# -- the communicator


def test_the_methods_of_the_communicator(comms, device):
    from mpi4py import MPI

    from mpiagg.transport import channel_of

    for comm in comms:
        rank, size = comm.rank, comm.size
        ours = mpiagg.Comm(comm)
        channel_of(ours).aware = channel_of(comm).aware
        for length in (10, LONG):
            x, y = device.from_host(np.full(length, rank + 1.0)), device.empty(length, float)
            total = size * (size + 1) / 2

            def holds(array, value):
                return (device.to_host(array) == value).all()

            ours.Allreduce(x, y, MPI.SUM)
            assert holds(y, total)
            ours.Allreduce(MPI.IN_PLACE, y, MPI.MAX)
            request = ours.Iallreduce(x, y, MPI.PROD)
            request.Wait()
            assert holds(y, float(np.prod(range(1, size + 1))))
            ours.Reduce(x, y if rank == 0 else None, MPI.SUM)
            assert rank or holds(y, total)
            gathered = device.empty((size, length), float)
            ours.Allgather(x, gathered)
            assert (device.to_host(gathered) == np.arange(1.0, size + 1)[:, None]).all()
            part = device.empty(length, float)
            ours.Reduce_scatter_block(gathered, part, MPI.SUM)
            assert holds(part, size * (rank + 1.0))
            persistent = ours.Allreduce_init(x, y, MPI.SUM)
            for _ in range(2):
                persistent.Start()
                persistent.Wait()
                assert holds(y, total)
            persistent.Free()
            ours.Bcast(x, root=size - 1)
            assert holds(x, float(size))
        ours.Barrier()
        ours.Free()


# -- aggregations

AGGREGATIONS = {
    "AllReduce": lambda comm: mpiagg.AllReduce(comm),  # noqa: PLW0108 - that imports MPI
    "by layer": lambda comm: mpiagg.AllReduce(comm, by_layer=True),
    "divide before": lambda comm: mpiagg.AllReduce(comm, divide_before=True),
    "u8": lambda comm: mpiagg.AllReduce(comm, wire="u8"),
    "bf16": lambda comm: mpiagg.AllReduce(comm, wire="bf16"),
    "ErrorFeedback": lambda comm: mpiagg.ErrorFeedback(mpiagg.AllReduce(comm, wire="u8")),
    "ParameterServer": lambda comm: mpiagg.ParameterServer(comm),  # noqa: PLW0108 - that imports MPI
    "topk": lambda comm: mpiagg.Sparsified(comm, ratio=0.1),
    "randomk": lambda comm: mpiagg.Sparsified(comm, ratio=0.1, selection="randomk"),
    "blockk": lambda comm: mpiagg.Sparsified(comm, ratio=0.1, selection="blockk"),
    "threshold": lambda comm: mpiagg.Sparsified(comm, selection="threshold", threshold=1.0),
    "PowerSGD": lambda comm: mpiagg.PowerSGD(comm, rank=2, start_after=1),
    "PowerSGD, fresh": lambda comm: mpiagg.PowerSGD(comm, reuse_query=False, error_feedback="aggregated"),
    "Decentralized": lambda comm: mpiagg.Decentralized(comm),  # noqa: PLW0108 - that imports MPI
    "one peer": lambda comm: mpiagg.Decentralized(comm, peer_selection="one_peer_exponential"),
    "all": lambda comm: mpiagg.Decentralized(comm, peer_selection="all"),
    "hierarchical": lambda comm: mpiagg.Decentralized(comm, hierarchical=True),
    "LowPrecisionDecentralized": lambda comm: mpiagg.LowPrecisionDecentralized(comm),  # noqa: PLW0108 - that imports MPI
    "NeighborAverage": lambda comm: mpiagg.NeighborAverage(
        comm, neighbors=sorted({(comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size} - {comm.rank})
    ),
    "LocalSGD": lambda comm: mpiagg.LocalSGD(comm, period=2),
}
"""What makes them; their names are looked up late, since that imports MPI."""


def tensors(rank, step):
    """Return the tensors of a rank: short ones, and one that is long enough not to go by the host."""
    random = np.random.default_rng((rank, step))
    singles, others = [(130, 190), (3,), (20, 30), (), (0, 4)], [((2, 3), "f8"), ((50,), "f2")]
    made = [
        random.standard_normal(shape).astype(dtype) for shape, dtype in [*((shape, "f4") for shape in singles), *others]
    ]
    return [*made, *(made[2].astype(dtype) for dtype in checks.BFLOATS)]


def assert_close(device, found, wanted):
    for x, y in zip(found, wanted, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        off = 2e-2 if y.dtype.itemsize == 2 else 1e-4
        np.testing.assert_allclose(device.to_host(x).astype(float), y.astype(float), rtol=off, atol=off)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_every_aggregation_does_what_it_does_on_the_host(comms, device, name):
    for comm in comms:
        with AGGREGATIONS[name](comm) as on_host, AGGREGATIONS[name](comm) as on_device:
            for step in range(3):
                host = tensors(comm.rank, step)
                here = [device.from_host(x) for x in host]
                on_host.aggregate(host)
                on_device.aggregate(here)
                assert_close(device, here, host)
            on_device.load_state_dict(on_device.state_dict())
            host = tensors(comm.rank, 4)
            here = [device.from_host(x) for x in host]
            with on_device.aggregate_init(here) as plan:
                plan()
            assert all(np.isfinite(device.to_host(x).astype(float)).all() for x in here)
