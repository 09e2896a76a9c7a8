"""What DDP costs, beside doing it by hand: gradients as lists of arrays, and steps of small and large torch modules.

    mpiexec -n 2 python -m mpi4py bench/ddp_cost.py [-o FILE.json] [--seconds 2] [--parts arrays,torch]

``arrays``: ``sync_gradients`` of lists of float32 arrays, the same arrays at each call and others at each call
(``fresh``), and of the views of the buckets; beside concatenating them, ``MPI_Allreduce`` of the vector, a division,
and copying back.

``torch``: a step (forward, backward, and what makes the gradients those of all ranks) of multilayer perceptrons, by
DDP, by hand (one buffer, ``MPI_Allreduce``), by torch's DDP on Gloo, and on one rank's own gradients alone. What is
said is how much longer than that last one each takes. One thread a rank.

Blocks of calls in turn (``mpiagg.benchmarks.timing``), medians, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import mpiagg
from mpiagg.benchmarks import machine
from mpiagg.benchmarks.timing import Pace, medians

COMM = MPI.COMM_WORLD
LISTS = ((200, 64), (20, 4096), (1, 12_800), (2000, 64), (10, 1_000_000))
"""How many arrays, and of how many elements."""

WIDTHS = {"66 KB": (64, 128, 64, 10), "8 MB": (1024, 1024, 1000, 10), "67 MB": (4096, 3072, 1024, 1000)}
"""The layers of the perceptrons, by the bytes of their parameters."""

BATCH = 16


def by_hand(gradients: list[Any]) -> None:
    """Average arrays with those of the other ranks, as a program of one's own would."""
    vector = np.concatenate([gradient.ravel() for gradient in gradients])
    COMM.Allreduce(MPI.IN_PLACE, vector)
    vector /= COMM.size
    start = 0
    for gradient in gradients:
        gradient[...] = vector[start : start + gradient.size].reshape(gradient.shape)
        start += gradient.size


def lists(pace: Pace) -> Iterator[dict[str, Any]]:
    """Measure lists of arrays."""
    for count, length in LISTS:
        weights = [np.zeros(length, np.float32) for _ in range(count)]
        same = [np.zeros(length, np.float32) for _ in range(count)]
        fresh = cycle([[np.zeros(length, np.float32) for _ in range(count)] for _ in range(3)])
        with mpiagg.DDP(weights) as ddp, mpiagg.DDP(weights) as viewed:
            views = viewed.gradient_views()
            entries = {
                "by hand": lambda same=same: by_hand(same),
                "the same arrays": lambda ddp=ddp, same=same: ddp.sync_gradients(same),
                "fresh arrays": lambda ddp=ddp, fresh=fresh: ddp.sync_gradients(next(fresh)),
                "views": lambda viewed=viewed, views=views: viewed.sync_gradients(views),
            }
            yield {"arrays": count, "elements": length, "us": medians(COMM, entries, pace)}


def modules(pace: Pace) -> Iterator[dict[str, Any]]:
    """Measure steps of torch modules."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch  # noqa: PLC0415 - an extra

    from mpiagg.benchmarks.gloo import Gloo  # noqa: PLC0415 - needs torch
    from mpiagg.transport import channel_of  # noqa: PLC0415 - of no use elsewhere

    torch.set_num_threads(1)
    gloo = Gloo(COMM, channel_of(COMM).layout)
    for name, widths in WIDTHS.items():
        x = torch.randn(BATCH, widths[0])

        def make(widths: tuple[int, ...] = widths) -> torch.nn.Module:
            torch.manual_seed(0)
            layers: list[torch.nn.Module] = []
            for inputs, outputs in pairwise(widths):
                layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
            return torch.nn.Sequential(*layers[:-1])

        def step(module: torch.nn.Module, after: Callable[[], object], x: torch.Tensor = x) -> None:
            for parameter in module.parameters():
                parameter.grad = None
            module(x).square().mean().backward()
            after()

        def hand(module: torch.nn.Module) -> None:
            gradients = [parameter.grad for parameter in module.parameters()]
            vector = torch.cat([gradient.flatten() for gradient in gradients])
            COMM.Allreduce(MPI.IN_PLACE, vector.numpy())
            vector /= COMM.size
            for gradient, part in zip(gradients, vector.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))

        alone, handed, plain = make(), make(), make()
        with mpiagg.DDP(plain) as ddp, mpiagg.DDP(make(), overlap=False) as serial:
            theirs = torch.nn.parallel.DistributedDataParallel(make())
            entries = {
                "alone": partial(step, alone, lambda: None),
                "by hand": partial(step, handed, partial(hand, handed)),
                "DDP": partial(step, plain, ddp.sync_gradients),
                "DDP without overlap": partial(step, serial.module, serial.sync_gradients),
                "torch's DDP on Gloo": partial(step, theirs, lambda: None),
            }
            us = medians(COMM, entries, pace)
            added = {key: value - us["alone"] for key, value in us.items() if key != "alone"}
            yield {"module": name, "us": us, "added_us": added}
    gloo.free()


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--seconds", type=float, default=4, help="for each row")
    parser.add_argument("--parts", default="arrays,torch")
    asked = parser.parse_args()
    pace = Pace(iterations=20_000, warmup=5, seconds=asked.seconds)
    rows = []
    for part in asked.parts.split(","):
        for row in {"arrays": lists, "torch": modules}[part](pace):
            rows.append(row)
            if COMM.rank == 0:
                of = row.get("module") or f"{row['arrays']} x {row['elements']}"
                times = row.get("added_us") or row["us"]
                print(f"{of:>16}  " + "  ".join(f"{key} {value:.1f}" for key, value in times.items()), flush=True)
    if COMM.rank == 0 and asked.output:
        saved = {"machine": machine.facts(), "ranks": COMM.size, "rows": rows}
        asked.output.write_text(json.dumps(saved, indent=1) + "\n")


if __name__ == "__main__":
    main()
