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

from mpiagg.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from mpiagg.horovod.process_sets import (
    ProcessSet,
    add_process_set,
    get_process_set_ids_and_ranks,
    global_process_set,
    remove_process_set,
)
from mpiagg.horovod.torch import elastic
from mpiagg.horovod.torch.allreduce_ops import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from mpiagg.horovod.torch.built import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    nccl_built,
    rocm_built,
    start_timeline,
    stop_timeline,
)
from mpiagg.horovod.torch.compression import Compression
from mpiagg.horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from mpiagg.horovod.torch.handles import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    barrier,
    join,
    poll,
    synchronize,
)
from mpiagg.horovod.torch.moving_ops import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
)
from mpiagg.horovod.torch.optimizer import DistributedOptimizer
from mpiagg.horovod.torch.reducing_ops import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)
from mpiagg.horovod.torch.sync_batch_norm import SyncBatchNorm
from mpiagg.horovod.world import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_threads_supported,
    rank,
    shutdown,
    size,
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
