"""What is learned from calls, whose times are made up."""

import json
import random

import pytest

from mpiagg.schedules import Collective, Layout
from mpiagg.tables import ANNOUNCED, NATIVE, Case, Choice, Memory, Origin, Row, Settings, Table
from mpiagg.tables.files import table_of, text_of
from mpiagg.tables.learned import BETTER, PATIENCE, REPEATS, Learner, step_of

NODE, APART, SPREAD = Layout.of([2]), Layout.of([1] * 4), Layout.of([2, 2])
LIBRARY = "MPICH"


def learner(layout=NODE, before=None, save=None):
    return Learner(LIBRARY, Origin(layout, "MPICH 5", {}), before, save)


def case_of(layout=NODE, nbytes=2**20, collective=Collective.ALLREDUCE, library=None, learned=None):
    return Case(collective, nbytes, layout, library=library, learned=learned)


def usual(case, *, registered=False):
    choice = Settings().found(case).choice
    return choice._replace(unregistered=None) if registered else choice.in_other_memory


def taught(one, case, seconds, *, leased=False, registered=False, agree=list):
    """Let calls of a case be tried until they are not any more, and return the choices that they took."""
    taken = []
    while one.learns(case, leased=leased):
        kind = one.kind(case, registered=registered)
        choice = one.choice(kind, case)
        taken.append(choice)
        one.note(kind, seconds(choice, len(taken)), agree)
        assert len(taken) < 1000
    return taken


def test_steps_are_powers_of_four():
    assert [step_of(nbytes) for nbytes in (0, 1, 2, 4, 5, 16, 17, 64, 65, 4**20, 4**20 + 1)] == [
        *(0, 0, 1, 1, 2, 2, 3, 3, 4, 20, 21)
    ]


@pytest.mark.parametrize("layout", [NODE, APART, SPREAD])
@pytest.mark.parametrize("library", [None, LIBRARY])
@pytest.mark.parametrize("collective", [Collective.ALLREDUCE, Collective.ALLTOALL, Collective.SCAN])
def test_every_choice_has_as_many_turns_and_the_fastest_stays(layout, library, collective):
    one, case = learner(layout), case_of(layout, 2**20, collective, library)
    candidates = set(taught(learner(layout), case, lambda *_: 1.0))
    assert usual(case) in candidates
    assert (Choice(NATIVE) in candidates) == (library is not None)
    for winner in candidates:
        one = learner(layout)
        taken = taught(one, case, lambda choice, _, winner=winner: 0.5 if choice == winner else 1.0)
        assert {choice: taken.count(choice) for choice in candidates} == dict.fromkeys(candidates, 1 + REPEATS)
        found = Settings().found(case._replace(learned=one.table))
        assert found.choice.in_other_memory == winner
        # Only what was tried is learned: others stay as they were.
        for nbytes in (2**18, 2**20 + 1, 64):
            other = case._replace(nbytes=nbytes)
            assert Settings().found(other._replace(learned=one.table)).choice.in_other_memory == usual(other)
        another = case._replace(library=LIBRARY if library is None else None)
        assert Settings().found(another._replace(learned=one.table)).choice.in_other_memory == usual(another)


def test_long_messages_between_nodes_are_tried_in_lanes():
    taken = taught(learner(APART), case_of(APART, 2**24), lambda *_: 1.0)
    assert len({choice.algorithm for choice in taken}) > 1
    assert {choice.lanes for choice in taken} == {4}


def test_what_is_usual_stays_unless_another_is_faster_by_more_than_noise():
    case = case_of(APART)
    for better, stays in ((1.0, True), (BETTER - 0.01, True), (BETTER + 0.01, False)):
        one = learner(APART)
        taught(one, case, lambda choice, _, better=better: 1.0 if choice == usual(case) else 1.0 / better)
        assert (Settings().found(case._replace(learned=one.table)).choice == usual(case)) is stays


def test_first_calls_do_not_count_nor_do_single_slow_ones():
    one, case = learner(), case_of()
    number = len(set(taught(learner(), case, lambda *_: 1.0)))
    noise = random.Random(3)
    slow = {noise.randrange(number, number * (1 + REPEATS)) for _ in range(number)}
    taken = taught(one, case, lambda _, turn: 100.0 if turn <= number or turn in slow else 1.0)
    assert len(taken) == number * (1 + REPEATS)
    times = [times for row in one.table.rows for times in row.times.values()]
    assert set(times[0].values()) == {1.0}


def test_the_slowest_rank_counts():
    case, winner = case_of(APART), Choice("ring")

    def agree(seconds):
        told.append(list(seconds))
        return [3.0 for _ in seconds]

    told, one = [], learner(APART)
    taught(one, case, lambda choice, _: 0.1 if choice == winner else 1.0, agree=agree)
    assert len(told) == 1
    assert Settings().found(case._replace(learned=one.table)).choice == usual(case)


def test_on_a_node_registered_memory_is_learned_by_itself():
    one, case = learner(), case_of(nbytes=2**22)

    def seconds(registered):
        return lambda choice, _: 0.5 if choice.algorithm == ("shared" if registered else "circulant") else 1.0

    for turn in range(1000):
        if not one.learns(case, leased=True):
            break
        registered = turn % 3 > 0
        kind = one.kind(case, registered=registered)
        choice = one.choice(kind, case)
        one.note(kind, seconds(registered)(choice, turn), list)
    assert 50 < turn < 150
    assert Settings().found(case._replace(learned=one.table)).choice == Choice("shared", unregistered="circulant")
    names = {name for row in one.table.rows for times in row.times.values() for name in times}
    assert {"shared", "shared, registered memory", "circulant"} <= names
    # Where it makes no difference, it is no other kind.
    short = case_of(nbytes=ANNOUNCED // 2)
    assert one.kind(short, registered=True) == one.kind(short, registered=False)
    taught(one, short, lambda *_: 1.0, leased=True)
    assert not one.learns(short, leased=True)


def test_all_lengths_of_a_step_are_tried_or_none():
    """On one rank a call of one length may be resolved anew when on another one of another length is."""
    one = learner()
    step = step_of(ANNOUNCED)
    below, above = case_of(nbytes=4 ** (step - 1) + 1), case_of(nbytes=4**step)
    assert below.nbytes < ANNOUNCED < above.nbytes
    assert all(one.kind(below, registered=each) == one.kind(above, registered=each) for each in (False, True))
    taught(one, above, lambda *_: 1.0, leased=True, registered=True)
    assert not one.learns(below, leased=True)


@pytest.mark.parametrize("registered", [False, True])
def test_calls_are_not_watched_for_ever_for_others_in_the_other_kind_of_memory(registered):
    one, case = learner(), case_of()
    taken = taught(one, case, lambda *_: 1.0, leased=True, registered=registered)
    assert PATIENCE < len(taken) < PATIENCE + 50


def test_calls_that_are_not_tried_any_more_are_never_tried_again():
    """Some ranks may have kept them, and others not."""
    one, case = learner(), case_of()
    taught(one, case, lambda *_: 1.0)
    assert one.learns(case, leased=True) is False
    other = case_of(collective=Collective.BROADCAST)
    assert one.learns(other, leased=True)


def test_other_calls_of_the_same_step_are_not_changed_by_what_is_learned_beyond_it():
    """A row's limit may lie within a step: whoever resolves a call later must find what others have kept."""
    rows = (
        Row(Collective.REDUCE, Choice("ring"), 2 * 4**7, times={4**7: {"ring": 1.0}}),
        Row(Collective.REDUCE, Choice("tree"), 2 * 4**8, times={4**8: {"tree": 1.0}}),
    )
    one = learner(APART, Table("t", rows))
    known = [case_of(APART, nbytes, Collective.REDUCE) for nbytes in (20_000, 4**8, 2 * 4**8)]
    before = [one.chosen(case) for case in known]
    assert before[:2] == [Choice("ring"), Choice("tree")]
    longer = case_of(APART, 4**10, Collective.REDUCE)
    taught(one, longer, lambda choice, _: 0.5 if choice.algorithm == "bine" else 1.0)
    assert [one.chosen(case) for case in known] == before
    assert one.chosen(longer).algorithm != before[1].algorithm


def test_what_is_not_tried_goes_by_what_was_there_before():
    one, case = learner(APART), case_of(APART)
    taught(one, case, lambda choice, _: 0.5 if choice.algorithm == "circulant" else 1.0)
    assert one.before is None
    assert learner(APART, one.table).before is one.table


def test_what_was_learned_goes_on_in_the_next_job():
    saved, case, longer = [], case_of(APART), case_of(APART, 2**24)
    one = learner(APART, save=lambda table: saved.append(text_of(table)))
    taught(one, case, lambda choice, _: 0.5 if choice == Choice("tree") or choice.lanes == 2 else 1.0)
    first = Settings().found(case._replace(learned=one.table)).choice
    before = table_of("t", json.loads(saved[-1]))
    assert (before.rows, before.origin) == (one.table.rows, one.table.origin)
    two = learner(APART, before, lambda table: saved.append(text_of(table)))
    assert taught(two, case, lambda *_: 1.0) == []
    assert two.learns(longer, leased=False)
    taught(two, longer, lambda choice, _: 0.5 if choice.algorithm == "circulant" else 1.0)
    table = table_of("t", json.loads(saved[-1]))
    assert Settings().found(case._replace(learned=table)).choice == first
    assert Settings().found(longer._replace(learned=table)).choice.algorithm == "circulant"
    three = learner(APART, table)
    assert not three.learns(case, leased=False)
    assert not three.learns(longer, leased=False)
    lengths = {nbytes for row in table.rows for nbytes in row.times}
    assert lengths == {case.nbytes, longer.nbytes}


def test_rows_for_calls_that_share_no_memory_stay():
    alone = Row(Collective.ALLREDUCE, Choice("tree"), 2**10, memory=Memory.NONE, times={64: {"tree": 1.0, "ring": 2.0}})
    both = Row(Collective.ALLREDUCE, Choice("ring"), 2**10, memory=Memory.TOGETHER, times={64: {"shared": 3.0}})
    one, case = learner(before=Table("t", (both, alone))), case_of()
    taught(one, case, lambda *_: 1.0)
    assert alone in one.table.rows
    assert {"tree": 1.0, "ring": 2.0, "shared": 3.0} in [row.times.get(64) for row in one.table.rows]


def test_a_forced_algorithm_comes_before_what_was_learned():
    one, case = learner(APART), case_of(APART)
    taught(one, case, lambda choice, _: 0.5 if choice.algorithm == "circulant" else 1.0)
    assert Settings(forced="tree").found(case._replace(learned=one.table)).choice == Choice("tree")


def test_calls_that_may_not_share_memory_go_by_the_default_on_a_node():
    one, case = learner(), case_of()
    taught(one, case, lambda choice, _: 0.5 if choice.algorithm == "ring" else 1.0)
    alone = case._replace(memory=Memory.NONE)
    assert Settings().found(alone._replace(learned=one.table)) == Settings().found(alone)


def test_many_ranks_are_priced_as_fewer():
    layout = Layout.of([4] * 1024)
    one, case = learner(layout), case_of(layout, 64, Collective.ALLTOALL)
    assert len(set(taught(one, case, lambda *_: 1.0))) > 1


def test_a_table_without_times_is_no_reason_not_to_learn():
    before = Table("t", Settings().found(case_of()).table.rows, None)
    assert learner(before=before).learns(case_of(), leased=False)
