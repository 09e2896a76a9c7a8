"""The rows of a benchmark: what they hold, how bandwidths come about, and how they are printed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from mpiagg.schedules import Collective

ABSENT: Final = "-"
"""What stands in the column of a peer that did not take part at this length, or of a clock that is not there."""


def bus_factor(collective: Collective, size: int) -> float:
    """Return what the algorithm's bandwidth is multiplied by to give the bandwidth of a link that is always busy.

    It is the number of bytes, in vectors, that every rank must at least send, so that the result can be held against
    the hardware's bandwidth whatever the number of ranks.
    """
    if collective is Collective.ALLREDUCE:
        return 2 * (size - 1) / size
    if collective.chunks(2) in (2, 4):  # there is a chunk for each rank, of which its own does not travel
        return (size - 1) / size
    return 1.0


def link_seconds(collective: Collective, nodes: int, nbytes: int, rate: float, ranks: int = 0) -> float:
    """Return how long the busiest link between nodes is busy at least, each node having one of ``rate`` bit/s.

    What ranks of one node tell each other does not cross it, so a node counts as one rank; but each rank has a vector
    of its own for an all-to-all.
    """
    vectors = ranks / nodes if ranks and collective is Collective.ALLTOALL else 1
    return vectors * bus_factor(collective, nodes) * 8 * nbytes / rate


@dataclass(frozen=True)
class ResultRow:
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
        ``"native"``, an algorithm, ``"auto"``, ``"auto-"`` and a wire, a peer, or the limit: ``"copy"`` or ``"link"``.
    time_us : float
        Microseconds of a call: the median over blocks of the slowest rank's mean.
    algbw, busbw : float
        Size over time, and that times `bus_factor`; GB/s, with 10**9 bytes a GB.
    wrong : int
        Wrong elements, over all ranks.
    min_us, max_us, p50_us, p99_us, mean_us : float
        Over the blocks.
    iterations : int
        How many calls were timed; 0 for a limit that is computed.
    ratio : float
        The time, divided by that of the MPI library's own collective.
    over_peers : dict of str to float
        The time, divided by that of each peer.
    over_limit : float
        The time, divided by that of the limit.
    device_us : float or None
        The median by the device's own clock, where there is one.
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
    min_us: float
    max_us: float
    p50_us: float
    p99_us: float
    mean_us: float
    iterations: int
    ratio: float = 1.0
    over_peers: dict[str, float] = field(default_factory=dict)
    over_limit: float = 1.0
    device_us: float | None = None


class _Column(NamedTuple):
    title: str
    unit: str
    width: int
    text: Callable[[ResultRow], str]

    def cell(self, row: ResultRow) -> str:
        return f" {self.text(row)}".rjust(self.width)  # apart from the one before, however long


def _ratio(ratio: float | None) -> str:
    """Return a ratio with the digits that say something."""
    if ratio is None:
        return ABSENT
    digits = 4 if ratio < 0.1 else 2 if ratio < 1000 else 0
    return f"{ratio:.{digits}f}"


_FIRST: Final = (
    _Column("size", "(B)", 10, lambda row: str(row.size)),
    _Column("algorithm", "", 22, lambda row: row.algorithm),
    _Column("median", "(us)", 10, lambda row: f"{row.time_us:.2f}"),
    _Column("p99", "(us)", 10, lambda row: f"{row.p99_us:.2f}"),
    _Column("algbw", "(GB/s)", 8, lambda row: f"{row.algbw:.3f}"),
    _Column("busbw", "(GB/s)", 8, lambda row: f"{row.busbw:.3f}"),
    _Column("#wrong", "", 7, lambda row: str(row.wrong)),
    _Column("/native", "", 8, lambda row: _ratio(row.ratio)),
)
_LIMIT: Final = _Column("/limit", "", 8, lambda row: _ratio(row.over_limit))
_MORE: Final = (
    _Column("count", "(elements)", 12, lambda row: str(row.count)),
    _Column("type", "", 11, lambda row: row.type),
    _Column("redop", "", 6, lambda row: row.redop),
    _Column("root", "", 5, lambda row: str(row.root)),
    _Column("mean", "(us)", 11, lambda row: f"{row.mean_us:.2f}"),
    _Column("min", "(us)", 11, lambda row: f"{row.min_us:.2f}"),
    _Column("max", "(us)", 11, lambda row: f"{row.max_us:.2f}"),
    _Column("device", "(us)", 11, lambda row: ABSENT if row.device_us is None else f"{row.device_us:.2f}"),
    _Column("iterations", "", 11, lambda row: str(row.iterations)),
)


def header(peers: Sequence[str] = (), *, full: bool) -> str:
    """Return the two lines above the rows; they start with #, as comments do."""
    columns = _columns(peers, full=full)
    titles = "".join(column.title.rjust(column.width) for column in columns)
    units = "".join(column.unit.rjust(column.width) for column in columns)
    return f"#{titles[1:]}\n#{units[1:]}"


def line(row: ResultRow, peers: Sequence[str] = (), *, full: bool) -> str:
    """Return a row as a line of text."""
    return "".join(column.cell(row) for column in _columns(peers, full=full))


def _columns(peers: Sequence[str], *, full: bool) -> tuple[_Column, ...]:
    return (*_FIRST, *map(_over, peers), _LIMIT, *(_MORE if full else ()))


def _over(peer: str) -> _Column:
    return _Column(f"/{peer}", "", 8, lambda row: _ratio(row.over_peers.get(peer)))
