"""How a chunk crosses: persistent point-to-point messages of mpi4py, on a private communicator.

Every communicator that mpiagg is used on has one :class:`Channel`: a duplicate that no one else sends on, the
tags in use on it, and what must be freed with it.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import numpy as np
from mpi4py import MPI

from mpiagg.arrays import HOST, Accelerator, Array, Device
from mpiagg.arrays.devices import Nccl
from mpiagg.errors import DeviceError, Error, MismatchError, PlanError, RankFailedError, StallError
from mpiagg.launch.launchers import refuse_copies
from mpiagg.schedules import Layout
from mpiagg.tables import DIGEST_BYTES, SEGMENT, Settings, settings
from mpiagg.transport.awareness import awareness
from mpiagg.transport.device_memory import warn_of_sharing
from mpiagg.transport.failures import Failures, active
from mpiagg.transport.gates import SignedGate
from mpiagg.transport.kept import Calls
from mpiagg.transport.memory import LINE, Block, SharedMemory
from mpiagg.transport.nodes import Node
from mpiagg.transport.process import REPRODUCIBLE, process
from mpiagg.transport.tags import LEAST, Tags
from mpiagg.transport.texts import complete, gather, meeting
from mpiagg.transport.waiting import DEFAULT_TIMEOUT
from mpiagg.watch import CARD_BYTES, Card, Subject, Trail, who_says_what

MOST_BYTES: Final = 2**30
"""Longer messages are cut: MPI counts are 32-bit integers in many libraries."""

SHARED_TAG: Final = 0
"""Stands for the tags of blocking calls: they follow one another, so those of the same operation can share them."""

MAKE: Final = "make a communicator"
"""What ranks come together for before calls of the MPI library that wait for all of them without a deadline."""

NAME_BYTES: Final = 8
"""Bytes of a channel's name."""


class Freeable(Protocol):
    """Something with MPI handles that must be given back."""

    @property
    def running(self) -> bool:
        """Whether messages of it may be under way."""

    def free(self) -> None:
        """Give the handles back; a second call does nothing."""


class Channel:
    """A private duplicate of a communicator, with tags for concurrent operations.

    Parameters
    ----------
    comm : MPI.Intracomm
        The communicator to duplicate; a collective call.
    reproducible : bool
        Whether calls keep to our own schedules; by default, if the environment variable MPIAGG_REPRODUCIBLE is 1.

    Attributes
    ----------
    library : str
        The MPI library.
    calls : Calls
        What calls were resolved into.
    aware : bool
        Whether the messages of all ranks reach memory of CUDA devices; elsewhere it goes by way of the host.
    memory : SharedMemory
        What the ranks of a node share of the host's memory.
    device_memory : SharedMemory or None
        What they share of their devices', once they have begun to.
    nccl : Nccl or None
        The connection of their devices by NCCL, once they have one.
    trail : Trail
        What is done on the channel, for those who watch over it.
    failures : Failures
        What is known of ranks of it that have died.

    Raises
    ------
    StallError
        If a rank does not come within the timeout.
    RankFailedError
        If a rank has died.
    """

    def __init__(self, comm: MPI.Intracomm, *, reproducible: bool = False) -> None:
        self.reproducible = reproducible or REPRODUCIBLE
        self.library = MPI.get_vendor()[0]
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.trail = Trail("", self.rank, self.size)
        plain = MPI.Intracomm(comm)
        self.failures = Failures(plain)
        if active():
            self.trail.alarm = self.failures.look
        with contextlib.suppress(ValueError):  # of which all ranks are told below
            process()  # so that there is somebody to warn
        with self.failures.told(), meeting(MAKE, self.trail) as subject:
            complete(plain.Ibarrier(), MAKE, subject)
            # What follows are calls of the MPI library's that wait without a deadline; but now all are here.
            subject.unleavable = DEFAULT_TIMEOUT
            self._set_up(plain)

    def _set_up(self, comm: MPI.Intracomm) -> None:
        """Make what belongs to the channel, on a communicator of mpi4py's own class; collective."""
        refuse_copies(MPI.COMM_WORLD.Get_size(), MPI.get_vendor()[0])
        # Created, not duplicated: the caller's attributes stay with the caller.
        group = comm.Get_group()
        self.comm = MPI.Intracomm(comm.Create(group))
        group.Free()
        self.failures.comms.append(self.comm)
        self.node = Node(self.comm, self.failures, self.trail)
        self.memory = SharedMemory(self.node)
        self.device_memory: SharedMemory | None = None
        self.nccl: Nccl | None = None
        self._for_calls: tuple[SignedGate, Block] | None = None
        self.open: dict[int, Freeable] = {}
        self.calls = Calls()
        upper = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
        self.tags = Tags(LEAST if upper is None else int(upper))
        self._compare_settings()
        self.failures.comms.remove(comm)  # the caller's, of which we know nothing from now on

    def _compare_settings(self) -> None:
        """Raise on all ranks unless all of them choose algorithms by the same table, which is for this job; collective.

        Where they do, as always but for mistakes, that costs an all-gather of some bytes, by which they learn, too,
        whether the messages of all reach devices, and where each can be asked what it does.
        """
        name = os.urandom(NAME_BYTES)
        try:
            mine, able, card = self._settings().digest(), awareness().able, process().card
            mine = mine[:-1] + bytes([mine[-1] ^ self.reproducible])
        except ValueError:
            mine, able, card = bytes(DIGEST_BYTES), False, bytes(CARD_BYTES)
        told = np.empty((self.size, DIGEST_BYTES + 1 + NAME_BYTES + CARD_BYTES), np.uint8)
        self.comm.Allgather(np.frombuffer(mine + bytes([able]) + name + card, np.uint8), told)
        digests, ables, names, cards = np.split(told, np.cumsum([DIGEST_BYTES, 1, NAME_BYTES]), axis=1)
        self.aware = bool(ables.all())
        self.trail.name = names[0].tobytes().hex()
        if digests.any(axis=1).all() and (digests == digests[0]).all():
            self._watch([Card.unpack(row.tobytes()) for row in cards])
            return
        try:
            kept = ", reproducible" if self.reproducible else ""
            self.agree_on(lambda: f"uses {self._settings()}{kept}")
        except Exception:
            self.free()
            raise

    def _watch(self, cards: Sequence[Card]) -> None:
        """Have the watchdog know what is done here, and whom to ask."""
        watchdog = process().watchdog
        if watchdog is not None and all(card.port for card in cards):
            watchdog.join(self.trail, cards)

    def _settings(self) -> Settings:
        """Return what this rank chooses algorithms by, or raise ValueError if that cannot be used in this job."""
        awareness()
        process()
        found = settings()
        # Only where all ranks of the job are together, it shows how they are spread over nodes.
        whole = MPI.Comm.Compare(self.comm, MPI.COMM_WORLD) == MPI.CONGRUENT
        found.check(self.layout if whole else None, MPI.COMM_WORLD.Get_size())
        return found

    @property
    def layout(self) -> Layout:
        """Which rank is on which node."""
        return self.node.layout

    @property
    def busy(self) -> bool:
        """Whether anything that was opened on the channel is running."""
        return any(thing.running for thing in self.open.values())

    def memory_for_calls(self) -> tuple[SignedGate, Block] | None:
        """Return the gate of blocking calls, and the block of memory that they share; None if there is not as much.

        They follow one another, so they can share it. The first call is collective on the node.
        """
        if self._for_calls is None and not self.memory.refused:
            try:
                block = self.memory.take(LINE + 2 * SEGMENT, busy=self.busy)
            except MemoryError:
                self.memory.refused = True
            else:
                self._for_calls = SignedGate(block, self.node.place, self.node.ranks, self._disagreement), block
        return self._for_calls

    def _disagreement(self) -> Error:
        """Return the error that ranks have come to a gate with different operations."""
        self.trail.explain()
        return self.trail.fault or MismatchError("ranks disagree about the collective that they are in")

    def check_device(self, device: Device) -> None:
        """Raise DeviceError if this rank shares memory of another device on this channel."""
        shared = self.device_memory
        if device is not HOST and shared is not None and shared.device is not device:
            raise DeviceError(f"a communicator shares memory of one device a rank; here it is {shared.device.name}")

    def memory_on(self, device: Device) -> SharedMemory:
        """Return the memory that ranks of the node share on a device of each; at first all of them ask together.

        Raises
        ------
        DeviceError
            If it is another device than at first.
        """
        self.check_device(device)
        if device is HOST:
            return self.memory
        if self.device_memory is None:
            self.device_memory = SharedMemory(self.node, device)
            if isinstance(device, Accelerator):
                warn_of_sharing(self.node, device)
        return self.device_memory

    def send_init(self, chunk: Array, peer: int, tag: int) -> Iterator[MPI.Prequest]:
        """Prepare to send a contiguous chunk to ``peer``: one request for each ``MOST_BYTES``."""
        for piece in _pieces(chunk):
            yield self.comm.Send_init([piece, piece.nbytes, MPI.BYTE], peer, tag)

    def receive_init(self, chunk: Array, peer: int, tag: int) -> Iterator[MPI.Prequest]:
        """Prepare to receive a contiguous chunk from ``peer``: one request for each ``MOST_BYTES``."""
        for piece in _pieces(chunk):
            yield self.comm.Recv_init([piece, piece.nbytes, MPI.BYTE], peer, tag)

    def agree(self, word: str, error: Exception | None = None) -> None:
        """Compare what the ranks say of a collective call that they are about to make; itself collective.

        Parameters
        ----------
        word : str
            What this rank is about to do; all ranks must say the same.
        error : Exception, optional
            Why this rank cannot do it.

        Raises
        ------
        Exception
            ``error``, where it is given.
        MismatchError
            On the other ranks, if any gave an error; on all ranks, if words differ. All say who said what.
        StallError
            If a rank does not come within the timeout.
        """
        words = self._gather(f"{type(error).__name__}: {error}" if error else word, failed=error is not None)
        if error is not None:
            raise error
        failed = [f"rank {rank} raised {text}" for rank, (text, bad) in enumerate(words) if bad]
        if failed:
            raise MismatchError("; ".join(failed))
        if any(text != words[0][0] for text, _ in words):
            said: dict[str, list[int]] = {}
            for rank, (text, _) in enumerate(words):
                said.setdefault(text, []).append(rank)
            raise MismatchError(f"ranks disagree: {who_says_what(said)}")

    def agree_on(self, say: Callable[[], str]) -> None:
        """Go on only if ``say`` accepts on every rank, and says the same of what they are about to do; collective.

        Raises
        ------
        Exception
            What ``say`` raises, on the ranks where it does.
        MismatchError
            On the other ranks then; on all, if their words differ.
        """
        try:
            word = say()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must not wait for this one
            self.agree("", error)
        else:
            self.agree(word)

    def _gather(self, text: str, *, failed: bool) -> list[tuple[str, bool]]:
        """Return every rank's text, and whether it failed."""
        data = bytes([failed]) + text.encode(errors="replace")
        parts = self.gather(data, "agree on what they are about to do")
        return [(part[1:].decode(errors="replace"), bool(part[0])) for part in parts]

    def gather(self, data: bytes, purpose: str) -> list[bytes]:
        """Return what every rank says, for a purpose in words; collective.

        Raises
        ------
        StallError
            If a rank does not come within the timeout.
        RankFailedError
            If a rank has died.
        """
        with self.failures.told():
            return gather(self.comm, data, purpose, self.trail)

    def free(self, *, at_exit: bool = False) -> None:
        """Free everything that was opened on the channel, in order, and the channel; a second call does nothing.

        If something still runs (an error left it behind), or a rank has died, the communicator stays, with all that
        would have to be freed together. At the end of the program there is no deadline: another rank may have much to
        do before it comes there.
        """
        if self.comm == MPI.COMM_NULL:
            return
        self.calls.clear()  # whose plans are open
        for thing in list(self.open.values()):
            with contextlib.suppress(PlanError):
                thing.free()
        with contextlib.suppress(RankFailedError), self.failures.told():
            if self.failures.broken or self.failures.found():
                self._abandon()
            elif not at_exit or self._all_are_at_their_end():
                self._free_together(at_exit=at_exit)
        if (watchdog := process().watchdog) is not None:
            watchdog.leave(self.trail)

    def _abandon(self) -> None:
        """Leave what can only be freed by all ranks: one of them has died."""
        self.failures.give_up()
        if self.nccl is not None:
            self.nccl.close(abort=True)
            self.nccl = None
        self.open.clear()
        self.comm = MPI.Intracomm(MPI.COMM_NULL)

    def _all_are_at_their_end(self) -> bool:
        """Wait for all ranks to come to the end of the program; return whether nothing has gone wrong meanwhile."""
        if self.trail.fault is not None:
            return False
        subject = Subject(self.trail, "the end of the program")  # of which nobody is warned
        try:
            complete(self.comm.Ibarrier(), "come to the end of the program", subject, math.inf)
        except (MismatchError, StallError):  # which has been told to those who waited
            return False
        return True

    def _free_together(self, *, at_exit: bool) -> None:
        """Free what all ranks free together, but for what might hang."""
        if at_exit:
            self._free_parts()
            return
        self.trail.fault = None  # which has been raised: it is no reason not to come together once more
        with meeting("free a communicator", self.trail) as subject:
            complete(self.comm.Ibarrier(), "free a communicator", subject)
            subject.unleavable = DEFAULT_TIMEOUT  # a rank that has given up waiting for this one does not come
            self._free_parts()

    def _free_parts(self) -> None:
        # What an error has left running on one rank alone must not keep the others waiting for it here.
        if self.nccl is not None:
            self.nccl.close(abort=bool(self.open))
            self.nccl = None
        self.memory.free(running=bool(self.open))
        if self.device_memory is not None:
            self.device_memory.free(running=bool(self.open))
        if not self.open:
            self.node.free()
            self.comm.Free()
        self.comm = MPI.Intracomm(MPI.COMM_NULL)  # what still runs has its own requests


def _pieces(chunk: Array) -> Iterator[Array]:
    flat = chunk.view("u1")
    for start in range(0, flat.size, MOST_BYTES):
        yield flat[start : start + MOST_BYTES]
