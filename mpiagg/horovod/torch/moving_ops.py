"""All-gather, broadcast, all-to-all and reduce-scatter, with their gradients."""

# ruff: noqa: PLR0917 - Horovod's arguments

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpiagg.horovod.exceptions import InvalidRequestError
from mpiagg.horovod.torch import mpi_ops as ops
from mpiagg.horovod.torch.compression import Compression, Compressor
from mpiagg.horovod.world import ProcessSet, engine_of, global_process_set

Tensors = Sequence[torch.Tensor]


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start :func:`allgather`; return a handle."""
    return ops.submit("allgather", tensor, name, process_set, own_rows=True)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start :func:`grouped_allgather`; return a handle."""
    return ops.submit("allgather", tensors, name, process_set, own_rows=True)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the rows of all ranks' tensors, which may be of different numbers; its gradient is averaged."""
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Return the rows of all ranks' tensors, of each of several."""
    results = ops.synchronize(grouped_allgather_async(tensors, name, process_set))
    rows = [len(x) for x in tensors]

    def back(gradients: Tensors) -> Tensors:
        means = ops.grouped_allreduce(gradients, op=ops.Average, process_set=process_set)
        counts = allgather(torch.tensor([rows]), process_set=process_set)
        starts = counts[: engine_of(process_set).rank].sum(0).tolist()
        return [mean[start : start + many] for mean, start, many in zip(means, starts, rows, strict=True)]

    return ops.with_gradient(results, back, tensors)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start :func:`broadcast`; return a handle."""
    return ops.submit("broadcast", tensor, name, process_set, root=ops.root_of(root_rank, process_set))


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start :func:`broadcast_`; return a handle."""
    root = ops.root_of(root_rank, process_set)
    return ops.submit("broadcast", tensor, name, process_set, root=root, in_place=True)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the root's tensor; the root is a rank of the job."""
    result = ops.synchronize(broadcast_async(tensor, root_rank, name, process_set))

    def back(gradients: Tensors) -> Tensors:
        mean = ops.allreduce(gradients[0], op=ops.Average, process_set=process_set)
        return [mean if engine_of(process_set).rank == ops.root_of(root_rank, process_set) else torch.zeros_like(mean)]

    return ops.with_gradient([result], back, [tensor])[0]


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Take the root's values into a tensor."""
    return ops.synchronize(broadcast_async_(tensor, root_rank, name, process_set))


def _splits(tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None, process_set: ProcessSet) -> list[int]:
    """Return how many rows go to each rank; InvalidRequestError if they do not fit."""
    size = engine_of(process_set).size
    rows = len(tensor) if tensor.dim() else 0
    if splits is None:
        if rows % size:
            raise InvalidRequestError(f"{rows} rows cannot be cut into {size} equal parts: give splits")
        return [rows // size] * size
    given = torch.as_tensor(splits)
    if given.is_floating_point() or given.is_complex() or given.dtype is torch.bool or given.dim() != 1:
        raise InvalidRequestError(f"splits are a vector of integers, not of {given.dtype}")
    counts: list[int] = given.tolist()
    if len(counts) != size or min(counts) < 0 or sum(counts) != rows:
        raise InvalidRequestError(f"the splits {counts} are not of {rows} rows for {size} ranks")
    return counts


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start :func:`alltoall`; return a handle."""
    counts = _splits(tensor, splits, process_set)
    # Of a group there are all results: the rows, and how many have come from each rank.
    given = tensor if splits is None else [tensor]
    return ops.submit("alltoall", given, name, process_set, own_rows=True, splits=counts)


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Give each rank some rows of every rank's tensor.

    Parameters
    ----------
    splits : torch.Tensor or sequence of int, optional
        How many rows go to each rank; equally many by default.

    Returns
    -------
    torch.Tensor or tuple
        The rows from all ranks; with ``splits`` also how many have come from each.

    Raises
    ------
    ValueError
        If the splits do not fit.
    """
    counts = _splits(tensor, splits, process_set)
    rows, received = ops.synchronize(alltoall_async(tensor, counts, name, process_set))

    def back(gradients: Tensors) -> Tensors:
        return [alltoall(gradients[0], received, None, process_set)[0]]

    (rows,) = ops.with_gradient([rows], back, [tensor])
    return rows if splits is None else (rows, received)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = ops.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start :func:`reducescatter`; return a handle."""
    factors = (prescale_factor, postscale_factor)
    return ops.reduction("reducescatter", tensor, name, ops.op_of(op, None), factors, process_set)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = ops.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start :func:`grouped_reducescatter`; return a handle."""
    factors = (prescale_factor, postscale_factor)
    return ops.reduction("reducescatter", tensors, name, ops.op_of(op, None), factors, process_set)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = ops.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor over the ranks; return this rank's rows: the first ranks have one more where they do not fit."""
    factors = (prescale_factor, postscale_factor)
    return grouped_reducescatter([tensor], name, compression, op, process_set, *factors)[0]


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = ops.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce several tensors over the ranks, and return this rank's rows of each."""
    factors = (prescale_factor, postscale_factor)
    pairs = [compression.compress(x) for x in tensors]
    small = [x for x, _ in pairs]

    def back(gradients: Tensors) -> Tensors:
        factor = prescale_factor * postscale_factor * (engine_of(process_set).size if op == ops.Sum else 1)
        return grouped_allgather([x * factor for x in gradients], process_set=process_set)

    results = ops.synchronize(grouped_reducescatter_async(small, name, op, process_set, *factors))
    results = ops.with_gradient(results, back, small)
    return [compression.decompress(x, kept) for x, (_, kept) in zip(results, pairs, strict=True)]


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start to add up sparse tensors; return a handle, whose result is a sparse tensor."""
    own = tensor.detach().coalesce()
    parts = [own.indices().t().contiguous(), own.values()]
    handle = grouped_allgather_async(parts, f"{name}.sparse", process_set)

    def result() -> torch.Tensor:
        indices, values = ops.synchronize(handle)
        if op == ops.Average:
            values = values / engine_of(process_set).size
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=True).coalesce()

    return result
