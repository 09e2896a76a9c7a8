"""The process group: torch's collectives by ours."""

# ruff: noqa: N802 - torch's names

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

from mpiagg.collectives import block_functions, functions, moving_functions
from mpiagg.collectives.comm import Comm
from mpiagg.collectives.registered import empty
from mpiagg.ddp.torch_modules import tensor_of
from mpiagg.torch.starting import BACKEND
from mpiagg.torch.tensors import factor_of, flat, moved, mpi_op_of, op_of, reducible, unflatten, vector_of, view
from mpiagg.torch.works import Line, Messages, Requests, Work

TAGS: Final = 2**15
"""The tags of messages go up to this number, which every MPI library has."""

Tensors = Sequence[torch.Tensor]


def check_tag(tag: int) -> int:
    """Return a message's tag; raise ValueError if MPI may not have it."""
    if not 0 <= tag < TAGS:
        raise ValueError(f"the tag of a message must be from 0 to {TAGS - 1}, not {tag}")
    return tag


class ProcessGroup(dist.ProcessGroup):  # type: ignore[misc]  # mypy sees no classes of torch's where torch is not installed
    """A process group of ``torch.distributed`` over a communicator.

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
    def create(cls, asked: Any, options: object = None) -> ProcessGroup:
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

    def _get_backend(self, device: object) -> ProcessGroup:
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

    def _reduce_all(self, tensor: torch.Tensor, reduce_op: Any, timeout: float | None) -> None:
        if tensor.is_sparse:
            tensor.copy_(self._sum_of_sparse(tensor, reduce_op, timeout))
            return
        with reducible(tensor, reduce_op, self.size()) as (array, op):
            functions.allreduce(array, op, out=array, comm=self._comm, timeout=timeout)

    def _sum_of_sparse(self, tensor: torch.Tensor, reduce_op: Any, timeout: float | None) -> torch.Tensor:
        """Return the sum of sparse tensors: all ranks gather the coordinates and values of all."""
        if op_of(reduce_op, tensor.dtype) != "sum":
            raise ValueError("mpiagg reduces sparse tensors by SUM alone")
        own = tensor.coalesce()
        coordinates, values = own.indices().t().contiguous(), own.values().contiguous()
        comm = self._comm
        counts = moving_functions.allgather(np.int64(len(values)), comm=comm, timeout=timeout).tolist()
        found = [
            block_functions.allgatherv(view(part), counts, comm=comm, timeout=timeout) for part in (coordinates, values)
        ]
        indices, summands = map(tensor_of, found)
        return torch.sparse_coo_tensor(indices.t(), summands, tensor.shape, check_invariants=True).coalesce()

    # -- torch's collectives

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce each tensor over the ranks, in place."""
        op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)

        def task(timeout: float | None) -> None:
            for tensor in tensors:
                self._reduce_all(tensor, op, timeout)

        return self._do(opts, tensors, task)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        """Reduce a tensor over the ranks, in place on the root."""
        (tensor,) = tensors

        def task(timeout: float | None) -> None:
            with reducible(tensor, opts.reduceOp, self.size(), kept=self.rank() != opts.rootRank) as (array, op):
                out = array if self.rank() == opts.rootRank else None
                functions.reduce(array, op, root=opts.rootRank, out=out, comm=self._comm, timeout=timeout)

        return self._do(opts, tensors, task)

    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        """Hand each tensor of the root to all ranks."""

        def task(timeout: float | None) -> None:
            for tensor in tensors:
                with vector_of(tensor) as array:
                    moving_functions.broadcast(array, root=opts.rootRank, out=array, comm=self._comm, timeout=timeout)

        return self._do(opts, tensors, task)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """Hand the tensors of all ranks to all ranks, each to one of its own; they may have different lengths."""

        def task(timeout: float | None) -> None:
            for targets, tensor in zip(outputs, inputs, strict=True):
                counts = [moved(torch.empty_like(target)).size for target in targets]
                whole = block_functions.allgatherv(flat([tensor]), counts, comm=self._comm, timeout=timeout)
                unflatten(whole, targets)

        return self._do(opts, [tensor for targets in outputs for tensor in targets], task)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """Hand each of several tensors of all ranks to all ranks: ``outputs[rank][which]``."""
        return self.allgather([[part[which] for part in outputs] for which in range(len(inputs))], inputs, opts)

    def _allgather_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Work:
        """Hand the tensors of all ranks to all ranks, one after the other in one tensor."""
        return self.allgather_into_tensor_coalesced([output], [source], opts)

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Hand each of several tensors of all ranks to all ranks, one after the other in one tensor."""

        def task(timeout: float | None) -> None:
            for output, source in zip(outputs, inputs, strict=True):
                with vector_of(output) as out:
                    x = flat([source])
                    rows = out.reshape(self.size(), -1)
                    moving_functions.allgather(x, out=rows, comm=self._comm, timeout=timeout)

        return self._do(opts, outputs, task)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Work:
        """Reduce a list of tensors, one for each rank, over the ranks; they may have different lengths."""
        op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)

        def task(timeout: float | None) -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                whole = torch.cat([part.reshape(-1) for part in parts])
                self._scatter_sum(output, whole, [part.numel() for part in parts], op, timeout)

        return self._do(opts, outputs, task)

    def _reduce_scatter_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Work:
        """Reduce a tensor over the ranks, of which each gets one part."""
        return self.reduce_scatter_tensor_coalesced([output], [source], opts)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Reduce each of several tensors over the ranks, of which each gets one part."""
        op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)

        def task(timeout: float | None) -> None:
            for output, source in zip(outputs, inputs, strict=True):
                self._scatter_sum(output, source, [output.numel()] * self.size(), op, timeout)

        return self._do(opts, outputs, task)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _scatter_sum(
        self, output: torch.Tensor, source: torch.Tensor, counts: list[int], reduce_op: Any, timeout: float | None
    ) -> None:
        """Reduce a tensor over the ranks, and hand each rank its part."""
        if sum(counts) != source.numel() or counts[self.rank()] != output.numel():
            raise ValueError(
                f"parts of {counts} numbers make no tensor of {source.numel()}, or of {output.numel()} here"
            )
        factor = factor_of(reduce_op)
        whole = source.contiguous() if factor is None else source * factor
        with reducible(output, reduce_op, self.size(), kept=None) as (out, op):
            x = view(whole).reshape(-1)
            if len(set(counts)) == 1:
                functions.reduce_scatter(x, op, out=out, comm=self._comm, timeout=timeout)
            else:
                self._comm.Reduce_scatter(x, out, counts, mpi_op_of(op))
                if op == "avg":
                    np.divide(out, self.size(), out=out)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Work:
        """Hand the tensors of all ranks to the root."""
        (tensor,) = inputs
        targets = outputs[0] if outputs else []

        def task(timeout: float | None) -> None:
            whole = moving_functions.gather(flat([tensor]), root=opts.rootRank, comm=self._comm, timeout=timeout)
            if whole is not None:
                unflatten(whole.reshape(-1), targets)

        return self._do(opts, targets, task)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        """Hand each rank one of the root's tensors."""
        (output,) = outputs

        def task(timeout: float | None) -> None:
            rows = flat(inputs[0]).reshape(self.size(), -1) if self.rank() == opts.rootRank else None
            with vector_of(output) as out:
                moving_functions.scatter(rows, root=opts.rootRank, out=out, comm=self._comm, timeout=timeout)

        return self._do(opts, outputs, task)

    def alltoall_base(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        received: Sequence[int] = (),
        sent: Sequence[int] = (),
        opts: Any = None,
    ) -> Work:
        """Hand each rank some rows of every rank's tensor: as many as the splits say, or equally many."""

        def counts(tensor: torch.Tensor, splits: Sequence[int]) -> list[int]:
            rows = tensor.shape[0] if tensor.dim() else 1
            if not splits and rows % self.size():
                raise ValueError(f"a tensor of {rows} rows cannot be cut into {self.size()} equal parts")
            splits = splits or [rows // self.size()] * self.size()
            width = moved(tensor.contiguous()).size // max(1, rows)
            return [count * width for count in splits]

        def task(timeout: float | None) -> None:
            with vector_of(output) as out:
                given = flat([source]), counts(source, sent), counts(output, received)
                block_functions.alltoallv(*given, out=out, comm=self._comm, timeout=timeout)

        return self._do(opts, [output], task)

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Hand each rank one tensor of every rank's."""

        def task(timeout: float | None) -> None:
            sent, received = ([moved(each.contiguous()).size for each in part] for part in (inputs, outputs))
            whole = block_functions.alltoallv(flat(inputs), sent, received, comm=self._comm, timeout=timeout)
            unflatten(whole, outputs)

        return self._do(opts, outputs, task)

    def barrier(self, opts: Any = None) -> Work:
        """Wait for all ranks."""
        return self._do(opts, [], lambda timeout: self._comm.Barrier())  # noqa: ARG005 - it has the package's own

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
