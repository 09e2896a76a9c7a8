"""What the ranks of a node share for one channel: memory of the host and of devices, and what is in it for calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Final, Protocol
from weakref import WeakSet

import numpy as np

from mpiagg.arrays import HOST, Accelerator, Array, Device
from mpiagg.errors import DeviceError, Error
from mpiagg.tables import SEGMENT
from mpiagg.transport.barriers import WRITTEN, Signatures, SignedBarrier
from mpiagg.transport.device_memory import warn_of_sharing
from mpiagg.transport.memory import LINE, Block, SharedMemory
from mpiagg.transport.nodes import Node
from mpiagg.transport.reading import readers

SLOT: Final = 2**25
"""Bytes of a slot of device memory at most: each rank has two for its blocking calls, and two for each plan."""


class User(Protocol):
    """Something that is made for slots of blocking calls, and is made anew for others."""

    def release(self) -> None:
        """Forget them."""


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
    users : set of User
        Those of the slots of blocking calls.
    exchanges_by_mpi : int
        How many blocking all-to-alls are the MPI library's before the ranks tell one another again how long blocks are.
    """

    def __init__(self, node: Node, busy: Callable[[], bool], disagreement: Callable[[], Error]) -> None:
        self.host = SharedMemory(node)
        self.device: SharedMemory | None = None
        self._node, self._busy, self._disagreement = node, busy, disagreement
        self._for_calls: tuple[SignedBarrier, Block] | None = None
        self._signatures = Signatures()
        self._slots: SharedMemory | None = None
        self._slots_for_calls: Block | None = None
        self.users: WeakSet[User] = WeakSet()
        self.exchanges_by_mpi = 0
        self._room = HOST.empty(0, np.uint8)
        self._no_slots: str | None = None
        self._untold = False

    def for_calls(self) -> tuple[SignedBarrier, Block] | None:
        """Return the barrier of blocking calls, and the block of memory that they share; None if there is not as much.

        They follow one another, so they can share it. The first call is collective on the node.
        """
        if self._for_calls is None and not self.host.refused:
            try:
                written = self.host.take(8 * WRITTEN, busy=self._busy())
                block = self.host.take(LINE + 2 * SEGMENT, busy=self._busy())
            except MemoryError:
                self.host.refused = True
            else:
                self.host.processes = readers(self.host.tell)
                self._signatures = Signatures(written, self._node.place)
                self._for_calls = SignedBarrier(block, self._node.place, self._node.ranks, self._disagreement), block
        return self._for_calls

    def room(self, nbytes: int) -> Array:
        """Return at least so many bytes of this rank's own for blocking calls, each of which may write there."""
        if nbytes > self._room.nbytes:
            self._room = HOST.empty(1 << (nbytes - 1).bit_length(), np.uint8)
        return self._room

    def read(self) -> bool:
        """Whether ranks of the node may read each other's other memory; the first call is collective on the node."""
        return self.for_calls() is not None and self.host.processes is not None

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
        if not isinstance(device, Accelerator):
            return self.host
        if self.device is None:
            self.device = SharedMemory(self._node, device)
            warn_of_sharing(self._node, device)
        return self.device

    # -- slots: device memory that all ranks map, through which they copy what others cannot map

    def known(self, device: Accelerator) -> SharedMemory:
        """Return what ranks share on their devices, which may be nothing yet."""
        return SharedMemory(self._node, device) if self.device is None else self.device

    def apart_from_slots(self, device: Accelerator) -> bool:
        """Whether slots of this rank lie, or would lie, on another device."""
        shared = self.device if self._slots is None else self._slots
        return shared is not None and shared.device is not device

    def slots_for_calls(self, device: Accelerator, nbytes: int) -> Block | None:
        """Return the slots that blocking calls use in turn, or None as :meth:`slots` does.

        It is collective in the calls in which it takes longer ones: all ranks know by ``nbytes`` which these are.
        """
        known = self._slots_for_calls
        if self._no_slots is None and (known is None or known.nbytes < 2 * _slot_bytes(nbytes)):
            longer = self.slots(device, nbytes)
            if longer is not None:
                self.give_back_slots(known)
                self._slots_for_calls = longer
                for user in self.users:
                    user.release()
        return self._slots_for_calls

    def slots(self, device: Accelerator, nbytes: int) -> Block | None:
        """Return a block of two slots, for vectors of so many bytes on all ranks of the node; collective among them.

        None, if they have no such memory: they have not asked for any since, and :meth:`warn_of_slots` says so.
        """
        if self._no_slots is None:
            if self._slots is None:
                self._slots = SharedMemory(self._node, device)
            try:
                return self._slots.take(2 * _slot_bytes(nbytes), busy=self._busy())
            except (DeviceError, MemoryError) as error:
                self._no_slots, self._untold = str(error), True
        return None

    def do_without_slots(self, reason: str) -> None:
        """Do not try to make any, since the ranks have found, and said, that they cannot share such memory."""
        if self._slots is None:
            self._no_slots = reason

    def give_back_slots(self, block: Block | None) -> None:
        """Take slots back, if there are any, of which this rank has no more use."""
        if self._slots is not None and block is not None:
            self._slots.give_back(block)

    def warn_of_slots(self) -> None:
        """Warn, once, if ranks have asked for slots in vain; all of them have then."""
        if self._untold:
            self._untold = False
            warnings.warn(
                "the ranks of a node share no memory of their devices, or no more, for arrays that are not of "
                f"mpiagg.empty(device=...); such go by messages on this communicator: {self._no_slots}",
                RuntimeWarning,
                stacklevel=2,
            )

    def free(self, *, running: bool) -> None:
        """Give the memory back, if no rank still has an array or (``running``) a plan in it; collective on the node."""
        for shared in (self.host, self.device, self._slots):
            if shared is not None:
                shared.free(running=running)


def _slot_bytes(nbytes: int) -> int:
    """Return how long slots for vectors of so many bytes are: of few lengths, that they serve others, too."""
    return min(1 << max(nbytes - 1, 0).bit_length(), SLOT)
