"""Which parameters share a bucket, and what is copied."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiagg.arrays import Form
from mpiagg.ddp.buckets import Bucket, fill_buckets

F4, F8 = np.dtype(np.float32), np.dtype(np.float64)


@pytest.mark.parametrize(
    ("cap", "buckets"),
    [
        (200, [[4, 3], [2, 1], [0]]),
        (100, [[4], [3], [2], [1], [0]]),
        (0, [[4], [3], [2], [1], [0]]),
        (180, [[4, 3], [2], [1, 0]]),
        (25 * 2**20, [[4, 3, 2, 1, 0]]),
    ],
)
def test_golden_buckets(cap, buckets):
    assert fill_buckets([Form(F4, (size,)) for size in (10, 20, 30, 40, 5)], cap) == buckets


def test_a_bucket_holds_one_dtype():
    forms = [Form(F4, (1,)), Form(F8, (1,)), Form(F4, (2, 2)), Form(F8, ())]
    assert fill_buckets(forms, 100) == [[3, 1], [2, 0]]


def test_the_first_bucket_is_shorter():
    quarter = Form(F4, (2**16,))  # of a mebibyte
    cap = 2**21
    assert fill_buckets([quarter] * 14, cap) == [[13, 12, 11, 10], [9, 8, 7, 6, 5, 4, 3, 2], [1, 0]]
    # The first to be full is short, not the first of each dtype.
    other = Form(F8, (2**15,))
    buckets = fill_buckets([quarter] * 5 + [other] * 9, cap)
    assert buckets == [[13, 12, 11, 10], [9, 8, 7, 6, 5], [4, 3, 2, 1, 0]]
    # A long parameter has a bucket alone, and then the others are long.
    assert fill_buckets([quarter] * 5 + [Form(F4, (2**19,))], cap) == [[5], [4, 3, 2, 1, 0]]


def test_buckets_are_in_the_order_in_which_they_are_full():
    forms = [Form(F4, (1,)), Form(F4, (1,)), Form(F8, (1,)), Form(F8, (1,)), Form(F4, (1,))]
    assert fill_buckets(forms, 100) == [[3, 2], [4, 1, 0]]


def test_no_parameters_no_buckets():
    assert fill_buckets([], 100) == []


@given(
    st.lists(st.tuples(st.sampled_from([F4, F8]), st.tuples(st.integers(0, 9), st.integers(0, 9)))), st.integers(0, 600)
)
def test_every_parameter_is_in_one_bucket_that_is_not_too_long(given_forms, cap):
    forms = [Form(*each) for each in given_forms]
    buckets = fill_buckets(forms, cap)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(forms)))
    for bucket in buckets:
        assert bucket == sorted(bucket, reverse=True)
        assert len({forms[index][0] for index in bucket}) == 1
        nbytes = sum(np.zeros(forms[index][1], forms[index][0]).nbytes for index in bucket)
        assert nbytes <= cap or len(bucket) == 1


def test_gradients_are_copied_in_and_out_and_missing_ones_are_zeros():
    forms = [Form(F4, (2,)), Form(F4, (1, 3)), Form(F4, ())]
    bucket = Bucket([2, 1, 0], forms)
    gradients = [np.array([1, 2], F4), None, np.array(3, F4)]
    bucket.vector.fill(9)
    bucket.pack(gradients)
    assert bucket.vector.tolist() == [3, 0, 0, 0, 1, 2]
    assert not any(np.shares_memory(bucket.vector, x) for x in gradients if x is not None)
    bucket.vector += 1
    bucket.unpack(gradients)
    assert [x if x is None else x.tolist() for x in gradients] == [[2, 3], None, 4]


def test_views_are_not_copied(monkeypatch):
    bucket = Bucket([1, 0], [Form(F4, (2, 2)), Form(F4, (3,))])
    copied = []
    monkeypatch.setattr("mpiagg.ddp.buckets.np.copyto", lambda *_: copied.append(1))
    views = [bucket.views[0], bucket.views[1][:]]
    bucket.pack(views)
    bucket.unpack(views)
    assert not copied
    # What lies in the bucket in another order must be.
    views[0] = views[0].T
    bucket.pack(views)
    assert len(copied) == 1
