"""Arrays as the layers above see them, wherever they lie: inputs, outputs, flat views, places in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiagg.arrays.devices import Device
from mpiagg.arrays.host import HOST
from mpiagg.arrays.reductions import Array, working_dtype
from mpiagg.arrays.where import accelerator_of, device_of, is_array


def as_input(x: Any) -> Array:
    """Return ``x`` as an array that can travel.

    Raises
    ------
    TypeError
        If its dtype is not a number, or it is a masked array.
    """
    array: Array = x
    if x.__class__ is not np.ndarray and device_of(x) is HOST:
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError("a masked array would lose its mask; pass x.filled(value), or x.data")
        array = np.asarray(x)
    working_dtype(array.dtype)
    return array


def check_output(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], device: Device = HOST) -> Array:
    """Return ``out`` if a result of ``shape`` and ``dtype``, which lies on ``device``, can be written to it.

    Raises
    ------
    TypeError
        If it is not an array, or of another dtype.
    ValueError
        If it is on another device, of another shape, or read-only.
    """
    if device is not HOST or out.__class__ is not np.ndarray:
        _check_device(out, device)
    if out.dtype != dtype:
        raise TypeError(f"out has dtype {out.dtype}, the result has {dtype}")
    if out.shape != shape:
        raise ValueError(f"out has shape {out.shape}, the result has {shape}")
    if not writeable(out):
        raise ValueError("out is read-only")
    return out  # type: ignore[no-any-return]  # it has been found to be an array


def _check_device(out: object, device: Device) -> None:
    """Raise TypeError or ValueError if this is no array on a device."""
    if not is_array(out):
        wanted = "a NumPy array" if device is HOST else f"an array on {device.name}"
        raise TypeError(f"out must be {wanted}, not {type(out).__name__}")
    if device_of(out) is not device:
        raise ValueError(f"out is on {device_of(out).name}, the input on {device.name}; they must be on one device")


def writeable(array: Array) -> bool:
    """Whether an array can be written to, as those of accelerators always can."""
    return bool(getattr(array.flags, "writeable", True))


def is_flat(array: Array) -> bool:
    """Whether all elements lie one after the other in C order, aligned: mpi4py has no type for others."""
    return bool(array.flags.c_contiguous and getattr(array.flags, "aligned", True))


def flat(array: Array) -> Array | None:
    """Return a one-dimensional view of all elements, or None where an array :func:`is_flat` not."""
    if not is_flat(array):
        return None
    vector = array.reshape(-1)
    return vector if vector.ndim == 1 else flat(np.asarray(array))  # NumPy's matrices always have two dimensions


def address(array: Array) -> int:
    """Return where the first element lies."""
    return HOST.address(array) if isinstance(array, np.ndarray) else device_of(array).address(array)


def same_memory(x: Array, view: Array) -> bool:
    """Return whether a contiguous view and ``x`` are the same elements in the same order, so that no copy is needed."""
    return x.dtype == view.dtype and x.shape == view.shape and x.flags.c_contiguous and address(x) == address(view)


def overlap(x: Array, y: Array) -> bool:
    """Return whether two contiguous arrays of one device have bytes in common."""
    return address(x) < address(y) + y.nbytes and address(y) < address(x) + x.nbytes


def settle(*arrays: Array) -> None:
    """Wait until accelerators have done what this thread has asked of them in its present stream, for these arrays."""
    for device in {accelerator_of(x) for x in arrays}:
        if device is not None:
            device.synchronise()


def to_host(array: Array) -> Array:
    """Return a copy as a NumPy array."""
    return device_of(array).to_host(array)


def load(target: Array, source: Array) -> None:
    """Write a NumPy array of the same shape to an array, wherever that lies."""
    device = device_of(target)
    device.convert(target, source if device is HOST else device.from_host(source))


def convert(target: Array, source: Array) -> None:
    """Write an array's values in the dtype of another of the same shape on the same device, ``casting="unsafe"``."""
    if isinstance(target, np.ndarray):
        HOST.convert(target, source)
    else:
        device_of(target).convert(target, source)


def joined(arrays: Sequence[Array]) -> Array | None:
    """Return arrays that lie one after the other in memory as one vector, or None where they do not."""
    filled = [x for x in arrays if x.size]
    if not filled or not all(x.flags.c_contiguous and x.dtype == filled[0].dtype for x in filled):
        return None
    start = end = address(filled[0])
    for x in filled:
        if address(x) != end:
            return None
        end += x.nbytes
    return device_of(filled[0]).borrow(start, sum(x.size for x in filled), filled[0].dtype, filled)
