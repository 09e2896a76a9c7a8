"""The host as a device: NumPy's arrays."""

from __future__ import annotations

import ctypes
from typing import Final

import numpy as np
import numpy.typing as npt

from mpiagg.arrays.codecs import Codec, codec
from mpiagg.arrays.conversions import convert
from mpiagg.arrays.devices import Device
from mpiagg.arrays.reductions import Array


class Host(Device):
    """The processor's own memory."""

    name = "cpu"
    description = ""  # as usual

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return a new array, uninitialised."""
        return np.empty(shape, dtype)

    def borrow(self, start: int, length: int, dtype: npt.DTypeLike, owner: object = None) -> Array:
        """Return an array over memory that somebody else owns: ``owner``, or who keeps it alive while it is used."""
        wanted = np.dtype(dtype)
        if length == 0:
            return np.empty(0, wanted)
        memory = (ctypes.c_char * (length * wanted.itemsize)).from_address(start)
        memory.owner = owner  # type: ignore[attr-defined]  # kept alive with the memory
        borrowed: Array = np.frombuffer(memoryview(memory), wanted)
        return borrowed

    def address(self, array: Array) -> int:
        """Return where the first element lies."""
        pointer: int = array.__array_interface__["data"][0]
        return pointer

    convert = staticmethod(convert)

    def codec(self, name: str) -> Codec:
        """Return the codec of that name; see :mod:`mpiagg.arrays.codecs`."""
        return codec(name)

    def from_host(self, array: Array) -> Array:
        """Return a copy."""
        return np.array(array)

    def to_host(self, array: Array) -> Array:
        """Return a copy."""
        return np.array(array)


HOST: Final = Host()
"""Where everything lies that is not on an accelerator."""

borrow: Final = HOST.borrow
scratch: Final = HOST.empty
