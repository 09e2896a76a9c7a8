"""AllReduce and ParameterServer beside independent restatements in NumPy."""

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI
from support import refused

import mpiagg
from mpiagg.aggregation import elementwise

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()

FLOATS = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.complex64, np.complex128]
INTEGERS = [np.int8, np.uint16, np.int64]
FOLDS = {"sum": np.add, "avg": np.add, "min": np.minimum, "max": np.maximum}
CASES = [
    *((op, dtype) for op in FOLDS for dtype in FLOATS if op in ("sum", "avg") or np.dtype(dtype).kind != "c"),
    *((op, dtype) for op in ("sum", "min", "max") for dtype in INTEGERS),
    *((op, np.bool_) for op in ("min", "max")),
]
SHAPES = [(2, 3), (), (0, 4), (17,), (1, 2, 2)]


def working(dtype):
    return np.float32 if np.dtype(dtype).name in ("float16", "bfloat16") else dtype


def values(rank, shape, dtype):
    """Small integers, so that sums are exact in every dtype."""
    count = int(np.prod(shape, dtype=int))
    return ((np.arange(count) * 7 + 3 * rank) % 5).reshape(shape).astype(dtype)


def reduced(op, shape, dtype, divisor=SIZE):
    total = values(0, shape, dtype).astype(working(dtype))
    for rank in range(1, SIZE):
        total = FOLDS[op](total, values(rank, shape, dtype).astype(working(dtype)))
    return (np.divide(total, divisor, dtype=working(dtype)) if op == "avg" else total).astype(dtype)


def strided(array):
    """Return the same values in an array of another layout."""
    wide = np.zeros((*array.shape, 3), array.dtype)
    wide[..., 1] = array
    return wide[..., 1]


def noise(rank, length, dtype=np.float32):
    return np.random.default_rng(rank).standard_normal(length).astype(dtype)


def ring_mean(vectors):
    """The left fold of every chunk in ring order, then one division."""
    size, length = len(vectors), len(vectors[0])
    mean = np.empty_like(vectors[0])
    start = 0
    for chunk in range(size):
        stop = start + length // size + (chunk < length % size)
        total = vectors[chunk][start:stop].copy()
        for offset in range(1, size):
            total = total + vectors[(chunk + offset) % size][start:stop]
        mean[start:stop] = total / np.float32(size)
        start = stop
    return mean


def same(arrays, expected):
    for array, wanted in zip(arrays, expected, strict=True):
        assert array.dtype == wanted.dtype
        assert array.shape == wanted.shape
        assert array.tobytes() == wanted.tobytes()


def same_on_all_ranks(arrays):
    mine = b"".join(array.tobytes() for array in arrays)
    return all(other == mine for other in COMM.allgather(mine))


# -- results


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_every_op_and_dtype(op, dtype):
    with mpiagg.AllReduce(op=op) as aggregation:
        for layout in (np.ascontiguousarray, strided, np.asfortranarray):
            tensors = [layout(values(RANK, shape, dtype)).reshape(shape) for shape in SHAPES]
            aggregation.aggregate(tensors)
            same(tensors, [reduced(op, shape, dtype) for shape in SHAPES])


def test_the_kinds_of_dtypes_are_kept_apart():
    kinds = [np.float16, np.float32, ml_dtypes.bfloat16, np.float32, np.float64, np.float16, np.complex64]
    with mpiagg.AllReduce() as aggregation:
        for _ in range(2):
            tensors = [values(RANK, (5,), dtype) for dtype in kinds]
            before = list(tensors)
            aggregation.aggregate(tensors)
            same(tensors, [reduced("avg", (5,), dtype) for dtype in kinds])
            assert all(x is y for x, y in zip(tensors, before, strict=True))


def test_nothing_around_a_strided_tensor_is_touched():
    base = np.full((6, 6), float(RANK))
    with mpiagg.AllReduce(op="sum") as aggregation:
        aggregation.aggregate([base[1::2, ::3], base[0, 1:3]])
    expected = np.full((6, 6), float(RANK))
    expected[1::2, ::3] = expected[0, 1:3] = sum(range(SIZE))
    assert base.tolist() == expected.tolist()


def test_no_tensors_and_tensors_without_elements():
    with mpiagg.AllReduce() as aggregation:
        aggregation.aggregate([])
        empty = [np.empty((0, 3)), np.empty(0, np.float16)]
        aggregation.aggregate(empty)
        assert [x.shape for x in empty] == [(0, 3), (0,)]
        assert aggregation.bytes_sent == 0


@pytest.mark.parametrize("algorithm", [*mpiagg.algorithms("allreduce"), "auto"])
@pytest.mark.parametrize("length", [1, 1001, 20_000])
def test_the_bits_are_those_of_the_simulation(algorithm, length):
    vectors = [noise(rank, length) for rank in range(SIZE)]
    wanted = mpiagg.simulate(vectors, "avg", algorithm)[RANK]
    with mpiagg.AllReduce(algorithm=algorithm) as aggregation:
        whole = [vectors[RANK].copy()]
        aggregation.aggregate(whole)
        same(whole, [wanted])
        parts = [vectors[RANK][: length // 3].copy(), vectors[RANK][length // 3 :].copy()]
        aggregation.aggregate(parts)
        same([np.concatenate(parts)], [wanted])
        assert same_on_all_ranks(parts)


def test_the_ring_is_its_left_fold():
    vectors = [noise(rank, 10_007) for rank in range(SIZE)]
    with mpiagg.AllReduce(algorithm="ring") as aggregation:
        x = vectors[RANK].copy()
        aggregation.aggregate([x])
    same([x], [ring_mean(vectors)])


def test_the_library_s_own_algorithm():
    with mpiagg.AllReduce(algorithm="native") as aggregation:
        tensors = [values(RANK, shape, np.float32) for shape in SHAPES]
        aggregation.aggregate(tensors)
        same(tensors, [reduced("avg", shape, np.float32) for shape in SHAPES])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.complex64])
@pytest.mark.parametrize("denom", [4, 2.5, np.float32(8), np.int64(-3)])
def test_a_denom_is_applied_at_every_size(dtype, denom):
    with mpiagg.AllReduce(denom=denom) as aggregation:
        tensors = [values(RANK, (7,), dtype)]
        aggregation.aggregate(tensors)
    same(tensors, [reduced("avg", (7,), dtype, float(denom))])


@pytest.mark.parametrize("length", [3, 50_000])
@pytest.mark.parametrize("algorithm", ["auto", "native"])
def test_dividing_before_the_sum(algorithm, length):
    huge = np.float32(3e38)
    with mpiagg.AllReduce(divide_before=True, algorithm=algorithm) as aggregation:
        x = np.full(length, huge)
        aggregation.aggregate([x])
        total = huge / np.float32(SIZE)
        for _ in range(SIZE - 1):
            total += huge / np.float32(SIZE)
        assert np.allclose(x, total, rtol=1e-6)
        assert np.isfinite(x).all()
    with mpiagg.AllReduce(divide_before=True, denom=4) as aggregation:
        halves = [np.full(3, 40_000, np.float16), np.full((2,), RANK, np.float16)]
        with np.errstate(over="ignore"):  # 80,000 on 8 ranks is more than float16 has
            aggregation.aggregate(halves)
            wanted = np.full(3, np.float32(10_000 * SIZE)).astype(np.float16)
        same(halves, [wanted, np.full(2, sum(range(SIZE)) / 4, np.float16)])


def test_averages_of_half_precision_do_not_overflow():
    with mpiagg.AllReduce() as aggregation:
        tensors = [np.full(3, 40_000, np.float16)]
        aggregation.aggregate(tensors)
        assert tensors[0].tolist() == [40_000] * 3


# -- what is kept


def test_a_known_layout_builds_nothing():
    with mpiagg.AllReduce(algorithm="ring") as aggregation:
        tensors = [noise(RANK, 9), noise(RANK, 20_000), noise(RANK, 12_000, np.float64), noise(RANK, 5, np.float16)]
        aggregation.aggregate(tensors)
        sent, opened = aggregation.bytes_sent, set(aggregation._channel.open)
        (packing,) = aggregation._packings.values()
        for _ in range(3):
            aggregation.aggregate(tensors)
        assert set(aggregation._channel.open) == opened
        assert list(aggregation._packings.values()) == [packing]
        assert aggregation.bytes_sent == 4 * sent
    assert len(aggregation._channel.open) == len(opened) - 3


def test_only_so_many_layouts_are_kept(monkeypatch):
    monkeypatch.setattr(elementwise, "KEPT_LAYOUTS", 3)
    with mpiagg.AllReduce(op="sum") as aggregation:
        opened = len(aggregation._channel.open)
        for length in [1, 2, 3, 1, 4, 2, 5, 5]:
            tensors = [np.full(length, RANK)]
            aggregation.aggregate(tensors)
            assert tensors[0].tolist() == [sum(range(SIZE))] * length
        assert [layout[0][1] for layout, _ in aggregation._packings] == [(4,), (2,), (5,)]
        assert len(aggregation._channel.open) == opened + 3


@pytest.mark.parametrize("length", [30, 60_000])
def test_new_arrays_of_a_known_layout(length):
    with mpiagg.AllReduce(op="sum") as aggregation:
        kept = []
        for turn in range(3):
            kept.append(np.full(length, float(RANK + turn)))
            aggregation.aggregate([kept[-1]])
        for turn, x in enumerate(kept):
            assert (x == sum(range(SIZE)) + SIZE * turn).all()


@pytest.mark.parametrize("algorithm", ["parameter_server", "ring", "direct"])
def test_bytes_are_counted(algorithm):
    server = 4096 * (1 if RANK else SIZE - 1)
    sent = server if algorithm == "parameter_server" else 2 * (SIZE - 1) * 4096 // SIZE
    with mpiagg.AllReduce(algorithm=algorithm) as aggregation:
        aggregation.aggregate([np.zeros(512, np.float32), np.zeros(512, np.float32)])
        assert abs(aggregation.bytes_sent - sent) <= 8 * SIZE
        assert COMM.allreduce(aggregation.bytes_sent) == 2 * (SIZE - 1) * 4096


def test_a_communicator_of_its_own():
    half = COMM.Split(RANK % 2, -RANK)
    with mpiagg.AllReduce(half, op="sum") as aggregation:
        x = np.full(3, RANK)
        aggregation.aggregate([x])
        assert x.tolist() == [sum(range(RANK % 2, SIZE, 2))] * 3
    half.Free()


# -- plans


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("make", [mpiagg.AllReduce, mpiagg.ParameterServer])
def test_plans_can_run_at_the_same_time(make, dtype):
    with make() as aggregation:
        vectors = [noise(RANK, length, dtype) for length in (1, 700, 30_000)]
        wanted = [x.copy() for x in vectors]
        aggregation.aggregate(wanted[:1])
        aggregation.aggregate(wanted[1:2])
        aggregation.aggregate(wanted[2:])
        plans = [aggregation.aggregate_init([x]) for x in vectors]
        for plan in plans:
            plan.start()
        for plan in reversed(plans):
            plan.wait(meanwhile=plans)
        same(vectors, wanted)
        for plan in plans:
            plan.free()


def test_an_aggregation_need_not_have_plans():
    class Doubling(mpiagg.Aggregation):
        def aggregate(self, tensors):
            for x in tensors:
                np.multiply(x, 2, out=x)

    with Doubling() as aggregation:
        x = np.ones(3)
        with aggregation.aggregate_init([x]) as plan:
            plan()
            plan.start()
            plan.wait()
        assert x.tolist() == [4.0] * 3
        aggregation.load_state_dict(aggregation.state_dict())
        refused(ValueError, "unknown", aggregation.load_state_dict, {"unknown": 1})
    with pytest.raises(TypeError, match="abstract"):
        mpiagg.Aggregation()


# -- the parameter server


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_server_folds_from_the_root_on(dtype):
    work = working(dtype)
    inputs = [(noise(rank, 1001) * (1 + rank)).astype(dtype) for rank in range(SIZE)]
    for root in range(SIZE):
        total = inputs[root].astype(work)
        for offset in range(1, SIZE):
            total = total + inputs[(root + offset) % SIZE].astype(work)
        mean = np.divide(total, SIZE, dtype=work).astype(dtype)
        grads = [inputs[RANK][:1].reshape(()), inputs[RANK][1:1001].reshape(10, 100)]
        before = [x.copy() for x in grads]
        with mpiagg.ParameterServer(root=root) as server:
            means = server.reduce_gradients(grads)
            same(means, [mean[:1].reshape(()), mean[1:].reshape(10, 100)])
            same(grads, before)
            server.aggregate(before)
            same(before, means)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, np.bool_])
def test_the_server_gives_its_parameters(dtype):
    for root in range(SIZE):
        params = [values(RANK, shape, dtype) for shape in SHAPES]
        for x in params:
            x.flags.writeable = False
        with mpiagg.ParameterServer(root=root) as server:
            given = server.broadcast_params(params)
            same(given, [values(root, shape, dtype) for shape in SHAPES])
            same(params, [values(RANK, shape, dtype) for shape in SHAPES])
            assert not any(np.shares_memory(x, y) for x, y in zip(given, params, strict=True))


def test_the_server_s_two_ways_do_not_disturb_each_other():
    with mpiagg.ParameterServer(root=SIZE - 1) as server:
        for turn in range(2):
            x = [np.full(30_000, float(RANK + turn))]
            assert (server.broadcast_params(x)[0] == SIZE - 1 + turn).all()
            assert (server.reduce_gradients(x)[0] == (SIZE - 1) / 2 + turn).all()


def test_the_native_algorithm_takes_arrays_that_lie_elsewhere_on_each_rank():
    one, other = np.empty(20_000), np.empty(20_000)
    with mpiagg.AllReduce(op="sum", algorithm="native") as aggregation:
        for step in range(4):
            tensor = one if RANK == 0 or step % 2 else other
            tensor[:] = RANK + 1
            aggregation.aggregate([tensor])
            assert (tensor == SIZE * (SIZE + 1) / 2).all()
