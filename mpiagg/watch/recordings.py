"""Recordings: what each rank did last, read from the files that ``dumps`` writes.

What is read is checked in full before it is used: files come from anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final, Literal

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import force_setattr

from mpiagg.common import documents
from mpiagg.schedules import Collective

FORMAT: Final = "mpiagg recording"
VERSION: Final = 1
FILES: Final = "rank-*.json"
"""What the files of a job are called, in the folder that they share."""

MOST_FILE_BYTES: Final = 2**28
MOST_RANKS: Final = 2**24
MOST_OPERATIONS: Final = 2**16
MOST_ROUNDS: Final = 2**16
MOST_TEXT: Final = 2**16
MOST: Final = 2**62

Text = Annotated[str, Meta(max_length=MOST_TEXT)]
NotNegative = Annotated[int, Meta(ge=0, le=MOST)]
ChannelName = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]


class _Told(Struct, frozen=True, forbid_unknown_fields=True):
    """What is told by a file, in texts that can be shown."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if type(value := getattr(self, name)) is str:
                force_setattr(self, name, documents.printable(value))


class RecordedRound(_Told, frozen=True, array_like=True):
    """A round of an operation.

    Attributes
    ----------
    name : str
        As in ``"round 3"``, or ``"packing"`` for one without messages.
    began, posted, came, reduced : int
        In ns: it began; its messages were posted; all had come; its reductions were done. The last ones are unset if it
        has not come so far.
    """

    name: Text
    began: NotNegative
    posted: NotNegative | UnsetType = UNSET
    came: NotNegative | UnsetType = UNSET
    reduced: NotNegative | UnsetType = UNSET

    @property
    def times(self) -> tuple[int, ...]:
        """The times that are set, in their order."""
        times = self.began, self.posted, self.came, self.reduced
        return tuple(time for time in times if time is not UNSET)


class RecordedData(_Told, frozen=True):
    """What goes into an operation on one rank, and what comes out.

    Attributes
    ----------
    dtype : str
    sent, received : int or None
        Elements of the input, and of the output; None where the rank has none, or they are not known.
    even : bool
        Whether that is the same on all ranks, but for the root.
    """

    dtype: Text
    sent: NotNegative | None
    received: NotNegative | None
    even: bool


class RecordedOperation(_Told, frozen=True):
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
    collective : Collective or None
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
    rounds : tuple of RecordedRound
        In their order; none, if they were not recorded.
    caller : str
        What another interface on top, torch.distributed, calls the call that it is part of; empty without one.
    data : RecordedData or None
        What goes in and comes out, where that is known.
    """

    channel: ChannelName | None
    order: Annotated[int, Meta(ge=1, le=MOST)]
    what: Text
    collective: Collective | None
    nbytes: NotNegative
    start: NotNegative
    end: NotNegative | None
    state: Literal["running", "done", "failed"]
    thread: Text
    rounds: Annotated[tuple[RecordedRound, ...], Meta(max_length=MOST_ROUNDS)]
    caller: Text = ""
    data: RecordedData | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.end is None) != (self.state == "running"):
            raise ValueError("end must be null if, and only if, the state is running")
        times = [self.start, *(time for each in self.rounds for time in each.times)]
        times += [] if self.end is None else [self.end]
        if times != sorted(times):
            raise ValueError("rounds must follow one another between start and end")
        if any(len(each.times) < 4 for each in (self.rounds if self.state == "done" else self.rounds[:-1])):
            raise ValueError("rounds must have four times, but for the last one of an operation that is not done")


class Communicator(_Told, frozen=True):
    """A communicator that a rank is in.

    Attributes
    ----------
    channel : str
        The same 16 hexadecimal digits on all its ranks.
    label : str
        What the program calls it.
    ranks : tuple of int
        Its ranks, in their order, by their numbers in the whole job; none where that is not known.
    entered : int
        How many operations the rank has entered on it.
    """

    channel: ChannelName
    label: Text
    ranks: Annotated[tuple[NotNegative, ...], Meta(max_length=MOST_RANKS)]
    entered: NotNegative


class Recording(_Told, frozen=True):
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
    operations : tuple of RecordedOperation
    communicators : tuple of Communicator
        Those that the rank is in, or has been in for one of the operations.
    """

    rank: NotNegative
    size: Annotated[int, Meta(ge=1, le=MOST_RANKS)]
    host: Text
    pid: NotNegative
    boot: Text
    clock_ns: NotNegative
    wall_ns: NotNegative
    reason: Text
    dropped: NotNegative
    operations: Annotated[tuple[RecordedOperation, ...], Meta(max_length=MOST_OPERATIONS)]
    communicators: Annotated[tuple[Communicator, ...], Meta(max_length=MOST_OPERATIONS)] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank >= self.size:
            raise ValueError(f"rank must be below the size, {self.size}, and is {self.rank}")

    def end_of(self, operation: RecordedOperation) -> int:
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
    with documents.about(f"recording {str(path)!r}"):
        return recording_of(documents.load(path, MOST_FILE_BYTES))


def read_all(sources: Iterable[Path]) -> list[Recording]:
    """Return the recordings of a job, by rank.

    Parameters
    ----------
    sources : iterable of Path
        Files, and folders with files named ``rank-R.json``: the latest of every rank.

    Raises
    ------
    ValueError
        If one cannot be used, there are none, or they are not of one job: a rank is there twice, or sizes differ.
    """
    found: dict[int, tuple[Recording, Path]] = {}
    for source in sources:
        paths = sorted(filter(_is_latest, source.glob(FILES))) if source.is_dir() else [source]
        if not paths:
            raise ValueError(f"folder {str(source)!r} holds no recordings; they are named rank-R.json")
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
            sizes = f"{str(where)!r} is of {first.size} ranks and {str(path)!r} of {other.size}"
            raise ValueError(f"{sizes}: name the files of one job, or give each a folder by MPIAGG_RECORD_DIR")
    return [found[rank][0] for rank in sorted(found)]


def _is_latest(path: Path) -> bool:
    """Whether a file is the latest of its rank; the name of an earlier one tells its time."""
    return path.stem.count(".") == 0


def recording_of(content: object) -> Recording:
    """Return the recording that the content of a JSON file says.

    Raises
    ------
    ValueError
        If it says none.
    """
    return documents.made(documents.body(content, format=FORMAT, version=VERSION), Recording)
