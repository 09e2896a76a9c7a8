"""Tensors as arrays, and torch's ops as ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

from mpiagg.arrays import Array
from mpiagg.collectives.mpi_ops import mpi_op
from mpiagg.ddp.torch_modules import array_of

_NUMPY: Final = frozenset(
    {
        *(torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8),
        *(torch.uint8, torch.bool, torch.complex64, torch.complex128),
    }
)
"""The dtypes that NumPy has, too."""

_COMMON: Final = frozenset({torch.float32, torch.float64, torch.float16, torch.int64, torch.int32})

Op = str | MPI.Op

_OPS: Final[dict[Any, Op]] = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.PRODUCT: "prod",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.BAND: MPI.BAND,
    dist.ReduceOp.BOR: MPI.BOR,
    dist.ReduceOp.BXOR: MPI.BXOR,
    dist.ReduceOp.PREMUL_SUM: "sum",
}

_PLAIN: Final[dict[Any, Op]] = {kind: _OPS[kind] for kind in (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX)}

_OF_BOOLEANS: Final[dict[Any, Op]] = {
    **dict.fromkeys((dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.BOR), "max"),
    **dict.fromkeys((dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.BAND), "min"),
    dist.ReduceOp.BXOR: MPI.LXOR,
}


def view(tensor: torch.Tensor) -> Array:
    """Return a contiguous tensor as an array over the same memory; a vector if it has no dimensions.

    Values that NumPy has no dtype for are bytes, if they are only moved.
    """
    if tensor.dtype in _NUMPY and tensor.device.type == "cpu":
        array: Array = tensor.detach().numpy()
        return array
    return array_of(tensor, "a tensor of a collective")


def moved(tensor: torch.Tensor) -> Array:
    """Return a contiguous tensor that is only moved as a vector over the same memory."""
    plain = tensor if tensor.dtype in _NUMPY else tensor.detach().reshape(-1).view(torch.uint8)
    return view(plain).reshape(-1)


def op_of(reduce_op: Any, dtype: torch.dtype) -> Op:
    """Return the op of ours that is one of torch's, for a dtype.

    Raises
    ------
    ValueError
        If torch's backends know no such op for the dtype.
    """
    kind = _kind(reduce_op)
    found = (_OF_BOOLEANS if dtype == torch.bool else _OPS).get(kind)
    if found is None:
        raise ValueError(f"mpiagg does not reduce {dtype} by {kind}")
    # An average of integers is torch's: a sum, and a division that rounds toward zero.
    return "sum" if found == "avg" and not dtype.is_floating_point and not dtype.is_complex else found


def factor_of(reduce_op: Any) -> float | torch.Tensor | None:
    """Return by what each rank's values are multiplied before they are added up, if by anything."""
    found: float | torch.Tensor | None = reduce_op.factor if _kind(reduce_op) == dist.ReduceOp.PREMUL_SUM else None
    return found


def _kind(reduce_op: Any) -> Any:
    """Return which of torch's ops it is: an op has that within, and is that itself where it has nothing else."""
    return getattr(reduce_op, "op", reduce_op)


def mpi_op_of(op: Op) -> MPI.Op:
    """Return the operator of MPI's of an op of ours; an average is a sum at first."""
    return mpi_op(op, np.dtype(np.float64)) if isinstance(op, str) else op


@contextmanager
def vector_of(tensor: torch.Tensor) -> Iterator[Array]:
    """Let a tensor be a vector of the values that are moved, in this block; it has them after it."""
    whole = tensor if tensor.is_contiguous() else tensor.contiguous()
    yield moved(whole)
    if whole is not tensor:
        tensor.copy_(whole)


def plainly(tensor: torch.Tensor, reduce_op: Any) -> tuple[Array, Op] | None:
    """Return a tensor as a vector, and the op, where nothing is left to be done before and after; else None."""
    op = _PLAIN.get(_kind(reduce_op))
    if op is None or tensor.dtype not in _COMMON or not tensor.is_contiguous() or tensor.device.type != "cpu":
        return None
    array: Array = tensor.detach().numpy()
    return (array if array.ndim == 1 else array.reshape(-1)), op


@contextmanager
def reducible(
    tensor: torch.Tensor, reduce_op: Any, size: int, *, kept: bool | None = False
) -> Iterator[tuple[Array, Op]]:
    """Let a tensor be a vector to be reduced, with the op, in this block; it has the result after it.

    Parameters
    ----------
    kept : bool or None
        Whether the tensor stays as it is, since the result is another rank's; None if it is no input, either.
    """
    op, factor = op_of(reduce_op, tensor.dtype), factor_of(reduce_op)
    whole = tensor if tensor.is_contiguous() else tensor.contiguous()
    if factor is not None and kept is not None:
        whole = whole * factor
    yield view(whole).reshape(-1), op
    if kept:
        return
    if op == "sum" and _kind(reduce_op) == dist.ReduceOp.AVG:
        torch.div(whole, size, rounding_mode="trunc", out=whole)
    if whole is not tensor:
        tensor.copy_(whole)


def flat(tensors: Sequence[torch.Tensor]) -> Array:
    """Return the values of tensors, one after the other, as they are moved."""
    parts = [moved(tensor.contiguous()) for tensor in tensors]
    return np.concatenate(parts) if len(parts) != 1 else parts[0]


def unflatten(array: Array, tensors: Sequence[torch.Tensor]) -> None:
    """Copy the values of tensors, one after the other as they are moved, to these."""
    start = 0
    for tensor in tensors:
        whole = tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        part = moved(whole)
        part[...] = array[start : start + part.size]
        start += part.size
        if whole is not tensor:
            tensor.copy_(whole)
