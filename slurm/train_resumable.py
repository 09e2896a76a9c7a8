"""Training that stops when it is told to, and goes on where it was: as train.py, with mpiagg.Loop around it.

    mpiexec -n 4 python slurm/train_resumable.py --checkpoint line.checkpoint --result weights.npy

SIGTERM or SIGUSR1 stops it, at a step that all ranks agree on and with a checkpoint; started again, it goes on from
there, and the result is what it would have been without. Under Slurm: see requeue.sbatch.
"""

import signal

# What comes while the imports below take their time waits until there is a loop, which then lets it through.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})

# ruff: noqa: E402 - the imports come after that
import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import mpiagg

WANTED = np.array([2.0, -1.0, 0.5])
LEARNING_RATE = 0.01
MOMENTUM = 0.9


class Training:
    """What mpiagg.Loop trains: a step, and as a state whatever the next steps depend on.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks that train; fewer than before if some have died.
    pause : float
        Seconds that each step waits, to have time to try things out.
    """

    def __init__(self, comm: MPI.Intracomm, pause: float) -> None:
        self.comm, self.pause = comm, pause
        self.weights = np.zeros(WANTED.size)
        self.velocity = np.zeros(WANTED.size)
        self.ddp = mpiagg.DDP([self.weights], comm)
        (self.gradient,) = self.ddp.gradient_views()

    def step(self, step: int) -> None:
        """Take a step. Its batch is drawn from the numbers of step and rank, so no generator need be saved."""
        random = np.random.default_rng([step, self.comm.Get_rank()])
        x = random.normal(size=(100, WANTED.size))
        y = x @ WANTED + 0.1 * random.normal(size=len(x))
        self.gradient[:] = x.T @ (x @ self.weights - y) / len(x)
        self.ddp.sync_gradients()
        self.velocity[:] = MOMENTUM * self.velocity + self.gradient
        self.weights -= LEARNING_RATE * self.velocity
        time.sleep(self.pause)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {"weights": self.weights, "velocity": self.velocity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.weights[:], self.velocity[:] = state["weights"], state["velocity"]
        if self.comm.Get_rank() == 0:
            print("goes on from a checkpoint", flush=True)

    def free(self) -> None:
        """Give back what is held; collective."""
        self.ddp.free()


def main() -> None:
    """Train to the end, or until told to stop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="where the state is kept")
    parser.add_argument("--result", type=Path, required=True, help="where the weights go when all steps are taken")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that each step waits")
    options = parser.parse_args()

    with mpiagg.Loop(
        lambda comm: Training(comm, options.pause), checkpoint=options.checkpoint, checkpoint_every=100
    ) as loop:
        loop.run(options.steps)
        training = loop.trained
        if loop.comm.Get_rank() == 0:
            print(f"{loop.comm.Get_size()} ranks: {'stopped' if loop.stopped else 'ended'} after step {loop.step}")
            if not loop.stopped:
                print(f"weights {training.weights.round(3)}, wanted {WANTED}")
                whole = options.result.with_suffix(".part.npy")
                np.save(whole, training.weights)
                whole.replace(options.result)  # in one step: who finds it finds all of it
        training.free()


if __name__ == "__main__":
    main()
