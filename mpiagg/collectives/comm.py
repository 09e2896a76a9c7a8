"""A communicator of mpi4py's whose collectives run by the schedules of this package, or as the MPI library has them.

Each method says what it is called with; what becomes of it is one of three functions here: at once, as a request, or
as a persistent request. What was worked out for a call is found again by what it was passed.
"""

# ruff: noqa: N802 - the names are mpi4py's

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpiagg.collectives import methods
from mpiagg.collectives.methods import Method
from mpiagg.collectives.requests import Prequest, Request
from mpiagg.common.arguments import check_flag
from mpiagg.errors import RankFailedError
from mpiagg.plans.background import threads_allowed
from mpiagg.plans.bound import prepare
from mpiagg.plans.calls import Barrier, Call, resolve
from mpiagg.plans.choices import NATIVE, Memory
from mpiagg.plans.plan import Plan
from mpiagg.plans.recorded import Unread
from mpiagg.transport import CHECK, Channel, channel_of, free_channel_of, meet
from mpiagg.transport.failures import all_agree, survivors

if TYPE_CHECKING:
    from mpi4py.typing import BufSpec, BufSpecB, InPlace
    from typing_extensions import Self


class Comm(MPI.Intracomm):
    """A private duplicate of a communicator, whose collectives are hand-written; the rest is mpi4py's own.

    ``Allreduce``, ``Reduce``, ``Bcast``, ``Allgather``, ``Reduce_scatter_block``, ``Reduce_scatter`` and ``Barrier``,
    their ``I...`` forms and their ``..._init`` forms take what mpi4py's take, mean the same and raise the same errors.
    Communicators made from this one are of its class too. ``Free`` gives back what belongs to it.

    Parameters
    ----------
    comm : MPI.Intracomm, optional
        The communicator to duplicate, which is collective; a null communicator without it.
    reproducible : bool, optional
        Whether all collectives run by our own schedules, so that each result has the bits that :func:`mpiagg.simulate`
        computes. By default, or where the environment variable ``MPIAGG_REPRODUCIBLE`` is not 1, the MPI library's own
        collective is taken where it was measured to be faster, but for all-reductions of floating-point numbers, which
        have the same bits on all ranks. It is the same on all ranks, and passed on to communicators made from this one.

    Raises
    ------
    TypeError
        If ``comm`` is not an intracommunicator.
    MismatchError
        On all ranks, if they disagree on ``reproducible``.

    Notes
    -----
    The ``I...`` and ``..._init`` forms go on by themselves while the program computes; a thread drives them. Without an
    MPI library that was initialised for ``MPI.THREAD_MULTIPLE``, which is mpi4py's default, they are the library's own.
    """

    _channel: Channel
    _reproducible = False

    def __new__(cls, comm: MPI.Comm | None = None, *, reproducible: bool | None = None) -> Self:
        """Duplicate the communicator."""
        plain = MPI.Intracomm(comm)
        if reproducible is None:
            reproducible = isinstance(comm, Comm) and comm._reproducible  # noqa: SLF001 - of this class
        check_flag("reproducible", reproducible)
        if plain:
            meet(plain, "Comm")
        return cls._of(plain.Dup() if plain else plain, reproducible)

    @classmethod
    def _of(cls, plain: MPI.Comm, reproducible: bool) -> Self:
        """Return a communicator that nobody else holds as one of this class."""
        self = super().__new__(cls, plain)
        self._reproducible = reproducible
        if self:
            # Here, since all ranks are here: a nonblocking call must not have to wait for that, and threads that have a
            # communicator each could not make shared memory at the same time, which Open MPI does not bear.
            self._open().memory.signatures()
        return self

    def _open(self) -> Channel:
        """Return what messages of the collectives travel on; the first call makes it, and is collective."""
        self._channel = channel_of(self, reproducible=self._reproducible)
        return self._channel

    # -- communicators made from this one

    def Dup(self, info: MPI.Info | None = None) -> Self:
        """Duplicate the communicator."""
        meet(self, "Dup")
        return self._of(super().Dup(info), self._reproducible)

    def Clone(self) -> Self:
        """Duplicate the communicator."""
        meet(self, "Clone")
        return self._of(super().Clone(), self._reproducible)

    def Idup(self, info: MPI.Info | None = None) -> tuple[Self, MPI.Request]:
        """Start to duplicate the communicator."""
        twin, request = super().Idup(info)
        twin._reproducible = self._reproducible  # noqa: SLF001 - of this class
        return twin, request

    def Dup_with_info(self, info: MPI.Info) -> Self:
        """Duplicate the communicator with hints."""
        meet(self, "Dup_with_info")
        return self._of(super().Dup_with_info(info), self._reproducible)

    def Create(self, group: MPI.Group) -> Self:
        """Create a communicator from a group."""
        meet(self, "Create")
        return self._of(super().Create(group), self._reproducible)

    def Create_group(self, group: MPI.Group, tag: int = 0) -> Self:
        """Create a communicator from a group; collective over the group alone."""
        return self._of(super().Create_group(group, tag), self._reproducible)

    def Split(self, color: int = 0, key: int = 0) -> Self:
        """Split the communicator by color and key."""
        meet(self, "Split")
        return self._of(super().Split(color, key), self._reproducible)

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> Self:
        """Split the communicator by where its ranks are."""
        meet(self, "Split_type")
        return self._of(super().Split_type(split_type, key, info), self._reproducible)

    def Free(self) -> None:
        """Free the communicator and all that is kept for it; collective.

        Raises
        ------
        StallError
            If a rank does not come within the timeout.
        """
        if self != MPI.COMM_NULL:
            free_channel_of(self)  # MPI lets no error through from what it frees along with a communicator
        super().Free()

    def shrink(self) -> Self:
        """Return a communicator of the ranks that are alive, in their order; collective among them.

        It is for the time after a :class:`RankFailedError`, and needs Open MPI and ``mpiexec --with-ft ulfm``. If a
        rank has died, this communicator can only be freed afterwards. On the new one algorithms are chosen by the same
        tables and settings, for its number of ranks.

        Raises
        ------
        Error
            If this job does not go on when ranks die.
        """
        while True:
            alive, new = survivors(self), None
            with suppress(RankFailedError):  # yet another
                new = self._of(alive, self._reproducible)
            if all_agree(alive, word=new is not None) and new is not None:
                return new

    # -- the collectives

    def Barrier(self) -> None:
        """Wait for all ranks."""
        try:
            call: Any = self._channel.calls["Barrier"]
        except (AttributeError, KeyError):
            if not self:
                super().Barrier()  # which says what is wrong
            channel = self._open()
            if CHECK:
                channel.agree("barrier")
            call = channel.calls.find("Barrier", lambda: Barrier(channel))
        else:
            if CHECK:
                call.check()
        call.used = True
        if call.given_as_it_is:
            call.record(MPI.Intracomm.Barrier, (self,))
        else:
            call.run(None, None)

    def Bcast(self, buf: BufSpec, root: int = 0) -> None:
        """Send the root's data to all ranks."""
        _run(methods.BCAST, (self, buf, root))

    def Ibcast(self, buf: BufSpec, root: int = 0) -> MPI.Request:
        """Start a :meth:`Bcast`."""
        return _start(self, methods.BCAST, buf, root)

    def Bcast_init(self, buf: BufSpec, root: int = 0, info: MPI.Info = MPI.INFO_NULL) -> MPI.Prequest:
        """Prepare a :meth:`Bcast`."""
        return _prepare(self, methods.BCAST, info, buf, root)

    def Allgather(self, sendbuf: BufSpec | InPlace, recvbuf: BufSpecB) -> None:
        """Send every rank's data to all ranks."""
        _run(methods.ALLGATHER, (self, sendbuf, recvbuf))

    def Iallgather(self, sendbuf: BufSpec | InPlace, recvbuf: BufSpecB) -> MPI.Request:
        """Start a :meth:`Allgather`."""
        return _start(self, methods.ALLGATHER, sendbuf, recvbuf)

    def Allgather_init(
        self, sendbuf: BufSpec | InPlace, recvbuf: BufSpecB, info: MPI.Info = MPI.INFO_NULL
    ) -> MPI.Prequest:
        """Prepare a :meth:`Allgather`."""
        return _prepare(self, methods.ALLGATHER, info, sendbuf, recvbuf)

    def Reduce(self, sendbuf: BufSpec | InPlace, recvbuf: BufSpec | None, op: MPI.Op = MPI.SUM, root: int = 0) -> None:
        """Reduce to the root."""
        _run(methods.REDUCE, (self, sendbuf, recvbuf, op, root))

    def Ireduce(
        self, sendbuf: BufSpec | InPlace, recvbuf: BufSpec | None, op: MPI.Op = MPI.SUM, root: int = 0
    ) -> MPI.Request:
        """Start a :meth:`Reduce`."""
        return _start(self, methods.REDUCE, sendbuf, recvbuf, op, root)

    def Reduce_init(
        self,
        sendbuf: BufSpec | InPlace,
        recvbuf: BufSpec | None,
        op: MPI.Op = MPI.SUM,
        root: int = 0,
        info: MPI.Info = MPI.INFO_NULL,
    ) -> MPI.Prequest:
        """Prepare a :meth:`Reduce`."""
        return _prepare(self, methods.REDUCE, info, sendbuf, recvbuf, op, root)

    def Allreduce(self, sendbuf: BufSpec | InPlace, recvbuf: BufSpec, op: MPI.Op = MPI.SUM) -> None:
        """Reduce to all ranks."""
        _run(methods.ALLREDUCE, (self, sendbuf, recvbuf, op))

    def Iallreduce(self, sendbuf: BufSpec | InPlace, recvbuf: BufSpec, op: MPI.Op = MPI.SUM) -> MPI.Request:
        """Start a :meth:`Allreduce`."""
        return _start(self, methods.ALLREDUCE, sendbuf, recvbuf, op)

    def Allreduce_init(
        self, sendbuf: BufSpec | InPlace, recvbuf: BufSpec, op: MPI.Op = MPI.SUM, info: MPI.Info = MPI.INFO_NULL
    ) -> MPI.Prequest:
        """Prepare a :meth:`Allreduce`."""
        return _prepare(self, methods.ALLREDUCE, info, sendbuf, recvbuf, op)

    def Reduce_scatter_block(
        self, sendbuf: BufSpecB | InPlace, recvbuf: BufSpec | BufSpecB, op: MPI.Op = MPI.SUM
    ) -> None:
        """Reduce, and give every rank a block of the same length."""
        _run(methods.REDUCE_SCATTER_BLOCK, (self, sendbuf, recvbuf, op))

    def Ireduce_scatter_block(
        self, sendbuf: BufSpecB | InPlace, recvbuf: BufSpec | BufSpecB, op: MPI.Op = MPI.SUM
    ) -> MPI.Request:
        """Start a :meth:`Reduce_scatter_block`."""
        return _start(self, methods.REDUCE_SCATTER_BLOCK, sendbuf, recvbuf, op)

    def Reduce_scatter_block_init(
        self,
        sendbuf: BufSpecB | InPlace,
        recvbuf: BufSpec | BufSpecB,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
    ) -> MPI.Prequest:
        """Prepare a :meth:`Reduce_scatter_block`."""
        return _prepare(self, methods.REDUCE_SCATTER_BLOCK, info, sendbuf, recvbuf, op)

    def Reduce_scatter(
        self,
        sendbuf: BufSpec | InPlace,
        recvbuf: BufSpec,
        recvcounts: Sequence[int] | None = None,
        op: MPI.Op = MPI.SUM,
    ) -> None:
        """Reduce, and give every rank a block of its own length."""
        recvcounts = methods.scattered_counts(self, sendbuf, recvbuf, recvcounts)
        _run(methods.REDUCE_SCATTER, (self, sendbuf, recvbuf, recvcounts, op))

    def Ireduce_scatter(
        self,
        sendbuf: BufSpec | InPlace,
        recvbuf: BufSpec,
        recvcounts: Sequence[int] | None = None,
        op: MPI.Op = MPI.SUM,
    ) -> MPI.Request:
        """Start a :meth:`Reduce_scatter`."""
        recvcounts = methods.scattered_counts(self, sendbuf, recvbuf, recvcounts)
        return _start(self, methods.REDUCE_SCATTER, sendbuf, recvbuf, recvcounts, op)

    def Reduce_scatter_init(
        self,
        sendbuf: BufSpec | InPlace,
        recvbuf: BufSpec,
        recvcounts: Sequence[int] | None = None,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
    ) -> MPI.Prequest:
        """Prepare a :meth:`Reduce_scatter`."""
        recvcounts = methods.scattered_counts(self, sendbuf, recvbuf, recvcounts)
        return _prepare(self, methods.REDUCE_SCATTER, info, sendbuf, recvbuf, recvcounts, op)


def _run(method: Method, given: tuple[Any, ...]) -> None:
    """Carry a method out at once; it is given the communicator and its arguments, as one tuple, which costs least."""
    try:
        calls = given[0]._channel.calls  # noqa: SLF001 - of the class above
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


def _resolved(method: Method, given: tuple[Any, ...]) -> Any:
    """Return the call of a method, and keep it for the next one that is given the same."""
    comm = given[0]
    if not comm:
        method.now(*given)  # which says what is wrong
    channel = comm._open()  # noqa: SLF001 - of the class above
    asked = method.read(channel, *given[1:])
    if asked is None:
        if CHECK:
            channel.agree(f"{method.name} of arguments for the MPI library alone")
        return Unread(channel, method.name)
    arrays = method.arrays(channel, asked.dtype, given)
    operation = asked.operation(channel, arrays=arrays)
    if CHECK:  # before anything is made that ranks make together
        channel.agree(operation.in_words)
    call = resolve(channel, operation, *arrays, quiet=True)
    with suppress(AttributeError, IndexError, TypeError):  # what cannot be a key
        key, exact = method.key(given), method.exact(given)
        if key != exact and not call.given_as_it_is:
            channel.calls.find(key, lambda: Call(channel, operation))  # which says no more than to look further
        kept = channel.calls.find(key if call.given_as_it_is else exact, lambda: call)
        if kept is not call and kept.__class__ is call.__class__:  # it was still there, only the way to it was not
            call.free()
            call = kept
        call.once = kept is not call
    return call


def _start(comm: Comm, method: Method, *given: Any) -> MPI.Request:
    """Start a method."""
    plan = _plan(comm, method, given, Memory.NONE)
    return method.start(comm, *given) if plan is None else Request(plan)


def _prepare(comm: Comm, method: Method, info: MPI.Info, *given: Any) -> MPI.Prequest:
    """Prepare a method; ranks that share memory wait for one another to set it up."""
    plan = _plan(comm, method, given, Memory.TOGETHER)
    return method.init(comm, *given, info) if plan is None else Prequest(plan)


def _plan(comm: Comm, method: Method, given: tuple[Any, ...], memory: Memory) -> Plan[Any] | None:
    """Return a plan that carries a method out, if a thread can drive it; None if that is for the MPI library.

    All ranks ask for theirs in the same order.
    """
    if not comm or not threads_allowed():
        return None
    channel = comm._open()  # noqa: SLF001 - of the class above
    key: Hashable = None
    with suppress(AttributeError, IndexError, TypeError):  # what cannot be a key
        key = memory, method.exact((comm, *given))
    known: Any = channel.calls.get(key)
    arrays: methods.Arrays | None = None
    if known is None:
        asked = method.read(channel, *given)
        if asked is None:
            return None
        arrays = method.arrays(channel, asked.dtype, (comm, *given))
        known = Call(channel, asked.operation(channel, memory, arrays=arrays, at_once=False))
        if key is not None:
            channel.calls.find(key, lambda: known)
    known.used, operation = True, known.operation
    if operation.choice.algorithm == NATIVE and known.dtype == operation.reduction.dtype:
        return None
    if arrays is None:
        arrays = method.arrays(channel, known.dtype, (comm, *given))
    tag = channel.tags.in_turn(operation.choice.lanes, operation.signature)
    return prepare(channel, operation, *arrays, tag, memory=memory)
