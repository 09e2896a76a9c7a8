"""The MPI library's own collectives: what they are called with, at once or as persistent requests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from mpi4py import MPI

from mpiagg.arrays import Array, same_memory
from mpiagg.plans.operation import Operation
from mpiagg.plans.program import Awaited, BoundRound, Call, Program
from mpiagg.schedules import Collective, send
from mpiagg.transport import Channel

_METHODS: Final = {
    Collective.ALLREDUCE: "Allreduce",
    Collective.REDUCE: "Reduce",
    Collective.BROADCAST: "Bcast",
    Collective.ALLGATHER: "Allgather",
    Collective.REDUCE_SCATTER: "Reduce_scatter_block",
}
"""The methods of mpi4py's communicators; their I... and ..._init forms take the same arguments."""

_OF_ANY_LENGTHS: Final = {Collective.ALLGATHER: "Allgatherv", Collective.REDUCE_SCATTER: "Reduce_scatter"}
"""Those where ranks have chunks of different lengths."""

_KNOWN_TO_MPI: Final = frozenset("?bhilqBHILQfdFD")
"""The codes of the dtypes that mpi4py passes to every MPI library; others are only moved, as bytes."""


class NativeCall(NamedTuple):
    """A call of the MPI library's own collective.

    Attributes
    ----------
    method : str
        The method of mpi4py's communicator.
    given : tuple
        Its arguments.
    before : callable or None
        Brings the input to where MPI may read it; made before each call.
    """

    method: str
    given: tuple[Any, ...]
    before: Call | None = None


def native_call(o: Operation, x: Array | None, out: Array | None) -> NativeCall:
    """Return the call that carries an operation out between arrays.

    Parameters
    ----------
    o : Operation
    x, out : numpy.ndarray or None
        Contiguous, of the dtype in which values are combined; they may be, or overlap, one another.
    """
    method = _METHODS[o.collective] if len(set(o.counts)) == 1 else _OF_ANY_LENGTHS[o.collective]
    if o.collective is Collective.BROADCAST:
        moved = o.rank == o.root and out is not None and x is not None and x is not out
        into: Any = out
        values: Any = x
        bring = partial(np.copyto, into, values) if moved else None
        return NativeCall(method, (_sent(x if out is None else out), o.root), bring)
    if out is not None and not out.size:
        out = np.empty_like(out)  # without elements two arrays may lie in one place, which MPI takes for one
    if x is not None and out is not None and x.dtype.char != out.dtype.char:
        out = out.view(x.dtype)  # of two equal dtypes, as C's long and long long may be, MPI wants one
    given, before = _apart(o, x, out)
    if o.collective is Collective.REDUCE:
        return NativeCall(method, (given, out, o.op, o.root), before)
    if o.collective is Collective.ALLGATHER:
        received: Any = _sent(out)
        if method == "Allgatherv":
            scale = 1 if received is out else o.reduction.dtype.itemsize
            received = [received, [count * scale for count in o.counts]]
        return NativeCall(method, (given if given is MPI.IN_PLACE else _sent(given), received), before)
    counts = (o.counts,) if method == "Reduce_scatter" else ()
    return NativeCall(method, (given, out, *counts, o.op), before)


def _apart(o: Operation, x: Any, out: Array | None) -> tuple[Any, Call | None]:
    """Return the input as MPI takes it, and what brings it there: not the memory of the output, but for IN_PLACE."""
    if out is None or x is None or not np.may_share_memory(x, out):
        return x, None
    # MPI's IN_PLACE of a reduce-scatter has the result at the start of the input.
    if o.collective is not Collective.REDUCE_SCATTER:
        place = out.reshape(-1)[o.own_chunk] if o.collective is Collective.ALLGATHER else out.reshape(-1)
        if same_memory(x.reshape(-1), place):
            return MPI.IN_PLACE, None
    copy = np.empty_like(x)
    return copy, partial(np.copyto, copy, x)


def call_native(comm: MPI.Intracomm, operation: Operation, x: Array | None, out: Array | None) -> None:
    """Carry an operation out by the MPI library's blocking collective; arrays as for :func:`native_call`."""
    call = native_call(operation, x, out)
    if call.before is not None:
        call.before()
    getattr(comm, call.method)(*call.given)
    _finish(operation, out)


def native_caller(
    comm: MPI.Intracomm, operation: Operation, x: Array | None, out: Array | None
) -> Callable[[Array | None, Array | None], object]:
    """Return what carries an operation out between the arrays of each call, with as few questions as they leave open.

    They are contiguous, of the dtype in which values are combined, and at each call as these are: of their shapes, each
    the owner of its memory or not, and the same array or not.
    """
    o, general = operation, partial(call_native, comm, operation)
    if len(set(o.counts)) != 1 or o.reduction.dtype.char not in _KNOWN_TO_MPI or o.reduction.divisor is not None:
        return general
    method = getattr(comm, _METHODS[o.collective])
    if o.collective is Collective.BROADCAST:
        apart = o.rank == o.root and out is not None and x is not out
        return general if apart else lambda x, out: method(x if out is None else out, o.root)
    more = {Collective.ALLGATHER: (), Collective.REDUCE: (o.op, o.root)}.get(o.collective, (o.op,))
    if x is out and o.collective in (Collective.ALLREDUCE, Collective.REDUCE):
        return lambda _, out: method(MPI.IN_PLACE, out, *more)
    if out is not None and (not out.size or (x is not None and x.dtype.char != out.dtype.char)):
        return general
    if x is None or out is None or (x.flags.owndata and out.flags.owndata and x is not out):
        return lambda x, out: method(x, out, *more)

    def careful(x: Any, out: Any) -> None:
        if np.may_share_memory(x, out):
            general(x, out)
        else:
            method(x, out, *more)

    return careful


def bind_native(comm: MPI.Intracomm, operation: Operation, x: Array | None, out: Array | None) -> Program:
    """Return the MPI library's persistent collective as a program of one round; arrays as for :func:`native_call`."""
    o, call = operation, native_call(operation, x, out)
    request = getattr(comm, f"{call.method}_init")(*call.given)
    awaited = Awaited(o.label, 0, send(o.rank), o.nbytes)
    before = () if call.before is None else (call.before,)
    nbytes = 0 if call.before is None or x is None or o.collective is Collective.BROADCAST else x.nbytes
    a_round = BoundRound((*before, request.Start), (request.Test,), (partial(_finish, o, out),), (awaited,))
    return Program((a_round,), (request.Free,), nbytes)


def called_at_once(channel: Channel, operation: Operation, x: Array | None, out: Array | None) -> Program:
    """Return the MPI library's blocking collective as a program of one call."""
    call = partial(native_caller(channel.comm, operation, x, out), x, out)
    # On other ranks the same call may be one whose signature is compared.
    return Program((BoundRound((channel.memory.signatures().skip, call), (), (), ()),), (), 0)


def _finish(operation: Operation, out: Array | None) -> None:
    """Do what the MPI library's operator leaves to be done."""
    if operation.collective.reduces and out is not None:
        operation.reduction.finish(out)


def _sent(array: Any) -> Array:
    """Return an array as mpi4py takes it: what is only moved may be of a dtype that MPI does not know."""
    flat: Array = array if array.dtype.char in _KNOWN_TO_MPI else array.reshape(-1).view(np.uint8)
    return flat
