"""All-gather, broadcast and all-to-all, with their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpiagg.horovod.exceptions import InvalidRequestError
from mpiagg.horovod.process_sets import ProcessSet, engine_of, global_process_set
from mpiagg.horovod.torch.allreduce_ops import allreduce, grouped_allreduce
from mpiagg.horovod.torch.handles import Average, Tensors, root_of, submit, synchronize, with_gradient


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start :func:`allgather`.

    Parameters
    ----------
    tensor : torch.Tensor
        Of the same dtype on all ranks, and the same shape apart from the number of rows.
    name, process_set
        See :mod:`mpiagg.horovod.torch`.

    Returns
    -------
    int
        A handle; its result is the rows, which have no gradient.

    Raises
    ------
    ValueError
        As :func:`allreduce_async`.

    Examples
    --------
    >>> handle = hvd.allgather_async(torch.full((1, 3), float(rank)))
    >>> hvd.synchronize(handle).shape == (size, 3)
    True
    """
    return submit("allgather", tensor, name, process_set, own_rows=True)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start :func:`grouped_allgather`.

    Parameters
    ----------
    tensors : sequence of torch.Tensor
        As many as on the other ranks, each as for :func:`allgather`.
    name, process_set
        See :mod:`mpiagg.horovod.torch`.

    Returns
    -------
    int
        A handle; its result is a list of the rows, which have no gradients.

    Raises
    ------
    ValueError
        As :func:`allreduce_async`.

    Examples
    --------
    >>> handle = hvd.grouped_allgather_async([torch.ones(1, 3), torch.ones(2)])
    >>> [len(rows) for rows in hvd.synchronize(handle)] == [size, 2 * size]
    True
    """
    return submit("allgather", tensors, name, process_set, own_rows=True)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Give the rows of all ranks' tensors to all ranks.

    Parameters
    ----------
    tensor : torch.Tensor
        Of the same dtype on all ranks, and the same shape apart from the number of rows.
    name, process_set
        See :mod:`mpiagg.horovod.torch`.

    Returns
    -------
    torch.Tensor
        The rows of rank 0, then those of rank 1, and so on; its gradient is averaged over the ranks.

    Raises
    ------
    HorovodInternalError, ValueError
        As :func:`allreduce`.

    Examples
    --------
    >>> rows = hvd.allgather(torch.full((rank + 1, 2), float(rank)))
    >>> rows[-1].tolist() == [size - 1] * 2
    True
    >>> len(rows) == sum(range(1, size + 1))
    True
    """
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Give the rows of all ranks' tensors to all ranks, of each of several.

    Parameters
    ----------
    tensors : sequence of torch.Tensor
        As many as on the other ranks, each as for :func:`allgather`.
    name, process_set
        See :mod:`mpiagg.horovod.torch`.

    Returns
    -------
    list of torch.Tensor
        The rows for each, as :func:`allgather` returns them.

    Raises
    ------
    HorovodInternalError, ValueError
        As :func:`allreduce`.

    Examples
    --------
    >>> first, second = hvd.grouped_allgather([torch.ones(1, 3), torch.ones(2)])
    >>> len(first) == size and len(second) == 2 * size
    True
    """
    results = synchronize(grouped_allgather_async(tensors, name, process_set))
    rows = [len(x) for x in tensors]

    def back(gradients: Tensors) -> Tensors:
        means = grouped_allreduce(gradients, op=Average, process_set=process_set)
        own = engine_of(process_set).rank
        counts = allgather(torch.tensor([[own, *rows]], device="cpu"), process_set=process_set)
        starts = counts[counts[:, 0] < own, 1:].sum(0).tolist()  # ranks that have joined have no rows
        return [mean[start : start + many] for mean, start, many in zip(means, starts, rows, strict=True)]

    return with_gradient(results, back, tensors)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start :func:`broadcast`.

    Parameters
    ----------
    tensor : torch.Tensor
        Of the same shape and dtype on all ranks.
    root_rank, name, process_set
        See :mod:`mpiagg.horovod.torch`.

    Returns
    -------
    int
        A handle; its result is a tensor with the root's values, which has no gradient.

    Raises
    ------
    ValueError
        As :func:`allreduce_async`.

    Examples
    --------
    >>> handle = hvd.broadcast_async(torch.tensor([float(rank)]), root_rank=size - 1)
    >>> hvd.synchronize(handle).item() == size - 1
    True
    """
    return submit("broadcast", tensor, name, process_set, root=root_of(root_rank, process_set))


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start :func:`broadcast_`.

    Parameters
    ----------
    tensor : torch.Tensor
        Of the same shape and dtype on all ranks.
    root_rank, name, process_set
        See :mod:`mpiagg.horovod.torch`.

    Returns
    -------
    int
        A handle; its result is the tensor.

    Raises
    ------
    ValueError
        As :func:`allreduce_async`.

    Examples
    --------
    >>> x = torch.tensor([float(rank)])
    >>> hvd.synchronize(hvd.broadcast_async_(x, root_rank=0)) is x
    True
    """
    root = root_of(root_rank, process_set)
    return submit("broadcast", tensor, name, process_set, root=root, in_place=True)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Give the root's tensor to all ranks.

    Parameters
    ----------
    tensor : torch.Tensor
        Of the same shape and dtype on all ranks.
    root_rank, name, process_set
        See :mod:`mpiagg.horovod.torch`.

    Returns
    -------
    torch.Tensor
        The root's values; the root's gradient is the average over the ranks, zeros elsewhere.

    Raises
    ------
    HorovodInternalError, ValueError
        As :func:`allreduce`.

    Examples
    --------
    >>> hvd.broadcast(torch.tensor([float(rank)]), root_rank=size - 1).item() == size - 1
    True
    """
    result = synchronize(broadcast_async(tensor, root_rank, name, process_set))

    def back(gradients: Tensors) -> Tensors:
        mean = allreduce(gradients[0], op=Average, process_set=process_set)
        return [mean if engine_of(process_set).rank == root_of(root_rank, process_set) else torch.zeros_like(mean)]

    return with_gradient([result], back, [tensor])[0]


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Give the root's values to all ranks, in place.

    Parameters
    ----------
    tensor : torch.Tensor
        Of the same shape and dtype on all ranks.
    root_rank, name, process_set
        See :mod:`mpiagg.horovod.torch`.

    Returns
    -------
    torch.Tensor
        The tensor that was given.

    Raises
    ------
    HorovodInternalError, ValueError
        As :func:`allreduce`.

    Examples
    --------
    >>> x = torch.tensor([float(rank)])
    >>> hvd.broadcast_(x, root_rank=0) is x
    True
    >>> x
    tensor([0.])
    """
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
    """Start :func:`alltoall`.

    Parameters
    ----------
    tensor : torch.Tensor
        Of the same dtype on all ranks, and the same shape apart from the number of rows.
    splits : torch.Tensor or sequence of int, optional
        As for :func:`alltoall`.
    name, process_set
        See :mod:`mpiagg.horovod.torch`.

    Returns
    -------
    int
        A handle; its result is the rows from all ranks, without a gradient, and how many have come from each.

    Raises
    ------
    ValueError
        As :func:`allreduce_async`, and if the splits do not fit.

    Examples
    --------
    >>> handle = hvd.alltoall_async(torch.full((size,), float(rank)))
    >>> rows, received = hvd.synchronize(handle)
    >>> rows.tolist() == list(range(size)), received.tolist() == [1] * size
    (True, True)
    """
    counts = _splits(tensor, splits, process_set)
    # Of a group there are all results: the rows, and how many have come from each rank.
    return submit("alltoall", [tensor], name, process_set, own_rows=True, splits=counts)


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Give each rank some rows of every rank's tensor.

    Parameters
    ----------
    tensor : torch.Tensor
        Of the same dtype on all ranks, and the same shape apart from the number of rows.
    splits : torch.Tensor or sequence of int, optional
        How many rows go to each rank; equally many by default.
    name, process_set
        See :mod:`mpiagg.horovod.torch`.

    Returns
    -------
    torch.Tensor or tuple
        The rows from all ranks; with ``splits`` also how many have come from each.

    Raises
    ------
    HorovodInternalError
        As :func:`allreduce`.
    ValueError
        As :func:`allreduce_async`, and if the splits do not fit.

    Examples
    --------
    >>> hvd.alltoall(torch.full((size,), float(rank))).tolist() == list(range(size))
    True
    >>> rows, received = hvd.alltoall(torch.ones(2 * size), splits=[2] * size)
    >>> received.tolist() == [2] * size
    True
    """
    counts = _splits(tensor, splits, process_set)
    rows, received = synchronize(alltoall_async(tensor, counts, name, process_set))

    def back(gradients: Tensors) -> Tensors:
        return [alltoall(gradients[0], received, None, process_set)[0]]

    (rows,) = with_gradient([rows], back, [tensor])
    return rows if splits is None else (rows, received)
