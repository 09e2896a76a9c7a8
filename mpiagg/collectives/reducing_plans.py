"""Plans of collectives for arrays that reduce: see :mod:`mpiagg.collectives.functions`."""

from __future__ import annotations

import numpy.typing as npt
from mpi4py import MPI

from mpiagg.arrays import Array
from mpiagg.collectives.array_calls import ArrayPlan, Op, planned


def allreduce_init(
    x: npt.ArrayLike,
    op: Op = "sum",
    *,
    out: Array | None = None,
    comm: MPI.Intracomm | None = None,
    algorithm: str = "auto",
    lanes: int | None = None,
    wire: str | None = None,
    timeout: float | None = None,
    reproducible: bool | None = None,
) -> ArrayPlan:
    """Plan an :func:`allreduce` of ``x`` as it is whenever the plan runs; collective.

    Parameters
    ----------
    x, op, out, comm, algorithm, lanes, wire, timeout, reproducible
        As for :func:`allreduce`.

    Returns
    -------
    Plan
        ``plan()`` returns ``out``, or an array of the plan's own that is overwritten each time.

    Raises
    ------
    ValueError, TypeError
        As :func:`allreduce`.
    MismatchError
        On all ranks, if the ranks disagree on any argument.

    Examples
    --------
    >>> gradient = np.empty(3)
    >>> with mpiagg.allreduce_init(gradient, op="avg", out=gradient) as plan:
    ...     for step in range(5):
    ...         gradient[:] = step
    ...         averaged = plan()
    >>> averaged
    array([4., 4., 4.])
    """
    return planned(("allreduce", x, op, 0, out, algorithm, lanes, wire, reproducible, None), comm, timeout)


def reduce_init(
    x: npt.ArrayLike,
    op: Op = "sum",
    *,
    root: int = 0,
    out: Array | None = None,
    comm: MPI.Intracomm | None = None,
    algorithm: str = "auto",
    lanes: int | None = None,
    timeout: float | None = None,
    reproducible: bool | None = None,
) -> ArrayPlan:
    """Plan a :func:`reduce`; collective.

    Parameters
    ----------
    x, op, root, out, comm, algorithm, lanes, timeout, reproducible
        As for :func:`reduce`.

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
    >>> with mpiagg.reduce_init(np.ones(3), root=0) as plan:
    ...     total = plan()
    ...     total is None if rank else total.tolist() == [size] * 3
    True
    """
    return planned(("reduce", x, op, root, out, algorithm, lanes, None, reproducible, None), comm, timeout)


def reduce_scatter_init(
    x: npt.ArrayLike,
    op: Op = "sum",
    *,
    out: Array | None = None,
    comm: MPI.Intracomm | None = None,
    algorithm: str = "auto",
    lanes: int | None = None,
    timeout: float | None = None,
    reproducible: bool | None = None,
) -> ArrayPlan:
    """Plan a :func:`reduce_scatter`; collective.

    Parameters
    ----------
    x, op, out, comm, algorithm, lanes, timeout, reproducible
        As for :func:`reduce_scatter`.

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
    >>> with mpiagg.reduce_scatter_init(np.ones(2 * size)) as plan:
    ...     plan().tolist() == [size, size]
    True
    """
    return planned(("reduce_scatter", x, op, 0, out, algorithm, lanes, None, reproducible, None), comm, timeout)


def scan_init(
    x: npt.ArrayLike,
    op: Op = "sum",
    *,
    out: Array | None = None,
    comm: MPI.Intracomm | None = None,
    algorithm: str = "auto",
    lanes: int | None = None,
    timeout: float | None = None,
    reproducible: bool | None = None,
) -> ArrayPlan:
    """Plan a :func:`scan`; collective.

    Parameters
    ----------
    x, op, out, comm, algorithm, lanes, timeout, reproducible
        As for :func:`scan`.

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
    >>> with mpiagg.scan_init(np.ones(2)) as plan:
    ...     plan().tolist() == [rank + 1] * 2
    True
    """
    return planned(("scan", x, op, 0, out, algorithm, lanes, None, reproducible, None), comm, timeout)


def exscan_init(
    x: npt.ArrayLike,
    op: Op = "sum",
    *,
    out: Array | None = None,
    comm: MPI.Intracomm | None = None,
    algorithm: str = "auto",
    lanes: int | None = None,
    timeout: float | None = None,
    reproducible: bool | None = None,
) -> ArrayPlan:
    """Plan an :func:`exscan`; collective.

    Parameters
    ----------
    x, op, out, comm, algorithm, lanes, timeout, reproducible
        As for :func:`exscan`.

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
    >>> with mpiagg.exscan_init(np.ones(2)) as plan:
    ...     before = plan()
    ...     before is None if rank == 0 else before.tolist() == [rank] * 2
    True
    """
    return planned(("exscan", x, op, 0, out, algorithm, lanes, None, reproducible, None), comm, timeout)
