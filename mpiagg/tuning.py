"""Which schedule for which size: what ``algorithm="auto"`` takes.

The rows were read off the alpha-beta-gamma model: few rounds for short vectors, few bytes for long ones, and
the circulant graphs between them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from mpiagg.arguments import check_integer
from mpiagg.arrays import codec
from mpiagg.schedules import MOST_LANES, Collective, algorithm

ENCODING_ONCE: Final = "direct"
"""The algorithm for codecs that lose something each time that they encode."""

NATIVE: Final = "native"
"""The algorithm that is the MPI library's own collective."""


class Choice(NamedTuple):
    """An algorithm, the number of its lanes, and the codec by which values travel, if any."""

    algorithm: str
    lanes: int = 1
    wire: str | None = None


class Row(NamedTuple):
    """Take ``choice`` up to ``nbytes`` a vector; the last row of a collective is for everything above."""

    nbytes: float
    choice: Choice


ANY: Final = float("inf")

DEFAULT: Final[dict[Collective, tuple[Row, ...]]] = {
    Collective.ALLREDUCE: (
        Row(16 * 2**10, Choice("recursive_doubling")),
        Row(256 * 2**10, Choice("circulant")),
        Row(ANY, Choice("ring")),
    ),
    Collective.REDUCE: (Row(64 * 2**10, Choice("tree")), Row(ANY, Choice("ring"))),
    Collective.BROADCAST: (Row(64 * 2**10, Choice("tree")), Row(ANY, Choice("ring"))),
    Collective.ALLGATHER: (Row(256 * 2**10, Choice("circulant")), Row(ANY, Choice("ring"))),
    Collective.REDUCE_SCATTER: (Row(256 * 2**10, Choice("circulant")), Row(ANY, Choice("ring"))),
}


def choose(collective: Collective, nbytes: int) -> Choice:
    """Return what ``"auto"`` means for a vector of ``nbytes``."""
    return next(row.choice for row in DEFAULT[collective] if nbytes <= row.nbytes)


def pick(name: str, lanes: int | None, collective: Collective, nbytes: int, wire: str | None = None) -> Choice:
    """Return the algorithm, the lanes and the wire that a caller's words mean.

    Raises
    ------
    ValueError
        If a name is unknown, or the algorithm not for this collective or wire, or the lanes are none or too many.
    """
    once = wire is not None and not codec(wire).elementwise
    if name == NATIVE:
        if wire is not None:
            raise ValueError(f"algorithm 'native' sends values as they are, not with wire {wire!r}")
        return Choice(NATIVE)
    if once and name not in ("auto", ENCODING_ONCE):
        raise ValueError(f"wire {wire!r} is for algorithm {ENCODING_ONCE!r}, which encodes a value once on each way")
    if name == "auto":
        chosen = Choice(ENCODING_ONCE) if once else choose(collective, nbytes)
    else:
        algorithm(name).generator(collective)  # refuses what it does not serve
        chosen = Choice(name)
    if lanes is not None:
        chosen = chosen._replace(lanes=check_integer("lanes", lanes, 1, MOST_LANES))
    return chosen._replace(wire=wire)
