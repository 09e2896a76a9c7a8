"""What every process group has: its ranks, its names, its line of work, and messages from one rank to another."""

# ruff: noqa: N802 - torch's names

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

from mpiagg.collectives.comm import Comm
from mpiagg.collectives.registered import empty
from mpiagg.ddp.torch_modules import tensor_of
from mpiagg.torch.starting import BACKEND
from mpiagg.torch.tensors import moved
from mpiagg.torch.works import Line, Messages, Requests, Work

if TYPE_CHECKING:
    from typing_extensions import Self

TAGS: Final = 2**15
"""The tags of messages go up to this number, which every MPI library has."""

Tensors = Sequence[torch.Tensor]


def check_tag(tag: int) -> int:
    """Return a message's tag; raise ValueError if MPI may not have it."""
    if not 0 <= tag < TAGS:
        raise ValueError(f"the tag of a message must be from 0 to {TAGS - 1}, not {tag}")
    return tag


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

    supports_splitting = False
    supports_coalescing = False

    def __init__(self, comm: MPI.Intracomm, name: str, timeout: timedelta) -> None:
        super().__init__(comm.rank, comm.size)
        self._comm, self._messages = Comm(comm), comm.Dup()
        self._name, self._description, self._timeout = name, "undefined", timeout
        self._line, self._under_way = Line(f"mpiagg {name}"), Messages()
        self._calls = 0
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
        world = MPI.COMM_WORLD
        store.set(f"rank {rank}", str(world.rank))
        told = [bytes(store.get(f"rank {other}")).decode() for other in range(size)]
        ranks = [int(text) if text.isdecimal() and len(text) < 10 else -1 for text in told]
        if len(set(ranks)) != size or not all(0 <= each < world.size for each in ranks):
            raise ValueError(
                f"torch has {size} ranks in this group, and they are the ranks {told} of an MPI job of {world.size}: "
                "start the program by mpiexec or srun"
            )
        group = world.group.Incl(ranks)
        comm = world.Create_group(group, zlib.crc32(asked.group_id.encode()) % TAGS)
        group.Free()
        made = cls(comm, asked.group_id, asked.timeout)
        comm.Free()
        return made

    # -- what torch asks of a group

    def rank(self) -> int:
        """Return the rank."""
        return self._messages.rank

    def size(self) -> int:
        """Return how many ranks there are."""
        return self._messages.size

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

    def getGroupDesc(self) -> str:
        """Return torch's description of the group."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Take torch's description of the group."""
        self._description = description

    def _get_backend(self, device: object) -> Self:
        """Return the backend for a device: there is one."""
        del device
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self._calls

    def set_timeout(self, timeout: timedelta) -> None:
        """Take how long a call may wait without progress."""
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether :meth:`allocate_tensor` serves a device."""
        return bool(torch.device(device).type == "cpu")

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor in memory that the ranks of a node share; collective on the node."""
        unit = torch.empty(0, dtype=dtype).element_size()
        memory = empty(size * unit, np.uint8, comm=self._comm)
        return tensor_of(memory).view(dtype).to(device)

    def shutdown(self) -> None:
        """Do what has been asked for, and give back what belongs to the group."""
        if not self._freed:
            self._freed = True
            self._line.end()
            self._under_way.end()
            if not MPI.Is_finalized():
                self._messages.Free()
                self._comm.Free()

    def abort(self) -> None:
        """End the job: the other ranks would wait for ever."""
        MPI.COMM_WORLD.Abort(1)

    # -- how a collective runs

    def _do(self, opts: Any, tensors: Tensors, task: Callable[[float | None], object]) -> Work:
        """Do a task in its turn, given the seconds that it may wait: None for the package's own."""
        self._calls += 1
        given = getattr(opts, "timeout", None)
        limit = given if given is not None and given > timedelta(0) else self._timeout
        seconds = None if limit == dist.default_pg_timeout else limit.total_seconds()
        return self._line.do(tensors, lambda: task(seconds), at_once=not getattr(opts, "asyncOp", True))

    # -- messages from one rank to another

    def send(self, tensors: Tensors, rank: int, tag: int = 0) -> Work:
        """Send a tensor to a rank."""
        (tensor,) = tensors
        whole = tensor.contiguous()
        request = self._messages.Isend([moved(whole).view(np.uint8), MPI.BYTE], rank, check_tag(tag))
        return self._requests([whole], request, f"send of {whole.nbytes} bytes to rank {rank}")

    def recv(self, tensors: Tensors, rank: int, tag: int = 0) -> Work:
        """Receive a tensor from a rank."""
        (tensor,) = tensors
        whole = tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        request = self._messages.Irecv([moved(whole).view(np.uint8), MPI.BYTE], rank, check_tag(tag))
        source = "any rank" if rank == MPI.ANY_SOURCE else f"rank {rank}"
        kept = (lambda: tensor.copy_(whole)) if whole is not tensor else None
        return self._requests([tensor], request, f"receive of {whole.nbytes} bytes from {source}", kept)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        """Receive a tensor from whichever rank sends one."""
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    def _requests(
        self, tensors: Tensors, request: MPI.Request, label: str, then: Callable[[], object] | None = None
    ) -> Work:
        self._calls += 1
        seconds = self._timeout.total_seconds()
        return Requests(tensors, [request], label, seconds, then, among=self._under_way)
