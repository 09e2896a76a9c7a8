"""What an array is, in few words."""

from __future__ import annotations

from typing import Any, NamedTuple

from mpiagg.arrays.devices import Device
from mpiagg.arrays.host import HOST
from mpiagg.arrays.where import device_of


class Form(NamedTuple):
    """What an array is; for what is none, the name of its type stands in the place of a dtype.

    It is put into words when somebody reads them: a dtype's name takes longer than all else that a call looks at.
    """

    dtype: Any
    shape: tuple[int, ...] = ()
    device: Device = HOST

    def __str__(self) -> str:
        """Say it in words."""
        return f"{self.dtype} {self.shape}{self.device.description}"


def form_of(array: Any) -> Form:
    """Return what an array is."""
    return Form(array.dtype, array.shape, device_of(array))
