"""The watchdog of a process: it warns of operations that do not get on, and finds out why.

It looks at what the recorder holds every so often, in the thread that listens on the side channel; operations
themselves know nothing of it. What it learns is raised by whoever waits (:meth:`Trail.check`).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, TypeVar

from mpiagg.errors import Error, MismatchError, StallError
from mpiagg.watch.recorder import (
    BLOCKING,
    END,
    ORDER,
    START,
    SUBJECT,
    Entry,
    Recorder,
    Subject,
    Trail,
    call_site,
    clock,
    stack,
)
from mpiagg.watch.report import GONE, RECENT, SILENT, Answer, Operation, Report, State, report
from mpiagg.watch.side_channel import PATIENCE, Card, GoneError, Listener, Told

LONGEST_LOOK: Final = 2.0
"""Seconds between two looks at most."""

FRESH: Final = 2.0
"""Seconds for which a report is good."""

AT_ONCE: Final = 32
"""How many ranks are asked at the same time."""

Result = TypeVar("Result")

_FAULTS: Final[dict[str, type[Error]]] = {"MismatchError": MismatchError, "StallError": StallError}


class Watchdog:
    """Warns of operations of this process that do not get on, and answers for it on the side channel.

    Parameters
    ----------
    recorder : Recorder
        The operations.
    warn, timeout : float
        Seconds without progress after which it warns, and after which no wait may last on.
    give_up : callable
        Ends the job; called with the reason, where nobody waits who could raise an error.
    dump : callable
        Writes down what this process has done; called with the reason.
    """

    def __init__(
        self,
        recorder: Recorder,
        warn: float,
        timeout: float,
        give_up: Callable[[str], object],
        dump: Callable[[str], object],
    ) -> None:
        self.recorder = recorder
        self._warn, self._timeout, self._give_up, self._dump = warn, timeout, give_up, dump
        self._trails: dict[str, tuple[Trail, Sequence[Card]]] = {}
        self._seen: dict[int, _Seen] = {}
        self._reports: dict[str, tuple[float, Report]] = {}
        self._gathering = threading.Lock()
        every = min(LONGEST_LOOK, max(warn, timeout / 4) / 4) if warn or timeout else LONGEST_LOOK
        self.card = Listener(self.answer, self.look, every).card

    def join(self, trail: Trail, cards: Sequence[Card]) -> None:
        """Learn of a communicator: what is done on it, and where its ranks listen."""
        self._trails[trail.name] = trail, cards
        trail.explain = lambda: self.report(trail).table

    def leave(self, trail: Trail) -> None:
        """Forget a communicator."""
        self._trails.pop(trail.name, None)

    # -- this process's own operations

    def look(self) -> None:
        """Warn of what does not get on."""
        now = time.monotonic()
        seen: dict[int, _Seen] = {}
        for entry in self.recorder.running:
            subject: Subject = entry[SUBJECT]
            waits = subject.waits
            if not entry[BLOCKING] and waits is None:
                continue
            awaited = None if waits is None else waits()
            before = self._seen.get(id(entry))
            if before is None or before.entry is not entry or before.awaited is not awaited:
                before = _Seen(entry, awaited, now, self._warn)
            seen[id(entry)] = before
            if self._warn and now - before.since >= before.next:
                before.next *= 2
                threading.Thread(target=self._complain, args=(before, now - before.since), daemon=True).start()
            if waits is None and now - before.since > self._timeout + FRESH:
                self._give_up(f"waited {self._timeout:g} s in vain in {_operation(entry)}")
        self._seen = seen

    def _complain(self, seen: _Seen, seconds: float) -> None:
        subject: Subject = seen.entry[SUBJECT]
        trail = subject.trail
        what = f" for {seen.awaited}" if seen.awaited is not None else ""
        site = call_site(subject.thread or threading.main_thread().ident or 0)
        called = f"; called at {site}" if site else ""
        say(f"rank {trail.rank} has waited {seconds:.0f} s in {_operation(seen.entry)}{what}{called}")
        with suppress(RuntimeError):  # at the end of the program no thread can be started any more
            found = self.report(trail, aloud=True)
            trail.fault = trail.fault or found.fault

    # -- the ranks of a communicator

    def report(self, trail: Trail, *, aloud: bool = False) -> Report:
        """Return what all ranks of a communicator do, as one of them has found out for all.

        The lowest rank that answers does so. It tells all of them, if something is wrong for certain; otherwise it
        prints what it has found, if that is to be said ``aloud``.
        """
        known = self._trails.get(trail.name)
        if known is None:
            return Report("", None)
        question = {"ask": "report", "channel": trail.name, "aloud": aloud}
        for rank, card in enumerate(known[1][: trail.rank]):
            if rank > 2:
                break
            try:
                told = card.ask(question, 4 * PATIENCE)
                fault = _fault(told)
                return Report(str(told["table"]), fault)
            except (OSError, ValueError, KeyError):
                continue
        return self._gather(trail.name, aloud=aloud)

    def _gather(self, name: str, *, aloud: bool) -> Report:
        with self._gathering:
            when, found = self._reports.get(name, (0.0, None))
            if found is None or time.monotonic() - when > FRESH:
                _, cards = self._trails[name]
                answers = _each(lambda card: self._state_of(name, card), cards)
                found = report(answers)
                if aloud:
                    _each(lambda card: _tell(card, {"tell": "dump", "channel": name}), cards)
                if found.fault is not None:
                    told = {"tell": type(found.fault).__name__, "text": str(found.fault), "channel": name}
                    _each(lambda card: _tell(card, told), cards)
                if aloud and found.fault is None:
                    say(found.table)
                self._reports[name] = time.monotonic(), found
        return found

    def _state_of(self, name: str, card: Card) -> Answer:
        try:
            return State.parse(card.ask({"ask": "state", "channel": name}))
        except GoneError:
            return GONE
        except (OSError, ValueError):
            return SILENT

    def answer(self, question: Told) -> Told:
        """Answer a question of another rank.

        Raises
        ------
        ValueError
            If it is none.
        """
        name = question.get("channel")
        known = self._trails.get(name) if isinstance(name, str) else None
        if known is None:
            raise ValueError("no such communicator")
        if question.get("ask") == "state":
            return self.state(known[0]).as_json()
        if question.get("ask") == "report":
            found = self._gather(known[0].name, aloud=bool(question.get("aloud")))
            kind = "" if found.fault is None else type(found.fault).__name__
            return {"table": found.table, "tell": kind, "text": str(found.fault or "")}
        if question.get("tell") == "dump":
            self._dump("a rank has asked, which waits")
        fault = _fault(question)
        if fault is not None:
            known[0].fault = known[0].fault or fault
        return {}

    def state(self, trail: Trail) -> State:
        """Return what this rank does on a communicator."""
        here: list[Operation] = []
        waits = elsewhere = ""
        inside = False
        for entry in self.recorder.entries:
            subject: Subject = entry[SUBJECT]
            running = entry[END] == 0
            inside = inside or (running and entry[BLOCKING])
            if subject.trail is trail:
                here.append(Operation(entry[ORDER], subject.what, running))
                if running and subject.waits is not None:
                    seconds = (clock() - entry[START]) / 1e9
                    inside = True
                    waits = f"{subject.waits()}, since {seconds:.0f} s"
            elif running and (subject.waits is not None or entry[BLOCKING]):
                elsewhere = subject.what
        places = stack(outside=inside)
        return State(self.recorder.status, trail.count, tuple(here[-RECENT:]), waits, elsewhere, tuple(places))


class _Seen:
    """A running operation, and since when nothing of it has got on."""

    __slots__ = ("awaited", "entry", "next", "since")

    def __init__(self, entry: Entry, awaited: object, since: float, warn: float) -> None:
        self.entry, self.awaited, self.since, self.next = entry, awaited, since, warn


def _each(act: Callable[[Card], Result], cards: Sequence[Card]) -> list[Result]:
    """Return what comes of an act with each card, some of them at the same time."""
    results: dict[int, Result] = {}
    left = iter(enumerate(cards))
    taking = threading.Lock()

    def work() -> None:
        while True:
            with taking:
                number, card = next(left, (-1, None))
            if card is None:
                return
            results[number] = act(card)

    # Not a pool: its threads would have to be waited for at the end of the program, in which we may be.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(AT_ONCE, len(cards)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(len(cards))]


def say(text: str) -> None:
    """Say something to whoever reads this rank's standard error, in one piece."""
    sys.stderr.write(f"mpiagg: {text}\n")
    sys.stderr.flush()


def _operation(entry: Entry) -> str:
    subject: Subject = entry[SUBJECT]
    return f"operation {entry[ORDER]}, {subject.what}"


def _fault(told: Told) -> Error | None:
    kind, text = told.get("tell"), told.get("text")
    fault = _FAULTS.get(kind) if isinstance(kind, str) else None
    return fault(text) if fault is not None and isinstance(text, str) else None


def _tell(card: Card, told: Told) -> None:
    with suppress(OSError, ValueError):  # who cannot be told will find out by itself
        card.ask(told)
