"""Calls of a communicator that are like one before: they take their own arrays, and what their datatypes are."""

import threading

import numpy as np
import pytest
from mpi4py import MPI

import mpiagg
from mpiagg.collectives import forms, packed
from mpiagg.errors import MismatchError, PlanError
from mpiagg.transport import kept

pytestmark = pytest.mark.mpi

SIZE, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
ROOT = SIZE - 1
TURNS = 4


@pytest.fixture(params=["auto", "reproducible", "nodes"])
def comm(request, monkeypatch):
    """A communicator by the tables, one that takes our own algorithms, and one with a node for each rank."""
    if request.param == "nodes":
        monkeypatch.setenv("MPIAGG_NODES", ",".join(["1"] * SIZE))
    comm = mpiagg.Comm(MPI.COMM_WORLD, reproducible=request.param == "reproducible")
    yield comm
    comm.Free()


def columns(length, width):
    """Return a datatype of one column of a matrix, whose next element is the next column."""
    return MPI.DOUBLE.Create_vector(length, 1, width).Create_resized(0, 8).Commit()


def test_other_shapes_and_orders_are_other_calls(comm):
    for x in (np.arange(6.0), np.arange(6.0).reshape(2, 3), np.asfortranarray(np.arange(6.0).reshape(2, 3))):
        for out in (np.zeros(6), np.zeros((3, 2)), np.zeros((3, 2), order="F")):
            comm.Allreduce(x, out)
            assert out.ravel("K").tolist() == (SIZE * x.ravel("K")).tolist()


@pytest.mark.parametrize("length", [3, 3000])
def test_columns_are_those_of_the_arrays_of_the_call(comm, length):
    column, made = columns(length, SIZE + 1), []
    for turn in range(TURNS):
        matrix, own = np.full((length, SIZE + 1), -1.0), np.full(length, RANK + 10.0 * turn)
        wanted = np.arange(SIZE) + 10.0 * turn
        comm.Gather(own, [matrix, 1, column] if RANK == ROOT else None, ROOT)
        assert RANK != ROOT or np.array_equal(matrix, np.tile([*wanted, -1], (length, 1)))
        comm.Allgather(own, [matrix, 1, column])
        assert np.array_equal(matrix, np.tile([*wanted, -1], (length, 1)))
        other = np.full((length, SIZE + 1), -1.0)
        comm.Alltoall([matrix, 1, column], [other, 1, column])
        assert np.array_equal(other, np.tile([*np.full(SIZE, RANK + 10.0 * turn), -1], (length, 1)))
        comm.Scatter([matrix, 1, column] if RANK == ROOT else None, own, ROOT)
        assert np.all(own == RANK + 10.0 * turn)
        comm.Bcast([matrix, 1, column] if RANK == ROOT else own, ROOT)
        assert np.all((matrix[:, 0] if RANK == ROOT else own) == 10.0 * turn)
        apart = np.full(SIZE * (length + 1), -1.0)
        blocks = [apart, ([length] * SIZE, [rank * (length + 1) for rank in range(SIZE)])]
        comm.Allgatherv(np.full(length, RANK + 10.0 * turn), blocks)
        assert np.array_equal(apart.reshape(SIZE, -1), np.array([[*[value] * length, -1] for value in wanted]))
        made += [matrix, other, own, apart]
    column.Free()


def test_a_datatype_may_have_the_handle_of_one_that_was_freed(comm):
    """In turn a structure, which is for the MPI library on all ranks, and a column, that the root alone has."""
    for turn in range(2 * TURNS):
        x = np.full(12, -1.0)
        if turn % 2 == 0:
            datatype = MPI.Datatype.Create_struct([2, 2], [0, 16], [MPI.DOUBLE, MPI.INT64_T]).Commit()
            written, given = slice(4), [x, 1, datatype]
        else:
            datatype = MPI.DOUBLE.Create_vector(4, 1, 2).Commit()
            written, given = (slice(0, 8, 2), [x, 1, datatype]) if RANK == ROOT else (slice(4), [x, 4])
        if RANK == ROOT:
            x[written] = turn
        comm.Bcast(given, ROOT)
        datatype.Free()
        assert np.all(x[written] == turn)
        assert np.count_nonzero(x == -1) == 8


def test_what_was_refused_is_not_kept(comm):
    """A datatype that is committed later, counts that are no integers, and nothing at all."""
    column = MPI.DOUBLE.Create_vector(3, 1, 2)
    x, out = np.arange(6.0) + RANK, np.zeros(3 * SIZE)
    with pytest.raises(MPI.Exception):
        comm.Allgather([x, 1, column], out)
    column.Commit()
    for _ in range(2):
        comm.Allgather([x, 1, column], out)
        assert np.array_equal(out.reshape(SIZE, 3), np.arange(0.0, 6, 2) + np.arange(SIZE)[:, None])
        out[:] = 0
    column.Free()
    counts = [1000] * SIZE
    given, own = np.ones(1000 * SIZE), np.zeros(1000)
    for turn in range(2):
        if RANK == 0:
            with pytest.raises(TypeError):
                comm.Ireduce_scatter(given, own, [1000.0] * SIZE)
        comm.Ireduce_scatter(given, own, counts).Wait()
        comm.Reduce_scatter(given, own, counts)
        assert np.all(own == SIZE)
        with pytest.raises(TypeError):
            comm.Reduce_scatter(given, own, [1000.0] * SIZE)
        with pytest.raises(ValueError, match="expecting 2 to 4 items"):
            comm.Bcast([] if turn else ())


def test_an_operator_may_have_the_handle_of_one_that_was_freed(comm):
    for turn in range(TURNS):
        better = (np.maximum, np.minimum)[turn % 2]

        def combine(left, right, datatype, better=better):
            del datatype
            mine, theirs = np.frombuffer(left, "i8"), np.frombuffer(right, "i8")
            better(mine, theirs, out=theirs)

        op = MPI.Op.Create(combine, commute=True)
        out = np.empty(2, np.int64)
        for _ in range(2):
            comm.Allreduce(np.array([RANK, -RANK]), out, op)
            assert out.tolist() == ([ROOT, 0] if turn % 2 == 0 else [0, -ROOT])
        op.Free()


@pytest.mark.parametrize("gap", [0, 2])
@pytest.mark.parametrize("dtype", ["f4", "f2", "g"])
def test_blocks_lie_where_the_call_has_them(comm, gap, dtype):
    """Gatherv, Scatterv and Alltoallv, whose lengths and places change."""
    for turn in range(TURNS):
        counts = [1 + (turn + rank) % 3 for rank in range(SIZE)]
        starts = [sum(counts[:rank]) + gap * rank for rank in range(SIZE)]
        length, blocks = starts[-1] + counts[-1], (counts, starts)
        own, whole = np.full(counts[RANK], RANK, dtype), np.full(length, -1, dtype)
        code = {"f4": MPI.FLOAT, "g": MPI.LONG_DOUBLE, "f2": MPI.INT16_T}[dtype]
        if dtype == "f2":  # which not every MPI library has
            own, whole = own.astype("i2"), whole.astype("i2")
        comm.Gatherv([own, code], [whole, blocks, code] if RANK == ROOT else None, ROOT)
        if RANK == ROOT:
            assert [whole[start] for start in starts] == list(range(SIZE))
            assert np.count_nonzero(whole == -1) == gap * (SIZE - 1)
        comm.Scatterv([whole, blocks, code] if RANK == ROOT else None, [own, code], ROOT)
        assert np.all(own == RANK)
        sent = np.full(length, RANK, own.dtype)
        received = np.full(SIZE * (counts[RANK] + gap), -1, own.dtype)
        places = [rank * (counts[RANK] + gap) for rank in range(SIZE)]
        comm.Alltoallv([sent, blocks, code], [received, ([counts[RANK]] * SIZE, places), code])
        assert [received[place] for place in places] == list(range(SIZE))
        assert np.count_nonzero(received == -1) == gap * SIZE


@pytest.mark.parametrize("most", [1, 2])
def test_calls_that_were_forgotten_are_made_anew(comm, monkeypatch, most):
    """With room for one, a call on copies is forgotten while it runs."""
    monkeypatch.setattr(kept, "MOST", most)
    types = [columns(length, 2) for length in (3, 5, 7)]
    for turn in range(TURNS):
        for length, column in zip((3, 5, 7), types, strict=True):
            x = np.full((length, 2), float(turn if RANK == ROOT else -1))
            comm.Bcast([x, 1, column], ROOT)
            assert np.all(x[:, 0] == turn)
            assert len(comm._channel.calls) <= most
    for column in types:
        column.Free()


def test_duplicates_of_datatypes_are_freed_with_the_communicator(monkeypatch):
    monkeypatch.setenv("MPIAGG_NODES", ",".join(["1"] * SIZE))
    comm, column, made = mpiagg.Comm(MPI.COMM_WORLD, reproducible=True), columns(3, 2), []
    free = packed.Packed.free
    monkeypatch.setattr(packed.Packed, "free", lambda copied: (made.append(copied), free(copied)))
    for _ in range(2):
        comm.Bcast([np.zeros((3, 2)), 1, column], ROOT)
    assert not made
    comm.Free()
    assert all(part.datatype == MPI.DATATYPE_NULL for copied in made for part in (*copied.before, *copied.after))
    assert len(made) == 1
    column.Free()


def test_two_threads_do_not_share_a_copy(monkeypatch):
    """The second is refused while the first copies; all ranks go on then."""
    monkeypatch.setenv("MPIAGG_NODES", ",".join(["1"] * SIZE))
    comm, column = mpiagg.Comm(MPI.COMM_WORLD, reproducible=True), columns(3, 2)
    inside, refused, errors = threading.Event(), threading.Event(), []

    class Held:
        """Lets the other thread try while one copies."""

        def Sendrecv(self, *arguments):
            inside.set()
            assert refused.wait(50)
            MPI.COMM_SELF.Sendrecv(*arguments)

    x = np.full((3, 2), float(RANK))
    comm.Bcast([x, 1, column], ROOT)
    monkeypatch.setattr(packed, "_itself", Held)

    def use():
        y = np.full((3, 2), float(RANK))
        comm.Bcast([y, 1, column], ROOT)
        if not np.all(y[:, 0] == ROOT):
            errors.append(y)

    thread = threading.Thread(target=use)
    thread.start()
    assert inside.wait(50)
    with pytest.raises(PlanError, match="thread"):
        comm.Bcast([x, 1, column], ROOT)
    refused.set()
    thread.join(50)
    assert not thread.is_alive()
    assert not errors
    column.Free()
    comm.Free()


@pytest.mark.parametrize("code", ["d", "g", "G"])
def test_elements_of_an_array_in_fortrans_order_may_lie_apart(code):
    """NumPy knows these numbers, and of two of them DLPack knows nothing."""
    comm = mpiagg.Comm(MPI.COMM_WORLD, reproducible=True)
    number = MPI.Datatype.fromcode(code)
    apart = number.Create_resized(0, 2 * number.extent).Commit()
    x, out = np.ones((2, 6), code).T, np.zeros(6, code)
    comm.Bcast([x, 6, apart] if RANK == 0 else out, 0)
    assert RANK == 0 or (out == 1).all()
    apart.Free()
    comm.Free()


def test_calls_for_the_mpi_library_are_compared_each_time(monkeypatch):
    monkeypatch.setattr(forms, "CHECK", True)
    comm = mpiagg.Comm(MPI.COMM_WORLD)
    pairs = np.zeros(2, np.dtype("i4,f8", align=True))
    kind = MPI.Datatype.Create_struct([1, 1], [0, 8], [MPI.INT, MPI.DOUBLE]).Commit()
    op = MPI.Op.Create(lambda *_: None)
    x, out = np.zeros((2, 3))
    for _ in range(2):
        comm.Bcast([pairs, 2, kind])
        comm.Allreduce(x, out, op)
    if SIZE > 1:
        with pytest.raises(MismatchError):
            comm.Allreduce(x, out, op) if RANK else comm.Bcast([pairs, 2, kind])
    kind.Free()
    op.Free()
    comm.Free()


def unaligned(values, *, here):
    """Return the bytes of integers of four bytes, on one rank at an odd address."""
    room = np.zeros(values.nbytes + 1, np.uint8)
    lies = room[1:] if here else room[: values.nbytes]
    lies[:] = values.view(np.uint8)
    return lies


VERBS = [
    "Allreduce",
    "Reduce",
    "Scan",
    "Exscan",
    "Reduce_scatter_block",
    "Bcast",
    "Gather",
    "Scatter",
    "Allgather",
    "Alltoall",
    "Reduce_scatter",
    "Allgatherv",
    "Gatherv",
    "Scatterv",
    "Alltoallv",
]


def called(comm, verb, form, given):
    """Carry a collective out in one of its forms."""
    if form == "blocking":
        getattr(comm, verb)(*given)
    elif form == "nonblocking":
        getattr(comm, f"I{verb.lower()}")(*given).Wait()
    else:
        request = getattr(comm, f"{verb}_init")(*given)
        request.Start()
        request.Wait()
        request.Free()


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("form", ["blocking", "nonblocking", "persistent"])
@pytest.mark.parametrize("length", [1, 3000, 70_000])
def test_one_ranks_array_may_lie_at_an_odd_address(comm, verb, form, length):
    values = np.arange(SIZE * length, dtype=np.int32) + RANK
    results = []
    for which, odd, how in ((MPI.COMM_WORLD, None, "blocking"), (comm, ROOT, form)):
        x, out = (unaligned(each, here=odd == RANK) for each in (values, np.full_like(values, -1)))
        sent, received = ([each[: length * 4], MPI.INT] for each in (x, out))
        if verb.startswith(("Scatter", "Alltoall", "Reduce_scatter")):
            sent = [x, MPI.INT]
        if verb.startswith(("Gather", "Allgather", "Alltoall")):
            received = [out, MPI.INT]
        counts = ([length] * SIZE,) if verb == "Reduce_scatter" else ()
        called(which, verb, how, (sent,) if verb == "Bcast" else (sent, received, *counts))
        if RANK or verb != "Exscan":  # what rank 0 has after an exclusive scan is not defined
            results.append((x.tobytes(), out.tobytes()))
    assert not results or results[0] == results[1]


def test_ranks_may_name_bytes_in_different_ways(comm):
    ways = [
        lambda x: x,
        lambda x: [x, MPI.UNSIGNED_CHAR],
        lambda x: [x, "B"],
        lambda x: [x, x.size],
        memoryview,
    ]
    for turn in range(len(ways)):
        sent, received = (ways[(RANK * each + turn) % len(ways)] for each in (1, 2))
        x, out = np.full(5, RANK + 1, np.uint8), np.zeros(5, np.uint8)
        comm.Allreduce(sent(x), received(out), op=MPI.MAX)
        assert out.tolist() == [SIZE] * 5
        comm.Scan(sent(x), received(out))
        assert out.tolist() == [(RANK + 1) * (RANK + 2) // 2] * 5
