"""Reduce-scatter with its gradient, and all-reduce of sparse tensors."""

# ruff: noqa: PLR0917 - Horovod's arguments

from __future__ import annotations

import torch

from mpiagg.horovod.exceptions import HorovodInternalError
from mpiagg.horovod.process_sets import ProcessSet, engine_of, global_process_set
from mpiagg.horovod.torch.compression import Compression, Compressor
from mpiagg.horovod.torch.handles import (
    Average,
    Sum,
    Tensors,
    op_of,
    reduction,
    submit,
    synchronize,
    then,
    with_gradient,
)
from mpiagg.horovod.torch.moving_ops import grouped_allgather


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start :func:`reducescatter`.

    Parameters
    ----------
    tensor : torch.Tensor
        Of the same shape and dtype on all ranks.
    name, op, process_set, prescale_factor, postscale_factor
        See :mod:`mpiagg.horovod.torch`.

    Returns
    -------
    int
        A handle; its result is this rank's rows, which have no gradient.

    Raises
    ------
    ValueError
        As :func:`allreduce_async`.

    Examples
    --------
    >>> handle = hvd.reducescatter_async(torch.ones(2 * size), op=hvd.Sum)
    >>> hvd.synchronize(handle).tolist() == [size] * 2
    True
    """
    factors = (prescale_factor, postscale_factor)
    return reduction("reducescatter", tensor, name, op_of(op, None), factors, process_set)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start :func:`grouped_reducescatter`.

    Parameters
    ----------
    tensors : sequence of torch.Tensor
        As many as on the other ranks, each of the same shape and dtype on all ranks.
    name, op, process_set, prescale_factor, postscale_factor
        See :mod:`mpiagg.horovod.torch`.

    Returns
    -------
    int
        A handle; its result is a list of this rank's rows of each, which have no gradients.

    Raises
    ------
    ValueError
        As :func:`allreduce_async`.

    Examples
    --------
    >>> handle = hvd.grouped_reducescatter_async([torch.ones(size), torch.ones(2 * size)], op=hvd.Sum)
    >>> [x.tolist() for x in hvd.synchronize(handle)] == [[size], [size] * 2]
    True
    """
    factors = (prescale_factor, postscale_factor)
    return reduction("reducescatter", tensors, name, op_of(op, None), factors, process_set)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor over the ranks, each of which receives some of the rows.

    Parameters
    ----------
    tensor : torch.Tensor
        Of the same shape and dtype on all ranks.
    name, compression, op, process_set, prescale_factor, postscale_factor
        See :mod:`mpiagg.horovod.torch`.

    Returns
    -------
    torch.Tensor
        This rank's rows of the reduction: where the ranks do not divide them, the first ranks have one more.

    Raises
    ------
    HorovodInternalError, ValueError
        As :func:`allreduce`.

    Examples
    --------
    >>> hvd.reducescatter(torch.ones(2 * size, 3), op=hvd.Sum).tolist() == [[size] * 3] * 2
    True
    """
    factors = (prescale_factor, postscale_factor)
    return grouped_reducescatter([tensor], name, compression, op, process_set, *factors)[0]


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce several tensors over the ranks, each of which receives some of the rows.

    Parameters
    ----------
    tensors : sequence of torch.Tensor
        As many as on the other ranks, each of the same shape and dtype on all ranks.
    name, compression, op, process_set, prescale_factor, postscale_factor
        See :mod:`mpiagg.horovod.torch`.

    Returns
    -------
    list of torch.Tensor
        This rank's rows of each, as :func:`reducescatter` returns them.

    Raises
    ------
    HorovodInternalError, ValueError
        As :func:`allreduce`.

    Examples
    --------
    >>> first, second = hvd.grouped_reducescatter([torch.ones(size), torch.ones(2 * size)], op=hvd.Sum)
    >>> second.tolist() == [size] * 2
    True
    """
    factors = (prescale_factor, postscale_factor)
    pairs = [compression.compress(x) for x in tensors]
    small = [x for x, _ in pairs]

    def back(gradients: Tensors) -> Tensors:
        factor = prescale_factor * postscale_factor * (engine_of(process_set).size if op == Sum else 1)
        return grouped_allgather([x * factor for x in gradients], process_set=process_set)

    results = synchronize(grouped_reducescatter_async(small, name, op, process_set, *factors))
    results = with_gradient(results, back, small)
    return [compression.decompress(x, kept) for x, (_, kept) in zip(results, pairs, strict=True)]


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> SparseHandle:
    """Start to add up sparse tensors.

    Parameters
    ----------
    tensor : torch.Tensor
        Sparse, of the same shape and dtype on all ranks.
    name : str
        By which the ranks know the operation.
    op : int
        Average or Sum.
    process_set : ProcessSet
        The ranks.

    Returns
    -------
    int
        A handle for :func:`synchronize`, which can also be called; the result is a sparse tensor.

    Raises
    ------
    ValueError
        If ``op`` is another one; otherwise as :func:`allreduce_async`. :func:`synchronize` raises
        HorovodInternalError on all ranks if shapes differ, or if others reduce a dense tensor under this name.

    Examples
    --------
    >>> handle = hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), name="sparse", op=hvd.Sum)
    >>> hvd.synchronize(handle).to_dense().tolist() == [[size, 0], [0, size]]
    True
    """
    if op not in (Average, Sum):
        raise ValueError(f"sparse tensors are added up or averaged: op must be Average or Sum, not {op!r}")
    own = tensor.detach().coalesce()
    parts = [own.indices().t().contiguous(), own.values(), torch.tensor([own.shape], device=own.device)]
    words = "sparse; gradients are made dense by DistributedOptimizer(..., sparse_as_dense=True)"
    handle = submit("allgather", parts, name, process_set, own_rows=True, known_as="allreduce", words=words)
    size = engine_of(process_set).size
    return SparseHandle(then(handle, lambda gathered: _total(gathered, name, own.shape, op, size)))


class SparseHandle(int):
    """A handle that can be called, as Horovod's of sparse tensors: it waits, and returns the sum."""

    def __call__(self) -> torch.Tensor:
        """Return the sparse tensor, when it is there."""
        found: torch.Tensor = synchronize(self)
        return found


def spare_allreduce_async_(
    zeros: torch.Tensor, name: str, op: int, factors: tuple[float, float], process_set: ProcessSet
) -> int:
    """Start to reduce in place what this rank has no values of.

    If others ask for the sum of sparse tensors under this name, the result is that.
    """
    handle = reduction("allreduce", [zeros], name, op, factors, process_set, in_place=True, spare=True)
    shape, size = zeros.shape, engine_of(process_set).size

    def result(found: Tensors) -> torch.Tensor:
        return found[0] if len(found) == 1 else _total(found, name, shape, op, size)

    return then(handle, result)


def _total(gathered: Tensors, name: str, shape: torch.Size, op: int, size: int) -> torch.Tensor:
    """Return the sum or average of sparse tensors from the indices, values and shapes of all ranks."""
    indices, values, shapes = gathered
    if (shapes != shapes[0]).any():
        raise HorovodInternalError(f"sparse tensors {name!r} have different shapes: {shapes.tolist()}")
    values = values / size if op == Average else values
    return torch.sparse_coo_tensor(indices.t(), values, shape, check_invariants=True).coalesce()
