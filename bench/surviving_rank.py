"""A rank of ``bench/surviving.py``: trains under ``mpiagg.Loop`` until it is killed or told to stop.

    python -m mpi4py -m bench.surviving_rank FOLDER JOB [respawn]

Each rank leaves its process id in FOLDER, and the rank that is number 0 at the time a line for each step. With
``respawn`` ranks are started in the places of those that died.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

import mpiagg

SHAPES = ((128, 256), (256,), (256, 256), (256,), (256, 64), (64,))
LEARNING_RATE = 0.02
COMMIT_EVERY, CHECKPOINT_EVERY, COMPARE_EVERY = 10, 100, 10


class Training:
    """Descends a quadratic, with noise of each rank's own; a step takes some milliseconds."""

    def __init__(self, comm: mpiagg.Comm, log: Path) -> None:
        self.comm, self._log = comm, log
        self.weights = [np.zeros(shape) for shape in SHAPES]
        self.ddp = mpiagg.DDP(self.weights, comm)

    def step(self, step: int) -> None:
        """Take a step, and write down when it was over."""
        random = np.random.default_rng([step, self.comm.rank])
        gradients = [each - 1 + random.normal(size=each.shape) for each in self.weights]
        self.ddp.sync_gradients(gradients)
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight[...] -= LEARNING_RATE * gradient
        if step % COMPARE_EVERY == 0:
            self._compare(step)
        if self.comm.rank == 0:
            far = float(np.mean([np.abs(each - 1).mean() for each in self.weights]))
            line = {"at": time.time(), "step": step, "ranks": self.comm.size, "far": far}
            with self._log.open("a") as log:
                log.write(json.dumps(line) + "\n")

    def _compare(self, step: int) -> None:
        """Raise AssertionError unless all ranks have the same bits."""
        mine = np.array([zlib.crc32(b"".join(each.tobytes() for each in self.weights))])
        told = mpiagg.allgather(mine, comm=self.comm)
        if (told != mine).any():
            raise AssertionError(f"weights differ in step {step}: {told.ravel().tolist()}")

    def state_dict(self) -> dict[str, Any]:
        """Return the weights."""
        return {"weights": self.weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from weights, which the ranks have in common."""
        for mine, kept in zip(self.weights, state["weights"], strict=True):
            mine[...] = kept
        self.ddp.broadcast_parameters()

    def free(self) -> None:
        """Give back what belongs to the communicator."""
        self.ddp.free()


def main() -> None:
    """Train until the end that somebody else decides."""
    folder, job, respawn = Path(sys.argv[1]), sys.argv[2], sys.argv[3:] == ["respawn"]
    # By process: ranks that are started later have the same numbers in worlds of their own.
    pid = folder / f"{job}-{os.getpid()}.pid"
    if not respawn:
        pid.write_text(str(os.getpid()))
    log = folder / f"{job}-{os.getpid()}.steps"
    with mpiagg.Loop(
        lambda comm: Training(comm, log),
        commit_every=COMMIT_EVERY,
        checkpoint=folder / "checkpoint",
        checkpoint_every=CHECKPOINT_EVERY,
        respawn=respawn,
    ) as loop:
        # Who dies while it starts can keep the others in MPI_Comm_spawn: see docs/failures.md.
        pid.write_text(str(os.getpid()))
        loop.run(10**9)
        if loop.trained is not None:
            cast(Training, loop.trained).free()


if __name__ == "__main__":
    main()
