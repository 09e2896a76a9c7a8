"""Measure how much of the communication hides behind the computation, over a link slower than the computation.

    mpiexec -n 2 python -m mpi4py bench/overlap.py            needs torch; prints a table
    mpiexec -n 2 python -m mpi4py bench/overlap.py FILE.json  and saves it

Every message arrives late: not before its bytes have crossed a link of a given rate, one message after the other. The
rate is set so that communicating alone takes a given multiple of computing alone. Waiting for such a link takes no
processor, as waiting for a network takes none. Computing alone, communicating alone, and whole steps, serial and
overlapped, take turns. Times are medians over the rounds of the slowest rank's.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

import mpiagg
from mpiagg.benchmarks import machine
from mpiagg.transport import Channel

# The link is between two nodes; ranks of one would share memory and send nothing.
os.environ["MPIAGG_NODES"] = "1,1"
COMM = MPI.COMM_WORLD
ROUNDS = 15
SLOWER = (1.0, 2.0, 3.0, 4.0)
WIDTH, DEPTH, BATCH = 512, 12, 256
BUCKET_BYTES = 2 * 2**20


class Link:
    """What crosses it, crosses at its rate, one message after the other."""

    def __init__(self) -> None:
        self.seconds_per_byte = 0.0
        self.free_at = 0.0

    def arrival(self, nbytes: float) -> float:
        """Return when a message that is sent now will be there."""
        self.free_at = max(self.free_at, time.perf_counter()) + nbytes * self.seconds_per_byte
        return self.free_at


class LateRequest:
    """A persistent receive whose message is there when the link has carried it."""

    def __init__(self, request: MPI.Prequest, nbytes: float, link: Link) -> None:
        self.request, self.nbytes, self.link, self.arrival = request, nbytes, link, 0.0

    def Start(self) -> None:  # noqa: N802 - as MPI's
        """Post the receive."""
        self.arrival = self.link.arrival(self.nbytes)
        self.request.Start()

    def Test(self) -> bool:  # noqa: N802 - MPI's name
        """Return whether the message is there."""
        return time.perf_counter() >= self.arrival and self.request.Test()

    def Free(self) -> None:  # noqa: N802 - MPI's name
        """Free the request."""
        self.request.Free()


LINK = Link()


def make_late() -> None:
    """Make every message of every plan late."""
    receive_init = Channel.receive_init

    def late(channel: Channel, chunk: Any, peer: int, tag: int, *, cut: bool = True) -> Any:
        requests = list(receive_init(channel, chunk, peer, tag, cut=cut))
        for request in requests:
            yield LateRequest(request, chunk.nbytes / len(requests), LINK)

    Channel.receive_init = late  # type: ignore[method-assign]  # stands for a slow link


def network() -> torch.nn.Module:
    """Return a perceptron of equal layers."""
    layers: list[torch.nn.Module] = []
    for _ in range(DEPTH):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers)


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes on the slowest rank."""
    COMM.Barrier()
    LINK.free_at = 0.0
    start = time.perf_counter()
    call()
    return float(COMM.allreduce(time.perf_counter() - start, MPI.MAX))


def timing(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Let calls take turns, and return the median of each in milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS + 2):
        for name, call in calls.items():
            taken = seconds(call)
            if turn >= 2:
                times[name].append(1e3 * taken)
    return {name: statistics.median(values) for name, values in times.items()}


def gradients() -> list[dict[str, Any]]:
    """Measure gradients in DDP, with hooks that launch buckets during the backward pass."""
    torch.manual_seed(0)
    alone, module = network(), network()
    x = torch.randn(BATCH, WIDTH)

    def compute(model: Any) -> None:
        for parameter in model.parameters():
            parameter.grad = None
        model(x).square().mean().backward()

    rows = []
    with (
        mpiagg.DDP(module, bucket_bytes=BUCKET_BYTES) as ddp,
        mpiagg.DDP(network(), bucket_bytes=BUCKET_BYTES, overlap=False) as serial,
    ):

        def step() -> None:
            compute(ddp)
            ddp.sync_gradients()

        def serial_step() -> None:
            compute(serial)
            serial.sync_gradients()

        compute(serial)  # there are gradients from now on
        nbytes = sum(parameter.numel() * 4 for parameter in module.parameters()) * 2 * (COMM.size - 1) / COMM.size
        computing = timing({"compute": lambda: compute(alone)})["compute"] / 1e3
        for slower in SLOWER:
            LINK.seconds_per_byte = slower * computing / nbytes
            calls = {
                "compute": lambda: compute(alone),
                "communicate": serial.overlapped_sync_gradients,
                "serial step": serial_step,
                "overlapped step": step,
            }
            rows.append({"what": "gradients in DDP", "slower": slower, **timing(calls)})
    return rows


def weights() -> list[dict[str, Any]]:
    """Measure weights, averaged with a peer while the gradient is computed."""
    torch.manual_seed(0)
    module = network()
    x = torch.randn(BATCH, WIDTH)
    arrays = [parameter.detach().numpy() for parameter in module.parameters()]

    def compute() -> None:
        module(x).square().mean().backward()

    rows = []
    computing = timing({"compute": compute})["compute"] / 1e3
    with mpiagg.Decentralized() as gossip:

        def step() -> None:
            gossip.start(arrays)
            compute()
            gossip.wait()

        def serial_step() -> None:
            compute()
            gossip.aggregate(arrays)

        for slower in SLOWER:
            LINK.seconds_per_byte = slower * computing / sum(x.nbytes for x in arrays)
            calls = {
                "compute": compute,
                "communicate": lambda: gossip.aggregate(arrays),
                "serial step": serial_step,
                "overlapped step": step,
            }
            rows.append({"what": "weights by shift_one", "slower": slower, **timing(calls)})
    return rows


def main() -> None:
    """Measure, print and save."""
    torch.set_num_threads(1)
    make_late()
    rows = gradients() + weights()
    for row in rows:
        row["ratio"] = row["overlapped step"] / max(row["compute"], row["communicate"])
    if COMM.rank == 0:
        for row in rows:
            print(
                ", ".join(f"{key} {value if isinstance(value, str) else round(value, 2)}" for key, value in row.items())
            )
        if len(sys.argv) > 1:
            saved = {"machine": machine.facts(), "ranks": COMM.size, "rounds": ROUNDS, "unit": "ms", "rows": rows}
            Path(sys.argv[1]).write_text(json.dumps(saved, indent=1) + "\n")


if __name__ == "__main__":
    main()
