"""Compiled kernels in the user's cache: NVRTC takes up to seconds for one, in every process that needs it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Final, TypeVar

from mpiagg.common import caches

MOST_FILES: Final = 1024
"""Kernels that are kept; of more, those go that have not been used for the longest time."""

MOST_BYTES: Final = 16 * 2**20
"""A longer file is none of ours: a kernel has some ten KiB."""

DIGEST_BYTES: Final = 32

Loaded = TypeVar("Loaded")


def loaded(key: Sequence[str], compiled: Callable[[], bytes], load: Callable[[bytes], Loaded]) -> Loaded:
    """Load a kernel from the user's cache, or compile it and keep it there.

    A file that is damaged, that others than this user may have written, or that does not load, is as good as none:
    the kernel is compiled anew. So it is where there is no folder to write to.

    Parameters
    ----------
    key : sequence of str
        All that the binary depends on: source, options, architecture, versions.
    compiled : callable
        Compiles it.
    load : callable
        Takes the binary, and raises if that is none.

    Returns
    -------
    object
        What ``load`` returns.
    """
    digest = _digest(*(part.encode() for part in key)).hex()
    try:
        path = caches.folder("kernels") / f"{digest}.cubin"
    except RuntimeError:  # this user has no home
        return load(compiled())
    if binary := _read(path, digest):
        with suppress(
            Exception
        ):  # whatever the driver has against it: it may be at fault in the new one, too, and says so
            return load(binary)
    binary = compiled()
    result = load(binary)
    with suppress(OSError):  # a folder that cannot be written costs time, not results
        caches.write(path, _digest(digest.encode(), binary) + binary)
        caches.keep_latest(path.parent, MOST_FILES)
    return result


def _read(path: Path, digest: str) -> bytes:
    """Return the binary of a file, or nothing if it is not as it was written, or not this user's alone to write."""
    try:
        with path.open("rb") as file:
            state = os.fstat(file.fileno())
            if state.st_uid != os.geteuid() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return b""
            data = file.read(MOST_BYTES + 1)
        os.utime(path)  # it is used: others go first
    except OSError:
        return b""
    binary = data[DIGEST_BYTES:]
    whole = len(data) <= MOST_BYTES and data[:DIGEST_BYTES] == _digest(digest.encode(), binary)
    return binary if whole else b""


def _digest(*parts: bytes) -> bytes:
    """Return a digest of parts, each with its length: no two sequences of parts have the same."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
