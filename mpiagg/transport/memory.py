"""Memory that the ranks of a node share: windows of MPI, mapped by all of them.

A :class:`SharedMemory` belongs to a channel. It cuts windows into blocks, for plans and for arrays of users
(``mpiagg.empty``), and says where an array of one rank lies for the others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple
from weakref import finalize

import numpy as np
from mpi4py import MPI

from mpiagg.arrays import HOST, Accelerator, Array, Device, address, device_of
from mpiagg.errors import DeviceError
from mpiagg.transport.device_memory import DeviceWindow
from mpiagg.transport.meetings import gather
from mpiagg.transport.nodes import Node
from mpiagg.transport.reading import OtherMemory, can_be_read

PAGE: Final = 4096
LINE: Final = 64
"""Bytes of a cache line: what two ranks write never lies in the same."""

WINDOW: Final = 4 * 2**20
"""Bytes of a window from which blocks are cut, for each rank."""

_WHERE: Final = "/dev/shm"  # noqa: S108 - where MPI libraries put their windows on Linux


class Window:
    """As many bytes for every rank of a node, mapped by all of them; making and freeing one is collective there.

    Attributes
    ----------
    parts : list of numpy.ndarray
        For each place on the node its bytes. Pages that nobody has claimed need not be there.
    """

    def __init__(self, node: Node, nbytes: int) -> None:
        padded = -(-max(nbytes, 1) // PAGE) * PAGE
        info = MPI.Info.Create({"alloc_shared_noncontig": "true"})
        self._win = MPI.Win.Allocate_shared(padded, 1, info, node.comm)
        info.Free()
        # An epoch for loads and stores, which lasts as long as the window; sync() is only allowed within one.
        self._win.Lock_all(MPI.MODE_NOCHECK)
        self.sync = self._win.Sync
        self.nbytes = nbytes
        self.parts: list[Array] = []
        for place in range(node.size):
            memory, _ = self._win.Shared_query(place)
            self.parts.append(np.asarray(memory)[:nbytes])
        self.start = address(self.parts[node.place])

    def begin(self, part: Array) -> None:
        """Make the first page of a block 0, for all to see before they hear of the block."""
        part[:PAGE] = 0
        self.sync()

    def claim(self, part: Array) -> None:
        """Take the pages of a block: until they are written, another program may take them."""
        part[::PAGE] = 0
        part[-1:] = 0

    def free(self) -> None:
        """Give the memory back."""
        self.parts = []
        self._win.Unlock_all()
        self._win.Free()


class CommonWindow:
    """Bytes that all ranks of a node map, once for all of them; making and freeing one is collective there.

    Attributes
    ----------
    memory : numpy.ndarray
        The bytes. Pages that nobody has claimed need not be there.
    leases : set of int
        Who has arrays in it on this rank.
    """

    def __init__(self, node: Node, nbytes: int) -> None:
        self._win = MPI.Win.Allocate_shared(0 if node.place else max(nbytes, 1), 1, MPI.INFO_NULL, node.comm)
        self._win.Lock_all(MPI.MODE_NOCHECK)
        memory, _ = self._win.Shared_query(0)
        self.memory = np.asarray(memory)[:nbytes]
        self.sync = self._win.Sync
        self.leases: set[int] = set()

    def claim(self, place: int, size: int) -> None:
        """Take the pages of one rank's share of the bytes, which are 0 then."""
        share = -(-max(self.memory.size // size, 1) // PAGE) * PAGE
        end = self.memory.size if place == size - 1 else (place + 1) * share
        self.memory[place * share : end] = 0
        self.sync()

    def free(self) -> None:
        """Give the memory back."""
        self.memory = self.memory[:0]
        self._win.Unlock_all()
        self._win.Free()


class _Lease:
    """What the arrays in a block refer to, and so to the window: memory of a device goes when nothing does any more."""

    def __init__(self, window: object) -> None:
        self.window = window


class Position(NamedTuple):
    """Where something lies: the number of a window, and bytes from the start of a rank's part."""

    window: int
    offset: int


NOWHERE: Final = Position(-1, 0)
"""Where an array lies that is in no window."""

READ: Final = 2**14 - 2
"""In place of a window's number: an array in a rank's other memory, which the others only read; with its address."""

ADDRESSES: Final = 2**48
"""Addresses up to here can be told."""


class Positions(NamedTuple):
    """Where the input of a rank lies, and where its result goes; and whether on another device than its slots."""

    source: Position
    target: Position
    apart: bool = False


class Block(NamedTuple):
    """Bytes of every rank of a node, which belong to one plan or array.

    Attributes
    ----------
    parts : list of numpy.ndarray
        For each place on the node its bytes.
    sync : callable
        What stands between writing and saying so, and between hearing so and reading: see ``barriers``.
    nbytes : int
        Bytes of a part.
    position : Position
        Where this rank's part lies.
    """

    parts: list[Array]
    sync: Callable[[], object]
    nbytes: int
    position: Position


AnyWindow = Window | DeviceWindow


class SharedMemory:
    """The memory that the ranks of a node share for one channel.

    Parameters
    ----------
    node : Node
        Where; all that is made here is made by its ranks together.
    device : Device
        On which device of this rank it lies.
    """

    def __init__(self, node: Node, device: Device = HOST) -> None:
        self._node = node
        self.device = device
        self._windows: list[AnyWindow] = []
        self._spare: dict[int, list[Position]] = {}
        self._resting: list[tuple[int, Position]] = []
        # Only how many there are matters; but garbage is collected at any moment, in which a count could go wrong.
        self._leases: dict[int, object] = {}
        self._open = (0, 0, 0)
        self._common: list[CommonWindow] = []
        self.processes: Sequence[int] | None = None
        """Those of the ranks of the node, where each may read all the others' memory: see ``reading``."""
        self.leased = False
        """Whether arrays have been leased: on all ranks of a node at the same call, since they ask together."""
        self.refused = False
        """Whether there was none for blocking calls, which cannot ask again: each rank makes them when it must."""

    def lease(self, nbytes: int, *, busy: bool) -> Array:
        """Return so many bytes of this rank that all ranks of the node map; collective among them.

        The ranks may ask for different numbers. The memory comes back when nothing refers to the array any more.

        Raises
        ------
        MemoryError
            On all ranks of the node, if there is not as much.
        DeviceError
            On all ranks of the node, if work on a device has failed, or they cannot map each other's memory.
        RankFailedError
            If a rank has died.
        """
        fault: Exception | None = None
        try:
            if isinstance(self.device, Accelerator):
                self.device.finish()  # somebody's work may still touch a block that came back
        except Exception as error:  # noqa: BLE001 - it may be the user's own; the other ranks must not wait for this one
            fault = error
        length, position = self._find(_lease_bytes(nbytes), busy=busy, fault=fault)
        lease = _Lease(self._windows[position.window])
        self._leases[id(lease)] = finalize(lease, self._end, id(lease), length, position)
        self.leased = True
        return self.device.borrow(address(self.view(self._node.place, position, length)), nbytes, np.uint8, lease)

    def once(self, nbytes: int) -> Array:
        """Return so many bytes, zeros, that the ranks of the node have once for all of them; collective among them.

        The memory comes back by :meth:`collect`, when nothing refers to the array any more. Collectives do not know of
        it: for them it is memory like any other.

        Raises
        ------
        MemoryError
            On all ranks of the node, if there is not as much.
        RankFailedError
            If a rank has died.
        """
        told = self.tell((nbytes, self._room()), "set up memory that a node has once")
        most, room = max(told)[0], min(room for _, room in told)
        if most + PAGE > room:
            raise MemoryError(f"{most} bytes of shared memory are wanted, and {_WHERE} has {room} left")
        with self._node.failures.told():
            window = CommonWindow(self._node, nbytes)
        window.claim(self._node.place, self._node.size)
        self._common.append(window)
        self.tell((), "have memory that a node has once")  # now all pages are 0, and a rank may write to any
        lease = _Lease(window)
        window.leases.add(id(lease))
        finalize(lease, window.leases.discard, id(lease))
        return self.device.borrow(address(window.memory), nbytes, np.uint8, lease)

    def collect(self) -> None:
        """Free what :meth:`once` has returned, where no rank has an array in it any more; collective on the node."""
        in_use = np.array([bool(window.leases) for window in self._common])
        told = self.tell(tuple(in_use.astype(int).tolist()), "give memory back that a node has once")
        used = np.any(np.array(told, bool), axis=0)
        with self._node.failures.told():
            for window, keep in zip(self._common, used.tolist(), strict=True):
                if not keep:
                    window.free()
        self._common = [window for window, keep in zip(self._common, used.tolist(), strict=True) if keep]

    def _end(self, number: int, nbytes: int, position: Position) -> None:
        self._leases.pop(number, None)
        self._resting.append((nbytes, position))

    def position(self, array: Array, *, read: bool = False) -> Position:
        """Return where in the windows a contiguous array lies; NOWHERE if in none. One without elements lies in any.

        With ``read`` an array elsewhere lies where others can read it, if they can.
        """
        if device_of(array) is not self.device:
            return NOWHERE
        if not array.nbytes and self._windows:
            return Position(0, 0)
        start = address(array)
        for number, window in enumerate(self._windows):
            offset = start - window.start
            if offset >= 0 and offset + array.nbytes <= window.nbytes:
                return Position(number, offset)
        told = read and self.processes is not None and start + array.nbytes <= ADDRESSES and can_be_read(array)
        return Position(READ, start) if told else NOWHERE

    def view(self, place: int, position: Position, nbytes: int) -> Array:
        """Return the bytes of the rank at a place that lie at a position in the windows."""
        return self._windows[position.window].parts[place][position.offset : position.offset + nbytes]

    def found(self, place: int, position: Position, nbytes: int) -> Array | OtherMemory:
        """Return the bytes of the rank at a place that lie at a position, wherever that is."""
        if position.window != READ:
            return self.view(place, position, nbytes)
        assert self.processes is not None
        return OtherMemory(self.processes[place], position.offset, nbytes, np.dtype(np.uint8))

    def tell(self, words: tuple[int, ...], purpose: str) -> list[tuple[int, ...]]:
        """Return what every rank of the node tells the others; collective among them."""
        with self._node.failures.told():
            told = gather(self._node.comm, np.array(words, np.int64).tobytes(), purpose, self._node.log)
        return [tuple(np.frombuffer(each, np.int64).tolist()) for each in told]

    def take(self, nbytes: int, *, busy: bool) -> Block:
        """Return a block of as many bytes on every rank of the node; collective among them.

        Parameters
        ----------
        nbytes : int
            Bytes of every rank; the same on all.
        busy : bool
            Whether a plan of this rank is running, which may still read what others have given back.

        Raises
        ------
        MemoryError
            On all ranks of the node, if there is not as much.
        RankFailedError
            If a rank has died.
        """
        length, mine = self._find(nbytes, busy=busy)
        self._windows[mine.window].begin(self.view(self._node.place, mine, length))
        # Once a rank knows where the others' blocks lie, their first pages are 0.
        lie = self.tell(mine, "tell where their shared memory is")
        parts = [self.view(place, Position(*where), length) for place, where in enumerate(lie)]
        return Block(parts, self._windows[mine.window].sync, length, mine)

    def _find(self, nbytes: int, *, busy: bool, fault: Exception | None = None) -> tuple[int, Position]:
        """Return how long a block is that has room for the most that a rank wants, and where this rank's part lies.

        It raises what :meth:`take` does, and DeviceError if a rank has a ``fault``; on all ranks of the node.
        """
        length, agreed = -(-max(nbytes, 1) // LINE) * LINE, False
        while not agreed:
            spare = self._spare.setdefault(length, [])
            mine = spare[-1] if spare else NOWHERE
            told = self.tell((length, *mine, busy, self._room(), fault is not None), "set up shared memory on a node")
            lengths, windows, _, busier, rooms, faults = zip(*told, strict=True)
            if any(faults):
                raise DeviceError(
                    f"what a rank has asked of its device has failed: {fault or 'on another rank'}"
                ) from fault
            length, agreed = max(lengths), min(lengths) == max(lengths)
        if min(windows) >= 0:
            spare.pop()
        else:
            self._check_room(length, min(rooms))
            mine = self._cut(length)
            self._windows[mine.window].claim(self.view(self._node.place, mine, length))
        # Where nobody is in the middle of anything, nobody reads what was given back. From the next time on it is used.
        if not any(busier):
            resting, self._resting = self._resting, []  # at any moment more may come back
            for size, rested in resting:
                self._spare.setdefault(size, []).append(rested)
        return length, mine

    def give_back(self, block: Block) -> None:
        """Take a block back, of which this rank has no more use."""
        self._resting.append((block.nbytes, block.position))

    def _check_room(self, nbytes: int, room: int) -> None:
        """Raise MemoryError if the node has not left what a new block takes, or a new window that it is cut from."""
        _, offset, end = self._open
        wanted = nbytes + PAGE if offset + nbytes <= end else max(WINDOW, nbytes) + PAGE
        if wanted * self._node.size > room:
            raise MemoryError(
                f"{self._node.size} ranks want {wanted} bytes of shared memory each, "
                f"and {_WHERE} has {room} left in all"
            )

    def _room(self) -> int:
        """Return how many bytes of shared memory the node has left: to write to a page that it has not got is fatal."""
        if isinstance(self.device, Accelerator) or not os.path.isdir(_WHERE):  # noqa: PTH112 - one call, not a Path
            return sys.maxsize
        found = os.statvfs(_WHERE)
        return min(found.f_bavail * found.f_frsize, sys.maxsize)

    def _cut(self, nbytes: int) -> Position:
        """Cut a new block from the open window, or from a new one; all ranks of the node do the same."""
        number, offset, end = self._open
        if offset + nbytes > end:
            number, offset, end = len(self._windows), 0, max(WINDOW, nbytes)
            self._windows.append(self._window(end))
        self._open = (number, offset + nbytes, end)
        return Position(number, offset)

    def _window(self, nbytes: int) -> AnyWindow:
        """Return a new window; all ranks of the node make it together."""
        with self._node.failures.told():
            if isinstance(self.device, Accelerator):
                return DeviceWindow(self._node, self.device, nbytes)
            return Window(self._node, nbytes)

    def free(self, *, running: bool) -> None:
        """Give the memory back, if no rank still has an array or (``running``) a plan in it; collective on the node."""
        in_use = np.array([len(self._leases) + running + sum(len(window.leases) for window in self._common)])
        self._node.comm.Allreduce(MPI.IN_PLACE, in_use, MPI.MAX)  # all have come together to free
        if not in_use[0]:
            for window in (*self._windows, *self._common):
                window.free()
        self._windows.clear()
        self._common.clear()


def _lease_bytes(nbytes: int) -> int:
    """Return how long the block of an array is: of eight lengths between powers of two, that it serves others after."""
    step = 1 << max(nbytes.bit_length() - 4, 0)
    return -(-nbytes // step) * step
