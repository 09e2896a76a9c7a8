"""The process group: torch's collectives by ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

from mpiagg.arrays import Array
from mpiagg.collectives import block_functions, functions, moving_functions
from mpiagg.common.compiling import methods_not_compiled
from mpiagg.ddp.sparse import sum_of_sparse
from mpiagg.torch.group import RankGroup, Tensors
from mpiagg.torch.options import read
from mpiagg.torch.tensors import (
    NUMPY,
    check_lengths,
    check_parts,
    flat,
    kind_of,
    multiplied,
    of_one_dtype,
    plainly,
    put,
    reducible,
    unflatten,
    vector_of,
    view,
)
from mpiagg.torch.works import Work


@methods_not_compiled
class ProcessGroup(RankGroup):
    """A process group of ``torch.distributed``.

    torch makes one for each group of ranks, and calls its methods. These are torch's: they take tensors, and torch's
    options, or a root, an op and a timeout in their place. Collectives and messages return work. A call of other ranks
    with other tensors is an error, as in all of mpiagg.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks, in the order of the group; it is duplicated.
    name : str
        torch's name of the group.
    timeout : datetime.timedelta
        How long a call may wait without progress.

    Examples
    --------
    >>> from datetime import timedelta
    >>> group = mpiagg.torch.ProcessGroup(comm, "all", timedelta(seconds=60))
    >>> x = torch.ones(3)
    >>> done = group.allreduce(x).wait()
    >>> x.tolist() == [size] * 3
    True
    >>> group.shutdown()
    """

    def _reduce_all(self, tensor: torch.Tensor, reduce_op: Any, timeout: float | None) -> None:
        if (found := plainly(tensor, reduce_op)) is not None:
            array, name = found
            functions.allreduce(array, name, out=array, comm=self._comm, timeout=timeout)
            return
        if tensor.is_sparse:
            if kind_of(reduce_op) != dist.ReduceOp.SUM or tensor.dtype == torch.bool:
                raise ValueError("mpiagg reduces sparse tensors of numbers, by SUM alone")
            put(tensor, sum_of_sparse(tensor, self._comm, timeout))
            return
        with reducible(tensor, reduce_op, self.size()) as (array, op):
            functions.allreduce(array, op, out=array, comm=self._comm, timeout=timeout)

    def _one_for_each(self, tensors: Tensors) -> None:
        if len(tensors) != self.size():
            raise ValueError(f"{len(tensors)} tensors are not one for each of {self.size()} ranks")

    # -- torch's collectives

    def allreduce(self, tensors: Tensors | torch.Tensor, *given: Any, **named: Any) -> Work:
        """Reduce each tensor over the ranks, in place."""
        tensors, opts = listed(tensors), read(*given, **named)

        def task(timeout: float | None) -> None:
            for tensor in tensors:
                self._reduce_all(tensor, opts.reduceOp, timeout)

        return self._do("all_reduce", opts, tensors, task)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors | torch.Tensor, *given: Any, **named: Any) -> Work:
        """Reduce a tensor over the ranks, in place on the root."""
        opts = read(*given, **named)
        (tensor,), root = listed(tensors), self._root(opts)

        def task(timeout: float | None) -> None:
            with reducible(tensor, opts.reduceOp, self.size(), kept=self.rank() != root) as (array, op):
                out = array if self.rank() == root else None
                functions.reduce(array, op, root=root, out=out, comm=self._comm, timeout=timeout)

        return self._do("reduce", opts, [tensor], task)

    def broadcast(self, tensors: Tensors | torch.Tensor, *given: Any, **named: Any) -> Work:
        """Hand each tensor of the root to all ranks."""
        tensors, opts = listed(tensors), read(*given, **named)
        root = self._root(opts)

        def task(timeout: float | None) -> None:
            for tensor in tensors:
                with vector_of(tensor) as array:
                    moving_functions.broadcast(array, root=root, out=array, comm=self._comm, timeout=timeout)

        return self._do("broadcast", opts, tensors, task)

    def allgather(
        self, outputs: Sequence[Tensors] | Tensors, inputs: Tensors | torch.Tensor, *given: Any, **named: Any
    ) -> Work:
        """Hand the tensors of all ranks to all ranks, each to one of its own; they may have different lengths."""
        outputs, inputs, opts = nested(outputs), listed(inputs), read(*given, **named)
        for targets in outputs:
            self._one_for_each(targets)

        def task(timeout: float | None) -> None:
            for targets, tensor in zip(outputs, inputs, strict=True):
                of_one_dtype(tensor, *targets)
                counts = [_moved_size(target) for target in targets]
                whole = block_functions.allgatherv(flat([tensor]), counts, comm=self._comm, timeout=timeout)
                unflatten(whole, targets)

        return self._do("all_gather", opts, [tensor for targets in outputs for tensor in targets], task)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, *given: Any, **named: Any) -> Work:
        """Hand each of several tensors of all ranks to all ranks: ``outputs[rank][which]``."""
        by_input = [[part[which] for part in outputs] for which in range(len(inputs))]
        return self.allgather(by_input, inputs, *given, **named)

    def _allgather_base(self, output: torch.Tensor, source: torch.Tensor, *given: Any, **named: Any) -> Work:
        """Hand the tensors of all ranks to all ranks, one after the other in one tensor."""
        return self.allgather_into_tensor_coalesced([output], [source], *given, **named)

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, *given: Any, **named: Any) -> Work:
        """Hand each of several tensors of all ranks to all ranks, one after the other in one tensor."""
        for output, source in zip(outputs, inputs, strict=True):
            check_parts(output, source, self.size())

        def task(timeout: float | None) -> None:
            for output, source in zip(outputs, inputs, strict=True):
                with vector_of(output) as out:
                    rows = out.reshape(self.size(), -1)
                    moving_functions.allgather(flat([source]), out=rows, comm=self._comm, timeout=timeout)

        return self._do("_all_gather_base", read(*given, **named), outputs, task)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def reduce_scatter(
        self, outputs: Tensors | torch.Tensor, inputs: Sequence[Tensors] | Tensors, *given: Any, **named: Any
    ) -> Work:
        """Reduce a list of tensors, one for each rank, over the ranks; they may have different lengths."""
        outputs, inputs, opts = listed(outputs), nested(inputs), read(*given, **named)
        for output, parts in zip(outputs, inputs, strict=True):
            self._one_for_each(parts)
            check_lengths(parts[self.rank() : self.rank() + 1], [output.numel()])

        def task(timeout: float | None) -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                of_one_dtype(output, *parts)
                # Those that are shorter are made as long as the longest: the ranks reduce parts of one length.
                rows = pad_sequence([part.reshape(-1) for part in parts], batch_first=True)
                whole = output if output.numel() == rows.shape[1] else rows.new_empty(rows.shape[1])
                self._scatter_sum(whole, rows, opts.reduceOp, timeout)
                if whole is not output:
                    put(output, whole[: output.numel()].reshape(output.shape))

        return self._do("reduce_scatter", opts, outputs, task)

    def _reduce_scatter_base(self, output: torch.Tensor, source: torch.Tensor, *given: Any, **named: Any) -> Work:
        """Reduce a tensor over the ranks, each of which receives one part."""
        return self.reduce_scatter_tensor_coalesced([output], [source], *given, **named)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, *given: Any, **named: Any) -> Work:
        """Reduce each of several tensors over the ranks, each of which receives one part."""
        opts = read(*given, **named)
        for output, source in zip(outputs, inputs, strict=True):
            check_parts(source, output, self.size())

        def task(timeout: float | None) -> None:
            for output, source in zip(outputs, inputs, strict=True):
                self._scatter_sum(output, source, opts.reduceOp, timeout)

        return self._do("_reduce_scatter_base", opts, outputs, task)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _scatter_sum(self, output: torch.Tensor, source: torch.Tensor, reduce_op: Any, timeout: float | None) -> None:
        """Reduce a tensor over the ranks, and hand each rank its part, which is as long as the others'."""
        whole = multiplied(source, reduce_op)
        with reducible(output, reduce_op, self.size(), kept=None) as (out, op):
            functions.reduce_scatter(view(whole), op, out=out, comm=self._comm, timeout=timeout)

    def gather(
        self, outputs: Sequence[Tensors] | Tensors, inputs: Tensors | torch.Tensor, *given: Any, **named: Any
    ) -> Work:
        """Hand the tensors of all ranks to the root."""
        opts = read(*given, **named)
        (tensor,), root = listed(inputs), self._root(opts)
        targets = nested(outputs)[0] if self.rank() == root else []
        check_lengths(targets, [tensor.numel()] * self.size() if self.rank() == root else [])

        def task(timeout: float | None) -> None:
            of_one_dtype(tensor, *targets)
            whole = moving_functions.gather(flat([tensor]), root=root, comm=self._comm, timeout=timeout)
            if whole is not None:
                unflatten(whole.reshape(-1), targets)

        return self._do("gather", opts, targets, task, [tensor])

    def scatter(
        self, outputs: Tensors | torch.Tensor, inputs: Sequence[Tensors] | Tensors, *given: Any, **named: Any
    ) -> Work:
        """Hand each rank one of the root's tensors."""
        opts = read(*given, **named)
        (output,), root = listed(outputs), self._root(opts)
        parts = nested(inputs)[0] if self.rank() == root else []
        check_lengths(parts, [output.numel()] * self.size() if self.rank() == root else [])

        def task(timeout: float | None) -> None:
            of_one_dtype(output, *parts)
            rows = flat(parts).reshape(self.size(), -1) if parts else None
            with vector_of(output) as out:
                moving_functions.scatter(rows, root=root, out=out, comm=self._comm, timeout=timeout)

        return self._do("scatter", opts, [output], task)

    def alltoall_base(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        received: Sequence[int] = (),
        sent: Sequence[int] = (),
        *given: Any,
        **named: Any,
    ) -> Work:
        """Hand each rank some rows of every rank's tensor: as many as the splits say, or equally many."""

        def counts(tensor: torch.Tensor, splits: Sequence[int]) -> list[int]:
            rows = tensor.shape[0] if tensor.dim() else 1
            if not splits and rows % self.size():
                raise ValueError(f"a tensor of {rows} rows cannot be cut into {self.size()} equal parts")
            splits = splits or [rows // self.size()] * self.size()
            if sum(splits) != rows:
                raise ValueError(f"the splits {list(splits)} are not of a tensor of {rows} rows")
            width = _moved_size(tensor) // max(1, rows)
            return [count * width for count in splits]

        lengths = counts(source, sent), counts(output, received)

        def task(timeout: float | None) -> None:
            of_one_dtype(output, source)
            with vector_of(output) as out:
                if sent or received:
                    self._exchange(flat([source]), *lengths, out, timeout)
                else:
                    moving_functions.alltoall(flat([source]), out=out, comm=self._comm, timeout=timeout)

        return self._do("all_to_all", read(*given, **named), [output], task)

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: Tensors, inputs: Tensors, *given: Any, **named: Any) -> Work:
        """Hand each rank one tensor of every rank's."""
        for each in (outputs, inputs):
            self._one_for_each(each)

        def task(timeout: float | None) -> None:
            of_one_dtype(*outputs, *inputs)
            sent, received = ([_moved_size(each) for each in part] for part in (inputs, outputs))
            x = flat(inputs)
            whole = np.empty_like(x, shape=(sum(received),))  # on x's device
            self._exchange(x, sent, received, whole, timeout)
            unflatten(whole, outputs)

        return self._do("all_to_all", read(*given, **named), outputs, task)

    def _exchange(
        self, x: Array, sent: Sequence[int], received: Sequence[int], out: Array, timeout: float | None
    ) -> None:
        # The MPI library's own cannot be left when the time is over.
        block_functions.alltoallv(x, sent, received, out=out, comm=self._comm, reproducible=True, timeout=timeout)

    def barrier(self, *given: Any, **named: Any) -> Work:
        """Wait for all ranks."""

        def task(timeout: float | None) -> None:
            functions.allreduce(np.zeros(1, np.float32), comm=self._comm, timeout=timeout)

        return self._do("barrier", read(*given, **named), [], task)


def listed(tensors: Tensors | torch.Tensor) -> Tensors:
    """Return one tensor, or several, as several."""
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def nested(tensors: Sequence[Tensors] | Tensors) -> Sequence[Tensors]:
    """Return a list of tensors, or of lists of them, as the latter."""
    return [tensors] if tensors and isinstance(tensors[0], torch.Tensor) else tensors


def _moved_size(tensor: torch.Tensor) -> int:
    """Return how long a tensor is as it is moved."""
    return int(tensor.numel() if tensor.dtype in NUMPY else tensor.nbytes)
