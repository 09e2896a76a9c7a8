"""Short vectors on a node, by one barrier: every rank writes its own where all find it, and takes from there."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from mpiagg.arrays import Array, cuts_of, ranges
from mpiagg.plans.choices import NATIVE, NCCL, SEGMENT
from mpiagg.plans.operation import Operation
from mpiagg.plans.program import Arrival, BoundRound, Program
from mpiagg.schedules import Collective
from mpiagg.tables import ANNOUNCED
from mpiagg.transport import LINE, Block, Channel

ONE_SHOT: Final = 4 * 2**10
"""Bytes up to which every rank reduces everything by itself in an all-reduction: one barrier then, and two for longer
vectors. Of two ranks it reads no more than it would by two barriers."""

_AT_ONCE: Final = {
    Collective.ALLREDUCE: "one_shot",
    Collective.REDUCE: "one_shot",
    Collective.BROADCAST: "parameter_server",
    Collective.REDUCE_SCATTER: "direct",
    Collective.ALLGATHER: "direct",
}
"""The schedules of one round: the sums are those of all algorithms whose ranks own chunks."""


def at_once(operation: Operation) -> str | None:
    """Return the schedule of one round by which the ranks of one node carry an operation out, if it is that short."""
    o = operation
    if o.choice.algorithm in (NATIVE, NCCL) or o.choice.wire is not None or o.entry.owned is None or o.ragged:
        return None
    reduces_all = o.collective is Collective.ALLREDUCE and o.size > 2
    most = min(ONE_SHOT if reduces_all else ANNOUNCED, o.choice.segment or SEGMENT)
    return _AT_ONCE.get(o.collective) if 0 < o.nbytes <= most else None


def serves_at_once(channel: Channel, operation: Operation) -> bool:
    """Whether every rank finds all that it needs where the others write it for each other."""
    return channel.node.size == channel.size > 1 and at_once(operation) is not None


class OneShot:
    """A collective of short vectors: one barrier, after which every rank has all of them in mailboxes.

    Parameters
    ----------
    channel : Channel
        Whose memory for calls there must be.
    operation : Operation

    Attributes
    ----------
    x, out : numpy.ndarray or None
        The next input, and where the result goes: contiguous; None where this rank has none.
    """

    x: Any = None
    out: Any = None

    def __init__(self, channel: Channel, operation: Operation) -> None:
        found = channel.memory.for_calls()
        assert found is not None
        self._barrier, block = found
        o, self._operation = operation, operation
        dtype, box = o.reduction.dtype, box_of(block)
        boxes = [[part[start : start + o.nbytes].view(dtype) for part in block.parts] for start in (LINE, LINE + box)]
        place, ranks = channel.node.place, range(o.size)
        # A memory view writes in a third of NumPy's time. Of several equal dtypes it takes the usual one.
        quick = dtype.char in "?bhilqBHILQfd"
        usual = np.dtype(dtype.str)
        own = [pair[place][o.source or slice(0)] for pair in boxes]
        self._own: list[Any] = [each.view(usual).data if quick else each for each in own]
        if o.collective.reduces:
            first = o.root if o.collective is Collective.REDUCE else 0  # from whom on the sum goes
            turn = [*ranks[first:], *ranks[:first]]
            parts = [[pair[rank][o.target or slice(0)] for rank in turn] for pair in boxes]
            self._boxes = [(each[0], each[1], each[2:]) for each in parts]
            self._combine = o.reduction.combine
            self._finish = o.reduction.finish if o.reduction.divisor is not None else None
            self._take = self._reduce
        elif o.collective is Collective.ALLGATHER:
            chunks = [slice(*each) for each in ranges(cuts_of(o.counts))]
            self._chunks = [[(chunk, pair[rank][chunk]) for rank, chunk in enumerate(chunks)] for pair in boxes]
            self._take = self._gather
        else:
            self._sent = [pair[o.root] for pair in boxes]
            self._take = self._receive
        self._signature = o.signature

    def program(self) -> Program:
        """Return the program."""
        arrival = Arrival(self._operation.label, 0, self._barrier)
        return Program((BoundRound((self._write,), (self._barrier.passed,), (self._read,), (arrival,)),), (), 0)

    def _write(self) -> None:
        x, barrier = self.x, self._barrier
        if x is not None:
            box = self._own[barrier.count & 1]
            try:
                box[:] = x if x.ndim == 1 else x.reshape(-1)
            except ValueError:  # a memory view of another of several equal dtypes
                np.copyto(np.asarray(box), x.reshape(-1))
        barrier.enter_and_come(self._signature)

    def _read(self) -> None:
        out, barrier = self.out, self._barrier
        if out is not None:
            self._take(out if out.ndim == 1 else out.reshape(-1), (barrier.count - 1) & 1)
        barrier.leave()

    def _reduce(self, out: Array, turn: int) -> None:
        first, second, others = self._boxes[turn]
        self._combine(first, second, out)
        for other in others:
            self._combine(out, other, out)
        if self._finish is not None:
            self._finish(out)

    def _gather(self, out: Array, turn: int) -> None:
        for chunk, box in self._chunks[turn]:
            out[chunk] = box

    def _receive(self, out: Array, turn: int) -> None:
        if self.x is not self.out:  # the root's, which is there
            out[:] = self._sent[turn]


def box_of(block: Block) -> int:
    """Return the bytes of a mailbox in a block for calls, of which there are two behind the barrier's line."""
    return (block.nbytes - LINE) // 2
