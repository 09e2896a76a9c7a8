"""All-gather, broadcast and all-to-all, with their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpiagg.horovod.exceptions import InvalidRequestError
from mpiagg.horovod.process_sets import ProcessSet, engine_of, global_process_set
from mpiagg.horovod.torch.handles import Average, Tensors, root_of, submit, synchronize, with_gradient
from mpiagg.horovod.torch.mpi_ops import allreduce, grouped_allreduce


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start :func:`allgather`; return a handle."""
    return submit("allgather", tensor, name, process_set, own_rows=True)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start :func:`grouped_allgather`; return a handle."""
    return submit("allgather", tensors, name, process_set, own_rows=True)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the rows of all ranks' tensors, which may be of different numbers; its gradient is averaged."""
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Return the rows of all ranks' tensors, of each of several."""
    results = synchronize(grouped_allgather_async(tensors, name, process_set))
    rows = [len(x) for x in tensors]

    def back(gradients: Tensors) -> Tensors:
        means = grouped_allreduce(gradients, op=Average, process_set=process_set)
        counts = allgather(torch.tensor([rows]), process_set=process_set)
        starts = counts[: engine_of(process_set).rank].sum(0).tolist()
        return [mean[start : start + many] for mean, start, many in zip(means, starts, rows, strict=True)]

    return with_gradient(results, back, tensors)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start :func:`broadcast`; return a handle."""
    return submit("broadcast", tensor, name, process_set, root=root_of(root_rank, process_set))


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start :func:`broadcast_`; return a handle."""
    root = root_of(root_rank, process_set)
    return submit("broadcast", tensor, name, process_set, root=root, in_place=True)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the root's tensor; the root is a rank of the job."""
    result = synchronize(broadcast_async(tensor, root_rank, name, process_set))

    def back(gradients: Tensors) -> Tensors:
        mean = allreduce(gradients[0], op=Average, process_set=process_set)
        return [mean if engine_of(process_set).rank == root_of(root_rank, process_set) else torch.zeros_like(mean)]

    return with_gradient([result], back, [tensor])[0]


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Take the root's values into a tensor."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


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
    return submit("alltoall", given, name, process_set, own_rows=True, splits=counts)


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
    rows, received = synchronize(alltoall_async(tensor, counts, name, process_set))

    def back(gradients: Tensors) -> Tensors:
        return [alltoall(gradients[0], received, None, process_set)[0]]

    (rows,) = with_gradient([rows], back, [tensor])
    return rows if splits is None else (rows, received)
