"""Data-parallel training with pytrees: gradients are averaged and parameters broadcast, in few long messages."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpiagg.common.arguments import check_integer
from mpiagg.jax.functions import allreduce, broadcast

BUCKET_BYTES: Final = 25 * 2**20
"""How long a message gets by default, as in :class:`mpiagg.DDP`."""


def average_gradients(
    gradients: Any,
    op: str = "avg",
    *,
    comm: MPI.Intracomm | None = None,
    algorithm: str = "auto",
    bucket_bytes: int = BUCKET_BYTES,
) -> Any:
    """Combine the gradients of all ranks; inside ``jax.jit`` or outside.

    Parameters
    ----------
    gradients : pytree of arrays
        This rank's gradients; the same shapes and dtypes on all ranks.
    op : {"avg", "sum", "min", "max", "prod"}
        How they are combined.
    comm, algorithm
        See :mod:`mpiagg.jax.functions`.
    bucket_bytes : int
        Arrays of one dtype travel together, in buckets of about so many bytes.

    Returns
    -------
    pytree of jax.Array
        The averages, with the same bits on all ranks, in a tree like the one given.

    Raises
    ------
    ValueError, TypeError
        As :func:`mpiagg.jax.allreduce`.

    Examples
    --------
    >>> loss = lambda parameters: (parameters["w"] * rank).sum() + parameters["b"]
    >>> gradients = jax.grad(loss)({"w": jnp.ones(2), "b": 1.0})
    >>> gradients = mpiagg.jax.average_gradients(gradients)
    >>> gradients["w"].tolist() == [(size - 1) / 2] * 2
    True
    >>> float(gradients["b"])
    1.0
    """
    return _in_buckets(gradients, bucket_bytes, lambda x: allreduce(x, op, comm=comm, algorithm=algorithm))


def broadcast_parameters(
    parameters: Any,
    *,
    root: int = 0,
    comm: MPI.Intracomm | None = None,
    algorithm: str = "auto",
    bucket_bytes: int = BUCKET_BYTES,
) -> Any:
    """Give the root's parameters to all ranks, so that all start alike.

    Parameters
    ----------
    parameters : pytree of arrays
        Parameters, or the state of an optimizer; the same shapes and dtypes on all ranks.
    root : int
        The rank that gives.
    comm, algorithm, bucket_bytes
        As for :func:`average_gradients`.

    Returns
    -------
    pytree of jax.Array
        The root's values, in a tree like the one given.

    Raises
    ------
    ValueError, TypeError
        As :func:`mpiagg.jax.broadcast`.

    Examples
    --------
    >>> parameters = mpiagg.jax.broadcast_parameters({"w": jnp.full(2, float(rank)), "b": 0.5})
    >>> parameters["w"].tolist(), float(parameters["b"])
    ([0.0, 0.0], 0.5)
    """
    return _in_buckets(parameters, bucket_bytes, lambda x: broadcast(x, root=root, comm=comm, algorithm=algorithm))


def _in_buckets(tree: Any, bucket_bytes: int, call: Callable[[jax.Array], jax.Array]) -> Any:
    """Return a tree of what a call makes of a tree's arrays, which it gets laid end to end."""
    check_integer("bucket_bytes", bucket_bytes, 1)
    leaves, structure = jax.tree.flatten(tree)
    arrays = [jnp.asarray(each) for each in leaves]
    results: list[Any] = [None] * len(arrays)
    for places in _buckets(arrays, bucket_bytes):
        chosen = [arrays[place] for place in places]
        result = call(jnp.concatenate([each.ravel() for each in chosen]))
        parts = jnp.split(result, list(accumulate(each.size for each in chosen[:-1])))
        for place, part in zip(places, parts, strict=True):
            results[place] = part.reshape(arrays[place].shape)
    return jax.tree.unflatten(structure, results)


def _buckets(arrays: list[jax.Array], bucket_bytes: int) -> list[list[int]]:
    """Return which arrays travel together: those of one dtype, in their order, the last bucket of each open to more."""
    open_ones: dict[np.dtype[Any], list[int]] = {}
    lengths: dict[np.dtype[Any], int] = {}
    buckets = []
    for place, array in enumerate(arrays):
        dtype = array.dtype
        if dtype not in open_ones or lengths[dtype] + array.nbytes > bucket_bytes:
            open_ones[dtype], lengths[dtype] = [], 0
            buckets.append(open_ones[dtype])
        open_ones[dtype].append(place)
        lengths[dtype] += array.nbytes
    return buckets
