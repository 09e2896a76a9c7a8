"""The watchdog of a process: it warns of operations that make no progress, and finds out why.

It looks at what the recorder holds every so often, in the thread that listens on the side channel; operations
themselves know nothing of it. What it learns is raised by whoever waits (:meth:`OperationLog.check`).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

from mpiagg.common import documents
from mpiagg.errors import Error, MismatchError, StallError
from mpiagg.watch.recorder import (
    BLOCKING,
    END,
    ORDER,
    START,
    SUBJECT,
    Entry,
    OperationLog,
    Recorder,
    Subject,
    clock,
)
from mpiagg.watch.report import (
    CLOSED,
    GONE,
    LONGEST,
    ON_ANOTHER,
    RECENT,
    SILENT,
    Answer,
    RankState,
    Report,
    ReportedOperation,
    report,
)
from mpiagg.watch.side_channel import PATIENCE, Fields, GoneError, Listener, Peer
from mpiagg.watch.stacks import call_site, stack

SHORTEST_LOOK: Final = 0.05
LONGEST_LOOK: Final = 2.0
"""Seconds between two looks, at least and at most."""

GATHERERS: Final = 3
"""How many ranks are tried, one after the other, before a rank gathers for itself."""

FRESH: Final = 2.0
"""Seconds for which a report is good."""

AT_ONCE: Final = 32
"""How many ranks are asked at the same time."""

Result = TypeVar("Result")

_FAULTS: Final[dict[str, type[Error]]] = {"MismatchError": MismatchError, "StallError": StallError}


class Watchdog:
    """Warns of operations of this process that make no progress, and answers for it on the side channel.

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
    host : str
        The address to listen at; all of this host's by default.
    """

    def __init__(
        self,
        recorder: Recorder,
        warn: float,
        timeout: float,
        give_up: Callable[[str], object],
        dump: Callable[[str], object],
        *,
        host: str = "",
    ) -> None:
        self.recorder = recorder
        self._warn, self._timeout, self._give_up, self._dump = warn, timeout, give_up, dump
        self._logs: dict[str, tuple[OperationLog, Sequence[Peer]]] = {}
        self._seen: dict[int, _Seen] = {}
        self._reports: dict[str, _Gathered] = {}
        self._gathering = threading.Lock()
        every = max(SHORTEST_LOOK, min(LONGEST_LOOK, *(seconds / 4 for seconds in (warn, timeout) if seconds)))
        self.listener = Listener(self.answer, partial(_quietly, self.look), every, host)

    def join(self, log: OperationLog, peers: Sequence[Peer]) -> None:
        """Learn of a communicator: what is done on it, and where its ranks listen."""
        self._logs[log.name] = log, peers
        log.explain = partial(self._explain, log)

    def leave(self, log: OperationLog) -> None:
        """Forget a communicator."""
        self._logs.pop(log.name, None)

    # -- this process's own operations

    def look(self) -> None:
        """Warn of what makes no progress."""
        now = time.monotonic()
        seen: dict[int, _Seen] = {}
        for entry in self.recorder.running:
            subject: Subject = entry[SUBJECT]
            waits = subject.waits
            if waits is None and not subject.unleavable:
                continue
            awaited = None if waits is None else waits()
            before = self._seen.get(id(entry))
            if before is None or before.entry is not entry or before.awaited is not awaited:
                before = _Seen(entry, awaited, now, self._warn)
            seen[id(entry)] = before
            lasted = now - before.since
            if self._warn and lasted >= before.next:
                before.next *= 2
                thread = threading.Thread(target=partial(_quietly, self._complain, before, lasted), daemon=True)
                thread.start()
            if waits is None and lasted > subject.unleavable:
                self._give_up(f"waited {subject.unleavable:g} s in vain in {_operation(entry)}")
        self._seen = seen

    def _complain(self, seen: _Seen, seconds: float) -> None:
        subject: Subject = seen.entry[SUBJECT]
        log = subject.log.whole
        awaited = "" if seen.awaited is None else str(seen.awaited)
        what = f" for {awaited}" if awaited and awaited not in subject.what else ""
        site = call_site(subject.thread or threading.main_thread().ident or 0)
        called = f"; called at {site}" if site else ""
        say(f"rank {log.rank} has waited {seconds:.0f} s in {_operation(seen.entry)}{what}{called}")
        found = self.report(log, printing=True)
        if found.fault is not None and subject.waits is not None:
            log.fault = log.fault or found.fault

    def _explain(self, log: OperationLog, differ_in: int = 0) -> str:
        """Return in words who is where; nothing, if that cannot be found out."""
        try:
            found = self.report(log, differ_in=differ_in)
            return found.table or str(found.fault or "")
        except Exception:  # noqa: BLE001 - whoever asks has an error to raise, and must not get another
            return ""

    # -- the ranks of a communicator

    def report(self, log: OperationLog, *, printing: bool = False, differ_in: int = 0) -> Report:
        """Return what all ranks of a communicator do, as one of them has found out for all.

        The lowest rank that answers does so. It sends to all what is wrong for certain, if anything is, and with
        ``printing`` prints what it has found. ``differ_in`` is the number of an operation that ranks are known to
        disagree in, if it is not 0.
        """
        known = self._logs.get(log.name)
        if known is None:
            return Report("", None)
        question = {"ask": "report", "channel": log.name, "printing": printing, "differ_in": differ_in}
        patience = 2 * PATIENCE * (1 + len(known[1]) // AT_ONCE)

        def ask(peer: Peer) -> Report | None:
            with suppress(Exception):  # in a thread of its own, where an error would end the job
                peer.ask({"ask": "state", "channel": log.name})  # who does not answer this is not worth more patience
                told = peer.ask(question, patience)
                return Report(str(told["table"]), _fault(told))
            return None

        for peer in known[1][: min(log.rank, GATHERERS)]:
            found = _unless(lambda: log.fault is not None, partial(ask, peer))
            if log.fault is not None:  # somebody has told us; who was asked may be at its end by now, and silent
                return Report("", log.fault)
            if found is not None:
                return found
        return self._gather(log.name, printing=printing, differ_in=differ_in)

    def _gather(self, name: str, *, printing: bool, differ_in: int = 0) -> Report:
        with self._gathering:
            known = self._logs.get(name)
            if known is None:
                return Report("", None)
            log, peers = known
            last = self._reports.get(name)
            if last is None or time.monotonic() - last.when > FRESH or (differ_in and last.report.fault is None):
                answers = _each(lambda peer: self._state_of(name, peer), peers)
                there = [peer for peer, answer in zip(peers, answers, strict=True) if isinstance(answer, RankState)]
                last = self._reports[name] = _Gathered(report(answers, differ_in), there)
                if (fault := last.report.fault) is not None:
                    told = {"tell": type(fault).__name__, "text": str(fault), "channel": name}
                    _each(lambda peer: _tell(peer, told), [peer for peer in there if peer != self.listener.peer])
                    log.fault = log.fault or fault  # last: with it this program may be at its end
            if printing and not last.said:
                last.said = True
                fault, table = last.report.fault, last.report.table
                # Said also where it can be raised: in a call of the MPI library it cannot.
                say(table if fault is None else f"{fault}\n{table}")
                _each(lambda peer: _tell(peer, {"tell": "dump", "channel": name}), last.there)
        return last.report

    def _state_of(self, name: str, peer: Peer) -> Answer:
        try:
            return documents.made(peer.ask({"ask": "state", "channel": name}).get("state"), RankState)
        except GoneError as error:
            return GONE if error.certain else CLOSED
        except (OSError, ValueError):
            return SILENT

    def answer(self, question: Fields) -> Fields:
        """Answer a question of another rank.

        Raises
        ------
        ValueError
            If it is none.
        """
        name = question.get("channel")
        known = self._logs.get(name) if isinstance(name, str) else None
        if known is None:
            raise ValueError("no such communicator")
        if question.get("ask") == "state":
            return {"state": self.state(known[0])}
        if question.get("ask") == "report":
            order = question.get("differ_in")
            order = order if type(order) is int else 0
            found = self._gather(known[0].name, printing=bool(question.get("printing")), differ_in=order)
            kind = "" if found.fault is None else type(found.fault).__name__
            return {"table": found.table, "tell": kind, "text": str(found.fault or "")}
        if question.get("tell") == "dump":
            self._dump("a rank has asked, which waits")
        known[0].fault = known[0].fault or _fault(question)
        return {}

    def state(self, log: OperationLog) -> RankState:
        """Return what this rank does on a communicator."""
        here: list[ReportedOperation] = []
        waits = other = ""
        inside = False
        for entry in self.recorder.entries:
            subject: Subject = entry[SUBJECT]
            asked, running = subject.waits, entry[END] == 0
            waiting = running and (asked is not None or subject.unleavable > 0 or entry[BLOCKING])
            inside = inside or waiting
            if subject.log is log:
                here.append(ReportedOperation(entry[ORDER], subject.what[:LONGEST], running, waiting))
                if running and (asked is not None or subject.unleavable):
                    what = "the MPI library" if asked is None else asked()
                    waits = f"{what}, entered {(clock() - entry[START]) / 1e9:.0f} s ago"[:LONGEST]
            elif waiting:
                beside = "" if subject.log.whole is log else ON_ANOTHER
                other = f"{subject.what[:LONGEST]}{beside}"
        status = self.recorder.status[:LONGEST]
        recent, at = tuple(here[-RECENT:]), tuple(stack(outside=inside))
        return RankState(status, log.count, recent, waits, other, at, log.in_order)


class _Gathered:
    """What has been gathered, which ranks have answered, whether it has been printed, and since when it is known."""

    __slots__ = ("report", "said", "there", "when")

    def __init__(self, report: Report, there: Sequence[Peer]) -> None:
        self.report, self.there, self.said, self.when = report, there, False, time.monotonic()


class _Seen:
    """A running operation, and since when it has made no progress."""

    __slots__ = ("awaited", "entry", "next", "since")

    def __init__(self, entry: Entry, awaited: object, since: float, warn: float) -> None:
        self.entry, self.awaited, self.since, self.next = entry, awaited, since, warn


def _quietly(act: Callable[..., object], *arguments: object) -> None:
    """Do something that must not end the program, whatever becomes of it."""
    with suppress(Exception):
        act(*arguments)


def _unless(over: Callable[[], bool], act: Callable[[], Result]) -> Result | None:
    """Return what comes of an act, or None as soon as something else has made it needless."""
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(act()), daemon=True)
    thread.start()
    while thread.is_alive() and not over():
        thread.join(0.01)
    return results[0] if results else None


def _each(act: Callable[[Peer], Result], peers: Sequence[Peer]) -> list[Result]:
    """Return what comes of an act with each peer, some of them at the same time."""
    results: dict[int, Result] = {}
    left = iter(enumerate(peers))
    taking = threading.Lock()

    def work() -> None:
        while True:
            with taking:
                number, peer = next(left, (-1, None))
            if peer is None:
                return
            results[number] = act(peer)

    # Not a pool: its threads would have to be waited for at the end of the program, in which we may be.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(AT_ONCE, len(peers)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(len(peers))]


def say(text: str) -> None:
    """Say something to whoever reads this rank's standard error, in one piece."""
    with suppress(Exception):  # nobody may read it any more
        sys.stderr.write(f"mpiagg: {text}\n")
        sys.stderr.flush()


def _operation(entry: Entry) -> str:
    subject: Subject = entry[SUBJECT]
    numbered = subject.log.whole is subject.log
    return f"operation {entry[ORDER]}, {subject.what}" if numbered else subject.what


def _fault(told: Fields) -> Error | None:
    kind, text = told.get("tell"), told.get("text")
    fault = _FAULTS.get(kind) if isinstance(kind, str) else None
    return fault(text) if fault is not None and isinstance(text, str) else None


def _tell(peer: Peer, told: Fields) -> None:
    with suppress(OSError, ValueError):  # who cannot be told will find out by itself
        peer.ask(told)
