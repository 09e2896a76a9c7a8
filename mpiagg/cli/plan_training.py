"""``mpiagg plan-training``: which aggregation keeps the ranks computing, by what their links carry."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource
from rich import box
from rich.table import Table

from mpiagg.cli.quantities import (
    MOST_RANKS,
    Finite,
    Written,
    format_size,
    format_time,
    parse_rate,
    parse_time,
    read_layout,
)
from mpiagg.launch import job
from mpiagg.schedules import Cluster
from mpiagg.tables.files import read_table
from mpiagg.tables.times import Measured, Modelled, Times
from mpiagg.tables.training import Planned, Training, advised, plan_training

SIDE: Final = 1024
"""Of the matrices that parameters are taken for where their shapes are not said."""

MOST_PARAMETERS: Final = 10**13
"""More would be so many matrices that it takes minutes to look at them."""

_EXAMPLES: Final = """\b
mpiagg plan-training --parameters 125M --step-time 300ms -n 4 --bandwidth 100Mbit/s --alpha 1ms
mpiagg plan-training --shapes 4096x1024,1024,1024x50257 --step-time 0.2s --nodes 8x8 --bandwidth 1GB/s
mpiagg plan-training --parameters 25M --step-time 80ms --tuning tuning.json --json plan.json
"""


def parse_count(text: str) -> int:
    """Return a number that is written like 125M, 1.3B or 7000.

    Raises
    ------
    ValueError
        If it is not written so, or zero, or more than 10,000B.
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([kKmMbBgG]?)", text.strip())
    number = 0 if match is None else round(float(match[1]) * {"": 1, "k": 1e3, "m": 1e6}.get(match[2].lower(), 1e9))
    if not 0 < number <= MOST_PARAMETERS:
        raise ValueError(f"{text!r} is no number of parameters; write 7000, 125M or 1.3B, at most 10000B")
    return number


def parse_shapes(text: str) -> list[tuple[int, ...]]:
    """Return shapes that are written like 4096x1024,1024.

    Raises
    ------
    ValueError
        If they are not written so.
    """
    if not re.fullmatch(r"\s*\d{1,12}(x\d{1,12})*(\s*,\s*\d{1,12}(x\d{1,12})*)*\s*", text):
        raise ValueError(f"{text!r} are no shapes; write 4096x1024,1024")
    return [tuple(map(int, shape.split("x"))) for shape in text.replace(" ", "").split(",")]


def shapes_of(count: int) -> list[tuple[int, ...]]:
    """Return square matrices, and what is left, for a number of parameters."""
    whole, rest = divmod(count, SIDE * SIDE)
    return [(SIDE, SIDE)] * whole + ([(rest,)] if rest else [])


_OF_THE_MODEL: Final = ("ranks", "nodes", "alpha", "bandwidth", "gamma", "node_alpha", "node_bandwidth")
_TIME, _RATE = Written("time", parse_time), Written("rate", parse_rate)


@click.command(epilog=_EXAMPLES)
@click.option("--parameters", type=Written("number", parse_count), help="How many, like 125M or 1.3B.")
@click.option("--shapes", type=Written("shapes", parse_shapes), help="Or their shapes: 4096x1024,1024.")
@click.option("--step-time", "step", type=_TIME, required=True, help="What a rank computes in a step.")
@click.option("-n", "ranks", type=click.IntRange(1, MOST_RANKS), help="How many ranks.")
@click.option("--alpha", type=_TIME, default="50us", help="Latency of a message.")
@click.option("--bandwidth", type=_RATE, default="1Gbit/s", help="Of a link, in each direction.")
@click.option("--gamma", type=_RATE, default="5GB/s", help="Rate at which a rank reduces what it receives.")
@click.option(
    "--nodes", metavar="N|NxR|R,R,...", help="Nodes, each with one link for its ranks.  [default: a link a rank]"
)
@click.option("--node-alpha", type=_TIME, default="1us", help="The latency within a node.")
@click.option("--node-bandwidth", type=_RATE, default="5GB/s", help="Of a rank's link within its node.")
@click.option(
    "--tuning",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A table that mpiagg tune has measured, in place of ranks and links.",
)
@click.option("--period", type=click.IntRange(1), default=30, help="Steps between two exchanges, by LocalSGD's kind.")
@click.option("--fragments", type=click.IntRange(1), default=3, help="Parts that are exchanged in turn.")
@click.option("--delay", type=click.IntRange(0), default=5, help="Steps after which an exchange is applied.")
@click.option("--backward", type=Finite(0, 1), default=0.6, help="Part of a step that can hide an exchange.")
@click.option("--codec-rate", type=_RATE, default="1GB/s", help="Rate of codecs and selection, of float32.")
@click.option("--target", type=click.FloatRange(0, 1), default=0.9, help="The part of the time to be computed in.")
@click.option("--json", "json_file", type=job.OutputFile(), help="Save the numbers.")
def command(target: float, json_file: Path | None, **options: Any) -> None:
    """Say which aggregation keeps the ranks computing, and what each would cost.

    Training is float32. Collectives are priced as by mpiagg simulate, or with --tuning from what was measured. The
    table says, of each aggregation, the bytes that a rank sends a step and at most at once, how long communication and
    the aggregation's own work take a step, which part of the time the ranks compute, one after the other and
    overlapped as far as the aggregation lets them, and the memory beside the parameters. Their names come below. The
    results of those that come first are nearest to those of one process. The first that reaches --target is advised.
    """
    if math.isnan(target):  # in no order to other numbers, so click lets it pass
        raise click.BadParameter("nan is no part of the time", param_hint="--target")
    training, times = _question(**options)
    found = plan_training(training, times)
    best = advised(found, target)
    job.show(_table(training, times, found))
    for number, each in enumerate(found, 1):
        click.echo(f"{number:2} {each.name}")
    reached = "" if best.share_overlapped >= target else f" (none reaches {target:.0%})"
    click.echo(f"Take {best.name}: the ranks compute for {best.share_overlapped:.1%} of the time{reached}.")
    click.echo(f"Take another one if {best.caution}.")
    if json_file is not None:
        told = {"ranks": times.layout.size, "parameters": training.parameters, "step_seconds": training.step}
        record = {**told, "advised": best.name, "target": target, "aggregations": [asdict(each) for each in found]}
        job.write(json_file, json.dumps(record, indent=1) + "\n")


def _question(
    *,
    parameters: int | None,
    shapes: list[tuple[int, ...]] | None,
    ranks: int | None,
    nodes: str | None,
    tuning: Path | None,
    alpha: float,
    bandwidth: float,
    gamma: float,
    node_alpha: float,
    node_bandwidth: float,
    **how: Any,
) -> tuple[Training, Times]:
    """Return what is asked.

    Raises
    ------
    click.UsageError
        If it is not said what is trained or where, or what is said does not fit together.
    """
    if (parameters is None) == (shapes is None):
        raise click.UsageError("what is trained? Give either --parameters or --shapes")
    try:
        training = Training(shapes=shapes_of(parameters or 0) if shapes is None else shapes, **how)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if tuning is not None:
        given = click.get_current_context().get_parameter_source
        for name in _OF_THE_MODEL:
            if given(name) is not ParameterSource.DEFAULT:
                option = "-n" if name == "ranks" else f"--{name.replace('_', '-')}"
                raise click.UsageError(f"--tuning says what ranks and links there are: give no {option}")
        try:
            return training, Measured(read_table(tuning))
        except ValueError as error:
            raise click.UsageError(f"--tuning: {error}") from None
    cluster = Cluster(alpha, 1 / bandwidth, 1 / gamma)
    if nodes is not None:
        cluster = Cluster(alpha, 1 / bandwidth, 1 / gamma, node_alpha=node_alpha, node_beta=1 / node_bandwidth)
    return training, Modelled(read_layout(ranks, nodes), cluster)


def _table(training: Training, times: Times, found: list[Planned]) -> Table:
    where = f"{times.layout.size:,} ranks, nodes: {times.layout}"
    title = f"{training.parameters:,} parameters, {format_time(training.step)} a step, {where}"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", header_style="", collapse_padding=True)
    heads = "", "bytes\na step", "at\nonce", "time\na step", "own\nwork", "com-\nputing", "over-\nlapped", "memory"
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for number, each in enumerate(found, 1):
        shares = f"{each.share:.1%}", f"{each.share_overlapped:.1%}"
        sizes = format_size(each.bytes_a_step), format_size(each.most_bytes)
        table.add_row(
            str(number),
            *sizes,
            format_time(each.seconds),
            format_time(each.work),
            *shares,
            format_size(each.memory),
        )
    return table
