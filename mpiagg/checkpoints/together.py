"""Saving and loading checkpoints, all ranks together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from mpi4py import MPI

from mpiagg.arrays import Array
from mpiagg.checkpoints.folders import (
    Manifest,
    Reader,
    Record,
    begin,
    generation_of,
    manifest_of,
    publish,
    read_manifest,
    remove,
    remove_others,
    write_file,
)
from mpiagg.checkpoints.trees import Stored, bytes_of, digest_of, encode, fill, merge
from mpiagg.common import documents
from mpiagg.transport import Channel, channel_of


def save_checkpoint(path: str | os.PathLike[str], state: Mapping[str, Any], comm: MPI.Intracomm | None = None) -> None:
    """Save what all ranks have, so that it is there as a whole or not at all; collective.

    A crash at any moment leaves what was there before, or the new checkpoint. See ``docs/checkpoints.md``.

    Parameters
    ----------
    path : str or path
        A folder, which is made if need be, on a file system that all ranks see; the same on all ranks. One job at a
        time saves to it.
    state : dict
        What this rank has: dicts with keys of str, lists, NumPy arrays and numbers, int, float, bool, str and None.
        The outermost keys are the same on all ranks.
        An array in the same place of rank 0's state that has the same bytes is stored once.
    comm : MPI.Intracomm, optional
        The ranks; the world by default.

    Raises
    ------
    TypeError, ValueError
        For a state with something else in it, or a path that is none; nothing is written then.
    OSError
        On a rank that cannot write. The checkpoint that was there stays.
    MismatchError
        On the other ranks, if one of them raises; on all, if their paths or outermost keys differ.
    StallError
        If a rank does not come within the timeout.

    Examples
    --------
    >>> import shutil, tempfile
    >>> folder = comm.bcast(tempfile.mkdtemp() if rank == 0 else None)  # on a file system that all ranks see
    >>> mpiagg.save_checkpoint(folder, {"step": 3, "weights": [np.arange(3.0)]})
    >>> mpiagg.load_checkpoint(folder)
    {'step': 3, 'weights': [array([0., 1., 2.])]}
    >>> if rank == 0:
    ...     shutil.rmtree(folder)
    """
    channel = channel_of(comm)
    name, tree = "", ""
    arrays: list[tuple[Array, bool]] = []
    digests: list[str] = []

    def check() -> str:
        nonlocal name, tree, arrays, digests
        name = _name_of(path)
        if not isinstance(state, Mapping):
            raise TypeError(f"state must be a dict, not {type(state).__name__}")
        tree, arrays = encode(state)
        digests = [digest_of(bytes_of(array)) for array, _ in arrays]
        return f"save_checkpoint of {', '.join(sorted(state))} to {name!r}"

    channel.agree_on(check)
    folder, purpose = Path(name), f"save a checkpoint to {name!r}"

    def start() -> bytes:
        places = [(stored.offset, stored.digest) for _, stored in _placed(arrays, digests, 0)]
        return msgspec.json.encode([begin(folder), places])

    number, first = msgspec.json.decode(_from_first(channel, start, purpose))
    placed = _placed(arrays, digests, channel.rank, first if channel.rank else ())
    records = channel.gather(msgspec.json.encode(_written(channel, folder, number, tree, placed)), purpose)

    def finish() -> bytes:
        publish(folder, number, [msgspec.json.decode(each, type=Record) for each in records])
        remove_others(folder, number)
        return b""

    _from_first(channel, finish, purpose)


def load_checkpoint(path: str | os.PathLike[str], comm: MPI.Intracomm | None = None) -> dict[str, Any]:
    """Return what this rank has saved; collective.

    On another number of ranks than when it was saved, all ranks get what was the same on all, and
    :class:`mpiagg.checkpoints.PerRank` in the places of what was not.

    Parameters
    ----------
    path : str or path
        The folder; the same on all ranks.
    comm : MPI.Intracomm, optional
        The ranks; the world by default.

    Returns
    -------
    dict
        The state. Its arrays are new, and this rank's alone.

    Raises
    ------
    FileNotFoundError
        On all ranks, if there is no checkpoint.
    ValueError
        If what is there is not a checkpoint as it was written, on ranks that find it so; the message says what is
        wrong.
    OSError
        On a rank that cannot read.
    MismatchError
        On the other ranks, if one of them raises; on all, if their paths differ.
    StallError
        If a rank does not come within the timeout.

    Examples
    --------
    >>> import shutil, tempfile
    >>> folder = comm.bcast(tempfile.mkdtemp() if rank == 0 else None)
    >>> mpiagg.save_checkpoint(folder, {"step": 3, "rank": rank})
    >>> state = mpiagg.load_checkpoint(folder)
    >>> state["step"], state["rank"] == rank
    (3, True)
    >>> if rank == 0:
    ...     shutil.rmtree(folder)
    """
    channel = channel_of(comm)
    name, state = "", {}

    def check() -> str:
        nonlocal name
        name = _name_of(path)
        return f"load_checkpoint from {name!r}"

    def look() -> bytes:
        try:
            return b"+" + read_manifest(Path(name))
        except (FileNotFoundError, NotADirectoryError):
            return b""

    def read() -> str:
        nonlocal state
        with documents.about(f"checkpoint {name!r}"):
            state = _read(Path(name), manifest_of(found[1:]), channel.rank, channel.size)
        return "load a checkpoint"

    channel.agree_on(check)
    found = _from_first(channel, look, f"load a checkpoint from {name!r}")
    if not found:
        raise FileNotFoundError(f"there is no checkpoint in {name!r}")
    channel.agree_on(read)
    return state


def _name_of(path: str | os.PathLike[str]) -> str:
    """Return a path as text, or raise TypeError or ValueError."""
    name = os.fspath(path)
    if not isinstance(name, str):
        raise TypeError(f"path must be a str or a path, not {type(path).__name__}")
    if not name or "\0" in name:
        raise ValueError(f"path must name a folder, not {name!r}")
    return name


def _from_first(channel: Channel, call: Callable[[], bytes], purpose: str) -> bytes:
    """Return on all ranks what a call returns on rank 0, which makes it alone; if that raises, all do."""
    data = b""

    def make() -> str:
        nonlocal data
        data = b"" if channel.rank else call()
        return purpose

    channel.agree_on(make)
    return channel.gather(data, purpose)[0]


def _placed(
    arrays: Sequence[tuple[Array, bool]], digests: Sequence[str], rank: int, first: Sequence[tuple[int, str]] = ()
) -> list[tuple[Array, Stored]]:
    """Return arrays with where they are kept: in the file of ``rank``, or where rank 0 has the same in the same place.

    ``first`` says of each of rank 0's arrays where it begins, and its digest.
    """
    placed, end = [], 0
    for index, ((array, scalar), digest) in enumerate(zip(arrays, digests, strict=True)):
        start, known = first[index] if index < len(first) else (0, "")
        if digest == known:
            placed.append((array, Stored(array.dtype, array.shape, scalar, 0, start, digest)))
        else:
            placed.append((array, Stored(array.dtype, array.shape, scalar, rank, end, digest)))
            end += array.nbytes
    return placed


def _written(channel: Channel, folder: Path, number: int, tree: str, arrays: Sequence[tuple[Array, Stored]]) -> Record:
    """Write this rank's file, and return what the manifest is to say of it, once all ranks have written theirs."""
    record = Record(0, 0, "")

    def write() -> str:
        nonlocal record
        record = write_file(generation_of(folder, number), channel.rank, tree, arrays)
        return "save a checkpoint"

    try:
        channel.agree_on(write)
    except Exception:
        if not channel.rank:
            remove(folder, number)
        raise
    return record


def _read(folder: Path, manifest: Manifest, rank: int, size: int) -> Any:
    """Return a rank's state; of what another rank may want later, a part is read to see whether it is good."""
    reader, saved = Reader(folder, manifest), len(manifest.files)
    if saved == size:
        return fill(reader.tree(rank)[0], reader.array)
    trees = []
    for old in range(saved):
        tree, arrays = reader.tree(old)
        trees.append(tree)
        if old % size == rank:
            for stored in arrays:
                if stored.file == old:
                    reader.array(stored)
    return fill(merge(trees, reader.array), reader.array)
