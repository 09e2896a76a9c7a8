"""Collectives through memory that the ranks of a node share: their bits, wherever the vectors lie and however long."""

import gc
import os
import weakref
from itertools import product
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI
from restated import result, same_bits, values
from support import PLACES, placed

import mpiagg
from mpiagg.arrays import cuts_of, reduction
from mpiagg.plans import one_shot
from mpiagg.plans.bound import bind_operation
from mpiagg.plans.choices import SEGMENT, Choice
from mpiagg.plans.on_node import ANNOUNCED, ONE_SHOT
from mpiagg.plans.operation import Operation, even_counts
from mpiagg.plans.plan import Plan
from mpiagg.schedules import Collective
from mpiagg.tables import Case
from mpiagg.tables import settings as settings_of_choices
from mpiagg.tables.predicted import BY_MAILBOXES, MORE_BY_MAILBOXES, WHOLLY_BY_MAILBOXES
from mpiagg.transport import LINE, NOWHERE, channel_of

pytestmark = pytest.mark.mpi

COLLECTIVES = ["allreduce", "reduce", "broadcast", "allgather", "reduce_scatter"]
PLANNED = [*COLLECTIVES, "gather", "scatter"]  # test_moves.py has the calls of these
EDGES = [edge // 4 + more for edge in (ONE_SHOT, ANNOUNCED, SEGMENT) for more in (-1, 0, 1)]
LENGTHS = [0, 1, 2, 7, *EDGES, 3 * SEGMENT // 4 + 5]
LONGEST = max(LENGTHS)
if MPI.COMM_WORLD.size > 4:  # ranks that outnumber the cores take long
    LENGTHS, PLACES = [0, 7, *EDGES[2::3]], PLACES[1::2]


def operation(channel, collective, counts, op="sum", dtype="float32", root=0, choice=Choice("shared")):  # noqa: B008, PLR0917 - never changed; what an operation has
    how = reduction(op, np.dtype(dtype), channel.size)
    return Operation(Collective(collective), channel.rank, channel.layout, root, counts, how, choice, MPI.SUM)


def counts_of(collective, length, size):
    chunked = collective in ("allgather", "reduce_scatter", "gather", "scatter")
    return even_counts(length, size) if chunked else (length,)


def vectors_of(size, length, dtype="float32", turn=0):
    return [values(place, length, dtype, turn) for place in range(size)]


def check(buffer, collective, vectors, rank, **keywords):
    wanted = result(collective, vectors, rank, **keywords)
    if wanted is not None:
        place, bits = wanted
        assert same_bits(buffer[place], bits), (collective, buffer.size, buffer.dtype, keywords)


@pytest.fixture
def memory(comm, rank):
    """Return a function that makes vectors that lie in one of the places."""
    return placed(mpiagg.empty(4 * (LONGEST + 100), comm=comm).view(np.uint8), rank)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("collective", PLANNED)
def test_plans_at_every_length(comm, rank, size, memory, collective, place):  # noqa: PLR0917 - fixtures and parameters
    channel = channel_of(comm)
    for length in LENGTHS:
        counts = counts_of(collective, length, size)
        buffer = memory(place, length)
        wanted = operation(channel, collective, counts, root=size - 1 if collective == "reduce" else 0)
        program = bind_operation(channel, wanted, buffer, channel.tags.in_turn())
        with Plan(channel, program, result=buffer, label=wanted.label) as plan:
            for turn in range(2 if length > 10_000 else 3):
                vectors = vectors_of(size, length, turn=turn)
                buffer[:] = vectors[rank]
                if turn == 1:
                    plan.start()
                    plan.wait()
                else:
                    plan()
                check(buffer, collective, vectors, rank, cuts=cuts_of(counts), root=wanted.root)


def public(collective, x, out, **keywords):
    """Call an array function, the output in ``out`` where it takes one; return what the rank gets."""
    if collective in ("reduce", "reduce_scatter"):
        return getattr(mpiagg, collective)(x, algorithm="shared", **keywords)
    return getattr(mpiagg, collective)(x, out=out, algorithm="shared", **keywords)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_calls_at_every_length(comm, rank, size, memory, collective, place):  # noqa: PLR0917 - fixtures and parameters
    for length in LENGTHS:
        if collective == "allgather":
            length = length // size * size  # noqa: PLW2901 - all ranks give as much
        counts = counts_of(collective, length, size)
        cuts = cuts_of(counts)
        own = slice(cuts[rank], cuts[rank + 1]) if collective == "allgather" else slice(0, length)
        # Every call comes with a vector that lies elsewhere, on some ranks or on all.
        for turn, lies in enumerate((place, place, "anywhere", place)[: 4 if length < SEGMENT else 2]):
            vectors = vectors_of(size, length, turn=turn)
            out = memory(lies, length)
            shaped = out.reshape(size, -1) if collective == "allgather" else out
            got = public(collective, vectors[rank][own], shaped, comm=comm)
            wanted = result(collective, vectors, rank, cuts=cuts)
            assert got is None if wanted is None else same_bits(got.reshape(-1), wanted[1]), (length, turn)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_short_vectors_take_one_barrier_whatever_their_layout(comm, rank, size, collective):
    channel = channel_of(comm)
    for length in (size, 1000 * size, ANNOUNCED // 4 // size * size):
        cuts = cuts_of(counts_of(collective, length, size))
        own = slice(cuts[rank], cuts[rank + 1]) if collective == "allgather" else slice(0, length)
        one = collective != "allreduce" or size == 2 or length * 4 <= ONE_SHOT
        for turn in range(3):
            vectors = vectors_of(size, length, turn=turn)
            x = vectors[rank][own]
            if (rank + turn) % 2:  # the next rank's is contiguous
                x = np.repeat(x, 2)[::2]
            out = np.empty((size, length // size) if collective == "allgather" else length, np.float32)
            barrier = channel.memory.for_calls()[0] if size > 1 else None
            before = barrier and barrier.count
            got = public(collective, x, out, comm=comm)
            assert barrier is None or barrier.count - before == (1 if one else 2)
            wanted = result(collective, vectors, rank, cuts=cuts)
            assert got is None if wanted is None else same_bits(got.reshape(-1), wanted[1]), (length, turn)


OPS = [
    *product(["float16", "bfloat16", "float32", "float64"], ["sum", "avg", "min", "max", "prod"]),
    *product(["complex64", "complex128"], ["sum", "avg", "prod"]),
    *product(["int8", "uint16", "int64"], ["sum", "min", "max", "prod"]),
    *product(["bool"], ["min", "max"]),
]


@pytest.mark.parametrize("collective", ["allreduce", "reduce", "reduce_scatter"])
def test_dtypes_and_operators(comm, rank, size, memory, collective):
    pytest.importorskip("ml_dtypes")
    for dtype, op in OPS:
        for length, place in ((5, "anywhere"), (2500, "registered"), (9001, "at offsets")):
            vectors = vectors_of(size, length, dtype)
            got = public(collective, vectors[rank], memory(place, length, dtype), op=op, comm=comm)
            wanted = result(collective, vectors, rank, cuts=cuts_of(even_counts(length, size)), op=op)
            assert got is None if wanted is None else same_bits(got, wanted[1]), (dtype, op, length)


@pytest.mark.parametrize("dtype", ["?", "e", "f", "g", "G"])
def test_the_bits_of_the_simulation(comm, rank, size, vectors, compare, memory, dtype):  # noqa: PLR0917 - fixtures and parameters
    op = "max" if dtype == "?" else "sum"
    for length, place in product((3, 2000, 20_001), PLACES):
        inputs = vectors(dtype, length)
        out = memory(place, length, dtype)
        compare(mpiagg.allreduce(inputs[rank], op, out=out, comm=comm), inputs, op, "shared" if size > 1 else "ring")
        with mpiagg.allreduce_init(inputs[rank], op, out=out, comm=comm, algorithm="shared", lanes=2) as plan:
            compare(plan(), inputs, op, "shared", 2)


@pytest.mark.parametrize("place", PLACES)
def test_what_a_choice_has_for_vectors_elsewhere(comm, rank, size, compare, memory, place):  # noqa: PLR0917 - fixtures
    """For plans and for calls."""
    channel, length = channel_of(comm), 20_001
    inputs, buffer = vectors_of(size, length), memory(place, length)
    wanted = operation(channel, "allreduce", (length,), choice=Choice("shared", unregistered="tree"))
    shared = channel.memory.host
    mapped = size == 1 or tuple(NOWHERE) not in shared.tell(shared.position(buffer), "tell where it lies")
    other = buffer.copy()
    with mpiagg.allreduce_init(other, out=other, comm=comm, algorithm="tree") as plan:
        messages = plan.nbytes
        scratch = LINE if mapped else messages
    for tag in (channel.tags.in_turn(), 0):
        program = bind_operation(channel, wanted, buffer, tag) if tag else bind_operation(channel, wanted, buffer)
        with Plan(channel, program, result=buffer, label=wanted.label) as plan:
            # A call may meet other vectors each time, so what messages would need counts.
            assert size == 1 or plan.nbytes == (scratch if tag else messages)
            for _ in range(2):
                buffer[:] = inputs[rank]
                compare(plan(), inputs, "sum", "shared" if mapped else "tree")


READ = Choice("shared", unregistered="shared")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("collective", PLANNED)
def test_vectors_are_read_where_they_lie(comm, rank, size, memory, collective, place):  # noqa: PLR0917 - fixtures and parameters
    """In place on a vector, by plans and calls; the others of a node read it, with no message and no copy of it."""
    channel = channel_of(comm)
    for length in (0, 1, size + 1, 20_001, SEGMENT // 4 + 3):
        counts, root = counts_of(collective, length, size), size - 1
        wanted = operation(channel, collective, counts, root=root, choice=READ)
        buffer = memory(place, length)
        for tag in (channel.tags.in_turn(), 0):
            program = bind_operation(channel, wanted, buffer, tag) if tag else bind_operation(channel, wanted, buffer)
            with Plan(channel, program, result=buffer, label=wanted.label) as plan:
                if tag and wanted.nbytes > ANNOUNCED and channel.memory.read():
                    # What a rank makes of its chunk of a reduction, the root reads there.
                    chunk = 0 if collective != "reduce" or rank == root else buffer.nbytes // size + buffer.itemsize
                    assert size == 1 or LINE <= plan.nbytes <= LINE + chunk
                for turn in range(2):
                    vectors = vectors_of(size, length, turn=turn)
                    buffer[:] = vectors[rank]
                    plan()
                    check(buffer, collective, vectors, rank, cuts=cuts_of(counts), root=root)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("segment", [SEGMENT, 8192])
def test_all_to_alls_of_equal_blocks_go_through_mailboxes(comm, rank, size, memory, reads, place, segment):  # noqa: PLR0917 - fixtures and parameters
    channel_of(comm).calls.free()  # of other tests, with arrays in the same places
    channel_of(comm).memory.read()  # which tries it once
    reads.clear()
    case = Case(Collective.ALLTOALL, 0, channel_of(comm).layout)
    with patch.object(one_shot, "SEGMENT", segment), settings_of_choices().trying(case, Choice("shared")):
        for turn, length in enumerate((0, 1, 5_003 // size, 9_000, SEGMENT // 4 // size + 3)):
            vectors = [v.reshape(size, -1) for v in vectors_of(size, size * length, turn=turn)]
            wanted = np.stack([v[rank] for v in vectors])
            out = memory(place, size * length).reshape(size, -1)
            assert same_bits(mpiagg.alltoall(vectors[rank], out=out, comm=comm, reproducible=True), wanted)
            out[...] = vectors[rank]
            assert same_bits(mpiagg.alltoall(out, out=out, comm=comm, reproducible=True), wanted)
            with mpiagg.alltoall_init(vectors[rank], comm=comm, reproducible=True) as plan:
                for _ in range(2):
                    assert same_bits(plan(), wanted)
                assert plan.nbytes >= LINE or not length or size == 1  # as what is sent takes none
    assert not {vector.process for vector in reads} - {os.getpid()}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("collective", [*PLANNED, "alltoall"])
def test_calls_read_what_lies_elsewhere_each_time(comm, rank, size, memory, reads, collective, place):  # noqa: PLR0917 - fixtures and parameters
    root = size // 2 if collective in ("reduce", "broadcast", "gather", "scatter") else 0
    keywords = {"root": root} if Collective(collective).rooted else {}
    rows = collective in ("allgather", "gather", "scatter", "alltoall")
    channel_of(comm).calls.free()  # of other tests, with arrays in the same places
    may_read = size > 1 and channel_of(comm).memory.read()
    for length in (size * 9_000, size * (SEGMENT // 4 // size + 3)):
        for turn, lies in enumerate((place, "anywhere", place)):
            vectors = vectors_of(size, length, turn=turn)
            cuts = [length // size * each for each in range(size + 1)]
            own = slice(*cuts[rank : rank + 2])
            x = vectors[rank][own] if collective in ("allgather", "gather") else vectors[rank]
            x = x.reshape(size, -1) if collective in ("scatter", "alltoall") else x
            given = x.copy()
            out = memory(lies, length // size if collective in ("reduce_scatter", "scatter") else length)
            shaped = out.reshape(size, -1) if rows and collective != "scatter" else out
            outputs = {} if collective in ("reduce", "gather") and rank != root else {"out": shaped}
            reads.clear()
            case = Case(Collective(collective), 0, channel_of(comm).layout)
            with settings_of_choices().trying(case, READ):
                got = getattr(mpiagg, collective)(x, **outputs, **keywords, comm=comm, reproducible=True)
            if turn == (place != "anywhere") and may_read:
                # Of what is moved to a root, or from it, it is the root that reads, or all but it.
                idle = {"gather": rank != root, "scatter": rank == root, "broadcast": rank == root}
                read = {vector.process for vector in reads} - {os.getpid()}
                assert bool(read) is not idle.get(collective, False)
            if collective == "alltoall":
                assert same_bits(got.reshape(-1), np.concatenate([other[own] for other in vectors]))
            else:
                wanted = result(collective, vectors, rank, cuts=cuts, root=root)
                assert got is None if wanted is None else same_bits(got.reshape(-1), wanted[1]), (length, turn)
            assert same_bits(x, given)


def test_a_plan_keeps_the_input_that_others_read(comm, size):
    kept = []
    whole = BY_MAILBOXES // 4
    counts = [whole] + [0] * (size - 1)  # in an all-to-all that all send to the first rank

    def blocks_init(x, comm):
        return mpiagg.alltoallv_init(x.reshape(-1)[:whole], counts, [whole * (comm.rank == 0)] * size, comm=comm)

    # Of one row ranks but the first have nothing to do in a reduce-scatter, and of a gather all but the root.
    for init in (mpiagg.gather_init, mpiagg.reduce_scatter_init, blocks_init):
        x = np.ones((1, BY_MAILBOXES), np.float32)
        kept.append(weakref.ref(x))
        plan = init(x, comm=comm)
        del x
        gc.collect()
        assert kept[-1]() is not None or size == 1
        plan()
        plan.free()
        del plan
        gc.collect()
        assert kept[-1]() is None


def test_an_input_that_lies_partly_in_the_output_is_not_read_there(comm, rank, size):
    length = BY_MAILBOXES // 4 + 1
    vectors = vectors_of(size, length)
    case = Case(Collective.ALLREDUCE, 4 * length, channel_of(comm).layout)
    for start, stop in ((0, 5), (5, 0), (3, 3)):
        both = np.empty(length + 5, np.float32)
        both[start : start + length] = vectors[rank]
        with settings_of_choices().trying(case, READ):
            got = mpiagg.allreduce(both[start : start + length], out=both[stop : stop + length], comm=comm)
        assert same_bits(got, result("allreduce", vectors, rank)[1])


def test_long_vectors_are_read_or_else_sent(comm, rank, size, compare, monkeypatch):
    long = BY_MAILBOXES // 4 + 1
    inputs, registered = vectors_of(size, long), mpiagg.empty(long, comm=comm)
    shared = "shared" if size > 1 else "ring"
    case = Case(Collective.ALLREDUCE, 4 * long, channel_of(comm).layout)
    for _ in range(2):
        read = shared if channel_of(comm).memory.read() else "ring"
        with settings_of_choices().trying(case, READ):
            compare(mpiagg.allreduce(inputs[rank], comm=comm), inputs, "sum", read)
        compare(mpiagg.allreduce(inputs[rank], out=registered, comm=comm), inputs, "sum", shared)
    monkeypatch.setattr(channel_of(comm).memory.host, "processes", None)  # as where the system forbids it
    channel_of(comm).calls.free()
    for _ in range(2):
        with settings_of_choices().trying(case, READ):
            compare(mpiagg.allreduce(inputs[rank], comm=comm), inputs, "sum", "ring")
        compare(mpiagg.allreduce(inputs[rank], out=registered, comm=comm), inputs, "sum", shared)


def test_long_plain_vectors_of_few_ranks_go_through_mailboxes_in_all_reduces(comm, rank, size, compare, reads):
    may_read = channel_of(comm).memory.read()  # which tries it once
    inputs = vectors_of(size, MORE_BY_MAILBOXES // 4 + 1)
    for collective, mailed in ((mpiagg.reduce_scatter, size == 1), (mpiagg.allreduce, size <= WHOLLY_BY_MAILBOXES)):
        reads.clear()
        got = collective(inputs[rank], comm=comm)
        assert bool({vector.process for vector in reads} - {os.getpid()}) is (may_read and not mailed)
    compare(got, inputs, "sum", "shared" if size > 1 and (may_read or mailed) else "ring")


@pytest.mark.parametrize("collective", ["reduce", "broadcast"])
def test_every_root(comm, rank, size, memory, collective):
    for root, place, length in product(range(size), PLACES, (3, 9000)):
        vectors = vectors_of(size, length, turn=root)
        wanted = result(collective, vectors, rank, root=root)
        for _ in range(2):
            got = public(collective, vectors[rank], memory(place, length), root=root, comm=comm)
            assert got is None if wanted is None else same_bits(got, wanted[1])


# -- where the chunks are of any lengths, and the segments short


def run_uneven(comm, collective, counts, *, buffer, segment=None, lanes=1, dtype="float32", root=0):
    """Run a plan and a call of an operation, in place, and check both."""
    channel = channel_of(comm)
    wanted = operation(
        channel, collective, counts, dtype=dtype, root=root, choice=Choice("shared", lanes, segment=segment)
    )
    for turn, tag in enumerate((channel.tags.in_turn(lanes), 0)):
        vectors = vectors_of(channel.size, buffer.size, dtype, turn)
        program = bind_operation(channel, wanted, buffer, tag) if tag else bind_operation(channel, wanted, buffer)
        with Plan(channel, program, result=buffer, label=wanted.label) as plan:
            for _ in range(2):
                buffer[:] = vectors[channel.rank]
                plan()
                check(buffer, collective, vectors, channel.rank, cuts=cuts_of(counts), root=root)


@pytest.mark.parametrize("collective", ["allgather", "reduce_scatter"])
def test_chunks_that_are_cut_into_lanes_fit_the_mailboxes(comm, size, collective):
    per_box = SEGMENT // 4
    # Each part of a chunk may have an element more than its share: these lengths would not fit otherwise.
    cases = [
        (2 * per_box // size - (1 if size > 1 else 0),) * size,
        (0,) * size,
        (per_box - 1, per_box + 1, *[0] * size)[:size],
        (*[1] * (size - 1), 2 * per_box),
    ]
    for counts in cases[: 4 if size <= 4 else 2]:
        run_uneven(comm, collective, counts, buffer=np.empty(sum(counts), np.float32))


@settings(max_examples=40 if MPI.COMM_WORLD.size <= 4 else 8)
@given(data=st.data())
def test_any_counts_and_segments(world, size, data):
    collective = data.draw(st.sampled_from(COLLECTIVES))
    if collective in ("allgather", "reduce_scatter", "gather", "scatter"):
        counts = tuple(data.draw(st.lists(st.integers(0, 300), min_size=size, max_size=size)))
    else:
        counts = (data.draw(st.integers(0, 12_000)),)
    length = sum(counts)
    dtype = data.draw(st.sampled_from(["float32", "float64", "complex128", "int8"]))
    registered = mpiagg.empty(12_010, np.complex128)
    buffer = registered.view(dtype)[3 : 3 + length] if data.draw(st.booleans()) else np.empty(length, dtype)
    segment = data.draw(st.sampled_from([None, 256, 1000, 4096, 2 * SEGMENT]))
    with patch.object(one_shot, "SEGMENT", segment or SEGMENT):  # of mailboxes, too
        run_uneven(
            world,
            collective,
            counts,
            buffer=buffer,
            segment=segment,
            lanes=data.draw(st.sampled_from([1, 3])),
            dtype=dtype,
            root=data.draw(st.integers(0, size - 1)),
        )


def test_vectors_that_are_not_aligned(comm, rank, size):
    registered = mpiagg.empty(80_100, np.uint8, comm=comm)
    out = registered[1 + rank : 80_001 + rank].view(np.float64)
    vectors = vectors_of(size, 10_000, "float64")
    for _ in range(2):
        mpiagg.allreduce(vectors[rank], out=out, comm=comm, algorithm="shared")
        check(out, "allreduce", vectors, rank)


# -- other communicators, and the communicator's calls


def test_other_communicators_than_that_of_the_memory(comm, world, rank, size):
    out = mpiagg.empty(20_000, comm=comm)
    duplicate = comm.Dup()
    for other in (comm.Split(rank % 2, -rank), duplicate):
        assert channel_of(other).memory.host.position(out) == NOWHERE
        members = [other.allgather(rank)[place] for place in range(other.size)]
        vectors = [values(member, out.size) for member in members]
        mpiagg.allreduce(values(rank, out.size), out=out, comm=other)
        check(out, "allreduce", vectors, other.rank)
        other.Free()
    vectors = vectors_of(size, out.size)
    mpiagg.allreduce(vectors[rank], out=out, comm=comm)
    check(out, "allreduce", vectors, rank)
    world.Barrier()


def test_calls_of_the_communicator_on_registered_memory(world, rank, size):
    comm = mpiagg.Comm(world, reproducible=True)
    for length in (3, 2000, 20_000):
        vectors = vectors_of(size, size * length)
        x, block = mpiagg.empty(size * length, comm=comm), mpiagg.empty(length, comm=comm)
        persistent = comm.Allreduce_init(MPI.IN_PLACE, x)
        sent = comm.Bcast_init(x, root=size - 1)
        for turn in range(3):
            x[:] = vectors[rank]
            comm.Allreduce(MPI.IN_PLACE, x)
            check(x, "allreduce", vectors, rank)
            x[:] = vectors[rank]
            comm.Iallreduce(MPI.IN_PLACE, x).Wait()
            assert np.allclose(x, sum(vectors), atol=1e-4)
            x[:] = vectors[rank]
            persistent.Start()
            if turn % 2:
                MPI.Prequest.Waitall([persistent])
            persistent.Wait()
            check(x, "allreduce", vectors, rank)
            x[:] = vectors[rank]
            sent.Start()
            sent.Wait()
            assert same_bits(x, vectors[-1])
            comm.Bcast(x, root=0)
            x[:] = vectors[rank]
            comm.Reduce_scatter_block(x, block)
            cuts = [place * length for place in range(size + 1)]
            assert same_bits(block, result("reduce_scatter", vectors, rank, cuts=cuts)[1])
            comm.Allgather(block, x)
            check(x, "allreduce", vectors, rank)
            comm.Barrier()
        persistent.Free()
        sent.Free()
    del x, block
    comm.Free()
