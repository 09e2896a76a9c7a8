"""``mpiagg tune``: measure which algorithm is fastest where, save it as a table, and show what would be chosen."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from rich import box
from rich.table import Table as Printed

from mpiagg.arrays import HOST
from mpiagg.benchmarks.flags import SizeRange
from mpiagg.cli.bench import SIZES, bind_early, device_option
from mpiagg.cli.quantities import MOST_RANKS, POSITIVE, parse_nodes
from mpiagg.cli.variables import checked
from mpiagg.launch import job, start
from mpiagg.schedules import Collective, Layout
from mpiagg.tables import Case, Memory, Settings
from mpiagg.tables.cache import can_be_kept, folder, write_cached
from mpiagg.tables.files import read_table, text_of
from mpiagg.tables.predicted import Prices
from mpiagg.tables.settings import FORCED, LEARN, TUNING, Found

if TYPE_CHECKING:
    from mpi4py import MPI

FULL: Final = 300.0
"""Seconds, by default."""

QUICK: Final = 20.0
"""Seconds that are enough for a first table."""

SHOWN: Final = 3
"""How many candidates are told, the fastest ones."""

_WIDE: Final = 100
"""Columns of a terminal from which tables divide them by themselves."""

_EXAMPLES: Final = """\b
mpiagg tune -n 4 -o tuning.json           starts 4 ranks on this machine
mpiexec -n 64 mpiagg tune -o tuning.json  is a rank of that job
mpiexec -n 64 mpiagg tune --quick         keeps a table for your jobs on this cluster
mpiexec -n 8 mpiagg tune -d cuda -o FILE  measures staged messages of GPU memory, too
MPIAGG_TUNING=tuning.json mpiexec ...     uses the table
mpiagg tune --show -n 64 --nodes 8        shows what is chosen, and why
"""


@click.command(epilog=_EXAMPLES)
@click.option(
    "-n",
    "ranks",
    type=click.IntRange(1, MOST_RANKS),
    help="Ranks to start.  [default: 2; with --show, the table's, or 4]",
)
@click.option("-o", "--output", type=job.OutputFile(), help="Measure, and write the table into this file.")
@click.option(
    "--collective",
    "collectives",
    multiple=True,
    type=click.Choice([entry.value for entry in Collective]),
    help="Only this one; repeatable.  [default: all]",
)
@SIZES
@click.option("--factor", type=click.IntRange(min=2), default=4, help="From one size to the next.")
@click.option("--time", "seconds", type=POSITIVE, help=f"Seconds, about.  [default: {FULL:.0f}]")
@device_option("Measure how messages of such a device's memory are best cut, too: cuda, or cuda:1.")
@click.option("--quick", is_flag=True, help=f"Measure for {QUICK:.0f} s, and keep the table for {TUNING}={LEARN}.")
@click.option("--show", is_flag=True, help="Do not measure; print what would be chosen, and why.")
@click.option("--table", type=click.Path(path_type=Path), help=f"The table to show.  [default: {TUNING}, or none]")
@click.option("--nodes", metavar="N|NxR|R,R,...", help="With --show: the nodes.  [default: the table's, or one]")
@click.option("--library", metavar="NAME", help="With --show: the MPI library.  [default: the table's, or mpi4py's]")
def tune(
    *,
    ranks: int | None,
    output: Path | None,
    collectives: tuple[str, ...],
    sizes: SizeRange,
    factor: int,
    seconds: float | None,
    device: str,
    quick: bool,
    show: bool,
    table: Path | None,
    nodes: str | None,
    library: str | None,
) -> None:
    """Measure which algorithm is fastest on this cluster, and write a table for the environment variable MPIAGG_TUNING.

    At every size all algorithms take turns, and those within twice the best time once more, with more lanes and shorter
    segments. The usual choice stays unless another is 3 % faster in the median. The table is for jobs on the layout
    that it was measured on.
    """
    chosen = [Collective(name) for name in collectives] or list(Collective)
    lengths = list(sizes.sizes(factor))
    if show:
        if output is not None or quick:
            raise click.UsageError("--show measures nothing that could be saved")
        if device != HOST.name:
            raise click.UsageError("--show measures nothing, on no device")
        settings = _settings(table, ranks, nodes)
        layout, library = _layout(settings, ranks, nodes), _measured_library(settings, library)
        for collective in chosen:
            console = job.console()
            console.print(_printed(settings, collective, layout, library, lengths, narrow=console.width < _WIDE))
        return
    if table is not None or nodes is not None or library is not None:
        raise click.UsageError("--table, --nodes and --library are for --show")
    _check_measuring(output, seconds, quick=quick)
    # What is measured must not depend on what was chosen before.
    for variable in (TUNING, FORCED):
        os.environ.pop(variable, None)
    bind_early(device)
    limit = seconds or (QUICK if quick else FULL)
    job.run(ranks or 2, checked(lambda world: _measure(world, output, chosen, lengths, limit, device)))


def _check_measuring(output: Path | None, seconds: float | None, *, quick: bool) -> None:
    """Raise click's errors if it is not said where a table goes, or it cannot go there."""
    if output is not None and quick:
        raise click.UsageError("-o FILE and --quick exclude each other: --quick keeps its table in the user's cache")
    if output is None and not quick:
        raise click.UsageError("give -o FILE to measure and save, or --quick, or --show to print what would be chosen")
    if quick and seconds is not None:
        raise click.UsageError(f"--time and --quick exclude each other: --quick takes {QUICK:g} seconds")
    if quick and not can_be_kept():
        raise click.ClickException("the table cannot be kept in the user's cache; set XDG_CACHE_HOME, or give -o FILE")


def _measure(  # noqa: PLR0917 - what the command was given
    world: MPI.Intracomm,
    output: Path | None,
    collectives: Sequence[Collective],
    lengths: Sequence[int],
    seconds: float,
    device: str,
) -> int:
    """Do the work of a rank and return its exit status; without an output, the table is kept in the user's cache."""
    from mpiagg.benchmarks.tuner import Tuner  # noqa: PLC0415 - needs MPI, which only a rank may load
    from mpiagg.transport import cache_of, channel_of  # noqa: PLC0415 - needs MPI, as only ranks have it

    def tell(line: str) -> None:
        if world.rank == 0:
            click.echo(line)

    tuner = Tuner(world, collectives, lengths, seconds, tell, device=device)
    tell(f"# {job.vendor()}, {world.size} ranks ({tuner.layout}); what is fastest")
    path = output or cache_of(channel_of(world), tuner.layout)[0]
    table = tuner.table("measured")
    if world.rank > 0 or path is None:
        return 0
    if output:
        job.write(path, text_of(table))
    elif not write_cached(path, table):
        return 1
    tell(f"# saved {len(table.rows)} rows in {path}")
    tell(f"# use them with {TUNING}={path if output else LEARN}")
    return 0


# -- what would be chosen


def _settings(path: Path | None, ranks: int | None, nodes: str | None) -> Settings:
    try:
        told = Settings.of_environment()
        if path is None and told.learns:
            path = _learned(None if nodes is None and ranks is None else parse_nodes(nodes or "1", ranks))
        return told if path is None else Settings(read_table(path), told.forced)
    except ValueError as error:
        raise click.ClickException(str(error)) from None


def _learned(layout: Layout | None) -> Path | None:
    """Return the newest of the tables that were learned, or of those for a layout; None if there is none."""
    found: dict[Path, float] = {}
    with suppress(RuntimeError):  # of a user who has no home folder
        for path in folder().glob("*.json"):
            with suppress(OSError):  # of one that is gone
                found[path] = path.stat().st_mtime
    for path in sorted(found, key=found.__getitem__, reverse=True):
        with suppress(ValueError):  # of one that is broken, which jobs warn of
            origin = read_table(path).origin
            if layout is None or (origin is not None and origin.layout == layout):
                return path
    return None


def _layout(settings: Settings, ranks: int | None, nodes: str | None) -> Layout:
    """Return the layout to choose for: what is asked, or else that of the table, or else a few ranks on a node.

    Raises
    ------
    click.ClickException
        If no ranks can lie so, or the table is for others.
    """
    origin = settings.table.origin if settings.table is not None else None
    if nodes is None and ranks in (None, origin and origin.layout.size) and origin is not None:
        return origin.layout
    ranks = 4 if ranks is None and nodes is None else ranks
    try:
        layout = parse_nodes("1" if nodes is None else nodes, ranks)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    wrong = settings.misfit(layout, layout.size)
    if wrong is not None:
        raise click.ClickException(f"{wrong}; to see what it says of its own, give neither -n nor --nodes")
    return layout


def _printed(
    settings: Settings, collective: Collective, layout: Layout, library: str, lengths: Sequence[int], *, narrow: bool
) -> Printed:
    """Return what is chosen for a collective on a layout, in words."""
    printed = Printed(
        title=f"{collective.value}, {layout.size} ranks, nodes: {layout}, {library}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    printed.add_column("bytes", justify="right", no_wrap=True)
    # In 80 columns names of algorithms stay whole, if the other columns leave them room.
    for column, width in ("memory", 10), ("takes", 18), ("by", 11), ("because", None):
        printed.add_column(column, width=width if narrow else None, overflow="fold")
    prices = {memory: Prices(collective, layout, memory) for memory in Memory} if layout.size > 1 else {}
    for nbytes in lengths:
        told: dict[tuple[str, str, str], list[tuple[Memory, bool]]] = {}
        for native, memory in product((False, True), Memory):
            found = settings.found(Case(collective, nbytes, layout, memory, library if native else None))
            words = str(found.choice), _origin(found), _reason(found, nbytes, prices.get(memory))
            told.setdefault(words, []).append((memory, native))
        for words, places in told.items():
            printed.add_row(f"{nbytes:,}", _where(places), *words)
    return printed


def _where(places: Sequence[tuple[Memory, bool]]) -> str:
    """Say for which memory a choice is, and whether only where the MPI library's own collective may be taken."""
    memories, natives = (dict.fromkeys(each) for each in zip(*places, strict=True))
    if len(places) < len(memories) * len(natives):
        return "; ".join(_where([place]) for place in places)
    which = "any" if len(memories) == len(Memory) else next(iter(memories)).value
    return which if False in natives else f"{which}, or MPI's own"


def _measured_library(settings: Settings, library: str | None) -> str:
    """Return the MPI library to choose for, and say so if no row was measured with the one that is asked for."""
    if library is None:
        return _library_of(settings)
    known = sorted({row.library for table in settings.tables for row in table.rows if row.library is not None})
    if library not in known:
        click.echo(f"No row was measured with {library}, only with {' and '.join(known)}.", err=True)
    return library


def _library_of(settings: Settings) -> str:
    """Return the MPI library that a table was measured with, or that of mpi4py, or words for any."""
    table = settings.table
    if table is not None and table.origin is not None:
        known = {row.library for row in table.rows if row.library is not None}
        if len(known) == 1:
            return known.pop()
    try:
        return start.mpi_vendor()
    except click.ClickException:  # a table can be looked at where there is no MPI library
        return "any MPI library"


def _origin(found: Found) -> str:
    if found.table is None:
        return FORCED
    return f"rows[{found.number}] of {found.table.name}"


def _reason(found: Found, nbytes: int, prices: Prices | None) -> str:
    """Return the times of the fastest candidates: measured at the nearest length, or else by the model."""
    if found.table is None:
        return "it is forced"
    if found.row is not None and found.row.times:
        times = found.row.times
        nearest = min(times, key=lambda length: abs(math.log((length + 1) / (nbytes + 1))))
        return f"measured at {nearest:,} B: {'; '.join(_priced(str(found.choice), times[nearest]))}"
    if found.choice.native:
        return "it was measured on nodes and virtual clusters: docs/performance.md"
    if prices is None:
        return "there is nobody else"
    predicted = {str(choice): taken for choice, taken in prices.seconds(nbytes).items()}
    return f"the model says {'; '.join(_priced(str(found.choice), predicted))}"


def _priced(chosen: str, times: Mapping[str, float]) -> Iterator[str]:
    """Yield the time of what is chosen, and then those of the fastest others."""
    if chosen not in times:
        yield f"{chosen} was not timed"
    others = sorted((name for name in times if name != chosen), key=times.__getitem__)
    shown = [chosen, *others[: SHOWN - 1]] if chosen in times else others[:SHOWN]
    yield from (f"{name} {1e6 * times[name]:,.1f} us" for name in shown)
