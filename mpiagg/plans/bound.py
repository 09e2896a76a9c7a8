"""Operations bound to arrays: the plans that run them again and again, and the programs that plans are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from mpiagg.arrays import EXACT, Accelerator, Array, accelerator_of, device_of, flat, same_memory
from mpiagg.plans.binding import Wire, bind
from mpiagg.plans.block_exchange import planned_blocks, serves_blocks
from mpiagg.plans.choices import BY_WAY_OF_HOST, NATIVE, NCCL, Choice, Memory
from mpiagg.plans.exact import bind_exact
from mpiagg.plans.moves import bind_moves, tag_of_calls, vectors_of
from mpiagg.plans.native import bind_native
from mpiagg.plans.nccl import bind_nccl
from mpiagg.plans.on_node import OnNode, reduces_in_place, serves
from mpiagg.plans.operation import Operation
from mpiagg.plans.plan import Plan, Result
from mpiagg.plans.program import Copying, Program
from mpiagg.plans.staging import by_way_of_host, from_host, to_host
from mpiagg.schedules import Action, Collective
from mpiagg.transport import SHARED_TAG, Channel

STAGED_BYTES: Final = 32 * 2**10
"""Vectors up to this length are copied into a plan's own buffer, which costs less than a plan for each address."""

COPIED_BYTES: Final = 2 * 2**20
"""Vectors up to this length are copied so while their address is new, which costs less than a plan that runs once."""

_ONE_WAY: Final = (Collective.REDUCE, Collective.EXSCAN)
"""Collectives in which some ranks only send vectors, or only receive them."""


def prepare(
    channel: Channel,
    operation: Operation,
    x: Array | None,
    out: Array | None,
    tag: int,
) -> Plan[Array | None]:
    """Return a plan that carries an operation out, from ``x`` to ``out``, each time it runs; made by all together."""
    return plan_of(channel, operation, bind_arrays(channel, operation, x, out, tag), out, in_order=False)


def plan_of(
    channel: Channel, operation: Operation, program: Program, result: Result, *, in_order: bool = True
) -> Plan[Result]:
    """Return the plan of an operation's program; that of a call, which all ranks make in one order, unless told."""
    subject = operation.subject(channel.log)
    return Plan(channel, program, result=result, label=operation.label, subject=subject, in_order=in_order)


def bind_arrays(
    channel: Channel,
    operation: Operation,
    x: Array | None,
    out: Array | None,
    tag: int = SHARED_TAG,
    *,
    memory: Memory = Memory.TOGETHER,
) -> Program:
    """Return the program of an operation, from ``x`` to ``out``.

    With a tag of its own the program is made by all ranks together, unless ``memory`` says that they do not wait for
    one another.

    Parameters
    ----------
    x, out : numpy.ndarray or None
        The input and the output, of any layout; the input may lie in the output. None where this rank has none.
    """
    o = operation
    x, out = None if o.source is None else x, None if o.target is None else out
    device = accelerator_of(x if out is None else out)
    if device is not None and goes_by_host(o):
        return _bind_by_way_of_host(channel, o, device, x, out, tag, memory)
    together = memory is Memory.TOGETHER
    if o.choice.algorithm == NATIVE and device is None and (vectors := _as_they_are(o, x, out)) is not None:
        return bind_native(channel.comm, o, *vectors)
    if o.collective.moves:
        made = vectors_of(o, x, out)
        return made.around(_bind_moves(channel, o, made.x, made.out, tag, memory))
    copying = partial(_copying, channel, o, x, out, together=together)
    if together and serves(channel, o, device):
        return _bind_on_node(OnNode(channel, o, x, out, copying, tag))
    copied = _with_fewer_copies(o, x, copying) if o.collective in _ONE_WAY else copying()
    return copied.around(bind_operation(channel, o, copied.buffer, tag, memory=memory))


def _bind_moves(  # noqa: PLR0917 - what bind_arrays is given
    channel: Channel, operation: Operation, x: Array | None, out: Array | None, tag: int, memory: Memory
) -> Program:
    """Return the program of an operation that moves chunks between two vectors."""
    o = operation
    if memory is Memory.TOGETHER and tag != SHARED_TAG and serves_blocks(channel, o, device_of(x)):
        assert x is not None  # as in every all-to-all
        assert out is not None

        def otherwise(name: str) -> Program:
            return _bind_moves(channel, replace(o, choice=Choice(name)), x, out, tag, Memory.NONE)

        return planned_blocks(channel, o, x, out, otherwise)
    if memory is Memory.TOGETHER and serves(channel, o, accelerator_of(x if out is None else out)):
        return _bind_on_node(OnNode(channel, o, x, out, partial(_copying, channel, o, x, out, together=True), tag))
    o = o if o.choice.unregistered is None else replace(o, choice=o.choice.in_other_memory)
    if o.choice.algorithm == NATIVE:
        return bind_native(channel.comm, o, x, out)
    return bind_moves(channel, o, x, out, tag_of_calls(channel, o) if tag == SHARED_TAG else tag)


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

    The buffer is of the dtype in which values are combined, or as :func:`reduces_in_place` says.

    With a wire, what the codec loses of this rank's contributions is left in ``residual``, if that is given. With a
    tag of its own the program is made by all ranks together, unless ``memory`` says that they do not wait for one
    another.
    """
    o, device = operation, accelerator_of(buffer)
    x, out = (None if part is None else buffer[part] for part in (o.source, o.target))
    if device is not None and goes_by_host(o):
        return _bind_by_way_of_host(channel, o, device, x, out, tag, memory)
    if o.choice.wire == EXACT:
        return bind_exact(channel, o, buffer, tag, memory, bind_operation)
    if o.choice.algorithm in (NATIVE, NCCL):
        return bind_nccl(channel, o, buffer) if o.choice.algorithm == NCCL else bind_native(channel.comm, o, x, out)
    if memory is Memory.TOGETHER and serves(channel, o, device):
        return _bind_on_node(OnNode(channel, o, x, out, lambda: Copying(buffer, None, None), tag))
    if o.collective.moves:
        return _bind_moves(channel, o, x, out, tag, Memory.NONE)
    if device is not None and o.choice.unregistered is not None:
        o = replace(o, choice=o.choice.in_other_memory)
    wire = None if o.choice.wire is None else Wire(device_of(buffer).codec(o.choice.wire), residual)
    tag = channel.tags.shared(o.signature) if tag == SHARED_TAG else tag
    return bind(channel, o.schedule(), buffer, o.lanes(), o.reduction, label=o.label, tag=tag, wire=wire, cut=o.cut)


def _bind_on_node(parts: OnNode) -> Program:
    return parts.planned() if parts.together else parts.called()


def _as_they_are(o: Operation, x: Array | None, out: Array | None) -> tuple[Array | None, Array | None] | None:
    """Return the arrays as the MPI library takes them, or None where they must be copied."""
    found = [None if part is None or part.dtype != o.reduction.dtype else flat(part) for part in (x, out)]
    return None if o.lacks(*found) else (found[0], found[1])


def _copying(channel: Channel, operation: Operation, x: Array | None, out: Array | None, *, together: bool) -> Copying:
    """Return the vector on which an operation is carried out: ``out`` if it can be that, else one of its own."""
    o, device = operation, device_of(x if out is None else out)
    mapped = _as_buffer(channel, o, out) if together else _of_own_dtype(o, out)
    buffer = device.empty(o.length, o.reduction.dtype) if mapped is None else mapped
    load = store = None
    if x is not None and o.source is not None and not same_memory(x, buffer[o.source].reshape(x.shape)):
        load = partial(device.convert, buffer[o.source].reshape(x.shape), x)
    if mapped is None and out is not None and o.target is not None:
        store = partial(device.convert, out, buffer[o.target].reshape(out.shape))
    return Copying(buffer, load, store, buffer.nbytes if mapped is None else 0)


def _with_fewer_copies(operation: Operation, x: Array | None, copying: Callable[[], Copying]) -> Copying:
    """Return the vector that messages work on: the input itself where it is only sent; nor is one copied in vain."""
    o = operation
    if x is None or not o.plainly_scheduled:
        return copying()
    actions = {step.action for a_round in o.schedule() for step in a_round}
    if actions == {Action.SEND} and o.target is None and x.dtype == o.reduction.dtype and (sent := flat(x)) is not None:
        return Copying(sent, None, None)
    return copying()._replace(load=None) if actions == {Action.RECEIVE} else copying()


def _as_buffer(channel: Channel, operation: Operation, out: Array | None) -> Array | None:
    """Return ``out`` as the operation's buffer, if it can be that."""
    own = _of_own_dtype(operation, out)
    if own is not None or out is None or out.dtype == operation.reduction.dtype or accelerator_of(out) is None:
        return own
    vector = flat(out)
    return vector if vector is not None and reduces_in_place(channel, operation, vector) else None


def _of_own_dtype(operation: Operation, out: Array | None) -> Array | None:
    """Return ``out`` as the operation's buffer, if it can be that, and is of the dtype in which values are combined."""
    if out is None or operation.target != slice(0, operation.length) or out.dtype != operation.reduction.dtype:
        return None
    return flat(out)


# -- devices


def goes_by_host(operation: Operation) -> bool:
    """Whether a vector of a device's is worked on in the host's memory as a whole."""
    o = operation
    short = o.nbytes <= BY_WAY_OF_HOST and o.choice.wire is None
    return o.choice.algorithm == NATIVE or (short and o.choice.algorithm != NCCL)


def _bind_by_way_of_host(  # noqa: PLR0917 - what bind_arrays and bind_operation are given
    channel: Channel,
    operation: Operation,
    device: Accelerator,
    x: Array | None,
    out: Array | None,
    tag: int,
    memory: Memory,
) -> Program:
    """Return the program of an operation on pinned memory, with copies of the input to it and of the output from it."""
    o, twin = operation, pinned(operation, device)
    program = bind_operation(channel, o, twin, tag, memory=memory)
    load = None if x is None or o.source is None else partial(to_host, device, twin[o.source], x)
    store = None if out is None or o.target is None else partial(from_host, device, out, twin[o.target])
    return by_way_of_host(device, load, program, store, o.label)


def pinned(operation: Operation, device: Accelerator) -> Array:
    """Return a vector for an operation in the host's memory that the device copies from and to."""
    dtype = operation.reduction.dtype
    vector: Array = device.pinned(operation.length * dtype.itemsize).view(dtype)
    return vector
