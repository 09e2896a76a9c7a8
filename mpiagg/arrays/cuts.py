"""Where a buffer is cut into chunks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise


def even_cuts(length: int, parts: int) -> list[int]:
    """Return the ``parts + 1`` offsets that cut ``length`` elements evenly.

    The first ``length % parts`` parts hold one element more than the others.
    """
    base, more = divmod(length, parts)
    return [part * base + min(part, more) for part in range(parts + 1)]


def ranges(cuts: Sequence[int]) -> list[tuple[int, int]]:
    """Return (start, stop) of every part between two cuts."""
    return list(pairwise(cuts))


def even_ranges(start: int, stop: int, parts: int) -> list[tuple[int, int]]:
    """Cut the elements from ``start`` to ``stop`` into even parts; (start, stop) of each."""
    return ranges([start + offset for offset in even_cuts(stop - start, parts)])


def cuts_of(counts: Sequence[int]) -> list[int]:
    """Return the offsets that cut a buffer into parts of the given lengths."""
    return [0, *accumulate(counts)]
