"""Collectives and aggregations whose values travel by a codec."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI
from restated import averaged, through
from support import refused

import mpiagg
from mpiagg.aggregation import backends

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()
WIRES = ["fp16", "bf16", "u8", "u4", "u2"]
ONCE = {"u8": 8, "u4": 4.25, "u2": 2.25}
CASES = [(wire, name) for wire in ("fp16", "bf16") for name in mpiagg.algorithms("allreduce")] + [
    (wire, "direct") for wire in ONCE
]


def noise(rank, length, dtype=np.float32, seed=0):
    return np.random.default_rng([seed, rank]).standard_normal(length).astype(dtype)


def everyones(length, dtype=np.float32, seed=0):
    return [noise(rank, length, dtype, seed) for rank in range(SIZE)]


def same_everywhere(array):
    return len(set(COMM.allgather(array.tobytes()))) == 1


@pytest.mark.parametrize(("wire", "algorithm"), CASES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_the_bits_are_those_of_the_simulation_on_all_ranks(wire, algorithm, dtype):
    for op, length, lanes in [("avg", 1003, None), ("sum", 2, None), ("max", 257, 3), ("avg", 0, None)]:
        vectors = everyones(length, dtype)
        simulated = mpiagg.simulate(vectors, op, algorithm, lanes=lanes, wire=wire)
        y = mpiagg.allreduce(vectors[RANK], op, algorithm=algorithm, lanes=lanes, wire=wire)
        assert y.dtype == vectors[0].dtype
        assert y.tobytes() == simulated[RANK].tobytes()
        assert same_everywhere(y)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_scatter_reduce_and_gather_is_its_restatement(wire, dtype):
    vectors = everyones(1001, dtype)
    y = mpiagg.allreduce(vectors[RANK], "avg", algorithm="direct", wire=wire)
    assert y.tobytes() == averaged(vectors, wire).tobytes()


@pytest.mark.parametrize(("wire", "digits"), [("fp16", 11), ("bf16", 8)])
def test_sums_are_kept_in_float32(wire, digits):
    """In half precision, ones would stop to count once the sum is 2**digits."""
    x = np.full(64, 2.0**digits if RANK == 0 else 1.0, np.float32)
    y = mpiagg.allreduce(x, "sum", algorithm="direct", wire=wire)
    assert y[0] == through(wire, np.array([2.0**digits + SIZE - 1], np.float32))[0]
    if SIZE == 4:
        assert y[0] == 2.0**digits + 4  # 2**digits + 3 is between two, and this is the even one


@pytest.mark.parametrize(("wire", "algorithm"), CASES)
def test_plans_and_repeated_calls(wire, algorithm):
    vectors = everyones(3001)
    x = vectors[RANK].copy()
    wanted = mpiagg.simulate(vectors, "avg", algorithm, wire=wire)[RANK]
    with mpiagg.allreduce_init(x, "avg", out=x, algorithm=algorithm, wire=wire) as plan:
        for _ in range(3):
            x[:] = vectors[RANK]
            plan()
            assert x.tobytes() == wanted.tobytes()
        bytes_sent = plan.sent_bytes
    with mpiagg.allreduce_init(x, "avg", out=x, algorithm=algorithm) as plan:
        if wire in ONCE:
            assert bytes_sent <= plan.sent_bytes * ONCE[wire] / 32 + 2 * (SIZE - 1) * 64
        else:
            assert bytes_sent == plan.sent_bytes / 2


@pytest.mark.parametrize("wire", WIRES)
def test_infinities_and_nans_spread(wire):
    x = np.ones(64, np.float32)
    x[-1] = np.nan if RANK == SIZE - 1 else 1
    y = mpiagg.allreduce(x, "sum", wire=wire)
    assert np.isnan(y[-1])
    assert same_everywhere(y)
    x[-1] = np.inf if RANK == SIZE - 1 else 1
    assert not np.isfinite(mpiagg.allreduce(x, "sum", wire=wire)[-1])


def test_bad_wires_are_refused():
    x = np.ones(3, np.float32)
    for wire, more, words in [
        ("fp8", {}, "unknown wire 'fp8'; known: fp16, bf16, u8, u4, u2, exact, or None"),
        (16, {}, "unknown wire 16"),
        ("u8", {"algorithm": "ring"}, "wire 'u8' is for algorithm 'direct'"),
        ("fp16", {"algorithm": "native"}, "'native' sends values as they are"),
        ("fp16", {"op": "nonsense"}, "unknown op"),
        ("exact", {"op": "max"}, "wire 'exact' is for sums and averages, not for op 'max'"),
        ("exact", {"algorithm": "native"}, "'native' sends values as they are"),
    ]:
        refused(ValueError, words, mpiagg.allreduce, x, wire=wire, **more)
        refused(ValueError, words, mpiagg.allreduce_init, x, wire=wire, **more)
        refused(ValueError, words, mpiagg.AllReduce, wire=wire, **more)
        refused(ValueError, words, mpiagg.simulate, [x], wire=wire, **more)
    for dtype in (np.int32, np.complex64, np.bool_):
        refused(
            TypeError,
            "wire 'fp16' is for real",
            mpiagg.allreduce,
            np.ones(3, dtype),
            "max" if dtype == np.bool_ else "sum",
            wire="fp16",
        )
    with mpiagg.AllReduce(op="sum", wire="u8") as aggregation:
        refused(TypeError, "wire 'u8' is for real", aggregation.aggregate, [np.ones(3, np.int32)])
    assert x.tolist() == [1, 1, 1]


# -- aggregations


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("by_layer", [False, True])
def test_tensors_travel_together_or_each_by_itself(wire, by_layer):
    tensors = [noise(RANK, 600).reshape(20, 30), noise(RANK, 7, seed=1), noise(RANK, 50, np.float16, seed=2)]
    groups = [everyones(600), everyones(7, seed=1)]
    if not by_layer:
        groups = [[np.concatenate(pair) for pair in zip(*groups, strict=True)]]
    with mpiagg.AllReduce(wire=wire, algorithm="direct", by_layer=by_layer) as aggregation:
        aggregation.aggregate(tensors)
    together = np.concatenate([tensors[0].ravel(), tensors[1]])
    wanted = np.concatenate([averaged(group, wire) for group in groups])
    assert together.tobytes() == wanted.tobytes()
    halves = [x.astype(np.float32) for x in everyones(50, np.float16, seed=2)]
    assert tensors[2].tobytes() == averaged(halves, wire).astype(np.float16).tobytes()


@pytest.mark.parametrize("divide_before", [False, True])
@pytest.mark.parametrize("wire", ["fp16", "u8", "u4", "u2"])
def test_error_feedback_loses_nothing(wire, divide_before):
    """All that has come out, and all that is left, add up to all that went in."""
    total_in, total_out = np.zeros(500), np.zeros(500)
    with mpiagg.ErrorFeedback(
        mpiagg.AllReduce(wire=wire, algorithm="direct", divide_before=divide_before)
    ) as aggregation:
        for step in range(20):
            total_in += np.mean(everyones(500, np.float64, seed=step), axis=0)
            x = noise(RANK, 500, np.float64, seed=step)
            aggregation.aggregate([x])
            total_out += x
            assert same_everywhere(x)
        (left,) = aggregation.state_dict()["memories"][0]["state"]["residuals"]
    left = COMM.allreduce(left) / (1 if divide_before else SIZE)
    assert np.allclose(total_out + left, total_in, rtol=0, atol=1e-12)
    # The control: what is left is not nothing, and counts.
    assert np.abs(total_out - total_in).max() > 1e-4


@pytest.mark.few_ranks
@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=40), st.floats(0.1, 10))
def test_what_is_left_stays_small(values, scale):
    with mpiagg.ErrorFeedback(mpiagg.AllReduce(op="sum", wire="u8")) as aggregation:
        for _ in range(4):
            x = np.array(values, np.float32) * np.float32(scale * (1 + RANK))
            aggregation.aggregate([x])
        (left,) = aggregation.state_dict()["memories"][0]["state"]["residuals"]
    most = max(map(abs, values)) * scale * SIZE**2
    assert np.abs(left).max() <= most * 2 / 255 * 1.5 + 1e-6


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6])
@pytest.mark.parametrize("wire", WIRES)
def test_what_is_not_finite_shows_once_and_is_not_remembered(wire, value):
    with mpiagg.ErrorFeedback(mpiagg.AllReduce(wire=wire, algorithm="direct")) as aggregation:
        for step in range(4):
            x = np.ones(64, np.float32)
            if step == 1 and RANK == 0:
                x[0] = value
            aggregation.aggregate([x])
            if step == 1:
                assert x[0] != 1
        assert np.isfinite(x).all()
        aggregation.aggregate([x := np.ones(64, np.float32)])
        assert np.abs(x[1:] - 1).max() < 0.1 or (wire in ONCE and value == 1e6)


def test_error_feedback_goes_on_from_its_state():
    def steps(aggregation, first, last):
        x = np.empty(0)
        for step in range(first, last):
            x, y = noise(RANK, 700, seed=step), noise(RANK, 33, np.float64, seed=step)
            aggregation.aggregate([x.reshape(70, 10), y])
        return x

    def make():
        return mpiagg.ErrorFeedback(mpiagg.AllReduce(wire="u8"))

    with make() as straight:
        wanted = steps(straight, 0, 8)
    with make() as before:
        steps(before, 0, 5)
        state = before.state_dict()
    with make() as after:
        after.load_state_dict(state)
        assert steps(after, 5, 8).tobytes() == wanted.tobytes()
    with make() as another:
        another.load_state_dict(state)
        refused(ValueError, "the memory is of", another.aggregate, [np.zeros(3, np.float32)])
        refused(ValueError, "keys", another.load_state_dict, {"memories": [{}]})
        refused(TypeError, "must be a list", another.load_state_dict, {"memories": {}})
        state["memories"][0]["state"]["residuals"] = [np.zeros(1)]
        steps(after := make(), 0, 1)
        refused(ValueError, "residuals must be", after.load_state_dict, state)
        after.free()


def test_error_feedback_in_ddp():
    weights = [np.zeros((30, 20), np.float32), np.zeros(20, np.float32)]
    results = []
    for sync in ("sync_gradients", "overlapped_sync_gradients"):
        gradients = [noise(RANK, 600).reshape(30, 20), noise(RANK, 20, seed=1)]
        with (
            mpiagg.ErrorFeedback(mpiagg.AllReduce(wire="u8")) as aggregation,
            mpiagg.DDP(weights, aggregation=aggregation, bucket_bytes=100) as ddp,
        ):
            for _ in range(3):
                getattr(ddp, sync)(gradients)
        results.append([x.tobytes() for x in gradients])
    assert results[0] == results[1]
    wanted = np.mean(everyones(600), axis=0)
    assert np.abs(gradients[0].ravel() - wanted).max() < 0.05


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: "no reduction", TypeError, "for an AllReduce, not for str"),
        (mpiagg.AllReduce, ValueError, "with a wire"),
        (lambda: mpiagg.AllReduce(wire="exact"), ValueError, "with a wire that rounds"),
        (lambda: mpiagg.AllReduce(op="max", wire="u8"), ValueError, "sums and averages"),
        (lambda: mpiagg.AllReduce(wire="fp16"), ValueError, "algorithm 'direct', not 'auto'"),
    ],
)
def test_what_error_feedback_is_not_for(make, error, words):
    refused(error, words, mpiagg.ErrorFeedback, make())


# -- sums that do not depend on the order


def exactly(length, dtype=np.float32, seed=0):
    """Return everyone's values, of many sizes."""
    powers = [np.random.default_rng([seed, 1, rank]).uniform(-3, 3, length) for rank in range(SIZE)]
    return [(noise(rank, length, np.float64, seed) * 10**power).astype(dtype) for rank, power in enumerate(powers)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("length", [0, 1, 1003, 40_000])
def test_exact_sums_have_the_same_bits_by_every_algorithm(dtype, length):
    vectors = exactly(length, dtype)
    wanted = mpiagg.simulate(vectors, "avg", "ring", wire="exact")[0]
    for algorithm in ("auto", *mpiagg.algorithms("allreduce")):
        for lanes in (None, 3):
            keywords = {"algorithm": algorithm, "lanes": lanes, "wire": "exact"}
            assert mpiagg.simulate(vectors, "avg", **keywords)[RANK].tobytes() == wanted.tobytes()
            y = mpiagg.allreduce(vectors[RANK], "avg", **keywords)
            assert (y.dtype, y.tobytes()) == (wanted.dtype, wanted.tobytes())


def test_exact_sums_have_the_same_bits_in_every_order_of_the_ranks_and_on_any_nodes():
    vectors = exactly(5000)
    wanted = mpiagg.allreduce(vectors[RANK], wire="exact")
    for key in (-RANK, RANK * 5 % 7):
        comm = COMM.Split(0, key)
        assert mpiagg.allreduce(vectors[RANK], wire="exact", comm=comm).tobytes() == wanted.tobytes()
        comm.Free()
    turned = vectors[::-1]
    for nodes in ([SIZE], [1] * SIZE, [SIZE - SIZE // 2, SIZE // 2] if SIZE > 1 else [1]):
        for vectors_of in (vectors, turned):
            simulated = mpiagg.simulate(vectors_of, "sum", "hierarchical", wire="exact", nodes=nodes)
            assert simulated[RANK].tobytes() == wanted.tobytes()


def test_exact_sums_err_less_than_sums_of_float32():
    vectors = exactly(40_000)
    true = np.add.reduce(np.array(vectors, np.longdouble))
    y = mpiagg.allreduce(vectors[RANK], wire="exact")
    assert (np.abs(y - true) <= 0.501 * np.spacing(np.abs(y))).all()
    if SIZE > 2:  # the control
        plain = mpiagg.allreduce(vectors[RANK], algorithm="ring")
        assert not (np.abs(plain - true) <= 0.501 * np.spacing(np.abs(plain))).all()


def test_plans_of_exact_sums_in_any_memory():
    vectors = exactly(20_001, np.float64)
    wanted = mpiagg.simulate(vectors, "avg", wire="exact")[RANK]
    registered = mpiagg.empty(20_001, np.float64, comm=COMM)
    for x in (np.empty(20_001), registered, np.empty((20_001, 2))[:, 0]):
        with mpiagg.allreduce_init(x, "avg", out=x, wire="exact") as plan:
            for _ in range(3):
                x[:] = vectors[RANK]
                plan()
                assert x.tobytes() == wanted.tobytes()
            assert SIZE == 1 or plan.sent_bytes > 0
        x[:] = vectors[RANK]
        mpiagg.allreduce(x, "avg", out=x, wire="exact")
        assert x.tobytes() == wanted.tobytes()


def test_exact_sums_do_not_depend_on_the_buckets():
    shapes = [(30, 20), (20,), (7, 3, 3), (1,)]
    results = []
    for bucket_bytes in (1, 200, 2**20):
        gradients = [exactly(int(np.prod(shape)), seed=place)[RANK] for place, shape in enumerate(shapes)]
        weights = [np.zeros_like(x) for x in gradients]
        with (
            mpiagg.AllReduce(wire="exact") as aggregation,
            mpiagg.DDP(weights, aggregation=aggregation, bucket_bytes=bucket_bytes) as ddp,
        ):
            ddp.sync_gradients(gradients)
        results.append(b"".join(x.tobytes() for x in gradients))
    assert len(set(results)) == 1
    with mpiagg.AllReduce(wire="exact", denom=3, divide_before=True) as aggregation:
        x = exactly(50)[RANK]
        aggregation.aggregate([x])
        assert same_everywhere(x)


def test_exact_sums_with_values_that_are_not_finite():
    x = np.ones(6)
    x[:3] = (np.nan, np.inf, -np.inf) if RANK == 0 else 1
    x[3] = np.inf if RANK == 0 else -np.inf
    for dtype in (np.float32, np.float64):
        with np.errstate(invalid="ignore"):
            y = mpiagg.allreduce(x.astype(dtype), wire="exact")
        assert y.tolist() == pytest.approx(
            [np.nan, np.inf, -np.inf, np.nan if SIZE > 1 else np.inf, SIZE, SIZE], nan_ok=True
        )


# -- other libraries' all-reduces


@pytest.mark.parametrize("op", ["avg", "sum", "min", "max"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_backend_takes_the_place_of_an_algorithm(op, dtype):
    tensors = [np.full((3, 4), RANK + 1, dtype), np.full(5, 2 * RANK, dtype)]
    wanted = [np.empty_like(x) for x in tensors]
    with mpiagg.AllReduce(op=op) as ours:
        for x, y in zip(tensors, wanted, strict=True):
            y[...] = x
        ours.aggregate(wanted)
    calls = []

    def counted(vector, name):
        calls.append((name, vector.dtype, vector.shape))
        backends.native()(vector, name)

    with mpiagg.AllReduce(op=op, backend=counted) as aggregation:
        aggregation.aggregate(tensors)
    assert [x.tolist() for x in tensors] == [x.tolist() for x in wanted]
    assert calls == [("sum" if op == "avg" else op, np.float32, (17,))]


def test_denominators_hold_with_a_backend_and_alone():
    x = np.full(3, 8.0)
    with mpiagg.AllReduce(backend=backends.native(COMM), denom=4 * SIZE, divide_before=True) as aggregation:
        aggregation.aggregate([x])
    assert x.tolist() == [2.0] * 3


def test_backends_are_checked():
    refused(TypeError, "backend must be callable", mpiagg.AllReduce, backend="horovod")
    refused(ValueError, "a backend takes the place", mpiagg.AllReduce, backend=backends.native(), algorithm="ring")
    refused(ValueError, "no wire", mpiagg.AllReduce, backend=backends.native(), wire="fp16")
    if SIZE > 1:
        refused(mpiagg.MismatchError, "by a backend", mpiagg.AllReduce, backend=backends.native() if RANK else None)
