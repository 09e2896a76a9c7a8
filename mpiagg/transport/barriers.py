"""Barriers: where the ranks of a node wait for one another, by counters in memory that they share.

A rank that comes to a barrier counts up its own counter, and passes when all counters have come as far. What it wrote
before is then there for all who pass.

Processors may carry out stores and loads in another order than the program says; x86 hardly does, ARM and POWER do.
Two fences keep the order. A rank writes its data, then comes MPI_Win_sync, then it counts: so whoever sees the count
will find the data in memory. A rank sees the counts, then comes MPI_Win_sync, then it reads: so it reads nothing that
it fetched before it had seen them. The MPI standard has MPI_Win_sync order the loads and stores of the calling process
in a window of shared memory, and MPICH and Open MPI make it a full memory barrier. A counter is one aligned word of 8
bytes, which is stored and loaded as a whole. Only its owner writes it, and it only grows; so ``>=`` is the right
question. Where all wait for all, a rank can be one count ahead at most.

Where ranks have not agreed before on what they do at a barrier, the low bits of the word are the signature of the
operation that the rank is in; the others count further than any job gets. Two ranks that have come equally far with
different signatures are in different operations, and neither may pass. Who is ahead has passed, and compared.

On x86-64 the fences are left out: there stores are seen by others in the order in which they were made, and loads are
made in order (Intel's manual, volume 3, on memory ordering in multi-processor systems; AMD's says the same).

Every counter has a cache line to itself, lest each count take the line from the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from platform import machine
from typing import Final

from mpiagg.arrays import Array
from mpiagg.errors import Error, PlanError
from mpiagg.transport.memory import LINE, Block, Position, Positions
from mpiagg.transport.tags import SIGNATURE_BITS

IN_ORDER: Final = machine() in {"x86_64", "AMD64"}
"""Whether processors of this kind keep stores in their order, and loads in theirs."""

_OFFSET_BITS: Final = 48
"""An announcement is the number of a window, from 1, and behind it these bits of an offset."""

_APART: Final = 1 << 62
"""The bit of an announcement's first word that says whether the arrays lie on another device than the slots."""

_ANNOUNCED: Final = (1, 3)
"""Where announcements lie in a rank's line, in words; its counter is the first."""

WRITTEN: Final = 64
"""How many signatures of a rank's last operations others can read; a power of two."""


class NodeBarrier:
    """A barrier for the ranks of a node.

    Parameters
    ----------
    block : Block
        Memory whose first cache line on each rank is the barrier's.
    place : int
        This rank's number on the node.
    ranks : sequence of int
        The ranks that meet at it.
    """

    def __init__(self, block: Block, place: int, ranks: Sequence[int]) -> None:
        heads = [_words(part[:LINE]) for part in block.parts]
        self.count = 0
        self.place = place
        self._ranks = ranks
        self._heads = heads
        self._own = heads[place]
        self._others = [head for number, head in enumerate(heads) if number != place]
        self._fence = None if IN_ORDER else block.sync

    @property
    def least(self) -> int:
        """The least word of a rank that has come as far as this one."""
        return self.count

    def among(self, ranks: Collection[int]) -> Some:
        """Return the barrier as this rank comes to it where it waits for some ranks alone."""
        heads = {rank: head for rank, head in zip(self._ranks, self._heads, strict=True) if rank in ranks}
        return Some(self, heads, self._fence)

    def come(self) -> None:
        """Say that this rank has come to the next barrier, with all that it wrote."""
        if self._fence is not None:
            self._fence()
        self.count = count = self.count + 1
        self._own[0] = count

    def passed(self) -> bool:
        """Whether all ranks have come; what they wrote can then be read."""
        count = self.count
        for other in self._others:
            if other[0] < count:
                return False
        if self._fence is not None:
            self._fence()
        return True

    def missing(self) -> list[int]:
        """Return the ranks that have not come."""
        return [rank for rank, head in zip(self._ranks, self._heads, strict=True) if head[0] < self.count]


class Some:
    """A barrier at which a rank waits for some of the others, though all come to it and count.

    Ranks that wait for some alone may be several counts apart, so signatures are not compared here: that is for the
    barrier at which an operation begins.
    """

    def __init__(
        self, barrier: NodeBarrier, heads: Mapping[int, memoryview], fence: Callable[[], object] | None
    ) -> None:
        self._barrier, self._heads, self._fence = barrier, heads, fence
        self.come = barrier.come

    def passed(self) -> bool:
        """Whether these ranks have come; what they wrote can then be read."""
        least = self._barrier.least
        for head in self._heads.values():
            if head[0] < least:
                return False
        if self._fence is not None:
            self._fence()
        return True

    def missing(self) -> list[int]:
        """Return those of these ranks that have not come."""
        return [rank for rank, head in self._heads.items() if head[0] < self._barrier.least]


class SignedBarrier(NodeBarrier):
    """A barrier that the operations of a communicator use in turn, without having agreed on them before.

    Parameters
    ----------
    block, place, ranks
        As for :class:`NodeBarrier`.
    disagreement : callable
        Returns the error to raise where ranks are in different operations.
    """

    def __init__(self, block: Block, place: int, ranks: Sequence[int], disagreement: Callable[[], Error]) -> None:
        super().__init__(block, place, ranks)
        self._disagreement = disagreement
        self._word = self._least = self._signature = 0
        self._inside = False

    @property
    def least(self) -> int:
        """The least word of a rank that has come as far as this one."""
        return self._least

    def enter(self, signature: int) -> None:
        """Begin an operation with a signature, of ``SIGNATURE_BITS`` bits.

        Raises
        ------
        PlanError
            If an error has left an earlier one in the middle: the ranks' counts may differ.
        """
        if self._inside:
            raise PlanError("an error has left an earlier call on this communicator in the middle of its run")
        self._inside = True
        self._signature = signature

    def enter_and_come(self, signature: int) -> None:
        """Begin an operation whose first step is to come to a barrier: :meth:`enter` and :meth:`come` in one call."""
        if self._inside:
            self.enter(signature)
        self._inside = True
        self._signature = signature
        if self._fence is not None:
            self._fence()
        self.count = count = self.count + 1
        self._least = least = count << SIGNATURE_BITS
        self._own[0] = self._word = least | signature

    def leave(self) -> None:
        """Say that the operation is over on this rank."""
        self._inside = False

    def come(self) -> None:
        """Say that this rank has come to the next barrier, with all that it wrote."""
        if self._fence is not None:
            self._fence()
        self.count = count = self.count + 1
        self._least = least = count << SIGNATURE_BITS
        self._own[0] = self._word = least | self._signature

    def passed(self) -> bool:
        """Whether all ranks have come; what they wrote can then be read.

        Raises
        ------
        MismatchError
            If a rank has come with another signature.
        """
        word = self._word
        for other in self._others:
            theirs = other[0]
            if theirs != word:
                if theirs < self._least:
                    return False
                if theirs >> SIGNATURE_BITS == self.count:
                    raise self._disagreement()
        if self._fence is not None:
            self._fence()
        return True

    def missing(self) -> list[int]:
        """Return the ranks that have not come, or have come with another signature."""
        return [
            rank
            for rank, head in zip(self._ranks, self._heads, strict=True)
            if head[0] >> SIGNATURE_BITS <= self.count and head[0] != self._word
        ]

    # There are two places for announcements, used in turn from barrier to barrier: while a slow rank still reads one, a
    # fast one may be in its next operation, but it cannot pass the next barrier.

    def announce(self, words: tuple[int, int]) -> None:
        """Say where our arrays lie, as :meth:`in_short` has it, before we come to the next barrier."""
        place = _ANNOUNCED[(self.count + 1) & 1]
        self._own[place], self._own[place + 1] = words

    @staticmethod
    def in_short(positions: Positions) -> tuple[int, int]:
        """Return positions as they are announced."""
        source, target = ((window + 1) << _OFFSET_BITS | offset for window, offset in positions[:2])
        return source | (_APART if positions.apart else 0), target

    def announced(self) -> tuple[int, ...]:
        """Return what all announced before the barrier that is now passed, as :meth:`positions` reads it."""
        place = _ANNOUNCED[self.count & 1]
        return tuple([head[which] for head in self._heads for which in (place, place + 1)])

    @staticmethod
    def positions(announced: Sequence[int]) -> tuple[Positions, ...]:
        """Return where the arrays of all lie by what they announced."""
        whole = [word & ~_APART for word in announced]
        found = [Position((word >> _OFFSET_BITS) - 1, word & (1 << _OFFSET_BITS) - 1) for word in whole]
        return tuple(map(Positions, found[::2], found[1::2], [bool(word & _APART) for word in announced[::2]]))


class Signatures:
    """The signatures of each rank's last calls of the MPI library's own, where nobody meets at a barrier.

    A rank writes its signature before it enters a call, and compares it afterwards with those of the ranks that stand
    1, 2, 4, ... places before and behind it: with all, up to five ranks. Of two ranks that are in different calls, the
    one that writes later finds the other's signature, unless the other is ``WRITTEN`` calls ahead by then. Nobody waits
    for that. Blocking calls follow one another in the same order on all ranks, so their number tells which is which.

    Parameters
    ----------
    block : Block, optional
        Memory with ``WRITTEN`` words for each rank, all of them 0; without it nothing is compared.
    place : int
        This rank's number on the node.

    Attributes
    ----------
    count : int
        How many such calls this rank has entered.
    own : memoryview
        This rank's words: ``own[count % WRITTEN]`` is the number of a call, and behind it its signature.
    beside : tuple of memoryview
        Those of the ranks that it compares with.
    """

    __slots__ = ("beside", "count", "own")

    def __init__(self, block: Block | None = None, place: int = 0) -> None:
        self.count = 0
        self.own: MutableMapping[int, int] | memoryview = {}
        self.beside: tuple[memoryview, ...] = ()
        if block is not None:
            size = len(block.parts)
            self.own = _words(block.parts[place])
            steps = [sign << bit for bit in range((size - 1).bit_length()) for sign in (1, -1)]
            self.beside = tuple(_words(block.parts[number]) for number in {(place + step) % size for step in steps})

    def skip(self) -> None:
        """Count a call that is not compared."""
        self.count += 1


def _words(line: Array) -> memoryview:
    """Return a cache line as integers of 8 bytes; reading one through NumPy would take three times as long."""
    return line.data.cast("B").cast("q")
