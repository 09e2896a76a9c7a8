"""Tables as JSON files. What is read is checked in full before it is used: files come from anywhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Final

from msgspec import Meta, Struct, field, to_builtins

from mpiagg.common import documents
from mpiagg.schedules import MOST_LANES, Collective, Layout, algorithm
from mpiagg.tables.rows import NATIVE, SEGMENT, Choice, Memory, Origin, Row, Spread, Table

FORMAT: Final = "mpiagg tuning"
VERSION: Final = 2

MOST_FILE_BYTES: Final = 2**24
MOST_ROWS: Final = 10_000
MOST_RANKS: Final = 2**24
MOST_BYTES: Final = 2**62
MOST_TIMES: Final = 1_000
MOST_NAME: Final = 80

BLOCK: Final = 4096
"""Segments are multiples of so many bytes, so that no element is cut."""

Length = Annotated[int, Meta(ge=0, le=MOST_BYTES)]
Seconds = Annotated[float, Meta(gt=0, le=sys.float_info.max)]


class _StoredRow(
    Struct,
    forbid_unknown_fields=True,
    omit_defaults=True,
    kw_only=True,
    rename={"nbytes": "bytes", "spread": "layout"},
):
    """A row, as it stands in a file."""

    collective: Collective
    nbytes: Length | None = None
    ranks: Annotated[int, Meta(ge=1, le=MOST_RANKS)] | None = None
    spread: Spread | None = None
    memory: Memory | None = None
    library: Annotated[str, Meta(min_length=1, max_length=MOST_NAME)] | None = None
    algorithm: str
    lanes: Annotated[int, Meta(ge=1, le=MOST_LANES)] = 1
    segment: Annotated[int, Meta(ge=BLOCK, le=SEGMENT, multiple_of=BLOCK)] | None = None
    unregistered: str | None = None
    times: Annotated[
        dict[Length, Annotated[dict[str, Seconds], Meta(max_length=MOST_TIMES)]], Meta(max_length=MOST_TIMES)
    ] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (self.algorithm, self.unregistered):
            if name not in (NATIVE, None):
                algorithm(name).generator(self.collective)
        one_node = (self.spread, self.memory) == (Spread.ONE_NODE, Memory.TOGETHER)
        shares = one_node and self.algorithm != NATIVE and algorithm(self.algorithm).shares
        if self.unregistered is not None and not shares:
            raise ValueError("unregistered is for algorithms that use shared memory, on one node with memory 'shared'")
        if self.unregistered == self.algorithm != "shared":
            raise ValueError(f"{self.algorithm!r} does not read unregistered vectors; 'shared' does")


class _Origin(Struct, forbid_unknown_fields=True):
    """Where a table was measured, as it stands in a file."""

    nodes: tuple[tuple[Annotated[int, Meta(ge=0, le=MOST_RANKS)], ...], ...]
    mpi: str
    machine: dict[str, Any]

    def __post_init__(self) -> None:
        node_of = {rank: number for number, node in enumerate(self.nodes) for rank in node}
        if not node_of or Layout.by_name([node_of.get(rank) for rank in range(len(node_of))]).nodes != self.nodes:
            raise ValueError("nodes must have every rank once, in ascending order, and the nodes by their first ranks")


class _Content(Struct, forbid_unknown_fields=True):
    """What stands in a file, below its format and version."""

    measured: _Origin | None
    rows: Annotated[list[_StoredRow], Meta(max_length=MOST_ROWS)]
    piece_cost: Annotated[int, Meta(ge=1, le=MOST_BYTES)] | None = None


def read_table(path: Path) -> Table:
    """Return the table in a file.

    Raises
    ------
    ValueError
        If there is none that can be used; the message names the file, and the row where it is a row that is wrong.
    """
    with documents.about(f"tuning table {str(path)!r}"):
        return table_of(str(path), documents.load(path, MOST_FILE_BYTES))


def table_of(name: str, content: object) -> Table:
    """Return the table that the content of a JSON file says.

    Raises
    ------
    ValueError
        If it says none.
    """
    try:
        found = documents.made(documents.body(content, format=FORMAT, version=VERSION), _Content)
    except ValueError as error:
        raise ValueError(f"{error}; docs/tuning.md says what a table may have, and mpiagg tune writes one") from None
    origin = found.measured
    return Table(
        name,
        tuple(map(_row, found.rows)),
        None if origin is None else Origin(Layout(origin.nodes), origin.mpi, origin.machine),
        found.piece_cost,
    )


def _row(given: _StoredRow) -> Row:
    choice = Choice(given.algorithm, given.lanes, segment=given.segment, unregistered=given.unregistered)
    return Row(
        *(given.collective, choice, given.nbytes, given.ranks, given.spread, given.memory, given.times, given.library)
    )


# -- writing


def text_of(table: Table) -> str:
    """Return a table as JSON, a row a line; of what says nothing, nothing is written."""
    origin = table.origin
    measured = None
    if origin is not None:
        measured = {"nodes": origin.layout.nodes, "mpi": origin.mpi, "machine": dict(origin.machine)}
    rows = ",\n".join(f"  {json.dumps(_written(row))}" for row in table.rows)
    head = f'{{\n "format": {json.dumps(FORMAT)},\n "version": {VERSION},\n "measured": {json.dumps(measured)},\n'
    if table.piece_cost is not None:
        head += f' "piece_cost": {table.piece_cost},\n'
    return f'{head} "rows": [\n{rows}\n ]\n}}\n'


def _written(row: Row) -> Any:
    given = vars(row) | row.choice._asdict()
    return to_builtins(_StoredRow(**{name: given[name] for name in _StoredRow.__struct_fields__}), str_keys=True)
