"""Tensors as arrays, and torch's ops as ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

from mpiagg.arrays import Array, find_device
from mpiagg.ddp.torch_modules import array_of

NUMPY: Final[dict[Any, np.dtype[Any]]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.float16: np.dtype(np.float16),
    torch.int64: np.dtype(np.int64),
    torch.int32: np.dtype(np.int32),
    torch.int16: np.dtype(np.int16),
    torch.int8: np.dtype(np.int8),
    torch.uint8: np.dtype(np.uint8),
    torch.bool: np.dtype(np.bool_),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
}
"""The dtypes that NumPy has, too."""

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
    """Return a plain tensor as a vector over the same memory, which is the caller's to keep.

    What ``Tensor.numpy`` returns is no more than this, but keeps torch from ever resizing the tensor.
    """
    dtype: np.dtype[Any] = NUMPY.get(tensor.dtype) or _other_dtype(tensor.dtype)
    if tensor.is_cuda:
        device: Any = find_device(f"cuda:{tensor.device.index}")
        borrowed: Array = device.borrow(tensor.data_ptr(), tensor.numel(), dtype, tensor)
        return borrowed
    if tensor.device.type != "cpu":
        return array_of(tensor, "a tensor of a collective")  # says that it must not be there
    if not tensor.numel():
        return np.empty(0, dtype)
    memory: Any = MPI.memory.fromaddress(tensor.data_ptr(), tensor.nbytes)
    vector: Array = np.frombuffer(memory, dtype)
    return vector


@cache
def _other_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return the dtype of arrays for tensors of one that NumPy has not: bfloat16's; TypeError if there is none."""
    return array_of(torch.empty(0, dtype=dtype), "a tensor of a collective").dtype


def moved(tensor: torch.Tensor) -> Array:
    """Return a plain tensor that is only moved as a vector over the same memory: of bytes, where NumPy has no dtype."""
    return view(tensor if tensor.dtype in NUMPY else tensor.detach().reshape(-1).view(torch.uint8))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values lie one after the other in memory as they are; ValueError for a sparse one."""
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"a tensor of {tensor.layout}: mpiagg takes sparse ones in all_reduce alone, of torch.sparse_coo, by SUM"
        )
    return bool(tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj())


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values as they lie one after the other: itself, or a copy."""
    return tensor if is_plain(tensor) else tensor.detach().resolve_conj().resolve_neg().contiguous()


def put(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Give a tensor values, whatever autograd may want to know of it."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():  # in this order: the former allows gradients
        tensor.copy_(values)


def check_lengths(tensors: Sequence[torch.Tensor], lengths: Sequence[int]) -> None:
    """Raise ValueError if there is not a tensor of each length."""
    found = [tensor.numel() for tensor in tensors]
    if found != list(lengths):
        raise ValueError(f"the tensors must have {list(lengths)} numbers, not {found}")


def of_one_dtype(*tensors: torch.Tensor) -> None:
    """Raise ValueError if tensors are not all of one dtype."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise ValueError(f"the tensors of a collective must be of one dtype, not of {', '.join(map(str, dtypes))}")


def check_parts(whole: torch.Tensor, part: torch.Tensor, size: int) -> None:
    """Raise ValueError if a tensor is not as long as so many parts, or of another dtype."""
    of_one_dtype(whole, part)
    if whole.numel() != size * part.numel():
        raise ValueError(f"{size} parts of {part.numel()} numbers make no tensor of {whole.numel()}")


def check_output(tensor: torch.Tensor) -> None:
    """Raise ValueError if several elements of a tensor that is to be written lie in one place."""
    if not is_plain(tensor) and 0 in tensor.stride() and tensor.numel() > 1:
        raise ValueError("an output must not be expanded: several of its elements lie in one place")


def op_of(reduce_op: Any, dtype: torch.dtype) -> Op:
    """Return the op of ours that is one of torch's, for a dtype.

    Raises
    ------
    ValueError
        If torch's backends know no such op for the dtype.
    """
    kind = kind_of(reduce_op)
    found = (_OF_BOOLEANS if dtype == torch.bool else _OPS).get(kind)
    if found is None:
        raise ValueError(f"mpiagg does not reduce {dtype} by {kind}")
    # An average of integers is torch's: a sum, and a division that rounds toward zero.
    return "sum" if found == "avg" and not dtype.is_floating_point and not dtype.is_complex else found


def multiplied(tensor: torch.Tensor, reduce_op: Any) -> torch.Tensor:
    """Return a tensor by what each rank's values are multiplied with before they are added up, if with anything."""
    if kind_of(reduce_op) != dist.ReduceOp.PREMUL_SUM:
        return plain(tensor)
    _, factor = reduce_op.__getstate__()  # for pickle: torch 2.10 has no other name for it
    return (tensor * factor).to(tensor.dtype).contiguous()


def kind_of(reduce_op: Any) -> Any:
    """Return which of torch's ops it is: an op has that within, and is that itself where it has nothing else."""
    return getattr(reduce_op, "op", reduce_op)


def plainly(tensor: torch.Tensor, reduce_op: Any) -> tuple[Array, Op] | None:
    """Return a tensor as a vector, and the op, where nothing is left to be done before and after; else None."""
    op = _PLAIN.get(kind_of(reduce_op))
    if op is None or tensor.dtype not in NUMPY or tensor.dtype is torch.bool or tensor.layout is not torch.strided:
        return None
    return (view(tensor), op) if is_plain(tensor) else None


@contextmanager
def vector_of(tensor: torch.Tensor) -> Iterator[Array]:
    """Let a tensor be a vector of the values that are moved, in this block; it has them after it."""
    check_output(tensor)
    whole = plain(tensor)
    yield moved(whole)
    if whole is not tensor:
        put(tensor, whole)


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
    op = op_of(reduce_op, tensor.dtype)
    check_output(tensor)
    whole = plain(tensor) if kept is None else multiplied(tensor, reduce_op)
    yield view(whole), op
    if kept:
        return
    if op == "sum" and kind_of(reduce_op) == dist.ReduceOp.AVG:
        divide(whole, size)
    if whole is not tensor:
        put(tensor, whole)


def divide(whole: torch.Tensor, size: int) -> None:
    """Divide a plain tensor of integers, towards zero."""
    if whole.dtype.is_signed:
        put(whole, torch.div(whole, size, rounding_mode="trunc"))
    else:  # torch divides but one of its unsigned dtypes
        np.floor_divide(view(whole), np.uint64(size), out=view(whole), casting="unsafe")


def flat(tensors: Sequence[torch.Tensor]) -> Array:
    """Return the values of tensors, one after the other, as they are moved: over the memory of one that is plain."""
    if len(tensors) == 1 and is_plain(tensors[0]):
        return moved(tensors[0])
    parts = [plain(tensor) for tensor in tensors]
    return np.concatenate([moved(part) for part in parts])


def unflatten(array: Array, tensors: Sequence[torch.Tensor]) -> None:
    """Copy the values of tensors, one after the other as they are moved, to these."""
    start = 0
    for tensor in tensors:
        with vector_of(tensor) as part:
            part[...] = array[start : start + part.size]
            start += part.size
