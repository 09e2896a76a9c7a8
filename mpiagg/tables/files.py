"""Tables as JSON files. What is read is checked in full before it is used: files come from anywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final, TypeVar

from mpiagg.common import documents
from mpiagg.common.arguments import check_integer, check_number
from mpiagg.schedules import MOST_LANES, Collective, Layout, algorithm
from mpiagg.tables.rows import NATIVE, SEGMENT, Choice, Memory, Origin, Row, Spread, Table

FORMAT: Final = "mpiagg tuning"
VERSION: Final = 1

MOST_FILE_BYTES: Final = 2**24
MOST_ROWS: Final = 10_000
MOST_RANKS: Final = 2**24
MOST_BYTES: Final = 2**62
MOST_TIMES: Final = 1_000
MOST_NAME: Final = 80

BLOCK: Final = 4096
"""Segments are multiples of so many bytes, so that no element is cut."""

_Kind = TypeVar("_Kind", bound=Enum)
_ROW_FIELDS: Final = (
    *("collective", "bytes", "ranks", "layout", "memory", "library"),
    *("algorithm", "lanes", "segment", "elsewhere", "times"),
)


def read_table(path: Path) -> Table:
    """Return the table in a file.

    Raises
    ------
    ValueError
        If there is none that can be used; the message names the file, and the row where it is a row that is wrong.
    """
    try:
        return table_of(str(path), documents.load(path, MOST_FILE_BYTES))
    except ValueError as error:
        raise ValueError(f"tuning table {str(path)!r}: {error}") from None


def table_of(name: str, content: object) -> Table:
    """Return the table that the content of a JSON file says.

    Raises
    ------
    ValueError
        If it says none.
    """
    top = documents.fields("the file", content, ("format", "version", "measured", "rows"))
    if top["format"] != FORMAT or top["version"] != VERSION or isinstance(top["version"], bool):
        raise ValueError(f"it must be of format {FORMAT!r}, version {VERSION}; run: mpiagg tune")
    rows = documents.items("rows", top["rows"], MOST_ROWS)
    return Table(
        name,
        tuple(documents.named(f"row {number}", _row, row) for number, row in enumerate(rows, 1)),
        None if top["measured"] is None else documents.named("measured", _origin, top["measured"]),
    )


def _origin(value: object) -> Origin:
    fields = documents.fields("it", value, ("nodes", "mpi", "machine"))
    nodes = [
        tuple(check_integer("a rank", rank, 0, MOST_RANKS) for rank in documents.items("a node", node, MOST_RANKS))
        for node in documents.items("nodes", fields["nodes"], MOST_RANKS)
    ]
    ranks = sorted(rank for node in nodes for rank in node)
    if (
        not ranks
        or ranks != list(range(len(ranks)))
        or nodes != sorted(nodes)
        or any(list(node) != sorted(node) or not node for node in nodes)
    ):
        raise ValueError("nodes must have every rank once, in ascending order, and the nodes by their first ranks")
    if not isinstance(fields["mpi"], str) or not isinstance(fields["machine"], dict):
        raise ValueError("mpi must be a text, and machine an object")  # noqa: TRY004 - a file's fault, not a caller's
    return Origin(Layout(tuple(nodes)), fields["mpi"], fields["machine"])


def _row(value: object) -> Row:
    given = documents.fields("it", value, ("collective", "algorithm"), _ROW_FIELDS)
    collective = _member("collective", given["collective"], Collective)
    name = _algorithm(given["algorithm"], collective)
    elsewhere = given.get("elsewhere")
    segment = _or_none("segment", given.get("segment"), BLOCK, SEGMENT)
    if segment is not None and segment % BLOCK:
        raise ValueError(f"segment must be a multiple of {BLOCK}, not {segment}")
    spread = None if given.get("layout") is None else _member("layout", given["layout"], Spread)
    memory = None if given.get("memory") is None else _member("memory", given["memory"], Memory)
    one_node = (spread, memory) == (Spread.ONE_NODE, Memory.TOGETHER)
    if elsewhere is not None and not (one_node and name != NATIVE and algorithm(name).owned is not None):
        raise ValueError("elsewhere is for algorithms that use shared memory, on one node with memory 'shared'")
    return Row(
        collective,
        Choice(
            name,
            check_integer("lanes", given.get("lanes", 1), 1, MOST_LANES),
            segment=segment,
            elsewhere=None if elsewhere is None else _algorithm(elsewhere, collective),
        ),
        _or_none("bytes", given.get("bytes"), 0, MOST_BYTES),
        _or_none("ranks", given.get("ranks"), 1, MOST_RANKS),
        spread,
        memory,
        _times(given.get("times", {})),
        None if given.get("library") is None else _library(given["library"]),
    )


def _algorithm(name: Any, collective: Collective) -> str:
    """Return the name of an algorithm that serves a collective, or of the MPI library's own."""
    if name == NATIVE:
        return NATIVE
    entry = algorithm(name)
    entry.generator(collective)
    return entry.name


def _library(name: object) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= MOST_NAME:
        raise ValueError(f"library must be the name of an MPI library, not {documents.short(name)}")
    return name


def _times(value: object) -> dict[int, dict[str, float]]:
    if not isinstance(value, dict) or len(value) > MOST_TIMES:
        raise ValueError(f"times must be an object with at most {MOST_TIMES} lengths")
    found = {}
    for length, times in value.items():
        if not length.isascii() or not length.isdecimal() or len(length) > 19:
            raise ValueError(f"times must be of lengths in bytes, not of {length[:40]!r}")
        if not isinstance(times, dict) or len(times) > MOST_TIMES:
            raise ValueError(f"times of {length} bytes must be an object with at most {MOST_TIMES} candidates")
        found[int(length)] = {
            name: check_number(f"time of {name[:80]!r}", seconds, "a positive number of seconds", lambda s: s > 0)
            for name, seconds in times.items()
        }
    return found


def _member(what: str, value: object, kind: type[_Kind]) -> _Kind:
    """Return the member of an enumeration that a word names."""
    return kind(documents.word(what, value, tuple(member.value for member in kind)))


def _or_none(what: str, value: object, least: int, most: int) -> int | None:
    return None if value is None else check_integer(what, value, least, most)


# -- writing


def write_table(path: Path, table: Table) -> None:
    """Write a table into a file, a row a line."""
    path.write_text(text_of(table))


def text_of(table: Table) -> str:
    """Return a table as JSON, a row a line; of what says nothing, nothing is written."""
    origin = table.origin
    measured = None
    if origin is not None:
        measured = {"nodes": origin.layout.nodes, "mpi": origin.mpi, "machine": dict(origin.machine)}
    rows = ",\n".join(f"  {json.dumps(_written(row))}" for row in table.rows)
    head = f'{{\n "format": {json.dumps(FORMAT)},\n "version": {VERSION},\n "measured": {json.dumps(measured)},\n'
    return f'{head} "rows": [\n{rows}\n ]\n}}\n'


def _written(row: Row) -> Mapping[str, object]:
    fields = {
        "collective": row.collective.value,
        "bytes": row.nbytes,
        "ranks": row.ranks,
        "layout": row.spread and row.spread.value,
        "memory": row.memory and row.memory.value,
        "library": row.library,
        "algorithm": row.choice.algorithm,
        "lanes": None if row.choice.lanes == 1 else row.choice.lanes,
        "segment": row.choice.segment,
        "elsewhere": row.choice.elsewhere,
        "times": {str(length): dict(times) for length, times in row.times.items()} or None,
    }
    return {name: value for name, value in fields.items() if value is not None}
