"""Files in the user's cache, which several processes write and read at once."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def folder(name: str) -> Path:
    """Return where files of one kind are: ``$XDG_CACHE_HOME/mpiagg/name``, or that in ``~/.cache``."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "mpiagg" / name


def write(path: Path, data: bytes) -> None:
    """Write a file in one step, so that another process reads the one before or this one.

    Raises
    ------
    OSError
        If it cannot be written; the file before is as it was.
    """
    part = path.with_suffix(f".{os.urandom(8).hex()}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def keep_latest(place: Path, most: int) -> None:
    """Remove the oldest files of a folder until so many are left; what another process has removed is no error."""
    found = []
    for path in place.iterdir():
        with suppress(OSError):
            found.append((path.stat().st_mtime_ns, path))
    for _, path in sorted(found)[: max(0, len(found) - most)]:
        with suppress(OSError):
            path.unlink()
