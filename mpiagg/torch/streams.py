"""Tensors on a GPU: what a group does with them comes after what their stream has to do when the group is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from mpiagg.ddp.torch_streams import present_source


def behind_present(tensors: Sequence[torch.Tensor]) -> Callable[[], AbstractContextManager[object]]:
    """Return a function that returns a block, for any thread and any later time, in which tensors are worked on.

    On a GPU what torch and CuPy are asked for in the block comes after what the tensors' stream has to do now, but not
    after what it is asked for later. When the block ends, all of it is done, for every stream. All tensors are on one
    device.
    """
    if not tensors or not tensors[0].is_cuda:
        return nullcontext
    ordinal: int = tensors[0].device.index
    present = torch.cuda.current_stream(ordinal).record_event()

    @contextmanager
    def block() -> Iterator[None]:
        stream = torch.cuda.Stream(ordinal)  # one of the few that torch has
        stream.wait_event(present)
        with torch.cuda.stream(stream), present_source(ordinal).inside():
            yield
        stream.synchronize()

    return block
