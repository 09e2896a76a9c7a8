"""All-reduces of other libraries, for :class:`mpiagg.AllReduce` to run on.

A backend is any callable ``backend(vector, op)`` that leaves in ``vector``, a contiguous one-dimensional NumPy array,
the reduction of all ranks' vectors by ``op``: ``"sum"``, ``"min"`` or ``"max"``. Averages are sums, which the
aggregation divides. All ranks call it in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from mpiagg.arrays import Array
from mpiagg.collectives.mpi_ops import mpi_op

Backend = Callable[[Array, str], object]


def native(comm: MPI.Intracomm | None = None) -> Backend:
    """Return the all-reduce of the MPI library, on a communicator; the world by default."""
    ranks = MPI.COMM_WORLD if comm is None else comm

    def backend(vector: Array, op: str) -> None:
        ranks.Allreduce(MPI.IN_PLACE, vector, mpi_op(op, vector.dtype))

    return backend


def torch_distributed(group: Any = None) -> Backend:
    """Return the all-reduce of ``torch.distributed``, on an initialised process group; the default one by default.

    Its ranks must be the aggregation's. Gloo and MPI work on the vector's own memory.

    Raises
    ------
    ImportError
        Without torch.
    """
    import torch  # noqa: PLC0415 - an extra, imported when it is asked for
    import torch.distributed  # noqa: PLC0415 - likewise

    ops = {"sum": torch.distributed.ReduceOp.SUM, "min": torch.distributed.ReduceOp.MIN}
    ops["max"] = torch.distributed.ReduceOp.MAX

    def backend(vector: Array, op: str) -> None:
        torch.distributed.all_reduce(torch.from_numpy(vector), ops[op], group)

    return backend
