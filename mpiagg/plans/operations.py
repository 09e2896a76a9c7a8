"""Carrying operations out, between arrays.

Both faces, the array functions and the communicator, describe their calls as operations and run or plan them here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
from mpi4py import MPI

from mpiagg.arrays import (
    HOST,
    Accelerator,
    Array,
    Device,
    accelerator_of,
    address,
    device_of,
    flat,
    same_memory,
    scratch,
)
from mpiagg.plans.binding import Wire, bind
from mpiagg.plans.choices import BY_WAY_OF_HOST, NATIVE, NCCL, Memory
from mpiagg.plans.nccl import bind_nccl
from mpiagg.plans.on_node import bind_on_node, folds_as_it_is, serves
from mpiagg.plans.operation import Operation
from mpiagg.plans.plan import Plan, Result, find_plan
from mpiagg.plans.program import Awaited, BoundRound, Program, in_turn
from mpiagg.plans.staging import by_way_of_host, from_host, to_host
from mpiagg.schedules import Collective, send
from mpiagg.transport import DEFAULT_TIMEOUT, SHARED_TAG, Channel, process
from mpiagg.watch import done, failed

STAGED_BYTES: Final = 32 * 2**10
"""Vectors up to this length are copied into a plan's own buffer, which costs less than a plan for each address."""


def run(
    channel: Channel, operation: Operation, x: Array | None, out: Array | None, timeout: float = DEFAULT_TIMEOUT
) -> None:
    """Carry an operation out, from ``x`` to ``out``, by a plan that is kept for the next such call.

    Parameters
    ----------
    x : numpy.ndarray or None
        The input, of any layout, which may lie in ``out``; None where this rank has none.
    out : numpy.ndarray or None
        The output, of any layout; None where this rank has none.
    timeout : float
        Seconds that a wait may last without any message completing.
    """
    accelerator = accelerator_of(x if out is None else out)
    if accelerator is not None and _goes_by_host(operation):
        _run_by_way_of_host(channel, operation, accelerator, x, out, timeout)
        return
    device = accelerator or HOST
    native = operation.choice.algorithm == NATIVE
    staged = operation.nbytes <= STAGED_BYTES and accelerator is None and not native
    mapped = None if staged else _mapped(channel, operation, out)
    # Once ranks map each other's devices, other plans are right, on all of them at the same call.
    where = None if accelerator is None else (device.name, channel.device_memory is not None)
    if native:
        buffer = _own_buffer(operation, device) if mapped is None else mapped
        call: Callable[[], object] = partial(_call_native, channel, operation, buffer, timeout)
    elif mapped is None:
        make = partial(_plan_on_own_buffer, channel, operation, device)
        call = plan = find_plan(channel, (operation.key, where), make)
        buffer, plan.timeout = plan.result, timeout
    else:
        place = address(mapped)
        make = partial(_plan_on_borrowed_memory, channel, operation, device, place, mapped.dtype)
        call = plan = find_plan(channel, (operation.key, where, place, mapped.dtype), make)
        buffer, plan.timeout = plan.result, timeout
    if not (mapped is not None and _lies_in(x, buffer, operation.source)):
        _fill(operation, device, buffer, x)
    call()
    if mapped is None:
        _drain(operation, device, buffer, out)
        if accelerator is not None:
            accelerator.synchronise()


def _run_by_way_of_host(  # noqa: PLR0917 - what run is given
    channel: Channel, operation: Operation, device: Accelerator, x: Array | None, out: Array | None, timeout: float
) -> None:
    """Carry an operation out on pinned memory; the device copies in and out of that, and no more."""
    if operation.choice.algorithm == NATIVE:
        buffer = _pinned_buffer(operation, device)
        call: Callable[[], object] = partial(_call_native, channel, operation, buffer, timeout)
    else:
        make = partial(_plan_on_pinned_memory, channel, operation, device)
        call = plan = find_plan(channel, (operation.key, device.name, "host"), make)
        buffer, plan.timeout = plan.result, timeout
    if x is not None and operation.source is not None:
        to_host(device, buffer[operation.source], x)
        device.synchronise()
    call()
    if out is not None and operation.target is not None:
        from_host(device, out, buffer[operation.target])
        device.synchronise()


def prepare(
    channel: Channel,
    operation: Operation,
    x: Array | None,
    out: Array | None,
    tag: int,
    *,
    memory: Memory = Memory.TOGETHER,
) -> Plan[Array | None]:
    """Return a plan that carries an operation out, from ``x`` to ``out``, each time it runs."""
    accelerator = accelerator_of(x if out is None else out)
    if accelerator is not None and _goes_by_host(operation):
        program = _bind_by_way_of_host(channel, operation, accelerator, x, out, tag, memory)
        return _plan(channel, operation, program, out)
    mapped = _mapped(channel, operation, out) if memory is Memory.TOGETHER else _own_dtype(operation, out)
    device = accelerator or HOST
    buffer = _own_buffer(operation, device) if mapped is None else mapped
    load = None if _lies_in(x, buffer, operation.source) else partial(_fill, operation, device, buffer, x)
    store = None if out is None or mapped is not None else partial(_drain, operation, device, buffer, out)
    program = in_turn(load, bind_operation(channel, operation, buffer, tag, memory=memory), store)
    return _plan(channel, operation, program, out)


def bind_operation(
    channel: Channel,
    operation: Operation,
    buffer: Array,
    tag: int = SHARED_TAG,
    *,
    residual: Array | None = None,
    memory: Memory = Memory.TOGETHER,
) -> Program:
    """Return the program of an operation, in place on a buffer of its length.

    The buffer is of the dtype in which values are combined, or as :func:`folds_as_it_is` says.

    With a wire, what the codec loses of this rank's contributions is left in ``residual``, if that is given. With a
    tag of its own the program is made by all ranks together, unless ``memory`` says that they do not wait for one
    another.
    """
    o, device = operation, accelerator_of(buffer)
    if device is not None and _goes_by_host(o):
        x, out = (None if part is None else buffer[part] for part in (o.source, o.target))
        return _bind_by_way_of_host(channel, o, device, x, out, tag, memory)
    if o.choice.algorithm == NATIVE:
        return _bind_native(channel.comm, o, buffer)
    if o.choice.algorithm == NCCL:
        return bind_nccl(channel, o, buffer)
    if memory is Memory.TOGETHER and serves(channel, o, buffer):
        return bind_on_node(channel, o, buffer, tag)
    if device is not None and o.choice.elsewhere is not None:
        o = replace(o, choice=o.choice._replace(algorithm=o.choice.elsewhere, elsewhere=None))
    wire = None if o.choice.wire is None else Wire(device_of(buffer).codec(o.choice.wire), residual)
    tag = channel.tags.shared(o.signature) if tag == SHARED_TAG else tag
    return bind(channel, o.schedule(), buffer, o.lanes(), o.reduction, label=o.label, tag=tag, wire=wire)


def _plan_in_place(channel: Channel, operation: Operation, buffer: Array) -> Plan[Array]:
    return _plan(channel, operation, bind_operation(channel, operation, buffer), buffer)


def _plan(channel: Channel, operation: Operation, program: Program, result: Result) -> Plan[Result]:
    return Plan(channel, program, result=result, label=operation.label, subject=operation.subject(channel.trail))


def _plan_on_own_buffer(channel: Channel, operation: Operation, device: Device) -> Plan[Array]:
    return _plan_with_memory(channel, operation, _own_buffer(operation, device))


def _plan_on_pinned_memory(channel: Channel, operation: Operation, device: Accelerator) -> Plan[Array]:
    return _plan_with_memory(channel, operation, _pinned_buffer(operation, device))


def _plan_with_memory(channel: Channel, operation: Operation, buffer: Array) -> Plan[Array]:
    """Return a plan on a buffer that belongs to it alone."""
    plan = _plan_in_place(channel, operation, buffer)
    plan.nbytes += buffer.nbytes
    return plan


def _plan_on_borrowed_memory(
    channel: Channel, operation: Operation, device: Device, place: int, dtype: np.dtype[Any]
) -> Plan[Array]:
    # The plan outlives the caller's array and must not keep it alive. It only touches the memory again when a
    # call comes with an array in the same place.
    memory = device.borrow(place, operation.length, dtype)
    return _plan_in_place(channel, operation, memory)


def _own_buffer(operation: Operation, device: Device) -> Array:
    return device.empty(operation.length, operation.reduction.dtype)


def _pinned_buffer(operation: Operation, device: Accelerator) -> Array:
    return device.pinned(operation.nbytes).view(operation.reduction.dtype)


def _goes_by_host(operation: Operation) -> bool:
    """Whether a vector of a device's is worked on in the host's memory as a whole."""
    o = operation
    short = o.nbytes <= BY_WAY_OF_HOST and o.choice.wire is None
    return o.choice.algorithm == NATIVE or (short and o.choice.algorithm != NCCL)


def _bind_by_way_of_host(  # noqa: PLR0917 - what prepare and bind_operation are given
    channel: Channel,
    operation: Operation,
    device: Accelerator,
    x: Array | None,
    out: Array | None,
    tag: int,
    memory: Memory,
) -> Program:
    """Return the program of an operation on pinned memory, with copies of the input to it and of the output from it."""
    o, twin = operation, _pinned_buffer(operation, device)
    program = bind_operation(channel, o, twin, tag, memory=memory)
    load = None if x is None or o.source is None else partial(to_host, device, twin[o.source], x)
    store = None if out is None or o.target is None else partial(from_host, device, out, twin[o.target])
    return by_way_of_host(device, load, program, store, o.label)


def _mapped(channel: Channel, operation: Operation, out: Array | None) -> Array | None:
    """Return ``out`` as the operation's buffer, if it can be that."""
    own = _own_dtype(operation, out)
    if own is not None or out is None or out.dtype == operation.reduction.dtype or accelerator_of(out) is None:
        return own
    vector = flat(out)
    return vector if vector is not None and folds_as_it_is(channel, operation, vector) else None


def _own_dtype(operation: Operation, out: Array | None) -> Array | None:
    """Return ``out`` as the operation's buffer, if it can be that, and is of the dtype in which values are combined."""
    if out is None or operation.target != slice(0, operation.length) or out.dtype != operation.reduction.dtype:
        return None
    return flat(out)


def _lies_in(x: Array | None, buffer: Array, source: slice | None) -> bool:
    """Whether there is no input to bring into the buffer."""
    if x is None or source is None:
        return True
    return same_memory(x, buffer[source].reshape(x.shape))


def _fill(operation: Operation, device: Device, buffer: Array, x: Array | None) -> None:
    """Bring the input into the buffer."""
    if x is not None and operation.source is not None:
        device.convert(buffer[operation.source].reshape(x.shape), x)


def _drain(operation: Operation, device: Device, buffer: Array, out: Array | None) -> None:
    """Bring the output out of the buffer."""
    if out is not None and operation.target is not None:
        device.convert(out, buffer[operation.target].reshape(out.shape))


# -- the MPI library's own collectives


def _call_native(channel: Channel, operation: Operation, buffer: Array, timeout: float) -> None:
    """Carry the operation out in place by the MPI library's blocking collective."""
    subject = operation.subject(channel.trail)
    subject.unleavable = timeout
    entry = process().recorder.begin(subject, True)
    try:
        _native(channel.comm, operation, buffer)
    except BaseException as error:
        failed(entry)
        channel.failures.raise_for(error)
        raise
    done(entry)
    _finish_native(operation, buffer)


def _native(comm: MPI.Intracomm, operation: Operation, buffer: Array) -> None:
    o, at_root = operation, operation.rank == operation.root
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
    return Program((a_round,), (request.Free,), sent.nbytes)


def _as_bytes(buffer: Array) -> Array:
    """Return the buffer as bytes: what is only moved may be of a dtype that MPI does not know."""
    return buffer.view(np.uint8)


def _byte_counts(operation: Operation) -> list[int]:
    return [count * operation.reduction.dtype.itemsize for count in operation.counts]


def _finish_native(operation: Operation, buffer: Array) -> None:
    if operation.collective.reduces and operation.target is not None:
        operation.reduction.finish(buffer[operation.target])
