"""Collectives of neighbors, for arrays: each rank exchanges with some others, as a directed graph says.

They are MPI's neighborhood collectives (MPI-4.1, section 8.6). All of them take these keywords:

``neighbors``
    The ranks that this rank sends to and receives from, in this order.
``sources``, ``destinations``
    In place of ``neighbors``, the ranks that it receives from and those that it sends to. Without any of the three the
    topology of ``comm`` says it: a grid (``Create_cart``), a graph or a distributed graph. Beyond the border of a grid
    there is no neighbor; that part of the input goes nowhere, and that part of the output stays as it is (0 in a new
    array).
``out``, ``comm``, ``timeout``, ``check``
    See :mod:`mpiagg.collectives.functions`. With ``check`` the ranks compare the graph, too.

Every rank of the communicator calls, also one without neighbors. Rank a names b as a destination as often as b names a
as a source. A rank may be named several times, and may name itself. Several edges from a to b are in the same order at
both ends; on a grid, what goes down in a dimension arrives from above.

There is one round: a rank posts what it receives and what it sends, and waits for all of it. What goes to one rank in
parts of up to 32 KiB is one message. Nothing is forwarded, so a call takes as long as the rank that sends or receives
most.

Without ``check``, an edge that only one of its ranks names, or that has other rows at its two ends, is not found before
anything is sent: a rank that waits for what nobody sends does so in vain, and the report of that says so. If only the
sum of the rows from one rank is right, as with ``recvcounts`` of several edges in another order, nothing is found.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy.typing as npt
from mpi4py import MPI

from mpiagg.arrays import Array
from mpiagg.collectives.neighbor_calls import Given, run


def neighbor_allgather(
    x: npt.ArrayLike,
    neighbors: Iterable[int] | None = None,
    *,
    sources: Iterable[int] | None = None,
    destinations: Iterable[int] | None = None,
    out: Array | None = None,
    comm: MPI.Intracomm | None = None,
    timeout: float | None = None,
    check: bool | None = None,
) -> Array:
    """Give this rank's array to its destinations, and get those of its sources.

    Parameters
    ----------
    x : array_like
        This rank's array: any layout, of the same shape and dtype on all ranks.
    neighbors, sources, destinations, out, comm, timeout, check
        See :mod:`mpiagg.collectives.neighbor_functions`.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        An array of shape ``(number of sources, *x.shape)``: part k is the array of ``sources[k]``. It is ``out`` if
        that was given.

    Raises
    ------
    ValueError
        For what is no rank, neighbors that are given in two ways or in none, or an ``out`` that is read-only or of
        another shape.
    TypeError
        For a dtype that is no number, or an ``out`` that is no array or of another dtype.
    MismatchError
        With ``check``, on all ranks, if they disagree on the graph, the shape or the dtype.
    StallError
        If a message does not complete within the timeout.

    Notes
    -----
    One round. With an input of B bytes a rank sends B bytes to each of its destinations and receives B from each of
    its sources.

    Examples
    --------
    The arrays of both neighbors in a ring:

    >>> ring = [(rank - 1) % size, (rank + 1) % size]
    >>> before, after = mpiagg.neighbor_allgather(np.full(3, rank), ring)
    >>> [before[0], after[0]] == ring
    True
    """
    given = Given("neighbor_allgather", x, comm, neighbors, sources, destinations, out)
    return run(given, timeout, check=check)


def neighbor_allgatherv(
    x: npt.ArrayLike,
    recvcounts: Sequence[int] | None = None,
    *,
    neighbors: Iterable[int] | None = None,
    sources: Iterable[int] | None = None,
    destinations: Iterable[int] | None = None,
    out: Array | None = None,
    comm: MPI.Intracomm | None = None,
    timeout: float | None = None,
    check: bool | None = None,
) -> Array:
    """Give this rank's rows to its destinations, and get those of its sources.

    Parameters
    ----------
    x : array_like
        This rank's array, of the same dtype and shape on all ranks but for the first axis.
    recvcounts : sequence of int, optional
        How many rows come from each source. Without it, on all ranks, the neighbors tell one another first.
    neighbors, sources, destinations, out, comm, timeout, check
        See :mod:`mpiagg.collectives.neighbor_functions`. With ``check`` the counts are compared, too.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        The rows of the first source, then those of the second, and so on: ``out`` if it was given.

    Raises
    ------
    ValueError, TypeError, MismatchError, StallError
        As :func:`neighbor_allgather`, and ValueError for counts that do not fit.

    Notes
    -----
    As :func:`neighbor_allgather`, and a round of 8 bytes for each edge if there are no counts.

    Examples
    --------
    Rank r has r + 1 rows:

    >>> ring = [(rank - 1) % size, (rank + 1) % size]
    >>> rows = mpiagg.neighbor_allgatherv(np.full((rank + 1, 2), rank), neighbors=ring)
    >>> rows[:, 0].tolist() == [r for r in ring for _ in range(r + 1)]
    True
    """
    given = Given("neighbor_allgatherv", x, comm, neighbors, sources, destinations, out, None, recvcounts)
    return run(given, timeout, check=check)


def neighbor_alltoall(
    x: npt.ArrayLike,
    neighbors: Iterable[int] | None = None,
    *,
    sources: Iterable[int] | None = None,
    destinations: Iterable[int] | None = None,
    out: Array | None = None,
    comm: MPI.Intracomm | None = None,
    timeout: float | None = None,
    check: bool | None = None,
) -> Array:
    """Give each destination a row of this rank's array, and get a row of each source.

    Parameters
    ----------
    x : array_like
        This rank's array, with a row for each destination: ``x[k]`` goes to ``destinations[k]``. Rows are of the same
        shape and dtype on all ranks.
    neighbors, sources, destinations, out, comm, timeout, check
        See :mod:`mpiagg.collectives.neighbor_functions`.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        An array with a row for each source: row k came from ``sources[k]``. It is ``out`` if that was given.

    Raises
    ------
    ValueError, TypeError, MismatchError, StallError
        As :func:`neighbor_allgather`, and ValueError for another number of rows.

    Notes
    -----
    One round. With rows of B bytes a rank sends B bytes to each of its destinations and receives B from each of its
    sources.

    Examples
    --------
    The borders of a field go to the neighbors in a grid of one dimension, and theirs come back:

    >>> field = np.full((4, 3), rank)
    >>> grid = comm.Create_cart([size], periods=[True])
    >>> below, above = mpiagg.neighbor_alltoall(field[[0, -1]], comm=grid)
    >>> [below[0], above[0]] == [(rank - 1) % size, (rank + 1) % size]
    True
    >>> grid.Free()
    """
    given = Given("neighbor_alltoall", x, comm, neighbors, sources, destinations, out)
    return run(given, timeout, check=check)


def neighbor_alltoallv(
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
    check: bool | None = None,
) -> Array:
    """Give each destination some rows of this rank's array, and get some of each source.

    Parameters
    ----------
    x : array_like
        This rank's array, of the same dtype and shape on all ranks but for the first axis: the rows for the first
        destination, then those for the second, and so on.
    sendcounts : sequence of int
        How many rows there are for each destination.
    recvcounts : sequence of int, optional
        How many rows come from each source. Without it, on all ranks, the neighbors tell one another first.
    neighbors, sources, destinations, out, comm, timeout, check
        See :mod:`mpiagg.collectives.neighbor_functions`. With ``check`` the counts are compared, too.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        The rows from the first source, then those from the second, and so on: ``out`` if it was given.

    Raises
    ------
    ValueError, TypeError, MismatchError, StallError
        As :func:`neighbor_allgatherv`.

    Notes
    -----
    One round. Rows are sent once, from the rank that has them to the one that gets them; and a round of 8 bytes for
    each edge goes before it if there are no ``recvcounts``.

    Examples
    --------
    One particle leaves a cell for the cell before it, and two for the cell after it:

    >>> cells = [(rank - 1) % size, (rank + 1) % size]
    >>> leaving = np.full((3, 2), float(rank))
    >>> arrived = mpiagg.neighbor_alltoallv(leaving, [1, 2], neighbors=cells)
    >>> arrived.shape
    (3, 2)
    """
    given = Given("neighbor_alltoallv", x, comm, neighbors, sources, destinations, out, sendcounts, recvcounts)
    return run(given, timeout, check=check)
