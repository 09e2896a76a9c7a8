"""Aggregate gradients and weights across the ranks of an MPI job.

Four interfaces, from the lowest to the highest:

- :class:`Comm`, an mpi4py communicator whose collectives run by mpiagg's algorithms or the MPI library's;
- :func:`allreduce` and its siblings, for arrays;
- :class:`AllReduce` and the other aggregations, for lists of arrays;
- :class:`DDP`, for training.

What needs MPI is imported when it is first asked for, so that the algorithms can be looked at, and jobs be launched,
from a process that is no part of an MPI job.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

import mpi4py

from mpiagg import optimizers
from mpiagg.collectives.simulation import simulate
from mpiagg.errors import (
    DeviceError,
    Error,
    MismatchError,
    NonFiniteError,
    PlanError,
    RankFailedError,
    ScheduleError,
    StallError,
)
from mpiagg.launch.workers import in_worker
from mpiagg.schedules import algorithms

if TYPE_CHECKING:
    from mpiagg.aggregation import (
        Aggregation,
        AllReduce,
        Decentralized,
        DeMo,
        ErrorFeedback,
        LocalSGD,
        LowPrecisionDecentralized,
        NeighborAverage,
        ParameterServer,
        PowerSGD,
        SparseLoCo,
        Sparsified,
    )
    from mpiagg.checkpoints import load_checkpoint, save_checkpoint
    from mpiagg.checkpoints.loop import Loop
    from mpiagg.collectives.block_functions import allgatherv, allgatherv_init, alltoallv, alltoallv_init
    from mpiagg.collectives.comm import Comm
    from mpiagg.collectives.functions import (
        allreduce,
        exscan,
        reduce,
        reduce_scatter,
        scan,
    )
    from mpiagg.collectives.moving_functions import (
        allgather,
        alltoall,
        broadcast,
        gather,
        scatter,
    )
    from mpiagg.collectives.moving_plans import (
        allgather_init,
        alltoall_init,
        broadcast_init,
        gather_init,
        scatter_init,
    )
    from mpiagg.collectives.neighbor_functions import (
        neighbor_allgather,
        neighbor_allgatherv,
        neighbor_alltoall,
        neighbor_alltoallv,
    )
    from mpiagg.collectives.neighbor_plans import (
        neighbor_allgather_init,
        neighbor_allgatherv_init,
        neighbor_alltoall_init,
        neighbor_alltoallv_init,
    )
    from mpiagg.collectives.reducing_plans import (
        allreduce_init,
        exscan_init,
        reduce_init,
        reduce_scatter_init,
        scan_init,
    )
    from mpiagg.collectives.registered import empty
    from mpiagg.cuda.placement import bind_device
    from mpiagg.ddp import DDP
    from mpiagg.plans.plan import Plan
    from mpiagg.sharded import Sharded

__version__ = "0.2.0"

__all__ = [
    "DDP",
    "Aggregation",
    "AllReduce",
    "Comm",
    "DeMo",
    "Decentralized",
    "DeviceError",
    "Error",
    "ErrorFeedback",
    "LocalSGD",
    "Loop",
    "LowPrecisionDecentralized",
    "MismatchError",
    "NeighborAverage",
    "NonFiniteError",
    "ParameterServer",
    "Plan",
    "PlanError",
    "PowerSGD",
    "RankFailedError",
    "ScheduleError",
    "Sharded",
    "SparseLoCo",
    "Sparsified",
    "StallError",
    "algorithms",
    "allgather",
    "allgather_init",
    "allgatherv",
    "allgatherv_init",
    "allreduce",
    "allreduce_init",
    "alltoall",
    "alltoall_init",
    "alltoallv",
    "alltoallv_init",
    "bind_device",
    "broadcast",
    "broadcast_init",
    "empty",
    "exscan",
    "exscan_init",
    "gather",
    "gather_init",
    "load_checkpoint",
    "neighbor_allgather",
    "neighbor_allgather_init",
    "neighbor_allgatherv",
    "neighbor_allgatherv_init",
    "neighbor_alltoall",
    "neighbor_alltoall_init",
    "neighbor_alltoallv",
    "neighbor_alltoallv_init",
    "optimizers",
    "reduce",
    "reduce_init",
    "reduce_scatter",
    "reduce_scatter_init",
    "save_checkpoint",
    "scan",
    "scan_init",
    "scatter",
    "scatter_init",
    "simulate",
]

_HOMES = {
    "mpiagg.aggregation": (
        "Aggregation",
        "AllReduce",
        "DeMo",
        "Decentralized",
        "ErrorFeedback",
        "LocalSGD",
        "LowPrecisionDecentralized",
        "NeighborAverage",
        "ParameterServer",
        "PowerSGD",
        "SparseLoCo",
        "Sparsified",
    ),
    "mpiagg.checkpoints": ("load_checkpoint", "save_checkpoint"),
    "mpiagg.collectives.functions": (
        "allreduce",
        "exscan",
        "reduce",
        "reduce_scatter",
        "scan",
    ),
    "mpiagg.collectives.reducing_plans": (
        "allreduce_init",
        "exscan_init",
        "reduce_init",
        "reduce_scatter_init",
        "scan_init",
    ),
    "mpiagg.collectives.block_functions": (
        "allgatherv",
        "allgatherv_init",
        "alltoallv",
        "alltoallv_init",
    ),
    "mpiagg.collectives.moving_functions": (
        "allgather",
        "alltoall",
        "broadcast",
        "gather",
        "scatter",
    ),
    "mpiagg.collectives.moving_plans": (
        "allgather_init",
        "alltoall_init",
        "broadcast_init",
        "gather_init",
        "scatter_init",
    ),
    "mpiagg.collectives.neighbor_functions": (
        "neighbor_allgather",
        "neighbor_allgatherv",
        "neighbor_alltoall",
        "neighbor_alltoallv",
    ),
    "mpiagg.collectives.neighbor_plans": (
        "neighbor_allgather_init",
        "neighbor_allgatherv_init",
        "neighbor_alltoall_init",
        "neighbor_alltoallv_init",
    ),
    "mpiagg.collectives.comm": ("Comm",),
    "mpiagg.ddp": ("DDP",),
    "mpiagg.sharded": ("Sharded",),
    "mpiagg.checkpoints.loop": ("Loop",),
    "mpiagg.cuda.placement": ("bind_device",),
    "mpiagg.plans.plan": ("Plan",),
    "mpiagg.collectives.registered": ("empty",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

if in_worker():
    mpi4py.rc.initialize = False  # it has the environment of a rank, but is none

if "mpi4py.MPI" in sys.modules:
    import_module("mpiagg.transport")  # from now on, a rank that fails ends the job


def __getattr__(name: str) -> object:
    """Import what needs MPI when it is first asked for (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'mpiagg' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    """List the public names, also those not imported yet."""
    return sorted({*globals(), *__all__})
