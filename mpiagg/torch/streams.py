"""Tensors on a GPU: what is done with them comes after what their stream has to do when it is asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from mpiagg.arrays import find_device
from mpiagg.ddp.torch_streams import present_source
from mpiagg.transport import wait_patiently

Result = TypeVar("Result")

_own = threading.local()
"""The streams of a thread, by the numbers of their devices: memory that is freed in one is used again there alone."""


def _own_stream(ordinal: int) -> Any:
    streams = _own.__dict__.setdefault("streams", {})
    if ordinal not in streams:
        streams[ordinal] = torch.cuda.Stream(ordinal, priority=-1)  # torch has few; programs rarely take these
    return streams[ordinal]


def behind_present(tensors: Sequence[torch.Tensor]) -> Callable[[Callable[[], Result]], Result]:
    """Return a function that runs a task with tensors, in any thread and at any later time, and returns its result.

    What the task asks torch and CuPy for comes after what the tensors' stream has to do now, and does not wait for what
    it is asked for later. When the function returns, all of it is done, for every stream. On the CPU the task is run,
    and that is all.

    Raises
    ------
    ValueError
        If the tensors are on several devices.
    """
    if len(tensors) > 1 and len({tensor.device for tensor in tensors}) > 1:
        raise ValueError("the tensors of a collective must be on one device")
    if not tensors or not tensors[0].is_cuda:
        return _run
    ordinal: int = tensors[0].device.index
    asking = torch.cuda.current_stream(ordinal)
    present = asking.record_event()
    device: Any = find_device(f"cuda:{ordinal}")
    awaited = f"what was asked of {device.name}"

    def in_order(task: Callable[[], Result]) -> Result:
        with device.present():  # or torch, in a thread of its own, would begin to use the first GPU, too
            stream = _own_stream(ordinal)
            stream.wait_event(present)
            try:
                with torch.cuda.stream(stream), present_source(ordinal).inside():
                    result = task()
            finally:
                wait_patiently(stream.query, lambda: awaited)
            for tensor in tensors:
                if tensor.is_sparse:  # which has new parts then, made in our stream
                    tensor._indices().record_stream(asking)  # noqa: SLF001 - also of one that is not coalesced
                    tensor._values().record_stream(asking)  # noqa: SLF001 - likewise
        return result

    return in_order


def _run(task: Callable[[], Result]) -> Result:
    return task()


def keep_for_present_stream(tensor: torch.Tensor) -> None:
    """Keep the memory of a result that was made in another stream, until the present stream has done with it."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
