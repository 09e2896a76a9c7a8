"""What all operations have in common: their ops, names and handles; barrier and join."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Final

import torch

from mpiagg.horovod.engine import Engine
from mpiagg.horovod.exceptions import InvalidRequestError
from mpiagg.horovod.process_sets import ProcessSet, engine_of, global_process_set
from mpiagg.horovod.requests import TensorRequest, Terms
from mpiagg.torch.streams import keep_for_present_stream

Average: Final = 0
"""The sum divided by the number of ranks; of integers, rounded toward zero."""

Sum: Final = 1
"""The sum."""

Adasum: Final = 2
"""A sum in which what two ranks' tensors have in common counts once."""

Min: Final = 3
"""The least of the ranks' values."""

Max: Final = 4
"""The greatest of the ranks' values."""

Product: Final = 5
"""The product."""

Tensors = Sequence[torch.Tensor]

_COUNT = count(1)
_UNDER_WAY: dict[int, tuple[Engine, TensorRequest, Callable[[Any], Any]]] = {}


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
    given: torch.Tensor | Tensors,
    name: str | None,
    process_set: ProcessSet,
    *,
    own_rows: bool = False,
    in_place: bool = False,
    splits: Sequence[int] = (),
    known_as: str = "",
    **terms: Any,
) -> int:
    """Ask for a collective of a tensor, or of several at once; return the handle of as many results.

    Its name among the ranks begins with its kind, or with what it is known as.
    """
    engine = engine_of(process_set)
    tensors = [given] if isinstance(given, torch.Tensor) else given
    if not (isinstance(tensors, Sequence) and all(isinstance(x, torch.Tensor) for x in tensors)):
        raise TypeError(f"{kind} is of a torch.Tensor, or a list of them where it is grouped, not {given!r:.60}")
    bare = [x.detach() for x in tensors]
    if any(x.layout is not torch.strided for x in bare):
        raise InvalidRequestError(f"{kind} is of dense tensors; sparse ones are added up by sparse_allreduce_async")
    if kind in ("allgather", "alltoall", "reducescatter") and any(not x.dim() for x in bare):
        raise InvalidRequestError(f"{kind} is of tensors with at least one dimension")
    if name is None:
        engine.numbers[kind] += 1
        name = f"noname.{engine.numbers[kind]}"
    shapes = tuple((0, *x.shape[1:]) if own_rows else tuple(x.shape) for x in bare)
    devices = {x.device for x in bare}
    if len(devices) > 1:
        raise InvalidRequestError(f"the tensors of a collective must be on one device, not {sorted(map(str, devices))}")
    device = bare[0].device.type if bare else "cpu"
    asked = Terms(f"{known_as or kind}.{name}", kind, tuple(str(x.dtype) for x in bare), shapes, device, **terms)
    request = engine.submit(TensorRequest(asked, bare, in_place=in_place, splits=splits))

    def result(found: Any) -> Any:
        if request.in_place:
            return given
        return found if given is tensors else found[0]

    number = next(_COUNT)
    _UNDER_WAY[number] = engine, request, result
    return number


def root_of(root_rank: int, process_set: ProcessSet) -> int:
    """Return which rank of a set a rank of the job is; InvalidRequestError if it is none."""
    engine_of(process_set)
    ranks = process_set.ranks or []
    if root_rank not in ranks:
        raise InvalidRequestError(f"the root {root_rank} is none of the ranks {ranks}")
    return ranks.index(root_rank)


def poll(handle: int) -> bool:
    """Whether an asynchronous operation is done, so that :func:`synchronize` does not wait.

    Parameters
    ----------
    handle : int
        What a function whose name ends in ``_async`` or ``_async_`` has returned.

    Returns
    -------
    bool
        Whether it is done.

    Raises
    ------
    ValueError
        If there is no such operation under way.

    Examples
    --------
    >>> handle = hvd.allreduce_async(torch.ones(2))
    >>> while not hvd.poll(handle):
    ...     pass  # something else
    >>> hvd.synchronize(handle).tolist()
    [1.0, 1.0]
    """
    if handle not in _UNDER_WAY:
        raise ValueError(f"{handle} is no operation that is under way")
    engine, request, _ = _UNDER_WAY[handle]
    return engine.is_over(request)


def synchronize(handle: int) -> Any:
    """Wait until an asynchronous operation is done.

    Parameters
    ----------
    handle : int
        As for :func:`poll`.

    Returns
    -------
    torch.Tensor, list of torch.Tensor, tuple or None
        The operation's result; None if it was returned before.

    Raises
    ------
    HorovodInternalError
        If it has failed.

    Examples
    --------
    >>> handle = hvd.broadcast_async(torch.tensor([float(rank)]), root_rank=0)
    >>> hvd.synchronize(handle)
    tensor([0.])
    """
    if handle not in _UNDER_WAY:
        return None
    engine, request, result = _UNDER_WAY.pop(handle)
    found = engine.wait(request)
    for x in found if isinstance(found, list | tuple) else ():
        keep_for_present_stream(x)
    return result(found)


def then(handle: int, act: Callable[[Any], Any]) -> int:
    """Have :func:`synchronize` return what ``act`` makes of an operation's result; return the handle."""
    engine, request, result = _UNDER_WAY[handle]
    _UNDER_WAY[handle] = engine, request, lambda found: act(result(found))
    return handle


def reduction(  # noqa: PLR0917 - a call in full
    kind: str,
    given: torch.Tensor | Tensors,
    name: str | None,
    op: int,
    factors: tuple[float, float],
    process_set: ProcessSet,
    *,
    in_place: bool = False,
    spare: bool = False,
) -> int:
    """Ask for a collective that reduces, of values times the first factor; its results are times the second."""
    prescale, postscale = map(float, factors)
    return submit(
        kind, given, name, process_set, in_place=in_place, op=op, prescale=prescale, postscale=postscale, spare=spare
    )


class _WithGradient(torch.autograd.Function):  # type: ignore[misc]  # mypy sees no classes of torch's
    @staticmethod
    def forward(ctx: Any, results: Tensors, back: Callable[[Tensors], Tensors], *_: torch.Tensor) -> Any:
        ctx.back = back
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, *ctx.back(gradients)


def with_gradient(results: Tensors, back: Callable[[Tensors], Tensors], tensors: Tensors) -> list[torch.Tensor]:
    """Return results of a collective of ``tensors``, whose gradients ``back`` makes of those of the results."""
    return list(_WithGradient.apply(results, back, *tensors))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait for all ranks.

    Parameters
    ----------
    process_set : ProcessSet
        The ranks.

    Raises
    ------
    HorovodInternalError, ValueError
        As :func:`allreduce`.

    Examples
    --------
    >>> hvd.barrier()
    """
    synchronize(submit("barrier", [], None, process_set))


def join(device: int = -1) -> int:
    """Take part in what the other ranks ask for, with zeros, until all ranks have called this.

    Parameters
    ----------
    device : int
        On which GPU it takes part, where the others' tensors are on one; -1 for the one in use at present.

    Returns
    -------
    int
        The last rank that has called it.

    Raises
    ------
    HorovodInternalError
        If a rank was waited for in vain.

    Examples
    --------
    With as many batches as the rank's number says, and one more:

    >>> for batch in range(rank + 1):
    ...     total = hvd.allreduce(torch.ones(2), op=hvd.Sum)
    >>> hvd.join() in range(size)
    True
    """
    if device < 0:
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    engine = engine_of(global_process_set)
    last = engine.wait(engine.join(device))
    engine.numbers.clear()  # ranks that have joined early have numbered fewer operations
    assert isinstance(last, int)
    return last
