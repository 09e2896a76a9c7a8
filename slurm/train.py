"""Data-parallel training in thirty lines: a straight line through noisy points, each rank with points of its own.

    mpiexec -n 4 python slurm/train.py

Under Slurm: see cpu.sbatch.
"""

import numpy as np
from mpi4py import MPI

import mpiagg

WANTED = np.array([2.0, -1.0, 0.5])
STEPS = 200
LEARNING_RATE = 0.1


def main() -> None:
    """Train, and let rank 0 tell how far the weights are from the wanted ones."""
    comm = MPI.COMM_WORLD
    random = np.random.default_rng(comm.rank)
    x = random.normal(size=(1000, WANTED.size))
    y = x @ WANTED + 0.1 * random.normal(size=len(x))

    weights = random.normal(size=WANTED.size)
    with mpiagg.DDP([weights], comm) as ddp:
        ddp.broadcast_parameters()
        (gradient,) = ddp.gradient_views()
        for _ in range(STEPS):
            gradient[:] = x.T @ (x @ weights - y) / len(x)
            ddp.sync_gradients()
            weights -= LEARNING_RATE * gradient

    if comm.rank == 0:
        error = np.abs(weights - WANTED).max()
        print(f"{comm.size} ranks: weights {weights.round(3)}, largest error {error:.4f}")


if __name__ == "__main__":
    main()
