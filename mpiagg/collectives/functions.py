"""Collectives for arrays, with NumPy's habits: an array in, an array out, ``out=`` to work in place.

Arrays are NumPy's or CuPy's; ``out`` is on the device of the input, and a new array, too. On all ranks they are of one
kind. When a call returns, results on a device are there for all its streams.

All of them take these keywords:

``out``
    An array for the result; the input itself works in place. A new array is made without it.
``comm``
    The communicator, mpi4py's or :class:`mpiagg.Comm`; the world by default.
``algorithm``
    A name from :func:`mpiagg.algorithms`, or like ``"knomial-8"``;
    ``"auto"`` chooses by length, ``"native"`` is the MPI library's own, and
    ``"nccl"`` NVIDIA's, for arrays on GPUs of which every rank has its own.
``lanes``
    Into how many interleaved parts the vector is cut; None leaves it to the choice.
``timeout``
    Seconds that a wait may last without any message completing; the environment variable ``MPIAGG_TIMEOUT`` by default,
    or half an hour. The MPI library's own blocking collectives cannot be left; there the job ends.
``check``
    Whether the ranks first compare what they are about to do, so that a difference between them, or a bad argument on
    one of them, is an error on all before anything else is sent; by default where ``MPIAGG_CHECK`` is 1. Without it,
    ranks that disagree wait in vain, and the report of that says so.
``reproducible``
    Whether ``"auto"`` keeps to our own algorithms, so that each result has the bits of :func:`mpiagg.simulate`; by
    default as the communicator was made, or where ``MPIAGG_REPRODUCIBLE`` is 1. Otherwise it takes the MPI library's
    own collective where that was measured to be faster, but for all-reductions of floating-point numbers.

The ``..._init`` functions take the same arguments and return a :class:`~mpiagg.plans.plan.Plan`, which carries
the operation out each time it is called: ``plan() -> out``. Making one is collective, and checks that all ranks agree.

All ranks must call a collective, in the same order, with the same shape, dtype, op, root and algorithm.
Arguments are checked first. Values of float16 and bfloat16 are combined in float32.
"""

from __future__ import annotations

import numpy.typing as npt
from mpi4py import MPI

from mpiagg.arrays import Array
from mpiagg.collectives.array_calls import Op, run


def allreduce(
    x: npt.ArrayLike,
    op: Op = "sum",
    *,
    out: Array | None = None,
    comm: MPI.Intracomm | None = None,
    algorithm: str = "auto",
    lanes: int | None = None,
    wire: str | None = None,
    timeout: float | None = None,
    check: bool | None = None,
    reproducible: bool | None = None,
) -> Array:
    """Reduce the arrays of all ranks, element by element; every rank gets the result.

    Parameters
    ----------
    x : array_like
        This rank's array: any shape and layout, the same shape and dtype on all ranks.
    op : {"sum", "avg", "min", "max", "prod"} or MPI.Op
        How values are combined; ``"avg"`` is the sum divided by the number of ranks.
    out, comm, algorithm, lanes, timeout, check, reproducible
        See :mod:`mpiagg.collectives.functions`.
    wire : {None, "fp16", "bf16", "u8", "u4", "u2", "exact"}
        How values travel: as they are, or in the fewer bytes of a codec (:mod:`mpiagg.arrays.codecs`). They are
        combined in the dtype they have, or in float32, all the same. ``"exact"`` is for sums and averages that have the
        same bits by every algorithm, in every order of the ranks: it sends 2.25 times the bytes
        (:mod:`mpiagg.arrays.exact`).

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        The reduction, of x's shape and dtype, with the same bits on all ranks: ``out`` if it was given.

    Raises
    ------
    ValueError
        For an unknown op, algorithm or wire, a wire that is not for the algorithm or op, or an ``out`` that is
        read-only or of another shape.
    TypeError
        For a dtype that the op or the wire is not for, or an ``out`` that is no array or of another dtype.
    StallError
        If a message does not complete within the timeout.

    Notes
    -----
    Long vectors take 2 (n-1)/n times their bytes on every link, the least there is; see ``docs/algorithms.md``.

    Examples
    --------
    >>> mpiagg.allreduce(np.full(3, rank), op="max").tolist() == [size - 1] * 3
    True

    In place, the average:

    >>> gradient = np.array([1.0, 2.0])
    >>> mpiagg.allreduce(gradient, op="avg", out=gradient)
    array([1., 2.])
    """
    return run(("allreduce", x, op, 0, out, algorithm, lanes, wire, reproducible, None), comm, timeout, check=check)


def reduce(
    x: npt.ArrayLike,
    op: Op = "sum",
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
    """Reduce the arrays of all ranks, element by element; the root gets the result.

    Parameters
    ----------
    x, op
        As for :func:`allreduce`.
    root : int
        The rank that gets the result.
    out : numpy.ndarray or cupy.ndarray, optional
        On the root, an array for the result; on the other ranks nothing is written to it.
    comm, algorithm, lanes, timeout, check, reproducible
        See :mod:`mpiagg.collectives.functions`.

    Returns
    -------
    numpy.ndarray, cupy.ndarray or None
        On the root the reduction, of x's shape and dtype; None on the other ranks.

    Raises
    ------
    ValueError, TypeError, StallError
        As :func:`allreduce`, and ValueError for a root out of range.

    Examples
    --------
    >>> total = mpiagg.reduce(np.ones(3), root=0)
    >>> total is None if rank else total.tolist() == [size] * 3
    True
    """
    return run(("reduce", x, op, root, out, algorithm, lanes, None, reproducible, None), comm, timeout, check=check)


def reduce_scatter(
    x: npt.ArrayLike,
    op: Op = "sum",
    *,
    out: Array | None = None,
    comm: MPI.Intracomm | None = None,
    algorithm: str = "auto",
    lanes: int | None = None,
    timeout: float | None = None,
    check: bool | None = None,
    reproducible: bool | None = None,
) -> Array:
    """Reduce the arrays of all ranks, element by element; every rank receives one part of the result.

    Parameters
    ----------
    x, op
        As for :func:`allreduce`, with at least one dimension.
    out, comm, algorithm, lanes, timeout, check, reproducible
        See :mod:`mpiagg.collectives.functions`.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        On rank r ``numpy.array_split(reduction, size)[r]``: the first axis is cut evenly, and the first
        ``len(x) % size`` ranks receive one row more.

    Raises
    ------
    ValueError, TypeError, StallError
        As :func:`allreduce`, and ValueError for an array without dimensions.

    Examples
    --------
    >>> part = mpiagg.reduce_scatter(np.arange(2 * size))  # two elements for each rank
    >>> part.tolist() == [2 * rank * size, (2 * rank + 1) * size]
    True
    """
    return run(
        ("reduce_scatter", x, op, 0, out, algorithm, lanes, None, reproducible, None), comm, timeout, check=check
    )


def scan(
    x: npt.ArrayLike,
    op: Op = "sum",
    *,
    out: Array | None = None,
    comm: MPI.Intracomm | None = None,
    algorithm: str = "auto",
    lanes: int | None = None,
    timeout: float | None = None,
    check: bool | None = None,
    reproducible: bool | None = None,
) -> Array:
    """Reduce the arrays of ranks 0 to r, element by element, on every rank r.

    Parameters
    ----------
    x, op
        As for :func:`allreduce`, but for ``"avg"``.
    out, comm, algorithm, lanes, timeout, check, reproducible
        See :mod:`mpiagg.collectives.functions`.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        The reduction of the arrays of this rank and all before it: ``out`` if it was given.

    Raises
    ------
    ValueError, TypeError, StallError
        As :func:`allreduce`.

    Examples
    --------
    >>> mpiagg.scan(np.ones(2)).tolist() == [rank + 1] * 2
    True
    """
    return run(("scan", x, op, 0, out, algorithm, lanes, None, reproducible, None), comm, timeout, check=check)


def exscan(
    x: npt.ArrayLike,
    op: Op = "sum",
    *,
    out: Array | None = None,
    comm: MPI.Intracomm | None = None,
    algorithm: str = "auto",
    lanes: int | None = None,
    timeout: float | None = None,
    check: bool | None = None,
    reproducible: bool | None = None,
) -> Array | None:
    """Reduce the arrays of ranks 0 to r-1, element by element, on every rank r but the first.

    Parameters
    ----------
    x, op
        As for :func:`scan`.
    out : numpy.ndarray or cupy.ndarray, optional
        An array for the result; on rank 0 nothing is written to it.
    comm, algorithm, lanes, timeout, check, reproducible
        See :mod:`mpiagg.collectives.functions`.

    Returns
    -------
    numpy.ndarray, cupy.ndarray or None
        The reduction of the arrays of all ranks before this one; None on rank 0, which has none before it.

    Raises
    ------
    ValueError, TypeError, StallError
        As :func:`allreduce`.

    Examples
    --------
    Where the rows of this rank begin, if rank r has r + 1 rows:

    >>> before = mpiagg.exscan(rank + 1)
    >>> begin = 0 if before is None else int(before)
    >>> begin == sum(range(rank + 1))
    True
    """
    return run(("exscan", x, op, 0, out, algorithm, lanes, None, reproducible, None), comm, timeout, check=check)
