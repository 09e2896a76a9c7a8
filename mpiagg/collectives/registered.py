"""Arrays in memory that the ranks of a node share: collectives work on them in place, and nothing is copied."""

from __future__ import annotations

import math
import warnings
from operator import index
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpiagg.arrays import HOST, Array, Device, find_device, working_dtype
from mpiagg.errors import DeviceError
from mpiagg.transport import Channel, channel_of

MOST_BYTES: Final = 2**62
"""What ranks tell one another of sizes has to fit an integer of 8 bytes."""


def empty(
    shape: int | tuple[int, ...],
    dtype: npt.DTypeLike = np.float32,
    *,
    comm: MPI.Intracomm | None = None,
    device: str | None = None,
) -> Array:
    """Return a new array, uninitialised, in memory that all ranks of the node have mapped; collective.

    Collectives on ``comm`` find by themselves that an array, or a contiguous part of one, lies in such memory. Where
    that is so on every rank of a node, its ranks reduce the vectors where they are: each its part of all of them. A
    reduce-scatter needs the inputs there, an all-gather the outputs, a reduction to one rank the inputs and its output.

    Parameters
    ----------
    shape : int or tuple of int
        As for :func:`numpy.empty`; the ranks may give different ones.
    dtype : data-type
        As for :func:`numpy.empty`; float32 by default, as gradients are.
    comm : mpi4py.MPI.Intracomm, optional
        The communicator on which collectives will use the array; the world by default.
    device : str, optional
        ``"cuda"`` for memory of the CUDA device in use at present, or ``"cuda:1"`` and so on, which the ranks of a node
        map by CUDA IPC, be they on one device or on several. The host by default.

    Returns
    -------
    numpy.ndarray, or the device's array
        Its memory is used again, for arrays of about its length, when nothing refers to it any more. Where a rank is
        alone on its node it is memory like any other.

    Raises
    ------
    ValueError
        For a negative shape, or one of more than 2**62 bytes; for an unknown device.
    TypeError
        For a dtype that cannot travel.
    MismatchError
        If another rank raised.
    MemoryError
        If there is not as much shared memory; on all ranks of the node.
    DeviceError
        If the device cannot be used, or is another than that of an earlier array on this communicator; on all ranks of
        the node, if processes cannot map each other's memory of their devices.

    Examples
    --------
    >>> x = mpiagg.empty(1000, np.float64)
    >>> x[:] = rank
    >>> mpiagg.allreduce(x, op="max", out=x) is x
    True
    >>> bool(np.all(x == size - 1))
    True
    """
    channel = channel_of(comm)
    made: list[tuple[tuple[int, ...], np.dtype[Any], Device]] = []

    def check() -> str:
        lengths, wanted, where = *_checked(shape, dtype), find_device(device)
        channel.memory.check(where)
        made.append((lengths, wanted, where))
        return f"empty on {where.kind}"

    channel.agree_on(check)
    lengths, wanted, where = made[0]
    return registered_vector(channel, math.prod(lengths), wanted, where).reshape(lengths)


def _checked(shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return a shape and a dtype if there can be an array of them."""
    lengths = tuple(map(index, shape)) if isinstance(shape, tuple | list) else (index(shape),)
    if any(length < 0 for length in lengths):
        raise ValueError(f"negative dimensions are not allowed: {shape}")
    wanted = np.dtype(dtype)
    working_dtype(wanted)
    if math.prod(lengths) * wanted.itemsize > MOST_BYTES:
        raise ValueError(f"an array of shape {shape} and dtype {wanted} is too large for any memory")
    return lengths, wanted


def shared_vector(channel: Channel, length: int, dtype: np.dtype[Any], device: Device = HOST) -> Array:
    """Return a vector, uninitialised, that the ranks of the node share if they can; collective there.

    Of memory of a device that they cannot share a warning tells.
    """
    try:
        return registered_vector(channel, length, dtype, device)
    except (MemoryError, DeviceError) as error:
        if device is not HOST:  # which costs more there: what is plain memory goes by messages, over the bus
            channel.memory.do_without_slots(str(error))
            warnings.warn(
                f"{length * dtype.itemsize} bytes on {device.name} are plain memory, which ranks do not share: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
        return device.empty(length, dtype)


def registered_vector(channel: Channel, length: int, dtype: np.dtype[Any], device: Device = HOST) -> Array:
    """Return a vector in memory that the ranks of the node share, where there are others; collective there.

    Raises
    ------
    MemoryError
        If there is not as much; on all ranks of the node.
    DeviceError
        If processes cannot map each other's memory of their devices; on all ranks of the node.
    """
    if channel.node.size == 1:
        return device.empty(length, dtype)
    return channel.memory.on(device).lease(length * dtype.itemsize, busy=channel.busy).view(dtype)
