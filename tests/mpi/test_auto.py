"""What ``"auto"`` takes: the MPI library's own collective where that breaks no promise, our algorithms elsewhere."""

from array import array
from contextlib import contextmanager
from weakref import ref

import numpy as np
import pytest
from mpi4py import MPI
from restated import result, same_bits, values

import mpiagg
from mpiagg.collectives.methods import ALLREDUCE
from mpiagg.transport import channel_of, process
from mpiagg.watch.recorder import SUBJECT

pytestmark = pytest.mark.mpi

LENGTHS = (1, 60, 3000, 30_000, 300_000)
KINDS = ("plain", "registered", "registered on one rank")


@pytest.fixture(params=[False, True], ids=["auto", "reproducible"])
def ours(request):
    comm = mpiagg.Comm(MPI.COMM_WORLD, reproducible=request.param)
    yield comm
    comm.Free()


def arrays(comm, kind):
    """Return what makes arrays for a communicator; collective."""

    def make(length, dtype=np.float32):
        registered = None if kind == "plain" else mpiagg.empty(length, dtype, comm=comm)
        one = kind == "registered on one rank" and comm.rank > 0
        return np.empty(length, dtype) if registered is None or one else registered

    return make


def last():
    """Return the last operation in words."""
    return process().recorder.entries[-1][SUBJECT].what


@pytest.mark.parametrize("kind", KINDS)
def test_every_collective_gives_what_it_must(ours, rank, size, kind):
    make = arrays(ours, kind)
    for length in LENGTHS:
        everyone = [np.round(values(other, length) * 4).astype("f4") for other in range(size)]
        x, out = make(length), make(length)
        for turn in range(3):
            x[:], out[:] = everyone[rank], turn
            ours.Allreduce(x, out)
            assert np.array_equal(out, np.sum(everyone, axis=0))
            assert np.array_equal(x, everyone[rank])
            ours.Allreduce(MPI.IN_PLACE, x)
            assert np.array_equal(x, out)
            x[:] = everyone[rank]
            ours.Reduce(x, out if rank == size - 1 else None, MPI.MAX, size - 1)
            assert rank < size - 1 or np.array_equal(out, np.max(everyone, axis=0))
            mean = mpiagg.reduce(x, "avg", comm=ours)
            assert np.allclose(mean, np.mean(everyone, axis=0)) if rank == 0 else mean is None
            ours.Reduce(MPI.IN_PLACE if rank == 0 else x, x if rank == 0 else None)
            assert rank or np.array_equal(x, np.sum(everyone, axis=0))
            x[:] = everyone[rank]
            ours.Bcast(x, size - 1)
            assert np.array_equal(x, everyone[-1])
            given = mpiagg.broadcast(everyone[rank], root=0, out=out, comm=ours)
            assert given is out
            assert np.array_equal(out, everyone[0])


@pytest.mark.parametrize("kind", KINDS)
def test_every_collective_of_chunks_gives_what_it_must(ours, rank, size, kind):
    make = arrays(ours, kind)
    for length in LENGTHS:
        chunks = [np.round(values(other, length * size) * 4).astype("f4") for other in range(size)]
        total, cut = np.sum(chunks, axis=0), slice(rank * length, (rank + 1) * length)
        x, out = make(length * size), make(length)
        for _ in range(3):
            x[:] = chunks[rank]
            ours.Reduce_scatter_block(x, out)
            assert np.array_equal(out, total[cut])
            assert np.array_equal(x, chunks[rank])
            mpiagg.reduce_scatter(x, out=x[cut], comm=ours)  # where it lies
            assert np.array_equal(x[cut], total[cut])
            x[:] = chunks[rank]
            mpiagg.reduce_scatter(x, out=x[:length], comm=ours)  # which others read, on all ranks but one
            assert np.array_equal(x[:length], total[cut])
            out[:] = chunks[rank][:length]
            ours.Allgather(out, x)
            assert np.array_equal(x, np.concatenate([chunk[:length] for chunk in chunks]))
            x[:] = 0
            x[cut] = rank
            ours.Allgather(MPI.IN_PLACE, x)
            assert np.array_equal(x, np.repeat(np.arange(size), length))
            x[:length] = rank
            mpiagg.allgather(x[:length], out=x.reshape(size, length), comm=ours)  # which the others write to
            assert np.array_equal(x, np.repeat(np.arange(size), length))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("collective", ["allreduce", "reduce", "broadcast", "allgather", "reduce_scatter"])
def test_reproducible_calls_have_the_bits_of_the_schedule(rank, size, kind, collective):
    comm = mpiagg.Comm(MPI.COMM_WORLD, reproducible=True)
    make = arrays(comm, kind)
    for length in (5, 3000, 50_000):
        vectors = [values(other, length * (size if "scatter" in collective else 1)) for other in range(size)]
        x = make(vectors[rank].size)
        x[:] = vectors[rank]
        got = getattr(mpiagg, collective)(x, comm=comm, algorithm="shared")
        again = getattr(mpiagg, collective)(x, comm=comm)
        if got is not None and length > 1000:
            assert "by shared" in last() or size == 1
        assert (got is None) == (again is None)
        assert got is None or collective != "allreduce" or same_bits(got, result("allreduce", vectors, rank)[1])
    comm.Free()


def test_sums_of_floating_point_numbers_are_ours_in_any_case(ours, size):
    for dtype in "fdFD":
        x = np.ones(10, dtype)
        ours.Allreduce(MPI.IN_PLACE, x)
        assert x[0] == size
        assert "native" not in last()
        mpiagg.allreduce(x, "sum", out=x, comm=ours)
        assert "native" not in last()


def test_what_does_not_depend_on_the_order_may_be_the_librarys_own(ours):
    wanted = not channel_of(ours).reproducible
    slower = MPI.get_vendor()[0] == "MPICH"  # whose own takes longer than ours where values are combined
    x = np.ones(10, int)
    for combines, call in (
        (True, lambda: ours.Allreduce(MPI.IN_PLACE, x)),
        (False, lambda: ours.Bcast(x)),
        (True, lambda: mpiagg.allreduce(x, "max", comm=ours)),
        (True, lambda: mpiagg.reduce(np.ones(10), comm=ours)),
    ):
        call()
        assert ("native" in last()) == (wanted and not (combines and slower))
    mpiagg.reduce(np.ones(10), "min", comm=ours)  # which are NumPy's, with NaN among them
    assert "native" not in last()
    mpiagg.allreduce(x, comm=ours, reproducible=True)
    assert "native" not in last()


def test_halves_are_combined_in_float32_in_any_case(ours, size):
    x = np.full(3, 2048 if size > 1 else 1, np.float16)
    got = mpiagg.reduce_scatter(np.tile(x, size), comm=ours)
    assert (got == 2048 * size).all() if size > 1 else (got == 1).all()
    assert "native" not in last()


def test_a_rank_without_elements_of_its_own(ours, rank, size):
    # The last ranks get nothing, and what they get lies where their input begins.
    x = np.full((1, 3), rank + 1.0)
    total = sum(range(1, size + 1))
    for _ in range(2):
        got = mpiagg.reduce_scatter(x, comm=ours)
        assert got.tolist() == ([[total] * 3] if rank == 0 else [])
        buffer = np.full((1, 3), rank + 1.0)
        mpiagg.reduce_scatter(buffer, out=buffer[: len(got)], comm=ours)
        assert rank or (buffer == total).all()
        nothing = np.empty((0, 3))
        assert mpiagg.allgather(nothing, comm=ours).shape == (size, 0, 3)
        assert mpiagg.allreduce(nothing, out=nothing[:], comm=ours).size == 0
        mpiagg.reduce(nothing.astype(int), "max", comm=ours)


def test_a_shape_that_changes_is_another_call(ours, rank, size):
    x, out = np.full(12, rank, np.float32), np.empty(12, np.float32)
    for shape in ((12,), (3, 4), (2, 6), (12,)):
        x.shape = out.shape = shape
        assert mpiagg.allreduce(x, out=out, comm=ours) is out
        assert (out == sum(range(size))).all()
        assert mpiagg.allgather(x, comm=ours).shape == (size, *shape)
    x.shape = out.shape = 12
    out.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        mpiagg.allreduce(x, out=out, comm=ours)
    with pytest.raises((ValueError, BufferError)):
        ours.Allreduce(x, out)
    out.flags.writeable = True
    ours.Allreduce(x, out)
    assert (out == sum(range(size))).all()


def test_an_array_that_was_moved_is_found_where_it_is(ours, rank, size):
    x = np.full(50_000, float(rank))
    for length in (50_000, 60_000, 50_000):
        x.resize(length, refcheck=False)
        x[:] = rank
        ours.Allreduce(MPI.IN_PLACE, x)
        assert (x == sum(range(size))).all()


def apart_on(strided, length, value):
    """Return an array that is contiguous, or every other element of one, where that is asked for."""
    x = np.full(2 * length if strided else length, value, np.float32)
    return x[::2] if strided else x


@pytest.mark.parametrize("length", [3_000, 40_000, 400_000])
def test_ranks_may_differ_in_layout_before_and_after_memory_is_shared(ours, rank, size, length):
    # What was made for a strided array on one rank must not know of a world without registered memory.
    kept = []
    for turn in range(3):
        for strided in (rank == 0, rank == size - 1):
            x, out = apart_on(strided, length, rank + turn), apart_on(strided, length, -1)
            mpiagg.allreduce(x, out=out, comm=ours)
            assert (out == sum(range(size)) + turn * size).all()
            assert (mpiagg.allgather(x, comm=ours) == np.arange(turn, turn + size)[:, None]).all()
            given = mpiagg.broadcast(x, root=size - 1, out=out, comm=ours)
            assert (given == size - 1 + turn).all()
            got = mpiagg.reduce(x, comm=ours)
            assert got is None or (got == sum(range(size)) + turn * size).all()
            with mpiagg.AllReduce(ours, op="sum") as aggregation:
                aggregation.aggregate([x])
                assert (x == sum(range(size)) + turn * size).all()
        kept.append(mpiagg.empty(length, comm=ours))


def test_a_root_whose_result_is_not_contiguous(ours, rank):
    x = mpiagg.empty(20_000, comm=ours)
    x[:] = rank
    target = np.zeros(40_000, np.float32)[::2] if rank == 0 else mpiagg.empty(20_000, comm=ours)
    if rank == 0:
        mpiagg.empty(20_000, comm=ours)
    target[:] = -1
    with mpiagg.broadcast_init(x, out=target, comm=ours) as plan:
        for turn in range(2):
            x[:] = rank + turn
            plan()
            assert (target == turn).all()


def test_a_bad_argument_is_told_before_anything_is_made_together(rank, size):
    with mpiagg_comm() as comm:
        out = np.empty(8)
        out.flags.writeable = rank != size - 1
        with pytest.raises(ValueError if rank == size - 1 else mpiagg.MismatchError, match="read-only"):
            mpiagg.allreduce(np.ones(8), out=out, comm=comm, check=True, timeout=10)
        assert mpiagg.allreduce(np.ones(8), comm=comm, check=True)[0] == size


@pytest.mark.parametrize("way", ["method", "function"])
def test_ranks_that_call_the_mpi_library_with_other_roots_are_told(rank, size, way):
    if size not in {2, 3}:  # in larger trees a rank may wait in MPI for one that has raised, and cannot leave
        return
    comm = mpiagg.Comm(MPI.COMM_WORLD)  # never freed: messages of it stay under way
    x = np.full(9, rank, np.int16)

    def broadcast(root):
        comm.Bcast(x, root) if way == "method" else mpiagg.broadcast(x, root=root, out=x, comm=comm)
        assert last().startswith("broadcast by native")

    for _ in range(100):
        broadcast(0)
        broadcast(size - 1)

    def disagree():
        broadcast(1 if rank == 1 else 0)
        comm.Allreduce(MPI.IN_PLACE, np.ones(3))  # where who had passed already is told

    with pytest.raises(mpiagg.MismatchError, match=r"operation \d+: .*broadcast by native .*root [01]; .*root [01]$"):
        disagree()


def test_ranks_that_describe_the_same_data_in_other_ways_agree(rank, size):
    with mpiagg_comm() as comm:
        pairs = MPI.INT32_T.Create_contiguous(2).Commit()
        vectors = MPI.INT32_T.Create_vector(4, 1, 2).Create_resized(0, 32).Commit()
        x = np.arange(8, dtype=np.int32) if rank == 0 else np.zeros(8, np.int32)
        given = [[x, 8, MPI.INT32_T], [x, 4, pairs]][rank % 2]
        for _ in range(3):
            comm.Bcast(given)
            assert x.tolist() == list(range(8))
        for repeats in (1, 2000, 20_000):
            everyone, x = np.zeros((size, repeats, 4), np.int32), np.tile(x[:8], repeats)
            for _ in range(3):
                comm.Allgather([x, repeats, vectors] if rank == size - 1 else x[::2].copy(), everyone)
                assert (everyone == [0, 2, 4, 6]).all()
        comm.Barrier()
        pairs.Free()
        vectors.Free()


def test_what_is_started_between_calls_on_some_ranks_alone_is_no_disagreement(rank, size):
    with mpiagg_comm() as comm:
        x, short, long = np.ones(3000), np.arange(4), np.arange(5)
        plan = mpiagg.allreduce_init(x, comm=comm)
        for turn in range(100):
            if rank % 2 == 0:
                plan.start()
            comm.Bcast(short)
            if turn % 3 == rank % 3:
                short[:] = np.arange(4)  # so that ranks come at other times
            comm.Bcast(long)
            assert comm.allreduce(1) == size
            if rank % 2:
                assert plan()[0] == size
            else:
                assert plan.wait()[0] == size
        plan.free()


def test_calls_that_are_copied_on_one_rank_alone_agree(rank, size):
    with mpiagg_comm() as comm:
        whole, room = np.arange(60_000, dtype=np.int64), np.zeros((60_000, 2), np.int64)
        for _ in range(20):
            for length in (3, 60_000):
                x = room[:length, 0] if rank == size - 1 else np.zeros(length, np.int64)
                x[:] = whole[:length]
                mpiagg.broadcast(x, out=x, comm=comm)
                mpiagg.allreduce(x, out=x, comm=comm)
                assert (x == size * whole[:length]).all()
                comm.Barrier()
        keep = mpiagg.empty(5, comm=comm)  # from now on calls ask where arrays lie
        for _ in range(20):
            for length in (3, 60_000):
                x = room[:length, 0] if rank == 0 else np.zeros(length, np.int64)
                x[:] = whole[:length]
                mpiagg.broadcast(x, out=x, comm=comm)
                comm.Bcast(np.zeros(7))
                mpiagg.allreduce(x, out=x, comm=comm)
                assert (x == size * whole[:length]).all()
        del keep


@contextmanager
def mpiagg_comm():
    comm = mpiagg.Comm(MPI.COMM_WORLD)
    yield comm
    comm.Free()


def test_words_and_numbers_of_other_classes_are_as_good(ours, size):
    x = np.ones(5)
    for op in (np.str_("sum"), "sum", MPI.SUM):
        assert mpiagg.allreduce(x, op, comm=ours)[0] == size
    for _ in range(2):
        assert mpiagg.broadcast(x, root=np.int64(0), lanes=np.int64(1), algorithm="ring", comm=ours)[0] == 1


def test_calls_that_cannot_be_found_again_leave_nothing_open(ours, size):
    class Odd:
        """Numbers that speak DLPack alone."""

        def __init__(self, values):
            self.values = values

        def __dlpack__(self, **how):
            return self.values.__dlpack__(**how)

        def __dlpack_device__(self):
            return self.values.__dlpack_device__()

    total = np.empty(5)
    opened = []
    for _ in range(4):
        for given in (array("d", [1.0] * 5), np.ones(5).view(np.matrix), memoryview(np.ones(5)), Odd(np.ones(5))):
            ours.Allreduce(given, total)
            assert (total == size).all()
        opened.append(len(channel_of(ours).open))
    assert opened[-1] == opened[0]


def test_subclasses_that_own_their_memory_are_told_from_views(ours, size):
    class Mine(np.ndarray):
        pass

    out = np.ones(5, int)
    own = np.ndarray.__new__(Mine, 5, int)
    own[:] = 1
    for _ in range(2):
        mpiagg.allreduce(own, out=out, comm=ours)
        out[:] = 1
        mpiagg.allreduce(out.view(Mine), out=out, comm=ours)
        assert (out == size).all()


def test_a_call_does_not_keep_the_callers_arrays(ours):
    whole = np.ones(100)
    seen = ref(whole)
    part, out = whole[:10], np.empty(10)
    ours.Allreduce(part, out)
    mpiagg.allreduce(part, comm=ours)
    del part, whole
    assert seen() is None


def test_messages_go_on_while_a_rank_waits_at_a_barrier(ours, rank, size):
    words = np.zeros(1_000_000)
    if rank == 0:
        requests = [ours.Isend(words, other) for other in range(1, size)]
    else:
        ours.Recv(words, 0)
    ours.Barrier()
    if rank == 0:
        MPI.Request.Waitall(requests)


def test_two_equal_dtypes_of_two_codes_meet(ours, rank, size):
    # C's long and long long are both int64 here, and memory views tell them apart.
    for code in "lqlq":
        x = np.full(4, rank, code).astype(code)
        mpiagg.allreduce(x, out=x, comm=ours, algorithm="shared")
        assert (x == sum(range(size))).all()
        out = np.empty(4, "q" if code == "l" else "l")
        mpiagg.allreduce(np.full(4, rank, code), out=out, comm=ours)
        assert (out == sum(range(size))).all()


def test_a_key_says_all_that_a_call_depends_on():
    x, y = np.zeros((2, 3)), np.zeros((2, 3))
    keys = {
        ALLREDUCE.key((None, MPI.IN_PLACE, x, MPI.SUM)),
        ALLREDUCE.key((None, y, x, MPI.SUM)),
        ALLREDUCE.key((None, y, x, MPI.MAX)),
        ALLREDUCE.key((None, y.T, x, MPI.SUM)),
        ALLREDUCE.key((None, y[:, :2].copy(), x, MPI.SUM)),
        ALLREDUCE.key((None, y.astype("f4"), x, MPI.SUM)),
        ALLREDUCE.key((None, [y, MPI.DOUBLE], x, MPI.SUM)),
        ALLREDUCE.key((None, [y, 6, MPI.DOUBLE], x, MPI.SUM)),
        ALLREDUCE.key((None, [y, 3, MPI.DOUBLE], x, MPI.SUM)),
    }
    assert len(keys) == 9
    assert ALLREDUCE.key((None, bytearray(8), x, MPI.SUM)) != ALLREDUCE.key((None, bytes(8), x, MPI.SUM))
    for unknown in ("text", object()):
        with pytest.raises((TypeError, AttributeError)):
            ALLREDUCE.key((None, unknown, x, MPI.SUM))


def test_ranks_that_do_not_agree_on_reproducible_are_told(rank, size):
    if size > 1:
        with pytest.raises(mpiagg.MismatchError, match="reproducible"):
            mpiagg.Comm(MPI.COMM_WORLD, reproducible=rank == 0)
    with pytest.raises(ValueError, match="reproducible"):
        mpiagg.Comm(MPI.COMM_WORLD, reproducible=1)
    with pytest.raises(ValueError, match="reproducible"):
        mpiagg.allreduce(np.ones(3), reproducible="yes")


def test_aggregations_are_reproducible_in_any_case(rank, size):
    vectors = [values(other, 3000) for other in range(size)]
    for asked in (None, True, False):
        with mpiagg.AllReduce(op="sum", reproducible=asked) as aggregation:
            x = vectors[rank].copy()
            aggregation.aggregate([x])
            assert same_bits(x, result("allreduce", vectors, rank)[1])
    for refused in ({"algorithm": "native"}, {"backend": print}):
        with pytest.raises(ValueError, match="reproducible=True keeps to our algorithms"):
            mpiagg.AllReduce(reproducible=True, **refused)
    with pytest.raises(ValueError, match="reproducible must be"):
        mpiagg.AllReduce(reproducible="yes")


def test_communicators_made_from_a_reproducible_one_are_reproducible(rank):
    with_it = mpiagg.Comm(MPI.COMM_WORLD, reproducible=True)
    for made in (with_it.Dup(), with_it.Split(rank % 2, rank)):
        assert channel_of(made).reproducible
        made.Free()
    with_it.Free()
