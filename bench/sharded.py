"""Steps of sharded training beside DDP with a whole optimizer on every rank, and beside torch's FSDP2 on Gloo.

    mpiexec -n 2 python -m mpi4py bench/sharded.py [-o FILE.json] [--seconds 10] [--parts arrays,torch] [--scale 1]
    sudo python bench/cluster.py --nodes 2 --rate 1gbit -- python -m mpi4py bench/sharded.py [...]

``arrays``: gradients that are there already, as lists of float32 arrays; aggregated and stepped with by AdamW:
``mpiagg.DDP`` and a whole ``mpiagg.optimizers.AdamW``, and ``mpiagg.Sharded`` at stages 1, 2 and 3 (``once``: in memory
that the node has once; ``divided``: gathered, as between nodes).

``torch``: forward, backward and AdamW of a perceptron: ``mpiagg.DDP``, ``mpiagg.Sharded``, torch's DDP on Gloo and
FSDP2 on Gloo (each layer a unit), in one run. One thread a rank. A turn is some steps one after the other; with
``wait=False`` parameters arrive during the next forward pass, and those of the last step before the turn ends. How
much there is to overlap depends on ``--batch``, the examples of a rank, and ``--bucket-bytes``, as Sharded has it.

Blocks of steps in turn (``mpiagg.benchmarks.timing``), medians, in microseconds; beside them the bytes that a rank
holds by :meth:`mpiagg.Sharded.memory`. ``--scale 0.1`` takes smaller models, to try it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import mpiagg
from mpiagg.benchmarks import machine
from mpiagg.benchmarks.timing import Pace, medians
from mpiagg.ddp.ddp import BUCKET_BYTES

COMM = MPI.COMM_WORLD
LISTS = {"8 x 1 Mi": (8, 2**20), "200 x 16 Ki": (200, 2**14)}
"""How many arrays, and of how many elements."""

WIDTH, DEPTH, TURN = 1024, 8, 5
STAGES: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3, once": {"stage": 3},
    "stage 3, divided": {"stage": 3, "share": False},
}
UNAWAITED = "stage 2, wait=False"
OURS = (*STAGES, UNAWAITED)


def row(name: str, us: dict[str, float], held: dict[str, dict[str, int]]) -> dict[str, Any]:
    """Return what is saved of one model."""
    beside = {rival: us[rival] for rival in us if rival not in OURS}
    ratios = {f"{each} / {rival}": us[each] / time for each in OURS if each in us for rival, time in beside.items()}
    return {"model": name, "us": us, "ratios": ratios, "bytes": held}


def arrays(pace: Pace, scale: float) -> Iterator[dict[str, Any]]:
    """Measure lists of arrays."""
    for name, (count, length) in LISTS.items():
        shapes = [max(1, int(length * scale))] * count
        gradients = [np.full(shape, 1e-3, np.float32) for shape in shapes]

        def weights(shapes: list[int] = shapes) -> list[Any]:
            return [np.ones(shape, np.float32) for shape in shapes]

        with ExitStack() as stack:
            mine, optimizer = weights(), mpiagg.optimizers.AdamW()
            ddp = stack.enter_context(mpiagg.DDP(mine))

            def whole(
                ddp: Any = ddp,
                optimizer: Any = optimizer,
                mine: list[Any] = mine,
                gradients: list[Any] = gradients,
            ) -> None:
                ddp.sync_gradients(gradients)
                optimizer.step(mine, gradients)

            entries: dict[str, Callable[[], object]] = {"DDP and AdamW": whole}
            held = {}
            for stage, keywords in STAGES.items():
                training = stack.enter_context(mpiagg.Sharded(weights(), mpiagg.optimizers.AdamW(), **keywords))
                entries[stage] = partial(training.step, gradients)
                training.step(gradients)
                held[stage] = training.memory()
            yield row(f"arrays, {name}", medians(COMM, entries, pace), held)


def modules(pace: Pace, scale: float, batch: int, bucket_bytes: int) -> Iterator[dict[str, Any]]:
    """Measure a perceptron of torch's."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch  # noqa: PLC0415 - an extra
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - as above

    from mpiagg.benchmarks.gloo import Gloo  # noqa: PLC0415 - needs torch
    from mpiagg.transport import channel_of  # noqa: PLC0415 - of no use elsewhere

    torch.set_num_threads(1)
    gloo = Gloo(COMM, channel_of(COMM).layout)
    width = max(8, int(WIDTH * scale))
    x = torch.randn(batch, width)

    def make() -> torch.nn.Sequential:
        torch.manual_seed(0)
        return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(DEPTH)))

    def steps(run: Any, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(TURN):
            optimizer.zero_grad()
            run(x).square().mean().backward()
            optimizer.step()

    def sharded_steps(training: Any, *, wait: bool) -> None:
        for _ in range(TURN):
            training(x).square().mean().backward()
            training.step(wait=wait)
        training.wait()

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-6)

    entries: dict[str, Callable[[], object]] = {}
    held = {}
    with ExitStack() as stack:
        ddp = stack.enter_context(mpiagg.DDP(make()))
        entries["DDP and AdamW"] = partial(steps, ddp, adamw(ddp.parameters()))
        theirs = torch.nn.parallel.DistributedDataParallel(make())
        entries["torch's DDP on Gloo"] = partial(steps, theirs, adamw(theirs.parameters()))
        fsdp = make()
        for module in (*fsdp, fsdp):
            fully_shard(module)
        entries["FSDP2 on Gloo"] = partial(steps, fsdp, adamw(fsdp.parameters()))
        for name in OURS:
            keywords = STAGES["stage 2" if name == UNAWAITED else name]
            training = stack.enter_context(mpiagg.Sharded(make(), adamw, bucket_bytes=bucket_bytes, **keywords))
            entries[name] = partial(sharded_steps, training, wait=name != UNAWAITED)
            entries[name]()
            held[name] = training.memory()
        us = {name: time / TURN for name, time in medians(COMM, entries, pace).items()}
        yield row(f"{DEPTH} layers of {width} x {width}, batches of {batch}", us, held)
    gloo.free()


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--seconds", type=float, default=10, help="for each model")
    parser.add_argument("--parts", default="arrays,torch")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--bucket-bytes", type=int, default=BUCKET_BYTES)
    asked = parser.parse_args()
    pace = Pace(iterations=20_000, warmup=3, seconds=asked.seconds)
    parts = {"arrays": arrays, "torch": partial(modules, batch=asked.batch, bucket_bytes=asked.bucket_bytes)}
    rows = []
    for part in asked.parts.split(","):
        for each in parts[part](pace, asked.scale):
            rows.append(each)
            if COMM.rank == 0:
                print(each["model"], "  ".join(f"{key} {value:.0f}" for key, value in each["us"].items()))
                print("  ", "  ".join(f"{key} {value:.2f}" for key, value in each["ratios"].items()), flush=True)
    if COMM.rank == 0 and asked.output:
        saved = {"machine": machine.facts(), "ranks": COMM.size, "rows": rows}
        asked.output.write_text(json.dumps(saved, indent=1) + "\n")


if __name__ == "__main__":
    main()
