"""The three forms of a communicator's methods: at once, as a request, and as a persistent request.

What was worked out for a call is found again by what it was passed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpiagg.collectives.asked import Arrays, Asked
from mpiagg.collectives.methods import Method
from mpiagg.collectives.packed import Packed, packed
from mpiagg.collectives.requests import Prequest, Request
from mpiagg.plans.background import threads_allowed
from mpiagg.plans.bound import bind_arrays, plan_of
from mpiagg.plans.call import Call
from mpiagg.plans.choices import NATIVE, Memory
from mpiagg.plans.learning import resolve
from mpiagg.plans.plan import Plan
from mpiagg.plans.recorded import Unread
from mpiagg.transport import CHECK, Channel

if TYPE_CHECKING:
    from mpiagg.collectives.comm import Comm

Forms = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]


def run(method: Method, given: tuple[Any, ...]) -> None:
    """Carry a method out at once; it is given the communicator and its arguments, as one tuple, which costs least."""
    try:
        calls = given[0]._channel.calls  # noqa: SLF001 - of Comm, whose methods these are
        call: Any = calls[method.key(given)]
        if not call.given_as_it_is and method.exact is not method.key:
            call.used = True
            call = calls[method.exact(given)]
        if CHECK:
            call.check()
    except (AttributeError, IndexError, KeyError, TypeError):
        call = _resolved(method, given)
    call.used = True
    if call.given_as_it_is:
        call.record(method.now, given)
    else:
        x, out = method.arrays(call.channel, call.dtype, given)
        try:
            call.run(x, out)
        finally:
            if call.once:
                call.free()


class _OnCopies:
    """A call of a method whose arguments are copied to vectors, unless it is for the MPI library as it came.

    Parameters
    ----------
    method : Method
    call : Call
        The same call with vectors.
    copied : Packed
        The copies.
    """

    given_as_it_is = used = True

    def __init__(self, method: Method, call: Any, copied: Packed) -> None:
        self._method, self._call, self._copied = method, call, copied

    def record(self, now: Callable[..., object], given: tuple[Any, ...]) -> None:
        """Make the call, once."""
        call, copied = self._call, self._copied
        try:
            if call.given_as_it_is:
                call.record(now, given)
            else:
                copied.load()
                call.run(*self._method.arrays(call.channel, call.dtype, copied.given))
                copied.store()
        finally:
            copied.free()
            if call.once:
                call.free()


def _read(method: Method, channel: Channel, given: tuple[Any, ...]) -> tuple[Asked | None, Packed | None]:
    """Return what a method's arguments ask for, and the copies with which it can be carried out, if it needs some."""
    asked = method.read(channel, *given[1:])
    if asked is not None or not method.buffers or (copied := packed(channel, method.buffers, given)) is None:
        return asked, None
    asked = method.read(channel, *copied.given[1:])
    if asked is None:
        copied.free()
    return asked, copied


def _resolved(method: Method, given: tuple[Any, ...]) -> Any:
    """Return the call of a method, and keep it for the next one that is given the same."""
    comm = given[0]
    if not comm:
        method.now(*given)  # which says what is wrong
    channel = comm._open()  # noqa: SLF001 - of Comm, whose methods these are
    asked, copied = _read(method, channel, given)
    if asked is None:
        if CHECK:
            channel.agree(method.unread(channel, given))
        return Unread(channel, method.name)
    given = given if copied is None else copied.given
    arrays = method.arrays(channel, asked.dtype, given)
    operation = asked.operation(channel, arrays=arrays)
    if CHECK:  # before anything is made that ranks make together
        channel.agree(operation.description)
    call = resolve(channel, operation, *arrays, quiet=True)
    if asked.alone:  # another operator may have the handle of one that was freed
        return call
    with suppress(AttributeError, IndexError, TypeError):  # what cannot be a key
        key, exact = method.key(given), method.exact(given)
        if key != exact and not call.given_as_it_is:
            channel.calls.find(key, lambda: Call(channel, operation))  # which says no more than to look further
        kept = channel.calls.find(key if call.given_as_it_is else exact, lambda: call)
        if kept is not call and kept.__class__ is call.__class__:  # it was still there, only the way to it was not
            call.free()
            call = kept
        call.once = kept is not call
    return call if copied is None else _OnCopies(method, call, copied)


def started(comm: Comm, method: Method, *given: Any) -> MPI.Request:
    """Start a method."""
    plan = _plan(comm, method, given, Memory.NONE)
    return method.start(comm, *given) if plan is None else Request(plan)


def prepared(comm: Comm, method: Method, info: MPI.Info, *given: Any) -> MPI.Prequest:
    """Prepare a method; ranks that share memory wait for one another to set it up."""
    plan = _plan(comm, method, given, Memory.TOGETHER)
    return method.init(comm, *given, info) if plan is None else Prequest(plan)


def _plan(comm: Comm, method: Method, given: tuple[Any, ...], memory: Memory) -> Plan[Any] | None:
    """Return a plan that carries a method out, if a thread can drive it; None if that is for the MPI library.

    All ranks ask for theirs in the same order.
    """
    if not comm or not threads_allowed():
        return None
    channel = comm._open()  # noqa: SLF001 - of Comm, whose methods these are
    key: Hashable = None
    known: Any = None
    with suppress(AttributeError, IndexError, TypeError):  # what cannot be a key
        whole = memory, channel.memory.host.leased, method.exact((comm, *given))
        known = channel.calls.get(whole)
        key = whole
    arrays: Arrays | None = None
    copied: Packed | None = None
    alone = False
    if known is None:
        asked, copied = _read(method, channel, (comm, *given))
        if asked is None:
            return None
        if copied is not None:
            given, key = copied.given[1:], None
        arrays = method.arrays(channel, asked.dtype, (comm, *given))
        known = Call(channel, asked.operation(channel, memory, arrays=arrays, at_once=False))
        alone = asked.alone
        if key is not None and not alone:
            channel.calls.find(key, lambda: known)
    known.used, operation = True, known.operation
    if operation.choice.algorithm == NATIVE and known.dtype == operation.reduction.dtype and not alone:
        if copied is not None:
            copied.free()
        return None
    if arrays is None:
        arrays = method.arrays(channel, known.dtype, (comm, *given))
    tag = channel.tags.in_turn(operation.choice.lanes, operation.signature)
    program = bind_arrays(channel, operation, *arrays, tag, memory=memory)
    program = program if copied is None else copied.around(program)
    return plan_of(channel, operation, program, arrays[1], in_order=memory is Memory.NONE)


# -- the methods that are alike: the buffers, and an operator or a root


def of_one_buffer(method: Method) -> Forms:
    """Return the forms of a method that takes one buffer and a root."""

    def now(self: Comm, buf: Any, root: int = 0) -> None:
        run(method, (self, buf, root))

    def start(self: Comm, buf: Any, root: int = 0) -> MPI.Request:
        return started(self, method, buf, root)

    def init(self: Comm, buf: Any, root: int = 0, info: MPI.Info = MPI.INFO_NULL) -> MPI.Prequest:
        return prepared(self, method, info, buf, root)

    return now, start, init


def of_two_buffers(method: Method) -> Forms:
    """Return the forms of a method that takes two buffers."""

    def now(self: Comm, sendbuf: Any, recvbuf: Any) -> None:
        run(method, (self, sendbuf, recvbuf))

    def start(self: Comm, sendbuf: Any, recvbuf: Any) -> MPI.Request:
        return started(self, method, sendbuf, recvbuf)

    def init(self: Comm, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL) -> MPI.Prequest:
        return prepared(self, method, info, sendbuf, recvbuf)

    return now, start, init


def with_root(method: Method) -> Forms:
    """Return the forms of a method that takes two buffers and a root."""

    def now(self: Comm, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        run(method, (self, sendbuf, recvbuf, root))

    def start(self: Comm, sendbuf: Any, recvbuf: Any, root: int = 0) -> MPI.Request:
        return started(self, method, sendbuf, recvbuf, root)

    def init(self: Comm, sendbuf: Any, recvbuf: Any, root: int = 0, info: MPI.Info = MPI.INFO_NULL) -> MPI.Prequest:
        return prepared(self, method, info, sendbuf, recvbuf, root)

    return now, start, init


def with_op(method: Method) -> Forms:
    """Return the forms of a method that takes two buffers and an operator."""

    def now(self: Comm, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
        run(method, (self, sendbuf, recvbuf, op))

    def start(self: Comm, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> MPI.Request:
        return started(self, method, sendbuf, recvbuf, op)

    def init(
        self: Comm, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, info: MPI.Info = MPI.INFO_NULL
    ) -> MPI.Prequest:
        return prepared(self, method, info, sendbuf, recvbuf, op)

    return now, start, init


def with_op_and_root(method: Method) -> Forms:
    """Return the forms of a method that takes two buffers, an operator and a root."""

    def now(self: Comm, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, root: int = 0) -> None:
        run(method, (self, sendbuf, recvbuf, op, root))

    def start(self: Comm, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, root: int = 0) -> MPI.Request:
        return started(self, method, sendbuf, recvbuf, op, root)

    def init(  # noqa: PLR0917 - mpi4py's
        self: Comm,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        root: int = 0,
        info: MPI.Info = MPI.INFO_NULL,
    ) -> MPI.Prequest:
        return prepared(self, method, info, sendbuf, recvbuf, op, root)

    return now, start, init
