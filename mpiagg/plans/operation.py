"""A collective operation in full: what is moved, how it is combined, by which schedule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from zlib import crc32

from mpi4py import MPI

from mpiagg.arrays import Form, Reduction, cuts_of, even_cuts, even_ranges, ranges
from mpiagg.plans.binding import Lane
from mpiagg.plans.choices import NATIVE, NCCL, SHARED, Case, Choice
from mpiagg.schedules import Action, Algorithm, Collective, Layout, Round, algorithm
from mpiagg.transport import signature
from mpiagg.watch import Data, OperationLog, Subject


@dataclass(frozen=True)
class Operation:
    """A collective operation on vectors, as one rank sees it.

    Attributes
    ----------
    collective : Collective
    rank : int
        This rank.
    layout : Layout
        All ranks, on their nodes.
    root : int
    counts : tuple of int
        For all-gather, reduce-scatter, gather and scatter the elements of each rank's chunk; for an all-to-all those
        that this rank sends to each; else the elements of the vector, alone.
    reduction : Reduction
        How values are combined, and in which dtype they travel.
    choice : Choice
        The algorithm and the number of lanes.
    op : MPI.Op
        The operator, for the MPI library's own collectives.
    form : Form or None
        What the caller's vectors are, if they must be the same on all ranks beyond their length.
    received : tuple of int
        For an all-to-all the elements that this rank receives from each.
    ragged : bool
        Whether a rank knows the lengths of those chunks alone that it has before or after.
    counted : bool
        Whether ranks call the MPI library's collective that takes a count for each chunk, also where all are equal.
    tried : Case or None
        What it is chosen by, if its communicator learns from calls like it.
    """

    collective: Collective
    rank: int
    layout: Layout
    root: int
    counts: tuple[int, ...]
    reduction: Reduction
    choice: Choice
    op: MPI.Op
    form: Form | None = None
    received: tuple[int, ...] = ()
    ragged: bool = False
    counted: bool = False
    tried: Case | None = None

    @cached_property
    def size(self) -> int:
        """How many ranks there are."""
        return self.layout.size

    @cached_property
    def length(self) -> int:
        """How many elements the buffer has: of an all-to-all the input, and after it the output."""
        return sum(self.counts) + sum(self.received)

    @property
    def label(self) -> str:
        """The operation in words."""
        wire = f" with wire {self.choice.wire}" if self.choice.wire else ""
        return f"{self.collective.value} by {self.choice.algorithm}{wire}"

    @property
    def cut(self) -> bool:
        """Whether its messages may be cut: all ranks send as much as they receive."""
        return not (self.collective.rooted or self.collective.prefix)

    @cached_property
    def description(self) -> str:
        """What all ranks must agree on."""
        length = "any lengths of" if self.ragged else sum(self.counts)
        values = self.form or f"{length} {self.reduction.dtype}"
        if len({*self.counts}) > 1 and not self.ragged:
            values = f"{values} in chunks of {_listed(self.counts)}"
        how = f", op {self.reduction.name}" if self.collective.reduces else ""
        where = f", root {self.root}" if self.collective.rooted else ""
        return f"{self.label}{self.choice.details} of {values}{how}{where}"

    @property
    def signature(self) -> int:
        """A number that is another for an operation on which ranks do not agree, except for collisions."""
        return signature(self.description)

    def subject(self, log: OperationLog) -> Subject:
        """Return the operation as it is recorded."""
        subject = Subject(log, self.description, self.collective.value, self.nbytes)
        subject.data = self.data
        return subject

    def data(self) -> Data:
        """Return what goes in and comes out on this rank, as it is recorded."""
        dtype = self.reduction.dtype if self.form is None else self.form.dtype
        sent, received = (
            None if part is None or self.ragged else part.stop - part.start for part in (self.source, self.target)
        )
        return Data(str(dtype), sent, received, not self.ragged and len({*self.counts, *self.received}) == 1)

    @cached_property
    def source(self) -> slice | None:
        """Where in the buffer this rank's input goes; None if it has none."""
        if self.collective in (Collective.ALLGATHER, Collective.GATHER):
            return self.own_chunk
        if self.collective in (Collective.BROADCAST, Collective.SCATTER) and self.rank != self.root:
            return None
        return slice(0, sum(self.counts))

    @cached_property
    def target(self) -> slice | None:
        """Where in the buffer this rank's output lies; None if it has none."""
        if self.collective in (Collective.REDUCE_SCATTER, Collective.SCATTER):
            return self.own_chunk
        if self.collective in (Collective.REDUCE, Collective.GATHER) and self.rank != self.root:
            return None
        if self.collective is Collective.EXSCAN and self.rank == 0:
            return None
        return slice(sum(self.counts) if self.received else 0, self.length)

    def lacks(self, x: object, out: object) -> bool:
        """Return whether an input or an output is None though this rank has one: a root's may stay where it is."""
        return (x is None and self.source is not None) or (out is None and self.target is not None)

    @cached_property
    def own_chunk(self) -> slice:
        """Where this rank's chunk lies, where every rank has one."""
        cuts = cuts_of(self.counts)
        return slice(cuts[self.rank], cuts[self.rank + 1])

    @cached_property
    def nbytes(self) -> int:
        """How many bytes the vector has that the operation is chosen by: of an all-to-all the input."""
        return sum(self.counts) * self.reduction.dtype.itemsize

    @cached_property
    def had(self) -> range:
        """The chunks that this rank has before."""
        return self.collective.before(self.rank, self.size, self.entry.chunks(self.collective, self.layout), self.root)

    @cached_property
    def promised(self) -> range:
        """The chunks that this rank must have after."""
        return self.collective.after(self.rank, self.size, self.entry.chunks(self.collective, self.layout), self.root)

    def counts_of(self, chunks: Iterable[int]) -> list[int]:
        """Return the elements of some chunks, where each rank has one for itself, or for each other."""
        if self.collective is not Collective.ALLTOALL:
            return [self.counts[chunk] for chunk in chunks]
        here = self.rank * self.size
        # What is forwarded is as long as what this rank sends: where it is not, chunks go straight to their ranks.
        return [
            self.received[chunk - here] if 0 <= chunk - here < self.size else self.counts[chunk // self.size]
            for chunk in chunks
        ]

    @property
    def entry(self) -> Algorithm:
        """The algorithm, which is not the MPI library's own."""
        return algorithm(self.choice.algorithm)

    @property
    def plainly_scheduled(self) -> bool:
        """Whether an algorithm of ours carries it out, on values that travel as they are."""
        return self.choice.wire is None and self.choice.algorithm not in (NATIVE, NCCL)

    @property
    def shares(self) -> bool:
        """Whether that may go through memory that ranks share: all ranks say the same, wherever their arrays lie."""
        one_level = self.collective is not Collective.ALLTOALL or self.choice.algorithm == SHARED
        return self.plainly_scheduled and self.entry.shares and not self.ragged and one_level

    def schedule(self) -> tuple[Round, ...]:
        """Return what this rank does."""
        return _schedule(self.entry, self.collective, self.rank, self.layout, self.root)

    @cached_property
    def sent_bytes(self) -> int:
        """How many bytes this rank hands to others; 0 where the MPI library's own collective does it."""
        if self.choice.algorithm == NATIVE:
            return 0
        steps = [step for a_round in self.schedule() for step in a_round if step.action is Action.SEND]
        if self.collective.moves:
            sent = [chunk for step in steps for chunk in range(step.chunk, step.chunk + step.count)]
            return self.reduction.dtype.itemsize * sum(self.counts_of(sent))
        return self.reduction.dtype.itemsize * sum(
            stop - start
            for lane in self.lanes()
            for step in steps
            for start, stop in lane[step.chunk : step.chunk + step.count]
        )

    def lanes(self, lanes: int | None = None) -> list[Lane]:
        """Return the ranges of the chunks of every lane; there are as many as the choice says, or ``lanes``.

        Where ranks own chunks, every chunk is cut into lanes; elsewhere the buffer is, and every lane into chunks. Of
        an all-to-all these are the chunks of the input, which lie in the output alike where all are of one length.
        """
        lanes = self.choice.lanes if lanes is None else lanes
        if self.received or self.collective.chunks(self.size) == self.size:
            parts = [even_ranges(start, stop, lanes) for start, stop in ranges(cuts_of(self.counts))]
            return [[part[lane] for part in parts] for lane in range(lanes)]
        chunks = self.entry.chunks(self.collective, self.layout)
        return [even_ranges(start, stop, chunks) for start, stop in even_ranges(0, self.length, lanes)]

    def lanes_within(self, room: int) -> int:
        """Return into how many lanes the vector is cut where one of a lane has room for so many elements."""
        length = sum(self.counts)
        if length > room:
            room -= self.size  # where each rank's chunk is cut, each part may have an element more than the others
        return max(1, -(-length // max(1, room)))


def _listed(counts: tuple[int, ...]) -> str:
    """Return counts in words: many are cut off, and told from others by their checksum."""
    text = ", ".join(map(str, counts))
    return text if len(text) <= 60 else f"{text[:57]}... (checksum {crc32(text.encode()):08x})"


def even_counts(length: int, size: int) -> tuple[int, ...]:
    """Return the lengths of ``size`` even parts of ``length`` elements."""
    return tuple(stop - start for start, stop in ranges(even_cuts(length, size)))


@lru_cache(maxsize=32)
def _schedule(entry: Algorithm, collective: Collective, rank: int, layout: Layout, root: int) -> tuple[Round, ...]:
    """Return a rank's schedule, which calls of all lengths have."""
    return tuple(entry.schedule(collective, rank, layout, root))
