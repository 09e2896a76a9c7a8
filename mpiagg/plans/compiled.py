"""Rounds of calls, compiled into one function.

A short plan takes a microsecond or two, and loops over its few calls are a good part of that. So the calls of a plan
are written out, as source text that depends only on how many there are in each round and how often each is tried,
and compiled once for every such shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from types import CodeType, FunctionType
from typing import Final, Protocol

from mpiagg.plans.program import Arrival, BoundRound, Deferred, Interleaved, Program, Wait


class Waiting(Protocol):
    """Somebody who knows how to wait."""

    def wait_for(self, test: Callable[[], bool], awaited: Wait | Interleaved) -> None:
        """Return when ``test()`` has succeeded; ``awaited`` says what that is for."""


TRIES: Final = 8
"""How often a barrier is looked at before somebody waits. A look takes less than to call who waits; to ask the MPI
library for a message takes far longer."""

Shape = tuple[int, tuple[int, ...], int] | None
"""How many starts a round has, how often each of its tests is tried, and how many reductions; None is deferred."""

LONGEST: Final = 64
"""How many rounds are written out at most."""


def compile_rounds(rounds: Sequence[BoundRound], tries: int = TRIES) -> Callable[[Waiting], None]:
    """Return a function that runs the rounds, one after the other; it is given who waits after so many looks."""
    if len(rounds) > LONGEST:
        return partial(_one_by_one, rounds)
    names: dict[str, object] = {}
    for number, a_round in enumerate(rounds):
        if (deferred := _deferred(a_round)) is not None:
            names[f"deferred_{number}"] = _AtOnce(deferred, tries)
            continue
        for kind, calls in zip(BoundRound._fields, a_round, strict=True):
            names.update({f"{kind}_{number}_{index}": call for index, call in enumerate(calls)})
    return FunctionType(_code(tuple(_shape_of(a_round, tries) for a_round in rounds)), names)


def _shape_of(a_round: BoundRound, tries: int) -> Shape:
    if _deferred(a_round):
        return None
    tests = tuple(tries if isinstance(awaited, Arrival) else 1 for awaited in a_round.awaited)
    return len(a_round.starts), tests, len(a_round.reductions)


def _one_by_one(rounds: Sequence[BoundRound], waiting: Waiting) -> None:
    """Run the rounds of a long program, to which a loop adds little."""
    for starts, tests, reductions, awaited in rounds:
        for start in starts:
            start()
        for test, message in zip(tests, awaited, strict=True):
            if not test():
                waiting.wait_for(test, message)
        for reduction in reductions:
            reduction()


def _deferred(a_round: BoundRound) -> Deferred | None:
    """Return the program that a round chooses when its turn comes, if that is all that it does."""
    awaited = a_round.awaited[0] if a_round.awaited and len(a_round.starts) == 1 else None
    return awaited if awaited.__class__ is Deferred else None  # others do more when they are done


class _AtOnce:
    """Runs what is chosen; what was chosen last is kept as it was compiled."""

    def __init__(self, deferred: Deferred, tries: int) -> None:
        self._choose, self._tries = deferred.choose, tries
        self._program: Program | None = None
        self._run: Callable[[Waiting], None] = compile_rounds(())

    def __call__(self, waiting: Waiting) -> None:
        program = self._choose()
        if program is not self._program:
            self._program, self._run = program, compile_rounds(program.rounds, self._tries)
        self._run(waiting)


@lru_cache(maxsize=256)
def _code(shapes: tuple[Shape, ...]) -> CodeType:
    """Return the code for rounds of some shapes."""
    lines = []
    for number, shape in enumerate(shapes):
        if shape is None:
            lines.append(f"deferred_{number}(waiting)")
            continue
        starts, tests, reductions = shape
        lines += [f"starts_{number}_{index}()" for index in range(starts)]
        for index, times in enumerate(tests):
            tries = " or ".join([f"tests_{number}_{index}()"] * times)
            lines.append(f"{tries} or waiting.wait_for(tests_{number}_{index}, awaited_{number}_{index})")
        lines += [f"reductions_{number}_{index}()" for index in range(reductions)]
    source = "def run(waiting):\n" + "\n".join(f"    {line}" for line in lines or ["pass"])
    module = compile(source, "<compiled rounds>", "exec")
    return next(constant for constant in module.co_consts if isinstance(constant, CodeType))
