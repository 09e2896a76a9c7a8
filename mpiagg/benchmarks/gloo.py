"""A peer of the benchmark: torch.distributed's Gloo, on the same ranks."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import torch.distributed
from mpi4py import MPI

from mpiagg.arrays import Array
from mpiagg.benchmarks.contenders import Contender, Task, TimedCall
from mpiagg.common import machine
from mpiagg.schedules import Collective, Layout

INTERFACE: Final = "GLOO_SOCKET_IFNAME"
"""The environment variable that says over which network interface Gloo's ranks reach each other."""

_ADDRESS_BYTES: Final = 64


class Gloo:
    """A process group of torch.distributed on the ranks of a communicator; making one is collective.

    Parameters
    ----------
    comm : MPI.Intracomm
        All ranks of the world: torch knows one default group.
    layout : Layout
        Where they are. On one node they meet by the loopback interface.
    """

    def __init__(self, comm: MPI.Intracomm, layout: Layout) -> None:
        address = _own_address(alone=len(layout.nodes) == 1)
        store = None
        if comm.rank == 0:
            store = torch.distributed.TCPStore(address, 0, comm.size, is_master=True, wait_for_workers=False)
            address = f"{address}:{store.port}"
        told = np.frombuffer(address.encode().ljust(_ADDRESS_BYTES), np.uint8).copy()
        comm.Bcast(told)
        if store is None:
            host, _, port = told.tobytes().decode().strip().rpartition(":")
            store = torch.distributed.TCPStore(host, int(port), comm.size, is_master=False)
        torch.distributed.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)

    def free(self) -> None:
        """Give the process group back."""
        torch.distributed.destroy_process_group()

    def contender(self, task: Task) -> Contender:
        """Return the way that Gloo carries a task out, in place where it can.

        Raises
        ------
        ValueError
            On all ranks, if it cannot.
        """
        if fault := unserved(task.collective, task.dtype, task.op):
            raise ValueError(fault)
        return Contender("gloo", _call(task))


def unserved(collective: Collective, dtype: np.dtype[Any], op: str) -> str | None:
    """Return what keeps Gloo from a collective on arrays of a dtype, in words; None if nothing does."""
    if collective.moves or collective.prefix:
        return f"Gloo is not measured for {collective.value}"
    if dtype.name not in _DTYPES:
        return f"Gloo has no {dtype.name}"
    if collective.reduces and dtype.kind == "c" and op == "prod":
        return "Gloo has no products of complex numbers"
    return None


_DTYPES: Final = (
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("int8", "uint8", "int32", "int64"),
)


def _call(task: Task) -> TimedCall:
    group = torch.distributed
    x = _tensor(task.x)
    if task.collective is Collective.BROADCAST:
        return partial(group.broadcast, x, task.root)
    if task.collective is Collective.ALLGATHER:
        return partial(_named("all_gather_single", "all_gather_into_tensor"), _tensor(task.vector), x)
    ops = {"prod": group.ReduceOp.PRODUCT, "min": group.ReduceOp.MIN, "max": group.ReduceOp.MAX}
    op = ops.get(task.op, group.ReduceOp.SUM)
    if task.collective is Collective.ALLREDUCE:
        call, out = partial(group.all_reduce, x, op), x
    elif task.collective is Collective.REDUCE:
        call, out = partial(group.reduce, x, task.root, op), x
    else:
        if task.count % task.comm.size:
            raise ValueError("Gloo's reduce-scatter is for chunks of one length")
        assert task.out is not None
        out = _tensor(task.out)
        call = partial(_named("reduce_scatter_single", "reduce_scatter_tensor"), out, x, op)
    return partial(_average, call, out, task.comm.size) if task.op == "avg" else call


def _average(call: TimedCall, out: Any, size: int) -> None:
    """Divide the sum, for Gloo knows no average."""
    call()
    out.div_(size)


def _named(new: str, old: str) -> Callable[..., object]:
    """Return a function of torch.distributed by the name that this version has for it."""
    function: Callable[..., object] = getattr(torch.distributed, new, None) or getattr(torch.distributed, old)
    return function


def _tensor(array: Array) -> Any:
    """Return an array as a tensor on the same memory."""
    flat = array.reshape(-1)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(flat.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(flat)


def _own_address(*, alone: bool) -> str:
    """Return the address at which the others reach this rank, and tell Gloo its interface if nobody has.

    Parameters
    ----------
    alone : bool
        Whether all ranks are on one node.
    """
    addresses = machine.addresses()
    chosen = os.environ.get(INTERFACE, "").partition(",")[0]
    if chosen in addresses:
        return addresses[chosen]
    local = [name for name, address in addresses.items() if address.startswith("127.")]
    others = {name: address for name, address in addresses.items() if name not in local}
    if alone and local:
        chosen = local[0]
    else:
        own = _address_of_host()
        chosen = next((name for name, address in others.items() if address == own), next(iter(others), ""))
    if not chosen:
        return _address_of_host() or "127.0.0.1"
    os.environ[INTERFACE] = chosen
    return addresses[chosen]


def _address_of_host() -> str:
    """Return what the host's name means; nothing where it means nothing."""
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return ""
