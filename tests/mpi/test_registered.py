"""Arrays in memory that the ranks of a node share: what they are, where they lie, and what is done in them."""

import gc
import os
import re
import tracemalloc
import warnings
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from restated import result, same_bits, values
from support import fill_recorder, refused

import mpiagg
from mpiagg.arrays import address
from mpiagg.plans import mailboxes
from mpiagg.transport import LINE, NOWHERE, SharedMemory, channel_of

pytestmark = pytest.mark.mpi


@pytest.fixture
def alone(size):
    """Whether the ranks have nobody to share memory with."""
    return size == 1


@pytest.mark.few_ranks
def test_arrays_are_like_numpys(comm, alone):
    for shape, dtype in product((0, 5, (), (3,), (2, 3), (0, 4), np.int64(4), (np.int8(2), 2)), ("f", "e", "?", "D")):
        x, wanted = mpiagg.empty(shape, dtype, comm=comm), np.empty(shape, dtype)
        assert type(x) is np.ndarray
        assert (x.shape, x.dtype) == (wanted.shape, wanted.dtype)
        assert x.flags.writeable
        assert x.flags.c_contiguous
        assert address(x) % LINE == 0 or x.size == 0 or alone
        x[...] = 1
        assert (x == 1).all()


def test_defaults(size, alone):
    x = mpiagg.empty(9)
    assert x.dtype == np.float32
    assert (channel_of(None).memory.host.position(x) == NOWHERE) == alone
    x[:] = 1
    assert mpiagg.allreduce(x, out=x).tolist() == [size] * 9


@pytest.mark.few_ranks
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((-1,), ValueError, "negative dimensions are not allowed: -1"),
        (((3, -2),), ValueError, r"negative dimensions are not allowed: \(3, -2\)"),
        ((1.5,), TypeError, "float"),
        (("3",), TypeError, "str"),
        ((3, object), TypeError, "arrays of dtype object cannot be aggregated"),
        ((3, "S3"), TypeError, "cannot be aggregated"),
        ((3, ">f8" if np.little_endian else "<f8"), TypeError, "not in native byte order"),
        ((3, "nonsense"), TypeError, "nonsense"),
    ],
)
def test_what_is_refused(comm, arguments, error, words):
    with pytest.raises(error, match=words):
        mpiagg.empty(*arguments, comm=comm)
    assert mpiagg.empty(3, comm=comm).shape == (3,)


def test_a_rank_that_raises_is_told_of(comm, rank, size):
    error, words = (ValueError, "negative") if rank == 0 else (mpiagg.MismatchError, "rank 0 raised ValueError: negat")
    with pytest.raises(error, match=words):
        mpiagg.empty(-1 if rank == 0 else 3, comm=comm)
    if size > 1:
        error = TypeError if rank == size - 1 else mpiagg.MismatchError
        with pytest.raises(error):
            mpiagg.empty(3, object if rank == size - 1 else float, comm=comm)


def test_ranks_may_ask_for_different_shapes(comm, rank, size):
    # Each rank's vector is the last part of what it asked for, or of what is more than others asked for.
    length = 20_000
    x = mpiagg.empty((1 + rank) * length, comm=comm)
    out = x[rank * length :]
    vectors = [values(other, length) for other in range(size)]
    for _ in range(2):
        mpiagg.allreduce(vectors[rank], out=out, comm=comm)
        assert same_bits(out, result("allreduce", vectors, rank)[1])
    with mpiagg.allreduce_init(vectors[rank], out=out, comm=comm) as plan:
        assert same_bits(plan(), result("allreduce", vectors, rank)[1])
    y = mpiagg.empty(5 if rank else 0, comm=comm)
    y[:] = rank
    assert (x[:0].size, y.sum()) == (0, 5 * rank)


def test_a_part_lies_where_it_lies(comm, alone):
    channel = channel_of(comm)
    x = mpiagg.empty((100, 10), comm=comm)
    if alone:
        assert channel.memory.host.position(x) == NOWHERE
        return
    whole = channel.memory.host.position(x)
    part = channel.memory.host.position(x[7:])
    assert part == (whole.window, whole.offset + 7 * 40)
    assert channel.memory.host.position(np.empty(1000, np.float32)) == NOWHERE
    other = mpiagg.empty(10, comm=comm)
    assert channel.memory.host.position(other) != whole
    x[:], other[:] = 1, 2
    assert x.sum() == 1000
    own = channel.memory.host.view(channel.node.place, part, 93 * 40).view(np.float32)
    assert np.shares_memory(own, x)
    assert own.size == 930


def test_forked_children_share_it(comm, alone):
    """What docs/sharp-bits.md says of them; memory that nobody else has mapped is copied on write, as ever."""
    registered, plain = mpiagg.empty(5, comm=comm), np.empty(5, np.float32)
    registered[:] = plain[:] = 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks in processes with threads
        child = os.fork()
    if child == 0:
        registered[:] = plain[:] = 2
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert plain.tolist() == [1] * 5
    assert registered.tolist() == [1 if alone else 2] * 5


# -- nothing is copied on its way, and nothing is left


@pytest.fixture
def copied(monkeypatch):
    """Return the list of what was copied between vectors, in bytes; nothing may go through mailboxes."""
    lengths = []

    def copyto(target, source, original=np.copyto):
        lengths.append(target.nbytes)
        original(target, source)

    def refuse(*given):
        raise AssertionError(given)

    monkeypatch.setattr(mailboxes.ThroughMailboxes, "_write_of", lambda *given: partial(refuse, *given))
    monkeypatch.setattr(np, "copyto", copyto)
    return lengths


@pytest.mark.parametrize("collective", ["allreduce", "broadcast", "allgather"])
def test_values_go_from_vector_to_vector(comm, rank, size, copied, collective):
    length = size * 20_000
    out = mpiagg.empty(length, comm=comm)
    chunk = out.nbytes // size
    own = out[rank * 20_000 : (rank + 1) * 20_000]
    x, shaped = (own, out.reshape(size, -1)) if collective == "allgather" else (out, out)
    # Each value is written once for every rank that has not got it: by the owner of its chunk, without another copy.
    pushed = (size - 1) * chunk
    received = 0 if collective != "broadcast" or rank == 0 or size == 1 else chunk
    pushed = pushed - chunk + received if received else pushed
    with getattr(mpiagg, f"{collective}_init")(x, out=shaped, comm=comm, algorithm="shared") as plan:
        assert plan.nbytes == (LINE if size > 1 else 0)
        for call in (plan, lambda: getattr(mpiagg, collective)(x, out=shaped, comm=comm, algorithm="shared")):
            for _ in range(2):
                copied.clear()
                call()
                assert sum(copied) == pushed


def test_a_plan_has_a_barrier_two_mailboxes_of_a_segment_at_most_and_room_for_a_chunk(comm, size):
    from mpiagg.plans.choices import SEGMENT

    for length in (1, 1000, SEGMENT // 4, SEGMENT, 4 * SEGMENT):
        x = np.ones(length, np.float32)
        with mpiagg.allreduce_init(x, out=x, comm=comm, algorithm="shared") as plan:
            segment, chunk = min(2 * x.nbytes, SEGMENT), 4 * -(-min(length, SEGMENT // 4) // size)
            assert plan.nbytes <= (LINE + 2 * max(LINE, segment) + (chunk if size > 2 else 0) if size > 1 else 0)


@pytest.mark.parametrize("kind", ["plan", "call"])
def test_the_steady_state_allocates_nothing(comm, kind):
    x = mpiagg.empty(100_000, comm=comm)
    y = np.ones(100_000, np.float32)
    x[:] = 1
    with (
        mpiagg.allreduce_init(x, "max", out=x, comm=comm) as first,
        mpiagg.allreduce_init(y, "max", out=y, comm=comm) as second,
    ):

        def run():
            if kind == "plan":
                first()
                second()
            else:
                mpiagg.allreduce(x, "max", out=x, comm=comm)
                mpiagg.allreduce(y, "max", out=y, comm=comm)

        for _ in range(4):
            run()
        tracemalloc.start()
        try:
            fill_recorder()
            run()
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            for _ in range(10):
                run()
            after, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert after - before < 5000
    assert peak - before < 20_000  # a vector has 400,000 bytes, and a chunk at least 50,000
    assert x.tolist() == y.tolist() == [1] * 100_000


# -- where memory goes


def windows(comm):
    return channel_of(comm).memory.host._windows


def test_plans_of_many_lengths_use_the_same_memory(comm):
    x = np.ones(120_000, np.float32)
    for length in range(1000, 120_000, 2500):
        with mpiagg.allreduce_init(x[:length], "max", out=x[:length], comm=comm, algorithm="shared") as plan:
            plan()
    # There are few lengths of mailboxes, each had twice at most.
    assert sum(window.nbytes for window in windows(comm)) <= 8 * 2**20


def test_memory_is_used_again_though_ranks_let_go_at_times_of_their_own(comm, rank, size):
    kept = []
    for turn in range(20 if size <= 4 else 8):
        x = mpiagg.empty(10_000, comm=comm)
        x[:] = rank + turn
        kept.append(x)
        if turn % 5 == rank % 5:
            del kept[: -1 - rank % 3]
            gc.collect()
        mpiagg.allreduce(x, out=x, comm=comm)
        assert (x == size * (size - 1) / 2 + size * turn).all()
        # What others do in memory of theirs, or in what was given back, is not seen in ours.
        for earlier, old in enumerate(reversed(kept[:-1]), 1):
            assert (old == size * (size - 1) / 2 + size * (turn - earlier)).all()
    assert sum(window.nbytes for window in windows(comm)) <= 8 * 2**20


def open_files():
    import os

    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - one call


def mapped():
    """How many pieces of shared memory this process has mapped."""
    with open("/proc/self/maps") as maps:  # noqa: PTH123 - no file of the disk
        return len(re.findall("rw-s", maps.read()))


@pytest.mark.few_ranks
def test_communicators_take_their_memory_along(world, size):
    def make_and_free():
        comm = world.Dup()
        x = mpiagg.empty(2000, comm=comm)
        x[:] = 1
        mpiagg.allreduce(x, out=x, comm=comm)
        with mpiagg.allreduce_init(x, out=x, comm=comm) as plan:
            plan()
        assert x[0] == size**2
        del x, plan
        gc.collect()
        comm.Free()

    for _ in range(2):
        make_and_free()
    before = open_files(), mapped()
    for _ in range(4):
        make_and_free()
    assert (open_files(), mapped()) == before


def test_arrays_outlive_their_communicator(world, rank, size):
    comm = world.Dup()
    x = mpiagg.empty(100_000, comm=comm)
    x[:] = rank
    mpiagg.allreduce(x, out=x, comm=comm)
    comm.Free()
    assert (x == size * (size - 1) / 2).all()
    x += 1
    world.Barrier()
    assert (x == size * (size - 1) / 2 + 1).all()
    # On another communicator they are arrays like any other.
    mpiagg.allreduce(x, out=x, comm=world)
    assert (x == size * (size * (size - 1) / 2 + 1)).all()


# -- where there is no memory to share


def refuse(monkeypatch):
    monkeypatch.setattr(SharedMemory, "_room", lambda _: 0)


def test_without_memory_all_goes_by_messages(comm, rank, size, monkeypatch):
    refuse(monkeypatch)
    outs = [np.empty(9000, np.float32) for _ in range(4)]
    vectors = [values(other, 9000) for other in range(size)]
    for turn in range(4):
        # Rank 0 comes with another array each time, and so makes another plan; the others come back with theirs.
        out = outs[turn if rank == 0 else 0]
        mpiagg.allreduce(vectors[rank], out=out, comm=comm, algorithm="shared")
        assert same_bits(out, result("allreduce", vectors, rank)[1])
    for length in (3, 2000, 9000, 150_000):
        vectors = [values(other, length) for other in range(size)]
        wanted = result("allreduce", vectors, rank)[1]
        for _ in range(2):
            assert same_bits(mpiagg.allreduce(vectors[rank], comm=comm, algorithm="shared"), wanted)
        with mpiagg.allreduce_init(vectors[rank], comm=comm, algorithm="shared") as plan:
            assert same_bits(plan(), wanted)
    assert not windows(comm)


@pytest.mark.few_ranks
def test_memory_that_runs_out(comm, rank, size, monkeypatch, alone):
    length = 9000
    vectors = [values(other, length) for other in range(size)]
    wanted = result("allreduce", vectors, rank)[1]
    x = mpiagg.empty(length, comm=comm)
    mpiagg.allreduce(vectors[rank], out=x, comm=comm, algorithm="shared")
    refuse(monkeypatch)
    if not alone:
        with pytest.raises(MemoryError, match=f"{size} ranks want"):
            mpiagg.empty(10**7, comm=comm)
    for out in (x, np.empty(length, np.float32), np.empty(length, np.float32)):
        mpiagg.allreduce(vectors[rank], out=out, comm=comm, algorithm="shared")
        assert same_bits(out, wanted)
        plans = [
            mpiagg.allreduce_init(vectors[rank], out=out, comm=comm, algorithm="shared") for _ in range(40)
        ]  # fmt: skip
        for plan in plans[::13]:
            assert same_bits(plan(), wanted)
        for plan in plans:
            plan.free()


def resident(array):
    """Return how many bytes are there of the mappings in which an array lies, as Linux tells."""
    start, stop, inside, found = address(array), address(array) + array.nbytes, False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if ends := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            first, last = (int(end, 16) for end in ends.groups())
            inside = first < stop and start < last
        elif inside and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


def test_memory_that_was_promised_is_there(comm, alone):
    # Nothing is written to the array; still, whoever asks next must be told that it is taken.
    if alone:
        assert mpiagg.empty(1).size == 1
        return
    x = mpiagg.empty((2**23,), comm=comm)
    assert resident(x) >= x.nbytes
    with pytest.raises(MemoryError, match="bytes of shared memory each, and"):
        mpiagg.empty(2**45, np.uint8, comm=comm)


# -- memory that a node has once


def test_memory_that_a_node_has_once(comm):
    node, memory = channel_of(comm).node, channel_of(comm).memory.host
    x = memory.once(8 * node.size).view(np.int64)
    assert (x == 0).all()
    comm.Barrier()
    x[node.place] = node.place + 1
    comm.Barrier()
    assert x.tolist() == list(range(1, node.size + 1))
    part = x[:1]
    del x
    memory.collect()
    assert part[0] == 1  # what is still in use stays
    comm.Barrier()
    del part
    memory.collect()
    assert not memory._common


def test_more_than_a_node_has_is_refused_on_all_ranks(comm):
    refused(MemoryError, "shared memory are wanted", channel_of(comm).memory.host.once, 2**50)


def test_memory_of_ever_other_lengths_is_used_again(world):
    comm = world.Dup()
    addresses = set()
    for step in range(60):
        x = mpiagg.empty(100_000 + 997 * step, np.uint8, comm=comm)
        addresses.add(x.ctypes.data)
        del x
    assert len(addresses) < 30
    comm.Free()


def test_memory_of_lengths_that_differ_by_rank_is_used_again(comm, rank, size):
    for turn in range(2, 30):
        x = mpiagg.empty(300_000 * (1 + (rank + turn) % size), np.uint8, comm=comm)
        x[:] = turn
        del x
        if turn == 3:
            before = sum(window.nbytes for window in windows(comm))
    assert sum(window.nbytes for window in windows(comm)) == before
