"""MuLoCo in NumPy: Muon on each rank, and every few steps the average of what they have moved, in 2 bits.

Run it with ``mpiexec -n 4 python docs/examples/muloco.py``. Each rank has data of its own, made by one network that all
are to find. Muon steps the matrices for ``PERIOD`` steps. Then an outer Nesterov momentum moves the common point by the
average of the ranks' differences from it. What 2 bits lose of a difference is added to the next: steps of Muon are
spread over all directions of a matrix, so that little of them is lost for long.

Source: Therien, Huang, Rish and Belilovsky, "MuLoCo: Muon is a practical inner optimizer for DiLoCo", 2025, arXiv
2505.23725.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

import mpiagg
from mpiagg.optimizers import Muon

Array = npt.NDArray[np.float32]

WIDTH, HIDDEN, BATCH, STEPS, PERIOD = 16, 64, 64, 400, 10


def layers(seed: int) -> list[Array]:
    """Return the two matrices of a network."""
    random = np.random.default_rng(seed)
    shapes = (WIDTH, HIDDEN), (HIDDEN, WIDTH)
    return [(random.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32) for shape in shapes]


def forward(weights: list[Array], x: Array) -> tuple[Array, Array]:
    """Return what is in the middle of the network, and what it makes of x."""
    middle = np.tanh(x @ weights[0])
    return middle, middle @ weights[1]


def gradients(weights: list[Array], x: Array, wanted: Array) -> tuple[float, list[Array]]:
    """Return the mean squared error, and its gradients."""
    middle, y = forward(weights, x)
    error = (y - wanted) * np.float32(2 / y.size)
    inner = error @ weights[1].T * (1 - middle**2)
    return float(np.mean((y - wanted) ** 2)), [x.T @ inner, middle.T @ error]


def main() -> None:
    """Train, and tell on rank 0 how it went."""
    comm = MPI.COMM_WORLD
    random = np.random.default_rng(comm.rank)
    teacher, weights = layers(1), layers(2)
    muon = Muon(lr=0.02)
    losses = []
    with mpiagg.LocalSGD(
        comm, period=PERIOD, outer_learning_rate=0.7, outer_momentum=0.6, wire="u2", error_feedback=True
    ) as muloco:
        for _ in range(STEPS):
            x = random.standard_normal((BATCH, WIDTH)).astype(np.float32)
            loss, slopes = gradients(weights, x, forward(teacher, x)[1])
            muon.step(weights, slopes)
            muloco.aggregate(weights)
            losses.append(loss)
        sent = muloco.bytes_sent
    first, last = (comm.allreduce(np.mean(part)) / comm.size for part in (losses[:10], losses[-10:]))
    every = sum(x.nbytes for x in weights) * STEPS * 2 * (comm.size - 1) / comm.size
    if comm.rank == 0:
        fewer = f"{every / sent:.0f} times fewer bytes than an all-reduce a step" if sent else "nothing to send"
        print(f"loss {first:.3f} at first, {last:.3f} at last; {fewer}")
    if not last < first / 5:
        raise RuntimeError(f"it has not learnt: the loss is {last}")


if __name__ == "__main__":
    main()
