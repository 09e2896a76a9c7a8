"""The process group: torch's collectives by ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mpiagg.collectives import block_functions, functions, moving_functions
from mpiagg.ddp.torch_modules import tensor_of
from mpiagg.torch.group import RankGroup, Tensors
from mpiagg.torch.tensors import (
    factor_of,
    flat,
    moved,
    mpi_op_of,
    op_of,
    plainly,
    reducible,
    unflatten,
    vector_of,
    view,
)
from mpiagg.torch.works import Work


class ProcessGroup(RankGroup):
    """A process group of ``torch.distributed``; its methods are torch's, and take what torch's take."""

    def _reduce_all(self, tensor: torch.Tensor, reduce_op: Any, timeout: float | None) -> None:
        if (plain := plainly(tensor, reduce_op)) is not None:
            array, name = plain
            functions.allreduce(array, name, out=array, comm=self._comm, timeout=timeout)
            return
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
            given = counts(source, sent), counts(output, received)
            with vector_of(output) as out:
                if sent or received:
                    block_functions.alltoallv(flat([source]), *given, out=out, comm=self._comm, timeout=timeout)
                else:
                    moving_functions.alltoall(flat([source]), out=out, comm=self._comm, timeout=timeout)

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

        def task(timeout: float | None) -> None:
            # The MPI library's barrier cannot be left when the time is over; a sum of ours can.
            functions.allreduce(np.zeros(1, np.float32), comm=self._comm, timeout=timeout)

        return self._do(opts, [], task)
