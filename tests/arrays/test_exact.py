"""Sums whose bits do not depend on the order, beside sums of fractions."""

from fractions import Fraction
from functools import reduce

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiagg.arrays import ExactSum
from mpiagg.arrays.exact import BLOCK

DTYPES = [np.float32, np.float64]


def summed(vectors, order=None, divisor=None, add=np.add):
    """Return the sum of vectors, added up in an order."""
    sums = [ExactSum(x, len(vectors)) for x in vectors]
    for each, x in zip(sums, vectors, strict=True):
        each.find_exponents(x)
    largest = np.maximum.reduce([each.exponents for each in sums])
    for each, x in zip(sums, vectors, strict=True):
        each.exponents[:] = largest
        each.split(x)
    words = [each.words.copy() for each in sums]
    with np.errstate(invalid="ignore", over="ignore"):
        sums[0].words[:] = reduce(add, [words[rank] for rank in order or range(len(words))])
        total = np.empty_like(vectors[0])
        sums[0].total(total, divisor)
    return total


def spread(size, length, dtype, seed=0):
    """Return vectors of numbers from the smallest to the largest, of which each rank has others."""
    rng = np.random.default_rng([seed, size, length])
    info = np.finfo(dtype)
    powers = rng.integers(info.minexp - info.nmant, info.maxexp - 8, (size, length))
    near = powers[0] + rng.integers(-30, 30, (size, length))  # and some of one size
    powers = np.where(rng.random(length) < 0.5, np.minimum(near, info.maxexp - 8), powers)
    return list(np.ldexp(rng.uniform(-1, 1, (size, length)), powers).astype(dtype))


def least_bit(dtype, size, largest):
    """Return what the grid of an element may be off by, by the definition."""
    room = max(0, (size - 1).bit_length() - 2)
    return Fraction(2) ** (room - (50 if dtype == np.float32 else 100)) * largest


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 9, 64, 100])
def test_no_order_changes_a_bit_and_the_sum_is_the_exact_one_rounded_once(size, dtype):
    vectors = spread(size, 120, dtype)
    wanted = summed(vectors)
    rng = np.random.default_rng(size)
    for _ in range(5):
        assert summed(vectors, list(rng.permutation(size))).tobytes() == wanted.tobytes()
        assert summed([vectors[rank] for rank in rng.permutation(size)]).tobytes() == wanted.tobytes()
    for found, values in zip(wanted, np.transpose(vectors), strict=True):
        exact = [Fraction(float(value)) for value in values]
        off = abs(Fraction(float(found)) - sum(exact))
        # Rounded to 53 bits on the way to the 24 of float32.
        rounding = Fraction(float(np.spacing(np.abs(found)))) * Fraction(501, 1000)
        assert off <= rounding + size * least_bit(dtype, size, max(map(abs, exact)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_sums_depend_on_the_order(dtype):
    """The control: the same vectors, added up as they are."""
    vectors = spread(8, 120, dtype)
    forwards, backwards = reduce(np.add, vectors), reduce(np.add, vectors[::-1])
    assert forwards.tobytes() != backwards.tobytes()


@given(
    st.lists(st.lists(st.floats(width=32), min_size=3, max_size=3), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
    st.sampled_from(DTYPES),
)
@settings(deadline=None)
def test_any_values_in_any_order_have_the_same_bits(rows, random, dtype):
    vectors = [np.array(row, dtype) for row in rows]
    order = list(range(len(rows)))
    random.shuffle(order)
    with np.errstate(all="ignore"):
        wanted, found = summed(vectors, divisor=len(rows)), summed(vectors, order, len(rows))
        plain = np.add.reduce(np.array(vectors, np.longdouble)) / len(rows)
    assert found.tobytes() == wanted.tobytes()
    assert np.array_equal(np.isnan(found), np.isnan(plain))
    assert np.array_equal(np.isposinf(plain), np.isposinf(found) & np.isposinf(plain))


@pytest.mark.parametrize("dtype", DTYPES)
def test_elements_know_nothing_of_one_another(dtype):
    """An element's bits are the same in any vector, at any place: however gradients are cut into buckets."""
    vectors = spread(3, 2 * BLOCK + 7, dtype)
    whole = summed(vectors, divisor=3)
    for start, stop in ((0, 1), (5, 6), (BLOCK - 1, BLOCK + 1), (BLOCK, BLOCK), (17, BLOCK + 40), (3, 2 * BLOCK + 7)):
        assert summed([x[start:stop] for x in vectors], divisor=3).tobytes() == whole[start:stop].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_ends_of_the_range(dtype):
    info = np.finfo(dtype)
    least, most = info.smallest_subnormal, info.max
    cases = [
        ([least, least], 2 * least),
        ([least, -least], 0),
        ([-0.0, -0.0], 0.0),
        ([most, -most], 0),
        ([most, -most / 2], most / 2),
        ([most, most], np.inf),
        ([most, least], most),
        ([np.inf, 1], np.inf),
        ([-np.inf, most], -np.inf),
        ([np.inf, -np.inf], np.nan),
        ([np.nan, np.inf], np.nan),
    ]
    left, right = (np.array([pair[place] for pair, _ in cases], dtype) for place in (0, 1))
    found = summed([left, right])
    assert found.tolist() == pytest.approx([wanted for _, wanted in cases], rel=0, abs=0, nan_ok=True)
    assert not np.signbit(found[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_averages_are_divided_before_they_are_rounded(dtype):
    x = np.array([1, 2, 3], dtype)
    assert summed([x, x, x], divisor=3).tolist() == [1, 2, 3]
    assert summed([x, x, x], divisor=-0.5).tolist() == [-6, -12, -18]


def test_the_ranks_must_take_the_same_exponents():
    """The control: with each rank's own, the order matters."""
    vectors = [np.array([value], np.float32) for value in (1.0, 3e-16, 3e-16)]
    sums = [ExactSum(x, 3) for x in vectors]
    for each, x in zip(sums, vectors, strict=True):
        each.find_exponents(x)
        each.split(x)
    words = [float(each.words[0]) for each in sums]
    assert (words[0] + words[1]) + words[2] != words[0] + (words[1] + words[2])


def test_averages_of_the_largest_numbers_are_finite():
    most = np.finfo(np.float64).max
    assert summed([np.array([most])] * 3, divisor=3).tolist() == [most]


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_nans_have_the_same_bits_and_nothing_is_a_fault_that_is_none_in_a_sum(dtype):
    unsigned = np.uint32 if dtype == np.float32 else np.uint64
    quiet = unsigned(0x7FC00000) if dtype == np.float32 else unsigned(0x7FF8000000000000)
    vectors = [np.array([quiet + unsigned(rank)]).view(dtype) for rank in (1, 2)]
    assert summed(vectors).view(unsigned).tolist() == summed(vectors[::-1]).view(unsigned).tolist() == [quiet]
    info = np.finfo(dtype)
    x, y = np.array([info.smallest_subnormal, 1], dtype), np.array([info.max / 4, np.inf], dtype)
    sums = [ExactSum(each, 2) for each in (x, y)]
    with np.errstate(all="raise"):
        for each, values in zip(sums, (x, y), strict=True):
            each.find_exponents(values)
            each.exponents[:] = 254 if dtype == np.float32 else 2046
            each.split(values)
        sums[0].total(x, 3.0)


def test_memory_is_what_it_says():
    for dtype, words in ((np.float32, 1), (np.float64, 2)):
        x = np.zeros(3 * BLOCK, dtype)
        exact = ExactSum(x, 2, words=np.empty(ExactSum.words_of(x)))
        assert exact.words.nbytes == 8 * words * x.size
        assert exact.nbytes == exact.words.nbytes + x.itemsize // 4 * x.size + (8 * words + 1) * BLOCK
        part = exact.of(x[:5])
        assert (part.words.size, part.exponents.size) == (5 * words, 5)
        assert np.shares_memory(part.words, exact.words)
