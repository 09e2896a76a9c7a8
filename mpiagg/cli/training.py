"""The demo's work on the ranks: training on handwritten digits, and the same training done serially."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from sklearn.datasets import load_digits

import mpiagg
from mpiagg.cli.aggregators import AGGREGATORS
from mpiagg.cli.network import Labels, Momentum, Network, Values
from mpiagg.cli.settings import DemoSettings
from mpiagg.transport import channel_of

if TYPE_CHECKING:
    from mpi4py import MPI

HIDDEN: Final = 64
CLASSES: Final = 10
TIMED: Final = 50
"""So many all-reduces of the MPI library's are timed."""


class Digits(NamedTuple):
    """Images of 8 x 8 pixels, one a row, with values from 0 to 1; a quarter is held out for testing."""

    images: Values
    labels: Labels
    test_images: Values
    test_labels: Labels


@dataclass(frozen=True)
class TrainingResult:
    """What came out of a training, as rank 0 sees it.

    Attributes
    ----------
    settings : DemoSettings
    test_accuracy : float
        On the held-out digits, of the rank that does worst.
    difference_from_serial, difference_between_ranks : float
        The largest difference of any weight.
    losses : list of float
        The mean loss of each epoch.
    computing, communicating : list of float
        Seconds of each rank; communicating includes the wait for slower ranks.
    bytes_sent : list of int or None
        By each rank, for the aggregation; None where the MPI library does it, which does not tell.
    bytes_by_epoch : list of float
        What a rank had sent at the end of each epoch, on average.
    steps : int
        How often each rank has stepped its optimizer.
    serial_seconds : float
        What the same training took on rank 0 alone, while the others slept.
    serial_losses : list of float
        Its mean loss of each epoch.
    native_seconds : float
        What the MPI library's own all-reduce of the gradients would have taken in all steps, of the slowest rank.
    crowded : bool
        Whether more ranks than processors were on rank 0's node.
    """

    settings: DemoSettings
    test_accuracy: float
    difference_from_serial: float
    difference_between_ranks: float
    losses: list[float]
    computing: list[float]
    communicating: list[float]
    bytes_sent: list[int] | None
    bytes_by_epoch: list[float]
    steps: int
    serial_seconds: float = math.nan
    serial_losses: list[float] = field(default_factory=list)
    native_seconds: float = math.nan
    crowded: bool = False

    @property
    def share_of_communication(self) -> float:
        """How much of the ranks' time went into communicating, and waiting for slower ranks."""
        return sum(self.communicating) / (sum(self.computing) + sum(self.communicating))

    @property
    def ranks(self) -> int:
        """How many ranks trained."""
        return len(self.computing)

    def as_json(self) -> dict[str, Any]:
        """Return everything as numbers, strings, lists and dictionaries."""
        return {**asdict(self), "ranks": self.ranks}


def load(seed: int) -> Digits:
    """Return the digits, shuffled and divided by ``seed``."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    images, labels = images[order] / 16, labels[order]
    held_out = len(labels) // 4
    return Digits(images[held_out:], labels[held_out:], images[:held_out], labels[:held_out])


def nothing() -> None:
    """Do nothing."""


class Trainer:
    """Trains a network on one rank's share of every batch.

    Parameters
    ----------
    settings : DemoSettings
    digits : Digits
    rank, size : int
        Which share is this rank's.
    after_epoch : callable
        Called when an epoch is over.
    """

    def __init__(
        self,
        settings: DemoSettings,
        digits: Digits,
        rank: int = 0,
        size: int = 1,
        after_epoch: Callable[[], object] = nothing,
    ) -> None:
        self.settings, self.digits, self.rank, self.size = settings, digits, rank, size
        self.network = Network(digits.images.shape[1], HIDDEN, CLASSES, settings.seed)
        self.losses = np.zeros(settings.epochs)
        self.bytes_by_epoch = np.zeros(settings.epochs)
        self._sent = self._sent_before = 0
        self.computing = self.communicating = 0.0
        momentum = AGGREGATORS[settings.aggregator].momentum
        self._optimizer = Momentum(self.network.parameters(), settings.learning_rate, momentum)
        self._after_epoch = after_epoch
        random = np.random.default_rng(settings.seed)
        self._orders = [random.permutation(len(digits.labels)) for _ in range(settings.epochs)]
        self._steps = -(-len(digits.labels) // settings.batch_size)

    @property
    def steps(self) -> int:
        """How many steps the epochs of the settings have."""
        return self._steps * self.settings.epochs

    def train(
        self,
        before_step: Callable[[], object] = nothing,
        after_step: Callable[[], object] = nothing,
        bytes_sent: Callable[[], int] = int,
    ) -> None:
        """Train for the epochs of the settings; the first two callbacks communicate, the last tells how much."""
        for step in range(self.steps):
            self.step(step, before_step, after_step)
            self.end_step(step, bytes_sent())

    def step(self, step: int, before: Callable[[], object] = nothing, after: Callable[[], object] = nothing) -> None:
        """Take a step; the callbacks communicate, before and after the weights change."""
        start, already = time.perf_counter(), self.communicating
        epoch, number = divmod(step, self._steps)
        order, first = self._orders[epoch], number * self.settings.batch_size
        self.losses[epoch] += self._backward(order[first : first + self.settings.batch_size]) / len(order)
        self._communicate(before)
        self._optimizer.step()
        self._communicate(after)
        self.computing += time.perf_counter() - start - (self.communicating - already)

    def end_step(self, step: int, bytes_sent: int) -> None:
        """Keep what has been sent so far, if the step was the last of its epoch."""
        epoch, number = divmod(step, self._steps)
        self._sent = self._sent_before + bytes_sent
        if number == self._steps - 1:
            self.bytes_by_epoch[epoch] = self._sent
            self._after_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return the weights, how they move, and what has come of it so far, on this rank."""
        return {
            "ranks": self.size,
            "seconds": [self.computing, self.communicating],
            "bytes": self.bytes_by_epoch,
            "sent": self._sent,
            "weights": [parameter.data for parameter in self.network.parameters()],
            "velocities": [velocity for _, velocity in self._optimizer.moving],
            "losses": self.losses,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, of more ranks if some have died: what their shares have lost counts as the others'."""
        self.losses[:] = state["losses"] * (state["ranks"] / self.size)
        self.computing, self.communicating = state["seconds"]
        self.bytes_by_epoch[:] = state["bytes"]
        self._sent = self._sent_before = state["sent"]
        for (parameter, velocity), weights, kept in zip(
            self._optimizer.moving, state["weights"], state["velocities"], strict=True
        ):
            parameter.data[...], velocity[...] = weights, kept

    def _backward(self, batch: Labels) -> float:
        """Set the gradients of this rank's share of a batch, and return its part of the loss, summed over the batch.

        The batch's gradient is the sum over its images divided by their number, and the average over ranks is
        the sum over ranks divided by theirs. So that one equals the other, also where shares are uneven or empty,
        each rank takes the sum over its images, times the ranks, divided by the number of images of all ranks.
        """
        mine = np.array_split(batch, self.size)[self.rank]
        scale = self.size / len(batch)
        return self.network.backward(self.digits.images[mine], self.digits.labels[mine], scale) / scale

    def _communicate(self, callback: Callable[[], object]) -> None:
        start = time.perf_counter()
        callback()
        self.communicating += time.perf_counter() - start


def work(settings: DemoSettings, comm: MPI.Intracomm, after_epoch: Callable[[], object]) -> TrainingResult | None:
    """Train on all ranks, then serially on rank 0, and compare; collective.

    Returns
    -------
    TrainingResult or None
        On rank 0 the result; None elsewhere.
    """
    trainer = Trainer(settings, load(settings.seed), comm.rank, comm.size, after_epoch)
    # A training that diverges is told of at the end; NumPy need not complain of it step by step.
    with np.errstate(all="ignore"):
        _train_together(trainer, comm)
        return together(trainer, comm)


def together(trainer: Trainer, comm: MPI.Intracomm) -> TrainingResult | None:
    """Return on rank 0 what has come out on all ranks, and None elsewhere; collective."""
    digits, weights = trainer.digits, trainer.network.weights()
    accuracy = trainer.network.accuracy(digits.test_images, digits.test_labels)
    facts = [accuracy, trainer.computing, trainer.communicating, *trainer.losses, *trainer.bytes_by_epoch]
    # The MPI library's own collective: what is checked must not take part in the check.
    everyone = np.empty((comm.size, weights.size + len(facts)))
    comm.Gather(np.concatenate([weights, facts]), everyone)
    native = _native_seconds(comm, weights.size) * trainer.steps
    result = None
    if comm.rank == 0:
        crowded = channel_of(comm).node.crowded
        result = replace(
            _compare(trainer.settings, digits, everyone, weights.size), native_seconds=native, crowded=crowded
        )
    _wait_asleep(comm)
    return result


def _native_seconds(comm: MPI.Intracomm, length: int) -> float:
    """Return what the MPI library's own all-reduce of so many values takes, of the slowest rank; collective."""
    from mpi4py import MPI  # noqa: PLC0415 - only a process that is a rank may load MPI

    vector, taken = np.zeros(length), []
    for _ in range(TIMED):
        comm.Barrier()
        start = time.perf_counter()
        MPI.Intracomm.Allreduce(comm, MPI.IN_PLACE, vector)
        taken.append(time.perf_counter() - start)
    slowest = np.array(taken)
    MPI.Intracomm.Allreduce(comm, MPI.IN_PLACE, slowest, op=MPI.MAX)
    return float(np.median(slowest))


def _wait_asleep(comm: MPI.Intracomm) -> None:
    """Wait for all ranks and leave the processor to them: the serial training is timed; collective."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.01)


def _train_together(trainer: Trainer, comm: MPI.Intracomm) -> None:
    """Train with the aggregator of the settings."""
    settings, parameters = trainer.settings, trainer.network.parameters()
    with AGGREGATORS[settings.aggregator].make(comm, settings.algorithm) as aggregation:

        def bytes_sent() -> int:
            return aggregation.bytes_sent

        if aggregation.aggregates == "weights":
            # Every rank steps on its own gradients, and its weights meet those of others afterwards.
            weights = [parameter.data for parameter in parameters]
            trainer.train(after_step=lambda: aggregation.aggregate(weights), bytes_sent=bytes_sent)
            return
        with mpiagg.DDP(trainer.network, comm, aggregation) as ddp:
            ddp.broadcast_parameters()
            for parameter, view in zip(parameters, ddp.gradient_views(), strict=True):
                parameter.grad = view
            trainer.train(before_step=ddp.sync_gradients, bytes_sent=bytes_sent)


def _compare(settings: DemoSettings, digits: Digits, everyone: Values, count: int) -> TrainingResult:
    """Train serially and return how that and all ranks differ; ``everyone`` has a row of weights and facts a rank."""
    serial = Trainer(settings, digits)
    serial.train()
    weights, facts = everyone[:, :count], everyone[:, count:]
    accuracies, computing, communicating = facts[:, :3].T
    losses, bytes_by_epoch = np.split(facts[:, 3:], 2, axis=1)
    return TrainingResult(
        settings=settings,
        test_accuracy=float(accuracies.min()),
        difference_from_serial=float(np.abs(weights - serial.network.weights()).max()),
        difference_between_ranks=float((weights.max(axis=0) - weights.min(axis=0)).max()),
        losses=losses.sum(axis=0).tolist(),
        computing=computing.tolist(),
        communicating=communicating.tolist(),
        bytes_sent=None if settings.algorithm == "native" else bytes_by_epoch[:, -1].astype(np.int64).tolist(),
        bytes_by_epoch=bytes_by_epoch.mean(axis=0).tolist(),
        steps=serial.steps,
        serial_seconds=serial.computing,
        serial_losses=serial.losses.tolist(),
    )
