"""What the demo tells on rank 0: tables, a loss curve, a file, and whether all is well."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import mean
from typing import Final

import click
from rich.table import Table

from mpiagg.benchmarks import machine
from mpiagg.cli.aggregators import AGGREGATORS
from mpiagg.cli.training import CLASSES, Result
from mpiagg.launch import job

TOLERANCE: Final = 1e-8
"""How much weights may differ from the serial training: sums in another order round differently."""

DIVERGED: Final = 2 * math.log(CLASSES)
"""A loss twice that of guessing is no learning any more."""


def report(result: Result, plot: Path, json_file: Path | None) -> int:
    """Tell the result, save what is to be saved, and return the exit status."""
    console = job.console()
    console.print(_overview(result), _by_rank(result))
    if json_file is not None:
        numbers = {"machine": machine.facts(), **result.as_json()}
        json_file.write_text(json.dumps(numbers, indent=1) + "\n")
    click.echo(draw(result, plot))
    problem = fault(result)
    if problem is None:
        return 0
    click.echo(f"Error: {problem}", err=True)
    return 1


def fault(result: Result) -> str | None:
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


def _overview(result: Result) -> Table:
    settings = result.settings
    table = Table(title="Training on handwritten digits", show_header=False, title_justify="left")
    table.add_row("aggregator", f"{settings.aggregator} ({AGGREGATORS[settings.aggregator].what})")
    if settings.aggregator == "allreduce":
        table.add_row("algorithm", settings.algorithm)
    table.add_row("ranks", str(result.ranks))
    table.add_row("MPI library", job.vendor())
    table.add_row("test accuracy", f"{result.test_accuracy:.4f}")
    table.add_row("largest difference of the weights from serial training", f"{result.difference_from_serial:.2g}")
    table.add_row("largest difference of the weights between ranks", f"{result.difference_between_ranks:.2g}")
    return table


def _by_rank(result: Result) -> Table:
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


def _told(computing: float, communicating: float, bytes_sent: float) -> tuple[str, str, str]:
    told = "unknown" if math.isnan(bytes_sent) else f"{bytes_sent:,.0f}"
    return f"{computing:.3f}", f"{communicating:.3f}", told


def draw(result: Result, plot: Path) -> str:
    """Draw the loss curve, if matplotlib is installed, and return a line that says so."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra that need not be installed
    except ImportError:
        return 'For the loss curve install matplotlib: pip install "mpiagg[plot]"'
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(result.losses) + 1), result.losses)
    axes.set(
        title=f"{result.settings.aggregator} on {result.ranks} ranks",
        xlabel="epoch",
        ylabel="mean loss",
        yscale="log",
    )
    figure.savefig(plot, dpi=150, format="png")
    return f"Saved the loss curve to {plot}"
