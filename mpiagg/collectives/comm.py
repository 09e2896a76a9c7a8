"""A communicator of mpi4py's whose collectives run by the schedules of this package, or as the MPI library has them.

Each method says what it is called with; what becomes of it is one of three functions here: at once, as a request, or
as a persistent request. What was worked out for a call is found again by what it was passed.
"""

# ruff: noqa: N802 - the names are mpi4py's

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpiagg.collectives import forms, methods
from mpiagg.collectives.methods import Method
from mpiagg.collectives.reducing import scattered_counts
from mpiagg.common.arguments import check_flag
from mpiagg.errors import RankFailedError, StallError
from mpiagg.plans.barrier import Barrier
from mpiagg.transport import CHECK, Channel, channel_of, free_channel_of, meet, require_mpi
from mpiagg.transport.failures import all_agree, survivors

if TYPE_CHECKING:
    from mpi4py.typing import BufSpec, InPlace
    from typing_extensions import Self


class Comm(MPI.Intracomm):
    """A duplicate of a communicator, whose collectives run by mpiagg's algorithms or the MPI library's.

    All other methods are mpi4py's own. All collectives of MPI that take buffers, ``Barrier``, ``Bcast``,
    ``Gather(v)``, ``Scatter(v)``, ``Allgather(v)``, ``Alltoall(v)``, ``Reduce``, ``Allreduce``,
    ``Reduce_scatter(_block)``, ``Scan`` and ``Exscan``, their ``I...`` forms and their ``..._init`` forms take what
    mpi4py's take and mean the same. ``Alltoallw`` is the MPI library's own in all its forms; the blocking one is
    recorded like the others.
    Communicators made from this one are of its class too. Those with a topology (``Create_cart``, ``Create_graph``,
    ``Create_dist_graph``, ``Create_dist_graph_adjacent``) are mpi4py's own, with its collectives of neighbors;
    :func:`mpiagg.neighbor_alltoall` and its siblings take them. ``Free`` gives back what belongs to it.

    Parameters
    ----------
    comm : MPI.Intracomm, optional
        The communicator to duplicate, which is collective; a null communicator without it.
    reproducible : bool, optional
        Whether all collectives run by our own schedules, so that each result has the bits that :func:`mpiagg.simulate`
        computes; gathers, scatters, all-to-alls and ``Allgatherv`` only move values, and stay as they are. By default,
        or where the environment variable ``MPIAGG_REPRODUCIBLE`` is not 1, the MPI library's own collective is taken
        where it was measured to be faster, but for all-reductions of floating-point numbers, which have the same bits
        on all ranks. It is the same on all ranks, and passed on to communicators made from this one.

    Raises
    ------
    TypeError
        If ``comm`` is not an intracommunicator.
    MismatchError
        On all ranks, if they disagree on ``reproducible``.
    PlanError
        If MPI is not initialised in this process.

    Notes
    -----
    Datatypes: what only moves elements takes all predefined datatypes of MPI, and arrays of bfloat16 whose blocks
    follow one another. Reductions take numbers of every kind with the operators that MPI defines for it: booleans,
    integers, floating-point numbers and complex numbers. Arrays of float16 and bfloat16 are combined in float32.
    Operators of the user's are for the MPI library. Data described by derived datatypes are copied where our own
    algorithms run; structures of several kinds of numbers are for the MPI library.

    Every collective raises ``MPI.Exception``, TypeError or ValueError for wrong arguments, as mpi4py's does, and
    TypeError for buffers on two devices. Every collective that mpiagg's algorithms carry out raises

    - :class:`StallError`, if a rank does not come, or a message does not complete, within the timeout that the
      environment variable ``MPIAGG_TIMEOUT`` sets. The MPI library's own blocking collectives cannot be left; there
      the job ends;
    - :class:`MismatchError`, on all ranks, if they prepare different persistent collectives, or one with different
      counts, datatypes, operators or roots; if ``MPIAGG_CHECK`` is 1, also if they call different blocking ones;
    - :class:`PlanError`, if another thread is in a blocking operation of this communicator;
    - :class:`RankFailedError`, if a rank has died and the job goes on without it.

    The ``I...`` and ``..._init`` forms go on by themselves while the program computes; a thread drives them. Without an
    MPI library that was initialised for ``MPI.THREAD_MULTIPLE``, which is mpi4py's default, they are the library's own.

    Examples
    --------
    >>> world = mpiagg.Comm(MPI.COMM_WORLD)
    >>> gradient = np.full(3, float(rank))
    >>> world.Allreduce(MPI.IN_PLACE, gradient)
    >>> gradient.tolist() == [sum(range(size))] * 3
    True
    >>> request = world.Iallreduce(MPI.IN_PLACE, gradient, op=MPI.MAX)
    >>> request.Wait()
    True
    >>> world.Free()
    """

    _channel: Channel
    _reproducible = False

    def __new__(cls, comm: MPI.Comm | None = None, *, reproducible: bool | None = None) -> Self:
        """Duplicate the communicator."""
        require_mpi()
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
            try:
                self._open().memory.signatures()
            except (StallError, RankFailedError):  # not all ranks are there
                raise
            except Exception:  # on all of them
                super().Free(self)
                raise
        return self

    def _open(self) -> Channel:
        """Return what messages of the collectives travel on; the first call makes it, and is collective."""
        self._channel = channel_of(self)
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

    def Idup_with_info(self, info: MPI.Info) -> tuple[Self, MPI.Request]:
        """Start to duplicate the communicator with hints."""
        twin, request = super().Idup_with_info(info)
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

        Returns
        -------
        Comm
            Of the ranks that are alive.

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
            call.run()

    def Reduce_scatter(
        self,
        sendbuf: BufSpec | InPlace,
        recvbuf: BufSpec,
        recvcounts: Sequence[int] | None = None,
        op: MPI.Op = MPI.SUM,
    ) -> None:
        """Reduce, and give every rank a block of its own length."""
        recvcounts = scattered_counts(self, sendbuf, recvbuf, recvcounts)
        forms.run(methods.REDUCE_SCATTER, (self, sendbuf, recvbuf, recvcounts, op))

    def Ireduce_scatter(
        self,
        sendbuf: BufSpec | InPlace,
        recvbuf: BufSpec,
        recvcounts: Sequence[int] | None = None,
        op: MPI.Op = MPI.SUM,
    ) -> MPI.Request:
        """Start a :meth:`Reduce_scatter`."""
        recvcounts = scattered_counts(self, sendbuf, recvbuf, recvcounts)
        return forms.started(self, methods.REDUCE_SCATTER, sendbuf, recvbuf, recvcounts, op)

    def Reduce_scatter_init(
        self,
        sendbuf: BufSpec | InPlace,
        recvbuf: BufSpec,
        recvcounts: Sequence[int] | None = None,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
    ) -> MPI.Prequest:
        """Prepare a :meth:`Reduce_scatter`."""
        recvcounts = scattered_counts(self, sendbuf, recvbuf, recvcounts)
        return forms.prepared(self, methods.REDUCE_SCATTER, info, sendbuf, recvbuf, recvcounts, op)


_ALIKE: Mapping[Callable[[Method], forms.Forms], tuple[Method, ...]] = {
    forms.of_one_buffer: (methods.BCAST,),
    forms.of_two_buffers: (
        methods.ALLGATHER,
        methods.ALLGATHERV,
        methods.ALLTOALL,
        methods.ALLTOALLV,
        methods.ALLTOALLW,
    ),
    forms.with_root: (methods.GATHER, methods.GATHERV, methods.SCATTER, methods.SCATTERV),
    forms.with_op: (methods.ALLREDUCE, methods.REDUCE_SCATTER_BLOCK, methods.SCAN, methods.EXSCAN),
    forms.with_op_and_root: (methods.REDUCE,),
}

for _make, _methods in _ALIKE.items():
    for _method in _methods:
        for _form, _given in zip(_make(_method), (_method.now, _method.start, _method.init), strict=True):
            _form.__name__, _form.__doc__ = _given.__name__, _given.__doc__
            _form.__qualname__ = f"Comm.{_given.__name__}"
            setattr(Comm, _given.__name__, _form)
