"""In which order buckets start."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiagg.arrays import Form
from mpiagg.ddp.buckets import Bucket, fill_buckets
from mpiagg.ddp.launching import Launcher
from mpiagg.errors import StallError

FORMS = [Form(np.dtype(np.float32), (2,))] * 7


class Flight:
    """Says when it is started, tested and waited for."""

    def __init__(self, log, number):
        self.start = partial(log.append, ("start", number))
        self.test = partial(log.append, ("test", number))
        self.wait = lambda meanwhile: log.append(("wait", number, len(meanwhile)))
        self.run = partial(log.append, ("run", number))

    def __call__(self):
        self.run()


def launcher(log, cap=16):
    buckets = [Bucket(members, FORMS) for members in fill_buckets(FORMS, cap)]
    return Launcher(buckets, [Flight(log, number) for number in range(len(buckets))]), buckets


@given(st.permutations(range(7)), st.sampled_from([0, 16, 1000]))
def test_buckets_start_in_their_order_and_only_when_they_are_full(order, cap):
    log = []
    steps, buckets = launcher(log, cap)
    for index in order:
        steps.place(index, np.full(2, index, np.float32))
        full = [steps.placed >= bucket.views.keys() for bucket in buckets]
        # Behind the last gradient nothing is left to be computed: what it fills waits for the end of the step.
        ready = full.index(False) if False in full else len(log)
        assert log == [("start", number) for number in range(ready)]
    before = len(log)
    assert list(steps.wait()) == buckets
    if before == len(buckets) - 1:  # nobody need bring the last one forward
        assert log[-1] == ("run", len(buckets) - 1)
    assert [number for what, number, *_ in log if what in ("start", "run")] == list(range(len(buckets)))
    assert all((bucket.views[index] == index).all() for bucket in buckets for index in bucket.views)


@given(st.sets(st.integers(0, 6)))
def test_what_is_missing_is_zeros_and_the_next_step_begins_after_the_last_bucket(early):
    log = []
    steps, buckets = launcher(log)
    for step in range(2):
        log.clear()
        for bucket in buckets:
            bucket.vector.fill(9)
        for index in early:
            steps.place(index, np.full(2, step, np.float32))
        rest = [np.full(2, 5, np.float32) if index == 3 else None for index in range(7)]
        steps.place_rest(rest)
        assert list(steps.wait()) == buckets
        assert [number for what, number, *_ in log if what in ("start", "run")] == list(range(4))
        assert [number for what, number, *_ in log if what in ("wait", "run")] == list(range(4))
        assert not steps.placed
        wanted = [step if index in early else 5 if index == 3 else 0 for index in range(7)]
        assert [bucket.views[index][0] for index in range(7) for bucket in buckets if index in bucket.views] == wanted


def test_after_an_error_of_a_wait_all_buckets_start_anew():
    """What an error has left on its way refuses to start: its vector is not to be used meanwhile."""
    log = []
    steps, _ = launcher(log)

    def step():
        steps.place_rest([np.ones(2, np.float32)] * 7)
        return list(steps.wait())

    wait, flight = steps._flights[1].wait, steps._flights[1]

    def late(**_):
        flight.wait = wait
        raise StallError("that was too long")

    flight.wait = late
    with pytest.raises(StallError):
        step()
    log.clear()
    step()
    assert [number for what, number, *_ in log if what in ("start", "run")] == list(range(4))


def test_what_is_on_its_way_is_driven():
    log = []
    steps, _ = launcher(log)
    steps.drive()
    assert not log
    for index in (6, 5, 4, 3):
        steps.place(index, None)
    steps.drive()
    assert log == [("start", 0), ("start", 1), ("test", 0), ("test", 1)]
