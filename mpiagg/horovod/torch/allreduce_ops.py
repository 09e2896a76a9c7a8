"""Horovod's all-reduces, at once, asynchronous, in place and grouped."""

# ruff: noqa: PLR0917 - Horovod's arguments

from __future__ import annotations

from typing import Any

import torch

from mpiagg.horovod.process_sets import ProcessSet, global_process_set
from mpiagg.horovod.torch.compression import Compression, Compressor
from mpiagg.horovod.torch.handles import Tensors, op_of, reduction, synchronize, with_gradient


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start :func:`allreduce`.

    Parameters
    ----------
    tensor : torch.Tensor
        Of the same shape and dtype on all ranks.
    average, name, op, prescale_factor, postscale_factor, process_set
        See :mod:`mpiagg.horovod.torch`.

    Returns
    -------
    int
        A handle for :func:`poll` and :func:`synchronize`; its result is the reduction, which has no gradient.

    Raises
    ------
    ValueError
        If an operation of this name is under way, this rank is not in the process set, or both ``op`` and
        ``average`` are given.

    Examples
    --------
    >>> handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="ones")
    >>> hvd.synchronize(handle).tolist() == [size] * 2
    True
    """
    factors = (prescale_factor, postscale_factor)
    return reduction("allreduce", tensor, name, op_of(op, average), factors, process_set)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start :func:`allreduce_`.

    Parameters
    ----------
    tensor : torch.Tensor
        Of the same shape and dtype on all ranks.
    average, name, op, prescale_factor, postscale_factor, process_set
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
    >>> x = torch.ones(2)
    >>> handle = hvd.allreduce_async_(x, op=hvd.Sum)
    >>> hvd.synchronize(handle) is x
    True
    >>> x.tolist() == [size] * 2
    True
    """
    factors = (prescale_factor, postscale_factor)
    return reduction("allreduce", tensor, name, op_of(op, average), factors, process_set, in_place=True)


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start :func:`grouped_allreduce`.

    Parameters
    ----------
    tensors : sequence of torch.Tensor
        As many as on the other ranks, each of the same shape and dtype on all ranks.
    average, name, op, prescale_factor, postscale_factor, process_set
        See :mod:`mpiagg.horovod.torch`.

    Returns
    -------
    int
        A handle; its result is a list of the reductions, which have no gradients.

    Raises
    ------
    ValueError
        As :func:`allreduce_async`.

    Examples
    --------
    >>> handle = hvd.grouped_allreduce_async([torch.ones(2), torch.ones(3)], op=hvd.Sum)
    >>> [x.tolist() for x in hvd.synchronize(handle)] == [[size] * 2, [size] * 3]
    True
    """
    factors = (prescale_factor, postscale_factor)
    return reduction("allreduce", tensors, name, op_of(op, average), factors, process_set)


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start :func:`grouped_allreduce_`.

    Parameters
    ----------
    tensors : sequence of torch.Tensor
        As many as on the other ranks, each of the same shape and dtype on all ranks.
    average, name, op, prescale_factor, postscale_factor, process_set
        See :mod:`mpiagg.horovod.torch`.

    Returns
    -------
    int
        A handle; its result is the tensors.

    Raises
    ------
    ValueError
        As :func:`allreduce_async`.

    Examples
    --------
    >>> tensors = [torch.ones(2), torch.ones(3)]
    >>> handle = hvd.grouped_allreduce_async_(tensors, op=hvd.Sum)
    >>> hvd.synchronize(handle) is tensors
    True
    """
    factors = (prescale_factor, postscale_factor)
    return reduction("allreduce", tensors, name, op_of(op, average), factors, process_set, in_place=True)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over the ranks.

    Parameters
    ----------
    tensor : torch.Tensor
        Of the same shape and dtype on all ranks.
    average : bool, optional
        The old form of ``op``: Average if it is true, Sum if it is false.
    name : str, optional
        By which the ranks know the operation; a running number by default.
    compression : Compressor
        How the tensor travels: a member of :class:`Compression`.
    op : {Average, Sum, Adasum, Min, Max, Product}, optional
        How values are combined; Average by default.
    prescale_factor, postscale_factor : float
        What values are multiplied with before and after.
    process_set : ProcessSet
        The ranks.

    Returns
    -------
    torch.Tensor
        The reduction; its gradient is an all-reduce of the same op.

    Raises
    ------
    HorovodInternalError
        On every rank, if they ask for different things, or if a rank was waited for in vain.
    ValueError
        As :func:`allreduce_async`.

    Examples
    --------
    >>> hvd.allreduce(torch.tensor(float(rank))).item() == (size - 1) / 2
    True
    >>> hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [size] * 3
    True
    """
    factors = (prescale_factor, postscale_factor)
    return grouped_allreduce([tensor], average, name, compression, op, *factors, process_set)[0]


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce a tensor over the ranks, in place.

    Parameters
    ----------
    tensor : torch.Tensor
        Of the same shape and dtype on all ranks.
    average, name, op, prescale_factor, postscale_factor, process_set
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
    >>> x = torch.full((2,), float(rank))
    >>> hvd.allreduce_(x, op=hvd.Max) is x
    True
    >>> x.tolist() == [size - 1] * 2
    True
    """
    return synchronize(allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set))


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors over the ranks, those of a dtype as one.

    Parameters
    ----------
    tensors : sequence of torch.Tensor
        As many as on the other ranks, each of the same shape and dtype on all ranks.
    average, name, compression, op, prescale_factor, postscale_factor, process_set
        See :mod:`mpiagg.horovod.torch`.

    Returns
    -------
    list of torch.Tensor
        The reductions; their gradients are all-reduces of the same op.

    Raises
    ------
    HorovodInternalError, ValueError
        As :func:`allreduce`.

    Examples
    --------
    >>> first, second = hvd.grouped_allreduce([torch.ones(2), torch.ones(3)], op=hvd.Sum)
    >>> second.tolist() == [size] * 3
    True
    """
    factors = (prescale_factor, postscale_factor)
    pairs = [compression.compress(x) for x in tensors]
    small = [x for x, _ in pairs]

    def back(gradients: Tensors) -> Tensors:
        return grouped_allreduce(gradients, average, None, Compression.none, op, *factors, process_set)

    results = synchronize(grouped_allreduce_async(small, average, name, op, *factors, process_set))
    results = with_gradient(results, back, small)
    return [compression.decompress(x, kept) for x, (_, kept) in zip(results, pairs, strict=True)]


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce several tensors over the ranks, those of a dtype as one, in place.

    Parameters
    ----------
    tensors : sequence of torch.Tensor
        As many as on the other ranks, each of the same shape and dtype on all ranks.
    average, name, op, prescale_factor, postscale_factor, process_set
        See :mod:`mpiagg.horovod.torch`.

    Returns
    -------
    sequence of torch.Tensor
        The tensors that were given.

    Raises
    ------
    HorovodInternalError, ValueError
        As :func:`allreduce`.

    Examples
    --------
    >>> tensors = [torch.ones(2), torch.ones(3)]
    >>> hvd.grouped_allreduce_(tensors, op=hvd.Sum) is tensors
    True
    >>> tensors[1].tolist() == [size] * 3
    True
    """
    factors = (prescale_factor, postscale_factor)
    return synchronize(grouped_allreduce_async_(tensors, average, name, op, *factors, process_set))
