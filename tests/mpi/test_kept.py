"""The calls that a communicator keeps: found again, and given back when they were not used for long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from mpiagg.transport import kept

pytestmark = [pytest.mark.mpi, pytest.mark.few_ranks]

ALONE = MPI.COMM_WORLD.size == 1


class Kept:
    """Something that is kept."""

    plan = None

    def __init__(self, nbytes, freed):
        self.nbytes, self.used, self._freed = nbytes, False, freed

    def free(self):
        self._freed.append(self)


@pytest.fixture
def calls(monkeypatch):
    monkeypatch.setattr(kept, "MOST", 4)
    monkeypatch.setattr(kept, "MOST_BYTES", 100)
    return kept.Calls()


def test_what_is_found_is_not_made_again(calls):
    freed = []
    first = calls.find("key", lambda: Kept(1, freed))
    assert calls.find("key", lambda: pytest.fail("made again")) is first
    assert first.used
    assert not freed


def test_what_was_not_used_for_long_goes_first(calls):
    freed = []
    made = [calls.find(number, lambda: Kept(1, freed)) for number in range(4)]
    for each in made:
        each.used = each is made[1]
    calls.find(4, lambda: Kept(1, freed))
    assert freed == [made[0]]
    calls.find(5, lambda: Kept(1, freed))
    assert freed == [made[0], made[2]]  # the second was used, and is passed over once
    assert 1 in calls
    made[3].used = True
    calls.find(6, lambda: Kept(1, freed))
    assert freed[-1] is made[1]


def test_memory_is_bounded_but_for_the_newest(calls):
    freed = []
    small = calls.find("small", lambda: Kept(60, freed))
    large = calls.find("large", lambda: Kept(1000, freed))
    assert freed == [small]
    assert list(calls.values()) == [large]
    calls.free()
    assert freed == [small, large]
    assert not calls


def test_keys_are_known_from_the_last_ones_that_were_asked_for(calls):
    assert not calls.asked_before("key")
    assert calls.asked_before("key")
    assert not calls.asked_before("key")  # it got what was asked for, and lost it since
    assert not any(calls.asked_before(number) for number in range(4))
    assert not calls.asked_before("key")  # that is too long ago


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60), st.booleans()), max_size=60 if ALONE else 5))
def test_limits_hold_and_what_goes_is_freed_once(asked):
    freed, made, calls = [], [], kept.Calls()
    most, most_bytes = kept.MOST, kept.MOST_BYTES
    kept.MOST, kept.MOST_BYTES = 4, 100
    try:
        for key, nbytes, forgotten in asked:

            def make(nbytes=nbytes):
                made.append(Kept(nbytes, freed))
                return made[-1]

            found = calls.find(key, make)
            assert calls[key] is found
            found.used = not forgotten
            assert len(calls) <= 4
            assert sum(each.nbytes for each in calls.values()) <= 100 or len(calls) == 1
            assert sorted(map(id, made)) == sorted(map(id, [*freed, *calls.values()]))
    finally:
        kept.MOST, kept.MOST_BYTES = most, most_bytes
