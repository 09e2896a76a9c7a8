"""A rank of ``bench/random_faults.py``: it trains a small model, and brings a fault about in the middle of that.

    python -m bench.random_fault_rank FOLDER DRAW

DRAW is what was drawn, as JSON, or ``null``. A rank that comes to the end of its program writes FOLDER/R.end, R being
its rank of the world. What it prints goes to whoever has started it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import mpiagg
from bench.fault_means import LITTLE, crowd, fill_shm, own_port
from bench.random_fault_draws import COMMIT_EVERY, SHAPES, STEPS, Draw, gradients_of, start
from mpiagg.cli.aggregators import AGGREGATORS
from mpiagg.launch.launchers import started_by

SIGNALS = {
    "SIGKILL": signal.SIGKILL,
    "SIGKILL, survived": signal.SIGKILL,
    "SIGKILL of the launcher": signal.SIGKILL,
    "SIGTERM": signal.SIGTERM,
    "SIGSTOP": signal.SIGSTOP,
    "SIGSTOP, SIGCONT": signal.SIGSTOP,
}


class OnPurposeError(RuntimeError):
    """The exception that is raised."""


class Fault:
    """What goes wrong on one rank, once.

    Parameters
    ----------
    draw : Draw or None
        What was drawn, if anything.
    folder : Path
        Where this rank says that it is about to be stopped.
    """

    def __init__(self, draw: Draw | None, folder: Path) -> None:
        self._draw = draw if draw is not None and draw.rank == MPI.COMM_WORLD.rank else None
        self._folder = folder
        self._ports: list[int] = []
        if draw is not None and draw.fault == "unauthenticated connections":
            self._ports = MPI.COMM_WORLD.allgather(own_port())
        self._acts: dict[str, Callable[[Draw], object]] = {
            "exception": self._raise,
            "sys.exit": lambda draw: sys.exit(3 * (draw.step % 2)),
            "delay": lambda draw: time.sleep(draw.seconds),
            "unauthenticated connections": lambda draw: crowd(("idle", "talk")[draw.step % 2], self._ports),
            "full /dev/shm": lambda draw: fill_shm(LITTLE * (1 + draw.step % 3)),
        }

    def due(self, step: int, *faults: str) -> bool:
        """Whether one of these faults is to be brought about in a step; only once."""
        draw = self._draw
        if draw is None or draw.step != step or draw.fault not in faults:
            return False
        self._draw = None
        return True

    def at(self, step: int, place: str) -> None:
        """Bring about what has to happen at a place of a step."""
        draw = self._draw
        if draw is None or (draw.step, draw.place) != (step, place):
            return
        if place == "in":
            if self.due(step, "exception"):
                main = threading.main_thread().ident
                interrupt = ctypes.pythonapi.PyThreadState_SetAsyncExc
                _later(draw.moment, lambda: interrupt(ctypes.c_ulong(main), ctypes.py_object(OnPurposeError)))
            elif self.due(step, *SIGNALS):
                _later(draw.moment, lambda: self._signal(draw.fault))
        elif self.due(step, *SIGNALS):
            self._signal(draw.fault)
        elif draw.fault in self._acts and self.due(step, draw.fault):
            self._acts[draw.fault](draw)

    @staticmethod
    def _raise(draw: Draw) -> None:
        del draw
        raise OnPurposeError

    def _signal(self, fault: str) -> None:
        process = started_by() if "launcher" in fault else os.getpid()
        (self._folder / "signalled").write_text(f"{process}")
        os.kill(process, SIGNALS[fault])


def _later(seconds: float, call: Callable[[], object]) -> None:
    """Call in another thread, after a moment."""

    def wait() -> None:
        time.sleep(seconds)
        call()

    threading.Thread(target=wait, daemon=True).start()


class Training:
    """What the loop trains: a model with momentum, and an aggregation."""

    def __init__(self, comm: mpiagg.Comm, aggregation: str, fault: Fault) -> None:
        self.comm, self._fault = comm, fault
        self.weights, self.velocity = start(), [np.zeros(shape) for shape in SHAPES]
        self.aggregation = AGGREGATORS[aggregation].make(comm, "auto")
        self.first: int | None = None
        self._ddp: mpiagg.DDP | None = None
        if self.aggregation.aggregates == "gradients":
            self._ddp = mpiagg.DDP(self.weights, comm, self.aggregation, bucket_bytes=200, check_finite=True)

    def step(self, step: int) -> None:
        """Take a step."""
        fault = self._fault
        self.first = step if self.first is None else self.first
        fault.at(step, "first")
        gradients = gradients_of(self.weights, MPI.COMM_WORLD.rank, step)
        if fault.due(step, "NaN"):
            gradients[1][2] = np.nan
        if fault.due(step, "shape"):
            gradients[1] = np.ones(7)
        if fault.due(step, "dtype"):
            gradients[0] = gradients[0].astype(np.float32)
        fault.at(step, "before")
        fault.at(step, "in")
        if self._ddp is not None:
            self._ddp.sync_gradients(gradients)
            fault.at(step, "after")
        for weight, velocity, gradient in zip(self.weights, self.velocity, gradients, strict=True):
            velocity[...] = 0.5 * velocity + gradient
            weight[...] -= 0.1 * velocity
        if self._ddp is None:
            self.aggregation.aggregate(self.weights)
            fault.at(step, "after")
        self._statistics(step)

    def _statistics(self, step: int) -> None:
        """Do what programs do besides: two short collectives, whose results become part of the weights."""
        fault, size = self._fault, np.array([float(np.abs(self.weights[0]).max())])
        loss, algorithm = np.full(3, 1e-3 * step), ("auto", "ring")[step % 2]
        calls = [("sum", loss), ("max", size)]
        if fault.due(step, "order"):
            calls.reverse()
        if fault.due(step, "op"):
            calls[0] = ("min", loss)
        if fault.due(step, "length"):
            calls[0] = ("sum", np.ones(4))
        if fault.due(step, "purpose"):
            self.comm.Dup()
        if fault.due(step, "thread"):
            threading.Thread(target=mpiagg.allreduce, args=(loss, "sum"), kwargs={"comm": self.comm}).start()
        if fault.due(step, "extra"):
            mpiagg.allreduce(np.ones(50), "min", comm=self.comm, algorithm=algorithm)
        found = {op: mpiagg.allreduce(x, op, comm=self.comm, algorithm=algorithm) for op, x in calls}
        self.weights[1][0] += 1e-3 * (found["sum"][0] / self.comm.size + found["max"][0])

    def state_dict(self) -> dict[str, Any]:
        """Return all that must be saved."""
        state = {"weights": self.weights, "velocity": self.velocity}
        return {**state, "aggregation": self.aggregation.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        for mine, kept in ((self.weights, state["weights"]), (self.velocity, state["velocity"])):
            for each, saved in zip(mine, kept, strict=True):
                each[...] = saved
        self.aggregation.load_state_dict(state["aggregation"])

    def free(self) -> None:
        """Give back what belongs to a communicator."""
        if self._ddp is not None:
            self._ddp.free()
        self.aggregation.free()


def main() -> None:
    """Train, and say what came of it."""
    folder, told = Path(sys.argv[1]), json.loads(sys.argv[2])
    draw = Draw(**told["draw"]) if told["draw"] else None
    fault, rank, begun = Fault(draw, folder), MPI.COMM_WORLD.rank, []

    def make(comm: mpiagg.Comm) -> Training:
        begun.append(Training(comm, told["aggregation"], fault))
        return begun[-1]

    loop = mpiagg.Loop(
        make,
        commit_every=COMMIT_EVERY,
        checkpoint=folder / "checkpoint",
        checkpoint_every=COMMIT_EVERY,
    )
    loop.run(STEPS)
    trained = loop.trained
    assert isinstance(trained, Training)
    everything = b"".join(each.tobytes() for each in (*trained.weights, *trained.velocity))
    end = {
        "digest": hashlib.sha256(everything).hexdigest(),
        "weights": [each.tolist() for each in trained.weights],
        "step": loop.step,
        "stopped": loop.stopped,
        "size": loop.comm.size,
        "first": [each.first for each in begun],
        "lost": [list(failure.ranks) for failure in loop.failures],
    }
    trained.free()
    loop.free()
    (folder / f"{rank}.end").write_text(json.dumps(end))


if __name__ == "__main__":
    main()
