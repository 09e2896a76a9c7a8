"""What each collective does, on all ranks at once, when they have agreed on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from mpiagg.collectives import block_functions, functions, moving_functions
from mpiagg.collectives.comm import Comm
from mpiagg.ddp.torch_modules import tensor_of
from mpiagg.horovod.requests import TensorRequest, Terms
from mpiagg.torch.tensors import divide, moved, op_of, plain, put, view

AVERAGE: Final = 0
ADASUM: Final = 2

_OPS: Final[dict[int, Any]] = {
    AVERAGE: dist.ReduceOp.AVG,
    1: dist.ReduceOp.SUM,
    3: dist.ReduceOp.MIN,
    4: dist.ReduceOp.MAX,
    5: dist.ReduceOp.PRODUCT,
}

Tensors = list[torch.Tensor]


def run(comm: Comm, request: TensorRequest) -> object:
    """Do what all ranks have agreed on; return a list of tensors, and for an all-to-all what has come from each."""
    if request.task is not None:
        return request.task()
    return request.in_order(partial(_RUNS[request.terms.kind], comm, request))


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return a tensor times a factor, in its own dtype: integers by way of float64, rounded toward zero."""
    if factor == 1.0:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor * factor
    return (tensor.double() * factor).to(tensor.dtype)


def _finished(tensor: torch.Tensor, terms: Terms, size: int) -> torch.Tensor:
    """Return a reduction as it is handed out: integers are divided here, since ours add them up alone."""
    if terms.op == AVERAGE and not tensor.is_floating_point() and not tensor.is_complex():
        divide(tensor, size)
    return scaled(tensor, terms.postscale)


def _all_reduce(comm: Comm, request: TensorRequest) -> Tensors:
    terms, results = request.terms, list(request.tensors)
    if terms.op == ADASUM:
        results = [_finished(_adasum(comm, scaled(x, terms.prescale)), terms, comm.size) for x in request.tensors]
    else:
        for dtype in dict.fromkeys(x.dtype for x in request.tensors):
            which = [i for i, x in enumerate(request.tensors) if x.dtype == dtype]
            parts = [request.tensors[i] for i in which]
            whole = _joined(comm, parts, terms, in_place=request.in_place)
            if len(parts) == 1:
                results[which[0]] = whole
                continue
            for i, piece in zip(which, whole.split([x.numel() for x in parts]), strict=True):
                own = piece.view(request.tensors[i].shape)
                results[i] = own if request.in_place else own.clone()
    return _handed_out(request, results)


def _joined(comm: Comm, parts: Sequence[torch.Tensor], terms: Terms, *, in_place: bool) -> torch.Tensor:
    """Return the reduction of tensors of one dtype, one after the other in one vector; of one tensor in its shape."""
    if len(parts) == 1:
        whole = plain(parts[0])
        if not in_place and whole is parts[0]:
            whole = whole.clone()
    else:
        whole = torch.cat([plain(x).reshape(-1) for x in parts])
    whole, op = scaled(whole, terms.prescale), op_of(_OPS[terms.op], whole.dtype)
    if whole.numel():
        array = view(whole)
        functions.allreduce(array, op, out=array, comm=comm)
    return _finished(whole, terms, comm.size)


def _handed_out(request: TensorRequest, results: Tensors) -> Tensors:
    if not request.in_place:
        return results
    for own, result in zip(request.tensors, results, strict=True):
        if own.data_ptr() != result.data_ptr() or not own.is_contiguous():
            put(own, result)
    return request.tensors


def _adasum(comm: Comm, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensors of all ranks, combined two by two: what both have in common counts once."""
    if not tensor.is_floating_point():
        raise TypeError(f"Adasum is for floating-point tensors, not for {tensor.dtype}")
    whole = plain(tensor)  # an array over its memory does not keep it
    rows = tensor_of(moving_functions.allgather(moved(whole), comm=comm))
    level = list(rows.reshape(comm.size, -1).view(tensor.dtype).double())
    while len(level) > 1:
        pairs = [_pair(*level[i : i + 2]) for i in range(0, len(level) - 1, 2)]
        level = [*pairs, *level[2 * len(pairs) :]]
    return tensor.new_empty(tensor.shape).copy_(level[0].view(tensor.shape))


def _pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    dot, of_a, of_b = a.dot(b), a.dot(a), b.dot(b)
    first = 1 - dot / (2 * of_a) if of_a else 1.0
    second = 1 - dot / (2 * of_b) if of_b else 1.0
    return first * a + second * b


def _all_gather(comm: Comm, request: TensorRequest) -> Tensors:
    results = []
    for tensor in request.tensors:
        counts = moving_functions.allgather(np.int64(len(tensor)), comm=comm).tolist()
        result = tensor.new_empty((sum(counts), *tensor.shape[1:]))
        if result.numel():
            width = moved(result).size // len(result)
            sizes = [count * width for count in counts]
            whole = plain(tensor)  # as above
            block_functions.allgatherv(moved(whole), sizes, out=moved(result), comm=comm)
        results.append(result)
    return results


def _broadcast(comm: Comm, request: TensorRequest) -> Tensors:
    root = request.terms.root
    results = [plain(x) if request.in_place else plain(x).clone() for x in request.tensors]
    for whole in results:
        if whole.numel():
            array = moved(whole)
            moving_functions.broadcast(array, root=root, out=array, comm=comm)
    return _handed_out(request, results)


def _all_to_all(comm: Comm, request: TensorRequest) -> tuple[torch.Tensor, torch.Tensor]:
    (tensor,) = request.tensors
    sent = np.array(request.splits or [0] * comm.size, np.int64)
    received = moving_functions.alltoall(sent, comm=comm)
    result = tensor.new_empty((int(received.sum()), *tensor.shape[1:]))
    width = moved(tensor.new_empty((1, *tensor.shape[1:]))).size
    if width:
        there, back = ([int(count) * width for count in counts] for counts in (sent, received))
        whole = plain(tensor)  # as above
        block_functions.alltoallv(moved(whole), there, back, out=moved(result), comm=comm, reproducible=True)
    return result, torch.from_numpy(received.astype(np.int32))


def _reduce_scatter(comm: Comm, request: TensorRequest) -> Tensors:
    terms, results = request.terms, []
    for tensor in request.tensors:
        rows, more = divmod(len(tensor), comm.size)
        result = tensor.new_empty((rows + (comm.rank < more), *tensor.shape[1:]))
        if terms.op == ADASUM:
            raise TypeError("reducescatter is by Average, Sum, Min, Max or Product, not by Adasum")
        whole = scaled(plain(tensor), terms.prescale)
        if whole.numel():
            op = op_of(_OPS[terms.op], tensor.dtype)
            array = view(whole).reshape(len(whole), -1)
            functions.reduce_scatter(array, op, out=view(result).reshape(len(result), array.shape[1]), comm=comm)
        results.append(_finished(result, terms, comm.size))
    return results


def _barrier(comm: Comm, request: TensorRequest) -> None:
    """Do nothing: all ranks have come."""
    del comm, request


_RUNS: Final[dict[str, Callable[[Comm, TensorRequest], object]]] = {
    "allreduce": _all_reduce,
    "allgather": _all_gather,
    "broadcast": _broadcast,
    "alltoall": _all_to_all,
    "reducescatter": _reduce_scatter,
    "barrier": _barrier,
}
