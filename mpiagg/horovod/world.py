"""The ranks of the job: beginning, end, and who is who."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence

from mpi4py import MPI

from mpiagg.errors import RankFailedError, StallError
from mpiagg.horovod.exceptions import HorovodInternalError
from mpiagg.horovod.process_sets import DYNAMIC, STATE, ProcessSet, WorldState, state
from mpiagg.plans.background import threads_allowed
from mpiagg.transport import communicator_among, meet, require_mpi


def init(
    comm: MPI.Intracomm | Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None
) -> None:
    """Start; collective. A second call does nothing.

    Parameters
    ----------
    comm : MPI.Intracomm or sequence of int, optional
        The ranks, or their numbers in the world; all by default.
    process_sets : sequence of ProcessSet or "dynamic", optional
        Sets to be added at once; or whether sets may be added later, as the environment variable
        HOROVOD_DYNAMIC_PROCESS_SETS says, too.

    Raises
    ------
    ValueError
        If this rank is not among the ranks, or if a set is none of these.
    PlanError
        If MPI is not initialised in this process.
    MismatchError
        On all ranks, if others make another communicator.
    StallError
        If a rank does not come within the timeout.
    RankFailedError
        If a rank has died.

    Examples
    --------
    >>> import mpiagg.horovod.torch as hvd
    >>> hvd.init()
    >>> hvd.size() == size
    True
    """
    if STATE:
        return
    if isinstance(process_sets, str) and process_sets != "dynamic":
        raise ValueError(f'process_sets is a list of sets or "dynamic", not {process_sets!r}')
    require_mpi()
    world, made = MPI.COMM_WORLD, None
    if comm is None or isinstance(comm, MPI.Comm):
        ranks = world if comm is None else comm
    elif not comm:
        ranks = world
    else:
        if world.rank not in comm:
            raise ValueError(f"rank {world.rank} is not among the ranks {list(comm)} that init() was given")
        ranks = made = communicator_among(world, list(comm))
    dynamic = process_sets == "dynamic" or os.environ.get(DYNAMIC, "0") not in ("", "0")
    meet(ranks, "hvd.init")
    STATE.append(WorldState(ranks, dynamic=dynamic))
    if made is not None:
        made.Free()
    atexit.register(shutdown)
    for process_set in process_sets or () if not isinstance(process_sets, str) else ():
        state().add(process_set)


def shutdown() -> None:
    """End; collective. What not all ranks have asked for fails.

    Examples
    --------
    >>> hvd.shutdown()
    >>> hvd.is_initialized()
    False
    >>> hvd.init(process_sets="dynamic")  # one may start again
    """
    if STATE:
        atexit.unregister(shutdown)
        try:
            STATE[0].end()
            STATE[0].free()
        finally:
            STATE.clear()


def restart() -> None:
    """End and start again, with the same ranks and sets; collective. What not all ranks have asked for fails.

    Raises
    ------
    RuntimeError
        If other ranks do not start again. Then Horovod has been shut down.
    """
    old = STATE.pop()
    sets = [each for number, each in old.sets.items() if number]
    old.end(to_restart=True)
    engine = old.engines[0]
    if engine.gone:
        old.free()  # as they do
        raise RuntimeError(f"Horovod does not start again: ranks {engine.gone} have shut it down")
    if engine.failed is not None:
        raise RuntimeError(f"Horovod does not start again: {engine.failed}") from engine.failed
    try:
        meet(old.base, "start Horovod again")
        STATE.append(WorldState(old.base, dynamic=old.dynamic))
        old.free()
        for process_set in sets:
            STATE[0].add(process_set)
    except (StallError, RankFailedError, HorovodInternalError) as error:
        STATE.clear()
        raise RuntimeError(f"Horovod does not start again: {error}") from error


def is_initialized() -> bool:
    """Whether ``init`` was called, and ``shutdown`` was not.

    Returns
    -------
    bool
        Whether collectives can be called.

    Examples
    --------
    >>> hvd.is_initialized()
    True
    """
    return bool(STATE)


def rank() -> int:
    """Return this rank.

    Returns
    -------
    int
        From 0 to the number of ranks, without it.

    Raises
    ------
    ValueError
        Before :func:`init`.

    Examples
    --------
    >>> hvd.rank() == rank
    True
    """
    return state().base.rank


def size() -> int:
    """Return how many ranks there are.

    Returns
    -------
    int
        The number of ranks.

    Raises
    ------
    ValueError
        Before :func:`init`.

    Examples
    --------
    >>> hvd.size() == size
    True
    """
    return state().base.size


def local_rank() -> int:
    """Return this rank's number on its node.

    Returns
    -------
    int
        From 0 to :func:`local_size`, without it.

    Raises
    ------
    ValueError
        Before :func:`init`.

    Examples
    --------
    >>> hvd.local_rank() in range(hvd.local_size())
    True
    """
    return state().local_rank


def local_size() -> int:
    """Return how many ranks there are on this node.

    Returns
    -------
    int
        The number of ranks on this node.

    Raises
    ------
    ValueError
        Before :func:`init`.

    Examples
    --------
    >>> 1 <= hvd.local_size() <= size
    True
    """
    return state().local_size


def cross_rank() -> int:
    """Return the number of this node among those that have a rank of this number.

    Returns
    -------
    int
        From 0 to :func:`cross_size`, without it.

    Raises
    ------
    ValueError
        Before :func:`init`.

    Examples
    --------
    >>> hvd.cross_rank() in range(hvd.cross_size())
    True
    """
    return state().cross_rank


def cross_size() -> int:
    """Return how many nodes have a rank of this number.

    Returns
    -------
    int
        The number of nodes.

    Raises
    ------
    ValueError
        Before :func:`init`.

    Examples
    --------
    >>> 1 <= hvd.cross_size() <= size
    True
    """
    return state().cross_size


def is_homogeneous() -> bool:
    """Whether all nodes have equally many ranks.

    Returns
    -------
    bool
        Whether :func:`local_size` is the same on all ranks.

    Raises
    ------
    ValueError
        Before :func:`init`.

    Examples
    --------
    >>> sizes = hvd.allgather_object(hvd.local_size())
    >>> hvd.is_homogeneous() == (len(set(sizes)) == 1)
    True
    """
    return state().homogeneous


def mpi_threads_supported() -> bool:
    """Whether several threads may call the MPI library.

    Returns
    -------
    bool
        Whether asynchronous operations go on by themselves, in a thread; if not, they do in :func:`poll` and
        :func:`synchronize`.

    Raises
    ------
    ValueError
        Before :func:`init`.

    Examples
    --------
    >>> hvd.mpi_threads_supported() in (True, False)
    True
    """
    state()
    return threads_allowed()
