"""Checkpoints as folders: how they are written so that a crash at any moment leaves the old one or the new, and read.

A folder holds a manifest, which names a generation; a generation is a folder with a file of each rank::

    mpiagg-checkpoint.json     format, version, byte order, generation; of each file its length and its text's digest; a
                               digest of these
    generation-7/0.bin         rank 0's arrays one after the other, then its text: the state, and where each array is
    generation-7/1.bin         rank 1's, without the arrays that are rank 0's, too

Each save writes a new generation, and then replaces the manifest, which is one step for all who look.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
from msgspec import Meta, Struct

from mpiagg.arrays import Array
from mpiagg.checkpoints.trees import Stored, Tree, bytes_of, decode, digest_of, text_of
from mpiagg.common import documents

MANIFEST: Final = "mpiagg-checkpoint.json"

MOST_MANIFEST_BYTES: Final = 2**28
MOST_TEXT_BYTES: Final = 2**28
MOST_BYTES: Final = 2**62
MOST_GENERATIONS: Final = 2**62

_HEAD: Final[dict[str, object]] = {"format": "mpiagg checkpoint", "version": 1, "byteorder": sys.byteorder}
_GENERATION: Final = re.compile(r"generation-([1-9]\d{0,17})")
_FILE: Final = re.compile(r"\d+\.bin")


class Record(NamedTuple):
    """What a manifest says of a rank's file: its length, and its text's, in bytes, and the text's SHA-256."""

    nbytes: Annotated[int, Meta(ge=0, le=MOST_BYTES)]
    text_bytes: Annotated[int, Meta(ge=0, le=MOST_TEXT_BYTES)]
    digest: str


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """What a manifest says: the generation that is in force, its files, and a digest of these."""

    generation: Annotated[int, Meta(ge=1, le=MOST_GENERATIONS)]
    files: Annotated[tuple[Record, ...], Meta(min_length=1)]
    digest: str

    def __post_init__(self) -> None:
        if any(file.text_bytes > file.nbytes for file in self.files):
            raise ValueError("a text must be no longer than its file")
        if self.digest != _digest(self.generation, self.files):
            raise ValueError("what it names is not what was written")


# -- writing


def begin(folder: Path) -> int:
    """Make a new generation in a folder, which is made if need be, and return its number."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in made:
        _sync(each.parent)
    there = _generations(folder)
    with suppress(OSError, ValueError):
        # What a crash has left takes room that may be needed now.
        remove_others(folder, manifest_of(read_manifest(folder)).generation)
    number = max(there, default=0) + 1
    generation_of(folder, number).mkdir()
    return number


def generation_of(folder: Path, number: int) -> Path:
    """Return where a generation is."""
    return folder / f"generation-{number}"


def write_file(generation: Path, rank: int, tree: str, arrays: Sequence[tuple[Array, Stored]]) -> Record:
    """Write a rank's file, with those arrays that are to be in it, and return what the manifest is to say of it."""
    text = text_of(tree, [stored for _, stored in arrays])
    if len(text) > MOST_TEXT_BYTES:
        raise ValueError(f"what is no array in the state takes {len(text)} bytes, more than {MOST_TEXT_BYTES}")
    path = _file_of(generation, rank)
    try:
        file = path.open("xb")
    except FileNotFoundError as error:
        raise FileNotFoundError(error.errno, f"{error.strerror}; all ranks must see one file system", path) from None
    with file:
        for array, stored in arrays:
            if stored.file == rank:
                file.write(bytes_of(array))
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return Record(path.stat().st_size, len(text), digest_of(text))


def publish(folder: Path, number: int, files: Sequence[Record]) -> None:
    """Let a generation, whose files are all there, be the one that is read."""
    generation = generation_of(folder, number)
    for rank, record in enumerate(files):
        path = _file_of(generation, rank)
        if not _is_long(path, record.nbytes):
            raise OSError(f"{path} of rank {rank} is not to be seen from rank 0; all ranks must see one file system")
    text = json.dumps({**_HEAD, "generation": number, "files": files, "digest": _digest(number, files)})
    new = folder / f"{MANIFEST}.new"
    with new.open("w") as file:
        file.write(f"{text}\n")
        file.flush()
        os.fsync(file.fileno())
    # The files' names, then the generation's: all must be there before the manifest says so.
    _sync(generation)
    _sync(folder)
    new.replace(folder / MANIFEST)
    _sync(folder)


def remove_others(folder: Path, number: int) -> None:
    """Remove all generations but one, as far as that can be done."""
    for other in _generations(folder) - {number}:
        remove(folder, other)


def remove(folder: Path, number: int) -> None:
    """Remove a generation, as far as that can be done."""
    generation = generation_of(folder, number)
    with suppress(OSError):
        for path in list(generation.iterdir()):
            if _FILE.fullmatch(path.name):
                path.unlink()
        generation.rmdir()


def _generations(folder: Path) -> set[int]:
    found = (_GENERATION.fullmatch(path.name) for path in folder.iterdir())
    return {int(match[1]) for match in found if match}


def _file_of(generation: Path, rank: int) -> Path:
    return generation / f"{rank}.bin"


def _is_long(path: Path, nbytes: int) -> bool:
    """Whether there is a file of this length."""
    return path.is_file() and path.stat().st_size == nbytes


def _digest(generation: int, files: Sequence[object]) -> str:
    """Return the SHA-256 of what a manifest names."""
    return digest_of(json.dumps([generation, files]).encode())


def _sync(folder: Path) -> None:
    """Bring to the disk which files are in a folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- reading


def read_manifest(folder: Path) -> bytes:
    """Return the bytes of a folder's manifest, if they can be one.

    Raises
    ------
    FileNotFoundError
        If there is none.
    ValueError
        If it is too long.
    """
    with documents.about(MANIFEST):
        return documents.read(folder / MANIFEST, MOST_MANIFEST_BYTES)


def manifest_of(data: bytes) -> Manifest:
    """Return what a manifest says, or raise ValueError."""
    with documents.about(f"{MANIFEST} is damaged, or of something else"):
        return documents.made(documents.body(documents.parsed(data), **_HEAD), Manifest)


class Reader:
    """Reads the files of a generation.

    Parameters
    ----------
    folder : Path
        The checkpoint.
    manifest : Manifest
        What its manifest says.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._generation, self._files = generation_of(folder, manifest.generation), manifest.files

    def tree(self, rank: int) -> tuple[Tree, list[Stored]]:
        """Return a rank's state without its arrays, and where they are.

        Raises
        ------
        ValueError
            If the file is missing or damaged, or its arrays are larger than the memory of this machine.
        """
        needed = {file: self._files[file] for file in {0, rank}}
        for file, record in needed.items():
            if not _is_long(self._path(file), record.nbytes):
                raise ValueError(f"{self._path(file)} is missing, or has not the {record.nbytes} bytes that it had")
        lengths = {file: record.nbytes - record.text_bytes for file, record in needed.items()}
        text = memoryview(bytearray(needed[rank].text_bytes))
        self._read(rank, lengths[rank], text)
        if digest_of(text) != needed[rank].digest:
            raise ValueError(f"{self._path(rank)} is damaged: its text is not what was written")
        with documents.about(str(self._path(rank))):
            tree, arrays = decode(text.tobytes(), lengths)
            # A file can say that it has any length: what was never written takes no room on the disk.
            nbytes = sum(stored.nbytes for stored in arrays)
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
            if nbytes > memory:
                raise ValueError(f"its arrays have {nbytes} bytes, and this machine has {memory} of memory")
            return tree, arrays

    def array(self, stored: Stored) -> Any:
        """Return an array, new and of this caller alone, or a number of NumPy's.

        Raises
        ------
        ValueError
            If it is not what was written.
        """
        array = np.empty(stored.shape, stored.dtype)
        self._read(stored.file, stored.offset, bytes_of(array))
        if digest_of(bytes_of(array)) != stored.digest:
            raise ValueError(f"{self._path(stored.file)} is damaged: an array is not what was written")
        return array[()] if stored.scalar else array

    def _read(self, rank: int, offset: int, target: memoryview) -> None:
        """Read bytes of a rank's file, as many as there is room for."""
        try:
            with self._path(rank).open("rb") as file:
                file.seek(offset)
                count = file.readinto(target)
        except FileNotFoundError:
            raise ValueError(f"{self._path(rank)} is missing; has the checkpoint been replaced since?") from None
        if count != target.nbytes:
            raise ValueError(f"{self._path(rank)} ends early")

    def _path(self, rank: int) -> Path:
        return _file_of(self._generation, rank)
