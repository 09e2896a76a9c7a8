"""Which schedule for which case: what a caller's words mean, and what ``algorithm="auto"`` takes.

That is the algorithm in ``MPIAGG_ALGORITHM``, the first row that fits of the table in ``MPIAGG_TUNING``, or of the
default: see ``tables``.
"""

from __future__ import annotations

from typing import Final

from mpiagg.arguments import check_integer
from mpiagg.arrays import codec
from mpiagg.schedules import MOST_LANES, algorithm
from mpiagg.tables import SEGMENT, Case, Choice, Memory, settings

__all__ = ["ENCODING_ONCE", "NATIVE", "SEGMENT", "Case", "Choice", "Memory", "choose", "pick"]

ENCODING_ONCE: Final = "direct"
"""The algorithm for codecs that lose something each time that they encode."""

NATIVE: Final = "native"
"""The algorithm that is the MPI library's own collective."""


def choose(case: Case) -> Choice:
    """Return what ``"auto"`` means in a case.

    Raises
    ------
    ValueError
        If the environment names a table that cannot be used, or an unknown algorithm.
    """
    return settings().found(case).choice


def pick(name: str, lanes: int | None, case: Case, wire: str | None = None) -> Choice:
    """Return the algorithm, the lanes and the wire that a caller's words mean.

    Raises
    ------
    ValueError
        If a name is unknown, or the algorithm not for this collective or wire, or the lanes are none or too many; or
        as for :func:`choose`.
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
    return chosen if wire is None else chosen._replace(wire=wire)
