"""The tags of a communicator's messages: they keep apart what is under way at the same time."""

from __future__ import annotations

from typing import Final

from mpiagg.schedules import MOST_LANES

TURNS: Final = 2**15
"""Tags that are given in turn, at most."""


class Tags:
    """The tags of one communicator.

    The lower half is given in turn, to operations that may run at the same time. The upper half is for blocking calls,
    which follow one another: those of the same operation share theirs. Either way a tag depends on the signature of its
    operation, so that ranks which are in different ones wait for each other's messages, instead of taking them for
    their own. How many signatures are told apart depends on how many tags there are: 255 and 1 with the least that MPI
    allows, millions and thousands with MPICH and Open MPI.

    Parameters
    ----------
    upper : int
        The last tag that the MPI library has, at least 32767.
    """

    def __init__(self, upper: int) -> None:
        self._half = upper // 2
        self.turns = min(TURNS, self._half)
        self._kinds = self._half // self.turns
        self.next = MOST_LANES

    def shared(self, signature: int) -> int:
        """Return the first of the tags of blocking calls with a signature; there is one for each lane."""
        return self._half + signature % (self._half // MOST_LANES) * MOST_LANES

    def in_turn(self, count: int = 1, signature: int = 0) -> int:
        """Return the first of ``count`` tags, or of two; all ranks get the same, if they ask in the same order.

        They come round again after ``turns``, when their last users are long done.
        """
        count = max(count, 2)  # vectors of devices take turns on two
        if self.next + count > self.turns:
            self.next = MOST_LANES
        first = self.next
        self.next += count
        return first + signature % self._kinds * self.turns
