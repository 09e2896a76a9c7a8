"""What a process makes once is made once, also when several threads ask at the same time."""

import threading
import time
from functools import cache

import pytest

from mpiagg.common.once import once


def made_by_threads(decorate):
    asked = threading.Barrier(4)
    made, got = [], []

    @decorate
    def thing():
        time.sleep(0.05)  # all others ask meanwhile
        made.append(object())
        return made[-1]

    def ask():
        asked.wait()
        got.append(thing())

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made, got


def test_threads_that_ask_together_get_the_same():
    made, got = made_by_threads(once)
    assert len(made) == 1
    assert got == made * 4


def test_a_cache_alone_would_make_several():
    made, _ = made_by_threads(cache)
    assert len(made) > 1


def test_what_could_not_be_made_is_tried_again():
    turns = []

    @once
    def thing():
        turns.append(0)
        if len(turns) == 1:
            raise ValueError("not yet")
        return "made"

    with pytest.raises(ValueError, match="not yet"):
        thing()
    assert [thing(), thing(), len(turns)] == ["made", "made", 2]


def test_what_is_made_may_ask_for_itself():
    @once
    def inner():
        return 1

    @once
    def outer():
        return inner() + inner()

    assert outer() == 2
