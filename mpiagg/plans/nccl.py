"""NCCL: NVIDIA's own collectives, for vectors on GPUs of which every rank has its own.

It is never needed, and never chosen unless it is named. NCCL says in which order it combines values: all ranks have
the same bits, but not those of another algorithm, and ``"min"`` and ``"max"`` need not pass a NaN on.

A plan asks for its collective in its own stream, when it is started. NCCL takes what ranks ask for in the order in
which they ask, so all of them must start such plans in one order. NVIDIA warns of NCCL at work while a
CUDA-aware MPI library sends memory of the same devices: let the one be done before the other starts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np

from mpiagg.arrays import Accelerator, Array, accelerator_of, cuts_of, ranges
from mpiagg.arrays.devices import Nccl
from mpiagg.cuda.placement import shared_devices
from mpiagg.errors import DeviceError
from mpiagg.plans.operation import Operation
from mpiagg.plans.program import BoundRound, Callback, Program
from mpiagg.schedules import Collective
from mpiagg.transport import Channel

_OPS: Final = {"sum": "sum", "avg": "sum", "min": "min", "max": "max", "prod": "prod"}
"""What NCCL calls the operators; an average is divided when its sum is there."""

_DTYPES: Final = frozenset(map(np.dtype, ("i1", "u1", "i4", "u4", "i8", "u8", "f4", "f8")))
"""What it combines values of, of the dtypes in which we do."""


def bind_nccl(channel: Channel, operation: Operation, buffer: Array) -> Program:
    """Return the program of an operation by NCCL, in place on a buffer on a device.

    Raises
    ------
    TypeError
        If NCCL cannot combine such values so.
    DeviceError
        On all ranks, if one of them has no NCCL, or no GPU of its own.
    """
    o, device = operation, accelerator_of(buffer)
    assert device is not None
    dtype = _travels_as(o)
    nccl = connection(channel, device)
    calls: list[Callback] = []
    if o.length:
        calls.append(partial(_ask, nccl, o, buffer.view(dtype), buffer.itemsize // dtype.itemsize))
        if o.collective.reduces and o.target is not None:
            calls.append(partial(o.reduction.finish, buffer[o.target]))
    # Nothing waits here: the plan does, at its end, for all that was asked for in its stream.
    return Program((BoundRound(tuple(calls), (), (), ()),), (), 0, device=device)


def _travels_as(operation: Operation) -> np.dtype[Any]:
    """Return the dtype that NCCL is told: of bytes that are only moved, or of the parts of complex numbers."""
    how = operation.reduction
    if not operation.collective.reduces or (how.dtype.kind == "b" and how.name in ("min", "max")):
        return np.dtype(np.uint8)
    parts = how.dtype.kind == "c" and _OPS.get(how.name) == "sum"
    dtype = np.empty(0, how.dtype).real.dtype if parts else how.dtype
    if how.name not in _OPS or dtype not in _DTYPES:
        raise TypeError(f"algorithm 'nccl' has no op {how.name!r} for dtype {how.dtype}; others have")
    return dtype


def _ask(nccl: Nccl, operation: Operation, vector: Array, width: int) -> None:
    """Ask for the collective on a vector that has ``width`` elements for each of the operation's."""
    o, op = operation, _OPS[operation.reduction.name]
    if o.collective is Collective.ALLREDUCE:
        nccl.all_reduce(vector, op)
    elif o.collective is Collective.REDUCE:
        nccl.reduce(vector, op, o.root)
    elif o.collective is Collective.BROADCAST:
        nccl.broadcast(vector, o.root)
    else:
        chunks = [vector[start * width : stop * width] for start, stop in ranges(cuts_of(o.counts))]
        reduces = o.collective is Collective.REDUCE_SCATTER
        if len(set(o.counts)) == 1:
            own = chunks[o.rank]
            nccl.reduce_scatter(vector, own, op) if reduces else nccl.all_gather(vector, own)
            return
        with nccl.group():
            for owner, chunk in enumerate(chunks):
                if chunk.size:
                    nccl.reduce(chunk, op, owner) if reduces else nccl.broadcast(chunk, owner)


def connection(channel: Channel, device: Accelerator) -> Nccl:
    """Return the connection of a channel's ranks; the first call makes it, and is collective.

    Raises
    ------
    DeviceError
        On all ranks, if one of them has no NCCL, or no GPU of its own, or cannot connect. On this rank, if it is
        connected by another device.
    """
    if channel.nccl is not None:
        if channel.nccl.device is not device:
            known = channel.nccl.device.name
            raise DeviceError(f"a communicator connects one device a rank by NCCL; here it is {known}")
        return channel.nccl
    made: list[Nccl] = []

    def offer() -> bytes:
        made.append(device.nccl())
        return device.identity.encode()

    def name() -> bytes:
        return made[0].unique_id() if channel.rank == 0 else b""

    def connect() -> bytes:
        made[0].connect(unique_id, channel.rank, channel.size)
        return b""

    identities = [text.decode() for text in _told(channel, offer)]
    for ranks, _ in shared_devices(identities):
        raise DeviceError(
            f"ranks {', '.join(map(str, ranks))} share {identities[ranks[0]]}, and algorithm 'nccl' is for ranks that "
            "have a GPU each: take another algorithm, or call mpiagg.bind_device() where there are enough GPUs"
        )
    unique_id = _told(channel, name)[0]
    try:
        _told(channel, connect)
    except DeviceError:
        made[0].close(abort=True)
        raise
    channel.nccl = made[0]
    return made[0]


def _told(channel: Channel, say: Callable[[], bytes]) -> list[bytes]:
    """Return what every rank says, or raise DeviceError on all if one cannot; collective."""
    fault: Exception | None = None
    try:
        data = b"\0" + say()
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must learn of it
        fault, data = error, f"\1{error}".encode(errors="replace")
    told = channel.gather(data, "connect their devices by NCCL")
    faults = [f"rank {rank}: {text[1:].decode()}" for rank, text in enumerate(told) if text[0]]
    if faults:
        raise DeviceError(f"algorithm 'nccl' cannot be used; {'; '.join(faults)}") from fault
    return [text[1:] for text in told]
