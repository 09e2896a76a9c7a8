"""``mpiagg bench``: the hand-written collectives beside the MPI library's own, checked and timed in one run."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from mpiagg.arrays import HOST, OPS, WIRES, check_wire_dtype, check_wire_op, reduction
from mpiagg.benchmarks.flags import (
    BUFFERS,
    CUDA,
    DTYPES,
    LARGEST,
    PEERS,
    PROTOCOLS,
    SMALLEST,
    BenchFlags,
    dtype_of,
    parse_device,
    parse_range,
)
from mpiagg.cli.quantities import POSITIVE, Written, parse_rate, refuse_given
from mpiagg.cli.variables import checked
from mpiagg.cuda.placement import bind_device
from mpiagg.errors import DeviceError
from mpiagg.launch import job
from mpiagg.launch import start as launch
from mpiagg.plans.choices import NATIVE, NCCL
from mpiagg.schedules import Collective, algorithm, algorithms

if TYPE_CHECKING:
    from mpi4py import MPI

F = TypeVar("F", bound=Callable[..., Any])

WIRE_OPS: Final = tuple(op for op in OPS if op != "prod")
"""The operators of mpiagg.AllReduce, which carries out what has a wire."""


def _known(flags: BenchFlags) -> tuple[str, ...]:
    """Return the algorithms to measure.

    Raises
    ------
    click.UsageError
        If one does not serve the collective.
    """
    serving = algorithms(flags.collective) + ((NCCL,) if flags.device != HOST.name else ())
    for name in flags.algorithm:
        if name in ("auto", NATIVE, *serving):
            continue
        try:
            algorithm(name).generator(Collective(flags.collective))  # it may have a number behind its name
        except ValueError as error:
            if name.partition("-")[0] in serving:
                raise click.UsageError(str(error)) from None
            known = ", ".join(("auto", NATIVE, *serving))
            raise click.UsageError(f"no algorithm {name!r} for {flags.collective}; known: {known}") from None
    return tuple(name for name in flags.algorithm if name != NATIVE) if flags.algorithm else ("auto", *serving)


def _check(flags: BenchFlags, size: int) -> None:
    """Raise click.UsageError for what only the number of ranks, or two flags together, show to be wrong."""
    if flags.root >= size:
        raise click.UsageError(f"--root must be a rank from 0 to {size - 1}, not {flags.root}")
    if Collective(flags.collective).reduces:
        try:
            reduction(flags.op, dtype_of(flags.dtype), size)
        except TypeError as error:
            raise click.UsageError(str(error)) from None
        if Collective(flags.collective).prefix and flags.op == "avg":
            raise click.UsageError(f"{flags.collective} has no op 'avg'")
    if not flags.lengths():
        raise click.UsageError(f"none of mlbench's sizes is up to {flags.sizes.largest} bytes")
    _check_device(flags)
    if "gloo" in flags.beside and find_spec("torch") is None:
        raise click.ClickException("--beside gloo needs torch: pip install torch")
    if flags.wires:
        _check_wires(flags)


def _check_device(flags: BenchFlags) -> None:
    """Raise click.UsageError for what is not measured where the arrays lie."""
    if flags.device == HOST.name:
        if "mpi" in flags.beside:
            raise click.UsageError("--beside mpi is for arrays on a device; on the host that is the row native")
    elif "gloo" in flags.beside or flags.protocol != "powers":
        raise click.UsageError("--beside gloo and --sizes mlbench are for arrays on the host, not for --device")


def _check_wires(flags: BenchFlags) -> None:
    """Raise click.UsageError if values of these flags cannot travel in fewer bits."""
    if flags.collective != "allreduce" or flags.op not in WIRE_OPS or flags.protocol != "powers":
        raise click.UsageError(f"--wire is for allreduce by {', '.join(WIRE_OPS)}, and not for mlbench's sizes")
    try:
        for wire in flags.wires:
            check_wire_op(wire, flags.op)
            check_wire_dtype(wire, dtype_of(flags.dtype))
    except (TypeError, ValueError) as error:
        raise click.UsageError(str(error)) from None


SIZES: Final = click.option(
    "-m",
    "--message-size",
    "sizes",
    type=Written("size", parse_range),
    metavar="[MIN:]MAX",
    default=f"{SMALLEST}:{LARGEST // 2**20}M",
    help="Bytes of the vector, with suffixes K, M, G.",
)


def device_option(words: str) -> Callable[[F], F]:
    """Return the option that names a device."""
    return click.option("-d", "--device", type=Written("device", parse_device), default=HOST.name, help=words)


def bind_early(device: str) -> None:
    """Take this rank's GPU, if that is the device and the launcher has told this process that it is a rank."""
    if device == CUDA and launch.launched_ranks() is not None:
        with suppress(DeviceError):  # what is wrong is told when all ranks are together
            bind_device()


_EXAMPLES: Final = """\b
mpiagg bench                              starts 2 ranks on this machine
mpiagg bench allgather -a ring -m 1K:1M   chooses what to measure
mpiagg bench --beside gloo                takes torch.distributed in
mpiagg bench -d cuda -n 4                 measures arrays on GPUs
mpiexec -n 8 mpiagg bench                 is a rank of that job
"""


@click.command(epilog=_EXAMPLES)
@click.argument(
    "collective", type=click.Choice([entry.value for entry in Collective]), default="allreduce", metavar="[COLLECTIVE]"
)
@job.ranks_option(default=2)
@click.option("-a", "--algorithm", multiple=True, help="What to measure; repeatable.  [default: auto and all]")
@click.option("--beside", multiple=True, type=click.Choice(PEERS), help="A peer to measure, too; gloo needs torch.")
@click.option("--wire", "wires", multiple=True, type=click.Choice(WIRES), help="Values by a wire, too; repeatable.")
@SIZES
@click.option("--factor", type=click.IntRange(min=2), default=4, help="From one size to the next.")
@click.option(
    "--sizes",
    "protocol",
    type=click.Choice(PROTOCOLS),
    default="powers",
    help="mlbench: its sizes up to MAX; 100 blocking calls each, timed alone, on new random values.",
)
@click.option("-i", "--iterations", type=click.IntRange(min=1), default=1000, help="Timed calls a size, at most.")
@click.option("-x", "--warmup", type=click.IntRange(min=0), default=10, help="Calls before them, at most.")
@click.option("--time-limit", type=POSITIVE, default=4.0, help="Seconds a size, about.")
@click.option("-f", "--full", is_flag=True, help="Add count, type, mean, minimum, maximum, iterations.")
@click.option("--dtype", type=click.Choice(DTYPES), default="float32")
@click.option("--op", type=click.Choice(["sum", "avg", "min", "max", "prod"]), default="sum")
@click.option("--root", type=click.IntRange(min=0), default=0, help="Of reduce, broadcast, gather and scatter.")
@click.option("--lanes", type=click.IntRange(1, 64), help="Interleaved parts.  [default: the algorithm's choice]")
@click.option("--plan/--call", "planned", default=True, help="Time persistent plans, or blocking calls.")
@device_option("Where the arrays lie: cpu; cuda, each rank's GPU by its place on the node; cuda:1.")
@click.option("--buffer", type=click.Choice(BUFFERS), default="any", help="registered: memory from mpiagg.empty.")
@click.option(
    "--link-rate",
    type=Written("rate", lambda text: 8 * parse_rate(text)),
    metavar="RATE",
    help="The limit is what links of this rate between nodes can carry, such as 1gbit.  [default: a plain copy]",
)
@click.option("--json", "json_file", type=job.OutputFile(), help="Save the rows.")
def bench(ranks: int, json_file: Path | None, **options: object) -> None:
    """Time hand-written collectives beside the MPI library's own, and check their results.

    At every size, all algorithms and the MPI library's blocking call in place take turns. median and p99 are over
    blocks of calls, of the slowest rank's mean in each block. algbw is the size over the median; busbw is what the
    busiest link must have carried at least; #wrong is how many elements differ from the right result; /native is the
    median over the MPI library's, /gloo over Gloo's, and /limit over that of one plain copy of the vector on every
    rank, or over what the links take at least.

    On a device, native works on copies in the host's memory. by-hand is a copy to the host, MPI_Allreduce and a copy
    back, one after the other; registered is auto on memory from mpiagg.empty; --beside mpi is the MPI library's
    collective of the device's arrays, where messages reach them.
    """
    flags = BenchFlags(**options)  # type: ignore[arg-type]  # click gives them as declared above
    if flags.protocol == "mlbench":
        if flags.planned:
            refuse_given(("planned",), "is not for --sizes mlbench, which times calls")
        refuse_given(("factor",), "is not for --sizes mlbench")
        flags = flags._replace(planned=False)
    if not Collective(flags.collective).rooted:
        refuse_given(("root",), f"is not for {flags.collective}, which has no root")
    if not Collective(flags.collective).reduces:
        refuse_given(("op",), f"is not for {flags.collective}, which does not reduce")
    names = _known(flags)
    _check(flags, launch.launched_ranks() or ranks)
    bind_early(flags.device)

    def work(world: MPI.Intracomm) -> int:
        from mpiagg.benchmarks import sweep  # noqa: PLC0415 - needs MPI, which only a rank may load

        measured = sweep.Sweep(world, flags, names, show=click.echo if world.rank == 0 else None)
        rows = list(measured.rows())
        if world.rank != 0:
            return 0
        if json_file is not None:
            job.write(json_file, json.dumps(measured.record(rows), indent=1) + "\n")
        wrong = sum(row.wrong for row in rows)
        if wrong:
            click.echo(f"Error: {wrong} elements are wrong", err=True)
        return 1 if wrong else 0

    job.run(ranks, checked(work))
