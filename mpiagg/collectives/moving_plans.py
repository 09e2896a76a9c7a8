"""Plans of collectives for arrays that move values as they are: see :mod:`mpiagg.collectives.functions`."""

from __future__ import annotations

import numpy.typing as npt
from mpi4py import MPI

from mpiagg.arrays import Array
from mpiagg.collectives.array_calls import ArrayPlan, planned


def broadcast_init(
    x: npt.ArrayLike,
    *,
    root: int = 0,
    out: Array | None = None,
    comm: MPI.Intracomm | None = None,
    algorithm: str = "auto",
    lanes: int | None = None,
    timeout: float | None = None,
    reproducible: bool | None = None,
) -> ArrayPlan:
    """Plan a :func:`broadcast`; collective.

    Parameters
    ----------
    x, root, out, comm, algorithm, lanes, timeout, reproducible
        As for :func:`broadcast`.

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
    >>> weights = np.zeros(3)
    >>> with mpiagg.broadcast_init(weights, root=0, out=weights) as plan:
    ...     if rank == 0:
    ...         weights[:] = 7
    ...     plan()
    array([7., 7., 7.])
    """
    return planned(("broadcast", x, "sum", root, out, algorithm, lanes, None, reproducible, None), comm, timeout)


def allgather_init(
    x: npt.ArrayLike,
    *,
    out: Array | None = None,
    comm: MPI.Intracomm | None = None,
    algorithm: str = "auto",
    lanes: int | None = None,
    timeout: float | None = None,
    reproducible: bool | None = None,
) -> ArrayPlan:
    """Plan an :func:`allgather`; collective.

    Parameters
    ----------
    x, out, comm, algorithm, lanes, timeout, reproducible
        As for :func:`allgather`.

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
    >>> with mpiagg.allgather_init(np.full(2, rank)) as plan:
    ...     plan().tolist() == [[r, r] for r in range(size)]
    True
    """
    return planned(("allgather", x, "sum", 0, out, algorithm, lanes, None, reproducible, None), comm, timeout)


def gather_init(
    x: npt.ArrayLike,
    *,
    root: int = 0,
    out: Array | None = None,
    comm: MPI.Intracomm | None = None,
    algorithm: str = "auto",
    lanes: int | None = None,
    timeout: float | None = None,
    reproducible: bool | None = None,
) -> ArrayPlan:
    """Plan a :func:`gather`; collective.

    Parameters
    ----------
    x, root, out, comm, algorithm, lanes, timeout, reproducible
        As for :func:`gather`.

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
    >>> with mpiagg.gather_init(np.full(2, rank), root=0) as plan:
    ...     rows = plan()
    ...     rows is None if rank else rows.tolist() == [[r, r] for r in range(size)]
    True
    """
    return planned(("gather", x, "sum", root, out, algorithm, lanes, None, reproducible, None), comm, timeout)


def scatter_init(
    x: npt.ArrayLike | None,
    *,
    root: int = 0,
    out: Array | None = None,
    comm: MPI.Intracomm | None = None,
    algorithm: str = "auto",
    lanes: int | None = None,
    timeout: float | None = None,
    reproducible: bool | None = None,
) -> ArrayPlan:
    """Plan a :func:`scatter`; collective.

    Parameters
    ----------
    x, root, out, comm, algorithm, lanes, timeout, reproducible
        As for :func:`scatter`.

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
    >>> table = np.arange(2 * size).reshape(size, 2)
    >>> with mpiagg.scatter_init(table, root=0) as plan:
    ...     plan().tolist() == [2 * rank, 2 * rank + 1]
    True
    """
    return planned(("scatter", x, "sum", root, out, algorithm, lanes, None, reproducible, None), comm, timeout)


def alltoall_init(
    x: npt.ArrayLike,
    *,
    out: Array | None = None,
    comm: MPI.Intracomm | None = None,
    algorithm: str = "auto",
    lanes: int | None = None,
    timeout: float | None = None,
    reproducible: bool | None = None,
) -> ArrayPlan:
    """Plan an :func:`alltoall`; collective.

    Parameters
    ----------
    x, out, comm, algorithm, lanes, timeout, reproducible
        As for :func:`alltoall`.

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
    >>> with mpiagg.alltoall_init(np.full(size, rank)) as plan:
    ...     plan().tolist() == list(range(size))
    True
    """
    return planned(("alltoall", x, "sum", 0, out, algorithm, lanes, None, reproducible, None), comm, timeout)
