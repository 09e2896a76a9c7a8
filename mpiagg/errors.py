"""The exceptions that mpiagg raises.

::

    Error                     anything that goes wrong in mpiagg itself
    |-- ScheduleError         a schedule that is not a correct collective
    |-- MismatchError         ranks that disagree about what they are doing
    |-- StallError            a wait that passed its deadline (also a TimeoutError)
    |-- PlanError             a plan used after it was freed, or while it runs; two threads on one communicator
    |-- RankFailedError       ranks that have died
    |-- NonFiniteError        gradients with NaN or infinity in them (also a FloatingPointError)
    `-- DeviceError           a device that cannot be used

Bad arguments are plain ``ValueError`` and ``TypeError``.
"""

from __future__ import annotations


class Error(Exception):
    """The base of the exceptions of this package.

    Examples
    --------
    >>> plan = mpiagg.allreduce_init(np.ones(3))
    >>> plan.free()
    >>> try:
    ...     plan()
    ... except mpiagg.Error as error:
    ...     print(f"{type(error).__name__}: {error}")
    PlanError: allreduce by ...: the plan is freed
    """


class ScheduleError(Error):
    """A schedule that is not a correct collective.

    Attributes
    ----------
    rank, round, chunk : int or None
        Where the fault shows, as far as it can be said.

    Examples
    --------
    >>> from mpiagg.schedules import Collective, Round, prove, send
    >>> schedules = [[Round(send(1))], []]  # rank 1 does not receive what rank 0 sends
    >>> try:
    ...     prove(schedules, Collective.BROADCAST, chunks=1)
    ... except mpiagg.ScheduleError as error:
    ...     print(error)
    ...     print("rank", error.rank, "round", error.round)
    deadlock: 1 of 2 ranks can never go on: rank 0 in round 0 waits to send chunk 0 to rank 1, ...
    rank 0 round 0
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        round: int | None = None,  # noqa: A002 - the field's word for it
        chunk: int | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.round = round
        self.chunk = chunk


class MismatchError(Error):
    """Ranks disagree about what they are doing; the message says who passed what.

    Examples
    --------
    On rank 0 the array is longer than on the others; one rank alone has nobody to disagree with.

    >>> message = ""
    >>> try:
    ...     total = mpiagg.allreduce(np.ones(4 if rank == 0 else 3), check=True)
    ... except mpiagg.MismatchError as error:
    ...     message = str(error)
    >>> size == 1 or "ranks disagree: rank 0: allreduce" in message
    True
    """


class StallError(Error, TimeoutError):
    """A wait passed its deadline; the message says what was waited for.

    Examples
    --------
    Rank 0 starts before the others, and waits in vain. The plan runs on, and can be waited for again.

    >>> plan, message = mpiagg.allreduce_init(np.ones(3), timeout=0.1), ""
    >>> if rank == 0:
    ...     plan.start()
    ...     try:
    ...         total = plan.wait()
    ...     except mpiagg.StallError as error:
    ...         message = str(error)
    >>> rank > 0 or size == 1 or "waited 0.1 s in vain for allreduce" in message
    True
    >>> comm.Barrier()
    >>> if rank > 0:
    ...     plan.start()
    >>> while not plan.test():
    ...     pass
    >>> bool((plan.wait() == size).all())
    True
    >>> plan.free()
    """


class PlanError(Error):
    """A plan was used after it was freed, or started while it runs; or two threads use a communicator at once.

    Examples
    --------
    >>> with mpiagg.allreduce_init(np.ones(3)) as plan:
    ...     total = plan()
    >>> try:
    ...     plan()
    ... except mpiagg.PlanError as error:
    ...     print(error)
    allreduce by ...: the plan is freed
    """


class RankFailedError(Error):
    """Ranks have died, of whom others go on; the message names them.

    Attributes
    ----------
    ranks : tuple of int
        Those of the communicator that were known to have died.

    Examples
    --------
    Where all ranks live, a call returns; where some have died, the others can catch the error and go on without them.

    >>> alive = mpiagg.Comm(comm)
    >>> try:
    ...     total = mpiagg.allreduce(np.ones(3), comm=alive)
    ... except mpiagg.RankFailedError as error:
    ...     print("ranks", error.ranks, "have died")
    ...     alive = alive.shrink()
    ...     total = mpiagg.allreduce(np.ones(3), comm=alive)
    >>> bool((total == alive.size).all())
    True
    >>> alive.Free()
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class NonFiniteError(Error, FloatingPointError):
    """Gradients, or what they were aggregated to, have NaN or infinity in them; the message says where.

    Examples
    --------
    >>> gradients = [np.array([1.0, np.nan if rank == 0 else 2.0])]
    >>> with mpiagg.DDP([np.zeros(2)], check_finite=True) as ddp:
    ...     try:
    ...         ddp.sync_gradients(gradients)
    ...     except mpiagg.NonFiniteError as error:
    ...         print(error)
    gradients are not finite: rank 0: parameter 0 (float64 (2,)): 1 NaN, 0 Inf of 2
    """


class DeviceError(Error):
    """A device that was asked for cannot be used; the message says why, and what would help.

    Examples
    --------
    Take memory of the GPU, and memory of the host where no GPU can be used:

    >>> try:
    ...     x = mpiagg.empty(3, device="cuda", comm=MPI.COMM_SELF)
    ... except mpiagg.DeviceError:
    ...     x = mpiagg.empty(3, comm=MPI.COMM_SELF)
    >>> x.shape
    (3,)
    """
