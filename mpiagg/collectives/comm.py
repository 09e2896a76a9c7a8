"""A communicator of mpi4py's whose collectives run by the schedules of this package.

What they do not do goes to the MPI library, as it came: operators of the user's, derived datatypes, memory of
devices that we do not know, and arguments that are wrong. Whether a call goes there must be the same on all ranks, and
is: MPI wants the same operator and matching datatypes on all of them.
"""

# ruff: noqa: N802 - the names are mpi4py's

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeGuard

from mpi4py import MPI

from mpiagg.collectives import calls
from mpiagg.collectives.calls import Call
from mpiagg.collectives.requests import Prequest, Request
from mpiagg.errors import RankFailedError
from mpiagg.plans.background import threads_allowed
from mpiagg.plans.choices import Memory
from mpiagg.transport import channel_of, free_channel_of, meet
from mpiagg.transport.failures import all_agree, survivors

if TYPE_CHECKING:
    from mpi4py.typing import BufSpec, BufSpecB, InPlace
    from typing_extensions import Self


def _in_background(call: Call | None) -> TypeGuard[Call]:
    """Whether a call is ours and can be driven by a thread."""
    return call is not None and threads_allowed()


class Comm(MPI.Intracomm):
    """A private duplicate of a communicator, whose collectives are hand-written; the rest is mpi4py's own.

    ``Allreduce``, ``Reduce``, ``Bcast``, ``Allgather``, ``Reduce_scatter_block``, ``Reduce_scatter`` and ``Barrier``,
    their ``I...`` forms and their ``..._init`` forms take what mpi4py's take, mean the same and raise the same errors.
    Communicators made from this one are of its class too. ``Free`` gives back what belongs to it.

    Parameters
    ----------
    comm : MPI.Intracomm, optional
        The communicator to duplicate, which is collective; a null communicator without it.

    Raises
    ------
    TypeError
        If ``comm`` is not an intracommunicator.

    Notes
    -----
    The ``I...`` and ``..._init`` forms go on by themselves while the program computes; a thread drives them. Without an
    MPI library that was initialised for ``MPI.THREAD_MULTIPLE``, which is mpi4py's default, they are the library's own.
    """

    def __new__(cls, comm: MPI.Comm | None = None) -> Self:
        """Duplicate the communicator."""
        plain = MPI.Intracomm(comm)
        if plain:
            meet(plain)
        return cls._of(plain.Dup() if plain else plain)

    @classmethod
    def _of(cls, plain: MPI.Comm) -> Self:
        """Return a communicator that nobody else holds as one of this class."""
        self = super().__new__(cls, plain)
        if self:
            # Here, since all ranks are here; a nonblocking call must not have to wait for that.
            channel_of(self)
        return self

    # -- communicators made from this one

    def Dup(self, info: MPI.Info | None = None) -> Self:
        """Duplicate the communicator."""
        meet(self)
        return self._of(super().Dup(info))

    def Clone(self) -> Self:
        """Duplicate the communicator."""
        meet(self)
        return self._of(super().Clone())

    def Dup_with_info(self, info: MPI.Info) -> Self:
        """Duplicate the communicator with hints."""
        meet(self)
        return self._of(super().Dup_with_info(info))

    def Create(self, group: MPI.Group) -> Self:
        """Create a communicator from a group."""
        meet(self)
        return self._of(super().Create(group))

    def Create_group(self, group: MPI.Group, tag: int = 0) -> Self:
        """Create a communicator from a group; collective over the group alone."""
        return self._of(super().Create_group(group, tag))

    def Split(self, color: int = 0, key: int = 0) -> Self:
        """Split the communicator by color and key."""
        meet(self)
        return self._of(super().Split(color, key))

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> Self:
        """Split the communicator by where its ranks are."""
        meet(self)
        return self._of(super().Split_type(split_type, key, info))

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
                new = self._of(alive)
            if all_agree(alive, word=new is not None) and new is not None:
                return new

    # -- blocking calls

    def Barrier(self) -> None:
        """Wait for all ranks."""
        call = calls.barrier(self)
        if call is None:
            super().Barrier()
        else:
            call.run()

    def Bcast(self, buf: BufSpec, root: int = 0) -> None:
        """Send the root's data to all ranks."""
        call = calls.bcast(self, buf, root)
        if call is None:
            super().Bcast(buf, root)
        else:
            call.run()

    def Allgather(self, sendbuf: BufSpec | InPlace, recvbuf: BufSpecB) -> None:
        """Send every rank's data to all ranks."""
        call = calls.allgather(self, sendbuf, recvbuf)
        if call is None:
            super().Allgather(sendbuf, recvbuf)
        else:
            call.run()

    def Reduce(self, sendbuf: BufSpec | InPlace, recvbuf: BufSpec | None, op: MPI.Op = MPI.SUM, root: int = 0) -> None:
        """Reduce to the root."""
        call = calls.reduce(self, sendbuf, recvbuf, op, root)
        if call is None:
            super().Reduce(sendbuf, recvbuf, op, root)
        else:
            call.run()

    def Allreduce(self, sendbuf: BufSpec | InPlace, recvbuf: BufSpec, op: MPI.Op = MPI.SUM) -> None:
        """Reduce to all ranks."""
        call = calls.allreduce(self, sendbuf, recvbuf, op)
        if call is None:
            super().Allreduce(sendbuf, recvbuf, op)
        else:
            call.run()

    def Reduce_scatter_block(
        self, sendbuf: BufSpecB | InPlace, recvbuf: BufSpec | BufSpecB, op: MPI.Op = MPI.SUM
    ) -> None:
        """Reduce, and give every rank a block of the same length."""
        call = calls.reduce_scatter_block(self, sendbuf, recvbuf, op)
        if call is None:
            super().Reduce_scatter_block(sendbuf, recvbuf, op)
        else:
            call.run()

    def Reduce_scatter(
        self,
        sendbuf: BufSpec | InPlace,
        recvbuf: BufSpec,
        recvcounts: Sequence[int] | None = None,
        op: MPI.Op = MPI.SUM,
    ) -> None:
        """Reduce, and give every rank a block of its own length."""
        recvcounts = calls.recvcounts(self, sendbuf, recvbuf, recvcounts)
        call = calls.reduce_scatter(self, sendbuf, recvbuf, recvcounts, op)
        if call is None:
            super().Reduce_scatter(sendbuf, recvbuf, recvcounts, op)
        else:
            call.run()

    # -- nonblocking calls

    def Ibarrier(self) -> MPI.Request:
        """Start a :meth:`Barrier`."""
        call = calls.barrier(self)
        return Request(call.plan(Memory.NONE)) if _in_background(call) else super().Ibarrier()

    def Ibcast(self, buf: BufSpec, root: int = 0) -> MPI.Request:
        """Start a :meth:`Bcast`."""
        call = calls.bcast(self, buf, root)
        return Request(call.plan(Memory.NONE)) if _in_background(call) else super().Ibcast(buf, root)

    def Iallgather(self, sendbuf: BufSpec | InPlace, recvbuf: BufSpecB) -> MPI.Request:
        """Start an :meth:`Allgather`."""
        call = calls.allgather(self, sendbuf, recvbuf)
        return Request(call.plan(Memory.NONE)) if _in_background(call) else super().Iallgather(sendbuf, recvbuf)

    def Ireduce(
        self, sendbuf: BufSpec | InPlace, recvbuf: BufSpec | None, op: MPI.Op = MPI.SUM, root: int = 0
    ) -> MPI.Request:
        """Start a :meth:`Reduce`."""
        call = calls.reduce(self, sendbuf, recvbuf, op, root)
        return Request(call.plan(Memory.NONE)) if _in_background(call) else super().Ireduce(sendbuf, recvbuf, op, root)

    def Iallreduce(self, sendbuf: BufSpec | InPlace, recvbuf: BufSpec, op: MPI.Op = MPI.SUM) -> MPI.Request:
        """Start an :meth:`Allreduce`."""
        call = calls.allreduce(self, sendbuf, recvbuf, op)
        return Request(call.plan(Memory.NONE)) if _in_background(call) else super().Iallreduce(sendbuf, recvbuf, op)

    def Ireduce_scatter_block(
        self, sendbuf: BufSpecB | InPlace, recvbuf: BufSpec | BufSpecB, op: MPI.Op = MPI.SUM
    ) -> MPI.Request:
        """Start a :meth:`Reduce_scatter_block`."""
        call = calls.reduce_scatter_block(self, sendbuf, recvbuf, op)
        return (
            Request(call.plan(Memory.NONE))
            if _in_background(call)
            else super().Ireduce_scatter_block(sendbuf, recvbuf, op)
        )

    def Ireduce_scatter(
        self,
        sendbuf: BufSpec | InPlace,
        recvbuf: BufSpec,
        recvcounts: Sequence[int] | None = None,
        op: MPI.Op = MPI.SUM,
    ) -> MPI.Request:
        """Start a :meth:`Reduce_scatter`."""
        recvcounts = calls.recvcounts(self, sendbuf, recvbuf, recvcounts)
        call = calls.reduce_scatter(self, sendbuf, recvbuf, recvcounts, op)
        return (
            Request(call.plan(Memory.NONE))
            if _in_background(call)
            else super().Ireduce_scatter(sendbuf, recvbuf, recvcounts, op)
        )

    # -- persistent calls

    def Barrier_init(self, info: MPI.Info = MPI.INFO_NULL) -> MPI.Prequest:
        """Prepare a :meth:`Barrier`."""
        call = calls.barrier(self)
        return Prequest(call.plan(Memory.TOGETHER)) if _in_background(call) else super().Barrier_init(info)

    def Bcast_init(self, buf: BufSpec, root: int = 0, info: MPI.Info = MPI.INFO_NULL) -> MPI.Prequest:
        """Prepare a :meth:`Bcast`."""
        call = calls.bcast(self, buf, root)
        return Prequest(call.plan(Memory.TOGETHER)) if _in_background(call) else super().Bcast_init(buf, root, info)

    def Allgather_init(
        self, sendbuf: BufSpec | InPlace, recvbuf: BufSpecB, info: MPI.Info = MPI.INFO_NULL
    ) -> MPI.Prequest:
        """Prepare an :meth:`Allgather`."""
        call = calls.allgather(self, sendbuf, recvbuf)
        return (
            Prequest(call.plan(Memory.TOGETHER))
            if _in_background(call)
            else super().Allgather_init(sendbuf, recvbuf, info)
        )

    def Reduce_init(
        self,
        sendbuf: BufSpec | InPlace,
        recvbuf: BufSpec | None,
        op: MPI.Op = MPI.SUM,
        root: int = 0,
        info: MPI.Info = MPI.INFO_NULL,
    ) -> MPI.Prequest:
        """Prepare a :meth:`Reduce`."""
        call = calls.reduce(self, sendbuf, recvbuf, op, root)
        return (
            Prequest(call.plan(Memory.TOGETHER))
            if _in_background(call)
            else super().Reduce_init(sendbuf, recvbuf, op, root, info)
        )

    def Allreduce_init(
        self, sendbuf: BufSpec | InPlace, recvbuf: BufSpec, op: MPI.Op = MPI.SUM, info: MPI.Info = MPI.INFO_NULL
    ) -> MPI.Prequest:
        """Prepare an :meth:`Allreduce`."""
        call = calls.allreduce(self, sendbuf, recvbuf, op)
        return (
            Prequest(call.plan(Memory.TOGETHER))
            if _in_background(call)
            else super().Allreduce_init(sendbuf, recvbuf, op, info)
        )

    def Reduce_scatter_block_init(
        self,
        sendbuf: BufSpecB | InPlace,
        recvbuf: BufSpec | BufSpecB,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
    ) -> MPI.Prequest:
        """Prepare a :meth:`Reduce_scatter_block`."""
        call = calls.reduce_scatter_block(self, sendbuf, recvbuf, op)
        return (
            Prequest(call.plan(Memory.TOGETHER))
            if _in_background(call)
            else super().Reduce_scatter_block_init(sendbuf, recvbuf, op, info)
        )

    def Reduce_scatter_init(
        self,
        sendbuf: BufSpec | InPlace,
        recvbuf: BufSpec,
        recvcounts: Sequence[int] | None = None,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
    ) -> MPI.Prequest:
        """Prepare a :meth:`Reduce_scatter`."""
        recvcounts = calls.recvcounts(self, sendbuf, recvbuf, recvcounts)
        call = calls.reduce_scatter(self, sendbuf, recvbuf, recvcounts, op)
        return (
            Prequest(call.plan(Memory.TOGETHER))
            if _in_background(call)
            else super().Reduce_scatter_init(sendbuf, recvbuf, recvcounts, op, info)
        )
