"""Horovod's interface for torch: a script of Horovod's runs with ``import mpiagg.horovod.torch as hvd``.

Arguments that collectives share:

name : str, optional
    By which the ranks know the operation, in whatever order they ask; by default a running number, so that all ranks
    must ask in the same order.
op : {Average, Sum, Adasum, Min, Max, Product}, optional
    How values are combined; Average by default.
average : bool, optional
    The old form of ``op``: Average if it is true, Sum if it is false. Only one of both can be given.
compression : Compressor
    How tensors travel: a member of :class:`Compression`.
prescale_factor, postscale_factor : float
    What values are multiplied with before and after the reduction.
root_rank : int
    The rank that gives: its number in the job, also where ``process_set`` is some of the ranks.
process_set : ProcessSet
    The ranks that take part; all by default.

Functions whose names end in ``_async`` or ``_async_`` return at once, with a handle for :func:`poll` and
:func:`synchronize`. Those that end in ``_`` write the result into the tensors that they were given.
"""

from mpiagg.horovod.exceptions import HostsUpdatedInterrupt
from mpiagg.horovod.process_sets import get_process_set_ids_and_ranks
from mpiagg.horovod.torch import elastic, mpi_ops
from mpiagg.horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from mpiagg.horovod.torch.mpi_ops import *  # noqa: F403 - all that Horovod has in both, as its __all__ says
from mpiagg.horovod.torch.optimizer import DistributedOptimizer
from mpiagg.horovod.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "DistributedOptimizer",
    "HostsUpdatedInterrupt",
    "SyncBatchNorm",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "get_process_set_ids_and_ranks",
]
__all__ += mpi_ops.__all__
