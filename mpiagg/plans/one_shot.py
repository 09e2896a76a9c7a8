"""Short vectors on a node, by one barrier: every rank writes its own where all find it, and takes from there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from mpiagg.arrays import Array, cuts_of, ranges
from mpiagg.plans.choices import SEGMENT
from mpiagg.plans.operation import Operation
from mpiagg.plans.program import Arrival, BoundRound, Program
from mpiagg.schedules import Collective
from mpiagg.tables import ANNOUNCED
from mpiagg.transport import LINE, Block, SignedBarrier

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


def segment_of(operation: Operation) -> int:
    """Return how many bytes go through a mailbox at a time: of a chunk for each rank, two elements at least."""
    return max(SEGMENT, 2 * operation.size * operation.reduction.dtype.itemsize)


def at_once(operation: Operation) -> str | None:
    """Return the schedule of one round by which the ranks of one node carry an operation out, if it is that short."""
    o = operation
    if not o.plainly_scheduled or o.entry.owned is None or o.ragged:
        return None
    reduces_all = o.collective is Collective.ALLREDUCE and o.size > 2
    most = min(ONE_SHOT if reduces_all else ANNOUNCED, segment_of(o))
    return _AT_ONCE.get(o.collective) if 0 < o.nbytes <= most else None


class OneShot:
    """A collective of short vectors: one barrier, after which every rank has all of them in mailboxes.

    Parameters
    ----------
    operation : Operation
        Of any length.
    place : int
        This rank's among those of the node.
    barrier : SignedBarrier
        Where they meet.
    block : Block
        Which has the mailboxes.

    Attributes
    ----------
    x, out : numpy.ndarray or None
        The next input, and where the result goes: contiguous; None where this rank has none.
    parts : OneShotParts
        The parts of the mailboxes that the vectors take.
    """

    x: Any = None
    out: Any = None
    parts: OneShotParts

    def __init__(self, operation: Operation, place: int, barrier: SignedBarrier, block: Block) -> None:
        self._place, self._barrier, self._block = place, barrier, block
        o, self._label = operation, operation.label
        self._combine = o.reduction.combine
        self._finish = o.reduction.finish if o.reduction.divisor is not None else None
        self._take: Callable[[Array, Any], None] = self._receive
        if o.collective.reduces:
            self._take = self._reduce
        elif o.collective is Collective.ALLGATHER:
            self._take = self._gather

    def program(self) -> Program:
        """Return the program."""
        arrival = Arrival(self._label, 0, self._barrier)
        return Program((BoundRound((self._write,), (self._barrier.passed,), (self._read,), (arrival,)),), (), 0)

    def parts_of(self, operation: Operation) -> OneShotParts:
        """Return the parts of the mailboxes that vectors of an operation's length take."""
        o = operation
        boxes = boxes_of(self._block, o.nbytes, o.reduction.dtype)
        written = [as_written(pair[self._place][o.source or slice(0)]) for pair in boxes]
        read: list[Any]
        if o.collective.reduces:
            first = o.root if o.collective is Collective.REDUCE else 0  # from whom on the sum goes
            turn = [*range(first, o.size), *range(first)]
            folds = [[pair[rank][o.target or slice(0)] for rank in turn] for pair in boxes]
            read = [(each[0], each[1], each[2:]) for each in folds]
        elif o.collective is Collective.ALLGATHER:
            chunks = [slice(*each) for each in ranges(cuts_of(o.counts))]
            read = [[(chunk, pair[rank][chunk]) for rank, chunk in enumerate(chunks)] for pair in boxes]
        else:
            read = [pair[o.root] for pair in boxes]
        return OneShotParts(written, read, o.signature)

    def _write(self) -> None:
        x, barrier, parts = self.x, self._barrier, self.parts
        if x is not None:
            x, box = x if x.__class__ is np.ndarray and x.ndim == 1 else as_vector(x), parts.written[barrier.count & 1]
            try:
                box[:] = x
            except ValueError:  # a memory view of another of several equal dtypes
                np.copyto(np.asarray(box), x)
        barrier.enter_and_come(parts.signature)

    def _read(self) -> None:
        out, barrier = self.out, self._barrier
        if out is not None:
            out = out if out.__class__ is np.ndarray and out.ndim == 1 else as_vector(out)
            self._take(out, self.parts.read[(barrier.count - 1) & 1])
        barrier.leave()

    def forget(self) -> None:
        """Let go of the caller's arrays."""
        self.x = self.out = None

    def _reduce(self, out: Array, boxes: tuple[Array, Array, list[Array]]) -> None:
        first, second, others = boxes
        self._combine(first, second, out)
        for other in others:
            self._combine(out, other, out)
        if self._finish is not None:
            self._finish(out)

    def _gather(self, out: Array, boxes: list[tuple[slice, Array]]) -> None:
        for chunk, box in boxes:
            out[chunk] = box

    def _receive(self, out: Array, box: Array) -> None:
        if self.x is not self.out:  # the root's, which is there
            out[:] = box


class OneShotParts(NamedTuple):
    """The parts of mailboxes that vectors of one length take.

    Attributes
    ----------
    written : list
        Of this rank's two mailboxes, to which it writes.
    read : list
        What it reads from, with one and with the other.
    signature : int
        That of the operation.
    """

    written: list[Any]
    read: list[Any]
    signature: int


def as_vector(array: Array) -> Array:
    """Return the elements of a contiguous array as NumPy's own vector, whatever class of arrays it is."""
    return np.asarray(array).reshape(-1)


def as_written(box: Array) -> Any:
    """Return a part of a mailbox as what is written to in a third of NumPy's time, if there is that for its dtype.

    Of several equal dtypes a memory view takes the usual one.
    """
    return box.view(np.dtype(box.dtype.str)).data if box.dtype.char in "?bhilqBHILQfd" else box


def boxes_of(block: Block, nbytes: int, dtype: np.dtype[Any]) -> list[list[Array]]:
    """Return so many bytes of the first mailboxes of all ranks, and of their second ones, as vectors of a dtype."""
    return [
        [part[start : start + nbytes].view(dtype) for part in block.parts] for start in (LINE, LINE + box_of(block))
    ]


def box_of(block: Block) -> int:
    """Return the bytes of a mailbox in a block for calls, of which there are two behind the barrier's line."""
    return (block.nbytes - LINE) // 2
