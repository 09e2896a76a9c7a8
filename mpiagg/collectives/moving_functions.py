"""Collectives for arrays that move values as they are: see :mod:`mpiagg.collectives.functions`."""

from __future__ import annotations

import numpy.typing as npt
from mpi4py import MPI

from mpiagg.arrays import Array
from mpiagg.collectives.array_calls import run


def broadcast(
    x: npt.ArrayLike,
    *,
    root: int = 0,
    out: Array | None = None,
    comm: MPI.Intracomm | None = None,
    algorithm: str = "auto",
    lanes: int | None = None,
    timeout: float | None = None,
    check: bool | None = None,
    reproducible: bool | None = None,
) -> Array:
    """Give the root's array to all ranks.

    Parameters
    ----------
    x : array_like
        On the root the array to give; elsewhere any array of the same shape and dtype, whose values do not matter.
    root : int
        The rank that gives.
    out, comm, algorithm, lanes, timeout, check, reproducible
        See :mod:`mpiagg.collectives.functions`.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        The root's values: ``out`` if it was given.

    Raises
    ------
    ValueError, TypeError, StallError
        As :func:`allreduce`, and ValueError for a root out of range.

    Examples
    --------
    >>> weights = np.arange(3.0) if rank == 0 else np.empty(3)
    >>> mpiagg.broadcast(weights, root=0)
    array([0., 1., 2.])
    """
    return run(
        ("broadcast", x, "sum", root, out, algorithm, lanes, None, reproducible, None), comm, timeout, check=check
    )


def allgather(
    x: npt.ArrayLike,
    *,
    out: Array | None = None,
    comm: MPI.Intracomm | None = None,
    algorithm: str = "auto",
    lanes: int | None = None,
    timeout: float | None = None,
    check: bool | None = None,
    reproducible: bool | None = None,
) -> Array:
    """Give the arrays of all ranks to all ranks.

    Parameters
    ----------
    x : array_like
        This rank's array, of the same shape and dtype on all ranks.
    out, comm, algorithm, lanes, timeout, check, reproducible
        See :mod:`mpiagg.collectives.functions`.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        An array of shape ``(size, *x.shape)``; row r is rank r's x.

    Raises
    ------
    ValueError, TypeError, StallError
        As :func:`allreduce`.

    Examples
    --------
    >>> rows = mpiagg.allgather(np.full(2, rank))
    >>> rows.tolist() == [[r, r] for r in range(size)]
    True
    """
    return run(("allgather", x, "sum", 0, out, algorithm, lanes, None, reproducible, None), comm, timeout, check=check)


def gather(
    x: npt.ArrayLike,
    *,
    root: int = 0,
    out: Array | None = None,
    comm: MPI.Intracomm | None = None,
    algorithm: str = "auto",
    lanes: int | None = None,
    timeout: float | None = None,
    check: bool | None = None,
    reproducible: bool | None = None,
) -> Array | None:
    """Give the arrays of all ranks to the root.

    Parameters
    ----------
    x : array_like
        This rank's array, of the same shape and dtype on all ranks.
    root : int
        The rank that gets them.
    out : numpy.ndarray or cupy.ndarray, optional
        On the root, an array for the result; elsewhere one of the same shape, to which nothing is written.
    comm, algorithm, lanes, timeout, check, reproducible
        See :mod:`mpiagg.collectives.functions`.

    Returns
    -------
    numpy.ndarray, cupy.ndarray or None
        On the root an array of shape ``(size, *x.shape)``, whose row r is rank r's x; None elsewhere.

    Raises
    ------
    ValueError, TypeError, StallError
        As :func:`allreduce`, and ValueError for a root out of range.

    Examples
    --------
    >>> rows = mpiagg.gather(np.full(2, rank), root=0)
    >>> rows is None if rank else rows.tolist() == [[r, r] for r in range(size)]
    True
    """
    return run(("gather", x, "sum", root, out, algorithm, lanes, None, reproducible, None), comm, timeout, check=check)


def scatter(
    x: npt.ArrayLike | None,
    *,
    root: int = 0,
    out: Array | None = None,
    comm: MPI.Intracomm | None = None,
    algorithm: str = "auto",
    lanes: int | None = None,
    timeout: float | None = None,
    check: bool | None = None,
    reproducible: bool | None = None,
) -> Array:
    """Give each rank its row of the root's array.

    Parameters
    ----------
    x : array_like or None
        On the root an array of ``size`` rows, row r for rank r. Elsewhere any array of the same shape and dtype, whose
        values do not matter; or None, if there is an ``out`` to tell the shape of a row.
    root : int
        The rank that gives.
    out, comm, algorithm, lanes, timeout, check, reproducible
        See :mod:`mpiagg.collectives.functions`.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        This rank's row, of shape ``x.shape[1:]``: ``out`` if it was given.

    Raises
    ------
    ValueError, TypeError, StallError
        As :func:`allreduce`, and ValueError for a root out of range, or an array of another number of rows.

    Examples
    --------
    >>> table = np.arange(2 * size).reshape(size, 2)
    >>> mpiagg.scatter(table, root=0).tolist() == [2 * rank, 2 * rank + 1]
    True

    Where only the root has the array:

    >>> row = np.empty(2, int)
    >>> mpiagg.scatter(table if rank == 0 else None, root=0, out=row).tolist() == [2 * rank, 2 * rank + 1]
    True
    """
    return run(("scatter", x, "sum", root, out, algorithm, lanes, None, reproducible, None), comm, timeout, check=check)


def alltoall(
    x: npt.ArrayLike,
    *,
    out: Array | None = None,
    comm: MPI.Intracomm | None = None,
    algorithm: str = "auto",
    lanes: int | None = None,
    timeout: float | None = None,
    check: bool | None = None,
    reproducible: bool | None = None,
) -> Array:
    """Give each rank its part of every rank's array.

    Parameters
    ----------
    x : array_like
        This rank's array, of the same shape and dtype on all ranks. Its first axis is cut into ``size`` equal parts,
        part r for rank r.
    out, comm, algorithm, lanes, timeout, check, reproducible
        See :mod:`mpiagg.collectives.functions`.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        An array of x's shape, whose part s is what rank s had for this rank: ``out`` if it was given.

    Raises
    ------
    ValueError, TypeError, StallError
        As :func:`allreduce`, and ValueError for a first axis that cannot be cut so.

    Examples
    --------
    >>> received = mpiagg.alltoall(10 * rank + np.arange(size))  # element r is for rank r
    >>> received.tolist() == [10 * source + rank for source in range(size)]
    True
    """
    return run(("alltoall", x, "sum", 0, out, algorithm, lanes, None, reproducible, None), comm, timeout, check=check)
