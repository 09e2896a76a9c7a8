"""Tables of the user's own, one for each cluster: what jobs have learned, or ``mpiagg tune --quick`` has measured."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from mpiagg.common import documents
from mpiagg.schedules import Layout
from mpiagg.tables.files import MOST_FILE_BYTES, table_of, text_of
from mpiagg.tables.rows import Table


def folder() -> Path:
    """Return where the tables are: in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "mpiagg" / "tuning"


def cached(layout: Layout, mpi: str, machines: Sequence[str]) -> Path:
    """Return the file of a cluster: of an MPI library with its version, ranks on nodes, processors and networks."""
    told = json.dumps([mpi, layout.nodes, sorted(machines)])
    digest = blake2b(told.encode(), digest_size=8).hexdigest()
    name = re.sub(r"[^a-z0-9.]+", "-", mpi.lower()).strip("-")[:24].strip("-")
    return folder() / f"{name}-{layout.size}-{digest}.json"


def read_cached(path: Path, layout: Layout) -> bytes:
    """Return what is in a file, if that is a table of a layout; nothing if there is no file.

    Of anything else it warns, and returns nothing.
    """
    if not path.exists():
        return b""
    try:
        with documents.about(f"tuning table {str(path)!r}"):
            data = documents.read(path, MOST_FILE_BYTES)
            _check(table_of(str(path), documents.parsed(data)), layout)
    except (OSError, ValueError) as error:
        warnings.warn(f"what was learned before cannot be used: {error}", RuntimeWarning, stacklevel=2)
        return b""
    return data


def _check(table: Table, layout: Layout) -> None:
    if table.origin is None or table.origin.layout != layout:
        raise ValueError(f"it is not of layout {layout}")


def write_cached(path: Path, table: Table) -> None:
    """Write a table, in one step, so that another job reads the one before or this one; warn if that fails."""
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text_of(table))
        part.replace(path)
    except OSError as error:
        warnings.warn(f"what was learned is not kept for the next job: {error}", RuntimeWarning, stacklevel=2)
