"""What every process group has: its ranks, its names, its line of work, and messages from one rank to another."""

# ruff: noqa: N802 - torch's names

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

from mpiagg.arrays import Array
from mpiagg.collectives.comm import Comm
from mpiagg.collectives.registered import empty
from mpiagg.common.compiling import methods_not_compiled
from mpiagg.ddp.torch_modules import DEVICES, tensor_of
from mpiagg.torch.destroying import Destroyed, free_patiently
from mpiagg.torch.starting import BACKEND
from mpiagg.torch.streams import behind_present
from mpiagg.torch.tensors import check_output, moved, plain, put
from mpiagg.torch.versions import SPLITS
from mpiagg.torch.works import Line, MessageWork, Work
from mpiagg.transport import DEFAULT_TIMEOUT, channel_of, communicator_among, keep_for_good, keep_number

if TYPE_CHECKING:
    from typing_extensions import Self

TAGS: Final = 2**15 - 1
"""Tags of messages are below this number, up to which every MPI library has them."""

BARRIER: Final = TAGS
"""The tag of the messages of a monitored barrier."""

LONGEST: Final = 2**30
"""Bytes of a message up to which they are counted one by one."""

_YEARS: Final = 1e9
"""Seconds of a timeout at most, of which torch has no infinite ones."""

Tensors = Sequence[torch.Tensor]


def check_tag(tag: int) -> int:
    """Return a message's tag; raise ValueError if MPI may not have it."""
    if not 0 <= tag < TAGS:
        raise ValueError(f"the tag of a message must be from 0 to {TAGS - 1}, not {tag}")
    return tag


@methods_not_compiled
class RankGroup(dist.ProcessGroup):  # type: ignore[misc]  # mypy sees no classes of torch's where torch is not installed
    """The ranks of a process group over a communicator.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks, in the order of the group; it is duplicated.
    name : str
        torch's name of the group.
    timeout : datetime.timedelta
        How long a call may wait without progress.
    """

    supports_splitting = SPLITS
    supports_coalescing = False

    def __init__(self, comm: MPI.Intracomm, name: str, timeout: timedelta) -> None:
        super().__init__(comm.rank, comm.size)
        self._rank, self._size = comm.rank, comm.size
        # By our own schedules alone: the MPI library's collectives cannot be left when the time is over.
        self._comm, self._messages = Comm(comm, reproducible=True), comm.Dup()
        self._name, self._description = name, "undefined"
        self.set_timeout(timeout)
        self._line, self._under_way = Line(f"mpiagg {name}"), dict[MessageWork, bool]()
        self._calls = self._unread = 0
        self._log = channel_of(self._comm).log
        self._log.label = name
        self._freed = False

    @classmethod
    def create(cls, asked: Any, options: object = None) -> Self:
        """Return the process group that torch asks for; collective among its ranks.

        Raises
        ------
        ValueError
            If these are no ranks of one MPI job.
        """
        del options
        store, rank, size = asked.store, asked.group_rank, asked.group_size
        if not 0 <= rank < size:
            raise ValueError(f"a group of {size} ranks has no rank {rank}")
        world = MPI.COMM_WORLD
        store.set(f"rank {rank}", str(world.rank))
        told = [bytes(store.get(f"rank {other}")).decode() for other in range(size)]
        ranks = [int(text) if text.isdecimal() and len(text) < 10 else -1 for text in told]
        if len(set(ranks)) != size or not all(0 <= each < world.size for each in ranks) or ranks[rank] != world.rank:
            raise ValueError(
                f"torch has {size} ranks in this group, and they are the ranks {told} of an MPI job of {world.size}: "
                "start the program by mpiexec or srun"
            )
        return cls._of(world, ranks, asked.group_id, asked.timeout)

    @classmethod
    def _of(cls, comm: MPI.Intracomm, ranks: Sequence[int], name: str, timeout: timedelta) -> Self:
        """Return the group of some ranks of a communicator, in this order; collective among these."""
        own = communicator_among(comm, ranks, zlib.crc32(name.encode()) % TAGS)
        made = cls(own, name, timeout)
        own.Free()
        return made

    @property
    def comm(self) -> Comm:
        """The communicator of the group's collectives."""
        return self._comm

    # -- what torch asks of a group

    def rank(self) -> int:
        """Return the rank."""
        return self._rank

    def size(self) -> int:
        """Return how many ranks there are."""
        return self._size

    getRank, getSize = rank, size  # noqa: N815 - torch's names

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return BACKEND

    name = _get_backend_name = getBackendName

    def getGroupName(self) -> str:
        """Return torch's name of the group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Take torch's name of the group."""
        self._name = name
        self._set_label()

    def getGroupDesc(self) -> str:
        """Return torch's description of the group."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Take torch's description of the group."""
        self._description = description
        self._set_label()

    group_name, group_desc = property(getGroupName), property(getGroupDesc)  # torch before 2.6 asks no method

    def _set_label(self) -> None:
        """Have recordings call the group as torch does."""
        self._log.label = self._name if self._description == "undefined" else f"{self._name}:{self._description}"

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def __repr__(self) -> str:
        """Say it in words."""
        return f"<process group {self._name} of mpiagg, rank {self.rank()} of {self.size()}>"

    def _get_backend(self, device: object) -> Self:
        """Return the backend for a device: there is one."""
        del device
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self._calls

    def set_timeout(self, timeout: timedelta) -> None:
        """Take how long a call may wait without progress: torch's default stands for the package's own."""
        own = timedelta(seconds=min(DEFAULT_TIMEOUT, _YEARS))  # which may be infinite
        self._timeout = own if timeout == dist.default_pg_timeout else timeout

    _set_default_timeout = set_timeout

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether :meth:`allocate_tensor` serves a device."""
        return torch.device(device).type in DEVICES

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor in memory that the ranks of a node share; collective on the node."""
        sample = torch.empty(0, dtype=dtype, device=device)  # knows which GPU is meant, where that is the present one
        if sample.is_cuda and channel_of(self._comm).node.size == 1:
            return sample.new_empty(size)  # which follows torch's streams; CuPy's memory does not
        nbytes, found = size * sample.element_size(), list[Array]()

        def make() -> None:
            found.append(empty(nbytes, np.uint8, comm=self._comm, device=str(sample.device)))

        # In its turn: ranks that make memory come together on the communicator of the collectives.
        self._line.do([], make, at_once=True).wait()
        return tensor_of(found[0]).view(dtype)

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        **_: object,
    ) -> Self | None:
        """Return a group of some of the ranks, in their order, None on the others; collective among the former."""
        del opts
        if self.rank() not in new_ranks:
            return None
        name = group_name or f"{self._name}:{'-'.join(map(str, new_ranks))}"
        made = self._of(self._messages, new_ranks, name, self._timeout if timeout is None else timeout)
        if group_desc is not None:
            made.setGroupDesc(group_desc)
        return made

    def eager_connect_single_device(self, device: object) -> None:
        """Do nothing: a group is connected when it is made."""

    def perform_nocolor_split(self, device: object) -> None:
        """Do nothing on a rank that is not in a new group: who makes it does not wait for the others."""

    def shutdown(self) -> None:
        """Do what has been asked for, and give back what belongs to the group."""
        if self._freed:
            return
        self._freed = True
        self._line.end()
        # Messages that have not come or gone still may.
        left = {message: into for message, into in list(self._under_way.items()) if not message.is_completed()}
        keep_for_good(left)
        if not MPI.Is_finalized():
            messages, comm, channel = self._messages, self._comm, channel_of(self._comm)
            self._messages = self._comm = cast("Comm", Destroyed(self._name))
            channel.unread = self._unread + sum(left.values())
            free_patiently(comm, self._timeout.total_seconds())
            if channel.behind:
                keep_number(messages)
            messages.Free()

    def abort(self) -> None:
        """End the job: the other ranks would wait for ever."""
        MPI.COMM_WORLD.Abort(1)

    # -- how a collective runs

    def _do(
        self, name: str, opts: Any, outputs: Tensors, task: Callable[[float | None], object], inputs: Tensors = ()
    ) -> Work:
        """Do a task in its turn, given the seconds that it may wait: None for the package's own.

        Recordings have it under the name. ``inputs`` are needed where a rank has no outputs.
        """
        self._calls += 1
        given = opts.timeout
        limit = given if given > timedelta(0) else self._timeout
        seconds = None if limit == dist.default_pg_timeout else limit.total_seconds()
        in_order = behind_present(outputs or inputs)

        def named() -> None:
            self._log.callers.append((self._log.count + 1, name))
            in_order(lambda: task(seconds))

        return self._line.do(outputs, named, at_once=not getattr(opts, "asyncOp", True))

    def _root(self, opts: Any) -> int:
        return self._check_rank(opts.rootRank)

    def _check_rank(self, rank: int) -> int:
        if not 0 <= rank < self.size():
            raise ValueError(f"the ranks of this group are 0 to {self.size() - 1}; {rank} is none")
        return rank

    # -- messages from one rank to another

    def send(self, tensors: Tensors, rank: int, tag: int = 0) -> Work:
        """Send a tensor to a rank."""
        return self._message(tensors, self._check_rank(rank), check_tag(tag))

    def recv(self, tensors: Tensors, rank: int, tag: int = 0) -> Work:
        """Receive a tensor from a rank."""
        return self._message(tensors, self._check_rank(rank), check_tag(tag), into=True)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        """Receive a tensor from whichever rank sends one."""
        return self._message(tensors, MPI.ANY_SOURCE, check_tag(tag), into=True)

    def _message(self, tensors: Tensors, rank: int, tag: int, *, into: bool = False) -> Work:
        """Start to send a tensor, or to receive into it."""
        self._calls += 1
        (tensor,) = tensors
        if into:
            check_output(tensor)
        while any(message.is_completed() for message in list(self._under_way)[:1]):
            pass  # lets go of those that have come or gone, up to the first that has not: nobody may wait for them
        in_order = behind_present(tensors)
        if tensor.is_cuda:  # by way of the host, also where the MPI library is said to take memory of a GPU
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") if into else plain(tensor).cpu()
        else:
            whole = plain(tensor)
        start = self._messages.Irecv if into else self._messages.Isend
        request = _started(start, moved(whole).view(np.uint8), rank, tag)
        peer = "any rank" if rank == MPI.ANY_SOURCE else f"rank {rank}"
        label = f"{whole.nbytes} bytes to {'arrive from' if into else 'be sent to'} {peer}"
        then = partial(in_order, partial(put, tensor, whole)) if into and whole is not tensor else None
        seconds = self._timeout.total_seconds()
        self._unread += -1 if into else 1
        tensor = tensor if into else whole
        return MessageWork(tensor, request, label, seconds, then, under_way=self._under_way, into=into)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; rank 0 says which have not come in time.

        Parameters
        ----------
        timeout : datetime.timedelta, optional
            How long rank 0 waits for all others together; as long as the group's calls without it.
        wait_all_ranks : bool
            Whether rank 0 waits for all ranks and names all that have not come, or only the first of them.

        Raises
        ------
        RuntimeError
            On rank 0 if a rank has not come in time, and then on those that have.
        """
        limit = self._timeout if timeout is None else timeout
        word = torch.zeros(1, dtype=torch.uint8)
        if self.rank():
            self._message([word.clone()], 0, BARRIER)
            try:
                self._message([word], 0, BARRIER, into=True).wait(max(limit, self._timeout))
            except dist.DistBackendError:
                word.fill_(1)
            if word.item():
                raise RuntimeError(
                    f"Rank {self.rank()} successfully reached monitoredBarrier, but received errors while waiting for "
                    "send/recv from rank 0. Please check rank 0 logs for faulty rank."
                )
            return
        late = self._late(limit, everyone=wait_all_ranks)
        if limit <= timedelta(0):  # as torch has it, whoever has come by chance
            late = [*range(1, self.size())]
        word.fill_(bool(late))
        for rank in range(1, self.size()):  # also to those that may yet come
            told = self._message([word], rank, BARRIER)
            if rank not in late:
                told.wait()
        if late:
            if limit <= timedelta(0):
                raise RuntimeError(f"Rank 0 timed out in monitoredBarrier after {_milliseconds(limit)} ms.")
            who = f"Ranks {', '.join(map(str, late))}" if wait_all_ranks else f"Rank {late[0]}"
            raise RuntimeError(f"{who} failed to pass monitoredBarrier in {_milliseconds(limit)} ms")

    def _late(self, limit: timedelta, *, everyone: bool) -> list[int]:
        """Return the ranks that have not come in time; the first alone, and those behind it, unless ``everyone``."""
        end, late = time.monotonic() + limit.total_seconds(), list[int]()
        arrivals = [
            self._message([torch.empty(1, dtype=torch.uint8)], rank, BARRIER, into=True)
            for rank in range(1, self.size())
        ]
        for rank, arrival in enumerate(arrivals, 1):
            if late and not everyone:
                end = 0.0  # who else has not come is late, too
            try:
                arrival.wait(timedelta(seconds=max(1e-3, end - time.monotonic())))
            except dist.DistBackendError:
                late.append(rank)
        return late


def _started(start: Callable[..., MPI.Request], memory: Array, rank: int, tag: int) -> MPI.Request:
    """Start a message of bytes: a long one as one element, since not every MPI library counts beyond 31 bits."""
    if memory.size <= LONGEST:
        return start([memory, MPI.BYTE], rank, tag)
    pieces, rest = divmod(memory.size, LONGEST)
    piece = MPI.BYTE.Create_contiguous(LONGEST)
    whole = MPI.Datatype.Create_struct([pieces, rest], [0, pieces * LONGEST], [piece, MPI.BYTE]).Commit()
    try:
        return start([memory, 1, whole], rank, tag)
    finally:
        piece.Free()
        whole.Free()


def _milliseconds(time: timedelta) -> int:
    return round(1000 * time.total_seconds())
