"""Starting torch.distributed from MPI: who is who, and where the store is."""

from __future__ import annotations

import json
import os
import socket
from datetime import timedelta
from typing import Final

import numpy as np
import torch.distributed as dist
from mpi4py import MPI

from mpiagg.transport import channel_of, require_mpi

BACKEND: Final = "mpiagg"
"""The name by which torch.distributed knows this backend."""

_ADDRESS: Final = 512
"""The bytes in which rank 0 says where the store is."""


def init_process_group(timeout: timedelta | None = None) -> None:
    """Start ``torch.distributed`` with the ranks of this MPI job; collective.

    The environment variables RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR and MASTER_PORT
    are set as torchrun sets them. Rank 0 has the store: its port is bound before the others are told of it.

    Parameters
    ----------
    timeout : datetime.timedelta, optional
        How long a call may wait without progress; as long as mpiagg's own by default.

    Raises
    ------
    TypeError
        If the timeout is no ``datetime.timedelta``.
    ValueError
        If torch.distributed is started already.
    MismatchError
        On the other ranks, if one of these is so on some.
    PlanError
        If MPI is not initialised in this process.

    Examples
    --------
    Under ``mpiexec -n 4 python train.py`` or ``srun python train.py``:

    >>> import mpiagg.torch
    >>> mpiagg.torch.init_process_group()
    >>> x = torch.ones(3)
    >>> torch.distributed.all_reduce(x)  # or DistributedDataParallel, FSDP2, ...
    >>> x.tolist() == [size] * 3
    True
    >>> torch.distributed.destroy_process_group()
    """
    require_mpi()
    world, limit = MPI.COMM_WORLD, dist.default_pg_timeout if timeout is None else timeout

    def check() -> str:
        if not isinstance(limit, timedelta):
            raise TypeError(f"timeout must be a datetime.timedelta, not {type(limit).__name__}")
        if dist.is_initialized():
            raise ValueError("torch.distributed is started already; destroy_process_group() ends it")
        return "start torch.distributed"

    channel_of(world).agree_on(check)
    node = world.Split_type(MPI.COMM_TYPE_SHARED, world.rank)
    first = np.array([world.rank])
    node.Bcast(first)
    firsts = np.empty(world.size, first.dtype)
    world.Allgather(first, firsts)
    nodes = sorted(set(firsts.tolist()))
    local_rank, local_size = node.rank, node.size
    node.Free()
    store: dist.Store | None = None
    if world.rank == 0:
        host = os.environ.get("MASTER_ADDR") or ("127.0.0.1" if len(nodes) == 1 else socket.gethostname())
        store = dist.TCPStore(host, 0, world.size, is_master=True, wait_for_workers=False)
        told = json.dumps([host, store.port]).encode()
        address = np.frombuffer(told.ljust(_ADDRESS), np.uint8).copy()
    else:
        address = np.empty(_ADDRESS, np.uint8)
    world.Bcast(address)
    host, port = json.loads(address.tobytes().decode())
    if store is None:
        store = dist.TCPStore(host, port, world.size, is_master=False)
    os.environ.update(
        RANK=str(world.rank),
        WORLD_SIZE=str(world.size),
        LOCAL_RANK=str(local_rank),
        LOCAL_WORLD_SIZE=str(local_size),
        NODE_RANK=str(nodes.index(int(first[0]))),
        MASTER_ADDR=host,
        MASTER_PORT=str(port),
    )
    dist.init_process_group(BACKEND, store=store, rank=world.rank, world_size=world.size, timeout=limit)
