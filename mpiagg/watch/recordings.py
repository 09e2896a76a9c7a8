"""Recordings: what each rank did last, read from the files that ``dumps`` writes.

What is read is checked in full before it is used: files come from anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mpiagg.common import documents
from mpiagg.common.arguments import check_integer
from mpiagg.schedules import Collective

FORMAT: Final = "mpiagg recording"
VERSION: Final = 1
FILES: Final = "rank-*.json"
"""What the files of a job are called, in the folder that they share."""

MOST_FILE_BYTES: Final = 2**26
MOST_RANKS: Final = 2**24
MOST_OPERATIONS: Final = 2**16
MOST_ROUNDS: Final = 2**16
MOST_TEXT: Final = 2**16
MOST: Final = 2**62

STATES: Final = ("running", "done", "failed")
COLLECTIVES: Final = tuple(each.value for each in Collective)


@dataclass(frozen=True)
class Round:
    """A round of an operation.

    Attributes
    ----------
    name : str
        As in ``"round 3"``, or ``"packing"`` for one without messages.
    times : tuple of int
        In ns: it began; its messages were posted; all had come; its reductions were done. Fewer if it has
        not come so far.
    """

    name: str
    times: tuple[int, ...]


@dataclass(frozen=True)
class Operation:
    """An operation of one rank.

    Attributes
    ----------
    channel : str or None
        Its communicator, by the same 16 hexadecimal digits on all ranks; None for what some of its ranks do alone, or
        what they do before they have agreed on these digits.
    order : int
        Its number on that communicator, from 1; on all ranks the same for the same collective.
    what : str
        In words.
    collective : str or None
        The collective that it is, if it is one.
    nbytes : int
        The bytes of its buffer.
    start : int
        In ns of the rank's clock.
    end : int or None
        None while it is running.
    state : {"running", "done", "failed"}
    thread : str
        The thread that waits for it.
    rounds : tuple of Round
        In their order; none, if they were not recorded.
    """

    channel: str | None
    order: int
    what: str
    collective: str | None
    nbytes: int
    start: int
    end: int | None
    state: str
    thread: str
    rounds: tuple[Round, ...]


@dataclass(frozen=True)
class Recording:
    """What one rank did last.

    Attributes
    ----------
    rank, size : int
        The rank, of the whole job.
    host : str
    pid : int
    boot : str
        Processes with the same one have the same clock.
    clock_ns, wall_ns : int
        The rank's clock, and the time of day, when it was written.
    reason : str
        Why it was written.
    dropped : int
        How many operations came before these on the same communicators.
    operations : tuple of Operation
    """

    rank: int
    size: int
    host: str
    pid: int
    boot: str
    clock_ns: int
    wall_ns: int
    reason: str
    dropped: int
    operations: tuple[Operation, ...]

    def end_of(self, operation: Operation) -> int:
        """Return when an operation of this rank ended; a running one does when this is written, or just after."""
        if operation.end is not None:
            return operation.end
        times = operation.rounds[-1].times if operation.rounds else ()
        return max(self.clock_ns, operation.start, *times)

    @property
    def span(self) -> tuple[int, int]:
        """When the first operation started, and when the last ended or this was written."""
        start = min((each.start for each in self.operations), default=self.clock_ns)
        return start, max((self.clock_ns, *map(self.end_of, self.operations)))


# -- reading


def read(path: Path) -> Recording:
    """Return the recording in a file.

    Raises
    ------
    ValueError
        If there is none that can be used; the message names the file and the field.
    """
    try:
        return recording_of(documents.load(path, MOST_FILE_BYTES))
    except ValueError as error:
        fault = str(error)
    raise ValueError(f"recording {str(path)!r}: {fault if len(fault) < 300 else f'{fault[:300]}...'}")


def read_all(sources: Iterable[Path]) -> list[Recording]:
    """Return the recordings of a job, by rank.

    Parameters
    ----------
    sources : iterable of Path
        Files, and folders with files named ``rank-*.json``.

    Raises
    ------
    ValueError
        If one cannot be used, there are none, or they are not of one job: a rank is there twice, or sizes differ.
    """
    found: dict[int, tuple[Recording, Path]] = {}
    for source in sources:
        paths = sorted(source.glob(FILES)) if source.is_dir() else [source]
        if not paths:
            raise ValueError(f"folder {str(source)!r} holds no recordings; they are named {FILES}")
        for path in paths:
            recording = read(path)
            other, where = found.setdefault(recording.rank, (recording, path))
            if where is not path:
                raise ValueError(f"rank {recording.rank} is there twice: {str(where)!r} and {str(path)!r}")
    if not found:
        raise ValueError("there are no recordings")
    first, where = next(iter(found.values()))
    for other, path in found.values():
        if other.size != first.size:
            raise ValueError(f"{str(where)!r} is of {first.size} ranks and {str(path)!r} of {other.size}: not one job")
    return [found[rank][0] for rank in sorted(found)]


def recording_of(content: object) -> Recording:
    """Return the recording that the content of a JSON file says.

    Raises
    ------
    ValueError
        If it says none.
    """
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"it is no recording: format must be {FORMAT!r}")
    if type(content.get("version")) is not int or content["version"] != VERSION:
        raise ValueError(f"version must be {VERSION}, not {content.get('version')!r}")
    given = documents.fields("it", content, ("format", "version", *Recording.__annotations__))
    size = check_integer("size", given["size"], 1, MOST_RANKS)
    operations = documents.items("operations", given["operations"], MOST_OPERATIONS)
    return Recording(
        check_integer("rank", given["rank"], 0, size - 1),
        size,
        _text("host", given["host"]),
        check_integer("pid", given["pid"], 0, MOST),
        _text("boot", given["boot"]),
        check_integer("clock_ns", given["clock_ns"], 0, MOST),
        check_integer("wall_ns", given["wall_ns"], 0, MOST),
        _text("reason", given["reason"]),
        check_integer("dropped", given["dropped"], 0, MOST),
        tuple(documents.named(f"operation {number}", _operation, each) for number, each in enumerate(operations, 1)),
    )


def _operation(value: object) -> Operation:
    given = documents.fields("it", value, tuple(Operation.__annotations__))
    channel, collective, state = given["channel"], given["collective"], given["state"]
    if channel is not None and not (isinstance(channel, str) and re.fullmatch("[0-9a-f]{16}", channel)):
        raise ValueError(f"channel must be null or 16 hexadecimal digits, not {documents.short(channel)}")
    if collective is not None:
        documents.word("collective", collective, COLLECTIVES)
    documents.word("state", state, STATES)
    if (given["end"] is None) != (state == "running"):
        raise ValueError("end must be null if, and only if, the state is running")
    start = check_integer("start", given["start"], 0, MOST)
    end = None if given["end"] is None else check_integer("end", given["end"], start, MOST)
    listed = documents.items("rounds", given["rounds"], MOST_ROUNDS)
    rounds = tuple(documents.named(f"round {number}", _round, each) for number, each in enumerate(listed, 1))
    times = [start, *(time for each in rounds for time in each.times), *([] if end is None else [end])]
    if times != sorted(times):
        raise ValueError("rounds must follow one another between start and end")
    if any(len(each.times) < 4 for each in (rounds if state == "done" else rounds[:-1])):
        raise ValueError("rounds must have four times, but for the last one of an operation that is not done")
    return Operation(
        channel,
        check_integer("order", given["order"], 1, MOST),
        _text("what", given["what"]),
        collective,
        check_integer("nbytes", given["nbytes"], 0, MOST),
        start,
        end,
        state,
        _text("thread", given["thread"]),
        rounds,
    )


def _round(value: object) -> Round:
    if not isinstance(value, list) or not 2 <= len(value) <= 5:
        raise ValueError("it must be a list of a name and up to four times")
    times = tuple(check_integer("a time", each, 0, MOST) for each in value[1:])
    return Round(_text("its name", value[0]), times)


def _text(name: str, text: object) -> str:
    """Return a text in which everything can be shown: a terminal might obey the rest."""
    if not isinstance(text, str) or len(text) > MOST_TEXT:
        raise ValueError(f"{name} must be a text of at most {MOST_TEXT:,} characters")
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
