"""Collectives for arrays of which ranks have different numbers of rows: see :mod:`mpiagg.collectives.functions`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpiagg.arrays import Array, as_input
from mpiagg.collectives.array_calls import ArrayPlan, Counts, planned, run, to_check
from mpiagg.collectives.moving_functions import allgather, alltoall
from mpiagg.common.arguments import check_counts
from mpiagg.transport import Channel, channel_of, limited


def alltoallv(
    x: npt.ArrayLike,
    sendcounts: Sequence[int],
    recvcounts: Sequence[int] | None = None,
    *,
    out: Array | None = None,
    comm: MPI.Intracomm | None = None,
    algorithm: str = "auto",
    lanes: int | None = None,
    timeout: float | None = None,
    check: bool | None = None,
    reproducible: bool | None = None,
) -> Array:
    """Give each rank some rows of every rank's array.

    Parameters
    ----------
    x : array_like
        This rank's array, of the same dtype and shape on all ranks but for the first axis: the rows for rank 0, then
        those for rank 1, and so on.
    sendcounts : sequence of int
        How many rows there are for each rank.
    recvcounts : sequence of int, optional
        How many rows come from each rank. Without it the ranks tell one another first, by an :func:`alltoall` of one
        number for each.
    out, comm, algorithm, lanes, timeout, check, reproducible
        See :mod:`mpiagg.collectives.functions`. On one node ``"auto"`` takes the rows from where they lie on the other
        ranks if the longest array has more than 512 KiB and all are registered memory (:func:`mpiagg.empty`), or 2 MiB
        and some are not but can be read. Else it is the MPI library's own collective: between nodes, for shorter
        arrays, if one is not contiguous or overlaps its output, and where that library reads as fast. After a call with
        such arrays the next 64 are the library's, too; then the ranks tell one another again what they have. A plan
        takes rows from where they lie from 4 KiB on. With ``reproducible`` the MPI library is not called. Algorithms
        that forward chunks (``"bruck"`` of any radix, for short rows; ``"hierarchical"``, ``"hierarchical_bruck"``)
        send the lengths first, in as many rounds again. With ``check`` the counts of all ranks are compared.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        The rows from rank 0, then those from rank 1, and so on: ``out`` if it was given.

    Raises
    ------
    ValueError, TypeError, StallError
        As :func:`allreduce`, and ValueError for counts that do not fit.
    MismatchError
        If a rank sends other lengths than another takes: on all ranks with ``check``, and in calls before which they
        tell one another what they have; by algorithms that forward chunks on the rank that takes them alone. What the
        MPI library does then is its own affair.

    Notes
    -----
    The sizes that go first, and the schedules by which chunks are forwarded: Fan et al., "Configurable non-uniform
    all-to-all algorithms", arXiv:2411.02581.

    Examples
    --------
    Every rank sends one row to rank 0, two to rank 1, and so on:

    >>> counts = [target + 1 for target in range(size)]
    >>> rows = mpiagg.alltoallv(np.full((sum(counts), 2), rank), counts)
    >>> rows.shape == (size * (rank + 1), 2)
    True

    Tokens that go to the ranks of their experts, and come back, are in ``docs/examples/mixture_of_experts.py``.
    """
    counts = _exchanged(sendcounts, recvcounts, comm, timeout, check=check)
    given = ("alltoall", x, "sum", 0, out, algorithm, lanes, None, reproducible, counts)
    return run(given, comm, timeout, check=check)


def allgatherv(
    x: npt.ArrayLike,
    recvcounts: Sequence[int] | None = None,
    *,
    out: Array | None = None,
    comm: MPI.Intracomm | None = None,
    algorithm: str = "auto",
    lanes: int | None = None,
    timeout: float | None = None,
    check: bool | None = None,
    reproducible: bool | None = None,
) -> Array:
    """Give the rows of all ranks to all ranks.

    Parameters
    ----------
    x : array_like
        This rank's array, of the same dtype and shape on all ranks but for the first axis.
    recvcounts : sequence of int, optional
        How many rows each rank has. Without it the ranks tell one another first, by an :func:`allgather` of one number.
    out, comm, algorithm, lanes, timeout, check, reproducible
        See :mod:`mpiagg.collectives.functions`.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        The rows of rank 0, then those of rank 1, and so on: ``out`` if it was given.

    Raises
    ------
    ValueError, TypeError, StallError
        As :func:`allreduce`, and ValueError for counts that do not fit.

    Examples
    --------
    >>> rows = mpiagg.allgatherv(np.full((rank + 1, 2), rank))  # rank r has r + 1 rows
    >>> rows[:, 0].tolist() == [r for r in range(size) for _ in range(r + 1)]
    True
    """
    counts = _gathered(x, recvcounts, comm, timeout, check=check)
    given = ("allgather", x, "sum", 0, out, algorithm, lanes, None, reproducible, counts)
    return run(given, comm, timeout, check=check)


def alltoallv_init(
    x: npt.ArrayLike,
    sendcounts: Sequence[int],
    recvcounts: Sequence[int] | None = None,
    *,
    out: Array | None = None,
    comm: MPI.Intracomm | None = None,
    algorithm: str = "auto",
    lanes: int | None = None,
    timeout: float | None = None,
    reproducible: bool | None = None,
) -> ArrayPlan:
    """Plan an :func:`alltoallv`; collective.

    Parameters
    ----------
    x, sendcounts, recvcounts, out, comm, algorithm, lanes, timeout, reproducible
        As for :func:`alltoallv`.

    Returns
    -------
    Plan
        As of :func:`allreduce_init`.

    Raises
    ------
    ValueError, TypeError, MismatchError
        As :func:`allreduce_init`.

    Examples
    --------
    >>> with mpiagg.alltoallv_init(np.full((size, 2), rank), [1] * size, [1] * size) as plan:
    ...     plan()[:, 0].tolist() == list(range(size))
    True
    """
    counts = _exchanged(sendcounts, recvcounts, comm, timeout, check=True)
    return planned(("alltoall", x, "sum", 0, out, algorithm, lanes, None, reproducible, counts), comm, timeout)


def allgatherv_init(
    x: npt.ArrayLike,
    recvcounts: Sequence[int] | None = None,
    *,
    out: Array | None = None,
    comm: MPI.Intracomm | None = None,
    algorithm: str = "auto",
    lanes: int | None = None,
    timeout: float | None = None,
    reproducible: bool | None = None,
) -> ArrayPlan:
    """Plan an :func:`allgatherv`; collective.

    Parameters
    ----------
    x, recvcounts, out, comm, algorithm, lanes, timeout, reproducible
        As for :func:`allgatherv`.

    Returns
    -------
    Plan
        As of :func:`allreduce_init`.

    Raises
    ------
    ValueError, TypeError, MismatchError
        As :func:`allreduce_init`.

    Examples
    --------
    >>> with mpiagg.allgatherv_init(np.full((rank + 1, 2), rank)) as plan:
    ...     plan().shape == (size * (size + 1) // 2, 2)
    True
    """
    counts = _gathered(x, recvcounts, comm, timeout, check=True)
    return planned(("allgather", x, "sum", 0, out, algorithm, lanes, None, reproducible, counts), comm, timeout)


def _exchanged(
    sendcounts: Sequence[int],
    recvcounts: Sequence[int] | None,
    comm: MPI.Intracomm | None,
    timeout: float | None,
    *,
    check: bool | None,
) -> Counts:
    """Return how many rows go to each rank, and come from each."""
    channel = channel_of(comm)
    sent: tuple[int, ...] = ()

    def ask() -> Array:
        return alltoall(np.array(sent), comm=comm, timeout=timeout, check=check)

    def say() -> str:
        nonlocal sent
        sent = check_counts("sendcounts", sendcounts, channel.size, "rank")
        return "alltoallv"

    received = _told(channel, say, ask, recvcounts, timeout, check=check)
    rank = channel.rank
    if sent[rank] != received[rank]:
        raise ValueError(f"rank {rank} keeps {sent[rank]} rows by its sendcounts, and {received[rank]} by recvcounts")
    return sent, received


def _gathered(
    x: npt.ArrayLike,
    recvcounts: Sequence[int] | None,
    comm: MPI.Intracomm | None,
    timeout: float | None,
    *,
    check: bool | None,
) -> Counts:
    """Return how many rows come from each rank."""
    rows = 0

    def ask() -> Array:
        return allgather(np.int64(rows), comm=comm, timeout=timeout, check=check)

    def say() -> str:
        nonlocal rows
        rows = next(iter(as_input(x).shape), 1)
        return "allgatherv"

    return (), _told(channel_of(comm), say, ask, recvcounts, timeout, check=check)


def _told(
    channel: Channel,
    say: Callable[[], str],
    ask: Callable[[], Array],
    recvcounts: Sequence[int] | None,
    timeout: float | None,
    *,
    check: bool | None,
) -> tuple[int, ...]:
    """Return the rows that come from each rank: as they are given, or as the ranks tell one another.

    With ``check`` they do so in any case, and a bad argument on one of them is an error on all.
    """
    checked, given = to_check(check), None

    def both() -> str:
        nonlocal given
        given = None if recvcounts is None else check_counts("recvcounts", recvcounts, channel.size, "rank")
        return say()

    def compared() -> str:
        if given not in (None, told):
            raise ValueError(f"recvcounts are {given}, and the other ranks send {told}")
        return "recvcounts"

    if not checked:
        both()
        if given is not None:
            return given
        with limited(timeout):
            return tuple(ask().tolist())
    with limited(timeout):
        channel.agree_on(both)
        told = tuple(ask().tolist())
        channel.agree_on(compared)
        return told
