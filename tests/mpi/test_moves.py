"""Gather, scatter, all-to-all and scans of arrays: what every rank gets, by every algorithm, wherever they lie."""

import gc
import weakref

import numpy as np
import pytest
from mpi4py import MPI

import mpiagg
from mpiagg.errors import MismatchError
from mpiagg.transport import channel_of

pytestmark = pytest.mark.mpi

LENGTHS = [0, 1, 3, 1000, 20_011]
if MPI.COMM_WORLD.size > 4:  # ranks that outnumber the cores take long
    LENGTHS = [0, 3, 20_011]
WAYS = [*mpiagg.algorithms("alltoall"), "bruck-3", "auto", "native"]
ROOTED = [*mpiagg.algorithms("gather"), "knomial-2", "auto", "native"]
SCANS = [*mpiagg.algorithms("scan"), "auto", "native"]


@pytest.fixture
def table(size):
    """Return a function that makes the rows that each rank has for each: ``table(length)[source, target]``."""

    def table(length, dtype="float32"):
        return np.random.default_rng(length).integers(-9, 9, (size, size, length)).astype(dtype)

    return table


@pytest.fixture(params=["anywhere", "registered"])
def array(request, comm):
    """Return a function that makes an array with some values, in memory that ranks share or not."""

    def array(values):
        if request.param == "anywhere":
            return values.copy()
        registered = mpiagg.empty(values.shape, values.dtype, comm=comm)
        registered[...] = values
        return registered

    return array


def runs(function, planned, *arguments, out, **keywords):
    """Yield what a collective returns: into a new array, into one that is given, and by a plan that runs twice."""
    lanes = {"lanes": 1 if keywords["algorithm"] == "native" else 3}
    yield function(*arguments, **keywords)
    yield function(*arguments, out=out, **keywords)
    yield function(*arguments, out=out, **keywords)
    yield function(*arguments, **keywords, **lanes)
    with planned(*arguments, out=out, **keywords, **lanes) as plan:
        for _ in range(2):
            if out is not None:
                out[...] = 77
            yield plan()


def same(result, wanted):
    if wanted is None:
        return result is None
    return result.shape == wanted.shape and result.dtype == wanted.dtype and np.array_equal(result, wanted)


@pytest.mark.parametrize("algorithm", WAYS)
def test_alltoall_gives_each_rank_its_part(comm, rank, table, array, algorithm):
    for length in LENGTHS:
        rows = table(length)
        x, out = array(rows[rank]), array(rows[rank] * 0)
        for result in runs(mpiagg.alltoall, mpiagg.alltoall_init, x, out=out, comm=comm, algorithm=algorithm):
            assert same(result, rows[:, rank]), (length, result)
        assert np.array_equal(x, rows[rank])
        mpiagg.alltoall(x, out=x, comm=comm, algorithm=algorithm)
        assert np.array_equal(x, rows[:, rank])


@pytest.mark.parametrize("algorithm", ROOTED)
def test_gather_and_scatter_are_each_others_inverse(comm, rank, size, table, array, algorithm):  # noqa: PLR0917 - fixtures and parameters
    for length in LENGTHS:
        rows = table(length)
        x, out = array(rows[rank]), array(rows[rank] * 0)
        for root in sorted({0, size - 1}):
            at_root = out if rank == root else None
            keywords = {"root": root, "comm": comm, "algorithm": algorithm}
            wanted = rows[:, 0] if rank == root else None
            for result in runs(mpiagg.gather, mpiagg.gather_init, x[0], out=at_root, **keywords):
                assert same(result, wanted), (length, result)
            if rank == root:  # where its own row lies in its place already
                out[...], out[root] = 77, x[0]
                assert same(mpiagg.gather(out[root], out=out, **keywords), wanted)
            else:
                mpiagg.gather(x[0], **keywords)
            for result in runs(mpiagg.scatter, mpiagg.scatter_init, x, out=out[0], **keywords):
                assert same(result, rows[root, rank]), (length, result)
            given = x if rank == root else None
            assert same(mpiagg.scatter(given, out=out[0], **keywords), rows[root, rank])
        assert np.array_equal(x, rows[rank])


@pytest.mark.parametrize("algorithm", SCANS)
@pytest.mark.parametrize(("op", "function"), [("sum", np.add), ("max", np.maximum), (MPI.MIN, np.minimum)])
def test_scans_are_of_the_ranks_before(comm, rank, table, array, algorithm, op, function):  # noqa: PLR0917 - fixtures and parameters
    for length in LENGTHS:
        rows = table(length)
        prefixes = function.accumulate(rows[:, 0], axis=0)
        before = prefixes[rank - 1] if rank else None
        x, out = array(rows[rank, 0]), array(rows[rank, 0] * 0)
        keywords = {"comm": comm, "algorithm": algorithm}
        for result in runs(mpiagg.scan, mpiagg.scan_init, x, op, out=out, **keywords):
            assert same(result, prefixes[rank]), (length, result)
        out[...] = 77
        for result in runs(mpiagg.exscan, mpiagg.exscan_init, x, op, out=out, **keywords):
            assert same(result, before), (length, result)
        assert rank or np.all(out == 77)
        assert np.array_equal(x, rows[rank, 0])
        mpiagg.scan(x, op, out=x, **keywords)
        assert np.array_equal(x, prefixes[rank])


@pytest.mark.parametrize("algorithm", ["auto", "ring", "recursive_doubling"])
def test_an_exclusive_scan_combines_no_more_than_its_results(comm, rank, size, algorithm):
    x = np.full(3, 0.9e308 if rank >= size - 2 else 1.0)  # finite in all, but for the last two together
    with np.errstate(all="raise"):
        result = mpiagg.exscan(x, comm=comm, algorithm=algorithm)
    before = [1.0] * max(0, size - 2) + [0.9e308] * 2
    assert (result is None) if rank == 0 else np.all(result == sum(before[:rank] if size > 1 else []))


def test_an_input_that_is_only_sent_is_sent_from_where_it_lies(comm, rank, size):
    x, out = np.full(100_000, rank + 1.0), np.zeros(100_000)
    x.flags.writeable = False
    with (
        mpiagg.exscan_init(x, out=out, comm=comm, algorithm="ring") as scan,
        mpiagg.reduce_init(x, out=out, comm=comm, algorithm="tree", root=0) as reduce,
    ):
        scratch = scan.nbytes, reduce.nbytes
        for factor in (1, 2):  # it is read anew
            x.flags.writeable = True
            x[:] = factor * (rank + 1)
            x.flags.writeable = False
            scan()
            assert rank == 0 or np.all(out == factor * rank * (rank + 1) / 2)
            reduce()
            assert rank > 0 or np.all(out == factor * size * (size + 1) / 2)
    if size > 1 and rank == 0:
        assert scratch[0] == 0
    if rank and rank == size - 1:  # a leaf of the tree
        assert scratch[1] == 0


def test_scans_by_our_algorithms_have_the_bits_of_their_schedules(comm, rank, size, bits):
    rng = np.random.default_rng(3)
    vectors = (rng.standard_normal((size, 1000)) * 10.0 ** rng.integers(-8, 8, (size, 1000))).astype(np.float32)
    left = np.add.accumulate(vectors, axis=0)[rank]
    assert bits(mpiagg.scan(vectors[rank], comm=comm, algorithm="ring")) == bits(left)

    def doubled(first, last):  # the window of a power of two, and what is before it in front
        if last - first == 1:
            return vectors[first]
        width = 1 << ((last - first - 1).bit_length() - 1)
        return doubled(first, last - width) + doubled(last - width, last)

    assert bits(mpiagg.scan(vectors[rank], comm=comm, algorithm="recursive_doubling")) == bits(doubled(0, rank + 1))


@pytest.mark.parametrize("dtype", ["float16", "complex128", "bool", "int8", "longdouble"])
def test_any_dtype_is_moved(comm, rank, size, dtype):
    rows = np.arange(size * size * 4).reshape(size, size, 4).astype(dtype)
    for algorithm in ("auto", "native", "bruck", "shared"):
        assert same(mpiagg.alltoall(rows[rank], comm=comm, algorithm=algorithm), rows[:, rank])
    for algorithm in ("auto", "native", "knomial"):
        found = mpiagg.gather(rows[rank], comm=comm, algorithm=algorithm)
        assert same(found, rows if rank == 0 else None)
        assert same(mpiagg.scatter(rows[0], comm=comm, algorithm=algorithm), rows[0, rank])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("algorithm", ["auto", "native", "knomial"])
def test_what_others_than_the_root_pass_to_a_scatter_does_not_matter(comm, rank, size, dtype, algorithm):
    rows = np.arange(size * 3).reshape(size, 3).astype(dtype)
    for _ in range(2):
        x = rows.copy() if rank == 0 else np.zeros_like(rows)
        assert same(mpiagg.scatter(x, out=x[rank], comm=comm, algorithm=algorithm), rows[rank])
        strided = np.zeros((size, 3, 2), dtype)[..., 0]
        strided[...] = rows if rank == 0 else 0
        assert same(mpiagg.scatter(strided, out=np.zeros(3, dtype), comm=comm, algorithm=algorithm), rows[rank])


@pytest.mark.parametrize("algorithm", WAYS)
def test_each_rank_may_work_in_place_or_not(comm, rank, size, table, algorithm):
    for length in LENGTHS:
        rows = table(length)
        for alone in range(min(size, 2)):
            x = rows[rank].copy()
            result = mpiagg.alltoall(x, out=x if rank == alone else None, comm=comm, algorithm=algorithm)
            assert same(result, rows[:, rank])


@pytest.mark.parametrize("algorithm", ["auto", "native", "direct"])
def test_parts_that_are_in_their_place_again_and_again(comm, rank, size, algorithm):
    for root in range(min(size, 2)):
        for call in range(4):  # the second one is looked up
            wanted = np.arange(size * 3.0).reshape(size, 3) + 100 * call
            out = np.zeros((size, 3))
            out[rank] = wanted[rank]
            assert same(mpiagg.allgather(out[rank], out=out, comm=comm, algorithm=algorithm), wanted)
            # A part that lies elsewhere in the output is copied first.
            out[...] = 0
            out[(rank + 1) % size] = wanted[rank]
            assert same(mpiagg.allgather(out[(rank + 1) % size], out=out, comm=comm, algorithm=algorithm), wanted)
            out[...] = 0
            out[rank] = wanted[rank]
            target = out if rank == root else None
            found = mpiagg.gather(out[rank], out=target, root=root, comm=comm, algorithm=algorithm)
            assert (found is None) == (rank != root)
            assert found is None or same(found, wanted)


def test_arrays_of_any_layout(comm, rank, size):
    rows = np.arange(size * size * 6).reshape(size, size, 2, 3)
    for algorithm in ("auto", "native", "pairwise", "shared"):
        x, out = np.asfortranarray(rows[rank]), np.zeros((size, 2, 6), rows.dtype)[..., ::2]
        assert same(mpiagg.alltoall(x, out=out, comm=comm, algorithm=algorithm), rows[:, rank])
        with mpiagg.alltoall_init(x, out=out, comm=comm, algorithm=algorithm) as plan:
            out[...] = 0
            assert same(plan(), rows[:, rank])


def ragged(size, seed):
    """Return how many rows go from each rank to each, and all these rows."""
    counts = np.random.default_rng(seed).integers(0, 4, (size, size))
    rows = [
        [np.arange(counts[s, t] * 2.0).reshape(-1, 2) + 1000 * s + 100 * t for t in range(size)] for s in range(size)
    ]
    return counts, rows


@pytest.mark.parametrize("algorithm", [*mpiagg.algorithms("alltoall"), "bruck-3", "auto", "native"])
def test_alltoallv_gives_each_rank_its_rows(comm, rank, size, array, algorithm):
    for seed in range(5):
        counts, rows = ragged(size, seed)
        x = array(np.concatenate(rows[rank]))
        wanted = np.concatenate([rows[source][rank] for source in range(size)])
        keywords = {"comm": comm, "algorithm": algorithm}
        for received in (None, counts[:, rank]):
            strided = np.zeros((*wanted.shape, 2))[..., 0]
            for more in ({}, {"out": array(0 * wanted)}, {"out": strided}, {"check": True}):
                assert same(mpiagg.alltoallv(x, counts[rank], received, **more, **keywords), wanted)
            with mpiagg.alltoallv_init(x, counts[rank], received, **keywords) as plan:
                assert same(plan(), wanted)
                x += 1
                assert same(plan(), wanted + 1)
                x -= 1


@pytest.mark.parametrize("algorithm", ["bruck", "hierarchical", "hierarchical_bruck", "shared", "auto"])
def test_alltoallv_of_many_lengths(comm, rank, size, array, algorithm):
    """Long blocks beside short ones, ranks without any, an input in other memory, one that is overwritten."""
    lengths = np.array([0, 5_000, 10_000, 20_000])  # packed, a message by itself, and one too long to be sent unasked
    for seed in range(3):
        counts = lengths[np.random.default_rng(seed).integers(0, 4, (size, size))]
        counts[seed % size] = 0
        whole = [np.arange(counts[source].sum(), dtype="float32") + 1000 * source for source in range(size)]
        cuts = np.cumsum(np.pad(counts, ((0, 0), (1, 0))), axis=1)
        parts = [whole[source][cuts[source, rank] : cuts[source, rank + 1]] for source in range(size)]
        x, wanted = array(whole[rank]), np.concatenate(parts)
        given = counts[rank], counts[:, rank]
        other = x.copy() if rank == 0 else x
        for lanes in (None, 3):
            keywords = {"comm": comm, "algorithm": algorithm, "lanes": lanes if algorithm != "auto" else None}
            assert same(mpiagg.alltoallv(x, *given, **keywords), wanted)
            assert same(mpiagg.alltoallv(other, *given, **keywords), wanted)
            with mpiagg.alltoallv_init(other, *given, **keywords) as plan:
                assert same(plan(), wanted)
        memory = array(np.zeros(max(len(x), len(wanted)), "float32"))
        within, out = memory[: len(x)], memory[: len(wanted)]
        within[...] = whole[rank]
        assert same(mpiagg.alltoallv(within, *given, out=out, comm=comm, algorithm=algorithm), wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("reproducible", [None, True])
def test_alltoallv_of_lengths_that_change_from_call_to_call(comm, rank, size, array, dtype, reproducible):  # noqa: PLR0917 - fixtures and parameters
    """Long blocks after short ones and the other way round; arrays of other layouts, on one rank alone."""
    ml_dtypes = pytest.importorskip("ml_dtypes") if dtype == "bfloat16" else None
    dtype = np.dtype(ml_dtypes.bfloat16 if ml_dtypes else dtype)
    memory = array(np.zeros(2 * 2**20 // size * size, dtype))
    for turn, rows in enumerate([3, 2**20 // size, 2**20 // size, 5, *[2] * 65, 2**20 // size, 1, 2**20 // size]):
        counts = np.full((size, size), rows) + (np.arange(size)[:, None] == turn % size)
        values = [np.repeat(np.arange(size) + 10 * source + turn % 7, counts[source]) for source in range(size)]
        wanted = np.concatenate(
            [np.full(counts[source, rank], rank + 10 * source + turn % 7) for source in range(size)]
        )
        x = memory[: counts[rank].sum()] if (turn + rank) % 3 else np.empty(counts[rank].sum(), dtype)
        x[...] = values[rank]
        out = np.zeros((len(wanted), 2), dtype)[:, 0] if turn % 5 == rank else None
        given = {"out": out} if (turn + rank) % 2 else {}
        sent, received = counts[rank], counts[:, rank] if turn % 3 else None
        found = mpiagg.alltoallv(x, sent, received, **given, comm=comm, reproducible=reproducible)
        assert same(found, wanted.astype(dtype)), turn
        assert same(x, values[rank].astype(dtype))


@pytest.mark.parametrize("reproducible", [None, True])
def test_alltoallv_goes_by_what_all_ranks_have(comm, rank, size, reproducible):
    """Long blocks of one rank are taken from there; of short ones the MPI library is called, which is a call more."""
    if size == 1 or len(channel_of(comm).layout.nodes) > 1:
        return
    kept, log = mpiagg.empty(2**19, "float32", comm=comm), channel_of(comm).log
    for length, calls in ((kept.size, 1), (10, 2), *[(10, 1)] * 63, (kept.size, 1), (11, 2), (12, 1)):
        counts = np.zeros((size, size), int)
        counts[0], counts[:, 0] = length // size, 1
        x = kept[: counts[rank].sum()]
        x[...] = rank
        before = log.count
        found = mpiagg.alltoallv(x, counts[rank], counts[:, rank], comm=comm, reproducible=reproducible)
        assert log.count - before == (1 if reproducible else calls)
        assert same(found, np.repeat(np.arange(size, dtype="float32"), counts[:, rank]))


def blocks_of(reads, length):
    """Return how many blocks of a length were to be read; whether anything can be is tried out with shorter ones."""
    return [vector.size for vector in reads].count(length)


@pytest.mark.parametrize("reproducible", [None, True])
def test_long_blocks_are_read_where_they_lie(comm, rank, size, reads, reproducible):
    channel = channel_of(comm)
    counts = [2**20 // size] * size
    x = np.repeat(np.arange(size, dtype="float32") + 10 * rank, counts[0])
    wanted = np.repeat(rank + 10 * np.arange(size, dtype="float32"), counts[0])
    assert same(mpiagg.alltoallv(x, counts, counts, comm=comm, reproducible=reproducible), wanted)
    by_mpi = channel.library == "Open MPI" and not reproducible  # which reads as fast
    may_read = channel.node.size == size > 1 and channel.memory.read()
    assert blocks_of(reads, counts[0]) == (size - 1 if may_read and not by_mpi else 0)
    reads.clear()
    with mpiagg.alltoallv_init(x, counts, counts, comm=comm, reproducible=reproducible) as plan:
        assert blocks_of(reads, counts[0]) == (size - 1 if may_read else 0)
        assert same(plan(), wanted)


def test_long_blocks_that_differ_are_an_error_on_all_ranks(comm, size):
    if size == 1 or len(channel_of(comm).layout.nodes) > 1:
        return
    private = comm.Dup()
    length = 2**20 // size
    x = mpiagg.empty(length * size, "float32", comm=private)
    received = [length - (private.rank == 1 and source == 0) for source in range(size)]
    with pytest.raises(MismatchError, match=f"rank 0 sends {length} elements to rank 1, which takes {length - 1}"):
        mpiagg.alltoallv(x, [length] * size, received, comm=private)
    x[...] = private.rank  # the communicator goes on
    found = mpiagg.alltoallv(x, [length] * size, [length] * size, comm=private)
    assert same(found, np.repeat(np.arange(size, dtype="float32"), length))
    private.Free()


def test_lengths_that_differ_are_an_error_on_all_ranks_in_registered_memory(comm, size):
    if size == 1:
        return
    private = comm.Dup()
    x = mpiagg.empty(size, "float32", comm=private)
    received = [1 + (private.rank == 1 and source == 0) for source in range(size)]
    for _ in range(2):
        with pytest.raises(MismatchError, match="rank 0 sends 1 elements to rank 1, which takes 2"):
            mpiagg.alltoallv(x, [1] * size, received, comm=private, algorithm="shared")
    x[...] = private.rank  # the communicator goes on
    found = mpiagg.alltoallv(x, [1] * size, [1] * size, comm=private, algorithm="shared")
    assert same(found, np.arange(size, dtype="float32"))
    private.Free()


def test_what_a_rank_keeps_is_as_long_on_both_sides(comm, rank, size):
    with pytest.raises(ValueError, match=f"rank {rank} keeps 1 rows by its sendcounts, and 2 by recvcounts"):
        mpiagg.alltoallv(np.zeros(size), [1] * size, [2] * size, comm=comm)


def test_an_output_that_overlaps_the_input_is_written_when_all_have_read(comm, rank, size):
    length = 100_000
    memory = mpiagg.empty(2 * size * length, "float64", comm=comm)
    x, out = memory[: size * length], memory[::2]
    for turn in range(3):
        x[...] = np.repeat(np.arange(size) + 10.0 * rank + 100 * turn, length)
        mpiagg.alltoallv(x, [length] * size, [length] * size, out=out, comm=comm, algorithm="shared")
        assert same(out.copy(), np.repeat(10.0 * np.arange(size) + rank + 100 * turn, length))


@pytest.mark.parametrize("algorithm", ["shared", "pairwise", "bruck"])
def test_calls_of_blocks_keep_neither_arrays_nor_plans(comm, size, algorithm):
    private = comm.Dup()
    registered = mpiagg.empty(20_000 * size, "float64", comm=private)
    kept = []
    for turn in range(4):
        counts = [20_000 - turn] * size
        x, out = registered[: sum(counts)], np.empty(sum(counts))
        mpiagg.alltoallv(x, counts, counts, out=out, comm=private, algorithm=algorithm)
        kept.append(weakref.ref(out))
        kept.append(len(channel_of(private).open))
    del x, out
    gc.collect()
    assert [ref() for ref in kept[::2]] == [None] * 4
    assert len(set(kept[1::2])) == 1
    private.Free()


@pytest.mark.parametrize("width", [1, 50_000])
def test_a_plan_of_lengths_that_differ_is_an_error_on_all_ranks(comm, rank, size, width):
    if size == 1:
        return
    memory = mpiagg.empty(size * width + 1, "float32", comm=comm)
    memory[...] = rank
    x, counts = memory[:-1], [width] * size
    counts[1] += rank == 0
    with pytest.raises(mpiagg.Error if rank != 1 else ValueError, match="and the other ranks send"):
        mpiagg.alltoallv_init(memory[: sum(counts)], counts, [width] * size, comm=comm)
    with mpiagg.alltoallv_init(x, [width] * size, comm=comm) as plan:
        assert same(plan(), np.repeat(np.arange(size, dtype="float32"), width))


def test_a_plan_of_an_all_to_all_reads_what_is_too_long_for_mailboxes(comm, rank, size, table, reads):
    rows = table(2**19 // size)
    with mpiagg.alltoall_init(rows[rank], comm=comm) as plan:
        may_read = channel_of(comm).node.size == size > 1 and channel_of(comm).memory.read()
        assert blocks_of(reads, rows.shape[-1]) == (size - 1 if may_read else 0)
        assert same(plan(), rows[:, rank])


def test_a_plan_of_blocks_in_registered_memory_needs_no_messages(comm, rank, size, reads):
    if size == 1 or len(channel_of(comm).layout.nodes) > 1:
        return
    counts = [50_000 + rank] * size
    x, received = mpiagg.empty(sum(counts), "float32", comm=comm), [50_000 + source for source in range(size)]
    with mpiagg.alltoallv_init(x, counts, received, comm=comm) as plan:
        assert 0 < plan.nbytes < 1000  # a barrier
        assert plan.sent_bytes == (size - 1) * counts[0] * 4
        x[...] = rank
        assert same(plan(), np.repeat(np.arange(size, dtype="float32"), received))
    assert not any(blocks_of(reads, length) for length in (*counts, *received))


def test_plans_where_no_rank_may_read(comm, rank, size, monkeypatch):
    """Only short blocks are the MPI library's, which does not tell what it sends, unless our own are asked for."""
    if size == 1 or len(channel_of(comm).layout.nodes) > 1:
        return
    channel_of(comm).memory.read()
    monkeypatch.setattr(channel_of(comm).memory.host, "processes", None)  # as where the system forbids it
    for length, by_mpi in ((3, True), (100_000, False)):
        x, counts = np.repeat(np.arange(size) + 10 * rank, length), [length] * size
        for reproducible in (None, True):
            with mpiagg.alltoallv_init(x, counts, counts, comm=comm, reproducible=reproducible) as plan:
                assert (plan.sent_bytes == 0) == (by_mpi and not reproducible)
                assert same(plan(), np.repeat(rank + 10 * np.arange(size), length))


def test_plans_of_rows_of_other_widths_are_an_error_on_all_ranks(comm, rank, size):
    if size == 1 or len(channel_of(comm).layout.nodes) > 1:
        return
    for rows in (1, 1000):
        x = np.zeros((rows * size, 3 if rank else 2))
        with pytest.raises(MismatchError, match=f"rank 0 sends {2 * rows} elements to rank 1, which takes {3 * rows}"):
            mpiagg.alltoallv_init(x, [rows] * size, [rows] * size, comm=comm)
    assert same(mpiagg.allgather(rank, comm=comm), np.arange(size))


def not_aligned(values):
    shifted = np.zeros(values.nbytes + 1, np.uint8)[1:].view(values.dtype).reshape(values.shape)
    shifted[...] = values
    return shifted


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
@pytest.mark.parametrize("form", [not_aligned, np.matrix])
@pytest.mark.parametrize("reproducible", [None, True])
def test_arrays_of_one_rank_that_are_not_aligned_or_a_matrix(comm, rank, size, form, reproducible):
    keywords = {"comm": comm, "reproducible": reproducible}
    for width in (3, 2**20 // size):
        values = np.arange(size * width, dtype="float32").reshape(size, -1) % 99 + rank
        wanted = np.concatenate([values[rank : rank + 1] - rank + source for source in range(size)])
        x = form(values) if rank == 0 else values
        for out in (None, form(0 * values) if rank == 0 else 0 * values):
            assert np.array_equal(mpiagg.alltoallv(x, [1] * size, [1] * size, out=out, **keywords), wanted)
            assert np.array_equal(mpiagg.alltoall(x, out=out, **keywords), wanted)
            total = mpiagg.allreduce(x, out=out, **keywords)
            assert np.array_equal(total, size * (values - rank) + sum(range(size)))


@pytest.mark.parametrize("algorithm", [*mpiagg.algorithms("allgather"), "auto", "native"])
def test_allgatherv_gives_all_rows_to_all(comm, rank, size, algorithm):
    for seed in range(3):
        counts, rows = ragged(size, seed)
        x, wanted = rows[rank][0], np.concatenate([rows[source][0] for source in range(size)])
        keywords = {"comm": comm, "algorithm": algorithm}
        for received in (None, counts[:, 0]):
            for more in ({}, {"out": np.empty_like(wanted)}, {"check": True}):
                assert same(mpiagg.allgatherv(x, received, **more, **keywords), wanted)
            with mpiagg.allgatherv_init(x, received, **keywords) as plan:
                assert same(plan(), wanted)


def test_what_is_wrong_is_refused(comm, size):
    x = np.zeros((size, 2))
    with pytest.raises(ValueError, match="alltoall cuts the first axis"):
        mpiagg.alltoall(np.zeros(size * 2 + 1 if size > 1 else ()), comm=comm)
    with pytest.raises(ValueError, match=f"scatter takes an array of {size} rows"):
        mpiagg.scatter(np.zeros(size + 1), comm=comm)
    for out in (None, np.zeros(2)):
        with pytest.raises((ValueError, MismatchError), match="scatter takes an array"):
            mpiagg.scatter(None, out=out, comm=comm, check=out is not None)
    for function in (mpiagg.scan, mpiagg.exscan):
        with pytest.raises(ValueError, match="has no op 'avg'"):
            function(x, "avg", comm=comm)
    with pytest.raises(ValueError, match="sendcounts must be"):
        mpiagg.alltoallv(x, [1] * (size + 1), comm=comm)
    with pytest.raises(TypeError, match="sendcounts must be"):
        mpiagg.alltoallv(x, [1.0] * size, comm=comm)
    with pytest.raises(ValueError, match="has none"):
        mpiagg.allgatherv(1.0, comm=comm)
    with pytest.raises(ValueError, match="the counts are of"):
        mpiagg.alltoallv(x, [3] * size, [3] * size, comm=comm)
    with pytest.raises(ValueError, match="does not serve alltoall"):
        mpiagg.alltoall(x, comm=comm, algorithm="ring")


def test_counts_that_differ_are_an_error_on_all_ranks(comm, rank, size):
    if size == 1:
        return
    x = np.zeros((size, 2))
    received = [2 if rank == 0 and source == 1 else 1 for source in range(size)]
    with pytest.raises((ValueError, MismatchError), match="recvcounts"):
        mpiagg.alltoallv(x, [1] * size, received, comm=comm, check=True)
    with pytest.raises((ValueError, MismatchError), match="sendcounts must be"):
        mpiagg.alltoallv(x, [1] * (size + (rank == 0)), comm=comm, check=True)
    assert same(mpiagg.alltoallv(x, [1] * size, [1] * size, comm=comm, check=True), x)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, comm: mpiagg.allgatherv(x, comm=comm, check=True),
        lambda x, comm: mpiagg.allgatherv_init(x, comm=comm),
        lambda x, comm: mpiagg.scatter(x if x.dtype == float else None, comm=comm, check=True),
        lambda x, comm: mpiagg.scatter_init(x if x.dtype == float else None, comm=comm),
    ],
)
def test_an_array_that_one_rank_cannot_give_is_an_error_on_all(comm, rank, size, call):
    x = np.array(["no number"] * size) if rank == 0 else np.zeros((size, 2))
    error = (TypeError, ValueError) if rank == 0 else MismatchError
    with pytest.raises(error, match=r"scatter takes an array|dtype"):
        call(x, comm)
    assert same(mpiagg.allgather(rank, comm=comm), np.arange(size))


def test_ranks_that_disagree_are_told(comm, rank, size):
    if size == 1:
        return
    for function in (mpiagg.gather, mpiagg.scatter):
        with pytest.raises(MismatchError, match="root"):
            function(np.zeros((size, 2)), root=rank % 2, comm=comm, check=True)
    with pytest.raises(MismatchError):
        mpiagg.alltoall(np.zeros((size, 2 + rank)), comm=comm, check=True)


def test_alltoall_in_registered_memory_needs_no_messages(comm, rank, size, table):
    if size == 1:
        return
    rows = table(50_000)
    x, out = (mpiagg.empty(rows[rank].shape, rows.dtype, comm=comm) for _ in range(2))
    x[...] = rows[rank]
    with mpiagg.alltoall_init(x, out=out, comm=comm) as plan:
        assert plan.sent_bytes == (size - 1) * rows[0, 0].nbytes
        assert plan.nbytes < rows[0, 0].nbytes
        assert same(plan(), rows[:, rank])
