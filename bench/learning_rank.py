"""A rank of ``bench/learning.py``: trains in several ways and has rank 0 save what comes of it.

    python -m mpi4py -m bench.learning_rank PART OUTPUT

PART is a :class:`bench.learning.Part`, as JSON; OUTPUT is the file in which records are kept.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from mpi4py import MPI

import mpiagg
from bench.learning import ALONE, LEARNING_RATES, MADE, TORCH, Part
from bench.learning_tasks import TASKS, Task
from mpiagg.benchmarks import machine
from mpiagg.benchmarks.gloo import Gloo
from mpiagg.transport import channel_of

COMM: Final = MPI.COMM_WORLD
WIRE: Final = Path("/sys/class/net/eth0/statistics/tx_bytes")
"""What has gone out of a virtual node."""


def task_of(part: Part, way: str) -> Task:
    """Return what is trained in a way; the optimizer has no momentum where the aggregation has it."""
    steps = part.steps if part.link is None else part.steps * (part.points + 1)
    settings = {"momentum": MADE[way].momentum} if way in MADE else {}
    if (part.task, way) in LEARNING_RATES:
        settings["learning_rate"] = LEARNING_RATES[part.task, way]
    return TASKS[part.task](part.split, COMM.rank, COMM.size, part.seed, steps, **settings)


class Training:
    """A model that is trained in one of the ways; making one is collective."""

    def __init__(self, task: Task, way: str) -> None:
        self.task, self.way = task, way
        self.model: Any = task.module
        self.steps = self.peak = 0
        self._sent = 0
        self._aggregation: mpiagg.Aggregation | None = None
        self._weights: list[Any] = []
        if way == TORCH:
            self.model = torch.nn.parallel.DistributedDataParallel(task.module)
        elif way != ALONE:
            self._aggregation = MADE[way].make(COMM, "auto")
            if self._aggregation.aggregates == "gradients":
                self.model = mpiagg.DDP(task.module, COMM, self._aggregation)
            else:
                self._weights = [parameter.detach().numpy() for parameter in task.module.parameters()]

    def step(self) -> None:
        """Take a step."""
        inputs, targets = self.task.examples(self.steps, COMM.rank)
        self.task.optimizer.zero_grad()
        self.task.loss(self.model(inputs), targets).backward()
        self.task.optimizer.step()
        self.task.schedule.step()
        if self._weights:
            assert self._aggregation is not None
            self._aggregation.aggregate(self._weights)
        self.steps += 1
        before, self._sent = self._sent, self.sent
        if self.steps > 1:
            self.peak = max(self.peak, self._sent - before)

    @property
    def sent(self) -> int:
        """How many bytes this rank has sent."""
        if self.way == TORCH:  # Gloo does not tell; a ring sends so much
            values = sum(parameter.numel() for parameter in self.task.module.parameters())
            return self.steps * 4 * 2 * (COMM.size - 1) * values // COMM.size
        return 0 if self._aggregation is None else self._aggregation.bytes_sent

    def free(self) -> None:
        """Give back what the ranks share."""
        if isinstance(self.model, mpiagg.DDP):
            self.model.free()
        if self._aggregation is not None:
            self._aggregation.free()


def follow(part: Part, way: str) -> dict[str, Any]:
    """Train to the end, and return how loss and accuracy went; collective."""
    training = Training(task_of(part, way), way)
    every, curve = max(1, part.steps // part.points), []
    start = time.perf_counter()
    for step in range(1, part.steps + 1):
        training.step()
        if step % every == 0 or step == part.steps:
            loss, accuracy = training.task.test()
            told = COMM.allgather((loss, accuracy, training.sent))
            losses, accuracies, sent = map(np.array, zip(*told, strict=True))
            mean = float(losses.mean())
            point = {"step": step, "loss": mean if np.isfinite(mean) else None, "accuracy": float(accuracies.min())}
            curve.append({**point, "bytes": float(sent.mean())})
    found = {"curve": curve, "wall_s": round(time.perf_counter() - start, 1), "digest": training.task.digest}
    found |= {"tokens_a_step": COMM.size * training.task.batch * training.task.tokens}
    found["peak_bytes"] = COMM.allreduce(training.peak, MPI.MAX)
    training.free()
    return found


def seconds(part: Part) -> dict[str, dict[str, Any]]:
    """Let all ways take turns of some steps, and return how long a step takes in each; collective.

    The first turn is not counted. A turn is as long as on the slowest rank.
    """
    trainings = {way: Training(task_of(part, way), way) for way in part.ways}
    turns: dict[str, list[tuple[float, float]]] = {way: [] for way in trainings}
    for _ in range(part.points + 1):
        for way, training in trainings.items():
            COMM.Barrier()
            before, start = _wire(), time.perf_counter()
            for _ in range(part.steps):
                training.step()
            taken = time.perf_counter() - start
            COMM.Barrier()
            turns[way].append((COMM.allreduce(taken, MPI.MAX), COMM.allreduce(_wire() - before, MPI.MAX)))
    found = {}
    for way, training in trainings.items():
        each = [taken / part.steps for taken, _ in turns[way][1:]]
        tokens = COMM.size * training.task.batch * training.task.tokens
        found[way] = {
            "step_s": median(each),
            "turns_s": [round(x, 6) for x in each],
            "tokens_a_second": tokens / median(each),
            "wire_bytes": median(sent for _, sent in turns[way][1:]) / part.steps,
            "bytes": COMM.allreduce(training.sent, MPI.SUM) / COMM.size / training.steps,
            "peak_bytes": COMM.allreduce(training.peak, MPI.MAX),
        }
    for training in trainings.values():
        training.free()
    return found


def _wire() -> int:
    return int(WIRE.read_text()) if WIRE.exists() else 0


def save(part: Part, way: str, found: dict[str, Any], path: Path) -> None:
    """Put a record in the place of that of the same part with other lengths; for rank 0."""
    key = {**part.settings, "way": way}
    saved = json.loads(path.read_text()) if path.exists() else {"records": []}
    names = ("task", "split", "link", "ranks", "seed", "way")
    others = [each for each in saved["records"] if any(each[name] != key[name] for name in names)]
    saved = {"machine": machine.facts(), "records": [*others, {**key, **found}]}
    new = path.with_suffix(".new")
    new.write_text(json.dumps(saved) + "\n")
    new.replace(path)


def main() -> None:
    """Train as the command line says."""
    part, output = Part(**json.loads(sys.argv[1])), Path(sys.argv[2])
    torch.set_num_threads(1)
    gloo = Gloo(COMM, channel_of(COMM).layout) if TORCH in part.ways else None
    digest = task_of(part, ALONE).digest
    if len(told := set(COMM.allgather(digest))) > 1:
        raise SystemExit(f"the ranks have other data each, of CRC-32 {sorted(told)}")
    if part.link is None:
        for way in part.ways:
            found = follow(part, way)
            if COMM.rank == 0:
                save(part, way, found, output)
                print(f"{part.task} {part.split} {COMM.size} {way}: {found['curve'][-1]}", flush=True)
    else:
        for way, found in seconds(part).items():
            if COMM.rank == 0:
                save(part, way, found, output)
                print(f"{part.task} {part.link} {COMM.size} {way}: {1e3 * found['step_s']:.1f} ms", flush=True)
    if gloo is not None:
        gloo.free()


if __name__ == "__main__":
    main()
