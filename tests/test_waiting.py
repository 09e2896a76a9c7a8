"""Waits yield the core, and find out whether others want it."""

from itertools import count

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
    monkeypatch.setattr(waiting.os, "sched_yield", lambda: calls.update({"yield": calls["yield"] + 1}))
    monkeypatch.setattr(waiting.time, "sleep", lambda _: calls.update(sleep=calls["sleep"] + 1))
    tests = count()
    waiting.wait_patiently(lambda: next(tests) == yields + 3, lambda: "nothing")
    assert calls == {"yield": yields + 1, "sleep": 3}


def test_a_wait_in_vain_says_for_what():
    with pytest.raises(StallError, match=r"waited 0\.01 s in vain for a rank that never comes"):
        waiting.wait_patiently(lambda: False, lambda: "a rank that never comes", 0.01)
