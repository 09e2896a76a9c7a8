"""The simulation against formulas written with NumPy alone."""

from functools import reduce

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpiagg

UFUNCS = {"sum": np.add, "avg": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}
SHORT = ("float16", "bfloat16")
DTYPES = [np.dtype(char) for char in "?bhilqBHILQefdgFDG"] + [np.dtype(ml_dtypes.bfloat16)]
FLOATS = [np.dtype(char) for char in "efd"] + [np.dtype(ml_dtypes.bfloat16)]


def fits(op, dtype):
    refused = {"?": ("sum", "avg", "prod"), "F": ("min", "max")}
    refused |= dict.fromkeys("DG", ("min", "max")) | dict.fromkeys("bhilqBHILQ", ("avg",))
    return op not in refused.get(dtype.char, ())


def draw_vectors(n, length, dtype, seed):
    """Vectors whose sums depend on the order, where the dtype's do."""
    rng = np.random.default_rng(seed)
    if dtype.kind in "iu":
        return [rng.integers(0, 100, length).astype(dtype) for _ in range(n)]
    if dtype.kind == "b":
        return [rng.integers(0, 2, length).astype(dtype) for _ in range(n)]
    values = [rng.standard_normal(length) * 10.0 ** rng.integers(-2, 2, length) for _ in range(n)]
    if dtype.kind == "c":
        values = [value + 1j * rng.standard_normal(length) for value in values]
    return [value.astype(dtype) for value in values]


def left_fold(vectors, op, first, start=0, stop=None):
    """x_first + x_(first+1) + ..., ranks modulo n, then one division: of the elements from start to stop."""
    n, dtype = len(vectors), vectors[0].dtype
    work = np.float32 if dtype.name in SHORT else dtype
    parts = [vectors[(first + k) % n][start:stop].astype(work) for k in range(n)]
    total = reduce(UFUNCS[op], parts[1:], parts[0])
    if op == "avg":
        total = np.divide(total, n, dtype=total.dtype)
    return total.astype(dtype)


def ring_formula(vectors, op):
    n, length = len(vectors), len(vectors[0])
    chunks, start = [], 0
    for chunk in range(n):
        stop = start + length // n + (1 if chunk < length % n else 0)
        chunks.append(left_fold(vectors, op, chunk, start, stop))
        start = stop
    assert start == length
    return np.concatenate(chunks)


@pytest.fixture(scope="session")
def same_bits(bits):
    def same_bits(a, b):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)

    return same_bits


@st.composite
def calls(draw):
    dtype = draw(st.sampled_from(DTYPES))
    op = draw(st.sampled_from([op for op in UFUNCS if fits(op, dtype)]))
    n = draw(st.integers(1, 9))
    length = draw(st.one_of(st.integers(0, 12), st.integers(0, 200)))
    return draw_vectors(n, length, dtype, draw(st.integers(0, 1000))), op


@settings(max_examples=200)
@given(call=calls())
def test_the_ring_is_its_left_fold_bit_by_bit(same_bits, call):
    vectors, op = call
    expected = ring_formula(vectors, op)
    for result in mpiagg.simulate(vectors, op, "ring"):
        assert same_bits(result, expected)


@pytest.mark.parametrize("algorithm", ["parameter_server", "direct", "one_shot", "shared"])
@settings(max_examples=100)
@given(call=calls())
def test_some_add_in_rank_order(same_bits, call, algorithm):
    vectors, op = call
    expected = left_fold(vectors, op, 0)
    for result in mpiagg.simulate(vectors, op, algorithm):
        assert same_bits(result, expected)


@settings(max_examples=300)
@given(
    call=calls(),
    algorithm=st.sampled_from(("auto", *mpiagg.algorithms("allreduce"))),
    lanes=st.sampled_from([None, 1, 2, 3, 7]),
)
def test_all_ranks_end_alike_and_right(same_bits, call, algorithm, lanes):
    vectors, op = call
    before = [vector.tobytes() for vector in vectors]
    results = mpiagg.simulate(vectors, op, algorithm, lanes=lanes)
    assert len(results) == len(vectors)
    assert all(same_bits(result, results[0]) for result in results)
    assert [vector.tobytes() for vector in vectors] == before
    assert all(not np.shares_memory(result, vector) for result, vector in zip(results, vectors, strict=True))
    expected = left_fold(vectors, op, 0)
    if expected.dtype.kind in "biu":
        assert same_bits(results[0], expected)
    else:
        compare = np.complex128 if expected.dtype.kind == "c" else np.float64
        scale = sum(np.abs(vector.astype(compare)) for vector in vectors) if op in ("sum", "avg") else np.abs(expected)
        error = np.abs(results[0].astype(compare) - expected.astype(compare))
        resolution = float(ml_dtypes.finfo(expected.dtype).eps)
        assert np.all(error <= 20 * resolution * scale.astype(np.float64))


def test_lanes_are_rings_of_their_own(same_bits):
    vectors = draw_vectors(3, 20, np.dtype("f4"), 0)
    expected = np.concatenate(
        [ring_formula([vector[start:stop] for vector in vectors], "sum") for start, stop in ((0, 10), (10, 20))]
    )
    assert same_bits(mpiagg.simulate(vectors, "sum", "ring", lanes=2)[0], expected)


@pytest.mark.parametrize("algorithm", mpiagg.algorithms("allreduce"))
@pytest.mark.parametrize("dtype", [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)], ids=str)
def test_halves_accumulate_in_float32(algorithm, dtype):
    for n in (2, 3, 4, 8):
        # The sum of 40000s does not fit a float16; and 256 + 1 is 256 in bfloat16.
        big = mpiagg.simulate([np.full(10, 40000, dtype)] * n, "avg", algorithm)[0]
        assert np.array_equal(big, np.full(10, 40000, dtype))
        small = mpiagg.simulate([np.full(10, 256 if rank == 0 else 1, dtype) for rank in range(n)], "sum", algorithm)[0]
        assert np.array_equal(small, np.full(10, 256 + n - 1).astype(dtype))


def test_shapes_are_kept():
    vectors = [np.arange(24.0).reshape(2, 3, 4) + rank for rank in range(3)]
    for result in mpiagg.simulate(vectors, "avg", "ring"):
        assert np.array_equal(result, np.arange(24.0).reshape(2, 3, 4) + 1)
    assert [result.shape for result in mpiagg.simulate([1.0, 2.0])] == [(), ()]
    fortran = [np.asfortranarray(vector) for vector in vectors]
    assert np.array_equal(mpiagg.simulate(fortran, "avg", "ring")[0], vectors[1])
    assert np.array_equal(mpiagg.simulate([[1, 2], [3, 4]])[1], [4, 6])


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (([],), ValueError, "at least one rank"),
        (([[1], [1, 2]],), ValueError, r"rank 1 has int64 \(2,\), rank 0 has int64 \(1,\)"),
        (([[1], [1.0]],), ValueError, r"rank 1 has float64 \(1,\), rank 0 has int64 \(1,\)"),
        (([[1]], "mean"), ValueError, "unknown op 'mean'; known: sum, avg"),
        (([[1]], "avg"), TypeError, "op 'avg' is not for integers"),
        (([[1]], "sum", "rung"), ValueError, "unknown algorithm 'rung'; known: auto, native, ring"),
        (([["a"]],), TypeError, "numbers can"),
    ],
)
def test_bad_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        mpiagg.simulate(*arguments)


def test_lanes_out_of_range():
    for lanes in (0, 65):
        with pytest.raises(ValueError, match=f"lanes must be an integer from 1 to 64, not {lanes}"):
            mpiagg.simulate([[1.0]], lanes=lanes)
