"""Gather, scatter, all-to-all and scans of a communicator, in all their forms, beside mpi4py's own."""

import threading
import time
from array import array

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import mpiagg
from mpiagg.collectives import packed
from mpiagg.transport import channel_of

pytestmark = pytest.mark.mpi

FORMS = ["now", "start", "init"]
LENGTHS = [0, 1, 5, 4000] if MPI.COMM_WORLD.size <= 4 else [0, 5]  # ranks that outnumber the cores take long


@pytest.fixture(params=[False, True], ids=["auto", "reproducible"])
def ours(world, request):
    comm = mpiagg.Comm(world, reproducible=request.param)
    yield comm
    comm.Free()


def call(comm, form, name, *arguments, times=2):
    """Make a call in one of its forms, twice or so many times."""
    for _ in range(times):
        if form == "now":
            assert getattr(comm, name)(*arguments) is None
        elif form == "start":
            getattr(comm, f"I{name.lower()}")(*arguments).Wait()
    if form == "init":
        request = getattr(comm, f"{name}_init")(*arguments)
        for _ in range(times):
            request.Start()
            request.Wait()
        request.Free()


def numbers(size, length, dtype="float64"):
    return np.random.default_rng(length).integers(-9, 9, (size, size, length)).astype(dtype)


def both(ours, world, form, name, make, *more):
    """Return the output of a call of ours and of mpi4py's; ``make`` returns its buffers and the array of the output."""
    found = []
    for comm in (ours, world):
        *buffers, out = make()
        if comm is ours:
            call(comm, form, name, *buffers, *more)
        else:
            getattr(comm, name)(*buffers, *more)
        found.append(out)
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float64", "int32", "uint8"])
def test_alltoall(ours, world, rank, size, form, dtype):  # noqa: PLR0917 - fixtures and parameters
    for length in LENGTHS:
        rows = numbers(size, length, dtype)

        def apart(rows=rows):
            out = np.full_like(rows[rank], 77)
            return rows[rank].copy(), out, out

        def typed(rows=rows):
            out = np.full(rows[rank].size + 1, 77, rows.dtype)
            kind = MPI.Datatype.fromcode(rows.dtype.char)
            return [rows[rank], kind], [out, rows.shape[2], kind], out

        one, other = both(ours, world, form, "Alltoall", apart)
        assert np.array_equal(one, other)
        assert np.array_equal(one, rows[:, rank])
        one, other = both(ours, world, form, "Alltoall", typed)
        assert np.array_equal(one, other)
        if form == "now":  # what is sent in place is not what it was, the second time
            out = rows[rank].copy()
            ours.Alltoall(MPI.IN_PLACE, out)
            assert np.array_equal(out, rows[:, rank])


@pytest.mark.parametrize("form", FORMS)
def test_gather_and_scatter(ours, world, rank, size, form):
    for length in LENGTHS:
        rows = numbers(size, length)
        for root in sorted({0, size - 1}):
            at_root = rank == root

            def gathered(rows=rows, at_root=at_root):
                out = np.full_like(rows[rank], 77) if at_root else None
                return rows[rank, 0].copy(), out, out

            def gathered_in_place(rows=rows, at_root=at_root):
                out = np.full_like(rows[rank], 77) if at_root else None
                if out is not None:
                    out[rank] = rows[rank, 0]
                return MPI.IN_PLACE if at_root else rows[rank, 0].copy(), out, out

            def scattered(rows=rows, at_root=at_root):
                out = np.full_like(rows[rank, 0], 77)
                return rows[rank].copy() if at_root else None, out, out

            def scattered_in_place(rows=rows, at_root=at_root):
                x = rows[rank].copy()
                x.flags.writeable = False  # nothing is written to the root's
                out = np.full_like(x[0], 77)
                return x if at_root else None, MPI.IN_PLACE if at_root else out, x if at_root else out

            for name, make in (("Gather", gathered), ("Gather", gathered_in_place), ("Scatter", scattered)):
                one, other = both(ours, world, form, name, make, root)
                assert (one is None) if other is None else np.array_equal(one, other), (name, length)
            one, other = both(ours, world, form, "Scatter", scattered_in_place, root)
            assert np.array_equal(one, other)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op", [MPI.SUM, MPI.MAX, MPI.PROD], ids=["sum", "max", "prod"])
@pytest.mark.parametrize("dtype", ["float64", "int32"])
def test_scans(ours, world, rank, size, form, op, dtype):  # noqa: PLR0917 - fixtures and parameters
    for length in LENGTHS:
        rows = numbers(size, length, dtype)

        def apart(rows=rows):
            out = np.full_like(rows[rank, 0], 77)
            return rows[rank, 0].copy(), out, out

        for name in ("Scan", "Exscan"):
            one, other = both(ours, world, form, name, apart, op)
            assert np.array_equal(one, other) or (rank == 0 and name == "Exscan")
            if form == "now":
                out = rows[rank, 0].copy()
                getattr(ours, name)(MPI.IN_PLACE, out, op)
                assert np.array_equal(out, other) or (rank == 0 and name == "Exscan")


def test_half_precision_is_scanned_in_float32(ours, rank, size):
    rows = numbers(size, 5, "float16")
    out = np.empty_like(rows[rank, 0])
    ours.Scan(rows[rank, 0], out)
    assert np.array_equal(out, np.add.accumulate(rows[:, 0].astype("float32"), axis=0)[rank].astype("float16"))


def blocks(size, seed):
    counts = 2 * np.random.default_rng(seed).integers(0, 4, (size, size))
    rows = [[np.arange(float(counts[s, t])) + 100 * s + 10 * t for t in range(size)] for s in range(size)]
    return counts.tolist(), rows


def spread(counts, gap):
    """Return displacements with gaps between blocks, and the length of all."""
    starts = [sum(counts[:place]) + gap * place for place in range(len(counts))]
    return starts, sum(counts) + gap * len(counts)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gap", [0, 3])
def test_alltoallv(ours, world, rank, size, form, gap):  # noqa: PLR0917 - fixtures and parameters
    for seed in range(3):
        counts, rows = blocks(size, seed)
        received = [counts[source][rank] for source in range(size)]
        starts, length = spread(received, gap)

        def make(counts=counts, rows=rows, received=received, starts=starts, length=length):
            out = np.full(length, 77.0)
            target = [out, (received, starts)] if gap else [out, received]
            return [np.concatenate(rows[rank]), counts[rank], MPI.DOUBLE], target, out

        one, other = both(ours, world, form, "Alltoallv", make)
        assert np.array_equal(one, other)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gap", [0, 3])
def test_gatherv_scatterv_and_allgatherv(ours, world, rank, size, form, gap):  # noqa: PLR0917 - fixtures and parameters
    for seed in range(3):
        counts, rows = blocks(size, seed)
        first = [counts[source][0] for source in range(size)]
        starts, length = spread(first, gap)

        def gathered(root=None, first=first, rows=rows, starts=starts, length=length):
            out = np.full(length, 77.0) if root in (None, rank) else None
            target = None if out is None else [out, (first, starts)] if gap else [out, first]
            return rows[rank][0], target, out

        one, other = both(ours, world, form, "Allgatherv", gathered)
        assert np.array_equal(one, other)
        for root in sorted({0, size - 1}):
            one, other = both(ours, world, form, "Gatherv", lambda root=root: gathered(root), root)
            assert (one is None) if other is None else np.array_equal(one, other)

            def scattered(root=root, counts=counts, rows=rows):
                out = np.full(counts[root][rank], 77.0)
                return [np.concatenate(rows[root]), counts[root]] if rank == root else None, out, out

            one, other = both(ours, world, form, "Scatterv", scattered, root)
            assert np.array_equal(one, other)
            assert np.array_equal(one, rows[root][rank])


@pytest.fixture(params=["plain", "registered", "nodes"])
def described(ours, world, size, request, monkeypatch):
    """A communicator on one node, on one with registered memory, and on a node for each rank."""
    if request.param == "nodes":
        monkeypatch.setenv("MPIAGG_NODES", ",".join(["1"] * size))
        comm = mpiagg.Comm(world, reproducible=channel_of(ours).reproducible)
        yield comm
        comm.Free()
    else:
        kept = mpiagg.empty(8, comm=ours) if request.param == "registered" else None
        yield ours
        del kept


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [4, 300, 2000, 5000, 100_000])
def test_each_rank_describes_its_data_as_it_likes(described, rank, size, form, length):
    """Rank 0 has columns of a matrix, by a derived datatype; the others have what follows one another."""
    comm = described
    column = MPI.DOUBLE.Create_vector(length, 1, size).Create_resized(0, 8).Commit()
    mine, matrix = np.full(length, float(rank)), np.zeros((length, size))
    wanted = np.tile(np.arange(float(size)), (length, 1))
    call(comm, form, "Gather", mine, [matrix, 1, column] if rank == 0 else None, 0)
    assert rank or np.array_equal(matrix, wanted)
    call(comm, form, "Scatter", [wanted, 1, column] if rank == 0 else None, mine, 0)
    assert np.all(mine == rank)
    call(comm, form, "Gather", MPI.IN_PLACE if rank == 0 else mine, [matrix, 1, column] if rank == 0 else None, 0)
    assert rank or np.array_equal(matrix, wanted)
    rows = np.full((size, length), float(rank))
    out = np.zeros((size, length))
    call(comm, form, "Alltoall", rows, [matrix, 1, column] if rank == 0 else out)
    assert np.array_equal(matrix if rank == 0 else out, wanted if rank == 0 else wanted.T)
    for root in sorted({0, size - 1}):
        matrix[:, 0], mine[:] = rank, rank
        call(comm, form, "Bcast", [matrix, 1, column] if rank == 0 else mine, root)
        assert np.all((mine if rank else matrix[:, 0]) == root)
        assert np.array_equal(matrix[:, 1:], wanted[:, 1:] if rank == 0 else np.zeros((length, size - 1)))
    mine[:] = rank
    matrix[:, rank] = rank
    send = MPI.IN_PLACE if rank == 0 else mine
    call(comm, form, "Allgather", send, [matrix, 1, column] if rank == 0 else out)
    assert np.array_equal(matrix if rank == 0 else out, wanted if rank == 0 else wanted.T)
    gap = 2 if rank == 0 else 0
    starts, whole = spread([length] * size, gap)
    out = np.full(whole, -1.0)
    call(comm, form, "Allgatherv", mine, [out, ([length] * size, starts)])
    assert all(np.all(out[start : start + length] == peer) for peer, start in enumerate(starts))
    assert np.count_nonzero(out == -1) == whole - size * length
    column.Free()


def test_datatypes_may_be_freed_while_they_are_used(described, rank, size):
    column = MPI.DOUBLE.Create_vector(3000, 1, 2).Commit()
    matrix, vector = np.full((3000, 2), -1.0), np.arange(3000.0)
    request = described.Bcast_init([matrix, 1, column] if rank == 0 else vector, size - 1)
    column.Free()
    for _ in range(2):
        request.Start()
        request.Wait()
    request.Free()
    assert rank or size == 1 or np.array_equal(matrix[:, 0], vector)
    assert np.all(matrix[:, 1] == -1)


def test_threads_copy_one_after_another(world, size, monkeypatch):
    """Each on a communicator of its own, between nodes, where broadcasts of this length are ours."""
    monkeypatch.setenv("MPIAGG_NODES", ",".join(["1"] * size))
    comms = [mpiagg.Comm(world) for _ in range(3)]
    wrong, inside, beside = [], [], []

    class Held:
        """Lets other threads in, if they can come, while one copies."""

        def Sendrecv(self, *arguments):
            inside.append(threading.get_ident())
            time.sleep(0.002)
            beside.extend(inside[1:])
            MPI.COMM_SELF.Sendrecv(*arguments)
            inside.pop()

    monkeypatch.setattr(packed, "_itself", Held)

    def use(number):
        column = MPI.DOUBLE.Create_vector(20_000, 1, 2).Commit()
        for turn in range(10):
            matrix = np.full((20_000, 2), number + 10.0 * turn)
            out = np.zeros_like(matrix)
            comms[number].Bcast([matrix if world.rank == 0 else out, 1, column])
            if world.rank and not np.array_equal(out[:, 0], matrix[:, 0]):
                wrong.append((number, turn))
        column.Free()

    threads = [threading.Thread(target=use, args=(number,)) for number in range(len(comms))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
    assert not beside
    for comm in comms:
        comm.Free()


@pytest.mark.parametrize("count", [1, 2])
def test_structures_of_several_kinds_are_the_mpi_librarys(described, rank, count):
    kind = MPI.Datatype.Create_struct([1, 1], [0, 8], [MPI.INT, MPI.DOUBLE]).Create_resized(0, 16).Commit()
    pairs = np.zeros(count, np.dtype([("i", "i4"), ("x", "f8")], align=True))
    pairs["i"], pairs["x"] = rank, rank / 2
    described.Bcast([pairs, count, kind])
    assert not pairs["i"].any()
    assert not pairs["x"].any()
    kind.Free()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [5, 3000])
@pytest.mark.parametrize("name", ["Allgather", "Allgatherv", "Alltoall", "Alltoallv", "Allreduce", "Scan", "Reduce"])
def test_none_is_in_place(described, world, rank, size, form, length, name):  # noqa: PLR0917 - fixtures and parameters
    """As mpi4py has it; here on some ranks, where others say MPI.IN_PLACE."""
    for root in sorted({0, size - 1}):

        def make(root=root):
            out = np.arange(float(size * length)) + rank
            whole = [out, [length] * size] if name.endswith("v") else out
            if name == "Reduce":
                return (None, whole, out) if rank == root else (out, None, out)
            return None if rank % 2 else MPI.IN_PLACE, whole, out

        more = (MPI.MAX, root) if name == "Reduce" else (MPI.MAX,) if name in {"Allreduce", "Scan"} else ()
        one, other = make(), make()
        call(described, form, name, *one[:2], *more, times=1)
        getattr(world, name)(*other[:2], *more)
        assert np.array_equal(one[2], other[2])


@pytest.mark.parametrize("form", FORMS)
def test_none_is_the_roots_own_block(described, rank, size, form):
    out = np.full((size, 3), float(rank))
    for root in sorted({0, size - 1}):
        at_root = rank == root
        call(described, form, "Gather", None if at_root else out[rank], out if at_root else None, root, times=1)
        assert not at_root or out.tolist() == [[float(each)] * 3 for each in range(size)]
        call(described, form, "Scatter", out if at_root else None, None if at_root else out[rank], root, times=1)
        assert out[rank].tolist() == [float(rank)] * 3
        out[:] = rank


def test_errors_are_mpi4pys(ours, size):
    with pytest.raises(MPI.Exception):
        ours.Scan(np.zeros(3), np.zeros(3), MPI.REPLACE)
    with pytest.raises((MPI.Exception, ValueError)):
        ours.Gather(np.zeros(3), np.zeros(3 * size), root=size)
    with pytest.raises(TypeError):
        ours.Alltoall("text", np.zeros(size))


def test_the_methods_are_named_as_mpi4pys(ours):
    for name in ("Alltoall", "Ialltoallv", "Gather_init", "Bcast", "Iscan", "Exscan_init", "Reduce"):
        method, given = getattr(type(ours), name), getattr(MPI.Intracomm, name)
        assert (method.__name__, method.__doc__) == (given.__name__, given.__doc__)
        assert method is not given


# -- counts and displacements, whatever they are kept in

KEPT_IN = {"list": list, "numpy": np.array, "array": lambda counts: array("i", counts)}


@pytest.mark.parametrize("kept", KEPT_IN)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["int32", ml_dtypes.bfloat16], ids=["int32", "bfloat16"])
def test_counts_are_those_of_the_call(ours, rank, size, form, dtype, kept):  # noqa: PLR0917 - fixtures and parameters
    keep, half = KEPT_IN[kept], np.dtype(dtype).itemsize == 2
    for shift in (0, 1, 0):
        matrix = [[1 + (sender + receiver + shift) % 2 for receiver in range(size)] for sender in range(size)]
        sent, received = matrix[rank], [row[rank] for row in matrix]
        x, out = np.full(sum(sent), rank, dtype), np.zeros(sum(received), dtype)
        call(ours, form, "Alltoallv", [x, keep(sent)], [out, keep(received)])
        assert out.tolist() == np.repeat(np.arange(size), received).tolist()
        counts = matrix[0]
        x, out = np.full(counts[rank], rank, dtype), np.zeros(sum(counts), dtype)
        call(ours, form, "Allgatherv", x, [out, keep(counts)])
        assert out.tolist() == np.repeat(np.arange(size), counts).tolist()
        starts = [2 * at + shift for at in range(size)]
        apart = np.zeros(2 * size + shift, np.int16 if half else dtype)
        specification = [apart, keep([1] * size), keep(starts), MPI.INT16_T if half else MPI.INT32_T]
        call(ours, form, "Gatherv", np.full(1, rank, apart.dtype), specification if rank == 0 else None)
        assert apart[starts].tolist() == (list(range(size)) if rank == 0 else [0] * size)


@pytest.mark.parametrize("kept", KEPT_IN)
def test_counts_are_those_of_the_call_in_registered_memory(ours, rank, size, kept):
    n, keep = 40_000, KEPT_IN[kept]
    out = mpiagg.empty(2 * n * size, "i", comm=ours)
    for shift in (0, 1, 0):
        counts = [n * (1 + (each + shift) % 2) for each in range(size)]
        start = sum(counts[:rank])
        out[:] = 0
        out[start : start + counts[rank]] = rank + 1
        ours.Allgatherv(MPI.IN_PLACE, [out, keep(counts)])
        assert (out[: sum(counts)] == np.repeat(np.arange(1, size + 1), counts)).all()


def test_counts_that_differ_are_an_error_also_if_their_sums_are_equal(ours, rank, size, monkeypatch):
    if size == 1:
        return
    monkeypatch.setattr("mpiagg.collectives.forms.CHECK", True)
    counts = [9, 11, *[10] * (size - 2)] if rank == 1 else [10] * size
    own, everything = np.full(counts[rank], rank + 1.0), np.zeros(10 * size)
    gather, reduce = (own, [everything, counts]), (np.ones(10 * size), own, counts)
    for verb, given in (("Allgatherv", gather), ("Reduce_scatter", reduce)):
        for form in (verb, f"{verb}_init"):
            with pytest.raises(mpiagg.MismatchError, match=r"rank 1: .* in chunks of "):
                getattr(ours, form)(*given)


def test_blocks_may_lie_apart_on_some_ranks_where_calls_are_compared(ours, rank, size, monkeypatch):
    monkeypatch.setattr("mpiagg.collectives.forms.CHECK", True)
    starts = [2 * at for at in range(size)]
    apart = np.zeros(2 * size, "i")
    ours.Gatherv(np.full(1, rank + 1, "i"), [apart, ([1] * size, starts)] if rank == 0 else None)
    assert apart[starts].tolist() == (list(range(1, size + 1)) if rank == 0 else [0] * size)
    own = np.zeros(1, "i")
    ours.Scatterv([apart, ([1] * size, starts)] if rank == 0 else None, own)
    assert own[0] == rank + 1
    # A root that ranks do not agree on is told as before.
    if size > 1:
        with pytest.raises(mpiagg.MismatchError, match="root"):
            ours.Gatherv(own, [apart, ([1] * size, starts)], root=rank % 2)


@pytest.mark.parametrize("form", FORMS)
def test_an_empty_block_may_be_anywhere(ours, rank, size, form):
    far = 10**6 if rank == 0 else 4  # where blocks lie is each rank's own affair
    counts, starts = [4, *[0] * (size - 1)], [0, *[far] * (size - 1)]
    out = np.full(4, -1.0)
    call(ours, form, "Allgatherv", np.arange(4.0 if rank == 0 else 0.0), [out, (counts, starts), MPI.DOUBLE])
    assert out.tolist() == [0, 1, 2, 3]
    out += rank
    call(ours, form, "Allgatherv", MPI.IN_PLACE, [out, (counts, starts), MPI.DOUBLE])
    assert out.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("length", [3, 1000, 100_000])
@pytest.mark.parametrize("form", FORMS)
def test_ranks_may_spell_the_same_counts_in_any_way(ours, length, form):
    rank, size = ours.rank, ours.size
    mine, every = np.full(length, rank + 1.0), np.repeat(np.arange(1.0, size + 1), length)
    for spelling in range(5):
        out = np.zeros(length * size)
        spelt = [out, [out, MPI.DOUBLE], [out, length, MPI.DOUBLE], [out, [length] * size], [out, None, length, "d"]]
        call(ours, form, "Allgatherv", mine, spelt[(spelling + rank) % 5])
        np.testing.assert_array_equal(out, every)
        there = np.zeros(length * size)
        sent, got = ([x, [x, length, MPI.DOUBLE], [x, [length] * size]] for x in (every * (rank + 1), there))
        call(ours, form, "Alltoallv", sent[(spelling + rank) % 3], got[rank % 3])
        np.testing.assert_array_equal(there, every * (rank + 1))


def test_what_is_not_said_to_be_cut_is_cut_as_evenly_as_it_can_be(ours):
    out = np.zeros(ours.size + 1)
    mine = np.full(2 if ours.rank == 0 else 1, float(ours.rank))
    call(ours, "now", "Allgatherv", mine, out if ours.rank else [out, [2, *[1] * (ours.size - 1)]])
    assert out.tolist() == [0.0, *map(float, range(ours.size))]


def test_a_root_may_be_any_integer(ours):
    for length in (10, 100_000):
        x, out = np.full(length, ours.rank + 1.0), np.zeros(length)
        root = 0 if ours.rank else np.array(0)
        ours.Reduce(x, out if ours.rank == 0 else None, root=root)
        ours.Bcast(x, root)
        assert (x == 1).all()
        assert ours.rank or (out == sum(range(1, ours.size + 1))).all()


def test_half_precision_of_another_byte_order_is_refused(ours):
    for length in (10, 100_000):
        with pytest.raises(BufferError, match="byte order"):
            ours.Bcast(np.ones(length, np.dtype(np.float16).newbyteorder()))


def test_a_datatype_that_was_not_committed_is_refused_on_all_ranks(ours):
    datatype = MPI.DOUBLE.Create_vector(50, 1, 2)
    for length in (1, 300):
        x = np.zeros(100 * length)
        with pytest.raises(MPI.Exception):
            ours.Bcast([x, length, datatype], 0)
    datatype.Commit()
    call(ours, "now", "Bcast", [np.zeros(100), 1, datatype], 0)
    datatype.Free()
