"""Time torch.distributed with the backend mpiagg beside Gloo: the same calls of torch's, in turns, in one job.

    mpiexec -n 2 python -m mpi4py bench/torch_backend.py FILE.json [SECONDS [DEVICE]]

Each collective runs on plain tensors, as users have them, and the all-reduce also on tensors in memory that the ranks
of a node share. A turn is a few calls after a barrier; the file has the medians over all turns of what the slowest rank
took, in us. The all-reduce of the MPI library, by mpi4py, is beside the others. On the device ``cuda``, which ranks may
share, there are the collectives that Gloo has there.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mpiagg.torch
from mpiagg.benchmarks import machine

COMM = MPI.COMM_WORLD
KIB, MIB = 2**10, 2**20
if len(set(COMM.allgather(socket.gethostname()))) == 1:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
SIZES = (8, 64, KIB, 16 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 32 * MIB, 64 * MIB)
Call = Callable[[], object]


def calls(nbytes: int, group: dist.ProcessGroup, memory: str, device: str) -> dict[str, Call]:
    """Return the calls of a group for an input of so many bytes, in ordinary or registered memory."""
    size = COMM.size
    count = max(size, nbytes // 4) // size * size

    def tensor(length: int) -> torch.Tensor:
        if memory == "registered":
            return group.allocate_tensor(length, dtype=torch.float32, device=torch.device(device)).zero_()
        return torch.zeros(length, device=device)

    x, out, part = tensor(count), tensor(count), tensor(count // size)
    found: dict[str, Call] = {"all_reduce": lambda: dist.all_reduce(x, group=group)}
    if memory == "plain":
        found["broadcast"] = lambda: dist.broadcast(x, 0, group=group)
    if memory == "plain" and device == "cpu":
        found |= {
            "all_gather": lambda: dist.all_gather_single(out, part, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_single(part, x, group=group),
            "all_to_all": lambda: dist.all_to_all_single(out, x, group=group),
        }
    return found


def seconds(call: Call, repeats: int) -> float:
    """Return how long a call takes, on the slowest rank."""
    COMM.Barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return COMM.allreduce((time.perf_counter() - start) / repeats, op=MPI.MAX)


def in_turns(contenders: dict[str, Call], limit: float, repeats: int) -> dict[str, float]:
    """Return the medians of what calls take in turns, in us; collective."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for call in contenders.values():
        call()
    start = time.perf_counter()
    while COMM.bcast(len(times[next(iter(times))]) < 5 or time.perf_counter() - start < limit):
        for name, call in contenders.items():
            times[name].append(seconds(call, repeats))
    return {name: round(1e6 * float(np.median(each)), 1) for name, each in times.items()}


def collectives(groups: dict[str, dist.ProcessGroup], limit: float, device: str) -> list[dict[str, object]]:
    """Return the times of all collectives at all sizes."""
    rows: list[dict[str, object]] = []
    for nbytes in SIZES:
        sets = {name: calls(nbytes, group, "plain", device) for name, group in groups.items()}
        registered = calls(nbytes, groups["mpiagg"], "registered", device)
        x = np.zeros(max(1, nbytes // 4), np.float32)
        out = np.empty_like(x)
        for collective in sets["gloo"]:
            contenders = {name: found[collective] for name, found in sets.items()}
            if collective == "all_reduce":
                contenders["mpiagg, registered"] = registered[collective]
                contenders["mpi4py"] = lambda x=x, out=out: COMM.Allreduce(x, out)
            times = in_turns(contenders, limit, max(1, min(100, MIB // nbytes)))
            rows.append({"collective": collective, "size": nbytes, "time_us": times})
            if COMM.rank == 0:
                print(f"{collective:16} {nbytes:9}", times, f"{times['mpiagg'] / times['gloo']:.2f}", flush=True)
    return rows


def network() -> torch.nn.Sequential:
    """Return a network of some millions of parameters."""
    layers = [torch.nn.Linear(1024, 1024) for _ in range(8)]
    return torch.nn.Sequential(*layers)


def steps(groups: dict[str, dist.ProcessGroup], limit: float) -> list[dict[str, object]]:
    """Return the times of a training step of torch's DDP and of FSDP2."""
    inputs = torch.randn(4, 1024)

    def step(run: torch.nn.Module) -> Call:
        def call() -> None:
            run(inputs).square().mean().backward()
            for parameter in run.parameters():
                parameter.grad = None

        return call

    def sharded(name: str, *, registered: bool) -> torch.nn.Module:
        mesh = dist.DeviceMesh.from_group(groups[name], "cpu", mesh=torch.arange(COMM.size))
        model = network()
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
            if registered:
                module.set_allocate_memory_from_process_group_for_comm(True)
        return model

    alone = step(network())
    ddp = {name: step(DistributedDataParallel(network(), process_group=group)) for name, group in groups.items()}
    shared = DistributedDataParallel(network(), process_group=groups["mpiagg"])
    mpiagg.torch.share_buckets(shared)
    ddp["mpiagg, registered"] = step(shared)
    ddp["mpiagg.DDP"] = step(mpiagg.DDP(network()))
    fsdp = {name: step(sharded(name, registered=False)) for name in groups}
    fsdp["mpiagg, registered"] = step(sharded("mpiagg", registered=True))
    rows: list[dict[str, object]] = []
    for name, contenders in {"DDP": ddp, "FSDP2": fsdp}.items():
        times = in_turns({**contenders, "alone": alone}, 8 * limit, 1)
        rows.append({"step": name, "time_us": times})
        if COMM.rank == 0:
            print(name, times, flush=True)
    return rows


def main() -> None:
    """Measure, and print and save what came out."""
    limit, device = float(sys.argv[2]) if sys.argv[2:] else 2.0, sys.argv[3] if sys.argv[3:] else "cpu"
    torch.set_num_threads(1)
    mpiagg.torch.init_process_group()
    groups = {"mpiagg": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    saved = {"machine": machine.facts(), "torch": torch.__version__, "ranks": COMM.size}
    saved["collectives"] = collectives(groups, limit, device)
    if device == "cpu":
        saved["steps"] = steps(groups, limit)
    else:
        saved["device"] = torch.cuda.get_device_name(device)
    if COMM.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(saved, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
