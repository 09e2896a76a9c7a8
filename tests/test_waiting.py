"""Waits yield the core, and find out whether others want it."""

from itertools import count, pairwise

import pytest

from mpiagg.errors import StallError
from mpiagg.transport import waiting


@pytest.mark.parametrize(("seconds", "shared"), [(0.5e-6, False), (3e-6, True)])
def test_a_core_is_shared_where_a_yield_takes_long(monkeypatch, seconds, shared):
    clock = iter([1.0, 1.0 + seconds])
    monkeypatch.setattr(waiting.time, "perf_counter", lambda: next(clock))
    core = waiting.Core()
    core.shared = not shared
    core.give_way()
    assert core.shared == shared


@pytest.mark.parametrize(("shared", "yields"), [(False, waiting.YIELDS), (True, waiting.YIELDS_IN_A_CROWD)])
def test_who_shares_its_core_sleeps_sooner(monkeypatch, shared, yields):
    calls = {"yield": 0, "sleep": 0}

    class Known(waiting.Core):
        def give_way(self):
            calls["yield"] += 1
            self.shared = shared

    monkeypatch.setattr(waiting, "CORE", Known())
    monkeypatch.setattr(waiting.time, "sleep", lambda _: calls.update(sleep=calls["sleep"] + 1))
    tests = count()
    waiting.wait_patiently(lambda: next(tests) == yields + 3, lambda: "nothing")
    assert calls == {"yield": yields + 1, "sleep": 3}


def test_who_shares_its_core_with_one_that_computes_sleeps_instead_of_yielding(monkeypatch):
    clock, done = [1.0], []

    def take(seconds, what):
        clock[0] += seconds
        done.append(what)

    yield_takes = 2 * waiting.SLOW_YIELD
    monkeypatch.setattr(waiting.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(waiting.os, "sched_yield", lambda: take(yield_takes, "yield"))
    monkeypatch.setattr(waiting.time, "sleep", lambda _: take(1e-3, "sleep"))
    core = waiting.Core()
    for _ in range(1000):
        core.give_way()
    yields = [place for place, what in enumerate(done) if what == "yield"]
    sleeps = [later - place - 1 for place, later in pairwise(yields)]
    assert sleeps[:4] == pytest.approx([5, 10, 20, 40], abs=1)
    assert set(sleeps[5:]) <= {100, 101}
    assert core.shared

    yield_takes = waiting.QUICK_YIELD / 2
    while done[-2:] != ["yield", "yield"]:
        core.give_way()
    assert not core.shared
    yield_takes = 2 * waiting.SLOW_YIELD
    del done[:]
    for _ in range(10):
        core.give_way()
    assert done[:5] == ["yield", *["sleep"] * 4]
    assert done.count("yield") == 2


def test_a_wait_in_vain_says_for_what():
    with pytest.raises(StallError, match=r"waited 0\.01 s in vain for a rank that never comes"):
        waiting.wait_patiently(lambda: False, lambda: "a rank that never comes", 0.01)
