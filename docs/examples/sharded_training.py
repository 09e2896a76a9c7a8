"""Sharded training in NumPy: each rank keeps a part of the parameters, the gradients and the optimizer's state.

Run it with ``mpiexec -n 4 python docs/examples/sharded_training.py``. A network of three layers learns a function, with
its parameters gathered layer by layer (stage 3). Then the training is saved, and goes on from what was saved.
"""

from __future__ import annotations

import tempfile
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

import mpiagg

Array = npt.NDArray[np.float64]

WIDTHS, SAMPLES, STEPS = (4, 32, 32, 2), 64, 200
LAYERS = [[2 * layer, 2 * layer + 1] for layer in range(len(WIDTHS) - 1)]


def parameters() -> list[Array]:
    """Return a matrix and a bias for each layer, the same on all ranks."""
    rng = np.random.default_rng(0)
    shapes = pairwise(WIDTHS)
    return [x for rows, columns in shapes for x in (rng.normal(0, rows**-0.5, (rows, columns)), np.zeros(columns))]


def step(training: Any, x: Array, y: Array) -> float:
    """Take a step on this rank's batch, and return its loss."""
    inputs = [x]
    for layer, (matrix, bias) in training.in_order():
        z = inputs[-1] @ matrix + bias
        inputs.append(z if layer == len(LAYERS) - 1 else np.tanh(z))
    error = inputs.pop() - y
    gradient = 2 * error / len(x)
    for layer, (matrix, _) in training.in_order(reverse=True):
        own = [inputs[layer].T @ gradient, gradient.sum(axis=0)]
        gradient = gradient @ matrix.T * (1 - inputs[layer] ** 2)
        training.reduce(layer, own)  # on its way, while the next layer is computed
    training.step()
    return float((error**2).mean())


def main() -> None:
    """Train, save, and go on."""
    comm = MPI.COMM_WORLD
    rng = np.random.default_rng(1 + comm.rank)  # each rank has other data
    losses = []

    def train(training: Any, steps: int) -> None:
        for _ in range(steps):
            x = rng.normal(size=(SAMPLES, WIDTHS[0]))
            y = np.stack([np.sin(x[:, 0]) * x[:, 1], x[:, 2] * x[:, 3]], axis=1)
            losses.append(step(training, x, y))

    def sharded() -> Any:
        return mpiagg.Sharded(parameters(), mpiagg.optimizers.AdamW(lr=1e-2), stage=3, layers=LAYERS, clip_norm=1.0)

    with sharded() as training:
        train(training, STEPS)
        folder = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
        mpiagg.save_checkpoint(folder, training.state_dict())
        held = training.memory()
    with sharded() as training:
        training.load_state_dict(mpiagg.load_checkpoint(folder))
        train(training, STEPS)
    whole = sum(x.nbytes for x in parameters())
    if comm.rank == 0:
        print(f"parameters {whole} B, their optimizer's state {2 * whole} B; of it this rank keeps {held['state']} B")
        print(f"loss at first {losses[0]:.3f}, at the end {np.mean(losses[-20:]):.3f}")


if __name__ == "__main__":
    main()
