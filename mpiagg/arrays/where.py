"""On which device an array lies, and which there are. An accelerator's library is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

import numpy as np

from mpiagg.arrays.devices import Accelerator, Device
from mpiagg.arrays.host import HOST
from mpiagg.errors import DeviceError


def device_of(x: object) -> Device:
    """Return the device on which an array lies; the host for whatever is no array of an accelerator's."""
    if isinstance(x, np.ndarray):
        return HOST
    find = ACCELERATED.get(type(x).__module__.partition(".")[0])
    return HOST if find is None else find(x)


def is_array(x: object) -> bool:
    """Whether this is an array of NumPy's or of an accelerator's. A masked array is none: its mask would be lost."""
    if isinstance(x, np.ndarray):
        return not isinstance(x, np.ma.MaskedArray)
    return device_of(x) is not HOST


def accelerator_of(x: object) -> Accelerator | None:
    """Return the accelerator on which an array lies, or None for the host."""
    if isinstance(x, np.ndarray):
        return None
    device = device_of(x)
    return device if isinstance(device, Accelerator) else None


def find_device(name: str | Device | None) -> Device:
    """Return the device of a name: ``"cpu"``, ``"cuda"`` (the one in use at present) or ``"cuda:1"``; None is the host.

    Raises
    ------
    TypeError
        If it is no name.
    ValueError
        If there is no such device.
    DeviceError
        If what it needs is missing or broken.
    """
    if isinstance(name, Device):
        return name
    if name is None or name == HOST.name:
        return HOST
    if not isinstance(name, str):
        raise TypeError(f"a device is 'cpu', 'cuda' or 'cuda:' and a number, not {name!r}")
    kind, colon, number = name.partition(":")
    if kind not in KINDS or (colon and not number.isdecimal()):
        raise ValueError(f"unknown device {name!r}; known: {', '.join([HOST.name, *KINDS])}, 'cuda:0' and so on")
    return KINDS[kind](int(number) if colon else None)


_CUDA: Final = "mpiagg.cuda.device"
"""The subpackage that serves CuPy's arrays: imported when one of them arrives, or "cuda" is asked for."""


def _cuda_device_of(x: Any) -> Device:
    found: Device = import_module(_CUDA).device_of_array(x) if isinstance(x, import_module("cupy").ndarray) else HOST
    return found


def _cuda_device(ordinal: int | None) -> Device:
    found: Device = import_for_cuda(_CUDA).device(ordinal)
    return found


def import_for_cuda(name: str) -> Any:
    """Return CuPy, or a module that needs it.

    Raises
    ------
    DeviceError
        If CuPy cannot be imported.
    """
    try:
        return import_module(name)
    except Exception as error:
        raise DeviceError(
            f"CUDA devices need CuPy, which cannot be imported ({type(error).__name__}: {error}); "
            "install it with pip install 'cupy-cuda12x[ctk]', or 'cupy-cuda13x[ctk]' for drivers from CUDA 13 on"
        ) from error


ACCELERATED: Final[dict[str, Callable[[Any], Device]]] = {"cupy": _cuda_device_of}
"""For the packages whose arrays lie on accelerators, what tells on which."""

KINDS: Final[dict[str, Callable[[int | None], Device]]] = {"cuda": _cuda_device}
"""For the kinds of accelerators, what returns the one with a number, or the one in use at present."""
