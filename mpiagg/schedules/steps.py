"""The words that a schedule is written in: steps, rounds, and what a collective promises.

A schedule tells one rank what to do, as a sequence of rounds. The buffer is cut into chunks, numbered
from 0, and a step names the chunks it moves. What goes to one rank in a round is one message, whose steps stand in the
same order at both ends. (Plans send pieces of it that are long by themselves.) Within a round all messages are posted
together; the round is over when all of them have completed, and only then are its reductions applied, in the order in
which they stand. So what is sent in a round is always the state from before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from mpiagg.schedules.ranks import Formula, Ranks, formula_of, others

MOST_LANES: Final = 64
"""Into how many parts a buffer can be cut, so that a schedule runs on each and the runs are interleaved."""


class Action(Enum):
    """What a step does with its chunks."""

    SEND = "send"
    RECEIVE = "receive"
    REDUCE = "reduce"
    HOLD = "hold"
    KEEP = "keep"
    TAKE = "take"
    FINISH = "finish"

    @property
    def local(self) -> bool:
        """Whether it is no part of a message."""
        return self in (Action.TAKE, Action.FINISH)

    @property
    def receives(self) -> bool:
        """Whether something arrives."""
        return self in (Action.RECEIVE, Action.REDUCE, Action.HOLD, Action.KEEP)

    @property
    def reduces(self) -> bool:
        """Whether what arrives is combined with what is there."""
        return self in (Action.REDUCE, Action.HOLD, Action.KEEP)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank: an action on ``count`` chunks from ``chunk`` on, with ``peer``.

    ``received_first`` says on which side of the operator a reduction puts what was received. Every operator
    that is offered commutes, but its bits need not (which zero), so the side is part of
    the schedule.
    """

    action: Action
    peer: int
    chunk: int
    count: int = 1
    received_first: bool = True


def send(peer: int, chunk: int = 0, count: int = 1) -> Step:
    """Send ``count`` chunks, from ``chunk`` on, to ``peer``."""
    return Step(Action.SEND, peer, chunk, count)


def receive(peer: int, chunk: int = 0, count: int = 1) -> Step:
    """Receive ``count`` chunks, from ``chunk`` on, from ``peer``, in place of our own."""
    return Step(Action.RECEIVE, peer, chunk, count)


def reduce_from(peer: int, chunk: int = 0, count: int = 1, *, received_first: bool = True) -> Step:
    """Receive chunks from ``peer`` and reduce them into our own: ``own = received op own``.

    With ``received_first=False`` it is ``own = own op received``.
    """
    return Step(Action.REDUCE, peer, chunk, count, received_first)


def hold(peer: int, chunk: int = 0) -> Step:
    """Receive a chunk from ``peer`` and keep it aside: ``received = held op received`` in the round's next reduction.

    With it our own chunk can stand anywhere in a sum.
    """
    return Step(Action.HOLD, peer, chunk)


def keep_from(peer: int, chunk: int = 0) -> Step:
    """Receive a chunk from ``peer``, reduce it into our own, and keep it, too: ``kept = received op kept``.

    Our own goes on to others, while what was kept, which is without it, is there until it is taken.
    """
    return Step(Action.KEEP, peer, chunk)


def take(chunk: int = 0) -> Step:
    """Put what was kept of a chunk in place of our own, when the round is over: our own may be sent in it."""
    return Step(Action.TAKE, -1, chunk)


def finish(chunk: int = 0, count: int = 1) -> Step:
    """Every rank's contribution is in: apply what the operator does last (the division of an average)."""
    return Step(Action.FINISH, -1, chunk, count)


class Round(tuple[Step, ...]):
    """Steps that are posted together and complete together."""

    __slots__ = ()

    def __new__(cls, *steps: Step) -> Round:  # noqa: PYI034 - Self needs Python 3.11
        """Make a round of ``steps``."""
        return super().__new__(cls, steps)

    @property
    def messages(self) -> tuple[tuple[Step, ...], ...]:
        """The steps of each message: of all that goes to one rank, or comes from it."""
        found: dict[tuple[Formula | int, bool], list[Step]] = {}
        for step in self:
            if not step.action.local:
                found.setdefault((formula_of(step.peer), step.action is Action.SEND), []).append(step)
        return tuple(map(tuple, found.values()))


class Collective(str, Enum):
    """What a schedule promises, by its name in the field.

    ==================  =======================================  =========================================
    collective          before, on rank r                        after, on rank r
    ==================  =======================================  =========================================
    ``ALLREDUCE``       its own vector                           the reduction of all vectors
    ``REDUCE``          its own vector                           on the root: the reduction
    ``BROADCAST``       on the root: the vector                  the root's vector
    ``ALLGATHER``       chunk r                                  every chunk
    ``REDUCE_SCATTER``  its own vector                           chunk r of the reduction
    ``GATHER``          chunk r                                  on the root: every chunk
    ``SCATTER``         on the root: the vector                  chunk r of the root's vector
    ``ALLTOALL``        chunk t n + r, for every rank t          chunk r n + s, from every rank s
    ``SCAN``            its own vector                           the reduction of ranks 0 to r
    ``EXSCAN``          its own vector                           from rank 1 on: that of ranks 0 to r-1
    ==================  =======================================  =========================================

    A chunk keeps its number wherever it is: what goes from rank s to rank t in an all-to-all is chunk t n + s on every
    rank that forwards it.
    """

    ALLREDUCE = "allreduce"
    REDUCE = "reduce"
    BROADCAST = "broadcast"
    ALLGATHER = "allgather"
    REDUCE_SCATTER = "reduce_scatter"
    GATHER = "gather"
    SCATTER = "scatter"
    ALLTOALL = "alltoall"
    SCAN = "scan"
    EXSCAN = "exscan"

    @property
    def reduces(self) -> bool:
        """Whether values of several ranks are combined."""
        return self in _REDUCING

    @property
    def rooted(self) -> bool:
        """Whether one rank, the root, plays a part of its own."""
        return self in (Collective.REDUCE, Collective.BROADCAST, Collective.GATHER, Collective.SCATTER)

    @property
    def finishes(self) -> bool:
        """Whether the operator does something last, once every rank's contribution is in."""
        return self.reduces and not self.prefix

    @property
    def moves(self) -> bool:
        """Whether chunks go from an input to an output that are no vector together."""
        return self in (Collective.GATHER, Collective.SCATTER, Collective.ALLTOALL)

    @property
    def prefix(self) -> bool:
        """Whether a rank's result is of the ranks before it."""
        return self in (Collective.SCAN, Collective.EXSCAN)

    def chunks(self, size: int) -> int | None:
        """Return how many chunks there are among all ranks; None where each algorithm cuts the vector as it likes."""
        if self is Collective.ALLTOALL:
            return size * size
        if self.prefix:
            return 1
        return size if self in _A_CHUNK_A_RANK else None

    def before(self, rank: int, size: int, chunks: int, root: int = 0) -> range:
        """Return the chunks that a rank has before."""
        if self in (Collective.ALLGATHER, Collective.GATHER):
            return range(rank, rank + 1)
        if self is Collective.ALLTOALL:
            return range(rank, chunks, size)
        return range(0 if self in (Collective.BROADCAST, Collective.SCATTER) and rank != root else chunks)

    def after(self, rank: int, size: int, chunks: int, root: int = 0) -> range:
        """Return the chunks that a rank must have after."""
        if self in (Collective.REDUCE_SCATTER, Collective.SCATTER):
            return range(rank, rank + 1)
        if self is Collective.ALLTOALL:
            return range(rank * size, (rank + 1) * size)
        if self is Collective.EXSCAN:
            return range(chunks if rank > 0 else 0)
        return range(0 if self in (Collective.REDUCE, Collective.GATHER) and rank != root else chunks)

    def contributors(self, rank: int, chunk: int, size: int, root: int = 0) -> range:
        """Return the ranks whose contributions a chunk must have after, on a rank that must have it."""
        if self.prefix:
            return range(rank if self is Collective.EXSCAN else rank + 1)
        if self.reduces:
            return range(size)
        source = root if self in (Collective.BROADCAST, Collective.SCATTER) else chunk % size
        return range(source, source + 1)


_REDUCING: Final = frozenset(
    {Collective.ALLREDUCE, Collective.REDUCE, Collective.REDUCE_SCATTER, Collective.SCAN, Collective.EXSCAN}
)
_A_CHUNK_A_RANK: Final = frozenset(
    {Collective.ALLGATHER, Collective.REDUCE_SCATTER, Collective.GATHER, Collective.SCATTER}
)


Generator = Callable[[int, int], Iterator[Round]]
"""A schedule as it is written: ``f(rank, size)`` yields the rounds of one rank, for root 0.

Peers and chunks may be any integers; they are taken modulo the number of ranks and of chunks. For its price it is run
with a :class:`~mpiagg.schedules.ranks.Ranks` in place of the rank.
"""


def fold(rank: int, size: int, chunk: int = 0) -> Iterator[Step]:
    """Receive a chunk from every other rank, and reduce them with ours in rank order: ``(x_0 op x_1) op x_2 ...``."""
    if isinstance(rank, Ranks):  # in a run for many ranks, those before a rank and those after it are alike
        yield from (reduce_from(peer, chunk) for peer in others(rank, size))
        return
    for peer in range(rank - 1):
        yield hold(peer, chunk)
    if rank > 0:
        yield reduce_from(rank - 1, chunk)
    for peer in range(rank + 1, size):
        yield reduce_from(peer, chunk, received_first=False)


def from_root(rank: int, size: int) -> Round:
    """Hand every rank its chunk of the root's vector."""
    return Round(*(send(peer, chunk=peer) for peer in range(1, size))) if rank == 0 else Round(receive(0, chunk=rank))


def to_root(rank: int, size: int) -> Round:
    """Hand the root the chunk of every rank."""
    return Round(*(receive(peer, chunk=peer) for peer in range(1, size))) if rank == 0 else Round(send(0, chunk=rank))


def blocks(source: int, target: int, count: int, size: int) -> list[tuple[int, int]]:
    """Return the chunks of an all-to-all that go from ``count`` ranks, from ``source`` on, to one: (chunk, count).

    They lie together, but for those that run past the last rank to the first.
    """
    row, first = target % size * size, source % size
    # In a run for many ranks the chunks wrap around on some of them; there they are one piece, as in `settled`.
    until_end = count if isinstance(first, Ranks) else min(count, size - first)
    return [(row + first, until_end), *([(row, count - until_end)] if until_end < count else [])]


class Parts(NamedTuple):
    """The ``chunks`` chunks from ``start`` on, cut into ``number`` parts, as equal as may be."""

    start: int
    chunks: int
    number: int

    def cut(self, part: int) -> int:
        """Return with which chunk a part begins."""
        return self.start + part * self.chunks // self.number

    def chunks_of(self, part: int, number: int) -> int:
        """Return how many chunks so many parts have, from ``part`` on."""
        if self.chunks % self.number == 0:  # then it is the same number on all ranks
            return number * self.chunks // self.number
        return self.cut(part + number) - self.cut(part)


def within(rounds: Iterator[Round], members: Callable[[int], int], size: int, parts: Parts) -> Iterator[Round]:
    """Carry a schedule out among ``size`` members, place p being rank ``members(p)``; its chunks become parts."""
    for a_round in rounds:
        yield Round(
            *(
                Step(
                    step.action,
                    step.peer if step.action.local else members(step.peer),
                    parts.cut(step.chunk),
                    parts.chunks_of(step.chunk, step.count),
                    step.received_first,
                )
                for whole in a_round
                for step in settled(whole, size, parts.number)
            )
        )


def unfinished(rounds: Iterator[Round]) -> Iterator[Round]:
    """Leave out what comes last: there are contributions of other ranks than these."""
    for a_round in rounds:
        if a_round.messages:
            yield Round(*(step for step in a_round if step.action is not Action.FINISH))


def settled(step: Step, size: int, chunks: int, root: int = 0) -> list[Step]:
    """Take a step's peer and chunks modulo their numbers, in two pieces where its chunks wrap around.

    Schedules are written for root 0. The ranks are turned for another root, and the chunks with them, so that a
    rank's own chunk keeps its number.
    """
    peer = -1 if step.action.local else (step.peer + root) % size
    first = (step.chunk + root) % chunks
    # In a run for many ranks the chunks wrap around on some of them; there they are one piece.
    until_end = step.count if isinstance(first, Ranks) else min(step.count, chunks - first)
    pieces = [Step(step.action, peer, first, until_end, step.received_first)]
    if until_end < step.count:
        pieces.append(Step(step.action, peer, 0, step.count - until_end, step.received_first))
    return pieces
