"""Which ops are for which dtypes, and what they do."""

from itertools import product

import ml_dtypes
import numpy as np
import pytest

from mpiagg.arrays import OPS, reduction, working_dtype

BOOLEANS, INTEGERS, REALS, COMPLEXES = "?", "bhilqBHILQ", "efdg", "FDG"
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(char) for char in BOOLEANS + INTEGERS + REALS + COMPLEXES] + [BFLOAT16]
LOGICAL, BITWISE = ("land", "lor", "lxor"), ("band", "bor", "bxor")

ALLOWED = {
    "sum": INTEGERS + REALS + COMPLEXES,
    "prod": INTEGERS + REALS + COMPLEXES,
    "avg": REALS + COMPLEXES,
    "min": BOOLEANS + INTEGERS + REALS,
    "max": BOOLEANS + INTEGERS + REALS,
    **dict.fromkeys(LOGICAL, BOOLEANS + INTEGERS),
    **dict.fromkeys(BITWISE, INTEGERS),
}

PLAIN = {
    "sum": lambda a, b: a + b,
    "prod": lambda a, b: a * b,
    "avg": lambda a, b: a + b,
    "min": min,
    "max": max,
    "land": lambda a, b: bool(a) and bool(b),
    "lor": lambda a, b: bool(a) or bool(b),
    "lxor": lambda a, b: bool(a) != bool(b),
    "band": lambda a, b: a & b,
    "bor": lambda a, b: a | b,
    "bxor": lambda a, b: a ^ b,
}


def is_allowed(op, dtype):
    return ("f" if dtype == BFLOAT16 else dtype.char) in ALLOWED[op]


@pytest.mark.parametrize("op", ALLOWED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_op_is_for_a_dtype_or_refuses_it(op, dtype):
    if not is_allowed(op, dtype):
        with pytest.raises(TypeError, match=f"op '{op}' is not for "):
            reduction(op, dtype, 4)
        return
    how = reduction(op, dtype, 4)
    left, right = np.array([0, 1, 6, 3]).astype(how.dtype), np.array([0, 0, 3, 5]).astype(how.dtype)
    expected = [PLAIN[op](a, b) for a, b in zip(left.tolist(), right.tolist(), strict=True)]
    for target in (left, right, np.empty_like(left)):
        pair = left.copy(), right.copy()
        out = pair[0] if target is left else pair[1] if target is right else target
        how.combine(*pair, out)
        assert out.tolist() == expected
        how.finish(out)
        assert out.tolist() == ([value / 4 for value in expected] if op == "avg" else expected)


@pytest.mark.parametrize("char", INTEGERS)
def test_averages_of_integers_say_what_to_do(char):
    with pytest.raises(
        TypeError, match=r"an average need not be one. Convert with x.astype\('float64'\), or take op='sum'"
    ):
        reduction("avg", np.dtype(char), 4)


@pytest.mark.parametrize("op", ["sum", "avg", "prod"])
def test_arithmetic_on_booleans_says_what_to_do(op):
    with pytest.raises(TypeError, match=f"op '{op}' is not for booleans; take op='max' for any, op='min' for all"):
        reduction(op, np.dtype(bool), 4)


@pytest.mark.parametrize("op", ["mean", "SUM", "", None, 3, ["sum"], np.add])
def test_unknown_ops_list_the_known(op):
    with pytest.raises(ValueError, match=r"^unknown op .*; known: sum, avg, min, max, prod, or an MPI.Op$"):
        reduction(op, np.dtype("f8"), 4)


def test_the_five():
    assert OPS == ("sum", "avg", "min", "max", "prod")


@pytest.mark.parametrize("dtype", [*DTYPES, np.dtype(ml_dtypes.float8_e5m2)], ids=str)
def test_short_floats_work_in_float32_and_others_as_they_are(dtype):
    short = dtype.name in ("float16", "bfloat16", "float8_e5m2")
    assert working_dtype(dtype) == (np.dtype("f4") if short else dtype)


REFUSED = [
    np.dtype(object),
    np.dtype("U3"),
    np.dtype("S3"),
    np.dtype("M8[s]"),
    np.dtype("m8[s]"),
    np.dtype("V2"),
    np.dtype([("a", "f4"), ("b", "i4")]),
]


@pytest.mark.parametrize("dtype", REFUSED, ids=str)
def test_what_is_no_number_is_refused(dtype):
    with pytest.raises(TypeError, match="cannot be aggregated; numbers can"):
        working_dtype(dtype)
    for op in OPS:
        with pytest.raises(TypeError, match="cannot be aggregated; numbers can"):
            reduction(op, dtype, 2)


@pytest.mark.parametrize("char", "hilqefdgFDG")
def test_foreign_byte_order_is_refused_with_the_way_out(char):
    foreign = np.dtype(char).newbyteorder()
    with pytest.raises(TypeError, match=r"is not in native byte order; convert it with x.astype") as caught:
        working_dtype(foreign)
    # The way out works.
    x = np.array([1, 2, 3], foreign)
    converted = eval(str(caught.value).rpartition(" with ")[2], {"x": x})  # noqa: S307 - our own message
    assert working_dtype(converted.dtype) == working_dtype(np.dtype(char))
    assert converted.tolist() == [1, 2, 3]


def test_reductions_of_the_same_op_and_dtype_are_the_same():
    # Plans are found again by them.
    for op, dtype in product(("sum", "avg"), (np.dtype("f4"), np.dtype("f8"))):
        assert reduction(op, dtype, 3) == reduction(op, dtype, 3)
        assert reduction(op, dtype, 3) == reduction(op, np.zeros(2, dtype).dtype, 3)


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_complex_products_have_the_same_bits_wherever_they_are_written(dtype, length):
    rng = np.random.default_rng(length)
    combine = reduction("prod", np.dtype(dtype), 1).combine
    for _ in range(200):
        left, right = ((rng.normal(size=length) + 1j * rng.normal(size=length)).astype(dtype) for _ in range(2))
        apart, on_left, on_right = np.empty_like(left), left.copy(), right.copy()
        combine(left, right, apart)
        combine(on_left, right, on_left)
        combine(left, on_right, on_right)
        assert apart.tobytes() == on_left.tobytes() == on_right.tobytes()
