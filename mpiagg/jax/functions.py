"""The collectives of :mod:`mpiagg.jax`.

Arguments that they share:

comm : mpi4py.MPI.Intracomm, optional
    The ranks that take part; the world by default. The first call with a communicator duplicates it, and is collective.
algorithm : str
    A name from :func:`mpiagg.algorithms`, ``"auto"`` or ``"native"``, as for :func:`mpiagg.allreduce`.

A wrong argument raises where the function is traced, before anything is sent. What is found out while a compiled
program runs, such as other shapes on another rank, JAX raises as ``JaxRuntimeError`` where a result is asked for.
No collective is to be called after that: ranks may be at different places of the program.

Derivatives count a value that all ranks have (the result of :func:`allreduce`, :func:`allgather` and
:func:`broadcast`) once: all ranks are to go on from it to one and the same loss. So the gradient with respect to the
input of an :func:`allreduce` is the gradient with respect to its result, as it is in mpi4jax. Where ranks have losses
of their own, as in data-parallel training, average the gradients.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpiagg.arrays import OPS, reduction
from mpiagg.common.arguments import check_root
from mpiagg.jax.frames import DTYPES
from mpiagg.jax.primitives import TracedCall, collective_p, comm_of
from mpiagg.schedules import Collective
from mpiagg.schedules.table import algorithm as known_algorithm

_BESIDE = ("auto", "native")
"""What ``algorithm`` takes beside the names of the table."""


def allreduce(x: Any, op: str = "sum", *, comm: MPI.Intracomm | None = None, algorithm: str = "auto") -> jax.Array:
    """Reduce the arrays of all ranks, element by element; every rank gets the result.

    Parameters
    ----------
    x : array_like
        This rank's array, of the same shape and dtype on all ranks.
    op : {"sum", "avg", "min", "max", "prod"}
        How values are combined. Sums and averages can be differentiated.
    comm, algorithm
        See :mod:`mpiagg.jax.functions`.

    Returns
    -------
    jax.Array
        The reduction, of x's shape and dtype, with the same bits on all ranks.

    Raises
    ------
    ValueError
        For an unknown op or algorithm.
    TypeError
        For a dtype that the op is not for.

    Examples
    --------
    >>> total = jax.jit(mpiagg.jax.allreduce)(jnp.ones(3))
    >>> total.tolist() == [size] * 3
    True
    >>> mean = mpiagg.jax.allreduce(jnp.full(3, float(rank)), "avg")
    >>> mean.tolist() == [(size - 1) / 2] * 3
    True
    """
    return _bound("allreduce", x, op, 0, comm, algorithm)


def reduce_scatter(x: Any, op: str = "sum", *, comm: MPI.Intracomm | None = None, algorithm: str = "auto") -> jax.Array:
    """Reduce the arrays of all ranks, element by element; every rank gets its rows of the result.

    Parameters
    ----------
    x : array_like
        This rank's array, whose first axis the number of ranks divides.
    op, comm, algorithm
        As for :func:`allreduce`.

    Returns
    -------
    jax.Array
        On rank r part r of the reduction: an array of shape ``(len(x) // size, *x.shape[1:])``.

    Raises
    ------
    ValueError, TypeError
        As :func:`allreduce`, and ValueError for rows that the ranks do not divide.

    Examples
    --------
    >>> mine = jax.jit(mpiagg.jax.reduce_scatter)(jnp.ones((size, 3)))
    >>> mine.tolist() == [[size] * 3]
    True
    """
    return _bound("reduce_scatter", x, op, 0, comm, algorithm)


def allgather(x: Any, *, comm: MPI.Intracomm | None = None, algorithm: str = "auto") -> jax.Array:
    """Give the arrays of all ranks to all ranks.

    Parameters
    ----------
    x : array_like
        This rank's array, of the same shape and dtype on all ranks.
    comm, algorithm
        See :mod:`mpiagg.jax.functions`.

    Returns
    -------
    jax.Array
        An array of shape ``(size, *x.shape)``; row r is rank r's x.

    Raises
    ------
    ValueError, TypeError
        As :func:`allreduce`.

    Examples
    --------
    >>> rows = jax.jit(mpiagg.jax.allgather)(jnp.full(2, rank))
    >>> rows.tolist() == [[each, each] for each in range(size)]
    True
    """
    return _bound("allgather", x, "sum", 0, comm, algorithm)


def alltoall(x: Any, *, comm: MPI.Intracomm | None = None, algorithm: str = "auto") -> jax.Array:
    """Give each rank a part of every rank's array.

    Parameters
    ----------
    x : array_like
        This rank's array. Its first axis is cut into as many equal parts as there are ranks; part r goes to rank r.
    comm, algorithm
        See :mod:`mpiagg.jax.functions`.

    Returns
    -------
    jax.Array
        An array of x's shape; part r is from rank r.

    Raises
    ------
    ValueError, TypeError
        As :func:`reduce_scatter`.

    Examples
    --------
    >>> turned = jax.jit(mpiagg.jax.alltoall)(jnp.full(size, rank))
    >>> turned.tolist() == list(range(size))
    True
    """
    return _bound("alltoall", x, "sum", 0, comm, algorithm)


def broadcast(x: Any, *, root: int = 0, comm: MPI.Intracomm | None = None, algorithm: str = "auto") -> jax.Array:
    """Give the root's array to all ranks.

    Parameters
    ----------
    x : array_like
        On the root the array to give; elsewhere any array of the same shape and dtype, whose values do not matter.
    root : int
        The rank that gives.
    comm, algorithm
        See :mod:`mpiagg.jax.functions`.

    Returns
    -------
    jax.Array
        The root's values.

    Raises
    ------
    ValueError, TypeError
        As :func:`allreduce`, and ValueError for a root out of range.

    Examples
    --------
    >>> same = jax.jit(mpiagg.jax.broadcast)(jnp.full(3, float(rank)))
    >>> same.tolist()
    [0.0, 0.0, 0.0]
    """
    return _bound("broadcast", x, "sum", root, comm, algorithm)


def _bound(  # noqa: PLR0917 - a call in full
    verb: str, x: Any, op: str, root: int, comm: MPI.Intracomm | None, algorithm: str
) -> jax.Array:
    """Check the arguments of a call, and make it a part of the program."""
    given = jnp.asarray(x)
    dtype = np.dtype(given.dtype) if given.dtype in DTYPES else None
    if dtype is None:
        raise TypeError(f"{verb} is not for arrays of {given.dtype}")
    if algorithm not in _BESIDE:
        known_algorithm(algorithm, _BESIDE).generator(Collective(verb))
    number, size, rank = comm_of(comm)
    if verb in ("allreduce", "reduce_scatter"):
        if op not in OPS:
            raise ValueError(f"unknown op {op!r}; known: {', '.join(OPS)}")
        reduction(op, dtype, size)
    if verb in ("reduce_scatter", "alltoall") and (given.ndim == 0 or given.shape[0] % size):
        raise ValueError(f"{verb} of {size} ranks needs rows that they divide, not the shape {given.shape}")
    call = TracedCall(verb, op, check_root(root, size), algorithm, number, size, rank)
    result: jax.Array = collective_p.bind(given, call=call)
    return result
