"""Which schedule for which size: what ``algorithm="auto"`` takes.

The rows were read off the alpha-beta-gamma model: few rounds for short vectors, few bytes for long ones, and
the circulant graphs between them.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from mpiagg.arguments import check_integer
from mpiagg.arrays import codec
from mpiagg.schedules import MOST_LANES, Collective, Layout, algorithm

ENCODING_ONCE: Final = "direct"
"""The algorithm for codecs that lose something each time that they encode."""

NATIVE: Final = "native"
"""The algorithm that is the MPI library's own collective."""


SEGMENT: Final = 512 * 2**10
"""Bytes of a block that is still in the cache when it has been reduced and is written."""


class Memory(Enum):
    """Whether an operation can go through memory that ranks share, which they must set up together."""

    TOGETHER = "together"
    NONE = "none"


class Case(NamedTuple):
    """What a choice goes by.

    Attributes
    ----------
    collective : Collective
    nbytes : int
        Bytes of the vector.
    layout : Layout
        The ranks, on their nodes.
    memory : Memory
        Whether ranks of a node may share memory.
    """

    collective: Collective
    nbytes: int
    layout: Layout
    memory: Memory = Memory.TOGETHER


class Choice(NamedTuple):
    """How an operation is carried out.

    Attributes
    ----------
    algorithm : str
    lanes : int
        The parts of the buffer on which it runs, interleaved.
    wire : str or None
        The codec by which values travel.
    segment : int or None
        Bytes that go through shared memory at a time; None for ``SEGMENT``.
    """

    algorithm: str
    lanes: int = 1
    wire: str | None = None
    segment: int | None = None


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


def choose(case: Case) -> Choice:
    """Return what ``"auto"`` means in a case."""
    if case.memory is Memory.TOGETHER and len(case.layout.nodes) == 1 and case.layout.size > 1:
        return Choice("shared")
    if case.collective is Collective.ALLREDUCE and case.layout.widest > 1 and case.nbytes > 256 * 2**10:
        return Choice("hierarchical")
    return next(row.choice for row in DEFAULT[case.collective] if case.nbytes <= row.nbytes)


def pick(name: str, lanes: int | None, case: Case, wire: str | None = None) -> Choice:
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
        chosen = Choice(ENCODING_ONCE) if once else choose(case if wire is None else case._replace(memory=Memory.NONE))
    else:
        algorithm(name).generator(case.collective)  # refuses what it does not serve
        chosen = Choice(name)
    if lanes is not None:
        chosen = chosen._replace(lanes=check_integer("lanes", lanes, 1, MOST_LANES))
    return chosen._replace(wire=wire)
