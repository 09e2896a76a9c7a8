"""A collective operation in full: what is moved, how it is combined, by which schedule, between which arrays.

Both faces, the array functions and the communicator, describe their calls as operations and run or plan them here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from mpi4py import MPI

from mpiagg.arrays import (
    Array,
    Reduction,
    address,
    borrow,
    codec,
    cuts_of,
    even_cuts,
    even_ranges,
    flat,
    ranges,
    same_memory,
    scratch,
)
from mpiagg.binding import Lane, Wire, bind
from mpiagg.plan import Plan, find_plan
from mpiagg.program import Awaited, BoundRound, Program, in_turn
from mpiagg.schedules import Collective, algorithm, send
from mpiagg.transport import SHARED_TAG, Channel
from mpiagg.tuning import NATIVE, Choice

STAGED_BYTES: Final = 32 * 2**10
"""Vectors up to this length are copied into a plan's own buffer, which costs less than a plan for each address."""


@dataclass(frozen=True)
class Operation:
    """A collective operation on vectors, as one rank sees it.

    Attributes
    ----------
    collective : Collective
    rank, size, root : int
    counts : tuple of int
        For all-gather and reduce-scatter the elements of each rank's chunk; else the elements of the vector, alone.
    reduction : Reduction
        How values are combined, and in which dtype they travel.
    choice : Choice
        The algorithm and the number of lanes.
    op : MPI.Op
        The operator, for the MPI library's own collectives.
    """

    collective: Collective
    rank: int
    size: int
    root: int
    counts: tuple[int, ...]
    reduction: Reduction
    choice: Choice
    op: MPI.Op

    @property
    def length(self) -> int:
        """How many elements the buffer has."""
        return sum(self.counts)

    @property
    def label(self) -> str:
        """The operation in words."""
        wire = f" with wire {self.choice.wire}" if self.choice.wire else ""
        return f"{self.collective.value} by {self.choice.algorithm}{wire}"

    def key(self) -> Hashable:
        """Return what a plan for this operation depends on, beside the buffer's address."""
        combine = self.reduction.combine
        return (
            self.collective,
            self.root,
            self.counts,
            combine,
            self.reduction.dtype,
            self.reduction.divisor,
            self.choice,
        )

    @property
    def source(self) -> slice | None:
        """Where in the buffer this rank's input goes; None if it has none."""
        if self.collective is Collective.ALLGATHER:
            return self.own_chunk
        if self.collective is Collective.BROADCAST and self.rank != self.root:
            return None
        return slice(0, self.length)

    @property
    def target(self) -> slice | None:
        """Where in the buffer this rank's output lies; None if it has none."""
        if self.collective is Collective.REDUCE_SCATTER:
            return self.own_chunk
        if self.collective is Collective.REDUCE and self.rank != self.root:
            return None
        return slice(0, self.length)

    @property
    def own_chunk(self) -> slice:
        """Where this rank's chunk lies, where every rank has one."""
        cuts = cuts_of(self.counts)
        return slice(cuts[self.rank], cuts[self.rank + 1])

    def lanes(self) -> list[Lane]:
        """Return the ranges of the chunks of every lane.

        Where ranks own chunks, every chunk is cut into lanes; elsewhere the buffer is, and every lane into chunks.
        """
        lanes = self.choice.lanes
        if self.collective in (Collective.ALLGATHER, Collective.REDUCE_SCATTER):
            parts = [even_ranges(start, stop, lanes) for start, stop in ranges(cuts_of(self.counts))]
            return [[part[lane] for part in parts] for lane in range(lanes)]
        chunks = algorithm(self.choice.algorithm).chunks(self.size)
        return [even_ranges(start, stop, chunks) for start, stop in even_ranges(0, self.length, lanes)]


def even_counts(length: int, size: int) -> tuple[int, ...]:
    """Return the lengths of ``size`` even parts of ``length`` elements."""
    return tuple(stop - start for start, stop in ranges(even_cuts(length, size)))


def run(channel: Channel, operation: Operation, x: Array | None, out: Array | None) -> None:
    """Carry an operation out, from ``x`` to ``out``, by a plan that is kept for the next such call.

    Parameters
    ----------
    x : numpy.ndarray or None
        The input, of any layout, which may lie in ``out``; None where this rank has none.
    out : numpy.ndarray or None
        The output, of any layout; None where this rank has none.
    """
    mapped = _mapped(operation, out)
    if operation.choice.algorithm == NATIVE:
        buffer = _own_buffer(operation) if mapped is None else mapped
        call: Callable[[], object] = partial(_call_native, channel.comm, operation, buffer)
    elif mapped is None or mapped.nbytes <= STAGED_BYTES:
        mapped = None
        call = plan = find_plan(channel, operation.key(), partial(_plan_on_own_buffer, channel, operation))
        buffer = plan.result
    else:
        place = address(mapped)
        make = partial(_plan_on_borrowed_memory, channel, operation, place)
        call = plan = find_plan(channel, (operation.key(), place), make)
        buffer = plan.result
    if not (mapped is not None and _lies_in(x, buffer, operation.source)):
        _fill(operation, buffer, x)
    call()
    if mapped is None:
        _drain(operation, buffer, out)


def prepare(channel: Channel, operation: Operation, x: Array | None, out: Array | None, tag: int) -> Plan[Array | None]:
    """Return a plan that carries an operation out, from ``x`` to ``out``, each time it runs."""
    mapped = _mapped(operation, out)
    buffer = _own_buffer(operation) if mapped is None else mapped
    load = None if _lies_in(x, buffer, operation.source) else partial(_fill, operation, buffer, x)
    store = None if out is None or mapped is not None else partial(_drain, operation, buffer, out)
    program = in_turn(load, bind_operation(channel, operation, buffer, tag), store)
    return Plan(channel, program, result=out, label=operation.label)


def bind_operation(
    channel: Channel, operation: Operation, buffer: Array, tag: int = SHARED_TAG, *, residual: Array | None = None
) -> Program:
    """Return the program of an operation, in place on a buffer of its length and dtype.

    With a wire, what the codec loses of this rank's contributions is left in ``residual``, if that is given.
    """
    o = operation
    if o.choice.algorithm == NATIVE:
        return _bind_native(channel.comm, o, buffer)
    schedule = algorithm(o.choice.algorithm).schedule(o.collective, o.rank, o.size, o.root)
    wire = None if o.choice.wire is None else Wire(codec(o.choice.wire), residual)
    return bind(channel, schedule, buffer, o.lanes(), o.reduction, label=o.label, tag=tag, wire=wire)


def _plan_in_place(channel: Channel, operation: Operation, buffer: Array) -> Plan[Array]:
    return Plan(channel, bind_operation(channel, operation, buffer), result=buffer, label=operation.label)


def _plan_on_own_buffer(channel: Channel, operation: Operation) -> Plan[Array]:
    buffer = _own_buffer(operation)
    plan = _plan_in_place(channel, operation, buffer)
    plan.nbytes += buffer.nbytes
    return plan


def _plan_on_borrowed_memory(channel: Channel, operation: Operation, place: int) -> Plan[Array]:
    # The plan outlives the caller's array and must not keep it alive. It only touches the memory again when a
    # call comes with an array in the same place.
    memory = borrow(place, operation.length, operation.reduction.dtype)
    return _plan_in_place(channel, operation, memory)


def _own_buffer(operation: Operation) -> Array:
    return scratch(operation.length, operation.reduction.dtype)


def _mapped(operation: Operation, out: Array | None) -> Array | None:
    """Return ``out`` as the operation's buffer, if it can be that."""
    if out is None or operation.target != slice(0, operation.length) or out.dtype != operation.reduction.dtype:
        return None
    return flat(out)


def _lies_in(x: Array | None, buffer: Array, source: slice | None) -> bool:
    """Whether there is no input to bring into the buffer."""
    if x is None or source is None:
        return True
    return same_memory(x, buffer[source].reshape(x.shape))


def _fill(operation: Operation, buffer: Array, x: Array | None) -> None:
    """Bring the input into the buffer."""
    if x is not None and operation.source is not None:
        np.copyto(buffer[operation.source].reshape(x.shape), x, casting="unsafe")


def _drain(operation: Operation, buffer: Array, out: Array | None) -> None:
    """Bring the output out of the buffer."""
    if out is not None and operation.target is not None:
        np.copyto(out, buffer[operation.target].reshape(out.shape), casting="unsafe")


# -- the MPI library's own collectives


def _call_native(comm: MPI.Intracomm, operation: Operation, buffer: Array) -> None:
    """Carry the operation out in place by the MPI library's blocking collective."""
    o = operation
    at_root = o.rank == o.root
    if o.collective is Collective.ALLREDUCE:
        comm.Allreduce(MPI.IN_PLACE, buffer, o.op)
    elif o.collective is Collective.REDUCE:
        comm.Reduce(MPI.IN_PLACE if at_root else buffer, buffer if at_root else None, o.op, o.root)
    elif o.collective is Collective.BROADCAST:
        comm.Bcast(_as_bytes(buffer), o.root)
    elif o.collective is Collective.ALLGATHER:
        comm.Allgatherv(MPI.IN_PLACE, [_as_bytes(buffer), _byte_counts(o), MPI.BYTE])
    else:
        comm.Reduce_scatter(buffer.copy(), buffer[o.own_chunk], o.counts, o.op)
    _finish_native(o, buffer)


def _bind_native(comm: MPI.Intracomm, operation: Operation, buffer: Array) -> Program:
    """Return the MPI library's persistent collective as a program of one round."""
    o = operation
    at_root = o.rank == o.root
    sent = scratch(0, buffer.dtype)
    before: tuple[Callable[[], object], ...] = ()
    if o.collective is Collective.ALLREDUCE:
        request = comm.Allreduce_init(MPI.IN_PLACE, buffer, o.op)
    elif o.collective is Collective.REDUCE:
        request = comm.Reduce_init(MPI.IN_PLACE if at_root else buffer, buffer if at_root else None, o.op, o.root)
    elif o.collective is Collective.BROADCAST:
        request = comm.Bcast_init(_as_bytes(buffer), o.root)
    elif o.collective is Collective.ALLGATHER:
        request = comm.Allgatherv_init(MPI.IN_PLACE, [_as_bytes(buffer), _byte_counts(o), MPI.BYTE])
    else:
        sent = scratch(buffer.size, buffer.dtype)
        before = (partial(np.copyto, sent, buffer),)
        request = comm.Reduce_scatter_init(sent, buffer[o.own_chunk], o.counts, o.op)
    awaited = Awaited(o.label, 0, send(o.rank), buffer.nbytes)
    a_round = BoundRound((*before, request.Start), (request.Test,), (partial(_finish_native, o, buffer),), (awaited,))
    return Program((a_round,), (request,), sent.nbytes)


def _as_bytes(buffer: Array) -> Array:
    """Return the buffer as bytes: what is only moved may be of a dtype that MPI does not know."""
    return buffer.view(np.uint8)


def _byte_counts(operation: Operation) -> list[int]:
    return [count * operation.reduction.dtype.itemsize for count in operation.counts]


def _finish_native(operation: Operation, buffer: Array) -> None:
    if operation.collective.reduces and operation.target is not None:
        operation.reduction.finish(buffer[operation.target])
