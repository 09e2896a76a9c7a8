"""Recordings in the form of PyTorch's flight recorder, which ``torchfrtrace`` analyses.

One file a rank, ``rank_R``. They are pickles, since that is what ``torchfrtrace`` reads; here they are only written.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from mpiagg.schedules import Collective
from mpiagg.watch.recorder import LENGTH
from mpiagg.watch.recordings import RecordedOperation, Recording

VERSION: Final = "2.10"
"""The version of the format."""

PREFIX: Final = "rank_"
"""What comes before a rank's number in the name of its file."""

_BACKEND: Final = "nccl"
"""``torchfrtrace`` refuses backends that it does not know; this is the one that all versions of it know."""

_BARRIER: Final = "barrier"

_OTHER: Final = "coalesced"
"""What ``torchfrtrace`` compares by name alone."""

_NAMES: Final = {
    Collective.ALLREDUCE: "all_reduce",
    Collective.REDUCE: "reduce",
    Collective.BROADCAST: "broadcast",
    Collective.ALLGATHER: "all_gather",
    Collective.REDUCE_SCATTER: "reduce_scatter",
    Collective.GATHER: "gather",
    Collective.SCATTER: "scatter",
    Collective.ALLTOALL: "all_to_all",
}
_UNEVEN: Final = {"all_gather": "all_gather_v", "reduce_scatter": "reduce_scatter_v"}
_OF_ONE_LENGTH: Final = (Collective.ALLREDUCE, Collective.REDUCE, Collective.BROADCAST)

_Key = tuple[str, int]
"""The channel and the number of an operation."""


def write(recordings: Sequence[Recording], folder: Path) -> None:
    """Write recordings of one job to a new or empty folder, one file a rank.

    Raises
    ------
    ValueError
        If the folder holds files, which ``torchfrtrace`` would take for more ranks.
    OSError
        If they cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(f"folder {str(folder)!r} is not empty; torchfrtrace takes every file in it for a rank's")
    for rank, content in flight_records(recordings).items():
        (folder / f"{PREFIX}{rank}").write_bytes(pickle.dumps(content, protocol=2))


def flight_records(recordings: Sequence[Recording]) -> dict[int, dict[str, Any]]:
    """Return what is written for each rank.

    The operations of communicators that all ranks have a name for are in it. What one rank has entered and no longer
    keeps is left out on all ranks, since ``torchfrtrace`` would take it for one that the rank has missed.
    """
    members = _members(recordings)
    names = {channel: f"comm {number}" for number, channel in enumerate(members)}
    labels = {each.channel: each.label for recording in recordings for each in recording.communicators}
    forgotten = _forgotten(recordings, members)
    found: dict[int, dict[str, Any]] = {}
    for recording in recordings:
        kept = [each for each in recording.operations if each.channel and (each.channel, each.order) not in forgotten]
        group = {channel: (names[channel], labels.get(channel) or "undefined") for channel in members}
        found[recording.rank] = {
            "version": VERSION,
            "entries": [_entry(recording, each, number, group[each.channel or ""]) for number, each in enumerate(kept)],
            "pg_config": {
                name: {"name": name, "desc": label, "ranks": str(members[channel])}
                for channel, (name, label) in group.items()
                if recording.rank in members[channel]
            },
            "pg_status": {names[channel]: status for channel, status in _status(kept).items()},
        }
    return found


def _members(recordings: Iterable[Recording]) -> dict[str, list[int]]:
    """Return the ranks of each communicator: as one of them tells, or else those that have done something there."""
    seen: dict[str, list[int]] = defaultdict(list)
    told: dict[str, list[int]] = {}
    for recording in recordings:
        for channel in dict.fromkeys(each.channel for each in recording.operations if each.channel):
            seen[channel].append(recording.rank)
        told.update({each.channel: list(each.ranks) for each in recording.communicators if each.ranks})
    return {channel: told.get(channel, ranks) for channel, ranks in seen.items()}


def _forgotten(recordings: Iterable[Recording], members: Mapping[str, Sequence[int]]) -> set[_Key]:
    """Return the operations that a rank of their communicator has entered, and does not keep."""
    every = {(each.channel, each.order) for one in recordings for each in one.operations if each.channel}
    found: set[_Key] = set()
    for recording in recordings:
        own = {(each.channel, each.order) for each in recording.operations}
        far: dict[str, int] = {each.channel: each.entered for each in recording.communicators}
        for channel, order in own:
            far[channel or ""] = max(order, far.get(channel or "", 0))
        full = len(recording.operations) >= LENGTH  # what it says nothing of may have been there
        found |= {
            (channel, order)
            for channel, order in every - own
            if recording.rank in members[channel] and (order <= far.get(channel, 0) or (full and channel not in far))
        }
    return found


def _status(operations: Iterable[RecordedOperation]) -> dict[str, dict[str, str]]:
    """Return how far a rank has come on each communicator."""
    last: dict[str, dict[str, str]] = {}
    for each in operations:
        state = last.setdefault(each.channel or "", {"last_completed_collective": "-1"})
        state["last_enqueued_collective"] = state["last_started_collective"] = str(each.order)
        if each.state == "done":
            state["last_completed_collective"] = str(each.order)
    return last


def _entry(recording: Recording, operation: RecordedOperation, number: int, group: tuple[str, str]) -> dict[str, Any]:
    """Return an operation as the flight recorder has it; its frame says in words what it is."""
    data, (sent, received) = operation.data, _sizes(operation)
    dtypes = [data.dtype] if data else [""]
    zero = recording.wall_ns - recording.clock_ns
    done = operation.end is not None and operation.state == "done"
    entry = {
        "record_id": number,
        "pg_id": int(group[0].removeprefix("comm ")),
        "process_group": group,
        "collective_seq_id": operation.order,
        "p2p_seq_id": 0,
        "op_id": operation.order,
        "profiling_name": f"{_BACKEND}:{_name(operation)}",
        "time_created_ns": zero + operation.start,
        "input_sizes": [sent],
        "input_dtypes": dtypes,
        "output_sizes": [received],
        "output_dtypes": dtypes,
        # One that has failed is one that has started and not come to its end, as torch has it.
        "state": "completed" if done else "started",
        "time_discovered_started_ns": zero + operation.start,
        "time_discovered_completed_ns": zero + operation.end if done and operation.end is not None else None,
        "retired": done,
        "timeout_ms": 0,
        "is_p2p": False,
        "thread_id": "",
        "thread_name": operation.thread,
        "frames": [{"name": f"{operation.what} ({operation.state})", "filename": "operation", "line": operation.order}],
    }
    if done and operation.end is not None:
        entry["duration_ms"] = (operation.end - operation.start) / 1e6
    return entry


def _name(operation: RecordedOperation) -> str:
    """Return torch's name for an operation."""
    name = _NAMES.get(operation.collective, _OTHER) if operation.collective else _OTHER
    if operation.data is not None and not operation.data.even:
        return _UNEVEN.get(name, name)
    # A call of torch's may consist of other collectives than its own, as the sum of sparse tensors does.
    own = operation.caller == _BARRIER or operation.caller.removeprefix("_").startswith(name)
    return operation.caller if own else name


def _sizes(operation: RecordedOperation) -> tuple[list[int], list[int]]:
    """Return the sizes of input and output; nothing for what ranks need not agree on."""
    data = operation.data
    if data is None:
        return [], []
    sent, received = data.sent, data.received
    if operation.collective in _OF_ONE_LENGTH:  # torch gives both on all ranks
        sent = received = received if sent is None else sent
    elif not data.even and operation.collective is not Collective.ALLTOALL:
        sent = sent if operation.collective is Collective.REDUCE_SCATTER else None
        received = received if operation.collective is Collective.ALLGATHER else None
    return [] if sent is None else [sent], [] if received is None else [received]
