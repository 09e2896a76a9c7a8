"""A user's script, for type checkers alone: tests/test_packaging.py has them read it beside the installed package."""

from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

import mpiagg

comm: mpiagg.Comm = mpiagg.Comm(MPI.COMM_WORLD)
rank: int = comm.rank
x: npt.NDArray[np.float64] = np.ones((3, 4))
comm.Allreduce(MPI.IN_PLACE, x, op=MPI.SUM)

mean: npt.NDArray[Any] = mpiagg.allreduce(x, op="avg", comm=comm)
whole: npt.NDArray[Any] = mpiagg.allgather(x)
with mpiagg.allreduce_init(x, op="avg", out=x) as plan:
    plan()
names: list[str] = list(mpiagg.algorithms())

gradients: list[npt.NDArray[Any]] = [x, np.zeros(5)]
with mpiagg.AllReduce(comm, op="avg", wire="bf16") as aggregation:
    aggregation.aggregate(gradients)
with mpiagg.DDP(gradients, comm=comm) as ddp:
    ddp.broadcast_parameters(root=0)
    ddp.sync_gradients(gradients)

model: Any = object()
replica = mpiagg.DDP(model)
loss: Any = replica(x)
with mpiagg.Sharded(gradients, mpiagg.optimizers.AdamW(lr=1e-3), stage=2, comm=comm) as sharded:
    norm: float | None = sharded.step(gradients)
    held: dict[str, int] = sharded.memory()
divided = mpiagg.Sharded(model, mpiagg.optimizers.AdamW)
loss = divided(x)
divided.step()

error: type[Exception] = mpiagg.StallError
