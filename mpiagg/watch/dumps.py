"""Writing a process's record down, in the form that :mod:`mpiagg.watch.recordings` reads."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from mpiagg.watch.recorder import END, ORDER, STAMPS, START, SUBJECT, Entry, OperationLog, Recorder, Subject, clock
from mpiagg.watch.recordings import FORMAT, VERSION

DIRECTORY: Final = "MPIAGG_RECORD_DIR"
"""The environment variable that names the folder for recordings."""


def write(recorder: Recorder, rank: int, size: int, reason: str, *, beside: bool = False) -> Path | None:
    """Write the record of this process to ``rank-R.json``; return where it is, or None if it cannot be written.

    Its owner alone can read it. What another process has written there stays beside it, under the time of its writing.

    Parameters
    ----------
    rank, size : int
        This process, of all of the job.
    reason : str
        Why it is written.
    beside : bool
        Whether what this process has written before stays, too, and is not replaced.
    """
    folder = Path(os.environ.get(DIRECTORY) or "mpiagg-recordings")
    path = folder / f"rank-{rank}.json"
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        aside = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:  # noqa: PTH123 - by number
                json.dump(recording(recorder, rank, size, reason), file)
            if beside or path not in _written:
                _keep(path)
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
        _written.add(path)
        return path.absolute()
    return None


_written: set[Path] = set()
"""What this process has written."""


def _keep(path: Path) -> None:
    """Keep what was written to a path, under the time of its writing."""
    with suppress(FileNotFoundError):
        path.replace(path.with_name(f"{path.stem}.{path.stat().st_mtime_ns}{path.suffix}"))


def recording(recorder: Recorder, rank: int, size: int, reason: str) -> dict[str, Any]:
    """Return the record of this process as JSON has it."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        "format": FORMAT,
        "version": VERSION,
        "rank": rank,
        "size": size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "boot": _boot(),
        "clock_ns": clock(),
        "wall_ns": time.time_ns(),
        "reason": reason[:4096],
        "dropped": recorder.dropped,
        "operations": [_operation(entry, names) for entry in recorder.entries],
        "communicators": [_communicator(log) for log in _logs(recorder)],
    }


def _logs(recorder: Recorder) -> list[OperationLog]:
    """Return the communicators that have a name: those that there are, and those of the operations that are kept."""
    kept: list[OperationLog] = [entry[SUBJECT].log for entry in recorder.entries]
    named = {log.name: log for log in (*recorder.logs.copy().values(), *kept)}
    return [log for name, log in named.items() if name]


def _communicator(log: OperationLog) -> dict[str, Any]:
    return {"channel": log.name, "label": log.label[:4096], "ranks": list(log.ranks), "entered": log.count}


def _caller(subject: Subject, order: int) -> str:
    """Return the name of the call of another interface that an operation is part of, if it is of one."""
    callers = subject.log.callers.copy()
    return next((name for first, name in reversed(callers) if first <= order), "")


def _operation(entry: Entry, names: dict[int | None, str]) -> dict[str, Any]:
    subject: Subject = entry[SUBJECT]
    end = entry[END]
    return {
        "channel": subject.log.name or None,
        "order": entry[ORDER],
        "what": subject.what[:4096],
        "collective": subject.collective,
        "nbytes": subject.nbytes,
        "start": entry[START],
        "end": abs(end) or None,
        "state": "done" if end > 0 else "failed" if end else "running",
        "thread": names.get(subject.thread, "MainThread"),
        "rounds": _rounds(subject, entry[STAMPS] or ()),
        "caller": _caller(subject, entry[ORDER]),
        "data": subject.data and subject.data()._asdict(),
    }


def _rounds(subject: Subject, stamps: list[int] | tuple[int, ...]) -> list[list[Any]]:
    """Return the rounds with their four moments; the last may have had fewer."""
    fours = [list(stamps[start : start + 4]) for start in range(0, len(stamps), 4)]
    return [[name, *four] for name, four in zip(subject.rounds, fours, strict=False)]


def _boot() -> str:
    """Return the boot id: processes that have the same one have the same clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
