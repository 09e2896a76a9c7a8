"""The rows of a benchmark: what they hold, how bandwidths come about, and how they are printed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mpiagg.schedules import Collective


def bus_factor(collective: Collective, size: int) -> float:
    """Return what the algorithm's bandwidth is multiplied by to give the bandwidth of a link that is always busy.

    It is the number of bytes, in vectors, that every rank must at least send, so that the result can be held against
    the hardware's bandwidth whatever the number of ranks.
    """
    if collective is Collective.ALLREDUCE:
        return 2 * (size - 1) / size
    if collective in (Collective.REDUCE_SCATTER, Collective.ALLGATHER):
        return (size - 1) / size
    return 1.0


@dataclass(frozen=True)
class Row:
    """What was measured of one algorithm at one length.

    Attributes
    ----------
    size : int
        Bytes of the vector.
    count : int
        Its elements.
    type, redop : str
        dtype and operator.
    root : int
        -1 where there is none.
    algorithm : str
    time_us : float
        Microseconds of a call: the median over blocks of the slowest rank's mean.
    algbw, busbw : float
        Size over time, and that times `bus_factor`; GB/s, with 10**9 bytes a GB.
    wrong : int
        Wrong elements, over all ranks.
    ratio : float
        The time, divided by that of the MPI library's own collective.
    min_us, max_us, p50_us, p99_us : float
        Over the blocks.
    iterations : int
        How many calls were timed.
    """

    size: int
    count: int
    type: str
    redop: str
    root: int
    algorithm: str
    time_us: float
    algbw: float
    busbw: float
    wrong: int
    ratio: float
    min_us: float
    max_us: float
    p50_us: float
    p99_us: float
    iterations: int


class _Column:
    def __init__(self, attribute: str, title: str, unit: str, form: str) -> None:
        self.attribute, self.title, self.unit, self.form = attribute, title, unit, form
        self.width = int("".join(filter(str.isdigit, form.partition(".")[0])))

    def cell(self, row: Row) -> str:
        return format(getattr(row, self.attribute), self.form)


_COLUMNS: Final = (
    _Column("size", "size", "(B)", ">12d"),
    _Column("count", "count", "(elements)", ">12d"),
    _Column("type", "type", "", ">11s"),
    _Column("redop", "redop", "", ">6s"),
    _Column("root", "root", "", ">5d"),
    _Column("algorithm", "algorithm", "", ">20s"),
    _Column("time_us", "time", "(us)", ">11.2f"),
    _Column("algbw", "algbw", "(GB/s)", ">8.3f"),
    _Column("busbw", "busbw", "(GB/s)", ">8.3f"),
    _Column("wrong", "#wrong", "", ">7d"),
    _Column("ratio", "/native", "", ">8.2f"),
)
_MORE_COLUMNS: Final = (
    _Column("min_us", "min", "(us)", ">11.2f"),
    _Column("max_us", "max", "(us)", ">11.2f"),
    _Column("p50_us", "p50", "(us)", ">11.2f"),
    _Column("p99_us", "p99", "(us)", ">11.2f"),
    _Column("iterations", "iterations", "", ">11d"),
)


def header(*, full: bool) -> str:
    """Return the two lines above the rows; they start with #, as comments do."""
    columns = _columns(full=full)
    titles = "".join(column.title.rjust(column.width) for column in columns)
    units = "".join(column.unit.rjust(column.width) for column in columns)
    return f"#{titles[1:]}\n#{units[1:]}"


def line(row: Row, *, full: bool) -> str:
    """Return a row as a line of text."""
    return "".join(column.cell(row) for column in _columns(full=full))


def _columns(*, full: bool) -> tuple[_Column, ...]:
    return _COLUMNS + _MORE_COLUMNS if full else _COLUMNS
