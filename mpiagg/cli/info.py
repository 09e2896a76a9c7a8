"""``mpiagg info``: what a job runs on, and what is wrong with it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from rich.table import Table
from rich.text import Text

import mpiagg
from mpiagg.cli import facts
from mpiagg.cli import probe as probing
from mpiagg.cli.diagnostics import JobReport, by_value, nbytes_said, problems, said
from mpiagg.cli.facts import Problem, Rank
from mpiagg.launch import job
from mpiagg.launch import start as launch
from mpiagg.schedules import Layout

if TYPE_CHECKING:
    from mpi4py import MPI

_EXAMPLES: Final = """\b
mpiagg info                describes this process alone
mpiexec -n 4 mpiagg info   describes the ranks of that job; so does srun
mpiagg info --probe        sends device memory between two ranks, in a job of its own
"""

MOST_HOSTS: Final = 8
"""How many nodes are told by their names."""

PROBLEM_FOUND: Final = 1
"""The exit status where a problem is an error."""

_PRINTED: Final = "-"
"""The file that stands for the standard output."""

_LINEAR: Final = ("OMP_", "OPENBLAS_", "MKL_")
_OWN: Final = ("MPIAGG_", "MPI4PY_", "CUDA_")
_OTHERS: Final = {"MPICH": ("OMPI_MCA_",), "Open MPI": ("MPIR_CVAR_", "MPICH_", "I_MPI_", "MV2_")}


@click.command(epilog=_EXAMPLES)
@click.option(
    "--json",
    "json_file",
    is_flag=False,
    flag_value=_PRINTED,
    type=job.OutputFile(allow_dash=True),
    metavar="[FILE]",
    help="Save the numbers; without a file, print them in place of the tables.",
)
@click.option("--probe", is_flag=True, help="Also try it out, between two ranks of this node.")
@click.option("--memory", type=click.Choice(list(probing.MEMORIES)), default="cuda", hidden=True)
def info(*, json_file: Path | None, probe: bool, memory: str) -> None:
    """Tell what mpiagg finds: the MPI library, launcher, ranks, nodes, shared memory, GPUs; and problems with remedies.

    The exit status is 1 where a problem is an error, and 0 otherwise.

    Every rank takes the GPU that mpiagg.bind_device() gives it. Where messages do not reach the memory of GPUs, arrays
    there are sent by way of the host.
    """
    alone = launch.launched_ranks() is None
    if probe and not alone:
        raise click.UsageError("--probe starts a job of its own: run it outside of mpiexec and srun")
    if alone:
        launch.mpi_vendor()  # tells what to do if there is no MPI library
    # Before MPI starts: what has initialised it can start no job, and devices are to be chosen before.
    probed = probing.probe(memory) if probe else None
    mine = Rank()
    facts.take_device(mine)
    facts.of_process(mine)
    fault = job.initialise()
    if fault is not None:
        # Jobs of one: the first of them tells it for all. If another failed first, some launchers would end this one.
        if mine.rank:
            sys.exit(0)
        facts.of_mpi(mine, fault)
        _tell(JobReport(_standard(), [mine]), json_file=json_file)
        sys.exit(PROBLEM_FOUND)

    def work(world: MPI.Intracomm) -> int:
        facts.of_mpi(mine, None)
        report = JobReport(_standard(), facts.gather(world, mine), probed)
        _check_table(report)
        if world.rank == 0:
            _tell(report, json_file=json_file)
        return PROBLEM_FOUND * any(problem.level == "error" for problem in problems(report))

    from mpi4py import MPI  # noqa: PLC0415 - only a process that is a rank may load MPI

    sys.exit(job.take_part(MPI.COMM_WORLD, work))


def _standard() -> str:
    from mpi4py import MPI  # noqa: PLC0415 - only a process that is a rank may load MPI

    return ".".join(map(str, MPI.Get_version()))


def _check_table(report: JobReport) -> None:
    """Let the first rank be troubled if the tuning table was measured on other nodes than these."""
    from mpiagg.tables import settings  # noqa: PLC0415 - only here

    if any(trouble.name == "tuning" for rank in report.ranks for trouble in rank.troubles):
        return
    try:
        settings().check(Layout(tuple(map(tuple, report.nodes))), len(report.ranks))
    except ValueError as error:
        report.ranks[0].troubles.append(Problem("error", "tuning", str(error), facts.REFUSED_TUNING))


# -- how it is told


def as_record(report: JobReport) -> dict[str, Any]:
    """Return all of it as JSON has it."""
    first = report.ranks[0]
    return {
        "mpiagg": mpiagg.__version__,
        "mpi4py": first.versions.get("mpi4py"),
        "mpi": first.mpi,
        "standard": report.standard,
        "threads": first.threads,
        "launcher": {"name": first.launcher, "ranks": first.launched},
        "nodes": report.nodes,
        "ranks": [
            asdict(rank) | {"troubles": [trouble._asdict() for trouble in rank.troubles]} for rank in report.ranks
        ],
        "cuda_aware": {"able": report.able, "reason": report.reason},
        "probe": None if report.probe is None else report.probe._asdict(),
        "shared": [sharing._asdict() for sharing in report.shared],
        "problems": [problem._asdict() for problem in problems(report)],
    }


def _tell(report: JobReport, *, json_file: Path | None) -> None:
    if json_file is not None:
        numbers = json.dumps(as_record(report), indent=1)
        if str(json_file) == _PRINTED:
            click.echo(numbers)
            return
        job.write(json_file, numbers + "\n")
    console = job.console()
    console.print(_overview(report))
    if any(rank.visible for rank in report.ranks):
        console.print(_devices(report))
    found = problems(report)
    for problem in found:
        click.echo(f"{problem.level.capitalize()}: {problem.what}.\n  Remedy: {problem.remedy}.")
    if not found:
        click.echo("No problem was found.")


def _overview(report: JobReport) -> Table:
    table = Table(title=f"mpiagg {mpiagg.__version__}", show_header=False, title_justify="left")

    def add(name: str, of: Callable[[Rank], str]) -> None:
        """Add what ranks say; once, where they say the same."""
        _add(table, name, by_value(report.ranks, of))

    add("MPI library", lambda rank: f"{rank.mpi} (MPI {report.standard})")
    add("launcher", _launcher)
    add("thread level", lambda rank: rank.threads)
    _add(table, "ranks", _ranks(report))
    add("processors", lambda rank: f"{said(rank.cpus).split(' ', 1)[1]} of {rank.processors}")
    add("linear algebra", lambda rank: _with_settings(f"{rank.linear} thread{'s' * (rank.linear > 1)}", rank, _LINEAR))
    for ranks in report.machines[:MOST_HOSTS]:
        _add(table, f"shared memory of {ranks[0].host}", _shared_memory(ranks))
    reads = {True: "read", False: "may not be read: long arrays go by messages", None: "there is none here"}
    add("memory of other ranks", lambda rank: reads[rank.reads])
    add("transports", lambda rank: _with_settings(rank.transport, rank, but=_elsewhere(rank)))
    _add(table, "CUDA-aware messages", f"{'yes' if report.able else 'no'}: {report.reason}")
    if report.probe is not None:
        answer = {True: "yes", False: "no", None: "could not be tried"}[report.probe.able]
        _add(table, f"probe of {report.probe.memory} memory", f"{answer}: {report.probe.reason}")
    add("CuPy", lambda rank: rank.cupy)
    gpus = {identity for rank in report.ranks for identity in rank.visible}
    why = " for more ranks: shared" if any(not sharing.accident for sharing in report.shared) else ""
    _add(table, "GPUs", f"{len(gpus)}{why}" if gpus else "none")
    add("algorithms by", lambda rank: rank.tuning)
    add("settings", lambda rank: _with_settings("", rank, _OWN) or "none")
    add("versions", lambda rank: ", ".join(f"{name} {version}" for name, version in rank.versions.items()))
    return table


def _elsewhere(rank: Rank) -> tuple[str, ...]:
    """Return how settings begin that have nothing to do with how a rank's MPI library communicates."""
    return (*_LINEAR, *_OWN, *_OTHERS.get(rank.vendor, ()))


def _launcher(rank: Rank) -> str:
    return "none" if rank.launcher is None else f"{rank.launcher}, of {rank.launched} rank{'s' * (rank.launched != 1)}"


def _ranks(report: JobReport) -> str:
    if report.ranks[0].stopped:
        return "none: MPI cannot start"
    hosts = [f"{report.ranks[ranks[0]].host}: {len(ranks)}" for ranks in report.nodes]
    more = ", ..." if len(hosts) > MOST_HOSTS else ""
    nodes = "1 node" if len(hosts) == 1 else f"{len(hosts)} nodes"
    return f"{len(report.ranks)} on {nodes} ({', '.join(hosts[:MOST_HOSTS])}{more})"


def _shared_memory(ranks: list[Rank]) -> str:
    shm = ranks[0].shm
    if shm is None:
        return f"{facts.SHM} is not there"
    free, total = map(nbytes_said, shm)
    return f"{facts.SHM}: {free} of {total} free, {nbytes_said(shm[0] // len(ranks))} for each rank"


def _with_settings(text: str, rank: Rank, of: tuple[str, ...] = ("",), but: tuple[str, ...] = ()) -> str:
    """Return a text and the settings of the environment that belong to it."""
    found = [
        f"{variable}={value}"
        for variable, value in rank.environment.items()
        if variable.startswith(of) and not variable.startswith(but)
    ]
    return f"{text} ({', '.join(found)})" if text and found else text or ", ".join(found)


def _devices(report: JobReport) -> Table:
    table = Table("rank", "node", "GPU", "of", "UUID", "shared with")
    shared = {rank: sharing.ranks for sharing in report.shared for rank in sharing.ranks}
    for rank in report.ranks:
        others = [other for other in shared.get(rank.rank, ()) if other != rank.rank]
        number = "-" if rank.device is None else str(rank.device)
        mates = ", ".join(map(str, others)) or "-"
        _add(table, str(rank.rank), rank.host, number, str(len(rank.visible)), rank.identity or "-", mates)
    return table


def _add(table: Table, *texts: str) -> None:
    # As texts: rich takes strings for markup, and swallows what stands in brackets.
    table.add_row(*map(Text, texts))
