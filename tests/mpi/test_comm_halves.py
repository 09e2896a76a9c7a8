"""Half precision through the communicator: combined in float32 and rounded once, as by the array functions."""

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI
from support import call

import mpiagg

pytestmark = [pytest.mark.mpi, pytest.mark.few_ranks]

NATIVE = MPI.COMM_WORLD
SIZE, RANK = NATIVE.size, NATIVE.rank
DTYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
FORMS = ("blocking", "nonblocking", "persistent")
LENGTHS = (1, 40_003)


@pytest.fixture(params=[False, True], ids=["auto", "reproducible"])
def comm(request):
    comm = mpiagg.Comm(NATIVE, reproducible=request.param)
    yield comm
    comm.Free()


def twice(*what):
    """Make the call twice: the second time it is looked up."""
    for _ in range(2):
        call(*what)


def drawn(length, dtype, rank=RANK):
    values = np.random.default_rng([rank, length]).standard_normal(length)
    return (300 * values).astype(dtype)


def same(result, expected):
    assert result.dtype == expected.dtype
    assert result.tobytes() == expected.tobytes()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", [MPI.SUM, MPI.MIN])
def test_reductions(comm, dtype, form, length, op):
    x, each = drawn(length, dtype), [drawn(length, dtype, rank) for rank in range(SIZE)]
    combine = np.add if op == MPI.SUM else np.minimum
    # What is exact in float32 does not depend on the order.
    exact = combine.reduce([part.astype(np.float32) for part in each], axis=0, dtype=np.float32)
    near = {"rtol": float(ml_dtypes.finfo(dtype).eps), "atol": 1e-3}
    out = np.zeros_like(x)
    twice(comm, form, "Allreduce", x, out, op)
    np.testing.assert_allclose(out.astype(np.float32), exact, **near)
    for other in NATIVE.allgather(out.tobytes()):
        assert other == out.tobytes()
    at_root = np.zeros_like(x)
    twice(comm, form, "Reduce", x, at_root if RANK == SIZE - 1 else None, op, SIZE - 1)
    if RANK == SIZE - 1:
        np.testing.assert_allclose(at_root.astype(np.float32), exact, **near)
    whole, part = np.concatenate([x] * SIZE), np.zeros_like(x)
    twice(comm, form, "Reduce_scatter_block", whole, part, op)
    np.testing.assert_allclose(part.astype(np.float32), exact, **near)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moves(comm, dtype, form, length):
    x, gathered = drawn(length, dtype), np.zeros((SIZE, length), dtype)
    twice(comm, form, "Allgather", x, gathered)
    same(gathered, np.stack([drawn(length, dtype, rank) for rank in range(SIZE)]))
    twice(comm, form, "Bcast", x, SIZE - 1)
    same(x, drawn(length, dtype, SIZE - 1))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_rounded_once(comm, dtype, form):
    large = np.float32(2 / ml_dtypes.finfo(dtype).eps)
    x, out = np.full(5, large if RANK == 0 else 1, dtype), np.zeros(5, dtype)
    twice(comm, form, "Allreduce", x, out)  # 1 is lost where a sum is rounded each time
    same(out, np.full(5, large + (SIZE - 1), np.float32).astype(dtype))


def test_in_place_and_by_name(comm):
    x = np.full(6, 2048 if RANK == 0 else 1, np.float16)
    expected = np.full(6, 2048 + SIZE - 1, np.float32).astype(np.float16)
    if hasattr(MPI, "FLOAT16_T"):
        out = np.zeros_like(x)
        comm.Allreduce([x, MPI.FLOAT16_T], [out, 6, MPI.FLOAT16_T])
        same(out, expected)
    comm.Allreduce(MPI.IN_PLACE, x)
    same(x, expected)


def test_what_does_not_fit_is_infinite_without_a_warning(comm):
    x = np.full(3, 60000, np.float16)
    comm.Allreduce(MPI.IN_PLACE, x)
    assert np.isinf(x).all() == (SIZE > 1)


def test_ranks_with_other_halves_are_told():
    if SIZE > 1:
        comm = mpiagg.Comm(NATIVE)
        x = np.ones(3, DTYPES[RANK % 2])
        with pytest.raises(mpiagg.MismatchError, match="float16"):
            comm.Allreduce(x, np.zeros_like(x))
        NATIVE.Barrier()


def test_an_operator_that_is_not_for_them_is_for_the_library_to_refuse(comm):
    with pytest.raises((MPI.Exception, BufferError)):
        comm.Allreduce(np.ones(3, DTYPES[1]), np.ones(3, DTYPES[1]), MPI.BAND)


class Spoken:
    """An array that speaks DLPack alone, as torch's tensors do."""

    def __init__(self, array):
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


def test_what_speaks_dlpack_is_taken(comm):
    x, out = np.full(5, 2048 if RANK == 0 else 1, np.float16), np.zeros(5, np.float16)
    if hasattr(MPI, "FLOAT16_T"):
        comm.Allreduce(Spoken(x), Spoken(out))
        same(out, np.full(5, 2048 + SIZE - 1, np.float32).astype(np.float16))
