"""Parameters, states of optimizers and objects, from one rank to all."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from mpiagg.horovod.process_sets import ProcessSet, engine_of, global_process_set
from mpiagg.horovod.torch.handles import synchronize
from mpiagg.horovod.torch.moving_ops import allgather, broadcast_, broadcast_async_


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Take the root's parameters: those of ``model.state_dict()`` or ``model.named_parameters()``.

    Raises
    ------
    ValueError
        If they are none of these.
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

    Raises
    ------
    ValueError
        For LBFGS, whose state is of one rank.
    """
    del model
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")  # noqa: TRY004 - Horovod's
    root = process_set.ranks is not None and process_set.ranks[engine_of(process_set).rank] == root_rank
    state = broadcast_object(optimizer.state_dict() if root else None, root_rank, "optimizer", process_set)
    if not root:
        optimizer.load_state_dict(state)


def broadcast_object(
    obj: object, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's object, by way of pickle: from ranks of this job, which run this program."""
    name = name or "object"
    ranks = process_set.ranks or []
    root = ranks[engine_of(process_set).rank] == root_rank
    content = _bytes_of(obj) if root else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([len(content)])
    broadcast_(length, root_rank, f"{name}.length", process_set)
    if not root:
        content = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(content, root_rank, f"{name}.content", process_set)
    return obj if root else pickle.loads(content.numpy().tobytes())  # noqa: S301 - of this job


def allgather_object(obj: object, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks, by way of pickle: from ranks of this job, which run this program."""
    name = name or "object"
    content = _bytes_of(obj)
    lengths = allgather(torch.tensor([len(content)]), f"{name}.length", process_set).tolist()
    parts = allgather(content, f"{name}.content", process_set).split(lengths)
    return [pickle.loads(part.numpy().tobytes()) for part in parts]  # noqa: S301 - of this job


def _bytes_of(obj: object) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(pickle.dumps(obj), np.uint8).copy())
