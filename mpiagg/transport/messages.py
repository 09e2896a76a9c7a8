"""How a chunk crosses: persistent point-to-point messages of mpi4py, on a private communicator.

Every communicator that mpiagg is used on has one :class:`Channel`: a duplicate that no one else sends on, the
tags in use on it, and what must be freed with it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, Final, Protocol

import numpy as np
from mpi4py import MPI

from mpiagg.arrays import Array
from mpiagg.arrays.devices import Nccl
from mpiagg.errors import MismatchError, RankFailedError, StallError
from mpiagg.launch.launchers import refuse_copies
from mpiagg.schedules import Collective, Layout
from mpiagg.tables import Case, Memory, settings
from mpiagg.transport.agreement import Agreement
from mpiagg.transport.comparison import compare_settings, learner_of
from mpiagg.transport.kept import Calls, free_if_over
from mpiagg.transport.meetings import exchange, is_late, keep_for_good, meeting
from mpiagg.transport.node_memory import NodeMemory
from mpiagg.transport.nodes import Node, fault_of_nodes
from mpiagg.transport.process import REPRODUCIBLE, process
from mpiagg.transport.tags import LEAST, Tags
from mpiagg.transport.waiting import DEFAULT_TIMEOUT
from mpiagg.watch import OneThread, Subject

MOST_BYTES: Final = 2**30
"""Longer messages are cut: MPI counts are 32-bit integers in many libraries."""

PIECE: Final = 60 * 2**10
CUT: Final = 512 * 2**10
"""Bytes of the pieces in which Open MPI's messages of up to ``CUT`` bytes cross between nodes by TCP.

It sends messages of less than 64 KiB, with its own words, at once. Of a longer one the receiver asks for part after
part, and its questions wait behind what it sends itself, which in a ring is as much (``bench/cluster_links.py``). It
copies the pieces that are under way, so the longest messages are left whole. So are those of collectives with a root,
of scans and between neighbors, where not all ranks receive as much as they send: pieces that nobody has asked for would
be in the way of others.
"""

SHARED_TAG: Final = 0
"""Stands for the tags of blocking calls: they follow one another, so those of the same operation can share them."""

MAKE: Final = "make a communicator"
"""What ranks come together for before calls of the MPI library that wait for all of them without a deadline. These are
the words for a channel's own; `channels.meet` adds to them by which method of the caller's it is."""


class Freeable(Protocol):
    """Something with MPI handles that must be given back."""

    lasts: bool
    """Whether it can be used when its communicator is freed, until it is itself."""

    by_messages: bool
    """Whether it needs none of the memory that the ranks of a node share."""

    @property
    def running(self) -> bool:
        """Whether messages of it may be under way."""

    def free(self) -> None:
        """Give the handles back; a second call does nothing."""


class Channel(Agreement):
    """A private duplicate of a communicator, with tags for concurrent operations.

    Parameters
    ----------
    comm : MPI.Intracomm
        The communicator to duplicate; a collective call.
    reproducible : bool
        Whether calls keep to our own schedules; by default, if the environment variable MPIAGG_REPRODUCIBLE is 1.
    hands_on : bool
        Whether methods of the communicator hand on to the MPI library what they are called with.

    Attributes
    ----------
    native : MPI.Intracomm
        What blocking calls of the MPI library's own collectives are made on. Where the methods of the communicator that
        was given hand on what they are called with, it is that one: another rank may have to copy what it is called
        with, and makes the same call of the library then. Otherwise it is the duplicate.
    library : str or None
        The MPI library, where its own collectives take as long as its tables say: None between ranks that were
        started at different times, which Open MPI connects by TCP on one node, too.
    calls : Calls
        What calls were resolved into.
    lines : dict
        The lines of nonblocking calls, by their tags.
    aware : bool
        Whether the messages of all ranks reach memory of CUDA devices; elsewhere it goes by way of the host.
    memory : NodeMemory
        What the ranks of a node share.
    learner : Learner or None
        What is learned from calls, where that is asked for.
    piece_cost : int or None
        That of the table that is in use; the same on all ranks.
    nccl : Nccl or None
        The connection of their devices by NCCL, once they have one.
    open : dict
        What must be freed before the channel is.
    unread : int
        Messages beside the operations: those that this rank has sent, less those that it has received.
    behind : bool
        Whether messages that nobody has received may have been left when the channel was freed: some were there, or not
        all ranks had begun as many operations, or received what was sent to them. Then MPI must not give the
        communicator's number to another one.
    one_thread : OneThread
        Entered before anything is written to memory of a call's own. Blocking operations look for other threads by
        themselves, but only when they begin.

    Raises
    ------
    ValueError
        On the ranks where the environment variable MPIAGG_NODES does not say how many ranks each node has.
    MismatchError
        On the other ranks then; on all, if their settings differ.
    StallError
        If a rank does not come within the timeout.
    RankFailedError
        If a rank has died.
    """

    def __init__(self, comm: MPI.Intracomm, *, reproducible: bool = False, hands_on: bool = False) -> None:
        plain = MPI.Intracomm(comm)
        super().__init__(plain)
        self.reproducible = reproducible or REPRODUCIBLE
        with self.failures.told(), meeting(MAKE, self.log) as subject:
            fault = fault_of_nodes()
            told = exchange(plain, fault.encode(), MAKE, subject)
            if fault:
                raise ValueError(fault)
            if any(told):
                raise MismatchError(next(f"rank {rank}: {text.decode()}" for rank, text in enumerate(told) if text))
            # What follows are calls of the MPI library's that wait without a deadline; but now all are here.
            subject.unleavable = DEFAULT_TIMEOUT
            self._set_up(plain)
        self.native = plain if hands_on else self.comm

    def _set_up(self, comm: MPI.Intracomm) -> None:
        """Make what belongs to the channel, on a communicator of mpi4py's own class; collective."""
        refuse_copies(MPI.COMM_WORLD.Get_size(), MPI.get_vendor()[0])
        # Created, not duplicated: the caller's attributes stay with the caller.
        group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
        self.comm = MPI.Intracomm(comm.Create(group))
        together = MPI.UNDEFINED not in MPI.Group.Translate_ranks(group, None, world)
        self.library = MPI.get_vendor()[0] if together else None
        group.Free()
        world.Free()
        self.failures.comms.append(self.comm)
        self.node = Node(self.comm, self.failures, self.log)
        self.memory = NodeMemory(self.node, lambda: self.busy, self.disagreement)
        self.nccl: Nccl | None = None
        self.open: dict[int, Freeable] = {}
        self.calls = Calls()
        self.lines: dict[int, Any] = {}
        self.unread, self.behind = 0, False
        self.one_thread = OneThread()
        upper = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
        self.tags = Tags(LEAST if upper is None else int(upper))
        try:
            self.aware, by_tcp = compare_settings(self, self.layout, reproducible=self.reproducible)
            self._longest_cut = CUT if by_tcp and MPI.get_vendor()[0] == "Open MPI" else 0
            self.learner = None if self.reproducible else learner_of(self, self.layout)
        except Exception:
            self.free()
            raise
        table = settings().table if self.learner is None else self.learner.before
        self.piece_cost = None if table is None else table.piece_cost
        self.failures.comms.remove(comm)  # the caller's, of which we know nothing from now on

    @property
    def layout(self) -> Layout:
        """Which rank is on which node."""
        return self.node.layout

    def case(
        self,
        collective: Collective,
        nbytes: int,
        memory: Memory = Memory.TOGETHER,
        *,
        native: bool = False,
        reproducible: bool = False,
    ) -> Case:
        """Return what a choice goes by here; ``native`` if the MPI library's own collective may be taken, too."""
        learned = None if self.learner is None or reproducible else self.learner.before
        return Case(collective, nbytes, self.layout, memory, self.library if native else None, learned)

    @property
    def busy(self) -> bool:
        """Whether anything that was opened on the channel is running."""
        return any(thing.running for thing in list(self.open.values()))  # which other threads change

    def send_init(self, chunk: Array, peer: int, tag: int, *, cut: bool = True) -> Iterator[MPI.Prequest]:
        """Prepare to send a contiguous chunk to ``peer``, by a request for each of its pieces.

        Where it may be ``cut``, they are of ``PIECE`` bytes if that helps; the longest are of ``MOST_BYTES``.
        """
        for piece in self._pieces(chunk, peer, cut=cut):
            yield self.comm.Send_init([piece, piece.nbytes, MPI.BYTE], peer, tag)

    def receive_init(self, chunk: Array, peer: int, tag: int, *, cut: bool = True) -> Iterator[MPI.Prequest]:
        """Prepare to receive a contiguous chunk from ``peer``, by a request for each of its pieces, as it is sent."""
        for piece in self._pieces(chunk, peer, cut=cut):
            yield self.comm.Recv_init([piece, piece.nbytes, MPI.BYTE], peer, tag)

    def _pieces(self, chunk: Array, peer: int, *, cut: bool) -> Iterator[Array]:
        """Yield the pieces that a chunk is sent in; for it and for its receiver they are the same."""
        flat = chunk.view("u1")
        longest = PIECE if cut and flat.size <= self._longest_cut and peer not in self.node.ranks else MOST_BYTES
        for start in range(0, flat.size, longest):
            yield flat[start : start + longest]

    def free(self, *, at_exit: bool = False) -> None:
        """Free everything that was opened on the channel, in order, and the channel; a second call does nothing.

        If something still runs (an error left it behind), or lasts, or a rank has died, the communicator stays, with
        all that would have to be freed together. At the end of the program there is no deadline: another rank may have
        much to do before it comes there. What this rank has given up before has one.
        """
        if self.comm == MPI.COMM_NULL:
            return
        self.calls.free()
        for thing in [thing for thing in list(self.open.values()) if at_exit or not thing.lasts]:
            free_if_over(thing)
        with contextlib.suppress(RankFailedError), self.failures.told():
            if self.failures.broken or self.failures.found():
                self._abandon()
            elif not at_exit or self._all_are_at_their_end():
                self._free_together(at_exit=at_exit)
        with contextlib.suppress(ValueError):  # of settings that were refused
            process().recorder.logs.pop(self.log.name, None)
            if (watchdog := process().watchdog) is not None:
                watchdog.leave(self.log)

    def _abandon(self) -> None:
        """Leave what can only be freed by all ranks: one of them has died."""
        self.failures.give_up()
        if self.nccl is not None:
            self.nccl.close(abort=True)
            self.nccl = None
        keep_for_good(self.open)
        self.open = {}
        self.comm = self.native = MPI.Intracomm(MPI.COMM_NULL)

    def _all_are_at_their_end(self) -> bool:
        """Wait for all ranks to come to the end of the program; return whether nothing has gone wrong meanwhile."""
        if self.log.fault is not None:
            return False
        subject = Subject(self.log, "the end of the program")  # of which nobody is warned
        while (all_are := self._come_to_end(subject)) is None:
            pass
        return all_are

    def _come_to_end(self, subject: Subject) -> bool | None:
        """Return whether all have come, or None if one had come for something else, in vain: it comes here next."""
        try:
            exchange(self.comm, b"", "come to the end of the program", subject, math.inf)
        except MismatchError:
            return False if self.log.fault is not None or is_late(self.comm) else None
        except StallError:
            return False
        return True

    def _free_together(self, *, at_exit: bool) -> None:
        """Free what all ranks free together, but for what might hang."""
        if at_exit:
            self._free_parts()
            return
        self.log.fault = None  # which has been raised: it is no reason not to come together once more
        with meeting("free a communicator", self.log) as subject:
            own = np.array([self.log.count, self.unread])
            told = [
                np.frombuffer(x, own.dtype) for x in exchange(self.comm, own.tobytes(), "free a communicator", subject)
            ]
            counts, unread = zip(*told, strict=True)
            left = self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
            self.behind = left or len(set(counts)) > 1 or bool(sum(unread) != 0)
            subject.unleavable = DEFAULT_TIMEOUT  # a rank that has given up waiting for this one does not come
            self._free_parts()

    def _free_parts(self) -> None:
        # What is left on one rank alone, by an error or because it lasts, must not keep the others waiting for it here.
        if self.nccl is not None:
            self.nccl.close(abort=bool(self.open))
            self.nccl = None
        self.memory.free(running=not all(thing.by_messages for thing in self.open.values()))
        if self.open:
            keep_for_good(self.open)
        elif not self.behind:
            self.node.free()
            self.comm.Free()
        self.comm = MPI.Intracomm(MPI.COMM_NULL)
