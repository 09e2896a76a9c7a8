"""Which coordinates are chosen."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mpiagg.aggregation.selection import at_least, how_many, random_block, random_k, top_k


def largest(values, k):
    """The restatement: sort by magnitude, NaN as infinity, the lower coordinate first."""
    magnitudes = [np.inf if np.isnan(x) else abs(x) for x in values.tolist()]
    return sorted(sorted(range(len(values)), key=lambda i: (-magnitudes[i], i))[:k])


@pytest.mark.parametrize(
    ("length", "ratio", "k"),
    [(0, 1, 0), (1, 1e-9, 1), (14, 0.25, 4), (100, 0.01, 1), (101, 0.01, 2), (7, 1, 7), (7, 1 - 1e-16, 7)],
)
def test_a_ratio_is_rounded_up_to_at_least_one(length, ratio, k):
    assert how_many(length, ratio) == k


SPECIAL = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -3.5, np.inf, -np.inf, np.nan])


def check_top_k(rows, k):
    before = rows.copy()
    expected = [row * rows.shape[1] + i for row, values in enumerate(rows) for i in largest(values, k)]
    assert top_k(rows, k, np.empty(rows.size, rows.dtype)).tolist() == expected
    assert rows.tobytes() == before.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64])
@given(data=st.data())
def test_top_k_is_its_restatement(dtype, data):
    shape = st.tuples(st.integers(0, 4), st.integers(1, 20))
    rows = data.draw(arrays.arrays(np.float32, shape, elements=SPECIAL)).astype(dtype)
    check_top_k(rows, data.draw(st.integers(1, rows.shape[1])))


@given(data=st.data())
def test_top_k_of_long_rows_is_its_restatement(data):
    count, length, seed = (
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1024, 2000)),
        data.draw(st.integers(0, 99)),
    )
    rows = np.random.default_rng(seed).standard_normal((count, length)).astype(np.float32)
    some = st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, length - 1), SPECIAL), max_size=9)
    for row, place, value in data.draw(some):
        rows[row, place] = value
    if data.draw(st.booleans()):
        rows = np.round(rows)  # many are equal
    check_top_k(rows, data.draw(st.integers(1, 300)))


def test_of_equal_magnitudes_the_first_are_taken():
    values = np.array([[1.0, -2.0, 2.0, -1.0, 2.0]])
    assert top_k(values, 2, np.empty(5)).tolist() == [1, 2]
    assert top_k(values, 4, np.empty(5)).tolist() == [0, 1, 2, 4]
    assert top_k(np.zeros((2, 5)), 3, np.empty(10)).tolist() == [0, 1, 2, 5, 6, 7]


def test_a_coordinate_that_float32_has_not_is_found():
    values = np.zeros((1, 2**24 + 2), np.float32)
    values[0, 2**24 + 1] = 1
    (found,) = top_k(values, 1, np.empty(values.size, np.float32))
    assert found == 16_777_217
    assert found.dtype == np.int64


@pytest.mark.parametrize("dtype", [np.float32, np.complex128])
def test_a_threshold_takes_what_reaches_it(dtype):
    values = np.array([0.5, -0.5, 0.25, np.nan, -np.inf, 0], dtype)
    assert at_least(values, 0.5, np.empty_like(values)).tolist() == [0, 1, 3, 4]
    assert at_least(values[2:3], 0.5, np.empty(1, dtype)).tolist() == []


@pytest.mark.parametrize(("length", "k"), [(1, 1), (7, 3), (7, 7), (50, 1)])
def test_random_coordinates_are_different_and_all_have_their_turn(length, k):
    random = np.random.default_rng(3)
    counts = np.zeros(length, int)
    for _ in range(40 * length):
        chosen = random_k(length, k, random)
        assert len(set(chosen.tolist())) == k
        assert (np.diff(chosen) > 0).all()
        counts[chosen] += 1
    # 40 k expected, each: five deviations, and none for k = length.
    assert abs(counts - 40 * k).max() <= 5 * np.sqrt(40 * k * (1 - k / length))


@pytest.mark.parametrize(
    ("length", "k", "starts"), [(1, 1, {0}), (6, 3, {0, 3}), (7, 3, {0, 3, 4}), (5, 4, {0, 1}), (4, 4, {0})]
)
def test_blocks_cover_all_and_the_tail_too(length, k, starts):
    random = np.random.default_rng(3)
    found = [random_block(length, k, random) for _ in range(60)]
    assert all(start.shape == (1,) for start in found)
    assert {int(start[0]) for start in found} == starts
    assert {int(start[0]) + i for start in found for i in range(k)} == set(range(length))


def test_choices_come_from_the_generator_alone():
    np.random.seed(1)  # noqa: NPY002 - what must not be touched
    before = np.random.get_state()[1].tobytes()  # noqa: NPY002 - as above
    choices = [
        (random_k(100, 5, random).tolist(), random_block(100, 7, random).tolist())
        for random in (np.random.default_rng(4), np.random.default_rng(4))
    ]
    assert choices[0] == choices[1]
    assert np.random.get_state()[1].tobytes() == before  # noqa: NPY002 - as above
