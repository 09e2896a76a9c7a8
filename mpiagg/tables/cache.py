"""Tables of the user's own, one for each cluster: what jobs have learned, or ``mpiagg tune --quick`` has measured."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

from mpiagg.common import caches, documents
from mpiagg.schedules import Layout
from mpiagg.tables.files import MOST_FILE_BYTES, table_of, text_of
from mpiagg.tables.rows import Table


def folder() -> Path:
    """Return where the tables are: in the user's cache."""
    return caches.folder("tuning")


def cached(layout: Layout, mpi: str, machines: Sequence[str]) -> Path:
    """Return the file of a cluster: of an MPI library with its version, ranks on nodes, processors and networks."""
    told = json.dumps([mpi, layout.nodes, sorted(machines)])
    digest = blake2b(told.encode(), digest_size=8).hexdigest()
    name = re.sub(r"[^a-z0-9.]+", "-", mpi.lower()).strip("-")[:24].strip("-")
    return folder() / f"{name}-{layout.size}-{digest}.json"


def read_cached(path: Path, layout: Layout) -> tuple[bytes, str]:
    """Return what is in a file, if that is a table of a layout; nothing if there is no file, or, with why, if not."""
    try:
        with documents.about(f"tuning table {str(path)!r}"):
            if not path.exists():
                return b"", ""
            data = documents.read(path, MOST_FILE_BYTES)
            table = table_of(str(path), documents.parsed(data))
    except (OSError, ValueError) as error:
        return b"", str(error)
    fits = table.origin is not None and table.origin.layout == layout
    return (data, "") if fits else (b"", f"tuning table {str(path)!r} is not of layout {layout}")


def can_be_kept() -> bool:
    """Whether this user can write tables."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # of a user who has no home folder
        return False
    return os.access(folder(), os.W_OK)


def write_cached(path: Path, table: Table) -> bool:
    """Write a table, in one step, so that another job reads the one before or this one; if that fails, warn.

    What others have written meanwhile of other collectives stays: another communicator, or another job.

    Returns
    -------
    bool
        Whether it was written.
    """
    origin = table.origin
    if origin is not None and (data := read_cached(path, origin.layout)[0]):
        mine = {row.collective for row in table.rows}
        before = table_of(str(path), documents.parsed(data))
        rows = (*table.rows, *(row for row in before.rows if row.collective not in mine))
        cost = before.piece_cost if table.piece_cost is None else table.piece_cost
        table = replace(table, rows=rows, piece_cost=cost)
    try:
        caches.write(path, text_of(table).encode())
    except OSError as error:
        what = f"tuning table {str(path)!r} is not kept for other jobs; XDG_CACHE_HOME names another place: {error}"
        warnings.warn(what, RuntimeWarning, stacklevel=2)
        return False
    return True
