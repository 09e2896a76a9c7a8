"""All-to-alls of blocks whose lengths only their ends know, through memory that the ranks of a node share.

A rank is told the lengths of its own blocks alone. So before the first gate it writes these into its mailbox, with
where its input lies. Behind the gate all know all lengths: each finds its blocks in the inputs of the others, and all
find the same fault if a block is longer at one end than at the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from mpiagg.arrays import HOST, Array, Device, cuts_of, flat
from mpiagg.errors import MismatchError
from mpiagg.plans.on_node import SHARED
from mpiagg.plans.one_shot import box_of
from mpiagg.plans.operation import Operation
from mpiagg.plans.program import BoundRound, Deferred, Once, Program, in_turn
from mpiagg.plans.sharing import gate_round
from mpiagg.schedules import Collective
from mpiagg.transport import LINE, NOWHERE, Block, Channel, Gate, Position, SharedMemory, SignedGate

_WORD: Final = np.dtype(np.int64)

_PLACE: Final = 2
"""The words in which a rank says where its input lies; behind them, how long its blocks are."""


def serves_blocks(channel: Channel, operation: Operation, device: Device) -> bool:
    """Whether blocks of lengths that only their ends know go through memory that all ranks share: on the host alone."""
    o = operation
    asked = o.ragged and o.collective is Collective.ALLTOALL and o.choice.algorithm == SHARED
    return asked and device is HOST and channel.node.size == channel.size > 1


def ground_for(channel: Channel) -> tuple[SignedGate, Block] | None:
    """Return the gate and the memory of blocking calls, if what a rank says has room there."""
    ground = channel.memory.for_calls()
    return None if ground is None or _row_bytes(channel.size) > box_of(ground[1]) else ground


def planned_blocks(
    channel: Channel, operation: Operation, x: Array, out: Array, otherwise: Callable[[], Program]
) -> Program:
    """Return the program of blocks in arrays that stay where they are; all ranks make theirs together.

    Parameters
    ----------
    otherwise : callable
        Returns the program where not all inputs are in reach.
    """
    o, memory, node = operation, channel.memory.host, channel.node
    if NOWHERE in memory.tell(_position(memory, x, out)):
        return otherwise()
    try:
        block = memory.take(LINE + 2 * _row_bytes(o.size), busy=channel.busy)
    except MemoryError:
        return otherwise()
    exchange = BlockExchange(channel, o, (Gate(block, node.place, node.ranks), block), lambda *_: otherwise())
    exchange.x, exchange.out = x, out
    sent = o.nbytes - o.counts[o.rank] * o.reduction.dtype.itemsize
    back = (partial(memory.give_back, block),)
    return replace(exchange.program(), releases=back, nbytes=block.nbytes, sent_bytes=sent)


class BlockExchange:
    """An all-to-all of blocks through memory that the ranks of a node share.

    Parameters
    ----------
    channel : Channel
    operation : Operation
        The first, of whose kind the others are.
    ground : pair of Gate and Block
        Where the ranks meet, and memory with two mailboxes a rank behind the gate's line.
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
        ground: tuple[Gate, Block],
        otherwise: Callable[[Operation, Array, Array], Program],
    ) -> None:
        self.operation, self._otherwise = operation, otherwise
        self.x: Any = None
        self.out: Any = None
        self.fault: MismatchError | None = None
        self._gate, block = ground
        self._memory = channel.memory.host
        nbytes, box = _row_bytes(channel.size), box_of(block)
        self._rows = [
            [part[start : start + nbytes].view(_WORD) for part in block.parts] for start in (LINE, LINE + box)
        ]

    def program(self) -> Program:
        """Return the program, for the operation and the arrays that there are when it runs."""
        gate, label = self._gate, self.operation.label
        told = gate_round(gate, label, 0)._replace(starts=(self._tell, gate.come))
        reached = Program((BoundRound((self._take,), (), (), ()), gate_round(gate, label, 1)), (), 0)
        elsewhere = Program((Once(self._elsewhere).as_round(),), (), 0)
        nothing = Program((), (), 0)
        found = Deferred(lambda: nothing if self._is_wrong() else reached if self._is_reached() else elsewhere)
        whole = Program((told, found.as_round()), (), 0)
        if not isinstance(gate, SignedGate):
            return whole
        whole = in_turn(partial(gate.enter, self.operation.signature), whole, gate.leave)
        # Whether there are any arrays to be looked for is asked when it runs: on all ranks at the same call.
        begin = Deferred(lambda: whole if self._memory.leased else elsewhere)
        return Program((begin.as_round(),), (), 0)

    def _elsewhere(self) -> Program:
        return self._otherwise(self.operation, self.x, self.out)

    def _tell(self) -> None:
        """Write where our input lies, and the lengths of our blocks."""
        o = self.operation
        row = self._rows[self._gate.count & 1][o.rank]  # on the only node a rank's place is its number
        row[:_PLACE] = _position(self._memory, self.x, self.out)
        row[_PLACE : _PLACE + o.size] = o.counts
        row[_PLACE + o.size :] = o.received

    def _is_wrong(self) -> bool:
        """Read what all have told, and return whether a block is longer at one end than at the other."""
        size = self.operation.size
        told = np.stack(self._rows[(self._gate.count - 1) & 1])
        self._sent, taken = told[:, _PLACE : _PLACE + size], told[:, _PLACE + size :].T
        self._inputs = [Position(*words) for words in told[:, :_PLACE].tolist()]
        self.fault = None
        if wrong := np.argwhere(self._sent != taken).tolist():
            source, target = wrong[0]
            self.fault = MismatchError(
                f"rank {source} sends {self._sent[source, target]} elements to rank {target}, "
                f"which takes {taken[source, target]} from it"
            )
        return bool(wrong)

    def _is_reached(self) -> bool:
        """Return whether all inputs are in memory that all ranks map."""
        return NOWHERE not in self._inputs

    def _take(self) -> None:
        """Copy the blocks for this rank from the inputs of all."""
        o, out, rank = self.operation, self.out, self.operation.rank
        dtype, cuts = o.reduction.dtype, cuts_of(o.received)
        target = out.reshape(-1) if (within := flat(out)) is None else within
        # It begins with its own, and goes on with the rank after it, so that the ranks read from different ones.
        for peer in [*range(rank, o.size), *range(rank)]:
            start, count = int(self._sent[peer, :rank].sum()), int(self._sent[peer, rank])
            lies = self._inputs[peer]
            lies = lies._replace(offset=lies.offset + start * dtype.itemsize)
            block = self._memory.view(peer, lies, count * dtype.itemsize).view(dtype)
            np.copyto(target[cuts[peer] : cuts[peer + 1]], block)
        if within is None:
            np.copyto(out, target.reshape(out.shape))


def _row_bytes(size: int) -> int:
    """Return the bytes in which a rank says where its input lies, and how long its blocks are."""
    return _WORD.itemsize * (_PLACE + 2 * size)


def _position(memory: SharedMemory, x: Array, out: Array) -> Position:
    """Return where an input lies for the others: one that the output overwrites is in nobody's reach."""
    source = flat(x)
    return NOWHERE if source is None or np.may_share_memory(x, out) else memory.position(source)
