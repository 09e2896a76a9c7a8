"""All-reductions of short vectors on a node: every rank writes its own where all find it, and reduces all itself."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from mpiagg.plans.choices import NATIVE, NCCL, SEGMENT
from mpiagg.plans.operation import Operation
from mpiagg.plans.program import Arrival, BoundRound, Program
from mpiagg.schedules import Collective
from mpiagg.transport import LINE, Block, Channel

ONE_SHOT: Final = 4 * 2**10
"""Bytes up to which every rank reduces everything by itself: one barrier then, and two for longer vectors."""


def serves_at_once(channel: Channel, operation: Operation) -> bool:
    """Whether every rank can reduce the vectors of all by itself, from where they write them for each other."""
    o = operation
    return (
        o.collective is Collective.ALLREDUCE
        and o.choice.algorithm not in (NATIVE, NCCL)
        and o.choice.wire is None
        and o.entry.owned is not None
        and channel.node.size == channel.size > 1
        and 0 < o.nbytes <= min(ONE_SHOT, o.choice.segment or SEGMENT)
    )


class OneShot:
    """An all-reduction of short vectors: one barrier, after which every rank has all of them in mailboxes.

    Parameters
    ----------
    channel : Channel
        Whose memory for calls there must be.
    operation : Operation

    Attributes
    ----------
    x, out : numpy.ndarray
        The vector to reduce next, and where the result goes: contiguous.
    """

    x: Any = None
    out: Any = None

    def __init__(self, channel: Channel, operation: Operation) -> None:
        found = channel.memory.for_calls()
        assert found is not None
        self._barrier, block = found
        o, self._operation = operation, operation
        boxes = [
            [part[start : start + o.nbytes].view(o.reduction.dtype) for part in block.parts]
            for start in (LINE, LINE + box_of(block))
        ]
        place, signature = channel.node.place, o.signature
        # A memory view writes in a third of NumPy's time. Of several equal dtypes it takes the usual one.
        quick = o.reduction.dtype.char in "?bhilqBHILQfd"
        usual = np.dtype(o.reduction.dtype.str)
        self._own: list[Any] = [pair[place].view(usual).data if quick else pair[place] for pair in boxes]
        self._boxes = [(pair[0], pair[1], pair[2:]) for pair in boxes]
        self._combine, self._signature = o.reduction.combine, signature
        self._finish = o.reduction.finish if o.reduction.divisor is not None else None

    def program(self) -> Program:
        """Return the program."""
        arrival = Arrival(self._operation.label, 0, self._barrier)
        return Program((BoundRound((self._write,), (self._barrier.passed,), (self._read,), (arrival,)),), (), 0)

    def _write(self) -> None:
        x, box = self.x, self._own[self._barrier.count & 1]
        try:
            box[:] = x if x.ndim == 1 else x.reshape(-1)
        except ValueError:  # a memory view of another of several equal dtypes
            np.copyto(np.asarray(box), x.reshape(-1))
        self._barrier.enter_and_come(self._signature)

    def _read(self) -> None:
        barrier, out = self._barrier, self.out
        first, second, others = self._boxes[(barrier.count - 1) & 1]
        if out.ndim != 1:
            out = out.reshape(-1)
        self._combine(first, second, out)
        for other in others:
            self._combine(out, other, out)
        if self._finish is not None:
            self._finish(out)
        barrier.leave()


def box_of(block: Block) -> int:
    """Return the bytes of a mailbox in a block for calls, of which there are two behind the barrier's line."""
    return (block.nbytes - LINE) // 2
