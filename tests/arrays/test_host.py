"""Views, addresses and memory."""

import gc

import numpy as np
import pytest

from mpiagg.arrays import address, as_input, borrow, check_output, flat, scratch


@pytest.mark.parametrize("x", [3, 2.5, 1j, True, [1, 2], [[1.0], [2.0]], range(4), np.float32(3), memoryview(b"abc")])
def test_inputs_of_all_kinds(x):
    assert np.array_equal(as_input(x), np.asarray(x))


def test_arrays_are_taken_as_they_are():
    x = np.arange(6).reshape(2, 3).T
    assert as_input(x) is x


@pytest.mark.parametrize("x", [None, "abc", ["a"], object(), np.array([None, 1]), [1, None], {"a": 1}])
def test_inputs_that_are_no_numbers(x):
    with pytest.raises(TypeError, match="cannot be aggregated; numbers can"):
        as_input(x)


def test_ragged_lists_are_refused():
    with pytest.raises(ValueError, match="inhomogeneous"):
        as_input([[1, 2], [3]])


def test_output():
    out = np.zeros((2, 3))
    assert check_output(out, (2, 3), np.dtype(float)) is out
    assert check_output(view := out.T, (3, 2), np.dtype(float)) is view


@pytest.mark.parametrize(
    ("out", "error", "words"),
    [
        ([0.0] * 6, TypeError, "out must be a NumPy array, not list"),
        (3.0, TypeError, "out must be a NumPy array, not float"),
        (np.zeros((2, 3), "f4"), TypeError, "out has dtype float32, the result has float64"),
        (np.zeros((2, 3), ">f8"), TypeError, "out has dtype >f8, the result has float64"),
        (np.zeros((3, 2)), ValueError, r"out has shape \(3, 2\), the result has \(2, 3\)"),
        (np.zeros(6), ValueError, r"out has shape \(6,\), the result has \(2, 3\)"),
        (np.broadcast_to(1.0, (2, 3)), ValueError, "out is read-only"),
    ],
)
def test_output_that_cannot_take_the_result(out, error, words):
    with pytest.raises(error, match=words):
        check_output(out, (2, 3), np.dtype(float))


def test_flat_is_a_view_or_nothing():
    x = np.arange(24.0).reshape(2, 3, 4)
    view = flat(x)
    assert view.shape == (24,)
    assert np.shares_memory(view, x)
    assert address(view) == address(x)
    for other in (x.T, x[:, ::2], x[:, :, 1], np.asfortranarray(x)):
        assert flat(other) is None
    assert flat(x[1]).shape == (12,)
    assert flat(np.array(3.0)).shape == (1,)
    assert flat(np.empty((0, 3))).shape == (0,)


@pytest.mark.parametrize("dtype", ["f4", "f8", "i2", "c16", "?", "g"])
def test_borrowed_memory_is_the_owners(dtype):
    owner = np.zeros(10, dtype)
    loan = borrow(address(owner[2:]), 5, owner.dtype)
    assert loan.shape == (5,)
    assert loan.dtype == owner.dtype
    loan[:] = 1
    assert owner.tolist() == [0, 0, 1, 1, 1, 1, 1, 0, 0, 0]
    owner[2] = 0
    assert loan[0] == 0


def test_borrowing_nothing_and_not_keeping_the_owner():
    assert borrow(0, 0, "f8").shape == (0,)
    owner = np.ones(1000)
    count = len(gc.get_referrers(owner))
    loan = borrow(address(owner), 1000, owner.dtype)
    assert len(gc.get_referrers(owner)) == count
    assert loan.sum() == 1000


def test_scratch():
    assert scratch(7, "f4").shape == (7,)
    assert scratch(0, np.dtype("i8")).dtype == np.int64
