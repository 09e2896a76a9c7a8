"""Horovod's all-reduces, at once, asynchronous, in place and grouped; handles, barrier and join."""

# ruff: noqa: PLR0917 - Horovod's arguments

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Final

import torch

from mpiagg.horovod.engine import Engine
from mpiagg.horovod.exceptions import InvalidRequestError
from mpiagg.horovod.requests import Request, Terms
from mpiagg.horovod.torch.compression import Compression, Compressor
from mpiagg.horovod.world import ProcessSet, engine_of, global_process_set, state

Average: Final = 0
Sum: Final = 1
Adasum: Final = 2
Min: Final = 3
Max: Final = 4
Product: Final = 5

Tensors = Sequence[torch.Tensor]
Handle = int | Callable[[], torch.Tensor]

_COUNT = count(1)
_UNDER_WAY: dict[int, tuple[Engine, Request, Callable[[Any], Any]]] = {}


def _first(results: list[torch.Tensor]) -> torch.Tensor:
    return results[0]


def op_of(op: int | None, average: bool | None) -> int:
    """Return the op that two arguments ask for; ValueError if they contradict."""
    if op is not None and average is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    if op is not None:
        if op not in range(6):
            raise ValueError(f"op must be Average, Sum, Adasum, Min, Max or Product, not {op!r}")
        return op
    return Sum if average is False else Average


def submit(
    kind: str,
    tensors: Tensors,
    name: str | None,
    process_set: ProcessSet,
    *,
    own_rows: bool = False,
    grouped: bool = False,
    in_place: bool = False,
    splits: Sequence[int] = (),
    then: Callable[[Any], Any] | None = None,
    **terms: Any,
) -> int:
    """Ask for a collective; return the number under which its result is to be had."""
    engine = engine_of(process_set)
    if kind in ("allgather", "alltoall", "reducescatter") and any(not x.dim() for x in tensors):
        raise InvalidRequestError(f"{kind} is of tensors with at least one dimension")
    label = f"grouped_{kind}" if grouped else kind
    if name is None:
        numbers, key = state().numbers, (process_set.process_set_id or 0, label)
        numbers[key] = numbers.get(key, 0) + 1
        name = f"{label}.noname.{numbers[key]}"
    else:
        name = f"{label}.{name}"
    bare = [x.detach() for x in tensors]
    shapes = tuple((0, *x.shape[1:]) if own_rows else tuple(x.shape) for x in bare)
    asked = Terms(name, kind, tuple(str(x.dtype) for x in bare), shapes, **terms)
    request = engine.submit(Request(asked, bare, in_place=in_place, splits=splits))
    number = next(_COUNT)
    _UNDER_WAY[number] = engine, request, then or (_same if grouped else _first)
    return number


def _same(results: Any) -> Any:
    return results


def root_of(root_rank: int, process_set: ProcessSet) -> int:
    """Return which rank of a set a rank of the job is; InvalidRequestError if it is none."""
    engine_of(process_set)
    ranks = process_set.ranks or []
    if root_rank not in ranks:
        raise InvalidRequestError(f"the root {root_rank} is none of the ranks {ranks}")
    return ranks.index(root_rank)


def poll(handle: Handle) -> bool:
    """Whether an asynchronous operation is done, so that :func:`synchronize` does not wait.

    Raises
    ------
    ValueError
        If there is no such operation under way.
    """
    if not isinstance(handle, int):
        return False
    if handle not in _UNDER_WAY:
        raise ValueError(f"{handle} is no operation that is under way")
    engine, request, _ = _UNDER_WAY[handle]
    return engine.is_over(request)


def synchronize(handle: Handle) -> Any:
    """Wait until an asynchronous operation is done; return its result: None for one whose result was had already.

    Raises
    ------
    HorovodInternalError
        If it has failed.
    """
    if not isinstance(handle, int):
        return handle()
    if handle not in _UNDER_WAY:
        return None
    engine, request, then = _UNDER_WAY.pop(handle)
    return then(engine.wait(request))


# -- all-reduce


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start :func:`allreduce`; return a handle for :func:`poll` and :func:`synchronize`."""
    factors: dict[str, Any] = {"prescale": float(prescale_factor), "postscale": float(postscale_factor)}
    return submit("allreduce", [tensor], name, process_set, op=op_of(op, average), **factors)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start :func:`allreduce_`; return a handle."""
    factors: dict[str, Any] = {"prescale": float(prescale_factor), "postscale": float(postscale_factor)}
    own: dict[str, Any] = {"then": lambda _: tensor, "in_place": True}
    return submit("allreduce", [tensor], name, process_set, op=op_of(op, average), **factors, **own)


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start :func:`grouped_allreduce`; return a handle."""
    factors: dict[str, Any] = {"prescale": float(prescale_factor), "postscale": float(postscale_factor)}
    return submit("allreduce", tensors, name, process_set, grouped=True, op=op_of(op, average), **factors)


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start :func:`grouped_allreduce_`; return a handle."""
    factors: dict[str, Any] = {"prescale": float(prescale_factor), "postscale": float(postscale_factor)}
    own: dict[str, Any] = {"then": lambda _: tensors, "in_place": True, "grouped": True}
    return submit("allreduce", tensors, name, process_set, op=op_of(op, average), **factors, **own)


class HorovodAllreduce(torch.autograd.Function):  # type: ignore[misc]  # mypy sees no classes of torch's
    """An all-reduce of several tensors, whose gradient is one of the same op."""

    @staticmethod
    def forward(ctx: Any, start: Callable[..., int], named: dict[str, Any], *tensors: torch.Tensor) -> Any:
        """Reduce."""
        ctx.named, ctx.start = named, start
        return _tuple_of(synchronize(start(_given(start, tensors), **named)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Reduce the gradients."""
        named = {**ctx.named, "name": None}
        return None, None, *_tuple_of(synchronize(ctx.start(_given(ctx.start, gradients), **named)))


def _given(start: Callable[..., int], tensors: Tensors) -> Any:
    return list(tensors) if start.__name__.startswith("grouped") else tensors[0]


def _tuple_of(results: Any) -> tuple[torch.Tensor, ...]:
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)


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
        The old form of ``op``.
    name : str, optional
        By which the ranks know the operation; a running number by default.
    compression : Compressor
        How the tensor travels.
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
        On every rank, if they ask for different things.

    Examples
    --------
    >>> loss = hvd.allreduce(loss)  # doctest: +SKIP
    """
    small, kept = compression.compress(tensor)
    factors = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    named = {"name": name, "op": op_of(op, average), "process_set": process_set, **factors}
    (result,) = HorovodAllreduce.apply(allreduce_async, named, small)
    return compression.decompress(result, kept)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce a tensor over the ranks in place; see :func:`allreduce`."""
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
    """Reduce several tensors over the ranks, those of a dtype as one; see :func:`allreduce`."""
    small = [compression.compress(x) for x in tensors]
    factors = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    named = {"name": name, "op": op_of(op, average), "process_set": process_set, **factors}
    results = HorovodAllreduce.apply(grouped_allreduce_async, named, *(x for x, _ in small))
    return [compression.decompress(x, kept) for x, (_, kept) in zip(results, small, strict=True)]


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce several tensors over the ranks in place; see :func:`grouped_allreduce`."""
    factors = (prescale_factor, postscale_factor)
    return synchronize(grouped_allreduce_async_(tensors, average, name, op, *factors, process_set))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait for all ranks."""
    synchronize(submit("barrier", [], None, process_set, then=_same))


def join(device: int = -1) -> int:
    """Take part in what the other ranks ask for, with zeros, until all have called this; return the last that has."""
    del device
    engine = engine_of(global_process_set)
    last = engine.wait(engine.join())
    # Ranks that have joined early have numbered fewer operations.
    state().numbers.clear()
    assert isinstance(last, int)
    return last
