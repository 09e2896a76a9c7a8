"""What the demo tells on rank 0: tables, a loss curve, a file, and whether all is well."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Final

import click
from rich.table import Table

from mpiagg.benchmarks import machine
from mpiagg.cli.aggregators import AGGREGATORS
from mpiagg.cli.price_plot import COLOURS, MARKS
from mpiagg.cli.training import CLASSES, TrainingResult
from mpiagg.launch import job
from mpiagg.tables.settings import FORCED
from mpiagg.tables.settings import settings as of_environment

TOLERANCE: Final = 1e-8
"""How much weights may differ from the serial training: sums in another order round differently."""

DIVERGED: Final = 2 * math.log(CLASSES)
"""A loss twice that of guessing is no learning any more."""


def report(results: Sequence[TrainingResult], plot: Path, json_file: Path | None) -> int:
    """Tell the results, save what is to be saved, and return the exit status."""
    console = job.console()
    for result in results:
        console.print(_overview(result), _by_rank(result))
    if results[0].crowded:
        click.echo(
            f"Hint: {results[0].ranks} ranks share fewer processors, and wait for one another. Times say more with "
            "at most as many ranks as there are processors."
        )
    if json_file is not None:
        numbers = [{"machine": machine.facts(), **result.as_json()} for result in results]
        job.write(json_file, json.dumps(numbers if len(numbers) > 1 else numbers[0], indent=1) + "\n")
    click.echo(draw(results, plot))
    problems = [problem for result in results if (problem := fault(result)) is not None]
    for problem in problems:
        click.echo(f"Error: {problem}", err=True)
    return 1 if problems else 0


def fault(result: TrainingResult) -> str | None:
    """Return what is wrong with a result, in words; None if nothing is."""
    for loss in result.losses:
        if not loss <= DIVERGED:  # also if it is not a number
            return f"the training diverged: the loss came to {loss:.3g}; try a smaller --learning-rate"
    difference = result.difference_from_serial
    if AGGREGATORS[result.settings.aggregator].exact and not difference <= TOLERANCE:
        return (
            f"the weights differ from the serial training's by {difference:.3g}, which is more than {TOLERANCE:g}; "
            "a training on the edge of diverging lets rounding errors grow: does it with a smaller --learning-rate?"
        )
    return None


def _overview(result: TrainingResult) -> Table:
    settings = result.settings
    table = Table(title="Training on handwritten digits", show_header=False, title_justify="left")
    table.add_row("aggregator", f"{settings.aggregator} ({AGGREGATORS[settings.aggregator].what})")
    if settings.aggregator == "allreduce":
        forced = of_environment().forced if settings.algorithm == "auto" else None
        table.add_row("algorithm", f"{forced} ({FORCED})" if forced else settings.algorithm)
    table.add_row("ranks", str(result.ranks))
    table.add_row("MPI library", job.vendor())
    together = max(map(sum, zip(result.computing, result.communicating, strict=True)))
    table.add_row("training, on the slowest rank (s)", f"{together:.3f}")
    table.add_row("the same training on one process (s)", _or_unknown(result.serial_seconds))
    table.add_row("share of communication, and of waiting in it", f"{result.share_of_communication:.0%}")
    table.add_row("MPI_Allreduce of the gradients in all steps (s)", _or_unknown(result.native_seconds))
    table.add_row("test accuracy", f"{result.test_accuracy:.4f}")
    table.add_row("largest difference of the weights from serial training", f"{result.difference_from_serial:.2g}")
    table.add_row("largest difference of the weights between ranks", f"{result.difference_between_ranks:.2g}")
    return table


def _by_rank(result: TrainingResult) -> Table:
    table = Table("rank", "computing (s)", "communicating (s)", "bytes sent")
    for column in table.columns:
        column.justify = "right"
    unknown = [math.nan] * result.ranks
    columns = (result.computing, result.communicating, list(map(float, result.bytes_sent or unknown)))
    for rank, numbers in enumerate(zip(*columns, strict=True)):
        table.add_row(str(rank), *_told(*numbers))
    table.add_section()
    table.add_row("mean", *_told(*map(mean, columns)))
    table.add_row("max", *_told(*map(max, columns)))
    return table


def _or_unknown(seconds: float) -> str:
    return "unknown" if math.isnan(seconds) else f"{seconds:.3f}"


def _told(computing: float, communicating: float, bytes_sent: float) -> tuple[str, str, str]:
    told = "unknown" if math.isnan(bytes_sent) else f"{bytes_sent:,.0f}"
    return f"{computing:.3f}", f"{communicating:.3f}", told


def draw(results: Sequence[TrainingResult], plot: Path) -> str:
    """Draw the loss curves, if matplotlib is installed, and return a line that says so."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra that need not be installed
        from matplotlib.ticker import MaxNLocator  # noqa: PLC0415 - likewise
    except ImportError:
        return "For the loss curve install matplotlib: pip install matplotlib"
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    first = results[0]
    epochs = range(1, len(first.losses) + 1)
    if first.serial_losses:
        label = f"one process, rate {first.settings.learning_rate:g}"
        axes.plot(epochs, first.serial_losses, color="#999999", linewidth=5, label=label)
    for result, colour, mark in zip(results, COLOURS, MARKS, strict=False):
        label = f"{result.settings.aggregator}, rate {result.settings.learning_rate:g}"
        axes.plot(epochs, result.losses, color=colour, marker=mark, markersize=4, linewidth=1.5, label=label)
    axes.set(
        title=f"Handwritten digits on {first.ranks} ranks", xlabel="epoch", ylabel="mean loss of an epoch", yscale="log"
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(plot, dpi=150)
    return f"Saved the loss curve to {plot}"
