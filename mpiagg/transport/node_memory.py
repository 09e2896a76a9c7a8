"""What the ranks of a node share for one channel: memory of the host and of devices, and what is in it for calls."""

from __future__ import annotations

from collections.abc import Callable

from mpiagg.arrays import HOST, Accelerator, Device
from mpiagg.errors import DeviceError, Error
from mpiagg.tables import SEGMENT
from mpiagg.transport.device_memory import warn_of_sharing
from mpiagg.transport.gates import WRITTEN, Signatures, SignedGate
from mpiagg.transport.memory import LINE, Block, SharedMemory
from mpiagg.transport.nodes import Node


class NodeMemory:
    """What the ranks of a node share for one channel.

    Parameters
    ----------
    node : Node
    busy : callable
        Whether a plan of this rank is running.
    disagreement : callable
        Returns the error to raise where ranks are in different operations.

    Attributes
    ----------
    host : SharedMemory
        What they share of the host's memory.
    device : SharedMemory or None
        What they share of their devices', once they have begun to.
    """

    def __init__(self, node: Node, busy: Callable[[], bool], disagreement: Callable[[], Error]) -> None:
        self.host = SharedMemory(node)
        self.device: SharedMemory | None = None
        self._node, self._busy, self._disagreement = node, busy, disagreement
        self._for_calls: tuple[SignedGate, Block] | None = None
        self._signatures = Signatures()

    def for_calls(self) -> tuple[SignedGate, Block] | None:
        """Return the gate of blocking calls, and the block of memory that they share; None if there is not as much.

        They follow one another, so they can share it. The first call is collective on the node.
        """
        if self._for_calls is None and not self.host.refused:
            try:
                written = self.host.take(8 * WRITTEN, busy=self._busy())
                block = self.host.take(LINE + 2 * SEGMENT, busy=self._busy())
            except MemoryError:
                self.host.refused = True
            else:
                self._signatures = Signatures(written, self._node.place)
                self._for_calls = SignedGate(block, self._node.place, self._node.ranks, self._disagreement), block
        return self._for_calls

    def signatures(self) -> Signatures:
        """Return where ranks of the node write which calls of the MPI library's they are in.

        The first blocking call of a communicator asks, whatever it is, so that all make together what later calls need:
        ranks that are in different calls then need not wait for one another to make anything.
        """
        if self._node.size > 1:
            self.for_calls()
        return self._signatures

    def check(self, device: Device) -> None:
        """Raise DeviceError if this rank shares memory of another device on this channel."""
        if device is not HOST and self.device is not None and self.device.device is not device:
            raise DeviceError(
                f"a communicator shares memory of one device a rank; here it is {self.device.device.name}"
            )

    def on(self, device: Device) -> SharedMemory:
        """Return the memory that ranks share on a device of each; at first all of them ask together.

        Raises
        ------
        DeviceError
            If it is another device than at first.
        """
        self.check(device)
        if device is HOST:
            return self.host
        if self.device is None:
            self.device = SharedMemory(self._node, device)
            if isinstance(device, Accelerator):
                warn_of_sharing(self._node, device)
        return self.device

    def free(self, *, running: bool) -> None:
        """Give the memory back, if no rank still has an array or (``running``) a plan in it; collective on the node."""
        self.host.free(running=running)
        if self.device is not None:
            self.device.free(running=running)
