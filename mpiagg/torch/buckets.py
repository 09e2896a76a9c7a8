"""Buckets of torch's own DistributedDataParallel, averaged in memory that the ranks of a node share."""
# Without annotations as text: torch compares those of a hook with its own types.

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mpiagg.torch.process_group import ProcessGroup


def share_buckets(model: DistributedDataParallel) -> None:
    """Let torch's DDP average its gradients in memory that the ranks of a node share.

    torch allocates the buckets of its DDP itself, in memory of each rank's own. This registers a communication hook
    that divides a bucket into shared memory, in the place of torch's division, and reduces it there. It takes as much
    memory again as the buckets.

    Parameters
    ----------
    model : torch.nn.parallel.DistributedDataParallel
        With parameters on the CPU, on a process group of mpiagg, and without a communication hook.

    Raises
    ------
    TypeError
        If it is not torch's DDP, or its process group is not mpiagg's.
    ValueError
        If it has parameters on a device.
    RuntimeError
        If it has a hook; torch raises this.

    Notes
    -----
    The gradients have the same values as without it, but for rounding. Steps and bytes are those of
    :func:`mpiagg.allreduce` of registered memory: on one node no messages are sent. On several nodes it can be slower
    than without it.

    Examples
    --------
    >>> import mpiagg.torch
    >>> mpiagg.torch.init_process_group()
    >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    >>> mpiagg.torch.share_buckets(model)
    >>> model(torch.full((1, 3), float(rank))).sum().backward()
    >>> bool((model.module.weight.grad == (size - 1) / 2).all())
    True
    >>> torch.distributed.destroy_process_group()
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"buckets are those of torch's DistributedDataParallel, not of a {type(model).__name__}")
    group = model.process_group
    if not isinstance(group, ProcessGroup):
        raise TypeError("the process group of the DistributedDataParallel is not of the backend 'mpiagg'")
    if any(x.device.type != "cpu" for x in model.parameters()):
        raise ValueError("buckets are shared in the host's memory, and the model has parameters on a device")
    model.register_comm_hook(_SharedBuckets(group), _SharedBuckets.average)


class _SharedBuckets:
    """A buffer for each bucket of a model."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._shared: dict[int, torch.Tensor] = {}

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start to average a bucket; return the future of its mean."""
        buffer, number = bucket.buffer(), bucket.index()
        shared = self._shared.get(number)
        if shared is None or (shared.shape, shared.dtype) != (buffer.shape, buffer.dtype):
            shared = self._group.allocate_tensor(buffer.numel(), dtype=buffer.dtype, device=buffer.device)
            self._shared[number] = shared
        torch.div(buffer, self._group.size(), out=shared)
        work = dist.all_reduce(shared, group=self._group, async_op=True)
        found: torch.futures.Future[torch.Tensor] = work.get_future().then(_only)
        return found


def _only(done: Any) -> torch.Tensor:
    (tensor,) = done.value()
    assert isinstance(tensor, torch.Tensor)
    return tensor
