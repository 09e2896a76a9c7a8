"""Plans of collectives of neighbors, for arrays: see :mod:`mpiagg.collectives.neighbor_functions`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy.typing as npt
from mpi4py import MPI

from mpiagg.arrays import Array
from mpiagg.collectives.array_calls import ArrayPlan
from mpiagg.collectives.neighbor_calls import Given, planned


def neighbor_allgather_init(
    x: npt.ArrayLike,
    neighbors: Iterable[int] | None = None,
    *,
    sources: Iterable[int] | None = None,
    destinations: Iterable[int] | None = None,
    out: Array | None = None,
    comm: MPI.Intracomm | None = None,
    timeout: float | None = None,
) -> ArrayPlan:
    """Plan a :func:`neighbor_allgather` of ``x`` as it is whenever the plan runs; collective over all ranks.

    Parameters
    ----------
    x, neighbors, sources, destinations, out, comm, timeout
        As for :func:`neighbor_allgather`.

    Returns
    -------
    Plan
        ``plan()`` returns ``out``, or an array of the plan's own that is overwritten each time.

    Raises
    ------
    ValueError, TypeError
        As :func:`neighbor_allgather`.
    MismatchError
        On all ranks, if they disagree on the graph or on any other argument.

    Examples
    --------
    >>> ring = [(rank - 1) % size, (rank + 1) % size]
    >>> with mpiagg.neighbor_allgather_init(np.full(3, rank), ring) as plan:
    ...     before, after = plan()
    ...     [before[0], after[0]] == ring
    True
    """
    return planned(Given("neighbor_allgather", x, comm, neighbors, sources, destinations, out), timeout)


def neighbor_allgatherv_init(
    x: npt.ArrayLike,
    recvcounts: Sequence[int] | None = None,
    *,
    neighbors: Iterable[int] | None = None,
    sources: Iterable[int] | None = None,
    destinations: Iterable[int] | None = None,
    out: Array | None = None,
    comm: MPI.Intracomm | None = None,
    timeout: float | None = None,
) -> ArrayPlan:
    """Plan a :func:`neighbor_allgatherv`; collective.

    Parameters
    ----------
    x, recvcounts, neighbors, sources, destinations, out, comm, timeout
        As for :func:`neighbor_allgatherv`.

    Returns
    -------
    Plan
        As of :func:`neighbor_allgather_init`.

    Raises
    ------
    ValueError, TypeError, MismatchError
        As :func:`neighbor_allgather_init`.

    Examples
    --------
    >>> ring = [(rank - 1) % size, (rank + 1) % size]
    >>> with mpiagg.neighbor_allgatherv_init(np.full((2, 3), rank), [2, 2], neighbors=ring) as plan:
    ...     plan()[:, 0].tolist() == [ring[0], ring[0], ring[1], ring[1]]
    True
    """
    given = Given("neighbor_allgatherv", x, comm, neighbors, sources, destinations, out, None, recvcounts)
    return planned(given, timeout)


def neighbor_alltoall_init(
    x: npt.ArrayLike,
    neighbors: Iterable[int] | None = None,
    *,
    sources: Iterable[int] | None = None,
    destinations: Iterable[int] | None = None,
    out: Array | None = None,
    comm: MPI.Intracomm | None = None,
    timeout: float | None = None,
) -> ArrayPlan:
    """Plan a :func:`neighbor_alltoall`; collective.

    Parameters
    ----------
    x, neighbors, sources, destinations, out, comm, timeout
        As for :func:`neighbor_alltoall`.

    Returns
    -------
    Plan
        As of :func:`neighbor_allgather_init`.

    Raises
    ------
    ValueError, TypeError, MismatchError
        As :func:`neighbor_allgather_init`.

    Examples
    --------
    >>> ring = [(rank - 1) % size, (rank + 1) % size]
    >>> with mpiagg.neighbor_alltoall_init(np.full((2, 3), rank), ring) as plan:
    ...     plan()[:, 0].tolist() == ring
    True
    """
    return planned(Given("neighbor_alltoall", x, comm, neighbors, sources, destinations, out), timeout)


def neighbor_alltoallv_init(
    x: npt.ArrayLike,
    sendcounts: Sequence[int],
    recvcounts: Sequence[int] | None = None,
    *,
    neighbors: Iterable[int] | None = None,
    sources: Iterable[int] | None = None,
    destinations: Iterable[int] | None = None,
    out: Array | None = None,
    comm: MPI.Intracomm | None = None,
    timeout: float | None = None,
) -> ArrayPlan:
    """Plan a :func:`neighbor_alltoallv`; collective.

    Parameters
    ----------
    x, sendcounts, recvcounts, neighbors, sources, destinations, out, comm, timeout
        As for :func:`neighbor_alltoallv`.

    Returns
    -------
    Plan
        As of :func:`neighbor_allgather_init`.

    Raises
    ------
    ValueError, TypeError, MismatchError
        As :func:`neighbor_allgather_init`.

    Examples
    --------
    >>> ring = [(rank - 1) % size, (rank + 1) % size]
    >>> with mpiagg.neighbor_alltoallv_init(np.full((3, 1), rank), [1, 2], neighbors=ring) as plan:
    ...     plan().shape
    (3, 1)
    """
    given = Given("neighbor_alltoallv", x, comm, neighbors, sources, destinations, out, sendcounts, recvcounts)
    return planned(given, timeout)
