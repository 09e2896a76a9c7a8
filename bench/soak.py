"""Soak: mixed work of everything the package has, for long, with results checked throughout; what is held stays flat.

    python -m bench.soak --minutes 30 --ranks 4 [-o bench/results/soak-mpich.json]

It runs at the top of the repository. Every so often each rank writes down its memory, file descriptors, threads,
mappings, open channels and plans, and Python's objects. At the end a line is fitted to each, after a time to warm up:
by how much it has risen over that span must be within ``SLACK``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from bench.gpu import environment
from mpiagg.cli.quantities import POSITIVE
from mpiagg.launch import start as launch
from mpiagg.launch.job import OutputFile

TOP = Path(__file__).parents[1]

MIB = 2**20

SLACK: Mapping[str, float] = {
    "rss": 16 * MIB,
    "rss of its own": 8 * MIB,
    "file descriptors": 2,
    "threads": 2,
    "mappings": 20,
    "channels": 0.5,
    "plans": 0.5,
    "objects": 10_000,
}
"""By how much what a rank holds may rise over the whole run after the warm-up, by the line that fits best. Half an hour
has tens of thousands of actions: a leak of some hundred bytes an action is tens of MiB. What calls mean is kept, up to
a number of them and then from anew: by that, memory and objects go up and down."""

WARM_UP = 1 / 4
"""The part of the time after which memory is as large as the work needs."""

LATE = 120.0
"""Seconds more than it should that a job may take."""

LEAST = 4
"""How many samples make a line."""


class Rise(NamedTuple):
    """By how much a rank holds more of something at the end, by the line that fits best.

    Attributes
    ----------
    rank : int
    what : str
    first, last, rise : float
        The first sample after the warm-up, the last one, and the line's rise from one to the other.
    flat : bool
    """

    rank: int
    what: str
    first: float
    last: float
    rise: float
    flat: bool


def rises(ranks: Sequence[Mapping[str, Any]]) -> list[Rise]:
    """Return what the samples of all ranks come to.

    Raises
    ------
    ValueError
        If there are too few.
    """
    found = []
    for rank, told in enumerate(ranks):
        end = told["samples"][-1]["seconds"]
        samples = [each for each in told["samples"] if each["seconds"] >= WARM_UP * end]
        if len(samples) < LEAST:
            raise ValueError(f"rank {rank}: {len(samples)} samples after the warm-up make no line")
        seconds = np.array([each["seconds"] for each in samples])
        for what, slack in SLACK.items():
            values = np.array([each[what] for each in samples], float)
            rise = float(np.polyfit(seconds, values, 1)[0] * (seconds[-1] - seconds[0]))
            found.append(Rise(rank, what, values[0], values[-1], rise, rise <= slack))
    return found


def soak(seconds: float, every: float, ranks: int, seed: int, folder: Path) -> tuple[int | None, str]:
    """Run the ranks; return their exit status, None if they had to be ended, and what they have printed."""
    arguments = [str(folder), str(seconds), str(every), str(seed)]
    arguments = ["-m", "mpi4py", "-m", "bench.soak_rank", *arguments]
    known = {**environment(), "MPIAGG_RECORD_DIR": str(folder)}
    return launch.run_within(seconds + LATE, ranks, arguments, known, cwd=TOP)


def description(number: float, what: str) -> str:
    """Return a number with its unit."""
    return f"{number / MIB:.1f} MiB" if what.startswith("rss") else f"{number:.1f}".removesuffix(".0")


@click.command()
@click.option("--minutes", type=POSITIVE, default=30, show_default=True)
@click.option("--ranks", type=click.IntRange(min=2), default=4, show_default=True)
@click.option("--every", type=POSITIVE, help="Seconds between samples; 1/30 of the time.")
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True)
@click.option("-o", "--output", type=OutputFile(), help="Save the samples and what they come to, as JSON.")
def main(minutes: float, ranks: int, every: float | None, seed: int, output: Path | None) -> None:
    """Work with everything for long, and show that results are right and what is held stays flat."""
    seconds = 60 * minutes
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        status, printed = soak(seconds, every or seconds / 30, ranks, seed, folder)
        told = [json.loads(path.read_text()) for r in range(ranks) if (path := folder / f"{r}.json").exists()]
    well = status == 0 and not printed.strip() and len(told) == ranks and all(each["ended"] for each in told)
    click.echo(printed, err=True)
    try:
        found = rises(told)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    if told:
        click.echo(f"{sum(told[0]['done'].values())} actions of each rank in {told[0]['samples'][-1]['seconds']:.0f} s")
    for each in found:
        first, last, rise = (description(number, each.what) for number in (each.first, each.last, each.rise))
        verdict = "flat" if each.flat else "RISES"
        click.echo(
            f"rank {each.rank}  {each.what:17} {first:>12} -> {last:>12}  the line rises by {rise:>10}: {verdict}"
        )
    if output is not None:
        saved = {"seconds": seconds, "seed": seed, "status": status, "printed": printed, "slack": dict(SLACK)}
        saved |= {"warm_up": WARM_UP, "rises": [each._asdict() for each in found], "ranks": told}
        output.write_text(json.dumps(saved, indent=1) + "\n")
    if not well:
        click.echo(f"the job did not end well: status {status}")
    sys.exit(0 if well and all(each.flat for each in found) else 1)


if __name__ == "__main__":
    main()
