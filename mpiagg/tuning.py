"""Which schedule for which size: what ``algorithm="auto"`` takes.

The rows were read off the alpha-beta-gamma model: few rounds for short vectors, few bytes for long ones, and
the circulant graphs between them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from mpiagg.schedules import Collective


class Choice(NamedTuple):
    """An algorithm and the number of its lanes."""

    algorithm: str
    lanes: int = 1


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
