"""Parameters, states of optimizers and objects, from one rank to all."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from mpiagg.horovod.exceptions import HorovodInternalError
from mpiagg.horovod.process_sets import ProcessSet, engine_of, global_process_set
from mpiagg.horovod.torch.handles import synchronize
from mpiagg.horovod.torch.moving_ops import allgather, broadcast_, broadcast_async_

_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Take the root's parameters.

    Parameters
    ----------
    params : mapping or iterable of (str, torch.Tensor)
        ``model.state_dict()`` or ``model.named_parameters()``; its tensors are overwritten on the other ranks.
    root_rank, process_set
        See :mod:`mpiagg.horovod.torch`.

    Raises
    ------
    HorovodInternalError
        As :func:`allreduce`.
    ValueError
        If ``params`` is none of these.

    Examples
    --------
    >>> model = torch.nn.Linear(3, 1)
    >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    >>> weights = hvd.allgather_object(model.weight.tolist())
    >>> weights == weights[:1] * size
    True
    """
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, str):
        pairs = [each if isinstance(each, tuple) else (None, each) for each in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")  # noqa: TRY004 - Horovod's
    tensors = [(name, x) for name, x in pairs if isinstance(x, torch.Tensor)]
    for handle in [broadcast_async_(x, root_rank, name, process_set) for name, x in tensors]:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Take the root's state of an optimizer, and its options.

    Where an optimizer has no state yet, parameters without a gradient have one of zeros afterwards, as with Horovod.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        One of the same class and the same parameters on all ranks.
    root_rank, process_set
        See :mod:`mpiagg.horovod.torch`.
    model : torch.nn.Module, optional
        Ignored.

    Raises
    ------
    HorovodInternalError
        As :func:`allreduce`.
    ValueError
        For LBFGS, whose state is of one rank.

    Examples
    --------
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1))
    >>> hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    >>> optimizer.param_groups[0]["lr"]
    0.1
    """
    del model
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")  # noqa: TRY004 - Horovod's
    if not optimizer.state:
        sparse = isinstance(optimizer, torch.optim.SparseAdam)
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p).to_sparse() if sparse else torch.zeros_like(p)
    root = process_set.ranks is not None and process_set.ranks[engine_of(process_set).rank] == root_rank
    state = broadcast_object(on_host(optimizer.state_dict()) if root else None, root_rank, "optimizer", process_set)
    if not root:
        optimizer.load_state_dict(state)


def broadcast_object(
    obj: object, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Give the root's object to all ranks, by way of pickle: from ranks of this job, which run this program.

    Parameters
    ----------
    obj : object
        On the root the object to give; ignored elsewhere.
    root_rank, name, process_set
        See :mod:`mpiagg.horovod.torch`.

    Returns
    -------
    object
        On the root its own object; elsewhere a copy.

    Raises
    ------
    HorovodInternalError, ValueError
        As :func:`allreduce`; HorovodInternalError also if the root cannot pickle its object. The root raises what
        pickle does.

    Examples
    --------
    >>> hvd.broadcast_object({"rank": rank}, root_rank=0)
    {'rank': 0}
    """
    name = name or "object"
    ranks = process_set.ranks or []
    root = ranks[engine_of(process_set).rank] == root_rank
    content, error = _bytes_of(obj) if root else (_NOTHING, None)
    length = torch.tensor([-1 if error else len(content)], device="cpu")  # whatever the default device is
    broadcast_(length, root_rank, f"{name}.length", process_set)
    _check_lengths({root_rank: int(length)}, error)
    if not root:
        content = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    broadcast_(content, root_rank, f"{name}.content", process_set)
    return obj if root else pickle.loads(content.numpy().tobytes())  # noqa: S301 - of this job


def allgather_object(obj: object, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Give the objects of all ranks to all ranks, by way of pickle: from ranks of this job, which run this program.

    Parameters
    ----------
    obj : object
        This rank's object.
    name, process_set
        See :mod:`mpiagg.horovod.torch`.

    Returns
    -------
    list
        A copy of each rank's object, in the order of the ranks; of a rank that has joined there is none.

    Raises
    ------
    HorovodInternalError, ValueError
        As :func:`allreduce`; HorovodInternalError also if another rank cannot pickle its object. That one raises what
        pickle does.

    Examples
    --------
    >>> hvd.allgather_object("x" * rank) == ["x" * each for each in range(size)]
    True
    """
    name = name or "object"
    content, error = _bytes_of(obj)
    rank = -1 if process_set.ranks is None else process_set.ranks[engine_of(process_set).rank]
    length = torch.tensor([[rank, -1 if error else len(content)]], device="cpu")  # whatever the default device is
    lengths = dict(allgather(length, f"{name}.length", process_set).tolist())
    _check_lengths(lengths, error)
    parts = allgather(content, f"{name}.content", process_set).split(list(lengths.values()))
    return [pickle.loads(part.numpy().tobytes()) for part in parts]  # noqa: S301 - of this job


def on_host(state: Any) -> Any:
    """Return a state with its tensors on the CPU: pickle would bring them to the GPU of the rank that they are from."""
    found = tree_map_only(torch.Tensor, torch.Tensor.cpu, state)
    if hasattr(state, "_metadata"):  # of a module's, which goes by it when it is loaded
        found._metadata = state._metadata  # noqa: SLF001 - torch has no other name for it
    return found


def _bytes_of(obj: object) -> tuple[torch.Tensor, Exception | None]:
    """Return a pickled object, and the error if it cannot be pickled."""
    try:
        return torch.from_numpy(np.frombuffer(pickle.dumps(obj), np.uint8).copy()), None
    except Exception as error:  # noqa: BLE001 - whatever the object's own methods raise
        return _NOTHING, error


def _check_lengths(lengths: dict[int, int], error: Exception | None) -> None:
    """Raise this rank's error, or HorovodInternalError if another rank cannot pickle its object."""
    if error is not None:
        raise error
    if failed := [str(rank) for rank, length in lengths.items() if length < 0]:
        raise HorovodInternalError(f"the objects of these ranks cannot be pickled: {', '.join(failed)}")
