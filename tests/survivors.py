"""Ranks that die, and others that go on: ``mpiexec --with-ft ulfm ... survivors.py FOLDER CASE``.

Who comes to the end writes what it has seen to FOLDER, as ``R.json``, R being its rank of the world.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import mpiagg
from mpiagg.checkpoints import loop as loop_module
from mpiagg.checkpoints.newcomers import is_new
from mpiagg.cli.aggregators import AGGREGATORS
from mpiagg.transport import channel_of, process
from mpiagg.watch.recorder import SUBJECT

WORLD = MPI.COMM_WORLD


def die():
    os.kill(os.getpid(), signal.SIGKILL)


# -- calls

CALLS = {
    "barriers": lambda comm: mpiagg.allreduce(np.ones(10), comm=comm),
    "messages": lambda comm: mpiagg.allreduce(np.ones(10), algorithm="ring", comm=comm),
    "long": lambda comm: mpiagg.allreduce(np.ones(300_000), algorithm="tree", comm=comm),
    "native": lambda comm: mpiagg.allreduce(np.ones(10), algorithm="native", comm=comm),
    "meeting": lambda comm: channel_of(comm).agree("go on"),
    "memory": lambda comm: mpiagg.empty(100, comm=comm),
    "mpi4py": lambda comm: comm.Allreduce(MPI.IN_PLACE, np.ones(100_000)),
    "request": lambda comm: comm.Iallreduce(MPI.IN_PLACE, np.ones(10)).Wait(),
}


def dead_in(call, comm):
    """Return which ranks a call says to have died."""
    with pytest.raises(mpiagg.RankFailedError, match="died") as caught:
        call(comm)
    return caught.value.ranks


def lose(comm, victims, first):
    """Lose ranks in a call; return what the others are told, then and in every other call, and a new communicator."""
    comms = {name: mpiagg.Comm(comm) for name in CALLS}
    plans = {name: mpiagg.allreduce_init(np.ones(9), comm=each) for name, each in comms.items()}
    for name, call in CALLS.items():
        call(comms[name])
    comm.Barrier()
    if comm.rank in victims:
        die()
    told = {}
    start = time.perf_counter()
    for name in (first, *CALLS):
        for call in (CALLS[name], lambda _, name=name: plans[name]()):
            told.setdefault(name, []).append(dead_in(call, comms[name]))
    seconds = time.perf_counter() - start
    new = {}
    for name, each in comms.items():
        plans[name].free()
        new[name] = each.shrink()
        each.Free()
        for algorithm in ("auto", "ring"):
            found = mpiagg.allreduce(np.full(50, new[name].rank + 1.0), algorithm=algorithm, comm=new[name])
            assert (found == sum(range(new[name].size + 1))).all(), found
    kept = new.pop(first)
    for each in new.values():
        each.Free()
    return {"told": told, "seconds": seconds, "size": kept.size}, kept


def calls():
    """Lose one rank in a call at barriers, two at a time in one of messages, then others."""
    comm, seen = mpiagg.Comm(WORLD), []
    for victims, first in ({3}, "barriers"), ({0, 2}, "messages"), ({0}, "meeting"):
        found, comm = lose(comm, victims, first)
        seen.append(found)
    return seen


# -- training


class Training:
    """One training with every aggregation, each with weights of its own."""

    names = (
        *("allreduce", "error-feedback", "sparsified-topk", "power-sgd"),
        *("local-sgd", "local-sgd-outer", "decentralized", "neighbor-average", "low-precision"),
    )

    def __init__(self, comm):
        self.comm = comm
        self.weights = {name: np.ones((12, 9)) for name in self.names}
        self.aggregations = {name: AGGREGATORS[name].make(comm, "auto") for name in self.names}
        self.ddps = {
            name: mpiagg.DDP([self.weights[name]], comm, aggregation)
            for name, aggregation in self.aggregations.items()
            if aggregation.aggregates == "gradients"
        }

    def step(self, step):
        if (WORLD.rank, step) in {(1, 7), (3, 13)}:
            die()
        for name, aggregation in self.aggregations.items():
            gradient = gradient_of(WORLD.rank, step, self.weights[name])
            if name in self.ddps:
                self.ddps[name].sync_gradients([gradient])
            self.weights[name] -= 0.1 * gradient
            if name not in self.ddps:
                aggregation.aggregate([self.weights[name]])

    def state_dict(self):
        kept = {name: aggregation.state_dict() for name, aggregation in self.aggregations.items()}
        return {"weights": self.weights, "aggregations": kept}

    def load_state_dict(self, state):
        for name in self.names:
            self.weights[name][...] = state["weights"][name]
            self.aggregations[name].load_state_dict(state["aggregations"][name])
        for ddp in self.ddps.values():
            ddp.broadcast_parameters()

    def free(self):
        for each in (*self.ddps.values(), *self.aggregations.values()):
            each.free()


def gradient_of(rank, step, weights):
    return np.random.default_rng([rank, step]).normal(size=weights.shape) + 0.1 * weights


def mean(comm, array):
    return MPI.Intracomm(comm).allreduce(array) / comm.size


def residuals_of(aggregation):
    """Return what a rank has kept back of the only tensor, as one vector; zeros if nothing is."""
    (memory,) = aggregation.state_dict().get("memories", [{"state": {}}])
    kept = next((memory["state"][key] for key in ("errors", "kept", "residuals") if key in memory["state"]), [])
    return np.concatenate([np.ravel(each) for each in kept]) if kept else np.zeros(12 * 9)


def training():
    """Train while two ranks die, one after the other, and show that the averages of the others are right."""
    loop = mpiagg.Loop(Training, WORLD, commit_every=3)
    loop.run(20)
    trained, comm = loop.trained, loop.comm
    # What came in must have gone out, or be kept for later: over the ranks that are left.
    for name, ddp in trained.ddps.items():
        for step in range(100, 103):
            gradient = gradient_of(WORLD.rank, step, trained.weights[name])
            wanted = mean(comm, gradient.ravel() + residuals_of(trained.aggregations[name]))
            gradients = [gradient]
            ddp.sync_gradients(gradients)
            found = gradients[0].ravel() + mean(comm, residuals_of(trained.aggregations[name]))
            np.testing.assert_allclose(found, wanted, atol=1e-6, err_msg=name)
    # Mixing keeps the mean, but for rounding to 8 bits, and brings all to it.
    spreads = {}
    for name in ("local-sgd", "decentralized", "neighbor-average", "low-precision"):
        weights = trained.weights[name].copy()
        weights += WORLD.rank
        wanted = mean(comm, weights)
        for _ in range(40):
            trained.aggregations[name].aggregate([weights])
            near = 1e-2 if name == "low-precision" else 1e-12
            np.testing.assert_allclose(mean(comm, weights), wanted, atol=near, err_msg=name)
        spreads[name] = float(np.abs(weights - wanted).max())
    exact = trained.weights["allreduce"]
    everyone = MPI.Intracomm(comm).allgather({name: trained.weights[name].tobytes() for name in trained.ddps})
    seen = {
        "steps": loop.step,
        "size": comm.size,
        "lost": [list(failure.ranks) for failure in loop.failures],
        "same": all(each == everyone[0] for each in everyone),
        "spreads": spreads,
        "difference": float(np.abs(exact - alone()).max()),
    }
    trained.free()
    loop.free()
    return seen


class Counting:
    """Counts the ranks in each step."""

    def __init__(self, comm):
        self.comm, self.sizes = comm, []
        if WORLD.rank == 3:
            die()  # while what is trained is made

    def step(self, _):
        self.sizes.append(float(mpiagg.allreduce(np.ones(1), comm=self.comm)[0]))

    def state_dict(self):
        return {"sizes": list(self.sizes)}

    def load_state_dict(self, state):
        self.sizes = list(state["sizes"])


def making():
    """Lose a rank before a loop is made, one while its communicator is, one before it runs, one while it begins."""
    if WORLD.rank == 0:
        die()
    if WORLD.rank == 1:
        loop_module.Comm = lambda _: die()
    loop = mpiagg.Loop(Counting)
    if WORLD.rank == 2:
        die()
    loop.run(6)
    sizes = loop.trained.sizes
    lost = [list(failure.ranks) for failure in loop.failures]
    loop.free()
    return {"sizes": sizes, "lost": lost}


class Keeping(Counting):
    """Keeps its parameters once on the node, where a rank dies in the middle."""

    def __init__(self, comm):
        self.comm, self.sharded = comm, None
        self.load_state_dict({"0": np.ones(8)})

    def step(self, step):
        if step == 4 and WORLD.rank == 1:
            die()
        self.sharded.step([np.ones(8)])

    def state_dict(self):
        return self.sharded.weights()

    def load_state_dict(self, state):
        self.free()
        sgd = mpiagg.optimizers.SGD(lr=0.125)
        self.sharded = mpiagg.Sharded([state["0"].copy()], sgd, stage=3, comm=self.comm)

    def free(self):
        if self.sharded is not None:
            self.sharded.free()


def keeping():
    """Lose a rank, with it its part of memory that the others go on with."""
    loop = mpiagg.Loop(Keeping)
    loop.run(8)
    seen = {"weights": loop.trained.state_dict()["0"].tolist(), "lost": [list(each.ranks) for each in loop.failures]}
    loop.trained.free()
    loop.free()
    return seen


class Asked(Counting):
    """Is asked to stop in a step in which a rank dies: the others learn of both only when they have gone back."""

    def __init__(self, comm):
        self.comm, self.sizes = comm, []

    def step(self, step):
        if step == 7 and WORLD.size == self.comm.size:
            if WORLD.rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            if WORLD.rank == 1:
                die()
        super().step(step)


def asking():
    """Stop a training in whose last step a rank has died; what is saved is what the others have gone back to."""
    folder = Path(sys.argv[1]) / "checkpoint"
    loop = mpiagg.Loop(Asked, checkpoint=folder, commit_every=3)
    loop.run(20)
    seen = {"stopped": loop.stopped, "step": loop.step, "saved": mpiagg.load_checkpoint(folder, loop.comm)["step"]}
    loop.free()
    return seen


class Growing(Counting):
    """Loses a rank whenever all three have been together for five steps, at first; then asks to stop."""

    # Once the second of the world it began with, and once the first, which has started new ranks.
    victims = ((1, 6), (0, 12))

    def __init__(self, comm):
        self.comm, self.sizes = comm, []

    def step(self, step):
        together = self.sizes.count(3.0)
        if not is_new() and any(WORLD.rank == rank and together == count for rank, count in self.victims):
            die()
        if self.comm.rank == 0 and together == 18:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.comm.size < 3:
            time.sleep(0.02)  # there is no hurry
        super().step(step)


def growing():
    """Go on while ranks die and others take their places, until nearly all are others than at first."""
    folder = Path(sys.argv[1]) / "checkpoint"
    native = [by_the_library(WORLD)]
    with mpiagg.Loop(Growing, checkpoint=folder, commit_every=3, respawn=True) as loop:
        loop.run(10**6)
        native.append(by_the_library(loop.comm))
        sizes = loop.trained.sizes
        everyone = MPI.Intracomm(loop.comm).allgather((sizes, loop.step))
        same = all(each == everyone[0] for each in everyone)
        found = {"sizes": sizes, "step": loop.step, "same": same, "new": is_new(), "stopped": loop.stopped}
        return found | {"native": native}


def by_the_library(comm):
    """Whether a short all-reduce is the MPI library's own; collective."""
    mpiagg.allreduce(np.ones(1, np.int64), comm=comm)
    return "native" in process().recorder.entries[-1][SUBJECT].what


def alone():
    """Return the weights that all-reduced gradients lead to, computed by one process."""
    weights = np.ones((12, 9))
    for step in range(20):
        # Commits are after every third step: who dies in step 7 has taken part up to step 5.
        alive = [0, 1, 2, 3] if step < 6 else [0, 2, 3] if step < 12 else [0, 2]
        weights -= 0.1 * np.mean([gradient_of(rank, step, weights) for rank in alive], axis=0)
    return weights


if __name__ == "__main__":
    folder, case = sys.argv[1:]
    cases = {each.__name__: each for each in (calls, training, making, keeping, asking, growing)}
    seen = cases[case]()
    # The ranks of several worlds have the same number.
    name = os.getpid() if case == "growing" else WORLD.rank
    (Path(folder) / f"{name}.json").write_text(json.dumps(seen))
