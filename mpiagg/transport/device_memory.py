"""Memory of devices that the ranks of a node map: the counterpart of windows, by handles of the device's driver.

For CUDA that is its inter-process communication. Ranks may have a device each, or share one.
"""

from __future__ import annotations

import warnings
from typing import Final

import numpy as np

from mpiagg.arrays import Accelerator, Array, address
from mpiagg.cuda.placement import shared_devices
from mpiagg.errors import DeviceError
from mpiagg.transport.meetings import gather
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
        own: Array | None = None
        fault: Exception | None = None
        try:
            own = device.allocate(nbytes)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must learn of it
            fault = error
        self._agree(fault, MemoryError)
        assert own is not None
        self._own, self.start = own, address(own)
        self._mapped: list[Array] = []
        self.parts: list[Array] = []
        handle = b""
        try:
            handle = device.export(own)
        except Exception as error:  # noqa: BLE001 - as above
            fault = error
        handles = np.zeros((node.size, HANDLE), np.uint8)
        node.comm.Allgather(np.frombuffer(handle.ljust(HANDLE, b"\0"), np.uint8), handles)
        try:
            if handles.any(axis=1).all():
                self._map(handles)
        except Exception as error:  # noqa: BLE001 - as above
            fault = error
        try:
            self._agree(fault, DeviceError)
        except DeviceError:  # on all ranks
            self.free()
            raise

    def _map(self, handles: Array) -> None:
        for place, handle in enumerate(handles):
            if place == self._node.place:
                self.parts.append(self._own)
            else:
                self._mapped.append(self._device.open(handle.tobytes(), self.nbytes))
                self.parts.append(self._mapped[-1])

    def _agree(self, fault: Exception | None, kind: type[Exception]) -> None:
        """Raise an error of a kind on all ranks, if one has found a fault."""
        words = "" if fault is None else f"{type(fault).__name__}: {fault}"
        told = gather(self._node.comm, words.encode(errors="replace"), "share memory of their devices")
        faults = [
            f"rank {rank} raised {text.decode()}" for rank, text in zip(self._node.ranks, told, strict=True) if text
        ]
        if faults:
            raise kind("; ".join(faults)) from fault

    def sync(self) -> None:
        """Do nothing: barriers are in the host's memory."""

    def begin(self, part: Array) -> None:
        """Do nothing: no barrier stands in a block here."""

    def claim(self, part: Array) -> None:
        """Do nothing: the memory is there."""

    def free(self) -> None:
        """Give the memory back, when all have closed what they had mapped of it."""
        self.parts = []
        while self._mapped:
            self._device.close(self._mapped.pop())
        self._node.comm.Barrier()
        del self._own


def warn_of_sharing(node: Node, device: Accelerator) -> None:
    """Warn if ranks of a node share a device while one that they see has none; collective there."""
    mine = "\n".join((device.identity, *device.visible))
    told = [text.decode().split("\n") for text in gather(node.comm, mine.encode(), "compare their devices")]
    for ranks, accident in shared_devices([own for own, *_ in told], [visible for _, *visible in told]):
        if accident:  # all ranks of the node say so, that none is alone where warnings are errors
            sharers = ", ".join(str(node.ranks[place]) for place in ranks)
            warnings.warn(
                f"ranks {sharers} use the same device ({told[ranks[0]][0]}), and others have no rank; call "
                "mpiagg.bind_device() before MPI is imported",
                RuntimeWarning,
                stacklevel=2,
            )
