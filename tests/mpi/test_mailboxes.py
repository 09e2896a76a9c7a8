"""Calls through mailboxes: from wherever the input lies to wherever the result goes, in any length, by one plan."""

import warnings
from sys import getrefcount

import numpy as np
import pytest
from support import kept_plans

import mpiagg
from mpiagg.transport import channel_of

pytestmark = pytest.mark.mpi

LENGTHS = (40_000, 9_000, 0, 1, 9_001, 39_999, 2, 20_000)
"""Elements of float32 for each rank: some go by one barrier, others by two."""


def restated(verb, rows, rank, root):
    """Return what a verb makes of the ranks' inputs, of whole numbers; None where a rank has no result."""
    size = len(rows)
    if verb in ("allreduce", "reduce"):
        return rows.sum(0, rows.dtype) if verb == "allreduce" or rank == root else None
    if verb == "broadcast":
        return rows[root]
    if verb in ("allgather", "gather"):
        return rows if verb == "allgather" or rank == root else None
    parts = rows.reshape(size, size, -1)
    if verb == "alltoall":
        return parts[:, rank].ravel()
    return parts.sum(0, rows.dtype)[rank] if verb == "reduce_scatter" else parts[root, rank]


VERBS = ("allreduce", "reduce", "broadcast", "allgather", "gather", "reduce_scatter", "scatter")
ROOTED = ("reduce", "broadcast", "gather", "scatter")


def numbers(size, length, dtype, turn=0):
    """Return an input for each rank."""
    return ((np.arange(size * length) + turn) % 23).astype(dtype).reshape(size, length)


def call(verb, x, out, comm, root, **keywords):
    """Make a call that leaves its result in ``out``, and return that."""
    if verb == "broadcast":
        out[...] = x
        return mpiagg.broadcast(out, root=root, comm=comm, **keywords)
    if verb in ROOTED:
        keywords["root"] = root
    if verb == "scatter":
        x = x.reshape(comm.size, -1)
    return getattr(mpiagg, verb)(x, out=out, comm=comm, **keywords)


@pytest.mark.parametrize("dtype", ["f", "d", "b", "D", "e"])
@pytest.mark.parametrize("verb", VERBS)
def test_calls_of_all_lengths(comm, rank, size, verb, dtype):
    for turn, length in enumerate(LENGTHS):
        sent = length * size if verb in ("reduce_scatter", "scatter") else length
        rows = numbers(size, sent, dtype, turn)
        for root in {0, size - 1}:
            wanted = restated(verb, rows, rank, root)
            out = None if wanted is None else np.empty_like(wanted)
            got = call(verb, rows[rank].copy(), out, comm, root)
            assert got is None if wanted is None else np.array_equal(got, wanted), (length, root)


@pytest.mark.parametrize("verb", VERBS)
def test_one_plan_serves_all_lengths(world, rank, size, verb):
    comm = mpiagg.Comm(world)

    def plans_after(length):
        sent = length * size if verb in ("reduce_scatter", "scatter") else length
        wanted = restated(verb, numbers(size, sent, "f"), rank, 0)
        out = None if wanted is None else np.empty_like(wanted)
        call(verb, numbers(size, sent, "f")[rank], out, comm, 0, algorithm="shared")
        return len(kept_plans(channel_of(comm)))

    if size > 1:  # or there are no mailboxes
        assert {plans_after(20_000 + more) for more in range(30)} == {1}
    comm.Free()


@pytest.mark.parametrize("length", [3_000, 30_000])
@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "broadcast"])
def test_an_input_may_lie_in_the_way_of_the_output(comm, rank, size, verb, length):
    sent = length * size if verb in ("reduce_scatter", "scatter") else length
    rows = numbers(size, sent, "f")
    wanted = restated(verb, rows, rank, 0)
    if wanted is None:
        for _ in range(9):
            call(verb, rows[rank].copy(), None, comm, 0)
        return
    for offset in (0, 1, 7, sent // 2, wanted.size // 2, wanted.size - 1, rank * length, -1, -sent // 2):
        memory = np.zeros((size + 2) * (sent + wanted.size), np.float32)
        begin = sent
        x = memory[begin + offset : begin + offset + sent]
        out = memory[begin : begin + wanted.size].reshape(wanted.shape)
        x[:] = rows[rank]
        assert np.array_equal(call(verb, x, out, comm, 0), wanted), offset


@pytest.mark.parametrize("verb", VERBS)
def test_long_vectors_take_several_turns(comm, rank, size, verb):
    for length in (400_003, 700_001):
        sent = length // size * size if verb in ("reduce_scatter", "scatter") else length // size
        rows = numbers(size, sent, "d")
        wanted = restated(verb, rows, rank, size - 1)
        out = None if wanted is None else np.empty_like(wanted)
        got = call(verb, rows[rank].copy(), out, comm, size - 1, algorithm="shared")
        assert got is None if wanted is None else np.array_equal(got, wanted)


def test_arrays_of_any_shape_that_are_read_only_or_of_equal_dtypes(comm, rank, size):
    for code in ("l", "q", "L", "Q"):
        x = np.full((30, 400), rank + 1, code)
        x.flags.writeable = False
        for out in (np.empty((30, 400), "q" if code in "lq" else "Q"), np.empty((30, 400), code)):
            mpiagg.allreduce(x, out=out, comm=comm)
            assert (out == size * (size + 1) // 2).all()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)  # NumPy's, of matrices
        x = np.matrix(np.full((30, 400), rank + 1.0))
    assert (mpiagg.allreduce(x, comm=comm) == size * (size + 1) // 2).all()


class OfAnotherKind(np.ndarray):
    """An array with which NumPy's ufuncs do not work."""

    __array_ufunc__ = None


@pytest.mark.parametrize("strided", ["x", "out"])
@pytest.mark.parametrize("verb", [*VERBS, "alltoall"])
def test_the_arrays_of_one_rank_may_be_strided(comm, rank, size, verb, strided):
    for algorithm in ("auto", "native", *mpiagg.algorithms(verb)):
        for length in (3, 9_000):
            sent = length * size if verb in ("reduce_scatter", "scatter", "alltoall") else length
            rows = numbers(size, sent, "d")
            wanted = restated(verb, rows, rank, root=0)
            x, out = rows[rank], None if wanted is None else np.full_like(wanted, 99)
            if rank == 0 and strided == "x":
                x = np.repeat(x, 2)[::2]
            elif rank == 0 and out is not None:
                out = np.repeat(out, 2, axis=-1)[..., ::2]
            found = call(verb, x, out, comm, 0, algorithm=algorithm)
            assert found is None if wanted is None else (found == wanted).all(), algorithm


@pytest.mark.parametrize("length", [100, 20_000])
def test_an_output_may_be_of_a_class_of_arrays_of_its_own(comm, rank, size, length):
    for verb in VERBS:
        sent = length * size if verb in ("reduce_scatter", "scatter") else length
        rows = numbers(size, sent, "d")
        wanted = restated(verb, rows, rank, 0)
        out = None if wanted is None else np.empty_like(wanted).view(OfAnotherKind)
        got = call(verb, rows[rank].copy(), out, comm, 0)
        assert wanted is None or np.array_equal(got.view(np.ndarray), wanted), verb


@pytest.mark.parametrize("length", [1_000, 50_000])
def test_the_arrays_of_a_call_are_not_kept(comm, rank, size, length):
    x, out = np.ones(length), np.ones(length)
    before = getrefcount(x), getrefcount(out)
    mpiagg.allreduce(x, out=out, comm=comm)
    assert (getrefcount(x), getrefcount(out)) == before
    if size == 1:
        return
    with pytest.raises(mpiagg.MismatchError):
        mpiagg.allreduce(x[: length - rank], out=out[: length - rank], comm=comm)
    (found,) = [call.mailboxes for call in channel_of(comm).calls.values() if hasattr(call, "mailboxes")]
    assert found.x is found.out is None
    with pytest.raises(mpiagg.PlanError, match="an error has left an earlier call on this communicator"):
        mpiagg.allreduce(x, comm=comm)
    assert found.x is found.out is None
