"""All-to-alls of blocks whose lengths only their ends know, of ranks that reach or read each other's memory on a node.

A rank is told the lengths of its own blocks alone. So before the first barrier it writes these into its mailbox, with
where its input lies. Behind the barrier all know all lengths: each takes its blocks from the inputs of the others, and
all find the same fault if a block is longer at one end than at the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from mpiagg.arrays import HOST, Array, Device, cuts_of, flat, ranges
from mpiagg.errors import MismatchError
from mpiagg.plans.choices import NATIVE, SHARED, TO_EACH_RANK
from mpiagg.plans.one_shot import box_of, boxes_of
from mpiagg.plans.operation import Operation
from mpiagg.plans.owners import taking
from mpiagg.plans.program import Callback, Program
from mpiagg.plans.sharing import InTurn, barrier_round
from mpiagg.schedules import Collective
from mpiagg.transport import LINE, NOWHERE, READ, Block, Channel, NodeBarrier, Position, SharedMemory, SignedBarrier

_WORD: Final = np.dtype(np.int64)

_PLACE: Final = 2
"""The words in which a rank says where its input lies; behind them, how long its blocks are."""

_SHORT: Final = 4 * 2**10
"""Bytes of a rank up to which a plan leaves blocks to the MPI library, if all ranks have as few: two barriers take
longer on ranks that share cores."""

_SHORT_IN_CALLS: Final = 512 * 2**10
"""The same of a call, in which the ranks also tell one another where everything lies."""

_SHORT_IF_READ: Final = 2 * 2**20
"""The same of a call, where the input of a rank is in no memory that ranks share, and must be read."""

_QUICK_READERS: Final = ("Open MPI",)
"""The MPI libraries whose blocking all-to-all of long blocks reads them, too, and as fast. MPICH's takes 1.6 times as
long."""

_BY_MPI: Final = 1 + 64
"""How many calls are the MPI library's from one on in which all ranks had short blocks, before the ranks tell one
another again how long they are."""


def serves_blocks(channel: Channel, operation: Operation, device: Device) -> bool:
    """Whether blocks of lengths that only their ends know go through memory that all ranks share: on the host alone."""
    o = operation
    asked = o.ragged and o.collective is Collective.ALLTOALL and o.choice.algorithm == SHARED
    return asked and device is HOST and channel.node.size == channel.size > 1


def memory_for_calls(channel: Channel) -> tuple[SignedBarrier, Block] | None:
    """Return the barrier and the memory of blocking calls, if what a rank says has room there."""
    for_calls = channel.memory.for_calls()
    return None if for_calls is None or _row_bytes(channel.size) > box_of(for_calls[1]) else for_calls


def planned_blocks(
    channel: Channel, operation: Operation, x: Array, out: Array, otherwise: Callable[[str], Program]
) -> Program:
    """Return the program of blocks in arrays that stay where they are; all ranks make theirs together.

    Parameters
    ----------
    otherwise : callable
        Returns the program by another algorithm, for short blocks, and for inputs that others can neither reach nor
        read. The MPI library's persistent all-to-all may be hundreds of times as slow as its blocking one, for long
        ones.

    Raises
    ------
    MismatchError
        On all ranks, if a block is longer at one end than at the other.
    """
    o, memory, node = operation, channel.memory.host, channel.node
    channel.memory.read()  # which all ranks find out together
    row = (*_position(memory, x, out, read=True), *o.counts, *o.received)
    told = Told(memory.tell(row, "tell how long their blocks are, and where they lie"))
    if told.fault is not None:
        raise told.fault
    if not told.serves(o, _SHORT):
        short = o.choice.unregistered == NATIVE and told.longest(o) <= _SHORT
        return otherwise(NATIVE if short else TO_EACH_RANK[o.collective])
    try:
        block = memory.take(LINE, busy=channel.busy)
    except MemoryError:
        return otherwise(TO_EACH_RANK[o.collective])
    barrier = NodeBarrier(block, node.place, node.ranks)
    take = told.taking(memory, o, o.received, x, out)
    rounds = (barrier_round(barrier, o.label, 0, take), barrier_round(barrier, o.label, 1))
    sent = o.nbytes - o.counts[o.rank] * o.reduction.dtype.itemsize
    return Program(rounds, (partial(memory.give_back, block),), block.nbytes, sent)


class Told:
    """What the ranks have told one another before an all-to-all of blocks.

    Parameters
    ----------
    rows : sequence of sequences of int
        For each rank where its input lies, the lengths of the blocks that it sends, and of those that it receives.

    Attributes
    ----------
    inputs : list of Position
        Where the input of each rank lies.
    sent : list of tuples of int
        How many elements a rank sends to each.
    fault : MismatchError or None
        What is wrong if a block is longer at one end than at the other; the same on all ranks.
    """

    # In lists of Python's: a call that comes to this has few ranks, and NumPy would take longer for each question.
    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        behind = _PLACE + len(rows)
        self.inputs = [Position(*row[:_PLACE]) for row in rows]
        self.sent = [tuple(row[_PLACE:behind]) for row in rows]
        taken = list(zip(*(row[behind:] for row in rows), strict=True))
        self.fault = None if self.sent == taken else _fault(self.sent, taken)

    def longest(self, operation: Operation) -> int:
        """Return the bytes of the longest input."""
        return max(map(sum, self.sent)) * operation.reduction.dtype.itemsize

    @property
    def read(self) -> bool:
        """Whether an input is to be read."""
        return any(window == READ for window, _ in self.inputs)

    def serves(self, operation: Operation, short: int) -> bool:
        """Return whether all inputs lie in reach, and one is not short where there is something else for those.

        All ranks return the same.
        """
        long = operation.choice.unregistered is None or self.longest(operation) > short
        return long and NOWHERE not in self.inputs

    def taking(
        self, memory: SharedMemory, operation: Operation, received: Sequence[int], x: Array, out: Array
    ) -> Callback:
        """Return the call that copies the blocks for this rank, so many elements from each, from the inputs of all."""
        rank, dtype = operation.rank, operation.reduction.dtype
        found: list[Any] = []
        own: Any = flat(x)
        for peer, (window, offset) in enumerate(self.inputs):
            start, count = sum(self.sent[peer][:rank]), self.sent[peer][rank]
            if peer == rank:
                found.append(own[start : start + count])
            else:
                lies = Position(window, offset + start * dtype.itemsize)
                found.append(memory.found(peer, lies, count * dtype.itemsize).view(dtype))
        target = np.empty(out.size, dtype) if (within := flat(out)) is None else within
        calls = [taking([target[slice(*run)] for run in ranges(cuts_of(received))], found, rank)]
        if within is None:
            calls.append(partial(np.copyto, out, target.reshape(out.shape)))
        return InTurn(calls, x)


class BlockExchange:
    """Blocking all-to-alls of blocks, between arrays that ranks of a node reach or read.

    Parameters
    ----------
    channel : Channel
    operation : Operation
        The first, of whose kind the others are.
    for_calls : pair of SignedBarrier and Block
        Where the ranks meet, and memory with two mailboxes a rank behind the barrier's line.

    Attributes
    ----------
    counts, received, x, out
        The lengths of the blocks next time, and the arrays.
    fault : MismatchError or None
        What was wrong with the last one on all ranks, of which none has copied anything then.
    served : bool
        Whether the last one was carried out: on all ranks, or on none.
    """

    def __init__(self, channel: Channel, operation: Operation, for_calls: tuple[SignedBarrier, Block]) -> None:
        self._operation = operation
        self.counts: Sequence[int] = ()
        self.received: Sequence[int] = ()
        self.x: Any = None
        self.out: Any = None
        self.fault: MismatchError | None = None
        self.served = False
        self._barrier, block = for_calls
        self._memory, self._node_memory = channel.memory.host, channel.memory
        self._short_by_mpi = operation.choice.unregistered == NATIVE
        slow = not self._short_by_mpi or channel.library not in _QUICK_READERS
        self._reads = slow and self._memory.processes is not None
        self._rows = boxes_of(block, _row_bytes(channel.size), _WORD)

    @property
    def by_mpi(self) -> bool:
        """Whether the next call is the MPI library's, with nothing told before: the same on all ranks."""
        return not self._reaches or (self._short_by_mpi and self._node_memory.exchanges_by_mpi > 0)

    @property
    def _reaches(self) -> bool:
        return self._reads or self._memory.leased

    def count(self) -> None:
        """Count a call of the MPI library's that is over: one that has failed on this rank is made again."""
        if self._reaches:
            self._node_memory.exchanges_by_mpi -= 1

    def program(self) -> Program:
        """Return the program, for the lengths and the arrays that there are when it runs."""
        barrier, o = self._barrier, self._operation
        told = barrier_round(barrier, o.label, 0, self._take)
        taken = barrier_round(barrier, o.label, 1, barrier.leave)
        begin = partial(barrier.enter, o.signature)
        return Program((told._replace(starts=(begin, self._tell, barrier.come)), taken), (), 0)

    def _tell(self) -> None:
        """Write where our input lies, and the lengths of our blocks."""
        row = self._rows[self._barrier.count & 1][self._operation.rank]  # on the only node a rank's place is its number
        row[:] = (*_position(self._memory, self.x, self.out, read=self._reads), *self.counts, *self.received)

    def _take(self) -> None:
        """Read what all have told, and copy the blocks for this rank from the inputs of all, if they are in reach."""
        told = Told([row.tolist() for row in self._rows[(self._barrier.count - 1) & 1]])
        self.fault = told.fault
        short = _SHORT_IF_READ if told.read else _SHORT_IN_CALLS
        self.served = told.fault is None and told.serves(self._operation, short)
        if self._short_by_mpi and told.fault is None:
            self._node_memory.exchanges_by_mpi = 0 if self.served else _BY_MPI
        if self.served:
            told.taking(self._memory, self._operation, self.received, self.x, self.out)()


def _row_bytes(size: int) -> int:
    """Return the bytes in which a rank says where its input lies, and how long its blocks are."""
    return _WORD.itemsize * (_PLACE + 2 * size)


def _position(memory: SharedMemory, x: Array, out: Array, *, read: bool) -> Position:
    """Return where an input lies for the others: one that the output overwrites is in nobody's reach."""
    source = flat(x)
    return NOWHERE if source is None or np.may_share_memory(x, out) else memory.position(source, read=read)


def _fault(sent: Sequence[Sequence[int]], taken: Sequence[Sequence[int]]) -> MismatchError:
    """Return what is wrong if ranks send others than are taken, of which there is a sequence for each that sends."""
    source, target = next(
        (source, target)
        for source, given in enumerate(sent)
        for target, count in enumerate(given)
        if count != taken[source][target]
    )
    return MismatchError(
        f"rank {source} sends {sent[source][target]} elements to rank {target}, "
        f"which takes {taken[source][target]} from it"
    )
