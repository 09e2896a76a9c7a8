"""What the arguments of a communicator's method ask for, and what the readers of arguments have in common."""

from __future__ import annotations

from operator import index
from typing import Any, Final, NamedTuple

import numpy as np
from mpi4py import MPI

from mpiagg.arrays import Array, Form, Reduction, device_of
from mpiagg.collectives.buffers import ArgumentSpan, ArgumentVector
from mpiagg.plans.choices import NATIVE, TO_EACH_RANK, Choice, Memory, pick, takes_native
from mpiagg.plans.learning import choose
from mpiagg.plans.operation import Operation
from mpiagg.schedules import Collective
from mpiagg.transport import Channel

Arrays = tuple[Array | None, Array | None]
ArgumentVectors = tuple[ArgumentVector | None, ArgumentVector | None]

BYTES: Final = Reduction(np.bitwise_or, np.dtype(np.uint8), "bor")
"""How bytes travel that are only moved."""


class Asked(NamedTuple):
    """What a method's arguments ask for.

    Attributes
    ----------
    collective : Collective
    counts : tuple of int
        As an operation has them.
    reduction : Reduction
    root : int
    op : MPI.Op
        The operator, for the MPI library's own collective.
    half : numpy.dtype or None
        The dtype of arrays of half precision that are reduced, in another.
    ours : bool
        Whether it is not for the MPI library, which has no such numbers, or combines them in half precision.
    received : tuple of int
        As an operation has them.
    ragged : bool
        As an operation has it: only the MPI library's own knows the lengths of all blocks, and takes blocks that lie
        apart, as they may on some ranks.
    counted : bool
        As an operation has it.
    alone : bool
        Whether only the MPI library can combine the values, by an operator of the user's: on the host, of copies.
    x, out : ArgumentSpan or None
        Where the input and the output lie; None where this rank has none.
    """

    collective: Collective
    counts: tuple[int, ...]
    reduction: Reduction
    root: int = 0
    op: MPI.Op = MPI.SUM
    half: np.dtype[Any] | None = None
    ours: bool = False
    received: tuple[int, ...] = ()
    ragged: bool = False
    counted: bool = False
    alone: bool = False
    x: ArgumentSpan | None = None
    out: ArgumentSpan | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of the arrays."""
        return self.reduction.dtype if self.half is None else self.half

    def taken_from(self, given: tuple[Any, ...]) -> tuple[ArgumentVectors, Arrays]:
        """Return how the input and the output are made of a method's arguments, and those of these arguments.

        Raises
        ------
        TypeError
            If they are on two devices.
        """
        target = None if self.out is None else ArgumentVector(self.out, given, self.dtype, writable=True)
        source = target if self.x == self.out else None
        if source is None and self.x is not None:
            source = ArgumentVector(self.x, given, self.dtype, writable=False)
        x, out = arrays_of((source, target), given)
        if x is not None and out is not None and device_of(x) is not device_of(out):
            if out.size:
                here, there = device_of(x).name, device_of(out).name
                raise TypeError(f"the buffers of a call are on one device, not on {here} and {there}")
            target = out = None  # None, with a count of 0
        return (source, target), (x, out)

    def operation(
        self, channel: Channel, memory: Memory = Memory.TOGETHER, *, arrays: Arrays, at_once: bool = True
    ) -> Operation:
        """Return the operation, by the algorithm that the tables choose for it, to be run at once or planned."""
        x, out = arrays
        device = device_of(x if out is None else out)
        # Ranks choose the same: where they do not know the same lengths, by none.
        nbytes = 0 if self.ragged else sum(self.counts) * self.reduction.dtype.itemsize
        # The MPI library's own requests of what is only moved take as long as its blocking calls. Broadcasts go on by
        # themselves by ours, and can be left if a rank does not come.
        handed_on = not self.collective.reduces and self.collective is not Collective.BROADCAST
        as_called = at_once or self.ragged or (memory is Memory.NONE and handed_on)
        native = takes_native(self.collective, self.reduction, nbytes, channel.layout, minima=True, at_once=as_called)
        # What all ranks describe alike, reproducible communicators carry out by our own schedules.
        native = native and not ((channel.reproducible and not self.ragged) or self.ours)
        case = channel.case(self.collective, nbytes, memory, native=native)
        if at_once and not (self.ragged or self.ours or self.alone):
            choice, trial = choose(channel, case, device)
        else:
            choice, trial = pick("auto", None, case, device=device), None
        if self.alone or (self.ragged and native):
            choice = Choice(NATIVE)
        elif self.ragged and self.ours:
            choice = Choice(TO_EACH_RANK[self.collective])
        form = None if self.half is None else Form(self.half, (sum(self.counts),), device)
        return Operation(
            self.collective,
            channel.rank,
            channel.layout,
            self.root,
            self.counts,
            self.reduction,
            choice,
            self.op,
            form,
            self.received,
            self.ragged,
            self.counted,
            trial,
        )


def arrays_of(vectors: ArgumentVectors, given: tuple[Any, ...]) -> Arrays:
    """Return the input and the output of a method, as vectors: of arguments that lie where those did that were read."""
    source, target = vectors
    x = None if source is None else source(given)
    return x, x if target is source else None if target is None else target(given)


def rank_of(channel: Channel, root: Any) -> int | None:
    """Return the root, whatever kind of integer it is; None if that is no rank of the communicator."""
    try:
        rank = index(root)
    except TypeError:
        return None
    return rank if 0 <= rank < channel.size else None
