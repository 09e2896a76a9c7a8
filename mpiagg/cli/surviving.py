"""The demo's training with a rank that dies in the middle of it, and others that go on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import numpy as np

import mpiagg
from mpiagg.cli.aggregators import AGGREGATORS
from mpiagg.cli.settings import DemoSettings
from mpiagg.cli.training import Trainer, TrainingResult, load, together
from mpiagg.transport.failures import NEEDED, active

if TYPE_CHECKING:
    from mpi4py import MPI


class Death(NamedTuple):
    """Which rank of the world dies, and in which step, the first being number 0."""

    rank: int
    step: int


class _Training:
    """What the loop trains: a trainer's network, with an aggregation."""

    def __init__(self, trainer: Trainer, comm: mpiagg.Comm, before_step: Callable[[int], object]) -> None:
        self.trainer, self._before_step = trainer, before_step
        name, network = trainer.settings.aggregator, trainer.network
        self.aggregation = AGGREGATORS[name].make(comm, trainer.settings.algorithm)
        self._ddp: mpiagg.DDP | None = None
        if self.aggregation.aggregates == "gradients":
            self._ddp = mpiagg.DDP(network, comm, self.aggregation)
            self._ddp.broadcast_parameters()
            for parameter, view in zip(network.parameters(), self._ddp.gradient_views(), strict=True):
                parameter.grad = view

    def step(self, step: int) -> None:
        """Take a step."""
        self._before_step(step)
        if self._ddp is None:
            weights = [parameter.data for parameter in self.trainer.network.parameters()]
            self.trainer.step(step, after=lambda: self.aggregation.aggregate(weights))
        else:
            self.trainer.step(step, before=self._ddp.sync_gradients)
        self.trainer.end_step(step, self.aggregation.bytes_sent)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the trainer, and of the aggregation."""
        return {"trainer": self.trainer.state_dict(), "aggregation": self.aggregation.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self.trainer.load_state_dict(state["trainer"])
        self.aggregation.load_state_dict(state["aggregation"])
        if self._ddp is not None:
            self._ddp.broadcast_parameters()

    def free(self) -> None:
        """Give back what belongs to a communicator."""
        if self._ddp is not None:
            self._ddp.free()
        self.aggregation.free()


def work(
    settings: DemoSettings, world: MPI.Intracomm, death: Death, after_epoch: Callable[[], object]
) -> TrainingResult | None:
    """Train while a rank dies, then serially, and compare; collective.

    Returns
    -------
    TrainingResult or None
        On the first of the ranks that are left the result; None elsewhere.

    Raises
    ------
    click.UsageError
        If there is no such rank or step.
    click.ClickException
        If this job ends when a rank dies.
    """
    digits = load(settings.seed)
    steps = settings.epochs * -(-len(digits.labels) // settings.batch_size)
    if death.rank >= world.size or world.size < 2:
        raise click.UsageError(
            f"--kill-rank {death.rank}: that rank and another one are needed; there are {world.size}"
        )
    if death.step >= steps:
        raise click.UsageError(f"--at-step {death.step}: the training has {steps} steps")
    if not active():
        raise click.ClickException(NEEDED)
    began: list[float] = []

    def before_step(step: int) -> None:
        if step == death.step:
            began.append(time.perf_counter())
            if world.rank == death.rank:
                os.kill(os.getpid(), signal.SIGKILL)
        if step == death.step + 1:
            began.append(time.perf_counter())

    def make(comm: mpiagg.Comm) -> _Training:
        return _Training(Trainer(settings, digits, comm.rank, comm.size, after_epoch), comm, before_step)

    with np.errstate(all="ignore"):
        loop = mpiagg.Loop(make, world)
        loop.run(steps)
        assert isinstance(loop.trained, _Training)
        result = together(loop.trained.trainer, loop.comm)
    if result is not None:
        dead = ", ".join(str(rank) for failure in loop.failures for rank in failure.ranks)
        click.echo(
            f"Rank {dead} died in step {death.step}. The other {loop.comm.size} finished that step "
            f"{began[-1] - began[0]:.2f} s after they had first begun it."
        )
    loop.trained.free()
    loop.free()
    return result
