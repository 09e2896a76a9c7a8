"""Watchdogs of several ranks, here in one process: who warns of what, who tells whom, and what is raised then."""

import re
import threading
import time

import pytest

from mpiagg.errors import MismatchError, StallError
from mpiagg.watch import OperationLog, Recorder, Subject, Watchdog, done, watchdog

NAME = "00112233445566aa"


class Rank:
    """A rank of a job that has only a recorder and a watchdog."""

    def __init__(self, rank, size, warn=0.0, timeout=1000.0):
        self.recorder, self.log = Recorder(), OperationLog(NAME, rank, size)
        self.given_up = threading.Event()
        self.dumped = threading.Event()
        self.watchdog = Watchdog(
            self.recorder, warn, timeout, lambda _: self.given_up.set(), lambda _: self.dumped.set()
        )

    def enter(self, what, waits=None):
        subject = Subject(self.log, what)
        subject.waits = waits
        subject.thread = threading.get_ident()
        return self.recorder.begin(subject, True)


def told(rank):
    """Return a rank when it has been told of a fault: who is told first goes on before the others are."""
    while rank.log.fault is None:
        time.sleep(0.01)
    return rank


def together(**how):
    """Return three ranks that know each other."""
    made = [Rank(rank, 3, **how) for rank in range(3)]
    peers = [each.watchdog.listener.peer for each in made]
    for each in made:
        each.watchdog.join(each.log, peers)
    return made


@pytest.fixture
def ranks():
    return together()


def test_every_rank_gets_the_same_report(ranks):
    for each in ranks[:2]:
        each.enter("a sum", lambda: "rank 2")
    found = [each.watchdog.report(each.log) for each in ranks]
    assert found[0] == found[1] == found[2]
    assert "rank 1: in it, waits for rank 2" in found[0].table
    assert "rank 2: has not come" in found[0].table
    assert ranks[0].log.fault is None


def test_a_mismatch_is_told_to_all(ranks):
    for each, what in zip(ranks, ("a sum", "a sum", "a maximum"), strict=True):
        each.enter(what, lambda: "others")
    found = ranks[1].watchdog.report(ranks[1].log)
    assert isinstance(found.fault, MismatchError)
    for each in ranks:
        with pytest.raises(MismatchError, match=r"ranks 0, 1: a sum, rank 0 at .*; rank 2: a maximum, rank 2 at "):
            told(each).log.check()


def test_a_mismatch_that_one_rank_knows_of_is_told_to_all_though_nobody_waits(ranks):
    for each, what in zip(ranks, ("a sum", "a sum", "a maximum"), strict=True):
        done(each.enter(what))
    assert ranks[0].watchdog.report(ranks[0].log).fault is None  # and what was found is kept for a while
    ranks[2].log.explain(1)
    for each in ranks:
        with pytest.raises(MismatchError, match=r"ranks 0, 1: a sum; rank 2: a maximum"):
            told(each).log.check()


def test_who_has_raised_is_told(ranks):
    ranks[0].enter("a sum")
    ranks[2].recorder.status = "raised ValueError: no"
    assert ranks[1].log.explain()
    with pytest.raises(StallError, match="rank 2 raised ValueError: no"):
        told(ranks[0]).log.check()


def test_another_rank_takes_over_where_the_first_does_not_answer(ranks):
    for each in ranks[1:]:
        each.enter("a sum")
    peers = [each.watchdog.listener.peer for each in ranks]
    gone = peers[0]._replace(port=1, pid=2**22 + 1, addresses=())
    for each in ranks[1:]:
        each.watchdog.join(each.log, [gone, *peers[1:]])
    found = ranks[2].watchdog.report(ranks[2].log)
    assert "rank 0 is gone" in str(found.fault)
    assert "rank 0 is gone" in str(told(ranks[1]).log.fault)


def test_a_communicator_that_is_not_known_is_not_told_of(ranks):
    ranks[0].watchdog.leave(ranks[0].log)
    assert "rank 0: does not answer" in ranks[1].watchdog.report(ranks[1].log).table
    assert ranks[0].watchdog.report(ranks[0].log).table == ""


@pytest.mark.parametrize("question", [{}, {"ask": "state"}, {"channel": 3}, {"ask": "report", "channel": "x"}])
def test_what_is_no_question_is_a_value_error(ranks, question):
    with pytest.raises(ValueError, match="no such communicator"):
        ranks[0].watchdog.answer(question)


def test_a_fault_that_is_none_changes_nothing(ranks):
    for tell, text in (("KeyboardInterrupt", "x"), (["StallError"], "x"), ("StallError", 3)):
        told = {"tell": tell, "text": text}
        assert ranks[0].watchdog.answer({**told, "channel": NAME}) == {}
    assert ranks[0].log.fault is None


def test_what_does_not_get_on_is_warned_of_once_in_a_while(capfd):
    rank = Rank(0, 1, warn=1e-9)
    rank.watchdog.join(rank.log, [rank.watchdog.listener.peer])
    first = object()
    entry = rank.enter("a sum", lambda: first)
    for _ in range(3):
        rank.watchdog.look()
    while "operation 1 of 1 ranks" not in (told := capfd.readouterr().err + (locals().get("told") or "")):
        rank.watchdog.look()
    assert "mpiagg: rank 0 has waited 0 s in operation 1, a sum for <object" in told
    assert rank.dumped.wait(10)
    done(entry)
    assert rank.recorder.running == []


def test_what_goes_on_is_not_warned_of(capfd):
    rank = Rank(0, 1, warn=1e-9)
    rank.enter("what goes on", object)  # another object each time is progress
    rank.recorder.begin(Subject(rank.log, "a plan that runs while its caller computes"), False)
    for _ in range(10):
        rank.watchdog.look()
    told = capfd.readouterr().err  # also what others say late
    assert "what goes on" not in told
    assert "a plan" not in told


@pytest.mark.parametrize("agree", [True, False])
def test_ranks_in_different_calls_of_the_mpi_library_are_told_of_once(agree, capfd, monkeypatch):
    monkeypatch.setattr(watchdog, "FRESH", 1000)  # what is said once stays so, however slow the machine is
    ranks = together(warn=1e-9)
    for each, what in zip(ranks, ("a sum", "a sum", "a sum" if agree else "a maximum"), strict=True):
        subject = Subject(each.log, what)
        subject.unleavable = 1000
        each.entry = each.recorder.begin(subject, True)
    for each in ranks[1:]:
        each.watchdog.look()
        each.watchdog.look()
    assert all(each.dumped.wait(10) for each in ranks)  # after that it has been said
    for each in ranks:
        done(each.entry)
    told = capfd.readouterr().err
    assert len(re.findall(r"  rank 2: in \S+.*, waits for the MPI library, entered \d+ s ago", told)) == 1
    assert ("ranks disagree in operation 1: ranks 0, 1: a sum" in told) != agree


def test_a_wait_that_nobody_can_leave_ends_the_job():
    rank = Rank(0, 1)
    subject = Subject(rank.log, "the MPI library's own")
    subject.unleavable = 1e-9
    rank.recorder.begin(subject, True)
    rank.watchdog.look()
    rank.watchdog.look()
    assert rank.given_up.wait(10)
