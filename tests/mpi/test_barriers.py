"""Barriers, with the ranks of a node played by one process."""

from functools import partial

import numpy as np
import pytest

from mpiagg.errors import MismatchError, PlanError
from mpiagg.transport import LINE, NOWHERE, Block, NodeBarrier, Position, Positions, SignedBarrier
from mpiagg.transport import barriers as barriers_module

pytestmark = pytest.mark.mpi


def barriers(number, fences=None, kind=NodeBarrier):
    """Return the barriers of so many ranks, which share their heads."""
    parts = [np.zeros(LINE, np.uint8) for _ in range(number)]
    heard = [] if fences is None else fences
    return [
        kind(Block(parts, lambda place=place: heard.append(place), LINE, Position(0, 0)), place, range(number))
        for place in range(number)
    ]


def signed_barriers(number, fences=None):
    """Return barriers at which operations are compared."""
    return barriers(
        number, fences, partial(SignedBarrier, disagreement=lambda: MismatchError("ranks are of two minds"))
    )


@pytest.fixture(params=[barriers, signed_barriers], ids=["plain", "signed"])
def either(request):
    """Return a function that returns barriers of one kind."""
    return request.param


def test_nobody_passes_until_all_have_come(either):
    first, second, third = either(3)
    for turn in range(3):
        first.come()
        assert not first.passed()
        assert first.missing() == [1, 2]
        third.come()
        assert not first.passed()
        assert first.missing() == third.missing() == [1]
        assert second.missing() == []  # which has not come, and so waits for nobody
        second.come()
        assert first.passed()
        assert second.passed()
        # One who is ahead does not keep the others from passing.
        first.come()
        assert third.passed()
        assert not first.passed()
        second.come()
        third.come()
        assert all(barrier.passed() for barrier in (first, second, third))
        assert first.count == 2 * (turn + 1)


def test_who_waits_for_some_ranks_passes_without_the_others(either):
    first, second, third, fourth = either(4)
    for barrier in (first, second, third, fourth):
        barrier.come()
    for _ in range(3):
        some = first.among({1, 3})
        some.come()
        assert some.missing() == [1, 3]
        second.come()
        second.come()  # which waits for nobody, and is ahead
        assert not some.passed()
        assert some.missing() == [3]
        fourth.come()
        fourth.come()
        assert some.passed()
        assert some.missing() == []
        assert not first.passed()
        assert first.missing() == [2]
        first.come()
        assert first.among({1, 3}).passed()
        assert first.among(()).passed()
        assert not first.among({2}).passed()
    for _ in range(6):
        third.come()
    assert all(barrier.passed() for barrier in (first, second, third, fourth))


def test_a_barrier_of_one_is_open(either):
    (barrier,) = either(1)
    barrier.come()
    assert barrier.passed()
    assert barrier.missing() == []


@pytest.mark.parametrize("in_order", [True, False])
def test_fences_stand_where_processors_need_them(monkeypatch, in_order, either):
    monkeypatch.setattr(barriers_module, "IN_ORDER", in_order)
    fences = []
    first, second = either(2, fences)
    first.come()  # fenced before the count: what was written is there for who sees it
    assert not first.passed()
    assert fences == ([] if in_order else [0])
    second.come()
    assert first.passed()  # and after it, before anything is read
    assert fences == ([] if in_order else [0, 1, 0])
    assert second.among({0}).passed()
    assert fences == ([] if in_order else [0, 1, 0, 1])


HERE = Positions(Position(3, 4096), Position(0, 2**40))
ELSEWHERE = Positions(NOWHERE, NOWHERE)


def told(barrier):
    return barrier.positions(barrier.announced())


def test_what_is_announced_is_there_for_all():
    first, second = signed_barriers(2)
    first.announce(first.in_short(HERE))
    second.announce(second.in_short(ELSEWHERE))
    for barrier in (first, second):
        barrier.come()
    assert told(first) == told(second) == (HERE, ELSEWHERE)


def test_the_next_announcement_leaves_the_last_to_be_read():
    first, second = signed_barriers(2)
    for turn in range(4):
        here = Positions(Position(turn, 64), NOWHERE)
        first.announce(first.in_short(here))
        second.announce(second.in_short(ELSEWHERE))
        for barrier in (first, second):
            barrier.come()
        assert told(first) == (here, ELSEWHERE)
        first.announce(first.in_short(HERE))  # of its next call; the other has not read yet
        assert told(second) == (here, ELSEWHERE)


def test_a_call_that_was_left_in_the_middle_is_told():
    first, _ = signed_barriers(2)
    first.enter(0)
    first.leave()
    first.enter(0)
    with pytest.raises(PlanError, match="an error has left an earlier call on this communicator in the middle"):
        first.enter(0)
    first.leave()
    first.enter(0)


def begin(barrier, signature):
    """Begin an operation on a rank, and come to its first barrier."""
    barrier.enter(signature)
    barrier.come()


def test_who_is_ahead_in_another_operation_does_not_disagree():
    first, *others = trio = signed_barriers(3)
    for turn in range(4):
        for barrier in trio:
            begin(barrier, turn)
        assert first.passed()
        first.leave()
        begin(first, 9)
        for barrier in others:
            assert barrier.passed()
            barrier.leave()
        assert not first.passed()
        assert first.missing() == [1, 2]
        for barrier in others:
            begin(barrier, 9)
        assert all(barrier.passed() for barrier in trio)
        assert first.missing() == []
        for barrier in trio:
            barrier.leave()


def test_who_is_in_another_operation_is_told_by_all():
    trio = signed_barriers(3)
    for barrier, signature in zip(trio, (5, 5, 6), strict=True):
        begin(barrier, signature)
    for barrier in trio:
        with pytest.raises(MismatchError, match="two minds"):
            barrier.passed()
    assert trio[0].missing() == [2]
