"""What follows from what ranks tell: who is missing, who disagrees, who is lost; and that nothing told is trusted."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiagg.common import documents
from mpiagg.errors import MismatchError, StallError
from mpiagg.watch.report import GONE, MOST_SHOWN, SILENT, RankState, ReportedOperation, report


def state(*recent, status="runs", waits="", beside="", stack=("train.py:42 in step",), entered=None, plans=True):
    # An operation is given as (order, what), and whether it runs, and is waited for.
    operations = tuple(
        ReportedOperation(order, what, bool(more), more == "waits")
        for order, what, *rest in recent
        for more in rest or [""]
    )
    count = max((each.order for each in operations), default=0) if entered is None else entered
    return RankState(status, count, operations, waits, beside, stack, not plans)


AT = "at train.py:42 in step"
SUM, MAX, MIN = (f"allreduce of 3 float32, op {op}" for op in ("sum", "max", "min"))


def test_who_has_not_come_is_named_with_where_it_is():
    there = state((1, SUM), (2, SUM, "waits"), waits="8 bytes to arrive from rank 2")
    late = state((1, SUM), stack=("model.py:88 in forward", "train.py:40 in main"))
    table, fault = report([there, there, late])
    assert fault is None
    first, *ranks = table.splitlines()
    assert first == f"operation 2 of 3 ranks, {SUM}:"
    assert ranks[0] == "  rank 0: in it, waits for 8 bytes to arrive from rank 2, at train.py:42 in step"
    assert ranks[2] == (
        "  rank 2: has not come: it has entered 1 operations, and computes"
        " at model.py:88 in forward < train.py:40 in main"
    )


def test_what_is_waited_for_is_told_before_what_only_runs():
    there = state((1, MAX, "runs"), (2, SUM, "waits"), waits="rank 1 to come")
    first, *ranks = report([there, state((1, MAX, "runs"))]).table.splitlines()
    assert first == f"operation 2 of 2 ranks, {SUM}:"
    assert ranks[1].startswith("  rank 1: has not come")
    first, *_ = report([state((1, MAX, "runs"))] * 2).table.splitlines()
    assert first == f"operation 1 of 2 ranks, {MAX}:"


def test_who_is_in_another_communicator_is_told():
    table, fault = report(
        [state((1, SUM, "waits")), state(beside="broadcast of 9 uint8, root 0 on another communicator")]
    )
    assert fault is None
    assert "has not come: it has entered 0 operations, and is in broadcast of 9 uint8, root 0 on another" in table


def test_who_does_not_come_to_what_is_done_beside_the_operations_is_named():
    meeting = state((1, SUM), beside="a meeting of all ranks to set up shared memory on a node")
    table, fault = report([meeting, state((1, SUM)), meeting])
    assert fault is None
    first, *ranks = table.splitlines()
    assert first == "a meeting of all ranks to set up shared memory on a node of 3 ranks:"
    assert ranks[0].startswith("  rank 0: it has entered 1 operations, and is in a meeting")
    assert ranks[1].startswith("  rank 1: has not come: it has entered 1 operations, and computes")


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (
            [state((1, SUM, "waits")), state((1, MAX, "waits"))],
            f"in operation 1: rank 0: {SUM}, rank 0 {AT}; rank 1: {MAX}, rank 1 {AT}",
        ),
        ([state((1, SUM, "waits")), state((1, MAX), (2, MIN, "waits"))], f"rank 0: {SUM}, rank 0 {AT}; rank 1: {MAX}"),
        ([state((1, SUM, "waits"))] * 2 + [state((1, MAX, "waits"))], f"ranks 0, 1: {SUM}, rank 0 {AT}; rank 2: {MAX}"),
        ([state((2, SUM, "waits")), state((1, SUM), (2, MAX), (3, MIN, "waits"))], "in operation 2"),
        # Calls that do not wait, started in other orders.
        (
            [state((1, SUM), (2, MAX, "waits"), plans=False), state((1, MAX, "waits"), (2, SUM), plans=False)],
            f"in operation 1: rank 0: {SUM}; rank 1: {MAX}, rank 1 {AT}",
        ),
    ],
)
def test_a_mismatch_is_certain(answers, words):
    fault = report(answers).fault
    assert isinstance(fault, MismatchError)
    assert words in str(fault)


def test_a_mismatch_says_where_those_are_who_are_in_it():
    other = state((7, MAX, "waits"), stack=("other.py:3 in f",))
    at = [state((7, SUM, "waits")), state((7, SUM, "waits"), stack=()), other]
    said = f"ranks 0, 1: {SUM}, rank 0 {AT}; rank 2: {MAX}, rank 2 at other.py:3 in f"
    assert str(report(at).fault) == f"ranks disagree in operation 7: {said}"


def test_an_operation_that_ranks_are_known_to_disagree_in_is_named_though_nobody_waits():
    answers = [state((6, SUM), (7, MAX), (8, SUM)), SILENT, state((7, MIN))]
    assert report(answers).fault is None
    assert str(report(answers, 7).fault) == f"ranks disagree in operation 7: rank 0: {MAX}; rank 2: {MIN}"
    for order in (6, 8, 9):
        assert report(answers, order).fault is None


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (GONE, "rank 1 is gone"),
        (state(status="raised ValueError: no"), "rank 1 raised ValueError: no"),
        (state(status="has left: its program is at its end"), "rank 1 has left"),
    ],
)
def test_who_cannot_come_any_more_is_certain(answer, words):
    table, fault = report([state((1, SUM, "waits")), answer])
    assert isinstance(fault, StallError)
    assert words in str(fault)
    assert words.removeprefix("rank 1 ") in table


@pytest.mark.parametrize(
    ("one", "other"),
    [
        # Plans that were started in other orders, and are all started.
        (state((1, SUM), (2, MAX, "waits")), state((1, MAX, "waits"), (2, SUM))),
        (state((1, SUM, "runs"), (2, MAX, "waits")), state((1, MAX, "waits"), (2, SUM, "runs"))),
        (state((1, SUM), (2, MAX, "waits"), plans=False), state((1, MAX, "waits"), (2, SUM))),
        # The same calls; one rank is ahead.
        (state((1, SUM), (2, MAX, "waits"), plans=False), state((1, SUM, "waits"), (2, MAX, "runs"), plans=False)),
        # One that another rank may yet start.
        (state((1, SUM, "waits")), state((1, MAX, "runs"))),
        (state((1, SUM, "waits")), state((1, MAX), (2, MIN))),
        # One is ahead, and both wait for a third.
        (state((1, SUM), (2, MAX, "waits")), state((1, SUM), (2, MAX), (3, MIN, "waits"))),
        # Plans in other orders, of which a rank has started one more, and waits in something else.
        (state((1, SUM), (2, MAX), (3, MIN, "waits")), state((1, MAX, "waits"), (2, SUM))),
        # Ranks that describe what the MPI library gathers in different ways.
        (state((1, "gather by native", "waits")), state((1, "gather by native of any lengths of uint8", "waits"))),
        (
            state((1, "gather by native"), (2, SUM), (3, MAX, "waits")),
            state((1, "gather by native of any lengths of uint8"), (2, SUM, "waits")),
        ),
        # What is further back than both can tell.
        (state((7, SUM), (8, MAX, "waits")), state((8, MAX), (9, MIN, "waits"))),
    ],
)
def test_what_may_be_right_is_no_mismatch(one, other):
    assert report([one, other]).fault is None
    assert report([other, one]).fault is None


def test_who_may_come_yet_is_no_fault():
    # What is only late, silent, or ahead is no reason to give up.
    ahead = state((1, SUM), (2, MAX, "waits"))
    table, fault = report([state((1, SUM, "waits")), SILENT, ahead, state()])
    assert fault is None
    assert "rank 1: does not answer" in table
    assert f"rank 2: has done it, and is in operation 2, {MAX}" in table


def test_a_table_of_many_ranks_shows_those_that_matter():
    answers = [state((1, SUM, "waits")) for _ in range(1000)]
    answers[777] = SILENT
    table = report(answers).table
    assert len(table.splitlines()) == MOST_SHOWN + 2
    assert "rank 777: does not answer" in table
    assert table.endswith(f"and {1000 - MOST_SHOWN} more ranks")


TEXTS = st.text(max_size=20)
OPERATIONS = st.builds(ReportedOperation, st.integers(0, 4), TEXTS, st.booleans(), st.booleans())
STATES = st.builds(
    RankState,
    st.one_of(st.just("runs"), TEXTS),
    st.integers(0, 4),
    st.lists(OPERATIONS, max_size=4).map(tuple),
    TEXTS,
    TEXTS,
    st.lists(TEXTS, max_size=3).map(tuple),
    st.booleans(),
)


@given(STATES)
def test_what_is_told_arrives(told):
    assert documents.made(json.loads(json.dumps(told)), RankState) == told


@given(st.lists(st.one_of(STATES, st.sampled_from([GONE, SILENT])), min_size=1, max_size=5))
def test_every_rank_has_a_line(answers):
    found = report(answers)
    assert all(f"  rank {rank}: " in found.table for rank in range(len(answers)))


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=6,
)


@given(st.one_of(JSON, st.tuples(*[JSON] * len(RankState._fields)).map(list)))
def test_what_is_no_state_is_a_value_error(told: Any):
    with suppress(ValueError):
        assert isinstance(documents.made(told, RankState), RankState)
