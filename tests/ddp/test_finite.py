"""What is found in gradients, and what is left out for it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mpiagg.arrays import Form
from mpiagg.ddp.buckets import Bucket
from mpiagg.ddp.finite import FiniteCheck
from mpiagg.ddp.launching import Launcher
from mpiagg.errors import NonFiniteError


def check(names=("", "w")):
    """Return the check of a rank that is alone."""
    return FiniteCheck(lambda said: [said], names, "AllReduce", "sum")


@given(hnp.arrays(st.sampled_from([np.float16, np.float64]), hnp.array_shapes(min_dims=0, max_side=4)))
def test_what_is_bad_is_found_and_counted(gradient):
    nans, infinities = int(np.isnan(gradient).sum()), int(np.isinf(gradient).sum())
    found = check()
    found.look_at([None, gradient])
    assert found.flags() == [bool(nans or infinities), False]
    if nans or infinities:
        with pytest.raises(NonFiniteError, match=f"'w', {gradient.dtype}.*{nans} NaN, {infinities} Inf of") as raised:
            found.require(given=True, made=False)
        assert isinstance(raised.value, FloatingPointError)
    found.require(given=False, made=False)
    found.clear()
    assert found.flags() == [False, False]


@given(st.sets(st.sampled_from(range(3))))
def test_a_result_is_looked_at_parameter_by_parameter(bad):
    bucket = Bucket([0, 1, 2], [Form(np.dtype(np.float32), (2,))] * 3)
    found = check(["a", "b", "c"])
    for index in bad:
        bucket.views[index][1] = np.inf
    found.look_at_result(bucket)
    assert found.flags() == [False, bool(bad)]
    if bad:
        with pytest.raises(NonFiniteError, match=r"overflow: .* their sum by AllReduce is not: ") as raised:
            found.require(given=False, made=True)
        assert {index for index in range(3) if f"parameter {index} " in str(raised.value)} == bad


class Flight:
    """Notes what it is to send."""

    def __init__(self, bucket):
        self.bucket, self.sent = bucket, None

    def start(self):
        assert self.sent is None
        self.sent = self.bucket.vector.tolist()

    __call__ = start

    def wait(self, meanwhile):  # noqa: ARG002 - as plans take it
        assert self.sent is not None


@pytest.mark.parametrize("members", [[[0, 1, 2]], [[0, 1], [2]], [[0], [1], [2]]])
def test_what_is_bad_is_not_sent(members):
    buckets = [Bucket(some, [Form(np.dtype(np.float32), (2,))] * 3) for some in members]
    flights = [Flight(bucket) for bucket in buckets]
    for bucket in buckets:
        bucket.vector.fill(np.nan)
    view = next(bucket.views[1] for bucket in buckets if 1 in bucket.views)
    launcher = Launcher(buckets, flights, found := check(["", "w", ""]))
    launcher.place(0, np.ones(2, np.float32))
    launcher.place_rest([None, view, np.array([2, np.inf], np.float32)])
    assert list(launcher.wait()) == buckets
    assert [x for flight in flights for x in flight.sent] == [1, 1, 0, 0, 0, 0]
    assert found.flags() == [True, False]
    with pytest.raises(NonFiniteError, match=r"1 \('w', float32 \(2,\)\): 2 NaN.*parameter 2 .*0 NaN, 1 Inf of 2$"):
        found.require(given=True, made=False)
