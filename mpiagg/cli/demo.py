"""``mpiagg demo``: data-parallel training of a small network, checked against the same training done serially."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from mpiagg.cli import job
from mpiagg.cli.aggregators import AGGREGATORS
from mpiagg.cli.settings import Settings
from mpiagg.schedules import algorithms

if TYPE_CHECKING:
    from mpi4py import MPI

_EXAMPLES: Final = """\b
mpiagg demo                starts 4 ranks on this machine
mpiexec -n 8 mpiagg demo   is a rank of that job
"""


@click.command(epilog=_EXAMPLES)
@job.ranks_option(default=4)
@click.option(
    "--aggregator", type=click.Choice(list(AGGREGATORS)), default="allreduce", help="What averages over the ranks."
)
@click.option(
    "--algorithm",
    type=click.Choice(["auto", "native", *algorithms("allreduce")]),
    default="auto",
    help="How the allreduce aggregator does it.",
)
@click.option("--epochs", type=click.IntRange(min=1), default=20, help="How often each image is seen.")
@click.option("--batch-size", type=click.IntRange(min=1), default=32, help="Images a step, over all ranks.")
@click.option(
    "--learning-rate",
    type=click.FloatRange(min=0, min_open=True),
    help="By default what suits the aggregator; 0.2 for most.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of the weights, the split and the batches.")
@click.option(
    "--plot",
    type=job.OutputFile(),
    default=Path("mpiagg-loss.png"),
    show_default=True,
    help="Where the loss curve goes, as a PNG; needs the extra `plot`.",
)
@click.option("--json", "json_file", type=job.OutputFile(), help="Save the numbers.")
def demo(
    ranks: int, plot: Path, json_file: Path | None, learning_rate: float | None, aggregator: str, **options: object
) -> None:
    """Train a network on handwritten digits across the ranks of an MPI job.

    The ranks share every batch, and mpiagg aggregates their gradients or their weights. Afterwards rank 0 trains the
    same network alone: with allreduce and parameter-server the weights must agree within 1e-8.
    """
    if learning_rate is None:
        learning_rate = AGGREGATORS[aggregator].learning_rate
    settings = Settings(aggregator=aggregator, learning_rate=learning_rate, **options)  # type: ignore[arg-type]  # as declared above
    if settings.aggregator != "allreduce" and settings.algorithm != "auto":
        raise click.UsageError(f"--algorithm is for --aggregator allreduce, not for {settings.aggregator}")

    def work(world: MPI.Intracomm) -> int:
        # scikit-learn takes a second to import, which a process that only starts the ranks need not spend.
        from mpiagg.cli import summary, training  # noqa: PLC0415

        with summary.progress(settings.epochs, shown=world.rank == 0) as advance:
            result = training.work(settings, world, after_epoch=advance)
        return 0 if result is None else summary.report(result, plot, json_file)

    job.run(ranks, work)
