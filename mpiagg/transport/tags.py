"""The tags of a communicator's messages: they keep apart what is under way at the same time."""

from __future__ import annotations

from collections import Counter
from typing import Final
from zlib import crc32

from mpiagg.schedules import MOST_LANES

LEAST: Final = 32767
"""The last tag that every MPI library has."""

SIGNATURE_BITS: Final = 20
"""Bits of a signature."""

LINES: Final = 4
"""How many requests of one signature may be under way at once; the others follow them."""

KINDS: Final = 1024
"""How many signatures tags in turn tell apart, where there are many tags."""


def signature(words: str) -> int:
    """Return a number of ``SIGNATURE_BITS`` bits that is another for other words, except for collisions."""
    return crc32(words.encode()) % 2**SIGNATURE_BITS


class Tags:
    """The tags of one communicator.

    The lower half is given in turn, to operations that may run at the same time; nonblocking calls of one signature
    share those of a few lines, in which each waits for the one before. The upper half is for blocking calls, which
    follow one another: those of the same operation share theirs. Either way a tag depends on the signature of
    its operation, so that ranks which are in different ones wait for each other's messages, instead of taking them for
    their own. How many signatures are told apart depends on how many tags there are: 255 and 1 with the least that MPI
    allows, all and 1023 with MPICH and Open MPI. Plans, on which ranks agree when they are made, are one more.

    Parameters
    ----------
    upper : int
        The last tag that the MPI library has.
    """

    def __init__(self, upper: int) -> None:
        self._half = upper // 2
        self._kinds = KINDS if self._half >= KINDS * LEAST else 1
        self.turns = self._half // self._kinds
        self._first = self.next = MOST_LANES * (1 + LINES)
        self._started: Counter[int] = Counter()

    def shared(self, signature: int) -> int:
        """Return the first of the tags of blocking calls with a signature; there is one for each lane."""
        return self._half + signature % (self._half // MOST_LANES) * MOST_LANES

    def of_next_line(self, signature: int) -> int:
        """Return the first of the tags of the next line of nonblocking calls with a signature; there is one a lane.

        All ranks get the same, if they start such calls in the same order.
        """
        kind = self._kind(signature)
        line = self._started[kind] % LINES
        self._started[kind] += 1
        return MOST_LANES * (1 + line) + kind * self.turns

    def in_turn(self, count: int = 1, signature: int | None = None) -> int:
        """Return the first of ``count`` tags, or of two; all ranks get the same, if they ask in the same order.

        They come round again after ``turns``, at least 16383, when their last users are long done. Those of plans,
        which have no signature here, are met again by other plans alone.
        """
        count = max(count, 2)  # vectors of devices take turns on two
        if self.next + count > self.turns:
            self.next = self._first
        first = self.next
        self.next += count
        return first + (0 if signature is None else self._kind(signature)) * self.turns

    def _kind(self, signature: int) -> int:
        return 0 if self._kinds == 1 else 1 + signature % (self._kinds - 1)
