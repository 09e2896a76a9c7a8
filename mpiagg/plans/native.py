"""The MPI library's own collectives: what they are called with, at once or as persistent requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from mpi4py import MPI

from mpiagg.arrays import Array, address, same_memory
from mpiagg.plans.operation import Operation
from mpiagg.plans.program import BoundRound, Callback, Computing, Program
from mpiagg.schedules import Collective
from mpiagg.transport import Channel

_METHODS: Final = {
    Collective.ALLREDUCE: "Allreduce",
    Collective.REDUCE: "Reduce",
    Collective.BROADCAST: "Bcast",
    Collective.ALLGATHER: "Allgather",
    Collective.REDUCE_SCATTER: "Reduce_scatter_block",
    Collective.GATHER: "Gather",
    Collective.SCATTER: "Scatter",
    Collective.ALLTOALL: "Alltoall",
    Collective.SCAN: "Scan",
    Collective.EXSCAN: "Exscan",
}
"""The methods of mpi4py's communicators; their I... and ..._init forms take the same arguments."""

_OF_ANY_LENGTHS: Final = {
    Collective.ALLGATHER: "Allgatherv",
    Collective.REDUCE_SCATTER: "Reduce_scatter",
    Collective.GATHER: "Gatherv",
    Collective.SCATTER: "Scatterv",
    Collective.ALLTOALL: "Alltoallv",
}
"""Those where ranks have chunks of different lengths."""

KNOWN_TO_MPI: Final = frozenset("?bhilqBHILQfdFD")
"""The codes of the dtypes that mpi4py passes to every MPI library; others are only moved, as bytes."""


PAIRS: Final = {
    "f": MPI.FLOAT_INT,
    "d": MPI.DOUBLE_INT,
    "l": MPI.LONG_INT,
    "i": MPI.INT_INT,
    "h": MPI.SHORT_INT,
    "g": MPI.LONG_DOUBLE_INT,
}
"""The datatypes of MAXLOC and MINLOC by the codes of their values; a dtype of them has the fields value and index."""


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
    before: Callback | None = None


def native_call(o: Operation, x: Array | None, out: Array | None) -> NativeCall:
    """Return the call that carries an operation out between arrays.

    Parameters
    ----------
    o : Operation
    x, out : numpy.ndarray or None
        Contiguous, of the dtype in which values are combined; they may be, or overlap, one another.
    """
    method = _METHODS[o.collective] if _alike(o) else _OF_ANY_LENGTHS[o.collective]
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
    if o.collective.moves:
        return _moving_call(o, method, x, out)
    given, before = _apart(o, x, out)
    op: tuple[Any, ...] = (o.op,) if o.collective.reduces else ()
    root: tuple[Any, ...] = (o.root,) if o.collective.rooted else ()
    counts = (o.counts,) if method == "Reduce_scatter" else ()
    if o.collective is Collective.ALLGATHER:
        given, out = _sent(given), _parted(o, method, out, o.counts)
    elif o.collective.prefix and out is None:
        out = np.empty_like(x)  # MPI wants an output on rank 0, too
    return NativeCall(method, (_of_pairs(given), _of_pairs(out), *counts, *op, *root), before)


def _of_pairs(array: Any) -> Any:
    """Return an array as mpi4py takes it: with the datatype of pairs, if it is one of pairs."""
    if array is None or array is MPI.IN_PLACE or isinstance(array, list) or array.dtype.names is None:
        return array
    return [array.reshape(-1).view(np.uint8), PAIRS[array.dtype["value"].char]]


def _moving_call(o: Operation, method: str, x: Array | None, out: Array | None) -> NativeCall:
    """Return the call of a gather, a scatter or an all-to-all."""
    root = (o.root,) if o.collective.rooted else ()
    if o.collective is Collective.SCATTER:
        if x is not None and (out is None or same_memory(x.reshape(-1)[o.own_chunk], out.reshape(-1))):
            return NativeCall(method, (_parted(o, method, x, o.counts), MPI.IN_PLACE, *root))
        sent, before = _apart(o, x, out)
        return NativeCall(method, (_parted(o, method, sent, o.counts), _sent(out), *root), before)
    sent, before = _apart(o, x, out)
    sent = _sent(sent) if o.collective is Collective.GATHER else _parted(o, method, sent, o.counts)
    return NativeCall(method, (sent, _parted(o, method, out, o.received or o.counts), *root), before)


def _alike(o: Operation) -> bool:
    """Whether all chunks are known to be of one length, and no call has counts that say so."""
    return not (o.ragged or o.counted) and len({*o.counts, *o.received}) == 1


def _parted(o: Operation, method: str, array: Any, counts: Sequence[int]) -> Any:
    """Return an array with a chunk for each rank as a method of mpi4py's takes it."""
    if array is None or array is MPI.IN_PLACE:
        return array
    sent: Any = _sent(array)
    if not method.endswith("v"):
        return sent
    scale = 1 if sent is array else o.reduction.dtype.itemsize
    return [sent, [count * scale for count in counts]]


def _apart(o: Operation, x: Any, out: Array | None) -> tuple[Any, Callback | None]:
    """Return the input as MPI takes it, and what brings it there: not the memory of the output, but for IN_PLACE."""
    if out is None or x is None or not np.may_share_memory(x, out):
        return x, None
    # MPI's IN_PLACE of a reduce-scatter has the result at the start of the input. That of an all-to-all is another
    # algorithm, for all ranks alike; and where a rank's arrays lie, only it knows.
    if o.collective not in (Collective.REDUCE_SCATTER, Collective.SCATTER, Collective.ALLTOALL):
        gathers = o.collective in (Collective.ALLGATHER, Collective.GATHER)
        place = out.reshape(-1)[o.own_chunk] if gathers else out.reshape(-1)
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
    call = _caller_of_others(comm, o)
    if call is None or o.reduction.dtype.char not in KNOWN_TO_MPI or o.reduction.divisor is not None:
        return general
    special = _special_caller(comm, o, x, out)
    if special is not None:
        return special
    unlike = out is not None and (not out.size or (x is not None and x.dtype.char != out.dtype.char))
    if unlike or o.collective is Collective.BROADCAST or (out is None and o.collective is Collective.SCATTER):
        return general
    if x is None or out is None or (x.flags.owndata and out.flags.owndata and x is not out):
        return call

    in_place = _caller_in_place(comm, o)
    place = 0 if in_place is None else o.own_chunk.start * out.itemsize

    def careful(x: Any, out: Any) -> None:
        if in_place is not None and address(x) == address(out) + place:
            in_place(out)
        elif np.may_share_memory(x, out):
            general(x, out)
        else:
            call(x, out)

    return careful


def _caller_in_place(comm: MPI.Intracomm, o: Operation) -> Callable[[Any], object] | None:
    """Return what gathers where this rank's part is in its place; None for others, and for parts of other lengths."""
    if o.collective not in (Collective.ALLGATHER, Collective.GATHER) or not _alike(o):
        return None
    method, root = getattr(comm, _METHODS[o.collective]), (o.root,) if o.collective.rooted else ()
    return lambda out: method(MPI.IN_PLACE, out, *root)


def _caller_of_others(comm: MPI.Intracomm, o: Operation) -> Callable[[Any, Any], object] | None:
    """Return what carries an operation out between arrays that share no memory; None if that is not said quickly."""
    counts, received = list(o.counts), list(o.received)
    if _alike(o):
        method = getattr(comm, _METHODS[o.collective])
        more = (*((o.op,) if o.collective.reduces else ()), *((o.root,) if o.collective.rooted else ()))
        return lambda x, out: method(x, out, *more)
    method = getattr(comm, _OF_ANY_LENGTHS[o.collective])
    if o.collective is Collective.ALLTOALL:
        return lambda x, out: method([x, counts], [out, received])
    if o.collective is Collective.ALLGATHER:
        return lambda x, out: method(x, [out, counts])
    return None


def _special_caller(
    comm: MPI.Intracomm, o: Operation, x: Array | None, out: Array | None
) -> Callable[[Any, Any], object] | None:
    """Return what carries an operation out that has one array, or a second one that is not the caller's."""
    if o.collective is Collective.BROADCAST and not (o.rank == o.root and out is not None and x is not out):
        return lambda x, out: comm.Bcast(x if out is None else out, o.root)
    method = getattr(comm, _METHODS[o.collective])
    if x is out and o.collective in (Collective.ALLREDUCE, Collective.SCAN, Collective.EXSCAN):
        return lambda _, out: method(MPI.IN_PLACE, out, o.op)
    if x is out and o.collective is Collective.REDUCE:
        return lambda _, out: method(MPI.IN_PLACE, out, o.op, o.root)
    if o.collective is Collective.EXSCAN and x is not None and out is None:
        spare = np.empty_like(x)  # which MPI wants on rank 0, too
        return lambda x, _: method(x, spare, o.op)
    return None


def bind_native(comm: MPI.Intracomm, operation: Operation, x: Array | None, out: Array | None) -> Program:
    """Return the MPI library's persistent collective as a program of one round; arrays as for :func:`native_call`."""
    o, call = operation, native_call(operation, x, out)
    request = getattr(comm, f"{call.method}_init")(*call.given)
    awaited = Computing(o.label, "the MPI library")
    before = () if call.before is None else (call.before,)
    nbytes = 0 if call.before is None or x is None or o.collective is Collective.BROADCAST else x.nbytes
    a_round = BoundRound((*before, request.Start), (request.Test,), (partial(_finish, o, out),), (awaited,))
    # mpi4py's persistent collectives do not keep their input alive.
    return Program((a_round,), (partial(_release, request, call.given),), nbytes)


def _release(request: MPI.Request, given: object) -> None:
    """Free a request; until then what it was given stays."""
    del given
    request.Free()


def called_at_once(channel: Channel, operation: Operation, x: Array | None, out: Array | None) -> Program:
    """Return the MPI library's blocking collective as a program of one call."""
    call = partial(native_caller(channel.native, operation, x, out), x, out)
    # On other ranks the same call may be one whose signature is compared.
    return Program((BoundRound((channel.memory.signatures().skip, call), (), (), ()),), (), 0)


def _finish(operation: Operation, out: Array | None) -> None:
    """Do what the MPI library's operator leaves to be done."""
    if operation.collective.finishes and out is not None:
        operation.reduction.finish(out)


def _sent(array: Any) -> Any:
    """Return an array as mpi4py takes it: what is only moved may be of a dtype that MPI does not know."""
    if array is None or array is MPI.IN_PLACE:
        return array
    flat: Array = array if array.dtype.char in KNOWN_TO_MPI else array.reshape(-1).view(np.uint8)
    return flat
