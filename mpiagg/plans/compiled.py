"""Rounds as a straight line of calls.

A short plan takes a microsecond or two, and loops over its few calls are a good part of that. So the calls of a plan
are written out, as source text that depends only on how many there are in each round, and compiled once for
every such shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from types import CodeType, FunctionType
from typing import Final, Protocol

from mpiagg.plans.program import BoundRound, Interleaved, Wait


class Waiting(Protocol):
    """Somebody who knows how to wait."""

    def wait_for(self, test: Callable[[], bool], awaited: Wait | Interleaved) -> None:
        """Return when ``test()`` has succeeded; ``awaited`` says what that is for."""


TRIES: Final = 8
"""How often a test is tried before somebody waits."""

LONGEST: Final = 64
"""How many rounds are written out at most."""


def straight_line(rounds: Sequence[BoundRound], tries: int = TRIES) -> Callable[[Waiting], None]:
    """Return a function that runs the rounds, one after the other; it is given who waits after so many tries."""
    if len(rounds) > LONGEST:
        return partial(_one_by_one, rounds)
    names: dict[str, object] = {}
    for number, a_round in enumerate(rounds):
        for kind, calls in zip(BoundRound._fields, a_round, strict=True):
            names.update({f"{kind}_{number}_{index}": call for index, call in enumerate(calls)})
    shape = tuple((len(a_round.starts), len(a_round.tests), len(a_round.folds)) for a_round in rounds)
    return FunctionType(_code(shape, tries), names)


def _one_by_one(rounds: Sequence[BoundRound], waiting: Waiting) -> None:
    """Run the rounds of a long program, to which a loop adds little."""
    for starts, tests, folds, awaited in rounds:
        for start in starts:
            start()
        for test, message in zip(tests, awaited, strict=True):
            if not test():
                waiting.wait_for(test, message)
        for fold in folds:
            fold()


@lru_cache(maxsize=256)
def _code(shape: tuple[tuple[int, int, int], ...], tried: int) -> CodeType:
    """Return the code for rounds with so many starts, tests and folds, and tests tried so often."""
    lines = []
    for number, (starts, tests, folds) in enumerate(shape):
        lines += [f"starts_{number}_{index}()" for index in range(starts)]
        for index in range(tests):
            tries = " or ".join([f"tests_{number}_{index}()"] * tried)
            lines.append(f"{tries} or waiting.wait_for(tests_{number}_{index}, awaited_{number}_{index})")
        lines += [f"folds_{number}_{index}()" for index in range(folds)]
    source = "def run(waiting):\n" + "\n".join(f"    {line}" for line in lines or ["pass"])
    module = compile(source, "<straight line>", "exec")
    return next(constant for constant in module.co_consts if isinstance(constant, CodeType))
