"""A mixture-of-experts layer in NumPy: each rank has an expert, and tokens travel to it and back by ``alltoallv``.

Run it with ``mpiexec -n 4 python docs/examples/mixture_of_experts.py``. A gate, the same on all ranks, chooses an
expert for each token. How many tokens go to which rank is another number at each step. The gradients of what an expert
has made go to it the same way. Those of the gate are averaged over the ranks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

import mpiagg

Array = npt.NDArray[np.float64]

WIDTH, HIDDEN, TOKENS, STEPS, RATE = 8, 32, 256, 150, 0.1


class Expert:
    """Two layers with a ReLU between them."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.first = rng.normal(0, WIDTH**-0.5, (WIDTH, HIDDEN))
        self.second = rng.normal(0, HIDDEN**-0.5, (HIDDEN, WIDTH))

    def forward(self, x: Array) -> Array:
        """Return what the expert makes of tokens, one a row."""
        self.x, self.h = x, np.maximum(x @ self.first, 0)
        return self.h @ self.second

    def backward(self, gradient: Array, rate: float) -> None:
        """Take a step; the gradient of the tokens is not needed, since there is no layer below."""
        of_h = gradient @ self.second.T * (self.h > 0)
        self.second -= rate * self.h.T @ gradient
        self.first -= rate * self.x.T @ of_h


class Mixture:
    """A layer with an expert on each rank, of which a gate takes one for each token."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.gate = np.random.default_rng(0).normal(0, 1, (WIDTH, comm.size))  # the same on all ranks
        self.expert = Expert(seed=1 + comm.rank)

    def forward(self, x: Array) -> Array:
        """Return what the experts make of this rank's tokens, each times the probability that its expert had."""
        scores = x @ self.gate
        chances = np.exp(scores - scores.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        chosen = chances.argmax(axis=1)
        order = np.argsort(chosen, kind="stable")  # the tokens for rank 0 first, then those for rank 1, ...
        sent = np.bincount(chosen, minlength=self.comm.size)
        received = mpiagg.alltoall(sent, comm=self.comm)
        there = mpiagg.alltoallv(x[order], sent, received, comm=self.comm)
        back = mpiagg.alltoallv(self.expert.forward(there), received, sent, comm=self.comm)
        y = np.empty_like(x)
        y[order] = back
        self.seen = x, chances, chosen, order, sent, received, y
        return y * chances[np.arange(len(x)), chosen, None]

    def backward(self, gradient: Array, rate: float) -> None:
        """Take a step of the experts and the gate."""
        x, chances, chosen, order, sent, received, y = self.seen
        rows = np.arange(len(x))
        weight = chances[rows, chosen, None]
        there = mpiagg.alltoallv((gradient * weight)[order], sent, received, comm=self.comm)
        self.expert.backward(there, rate)
        # The probability of the chosen expert, by the scores of all.
        of_scores = -chances * weight
        of_scores[rows, chosen] += weight[:, 0]
        of_scores *= (gradient * y).sum(axis=1, keepdims=True)
        self.gate -= rate * mpiagg.allreduce(x.T @ of_scores, op="avg", comm=self.comm)


def alone(x: Array, gate: Array, first: Array, second: Array) -> Array:
    """Return what a process makes of tokens that has the weights of all experts."""
    scores = x @ gate
    chances = np.exp(scores - scores.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    chosen = chances.argmax(axis=1)
    hidden = np.maximum(np.einsum("tw,twh->th", x, first[chosen]), 0)
    return np.einsum("th,thw->tw", hidden, second[chosen]) * chances[np.arange(len(x)), chosen, None]


def main() -> None:
    """Train the layer to turn tokens around, and compare what it makes with what a process alone would make."""
    world = MPI.COMM_WORLD
    layer, rng = Mixture(world), np.random.default_rng(100 + world.rank)
    losses = []
    for step in range(STEPS):
        x = rng.normal(size=(TOKENS, WIDTH))
        wrong = layer.forward(x) + x[:, ::-1]
        losses.append(float(mpiagg.allreduce(np.mean(wrong**2), op="avg", comm=world)))
        layer.backward(2 * wrong / TOKENS, RATE)
        if world.rank == 0 and step % 25 == 0:
            print(f"step {step:3d}: loss {losses[-1]:.3f}")
    y = layer.forward(x)
    first, second = (mpiagg.gather(weights, comm=world) for weights in (layer.expert.first, layer.expert.second))
    if first is not None and second is not None:  # on the root
        off = float(np.abs(y - alone(x, layer.gate, first, second)).max())
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; off what one process makes by {off:.1e}")
        if losses[-1] > losses[0] / 2 or off > 1e-12:
            raise AssertionError("the layer has not learnt, or is another than that of one process")


if __name__ == "__main__":
    main()
