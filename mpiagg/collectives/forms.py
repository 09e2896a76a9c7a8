"""The three forms of a communicator's methods: at once, as a request, and as a persistent request.

What was worked out for a call is found again by what it was passed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from mpi4py import MPI

from mpiagg.collectives.asked import Arrays, Asked, arrays_of
from mpiagg.collectives.keys import NO_KEY
from mpiagg.collectives.methods import Method
from mpiagg.collectives.packed import Packed, packed
from mpiagg.collectives.request_lines import RequestLine
from mpiagg.collectives.requests import Prequest, Request
from mpiagg.plans.background import threads_allowed
from mpiagg.plans.bound import bind_arrays, plan_of
from mpiagg.plans.call import Call
from mpiagg.plans.choices import NATIVE, Memory
from mpiagg.plans.learning import resolve
from mpiagg.plans.operation import Operation
from mpiagg.plans.plan import Plan
from mpiagg.plans.program import Program
from mpiagg.plans.recorded import Unread
from mpiagg.plans.started import kept_plan
from mpiagg.transport import CHECK, Channel, FreedAfterUse

if TYPE_CHECKING:
    from mpiagg.collectives.comm import Comm

Forms = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]


def run(method: Method, given: tuple[Any, ...]) -> None:
    """Carry a method out at once; it is given the communicator and its arguments, as one tuple, which costs least."""
    try:
        call: Any = given[0]._channel.calls[method.key(given)]  # noqa: SLF001 - of Comm, whose methods these are
    except (KeyError, *NO_KEY):
        call = None
    if call is None:
        _run_first(method, given)
        return
    if CHECK:
        call.check()
    call.used = True
    if call.given_as_it_is:
        call.record(method.now, given)
    else:
        _run(call, given)


def _run_first(method: Method, given: tuple[Any, ...]) -> None:
    """Carry out what has not come before, and keep what it is resolved into: of the MPI library's what did not fail."""
    call = _resolved(method, given)
    if not call.given_as_it_is:
        _run(call, given)
        return
    try:
        call.record(method.now, given)
        _keep(call, method, given)
    finally:
        if call.once:
            call.free()


def _run(call: Any, given: tuple[Any, ...]) -> None:
    """Run a call with the vectors of arguments."""
    x, out = arrays_of(call.vectors, given)
    try:
        call.run(x, out)
    finally:
        if call.once:
            call.free()


class _OnCopies(FreedAfterUse):
    """A call of a method whose arguments are copied to vectors, unless it is for the MPI library as it came.

    Parameters
    ----------
    method : Method
    channel : Channel
    copied : Packed
        The copies.
    given : tuple
        The communicator and the arguments.
    """

    given_as_it_is = True

    def __init__(self, method: Method, channel: Channel, copied: Packed, given: tuple[Any, ...]) -> None:
        super().__init__()
        self._method, self._channel, self._copied = method, channel, copied
        self._key: Hashable = None
        with suppress(*NO_KEY):
            self._key = method.key(copied.given(given))  # the same each time

    @property
    def nbytes(self) -> int:
        """The memory of the vectors."""
        return self._copied.nbytes

    def check(self) -> None:
        """Do nothing: the call with the vectors is checked."""

    def record(self, now: Callable[..., object], given: tuple[Any, ...]) -> None:
        """Make the call."""
        channel, copied = self._channel, self._copied
        call: Any = channel.calls.get(self._key)
        self.begin_use()  # with its vectors it may take all room, so that it is forgotten itself
        try:
            if call is None:
                call = _resolved(self._method, copied.given(given))
            elif CHECK:
                call.check()
            call.used = True
            if call.given_as_it_is:
                call.record(now, given)
                if call.once:
                    _keep(call, self._method, copied.given(given))
            else:
                with channel.one_thread:  # the vectors belong to the call
                    copied.load(given)
                    _run(call, copied.given(given))
                    copied.store(given)
        finally:
            self.end_use()

    def give_back(self) -> None:
        """Give back the datatypes."""
        self._copied.free()


def _read(method: Method, channel: Channel, given: tuple[Any, ...]) -> tuple[Asked | None, Packed | None]:
    """Return what a method's arguments ask for, and the copies with which it can be carried out, if it needs some."""
    asked = method.read(channel, given)
    if asked is not None or not method.buffers or (copied := packed(channel, method.buffers, given)) is None:
        return asked, None
    asked = method.read(channel, copied.given(given))
    if asked is None:
        copied.free()
    return asked, copied


def _resolved(method: Method, given: tuple[Any, ...]) -> Any:
    """Return the call of a method, and keep it for the next one that is given the same, if it is ours."""
    comm = given[0]
    if not comm:
        method.now(*given)  # which says what is wrong
    channel = comm._open()  # noqa: SLF001 - of Comm, whose methods these are
    asked, copied = _read(method, channel, given)
    call: Any
    if asked is None:
        call = Unread(channel, method.name, method.unread(channel, given))
        if CHECK:
            call.check()
    elif copied is not None:
        call = _OnCopies(method, channel, copied, given)
    else:
        vectors, arrays = asked.taken_from(given)
        operation = asked.operation(channel, arrays=arrays)
        if CHECK:  # before anything is made that ranks make together
            channel.agree(operation.description)
        call = resolve(channel, operation, *arrays, quiet=True)
        call.vectors = vectors
        if asked.alone:  # another operator may have the handle of one that was freed
            return call
    if not call.given_as_it_is:
        _keep(call, method, given)
    return call


def _keep(call: Any, method: Method, given: tuple[Any, ...]) -> None:
    """Keep a call for the next one that is given the same."""
    with suppress(*NO_KEY):
        call.once = given[0]._channel.calls.find(method.key(given), lambda: call) is not call  # noqa: SLF001 - of Comm


class _Found(NamedTuple):
    """What a rank is about to do, in words, and what its plan is made of, unless that is for the MPI library.

    With a key, the next call that is like it may have the same plan.
    """

    words: str
    operation: Operation | None = None
    arrays: Arrays = (None, None)
    copied: Packed | None = None
    key: Hashable = None

    def plan(self, channel: Channel, program: Program, given: tuple[Any, ...], *, in_order: bool) -> Plan[Any]:
        """Return a plan of the program, with the copies before and after it."""
        assert self.operation is not None
        if self.copied is not None:
            program = self.copied.around(program, given)
        return plan_of(channel, self.operation, program, None, in_order=in_order)


def started(comm: Comm, method: Method, *given: Any) -> MPI.Request:
    """Start a method."""
    channel = _driven(comm)
    if channel is None:
        return method.start(comm, *given)
    found = _find(channel, method, (comm, *given), Memory.NONE)
    if found.operation is None:
        return method.start(comm, *given)
    operation, (x, out) = found.operation, found.arrays
    tag = channel.tags.of_next_line(operation.signature)
    line = channel.lines.get(tag)
    if line is None:
        line = channel.lines[tag] = RequestLine(channel.log)
    if found.key is None:
        program = bind_arrays(channel, operation, x, out, tag, memory=Memory.NONE)
        plan = found.plan(channel, program, (comm, *given), in_order=True)
        plan.by_messages = plan.lasts = True
        return Request(plan, line)
    return Request(kept_plan(channel, operation, x, out, found.key, tag).on(x, out), line)


def prepared(comm: Comm, method: Method, info: MPI.Info, *given: Any) -> MPI.Prequest:
    """Prepare a method; ranks compare what they prepare, and those that share memory set it up together."""
    channel = _driven(comm)
    if channel is None:
        return method.init(comm, *given, info)
    channel.memory.signatures()  # made by all ranks together, at the first call of any kind
    here: list[_Found] = []

    def say() -> str:
        here.append(_find(channel, method, (comm, *given), Memory.TOGETHER))
        return here[0].words

    try:
        channel.agree_on(say)
    except Exception:
        for copied in (each.copied for each in here if each.copied is not None):
            copied.free()
        raise
    (found,) = here
    if found.operation is None:
        return method.init(comm, *given, info)
    tag = channel.tags.in_turn(found.operation.choice.lanes, found.operation.signature)
    program = bind_arrays(channel, found.operation, *found.arrays, tag)
    return Prequest(found.plan(channel, program, (comm, *given), in_order=False))


def _driven(comm: Comm) -> Channel | None:
    """Return the channel of a communicator whose plans a thread can drive; None if requests are the MPI library's."""
    if not comm or not threads_allowed():
        return None
    return comm._open()  # noqa: SLF001 - of Comm, whose methods these are


def _find(channel: Channel, method: Method, given: tuple[Any, ...], memory: Memory) -> _Found:
    """Return what a plan of a method is made of; all ranks ask for theirs in the same order."""
    key: Hashable = None
    known: Any = None
    with suppress(*NO_KEY):
        whole = memory, channel.memory.host.leased, method.key(given)
        known = channel.calls.get(whole)
        key = whole
    if known is not None:
        known.used = True
        if known.given_as_it_is:
            return _handed_on(method, known)
        return _Found(known.words, known.operation, arrays_of(known.vectors, given), None, key)
    asked, copied = _read(method, channel, given)
    if asked is None:
        known = Unread(channel, method.name, method.unread(channel, given))
    else:
        with_vectors = given if copied is None else copied.given(given)
        vectors, arrays = asked.taken_from(with_vectors)
        known = Call(channel, asked.operation(channel, memory, arrays=arrays, at_once=False))
        known.vectors = vectors
        native = known.operation.choice.algorithm == NATIVE and known.dtype == known.operation.reduction.dtype
        known.given_as_it_is = native and not asked.alone
    if asked is not None and (asked.alone or (copied is not None and not known.given_as_it_is)):
        key = None
    if key is not None:
        channel.calls.find(key, lambda: known)
    if not known.given_as_it_is:
        return _Found(known.words, known.operation, arrays, copied, key)
    if copied is not None:
        copied.free()
    return _handed_on(method, known)


def _handed_on(method: Method, known: Any) -> _Found:
    """Return what is for the MPI library: ranks may describe the same data in ways of which one alone can be read."""
    return _Found(known.words if CHECK else f"{method.name} by the MPI library")


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
