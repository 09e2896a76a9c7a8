"""All-to-alls of blocks whose lengths only their ends know, through memory that the ranks of a node share.

A rank is told the lengths of its own blocks alone. So before the first barrier it writes these into its mailbox, with
where its input lies. Behind the barrier all know all lengths: each finds its blocks in the inputs of the others, and
all find the same fault if a block is longer at one end than at the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np

from mpiagg.arrays import HOST, Array, Device, cuts_of, flat
from mpiagg.errors import MismatchError
from mpiagg.plans.choices import SHARED
from mpiagg.plans.one_shot import box_of
from mpiagg.plans.operation import Operation
from mpiagg.plans.program import BoundRound, Callback, Deferred, Once, Program, in_turn
from mpiagg.plans.sharing import barrier_round
from mpiagg.schedules import Collective
from mpiagg.transport import LINE, NOWHERE, Block, Channel, NodeBarrier, Position, SharedMemory, SignedBarrier

_WORD: Final = np.dtype(np.int64)

_PLACE: Final = 2
"""The words in which a rank says where its input lies; behind them, how long its blocks are."""

_SHORT: Final = 4 * 2**10
"""Bytes of a rank up to which a plan leaves the blocks to what is taken in other memory, if all ranks have as few: two
barriers take longer on ranks that share cores."""


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
    channel: Channel, operation: Operation, x: Array, out: Array, otherwise: Callable[[], Program]
) -> Program:
    """Return the program of blocks in arrays that stay where they are; all ranks make theirs together.

    They have found before that each block is as long at both ends.

    Parameters
    ----------
    otherwise : callable
        Returns the program where not all inputs are in reach, or all are short.
    """
    o, memory, node = operation, channel.memory.host, channel.node
    row = (*_position(memory, x, out), *o.counts, *o.received)
    told = Told(np.array(memory.tell(row, "tell how long their blocks are, and where they lie")))
    longest = int(told.sent.sum(axis=1).max()) * o.reduction.dtype.itemsize
    short = longest <= _SHORT and o.choice.unregistered is not None
    if short or NOWHERE in told.inputs:
        return otherwise()
    try:
        block = memory.take(LINE, busy=channel.busy)
    except MemoryError:
        return otherwise()
    barrier = NodeBarrier(block, node.place, node.ranks)
    rounds = (barrier_round(barrier, o.label, 0), BoundRound(told.copies(memory, o, out), (), (), ()))
    sent = o.nbytes - o.counts[o.rank] * o.reduction.dtype.itemsize
    back = (partial(memory.give_back, block),)
    return Program((*rounds, barrier_round(barrier, o.label, 1)), back, block.nbytes, sent)


class Told:
    """What the ranks have told one another before an all-to-all of blocks.

    Parameters
    ----------
    rows : numpy.ndarray
        For each rank where its input lies, the lengths of the blocks that it sends, and of those that it receives.

    Attributes
    ----------
    inputs : list of Position
        Where the input of each rank lies.
    sent : numpy.ndarray
        How many elements a rank sends (a row for each) to another (a column for each).
    fault : MismatchError or None
        What is wrong if a block is longer at one end than at the other; the same on all ranks.
    """

    def __init__(self, rows: Array) -> None:
        self.inputs = [Position(*words) for words in rows[:, :_PLACE].tolist()]
        self.sent, received = np.split(rows[:, _PLACE:], 2, axis=1)
        self.fault: MismatchError | None = None
        if wrong := np.argwhere(self.sent != received.T).tolist():
            source, target = wrong[0]
            self.fault = MismatchError(
                f"rank {source} sends {self.sent[source, target]} elements to rank {target}, "
                f"which takes {received[target, source]} from it"
            )

    def copies(self, memory: SharedMemory, operation: Operation, out: Array) -> tuple[Callback, ...]:
        """Return the calls that copy the blocks for this rank from the inputs of all, which are in reach."""
        o, rank = operation, operation.rank
        dtype, cuts = o.reduction.dtype, cuts_of(o.received)
        target = out.reshape(-1) if (within := flat(out)) is None else within
        calls: list[Callback] = []
        # It begins with its own, and goes on with the rank after it, so that the ranks read from different ones.
        for peer in [*range(rank, o.size), *range(rank)]:
            start, count = int(self.sent[peer, :rank].sum()), int(self.sent[peer, rank])
            lies = self.inputs[peer]
            lies = lies._replace(offset=lies.offset + start * dtype.itemsize)
            block = memory.view(peer, lies, count * dtype.itemsize).view(dtype)
            calls.append(partial(np.copyto, target[cuts[peer] : cuts[peer + 1]], block))
        if within is None:
            calls.append(lambda: np.copyto(out, target.reshape(out.shape)))
        return tuple(calls)


class BlockExchange:
    """An all-to-all of blocks through memory that the ranks of a node share.

    Parameters
    ----------
    channel : Channel
    operation : Operation
        The first, of whose kind the others are.
    for_calls : pair of NodeBarrier and Block
        Where the ranks meet, and memory with two mailboxes a rank behind the barrier's line.
    otherwise : callable
        Returns the program of an operation between two arrays, where not all inputs are in reach.

    Attributes
    ----------
    operation, x, out
        The operation to carry out next, and its arrays.
    fault : MismatchError or None
        What was wrong with the last one on all ranks, of which none has copied anything then.
    """

    def __init__(
        self,
        channel: Channel,
        operation: Operation,
        for_calls: tuple[NodeBarrier, Block],
        otherwise: Callable[[Operation, Array, Array], Program],
    ) -> None:
        self.operation, self._otherwise = operation, otherwise
        self.x: Any = None
        self.out: Any = None
        self.fault: MismatchError | None = None
        self._barrier, block = for_calls
        self._memory = channel.memory.host
        nbytes, box = _row_bytes(channel.size), box_of(block)
        self._rows = [
            [part[start : start + nbytes].view(_WORD) for part in block.parts] for start in (LINE, LINE + box)
        ]

    def program(self) -> Program:
        """Return the program, for the operation and the arrays that there are when it runs."""
        barrier, label = self._barrier, self.operation.label
        told = barrier_round(barrier, label, 0)._replace(starts=(self._tell, barrier.come))
        reached = Program((BoundRound((self._take,), (), (), ()), barrier_round(barrier, label, 1)), (), 0)
        by_messages = Program((Once(self._by_messages).as_round(),), (), 0)
        nothing = Program((), (), 0)
        found = Deferred(lambda: nothing if self._is_wrong() else reached if self._is_reached() else by_messages)
        whole = Program((told, found.as_round()), (), 0)
        if not isinstance(barrier, SignedBarrier):
            return whole
        whole = in_turn(partial(barrier.enter, self.operation.signature), whole, barrier.leave)
        # Whether there are any arrays to be looked for is asked when it runs: on all ranks at the same call.
        begin = Deferred(lambda: whole if self._memory.leased else by_messages)
        return Program((begin.as_round(),), (), 0)

    def _by_messages(self) -> Program:
        return self._otherwise(self.operation, self.x, self.out)

    def _tell(self) -> None:
        """Write where our input lies, and the lengths of our blocks."""
        o = self.operation
        row = self._rows[self._barrier.count & 1][o.rank]  # on the only node a rank's place is its number
        row[:_PLACE] = _position(self._memory, self.x, self.out)
        row[_PLACE : _PLACE + o.size] = o.counts
        row[_PLACE + o.size :] = o.received

    def _is_wrong(self) -> bool:
        """Read what all have told, and return whether a block is longer at one end than at the other."""
        self._told = Told(np.stack(self._rows[(self._barrier.count - 1) & 1]))
        self.fault = self._told.fault
        return self.fault is not None

    def _is_reached(self) -> bool:
        """Return whether all inputs are in memory that all ranks map."""
        return NOWHERE not in self._told.inputs

    def _take(self) -> None:
        """Copy the blocks for this rank from the inputs of all."""
        for copy in self._told.copies(self._memory, self.operation, self.out):
            copy()


def _row_bytes(size: int) -> int:
    """Return the bytes in which a rank says where its input lies, and how long its blocks are."""
    return _WORD.itemsize * (_PLACE + 2 * size)


def _position(memory: SharedMemory, x: Array, out: Array) -> Position:
    """Return where an input lies for the others: one that the output overwrites is in nobody's reach."""
    source = flat(x)
    return NOWHERE if source is None or np.may_share_memory(x, out) else memory.position(source)
