"""Memory of devices that the ranks of a node map: the counterpart of windows, by handles of the device's driver.

For CUDA that is its inter-process communication. Ranks may have a device each, or share one.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from mpi4py import MPI

from mpiagg.arrays import Accelerator, Array, address
from mpiagg.errors import DeviceError
from mpiagg.transport.nodes import Node

HANDLE: Final = 64
"""Bytes of a handle, at most."""


class DeviceWindow:
    """As many bytes for every rank of a node, on a device of each, mapped by all; making and freeing it is collective.

    Attributes
    ----------
    parts : list of arrays
        For each place on the node its bytes, as this rank's device sees them.

    Raises
    ------
    MemoryError
        On all ranks of the node, if a device has not as much.
    DeviceError
        On all ranks of the node, if one cannot map what another has.
    """

    def __init__(self, node: Node, device: Accelerator, nbytes: int) -> None:
        self._node, self._device = node, device
        self.nbytes = nbytes
        handle, own = b"", None
        fault: Exception | None = None
        try:
            own = device.allocate(nbytes)
            handle = device.export(own)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must learn of it
            fault = error
        self._agree(fault, MemoryError(f"a rank of this node has not got {nbytes} bytes of its device to share"))
        assert own is not None
        self._own = own
        handles = np.zeros((node.size, HANDLE), np.uint8)
        node.comm.Allgather(np.frombuffer(handle.ljust(HANDLE, b"\0"), np.uint8), handles)
        self._mapped: list[Array] = []
        self.parts: list[Array] = []
        try:
            for place, row in enumerate(handles):
                self.parts.append(own if place == node.place else device.open(row.tobytes(), nbytes))
                self._mapped += [] if place == node.place else self.parts[-1:]
        except Exception as error:  # noqa: BLE001 - as above
            fault = error
        try:
            self._agree(fault, DeviceError("a rank of this node cannot map the memory of another's device"))
        except Exception:
            self.free()
            raise
        self.start = address(own)

    def _agree(self, fault: Exception | None, told: Exception) -> None:
        """Raise on all ranks if one has found a fault: its own there, and what they are told on the others."""
        failed = np.array([fault is not None], np.uint8)
        self._node.comm.Allreduce(MPI.IN_PLACE, failed, MPI.MAX)
        if failed[0]:
            raise fault or told

    def sync(self) -> None:
        """Do nothing: gates are in the host's memory."""

    def begin(self, part: Array) -> None:
        """Do nothing: no gate stands in a block here."""

    def claim(self, part: Array) -> None:
        """Do nothing: the memory is there."""

    def free(self) -> None:
        """Give the memory back, when all have closed what they had mapped of it."""
        self.parts = []
        while self._mapped:
            self._device.close(self._mapped.pop())
        self._node.comm.Barrier()
        del self._own
