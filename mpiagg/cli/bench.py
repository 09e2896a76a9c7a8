"""``mpiagg bench``: the hand-written collectives beside the MPI library's own, checked and timed in one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from mpiagg.arrays import reduction
from mpiagg.cli import job, launch
from mpiagg.cli.flags import DTYPES, LARGEST, SMALLEST, Flags, SizeRange, dtype_of, parse_range
from mpiagg.schedules import Collective, algorithms

if TYPE_CHECKING:
    from mpi4py import MPI


def _convert_range(ctx: click.Context, param: click.Parameter, value: str) -> SizeRange:
    """Return the range of sizes that was written on the command line."""
    try:
        return parse_range(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


def _known(flags: Flags) -> tuple[str, ...]:
    """Return the algorithms to measure.

    Raises
    ------
    click.UsageError
        If one does not serve the collective.
    """
    serving = algorithms(flags.collective)
    for name in flags.algorithm:
        if name not in (*serving, "auto", "native"):
            known = ", ".join(("auto", "native", *serving))
            raise click.UsageError(f"no algorithm {name!r} for {flags.collective}; known: {known}")
    return tuple(name for name in flags.algorithm if name != "native") if flags.algorithm else serving


def _check(flags: Flags, size: int) -> None:
    """Raise click.UsageError for what only the number of ranks, or two flags together, show to be wrong."""
    if flags.root >= size:
        raise click.UsageError(f"--root must be a rank from 0 to {size - 1}, not {flags.root}")
    if Collective(flags.collective).reduces:
        try:
            reduction(flags.op, dtype_of(flags.dtype), size)
        except TypeError as error:
            raise click.UsageError(str(error)) from None


_EXAMPLES: Final = """\b
mpiagg bench                              starts 2 ranks on this machine
mpiagg bench allgather -a ring -m 1K:1M   chooses what to measure
mpiexec -n 8 mpiagg bench                 is a rank of that job
"""


@click.command(epilog=_EXAMPLES)
@click.argument("collective", type=click.Choice([entry.value for entry in Collective]), default="allreduce")
@job.ranks_option(default=2)
@click.option("-a", "--algorithm", multiple=True, help="What to measure; repeatable.  [default: all that serve]")
@click.option(
    "-m",
    "--message-size",
    "sizes",
    callback=_convert_range,
    metavar="[MIN:]MAX",
    default=f"{SMALLEST}:{LARGEST // 2**20}M",
    help="Bytes of the vector, with suffixes K, M, G.",
)
@click.option("--factor", type=click.IntRange(min=2), default=4, help="From one size to the next.")
@click.option("-i", "--iterations", type=click.IntRange(min=1), default=1000, help="Timed calls a size, at most.")
@click.option("-x", "--warmup", type=click.IntRange(min=0), default=10, help="Calls before them, at most.")
@click.option("--time-limit", type=click.FloatRange(min=0, min_open=True), default=4.0, help="Seconds a size, about.")
@click.option("-f", "--full", is_flag=True, help="Add minimum, maximum, percentiles and iterations.")
@click.option("--dtype", type=click.Choice(DTYPES), default="float32")
@click.option("--op", type=click.Choice(["sum", "avg", "min", "max", "prod"]), default="sum")
@click.option("--root", type=click.IntRange(min=0), default=0, help="Of reduce and broadcast.")
@click.option("--lanes", type=click.IntRange(1, 64), help="Interleaved parts.  [default: the algorithm's choice]")
@click.option("--plan/--call", "planned", default=True, help="Time persistent plans, or blocking calls.")
@click.option("--json", "json_file", type=job.OutputFile(), help="Save the rows.")
def bench(ranks: int, json_file: Path | None, **options: object) -> None:
    """Time hand-written collectives beside the MPI library's own, and check their results.

    At every size, all algorithms and the MPI library's blocking call in place take turns. A time is the median over
    blocks of calls, of the slowest rank's mean in each block. algbw is the size over the time; busbw is
    what the busiest link must have carried at least; /native is the time over the MPI library's.
    """
    flags = Flags(**options)  # type: ignore[arg-type]  # click gives them as declared above
    names = _known(flags)
    _check(flags, launch.launched_ranks() or ranks)

    def work(world: MPI.Intracomm) -> int:
        from mpiagg.cli import sweep  # noqa: PLC0415 - needs MPI, which only a rank may load

        rows = list(sweep.sweep(world, flags, names, show=click.echo if world.rank == 0 else None))
        if world.rank != 0:
            return 0
        if json_file is not None:
            json_file.write_text(json.dumps(sweep.record(world, flags, rows), indent=1) + "\n")
        wrong = sum(row.wrong for row in rows)
        if wrong:
            click.echo(f"Error: {wrong} elements are wrong", err=True)
        return 1 if wrong else 0

    job.run(ranks, work)
