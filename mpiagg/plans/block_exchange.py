"""Collectives of blocks whose lengths only their ends know, through memory that the ranks of a node share.

``Alltoallv``, ``Gatherv`` and ``Scatterv`` tell a rank the lengths of its own blocks alone. So before the first gate
each rank writes these into its mailbox, with where its arrays lie. Behind the gate all know all lengths: each finds its
blocks in the arrays of the others, and all find the same fault if a block is longer at one end than at the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from mpiagg.arrays import HOST, Array, Device, accelerator_of, cuts_of, flat, overlap, same_memory
from mpiagg.errors import MismatchError
from mpiagg.plans.choices import Choice, Memory
from mpiagg.plans.moves import stays
from mpiagg.plans.on_node import SHARED
from mpiagg.plans.one_shot import box_of
from mpiagg.plans.operation import Operation
from mpiagg.plans.places import moves_reached
from mpiagg.plans.program import BoundRound, Deferred, Once, Program, in_turn
from mpiagg.plans.sharing import gate_round
from mpiagg.schedules import Collective
from mpiagg.transport import LINE, NOWHERE, Block, Channel, Gate, Position, Positions, SharedMemory, SignedGate

_WORD: Final = np.dtype(np.int64)

_PLACES: Final = 4
"""The words in which a rank says where its input and its output lie; behind them, how long its blocks are."""


def serves_blocks(channel: Channel, operation: Operation) -> bool:
    """Whether blocks of lengths that only their ends know go through memory that all ranks share."""
    o = operation
    return o.ragged and o.choice.algorithm == SHARED and channel.node.size == channel.size > 1


def choose_blocks(channel: Channel, device: Device, memory: Memory, messages: str, *, at_once: bool) -> Choice:
    """Return what ``"auto"`` takes for such blocks: an algorithm by messages, but for arrays that ranks share."""
    shared = memory is Memory.TOGETHER and (at_once or channel.memory.host.leased)
    if shared and device is HOST and channel.node.size == channel.size > 1:
        return Choice(SHARED, elsewhere=messages)
    return Choice(messages)


def ground_for(channel: Channel) -> tuple[SignedGate, Block] | None:
    """Return the gate and the memory of blocking calls, if what a rank says has room there."""
    ground = channel.memory.for_calls()
    return None if ground is None or row_bytes(channel.size) > box_of(ground[1]) else ground


def planned_blocks(
    channel: Channel, operation: Operation, x: Array | None, out: Array | None, otherwise: Callable[[], Program]
) -> Program:
    """Return the program of blocks in arrays that stay where they are; all ranks make theirs together.

    Parameters
    ----------
    otherwise : callable
        Returns the program where not all arrays that must be are in reach.
    """
    o, memory, node = operation, channel.memory.host, channel.node
    mine = _positions(memory, o, x, out)
    if not moves_reached(o, node.ranks, tuple(map(Positions, *map(memory.tell, mine)))):
        return otherwise()
    try:
        block = memory.take(LINE + 2 * row_bytes(o.size), busy=channel.busy)
    except MemoryError:
        return otherwise()
    exchange = BlockExchange(channel, o, (Gate(block, node.place, node.ranks), block), lambda *_: otherwise())
    exchange.x, exchange.out = x, out
    whole = exchange.program()
    sent = o.reduction.dtype.itemsize * sum(o.counts_of([chunk for chunk in o.had if chunk not in o.promised]))
    return replace(whole, releases=(partial(memory.give_back, block),), nbytes=block.nbytes, sent_bytes=sent)


def row_bytes(size: int) -> int:
    """Return the bytes in which a rank says where its arrays lie, and how long its blocks are."""
    return _WORD.itemsize * (_PLACES + 2 * size)


class BlockExchange:
    """An exchange of blocks through memory that the ranks of a node share.

    Parameters
    ----------
    channel : Channel
    operation : Operation
        The first, of whose kind the others are.
    ground : pair of Gate and Block
        Where the ranks meet, and memory with two mailboxes a rank behind the gate's line.
    otherwise : callable
        Returns the program of an operation between two arrays, where not all that must be are in reach.

    Attributes
    ----------
    operation, x, out
        The operation to carry out next, and its arrays: None where this rank has none.
    """

    def __init__(
        self,
        channel: Channel,
        operation: Operation,
        ground: tuple[Gate, Block],
        otherwise: Callable[[Operation, Array | None, Array | None], Program],
    ) -> None:
        self.operation, self._otherwise = operation, otherwise
        self.x: Any = None
        self.out: Any = None
        self._gate, block = ground
        self._memory = channel.memory.host
        nbytes, box = row_bytes(channel.size), box_of(block)
        self._rows = [
            [part[start : start + nbytes].view(_WORD) for part in block.parts] for start in (LINE, LINE + box)
        ]

    def program(self) -> Program:
        """Return the program, for the operation and the arrays that there are when it runs."""
        gate, label = self._gate, self.operation.label
        told = gate_round(gate, label, 0)._replace(starts=(self._tell, gate.come))
        reached = Program((BoundRound((self._take,), (), (), ()), gate_round(gate, label, 1)), (), 0)
        elsewhere = Program((Once(self._elsewhere).as_round(),), (), 0)
        found = Deferred(lambda: reached if self._found() else elsewhere)
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
        """Write where our arrays lie, and the lengths of our blocks."""
        o = self.operation
        row = self._rows[self._gate.count & 1][o.rank]  # on the only node a rank's place is its number
        row[:_PLACES] = [number for position in _positions(self._memory, o, self.x, self.out) for number in position]
        row[_PLACES : _PLACES + o.size] = o.counts
        row[_PLACES + o.size :] = o.received or 0

    def _found(self) -> bool:
        """Read what all have told, and return whether all arrays that others must reach are in memory that they map.

        Raises
        ------
        MismatchError
            On all ranks, if a block is longer at one end than at the other.
        """
        o = self.operation
        told = np.stack(self._rows[(self._gate.count - 1) & 1])
        self._sent = sent = told[:, _PLACES : _PLACES + o.size]
        if o.collective is Collective.ALLTOALL:
            _check(sent, told[:, _PLACES + o.size :].T)
        else:  # the root knows all lengths, and each rank its own
            ends = np.zeros((2, *sent.shape), _WORD)
            if o.collective is Collective.SCATTER:
                ends[:, o.root] = sent[o.root], np.diagonal(sent)
            else:
                ends[:, :, o.root] = np.diagonal(sent), sent[o.root]
            _check(*ends)
        places = (map(Position, words[::2], words[1::2]) for words in told[:, :_PLACES].tolist())
        self._positions = [Positions(*pair) for pair in places]
        return moves_reached(o, range(o.size), self._positions)

    def _take(self) -> None:
        """Copy this rank's blocks: from the inputs of the others, or to the root's output."""
        o, x, out, rank = self.operation, self.x, self.out, self.operation.rank
        gathers = o.collective is Collective.GATHER
        source: Any = None if x is None else x.reshape(-1)
        if gathers and rank != o.root:
            np.copyto(self._block_of(o.root, self._positions[o.root].target), source)
            return
        if out is None:  # of a scatter whose root leaves its own block where it is
            return
        target = out.reshape(-1) if (within := flat(out)) is None else within
        if o.collective is Collective.ALLTOALL:
            cuts = cuts_of(o.received)
            # It begins with its own, and goes on with the rank after it, so that the ranks read from different ones.
            for peer in [*range(rank, o.size), *range(rank)]:
                own = peer == rank
                block = source[o.own_chunk] if own else self._block_of(peer, self._positions[peer].source)
                np.copyto(target[cuts[peer] : cuts[peer + 1]], block)
        elif rank != o.root:
            np.copyto(target, self._block_of(o.root, self._positions[o.root].source))
        else:
            kept = (target[o.own_chunk], source) if gathers else (target, source[o.own_chunk])
            if not same_memory(*kept):
                np.copyto(*kept)
        if within is None:
            np.copyto(out, target.reshape(out.shape))

    def _block_of(self, peer: int, position: Position) -> Array:
        """Return this rank's block of the array of a peer that lies at a position."""
        o, lengths = self.operation, self._sent[peer]
        start, count = int(lengths[: o.rank].sum()), int(lengths[o.rank])
        unit = o.reduction.dtype.itemsize
        position = position._replace(offset=position.offset + start * unit)
        return self._memory.view(peer, position, count * unit).view(o.reduction.dtype)


def _positions(memory: SharedMemory, operation: Operation, x: Array | None, out: Array | None) -> Positions:
    """Return where arrays lie for the others: an input that the output overwrites is in nobody's reach."""
    source, target = (None if part is None or accelerator_of(part) else flat(part) for part in (x, out))
    if source is not None and target is not None and overlap(source, target) and not stays(operation, source, target):
        return Positions(NOWHERE, NOWHERE)
    return Positions(*(NOWHERE if part is None else memory.position(part) for part in (source, target)))


def _check(sent: Array, taken: Array) -> None:
    """Raise MismatchError if the ranks do not take what is sent to them."""
    for source, target in np.argwhere(sent != taken).tolist():
        raise MismatchError(
            f"rank {source} sends {sent[source, target]} elements to rank {target}, "
            f"which takes {taken[source, target]} from it"
        )
