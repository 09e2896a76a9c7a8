"""What ``algorithm="auto"`` means."""

from itertools import pairwise

import pytest

from mpiagg.schedules import Collective, algorithm
from mpiagg.tuning import ANY, DEFAULT, choose


@pytest.mark.parametrize("collective", Collective)
def test_every_length_has_a_choice_that_serves(collective):
    for exponent in range(45):
        for nbytes in (2**exponent - 1, 2**exponent, 2**exponent + 1):
            choice = choose(collective, nbytes)
            assert collective in algorithm(choice.algorithm).schedules
            assert choice.lanes >= 1


@pytest.mark.parametrize("collective", Collective)
def test_rows_are_in_order_and_hold_up_to_their_limit(collective):
    rows = DEFAULT[collective]
    limits = [row.nbytes for row in rows]
    assert limits == sorted(set(limits))
    assert limits[-1] == ANY
    for row, after in pairwise(rows):
        assert choose(collective, row.nbytes) == row.choice
        assert choose(collective, row.nbytes + 1) == after.choice


def test_few_rounds_for_short_vectors_and_few_bytes_for_long_ones():
    assert choose(Collective.ALLREDUCE, 8).algorithm == "recursive_doubling"
    assert choose(Collective.ALLREDUCE, 2**30).algorithm == "ring"
