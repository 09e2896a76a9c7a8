"""The array functions on real ranks: right, the same bits everywhere, and those of the simulation."""

from functools import reduce
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import mpiagg

pytestmark = pytest.mark.mpi

UFUNCS = {"sum": np.add, "avg": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(char) for char in "?bhilqBHILQefdgFDG"] + [BFLOAT16]
ROOTED = ("tree", "ring", "parameter_server")


def fits(op, dtype):
    if dtype.kind == "b":
        return op in ("min", "max")
    if dtype.kind in "iu":
        return op != "avg"
    return dtype.kind != "c" or op in ("sum", "avg", "prod")


def expected(vectors, op):
    """The reduction by NumPy, in the widest type; exact for the small whole numbers of the tests."""
    dtype = vectors[0].dtype
    work = np.float64 if dtype in (BFLOAT16, np.float16, np.float32) else dtype
    total = reduce(UFUNCS[op], [vector.astype(work) for vector in vectors])
    return (total / len(vectors) if op == "avg" else total).astype(dtype)


def assert_close(result, wanted):
    """Equal, but for the last bit or two of averages and products of numbers that are not whole."""
    assert result.dtype == wanted.dtype
    wide = "G" if result.dtype.kind == "c" else "g"
    relative = float(ml_dtypes.finfo(result.dtype).eps) * 2 if result.dtype.kind in "fcV" else 0
    np.testing.assert_allclose(result.astype(wide), wanted.astype(wide), rtol=relative)


def irregular(length, rank, dtype=float):
    """Values whose sum depends on the order."""
    return np.random.default_rng(rank).standard_normal(length).astype(dtype)


@pytest.mark.parametrize("algorithm", mpiagg.algorithms("allreduce"))
def test_every_op_and_dtype(rank, vectors, compare, algorithm):
    for op, dtype in product(UFUNCS, DTYPES):
        if fits(op, dtype):
            inputs = vectors(dtype, 11)
            result = mpiagg.allreduce(inputs[rank], op, algorithm=algorithm)
            assert_close(result, expected(inputs, op))
            compare(result, inputs, op, algorithm)


@pytest.mark.parametrize("algorithm", [*mpiagg.algorithms("allreduce"), "auto"])
def test_the_bits_of_the_simulation_where_order_matters(rank, size, compare, algorithm):
    for length, dtype, lanes in (
        *product((0, 1, size - 1, size, 37, 12_345), "d", (None,)),
        *product((37,), "ef", (None, 3)),
        *product((1, 1001), "d", (2, 7)),
    ):
        inputs = [irregular(length, r, dtype) for r in range(size)]
        result = mpiagg.allreduce(inputs[rank], "avg", algorithm=algorithm, lanes=lanes)
        compare(result, inputs, "avg", algorithm, lanes)


def test_as_many_lanes_as_there_can_be(rank, size, compare):
    inputs = [irregular(1001, r) for r in range(size)]
    compare(mpiagg.allreduce(inputs[rank], algorithm="tree", lanes=64), inputs, "sum", "tree", 64)


@pytest.mark.parametrize("algorithm", [*ROOTED, "auto", "native"])
def test_reduce_and_broadcast_with_every_root(rank, size, algorithm):
    everyone = [irregular(9, r).reshape(3, 3).round() for r in range(size)]
    for root in range(size):
        result = mpiagg.reduce(everyone[rank], root=root, algorithm=algorithm)
        if rank == root:
            assert np.array_equal(result, sum(everyone))
        else:
            assert result is None
        out = np.full((3, 3), -1.0)
        result = mpiagg.reduce(everyone[rank], "max", root=root, algorithm=algorithm, out=out)
        assert result is (out if rank == root else None)
        assert np.array_equal(out, np.max(everyone, axis=0) if rank == root else np.full((3, 3), -1.0))
        given = mpiagg.broadcast(everyone[rank], root=root, algorithm=algorithm)
        assert np.array_equal(given, everyone[root])
        mine = everyone[rank].copy()
        assert mpiagg.broadcast(mine, root=root, algorithm=algorithm, out=mine) is mine
        assert np.array_equal(mine, everyone[root])


@pytest.mark.parametrize("algorithm", [*mpiagg.algorithms("allgather"), "auto", "native"])
@pytest.mark.parametrize("lanes", [None, 2])
def test_allgather_and_reduce_scatter(rank, size, algorithm, lanes):
    how = {"algorithm": algorithm, "lanes": lanes}
    for shape in ((), (5,), (0,), (2, 3), (size + 1, 2), (7, 0)):
        everyone = [(np.arange(np.prod(shape, dtype=int)).reshape(shape) + 10.0 * r) for r in range(size)]
        gathered = mpiagg.allgather(everyone[rank], **how)
        assert np.array_equal(gathered, np.stack(everyone))
        if shape:
            part = mpiagg.reduce_scatter(everyone[rank], **how)
            assert np.array_equal(part, np.array_split(sum(everyone), size)[rank])
            average = mpiagg.reduce_scatter(everyone[rank], "avg", **how)
            assert np.array_equal(average, np.array_split(sum(everyone) / size, size)[rank])


@pytest.mark.parametrize("algorithm", mpiagg.algorithms("reduce_scatter"))
def test_reduce_scatter_is_the_same_sum_for_every_dtype(rank, size, vectors, algorithm):
    for op, dtype in product(("sum", "max"), DTYPES):
        if fits(op, dtype):
            inputs = vectors(dtype, 2 * size + 1)
            part = mpiagg.reduce_scatter(inputs[rank], op, algorithm=algorithm)
            assert np.array_equal(part, np.array_split(expected(inputs, op), size)[rank])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_only_moved_keeps_its_bits(rank, size, bits, dtype):
    payload = [np.random.default_rng(r).integers(0, 256, 6 * dtype.itemsize, np.uint8) for r in range(size)]
    if dtype.kind == "b":
        payload = [bytes_ & 1 for bytes_ in payload]
    everyone = [bytes_.view(dtype) if dtype.kind not in "fcV" else (bytes_[:6].astype(dtype)) for bytes_ in payload]
    for algorithm in (*mpiagg.algorithms("allgather"), "native"):
        assert bits(mpiagg.allgather(everyone[rank], algorithm=algorithm)) == bits(np.stack(everyone))
    for algorithm in (*mpiagg.algorithms("broadcast"), "native"):
        given = mpiagg.broadcast(everyone[rank], root=size - 1, algorithm=algorithm)
        assert bits(given) == bits(everyone[size - 1])


NUMBERED = {
    "allreduce": ("knomial-2", "recursive_multiplying-3", "double_tree-5", "multi_radix-2", "multi_radix-3x2"),
    "reduce": ("knomial-3", "double_tree-2", "circulant_blocks-7"),
    "broadcast": ("knomial-8", "double_tree-1", "circulant_blocks-1"),
}


@pytest.mark.parametrize("length", [0, 3, 1000])
def test_algorithms_with_a_number(rank, size, length):
    everyone = [np.arange(length, dtype=np.int64) * (r + 1) for r in range(size)]
    for algorithm in NUMBERED["allreduce"]:
        assert np.array_equal(mpiagg.allreduce(everyone[rank], algorithm=algorithm), sum(everyone))
    for root in (0, size - 1):
        for algorithm in NUMBERED["reduce"]:
            total = mpiagg.reduce(everyone[rank], root=root, algorithm=algorithm)
            assert rank != root or np.array_equal(total, sum(everyone))
        for algorithm in NUMBERED["broadcast"]:
            assert np.array_equal(mpiagg.broadcast(everyone[rank], root=root, algorithm=algorithm), everyone[root])


@pytest.mark.parametrize("algorithm", ["pat", "swing", "circulant"])
@pytest.mark.parametrize("length", [2**13 - 1, 2**13, 2**13 + 1, 3 * 2**12])
def test_messages_of_unlike_lengths_in_a_round(rank, size, algorithm, length):
    """Chunks around 32 KiB, where packing ends; and of 48 KiB: two, but not one, are too long to send unasked."""
    everyone = [np.random.default_rng(r).standard_normal(size * length + size // 2, np.float32) for r in range(size)]
    given = mpiagg.allreduce(everyone[rank], algorithm=algorithm)
    assert given.tobytes() == mpiagg.simulate(everyone, algorithm=algorithm)[rank].tobytes()
    whole = mpiagg.allgather(everyone[rank][:length], algorithm=algorithm)
    assert np.array_equal(whole, np.stack([x[:length] for x in everyone]))


# -- forms of arguments


@pytest.mark.parametrize("algorithm", ["recursive_doubling", "ring", "circulant", "native"])
@pytest.mark.parametrize("shape", [(4, 6), (40, 600)])
def test_layouts_of_input_and_output(rank, size, algorithm, shape):
    everyone = [np.arange(np.prod(shape), dtype=float).reshape(shape) + r for r in range(size)]
    total = sum(everyone)
    x = everyone[rank]
    wide = np.zeros((shape[0], shape[1] * 2))
    wide[:, ::2] = x
    read_only = x.copy()
    read_only.flags.writeable = False
    for form in (x, np.asfortranarray(x), wide[:, ::2], x[::-1, ::-1][::-1, ::-1], read_only, x.tolist()):
        before = np.array(form)
        assert np.array_equal(mpiagg.allreduce(form, algorithm=algorithm), total)
        assert np.array_equal(form, before)
    for out in (np.empty(shape), np.empty(shape, order="F"), np.empty((shape[0], shape[1] * 2))[:, ::2]):
        assert mpiagg.allreduce(x, out=out, algorithm=algorithm) is out
        assert np.array_equal(out, total)
    for mine in (x.copy(), np.array(x, order="F"), wide[:, ::2]):
        assert mpiagg.allreduce(mine, out=mine, algorithm=algorithm) is mine
        assert np.array_equal(mine, total)
    assert np.array_equal(wide[:, 1::2], np.zeros(shape))


def test_ranks_may_differ_in_layout_but_not_in_shape(rank, size):
    shape = (50, 200)  # too long to be copied into a plan's own buffer
    everyone = [np.arange(np.prod(shape), dtype=float).reshape(shape) + r for r in range(size)]
    x = everyone[rank] if rank % 2 else np.asfortranarray(everyone[rank])
    out = np.empty(shape, order="C" if rank % 3 else "F")
    assert np.array_equal(mpiagg.allreduce(x, out=out, algorithm="ring"), sum(everyone))


def test_overlapping_input_and_output(rank, size):
    memory = np.arange(10_001.0) + rank
    total = sum(np.arange(10_000.0) + r for r in range(size))
    result = mpiagg.allreduce(memory[:-1], out=memory[1:], algorithm="ring")
    assert np.array_equal(result, total)
    assert memory[0] == rank


def test_scalars_lists_and_nothing(rank, size):
    total = size * (size - 1) // 2
    for algorithm in (*mpiagg.algorithms("allreduce"), "auto", "native"):
        scalar = mpiagg.allreduce(rank, algorithm=algorithm)
        assert (scalar.shape, scalar.dtype, int(scalar)) == ((), np.int64, total)
        assert mpiagg.allreduce([rank, 1], algorithm=algorithm).tolist() == [total, size]
        assert mpiagg.allreduce(np.empty((3, 0), "f4"), algorithm=algorithm).shape == (3, 0)
        assert mpiagg.allreduce(np.array([float(rank)]), "avg", algorithm=algorithm) == pytest.approx((size - 1) / 2)


def test_halves_accumulate_in_float32(size):
    for dtype, algorithm in product((np.float16, BFLOAT16), (*mpiagg.algorithms("allreduce"), "native")):
        big = np.full(10, 40000, dtype)
        assert np.array_equal(mpiagg.allreduce(big, "avg", algorithm=algorithm), big), (dtype, algorithm)
    assert np.isfinite(mpiagg.reduce_scatter(np.full(size, 40000, np.float16), "avg")).all()


# -- the MPI library's own, and its operators


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_native_is_right_too(rank, size, vectors, dtype):
    for op in UFUNCS:
        if fits(op, dtype):
            inputs = vectors(dtype, 2 * size)
            right = expected(inputs, op)
            assert_close(mpiagg.allreduce(inputs[rank], op, algorithm="native"), right)
            part = mpiagg.reduce_scatter(inputs[rank], op, algorithm="native")
            assert_close(part, np.array_split(right, size)[rank])


@pytest.mark.parametrize(
    ("op", "ufunc", "dtypes"),
    [
        (MPI.SUM, np.add, "ilfdD"),
        (MPI.PROD, np.multiply, "ld"),
        (MPI.MIN, np.minimum, "bd"),
        (MPI.MAX, np.maximum, "Bf"),
        (MPI.BAND, np.bitwise_and, "BhL"),
        (MPI.BOR, np.bitwise_or, "iQ"),
        (MPI.BXOR, np.bitwise_xor, "bl"),
        (MPI.LAND, np.logical_and, "i?"),
        (MPI.LOR, np.logical_or, "l?"),
        (MPI.LXOR, np.logical_xor, "B?"),
    ],
)
def test_operators_of_mpi(rank, vectors, op, ufunc, dtypes):
    for dtype in dtypes:
        inputs = vectors(dtype, 9)
        right = reduce(ufunc, inputs).astype(dtype)
        for algorithm in (*mpiagg.algorithms("allreduce"), "auto"):
            assert np.array_equal(mpiagg.allreduce(inputs[rank], op, algorithm=algorithm), right), (dtype, algorithm)


def test_operators_of_the_users_own(world, rank, size):
    def larger_magnitude(a, b, datatype):
        assert datatype == MPI.DOUBLE
        left, right = np.frombuffer(a, "f8"), np.frombuffer(b, "f8")
        right[:] = np.where(np.abs(left) > np.abs(right), left, right)

    op = MPI.Op.Create(larger_magnitude, commute=True)
    x = np.array([1.0 + rank, -1.0 - rank, 0.5])
    try:
        for algorithm in ("auto", "native"):
            assert mpiagg.allreduce(x, op, algorithm=algorithm).tolist() == [size, -size, 0.5]
            result = mpiagg.reduce(x, op, root=size - 1, algorithm=algorithm)
            assert (result is not None) == (rank == size - 1)
        with mpiagg.allreduce_init(x, op) as plan:
            assert plan().tolist() == [size, -size, 0.5]
        with pytest.raises(
            ValueError, match="algorithm 'ring' cannot apply an op that is not predefined; 'native' can"
        ):
            mpiagg.allreduce(x, op, algorithm="ring")
        world.Barrier()
    finally:
        op.Free()


# -- communicators


def on(comm, algorithm):
    x = irregular(20, comm.Get_rank()).round(2)
    everyone = [irregular(20, r).round(2) for r in range(comm.Get_size())]
    result = mpiagg.allreduce(x, comm=comm, algorithm=algorithm)
    return np.array_equal(result, mpiagg.simulate(everyone, "sum", algorithm)[comm.Get_rank()])


@pytest.mark.parametrize("algorithm", ["ring", "tree", "halving_doubling"])
def test_communicators_of_all_kinds(world, rank, size, algorithm):
    made = [
        world.Dup(),
        world.Split(color=rank % 2, key=rank),
        world.Split(color=0, key=-rank),
        world.Split(color=0 if rank < 3 else MPI.UNDEFINED),
        world.Create_cart([size], periods=[True]),
    ]
    there = [comm for comm in made if comm != MPI.COMM_NULL]
    try:
        assert all([on(comm, algorithm) for comm in [MPI.COMM_SELF, world, *there]])  # noqa: C419 - all take part
        reversed_ = made[2]
        assert reversed_.Get_rank() == size - 1 - rank
        assert mpiagg.broadcast(rank, root=0, comm=reversed_, algorithm="tree") == size - 1
        assert mpiagg.allgather(rank, comm=reversed_).tolist() == list(range(size))[::-1]
    finally:
        for comm in there:
            comm.Free()


def test_a_duplicate_has_a_channel_of_its_own(world, rank, size):
    from mpiagg.transport import channel_of

    duplicate = world.Dup()
    mine, its = channel_of(world), channel_of(duplicate)
    assert mine is not its
    assert channel_of(MPI.Intracomm(duplicate)) is its
    # Plans on both may be under way at once.
    x, y = np.full(7, float(rank)), np.full(7, 1.0)
    with mpiagg.allreduce_init(x) as first, mpiagg.allreduce_init(y, comm=duplicate) as second:
        if rank % 2:
            first.start()
            second.start()
        else:
            second.start()
            first.start()
        assert np.array_equal(second.wait(), np.full(7, float(size)))
        assert np.array_equal(first.wait(), np.full(7, size * (size - 1) / 2))
    duplicate.Free()
    assert not its.open
    assert np.array_equal(mpiagg.allreduce(y), np.full(7, float(size)))


@pytest.mark.parametrize("algorithm", ["auto", "ring", "shared", "native"])
@pytest.mark.parametrize("length", [1, 3000, 300_000])
def test_what_is_no_input_can_be_of_any_layout(rank, size, algorithm, length):
    root = size - 1
    x = np.full(length, 7.0) if rank == root else np.zeros(2 * length)[::2]
    for _ in range(2):
        assert (mpiagg.broadcast(x, root=root, algorithm=algorithm) == 7).all()
