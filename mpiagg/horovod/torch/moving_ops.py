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
    return ops.submit("allgather", [tensor], name, process_set, own_rows=True)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start :func:`grouped_allgather`; return a handle."""
    return ops.submit("allgather", tensors, name, process_set, own_rows=True, grouped=True)


class HorovodAllgather(torch.autograd.Function):  # type: ignore[misc]  # mypy sees no classes of torch's
    """All-gathers, whose gradients are averages."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, single: bool, *tensors: torch.Tensor) -> Any:
        """Gather."""
        ctx.process_set, ctx.rows = process_set, [len(x) if x.dim() else 0 for x in tensors]
        if single:
            return (ops.synchronize(allgather_async(tensors[0], name, process_set)),)
        return tuple(ops.synchronize(grouped_allgather_async(tensors, name, process_set)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Average the gradients, and take this rank's rows."""
        process_set = ctx.process_set
        means = ops.grouped_allreduce(gradients, op=ops.Average, process_set=process_set)
        counts = allgather(torch.tensor([ctx.rows]), process_set=process_set)
        starts = counts[: engine_of(process_set).rank].sum(0).tolist()
        rows = zip(means, starts, ctx.rows, strict=True)
        return None, None, None, *(mean[start : start + many] for mean, start, many in rows)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the rows of all ranks' tensors, which may be of different numbers; its gradient is averaged."""
    (result,) = HorovodAllgather.apply(name, process_set, True, tensor)
    return result


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Return the rows of all ranks' tensors, of each of several."""
    return list(HorovodAllgather.apply(name, process_set, False, *tensors))


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start :func:`broadcast`; return a handle."""
    return ops.submit("broadcast", [tensor], name, process_set, root=ops.root_of(root_rank, process_set))


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start :func:`broadcast_`; return a handle."""
    root = ops.root_of(root_rank, process_set)
    return ops.submit("broadcast", [tensor], name, process_set, root=root, in_place=True, then=lambda _: tensor)


class HorovodBroadcast(torch.autograd.Function):  # type: ignore[misc]  # mypy sees no classes of torch's
    """A broadcast, whose gradient is averaged at the root."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        """Broadcast."""
        ctx.process_set, ctx.root = process_set, ops.root_of(root_rank, process_set)
        result: torch.Tensor = ops.synchronize(broadcast_async(tensor, root_rank, name, process_set))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Average the gradients for the root."""
        mean = ops.allreduce(gradient, op=ops.Average, process_set=ctx.process_set)
        if engine_of(ctx.process_set).rank != ctx.root:
            mean = torch.zeros_like(mean)
        return mean, None, None, None


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the root's tensor; the root is a rank of the job."""
    result: torch.Tensor = HorovodBroadcast.apply(tensor, root_rank, name, process_set)
    return result


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Take the root's values into a tensor."""
    return ops.synchronize(broadcast_async_(tensor, root_rank, name, process_set))


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start :func:`alltoall`; return a handle."""
    size = engine_of(process_set).size
    rows = len(tensor) if tensor.dim() else 0
    if splits is None:
        if rows % size:
            raise InvalidRequestError(f"{rows} rows cannot be cut into {size} equal parts: give splits")
        counts = [rows // size] * size
    else:
        given = torch.as_tensor(splits)
        if given.is_floating_point() or given.is_complex() or given.dtype is torch.bool or given.dim() != 1:
            raise InvalidRequestError(f"splits are a vector of integers, not of {given.dtype}")
        counts = given.tolist()
        if len(counts) != size or min(counts) < 0 or sum(counts) != rows:
            raise InvalidRequestError(f"the splits {counts} are not of {rows} rows for {size} ranks")

    def then(result: Any) -> Any:
        return result[0] if splits is None else result

    return ops.submit("alltoall", [tensor], name, process_set, own_rows=True, splits=counts, then=then)


class HorovodAlltoall(torch.autograd.Function):  # type: ignore[misc]  # mypy sees no classes of torch's
    """An all-to-all, whose gradients go back the way they came."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        """Exchange."""
        size = engine_of(process_set).size
        if splits is None and tensor.dim() and len(tensor) % size == 0:
            splits = [len(tensor) // size] * size
        ctx.process_set = process_set
        result, ctx.received = ops.synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.mark_non_differentiable(ctx.received)
        return result, ctx.received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
        """Exchange the gradients."""
        back, _ = ops.synchronize(alltoall_async(gradient, ctx.received, None, ctx.process_set))
        return back, None, None, None


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
    if splits is None and tensor.dim() and len(tensor) % engine_of(process_set).size:
        return ops.synchronize(alltoall_async(tensor, None, name, process_set))  # which says what is wrong
    result, received = HorovodAlltoall.apply(tensor, splits, name, process_set)
    return result if splits is None else (result, received)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = ops.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start :func:`reducescatter`; return a handle."""
    factors: dict[str, Any] = {"prescale": float(prescale_factor), "postscale": float(postscale_factor)}
    return ops.submit("reducescatter", [tensor], name, process_set, op=ops.op_of(op, None), **factors)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = ops.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start :func:`grouped_reducescatter`; return a handle."""
    factors: dict[str, Any] = {"prescale": float(prescale_factor), "postscale": float(postscale_factor)}
    return ops.submit("reducescatter", tensors, name, process_set, grouped=True, op=ops.op_of(op, None), **factors)


class HorovodReducescatter(torch.autograd.Function):  # type: ignore[misc]  # mypy sees no classes of torch's
    """Reduce-scatters, whose gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, single: bool, named: dict[str, Any], *tensors: torch.Tensor) -> Any:
        """Reduce and scatter."""
        ctx.named = named
        if single:
            return (ops.synchronize(reducescatter_async(tensors[0], **named)),)
        return tuple(ops.synchronize(grouped_reducescatter_async(tensors, **named)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Gather the gradients."""
        named, process_set = ctx.named, ctx.named["process_set"]
        factor = named["prescale_factor"] * named["postscale_factor"]
        if named["op"] == ops.Sum:
            factor *= engine_of(process_set).size
        return None, None, *grouped_allgather([x * factor for x in gradients], process_set=process_set)


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
    factors = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    small, kept = compression.compress(tensor)
    named = {"name": name, "op": op, "process_set": process_set, **factors}
    (result,) = HorovodReducescatter.apply(True, named, small)
    return compression.decompress(result, kept)


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
    factors = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    small = [compression.compress(x) for x in tensors]
    named = {"name": name, "op": op, "process_set": process_set, **factors}
    results = HorovodReducescatter.apply(False, named, *(x for x, _ in small))
    return [compression.decompress(x, kept) for x, (_, kept) in zip(results, small, strict=True)]


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
