"""``mpiagg demo``: data-parallel training of a small network, checked against the same training done serially."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from click.core import ParameterSource

from mpiagg.cli.aggregators import AGGREGATORS
from mpiagg.cli.progress import progress
from mpiagg.cli.quantities import POSITIVE
from mpiagg.cli.settings import DemoSettings
from mpiagg.cli.variables import checked
from mpiagg.launch import job
from mpiagg.launch import start as launch
from mpiagg.schedules import Collective, algorithm

if TYPE_CHECKING:
    from mpi4py import MPI

MOST: Final = 7
"""Aggregators in one picture, beside the serial training."""

_EXAMPLES: Final = """\b
mpiagg demo                starts 4 ranks on this machine
mpiexec -n 8 mpiagg demo   is a rank of that job
mpiagg demo --aggregator allreduce --aggregator power-sgd   compares two
mpiagg demo --kill-rank 2 --at-step 50   goes on without that rank
"""


def _served(name: str) -> str:
    """Return the name of an all-reduction, or raise click.BadParameter."""
    try:
        if name not in ("auto", "native"):
            algorithm(name, ("auto", "native")).generator(Collective.ALLREDUCE)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return name


@click.command(epilog=_EXAMPLES)
@job.ranks_option(default=4)
@click.option(
    "--aggregator",
    "aggregators",
    type=click.Choice(list(AGGREGATORS)),
    metavar="NAME",
    multiple=True,
    default=("allreduce",),
    help=f"What averages over the ranks; repeatable, up to {MOST} times, to compare. {', '.join(AGGREGATORS)}.",
)
@click.option(
    "--algorithm",
    callback=lambda *passed: _served(passed[-1]),
    default="auto",
    help="How the allreduce aggregator does it.",
)
@click.option("--epochs", type=click.IntRange(min=1), default=20, help="How often each image is seen.")
@click.option("--batch-size", type=click.IntRange(min=1), default=32, help="Images a step, over all ranks.")
@click.option(
    "--learning-rate",
    type=POSITIVE,
    help="By default what suits the aggregator; 0.2 for most.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of the weights, the split and the batches.")
@click.option(
    "--plot",
    type=job.PictureFile(),
    default=Path("mpiagg-loss.png"),
    show_default=True,
    help="Where the loss curve goes: .png, .pdf or .svg; needs the extra `plot`.",
)
@click.option("--json", "json_file", type=job.OutputFile(), help="Save the numbers.")
@click.option(
    "--kill-rank", type=click.IntRange(min=0), help="A rank that dies, of which the others are to go on; with Open MPI."
)
@click.option("--at-step", type=click.IntRange(min=0), help="In which step it dies, from 0 on.  [default: 50]")
def demo(
    *,
    ranks: int,
    plot: Path,
    json_file: Path | None,
    learning_rate: float | None,
    aggregators: tuple[str, ...],
    kill_rank: int | None,
    at_step: int | None,
    **options: object,
) -> None:
    """Train a network on handwritten digits across the ranks of an MPI job.

    The ranks share every batch, and mpiagg aggregates their gradients or their weights. Afterwards rank 0 trains the
    same network alone: with allreduce and parameter-server the weights must agree within 1e-8, also where a rank is
    killed and the others go on without it.
    """
    if find_spec("sklearn") is None:
        raise click.ClickException(
            "the demo trains on the digits of scikit-learn; install it with: pip install scikit-learn"
        )
    asked_for = click.get_current_context().get_parameter_source("plot") is not ParameterSource.DEFAULT
    if asked_for and find_spec("matplotlib") is None:
        raise click.ClickException("--plot needs matplotlib: pip install matplotlib")
    if len(aggregators) > (MOST if kill_rank is None else 1):
        raise click.UsageError(f"--aggregator can be given {MOST} times, and with --kill-rank once")
    every = [
        DemoSettings(aggregator=name, learning_rate=learning_rate or AGGREGATORS[name].learning_rate, **options)  # type: ignore[arg-type]  # as declared above
        for name in dict.fromkeys(aggregators)
    ]
    for settings in every:
        if settings.aggregator != "allreduce" and settings.algorithm != "auto":
            raise click.UsageError(f"--algorithm is for --aggregator allreduce, not for {settings.aggregator}")

    if kill_rank is None and at_step is not None:
        raise click.UsageError("--at-step goes with --kill-rank")
    if kill_rank is not None and launch.launched_ranks() is None:
        _check_that_ranks_may_die(kill_rank, ranks)

    def work(world: MPI.Intracomm) -> int:
        # scikit-learn takes a second to import, which a process that only starts the ranks need not spend.
        from mpiagg.cli import summary, surviving, training  # noqa: PLC0415 - as above

        death = None if kill_rank is None else surviving.Death(kill_rank, 50 if at_step is None else at_step)
        with progress("training", len(every) * every[0].epochs, "epochs", shown=world.rank == 0) as advance:
            if death is None:
                results = [training.work(settings, world, after_epoch=advance) for settings in every]
            else:
                results = [surviving.work(every[0], world, death, after_epoch=advance)]
        told = [result for result in results if result is not None]
        return summary.report(told, plot, json_file) if told else 0

    job.run(ranks, checked(work), () if kill_rank is None else launch.SURVIVING)


def _check_that_ranks_may_die(rank: int, ranks: int) -> None:
    if rank >= ranks or ranks == 1:
        raise click.UsageError(f"--kill-rank {rank}: that rank and another one are needed; -n is {ranks}")
    if (vendor := launch.mpi_vendor()) != "Open MPI":
        raise click.ClickException(
            f"--kill-rank needs ULFM (user-level failure mitigation), by which the other ranks go on: Open MPI has it; "
            f"mpi4py loads {vendor}"
        )
