"""``mpiagg info``: what a job has to go by: MPI, ranks and nodes, GPUs, and how messages reach these."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
import mpi4py
import numpy as np
from rich.table import Table
from rich.text import Text

import mpiagg
from mpiagg import placement
from mpiagg.arrays import cuts_of, ranges
from mpiagg.cli import job, launch
from mpiagg.cli import probe as probing
from mpiagg.errors import DeviceError

if TYPE_CHECKING:
    from mpi4py import MPI

_EXAMPLES: Final = """\b
mpiagg info                tells of this process alone
mpiexec -n 4 mpiagg info   tells of the ranks of that job
mpiagg info --probe        sends device memory between two ranks, in a job of its own
"""

MOST_HOSTS: Final = 8
"""How many nodes are told by their names."""

_THREADS: Final = ("single", "funneled", "serialized", "multiple")


@dataclass
class Rank:
    """What a rank knows of itself.

    Attributes
    ----------
    rank : int
        In the world.
    host : str
        The name of its node.
    able : bool
        Whether its messages reach device memory.
    reason : str
        How that is known.
    cupy : str
        CuPy's version, or why it cannot be imported.
    visible : list of str
        The UUIDs of the devices that it sees.
    device : int or None
        The one that it has: a number among them.
    troubles : list of pairs of str
        What should be otherwise here, and what would help.
    """

    rank: int
    host: str
    able: bool = False
    reason: str = ""
    cupy: str = ""
    visible: list[str] = field(default_factory=list)
    device: int | None = None
    troubles: list[tuple[str, str]] = field(default_factory=list)

    @property
    def identity(self) -> str:
        """The UUID of its device, or nothing."""
        return "" if self.device is None else self.visible[self.device]


class Problem(NamedTuple):
    """Something that should be otherwise, and what would help."""

    what: str
    remedy: str


@dataclass
class Report:
    """What is told.

    Attributes
    ----------
    mpiagg, mpi4py, mpi, standard, threads : str
        Versions; the level of thread support.
    nodes : list of lists of int
        Which ranks are on each.
    ranks : list of Rank
        All of them.
    probe : Probed or None
        What a probe said.
    """

    mpiagg: str
    mpi4py: str
    mpi: str
    standard: str
    threads: str
    nodes: list[list[int]]
    ranks: list[Rank]
    probe: probing.Probed | None = None

    @property
    def able(self) -> bool:
        """Whether the messages of all ranks reach device memory: the ranks go by it together."""
        return all(rank.able for rank in self.ranks)

    @property
    def reason(self) -> str:
        """How that is known, of the first rank that is not able."""
        return next((rank.reason for rank in self.ranks if not rank.able), self.ranks[0].reason)

    @property
    def shared(self) -> list[placement.Sharing]:
        """Which ranks share a device."""
        return placement.shared_devices([rank.identity for rank in self.ranks], [rank.visible for rank in self.ranks])

    def as_json(self) -> dict[str, Any]:
        """Return all of it as JSON has it."""
        return {
            **asdict(self),
            "cuda_aware": {"able": self.able, "reason": self.reason},
            "probe": None if self.probe is None else self.probe._asdict(),
            "shared": [sharing._asdict() for sharing in self.shared],
            "problems": [problem._asdict() for problem in problems(self)],
        }


@click.command(epilog=_EXAMPLES)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@click.option("--probe", is_flag=True, help="Also try it out, between two ranks of this node.")
@click.option("--memory", type=click.Choice(list(probing.MEMORIES)), default="cuda", hidden=True)
def info(*, as_json: bool, probe: bool, memory: str) -> None:
    """Tell what mpiagg finds: the MPI library, ranks, nodes, GPUs, whether messages reach their memory, and problems.

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
    mine = Rank(rank=0, host="")
    _take_device(mine)

    def work(world: MPI.Intracomm) -> int:
        report = _report(world, mine, probed)
        if report is not None:
            _tell(report, as_json=as_json)
        return 0

    if alone:
        sys.exit(work(job.join()))
    job.run(1, work)


def _take_device(mine: Rank) -> None:
    """Take this rank's device, and write down what comes of it."""
    try:
        cuda = placement.runtime()
        mine.cupy = sys.modules["cupy"].__version__
        mine.visible = [cuda.identity(ordinal) for ordinal in range(cuda.count())]
        mine.device = placement.bind(cuda)
    except DeviceError as error:
        mine.cupy = mine.cupy or f"cannot be imported: {error.__cause__}"
        # Without CuPy where there is no device to use it on, nothing is amiss.
        if not isinstance(error.__cause__, ModuleNotFoundError) or placement.devices_of_node() is not None:
            mine.troubles.append((str(error), "until then this rank has no arrays on GPUs"))


def _report(world: MPI.Intracomm, mine: Rank, probed: probing.Probed | None) -> Report | None:
    """Return the report on rank 0; collective."""
    from mpi4py import MPI  # noqa: PLC0415 - only a process that is a rank may load MPI

    from mpiagg.transport.awareness import awareness  # noqa: PLC0415 - needs MPI
    from mpiagg.transport.nodes import Node  # noqa: PLC0415 - needs MPI

    mine.rank, mine.host = world.rank, MPI.Get_processor_name()
    try:
        mine.able, mine.reason = awareness()
    except ValueError as error:
        mine.reason = str(error)
        mine.troubles.append((mine.reason, "mpiagg refuses to communicate until it is set so, or unset"))
    node = Node(world)
    layout = node.layout
    node.free()
    told = _gather(world, json.dumps(asdict(mine)))
    if world.rank:
        return None
    levels = {getattr(MPI, f"THREAD_{level.upper()}"): level for level in _THREADS}
    return Report(
        mpiagg=mpiagg.__version__,
        mpi4py=mpi4py.__version__,
        mpi=job.vendor(),
        standard=".".join(map(str, MPI.Get_version())),
        threads=levels[MPI.Query_thread()],
        nodes=[list(ranks) for ranks in layout.nodes],
        ranks=[Rank(**json.loads(text)) for text in told],
        probe=probed,
    )


def _gather(world: MPI.Intracomm, text: str) -> list[str]:
    """Return the texts of all ranks on rank 0; collective."""
    from mpi4py import MPI  # noqa: PLC0415 - only a process that is a rank may load MPI

    data = text.encode()
    lengths = np.empty(world.size, np.int64)
    world.Allgather(np.array([len(data)], np.int64), lengths)
    if world.rank:
        world.Gatherv([data, MPI.BYTE], None)
        return []
    everything = bytearray(int(lengths.sum()))
    world.Gatherv([data, MPI.BYTE], [everything, lengths.tolist(), MPI.BYTE])
    return [everything[start:stop].decode() for start, stop in ranges(cuts_of(lengths.tolist()))]


# -- what is wrong


def problems(report: Report) -> list[Problem]:
    """Return what should be otherwise, with what would help."""
    troubles: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank in report.ranks:
        for what, remedy in rank.troubles:
            troubles[what, remedy].append(rank.rank)
    return [
        *(Problem(f"{_ranks(ranks)}: {what}", remedy) for (what, remedy), ranks in troubles.items()),
        *_about_messages(report),
        *_about_devices(report),
    ]


def _about_messages(report: Report) -> Iterator[Problem]:
    unable = [rank.rank for rank in report.ranks if not rank.able]
    if unable and len(unable) < len(report.ranks):
        yield Problem(
            f"messages of {_ranks(unable)} do not reach device memory ({report.reason}), and those of the others do: "
            "all go by way of the host",
            "give all ranks the same environment and the same MPI library",
        )
    probe = report.probe
    if probe is not None and probe.memory == "cuda" and probe.able is True and not report.able:
        yield Problem(
            "messages do reach device memory, as the probe shows, and mpiagg does not know it",
            "set MPIAGG_CUDA_AWARE=1; but the probe was of this node alone",
        )
    if probe is not None and probe.memory == "cuda" and probe.able is False and report.able:
        yield Problem("messages do not reach device memory, as the probe shows", "set MPIAGG_CUDA_AWARE=0")


def _about_devices(report: Report) -> Iterator[Problem]:
    for sharing in report.shared:
        if sharing.accident:
            yield Problem(
                f"{_ranks(sharing.ranks)} share a GPU, though they see one that nobody uses",
                "let every rank see all GPUs of its node (Slurm: --gpus-per-node=N --gpu-bind=none)",
            )
    for node in report.nodes:
        single = [rank for rank in node if len(report.ranks[rank].visible) == 1]
        if len({report.ranks[rank].identity for rank in single}) > 1:
            yield Problem(
                f"{_ranks(single)} see one GPU each, so they cannot map each other's memory",
                "let every rank see all GPUs of its node (Slurm: --gpus-per-node=N --gpu-bind=none)",
            )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


# -- how it is told


def _tell(report: Report, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(report.as_json(), indent=1))
        return
    console = job.console()
    console.print(_overview(report))
    if any(rank.visible for rank in report.ranks):
        console.print(_devices(report))
    for problem in problems(report):
        click.echo(f"Problem: {problem.what}.\n  Remedy: {problem.remedy}.")


def _overview(report: Report) -> Table:
    table = Table(title=f"mpiagg {report.mpiagg}", show_header=False, title_justify="left")
    _add(table, "MPI library", f"{report.mpi} (MPI {report.standard})")
    _add(table, "mpi4py", f"{report.mpi4py}, thread level {report.threads}")
    hosts = [f"{report.ranks[ranks[0]].host}: {len(ranks)}" for ranks in report.nodes]
    more = ", ..." if len(hosts) > MOST_HOSTS else ""
    nodes = "1 node" if len(hosts) == 1 else f"{len(hosts)} nodes"
    _add(table, "ranks", f"{len(report.ranks)} on {nodes} ({', '.join(hosts[:MOST_HOSTS])}{more})")
    _add(table, "CUDA-aware messages", f"{'yes' if report.able else 'no'}: {report.reason}")
    if report.probe is not None:
        answer = {True: "yes", False: "no", None: "could not be tried"}[report.probe.able]
        _add(table, f"probe of {report.probe.memory} memory", f"{answer}: {report.probe.reason}")
    _add(table, "CuPy", "; ".join(dict.fromkeys(rank.cupy for rank in report.ranks)))
    gpus = {identity for rank in report.ranks for identity in rank.visible}
    why = " for more ranks: shared" if any(not sharing.accident for sharing in report.shared) else ""
    _add(table, "GPUs", f"{len(gpus)}{why}" if gpus else "none")
    return table


def _devices(report: Report) -> Table:
    table = Table("rank", "node", "GPU", "of", "UUID", "shared with")
    shared = {rank: sharing.ranks for sharing in report.shared for rank in sharing.ranks}
    for rank in report.ranks:
        others = ", ".join(str(other) for other in shared.get(rank.rank, ()) if other != rank.rank)
        number = "-" if rank.device is None else str(rank.device)
        _add(table, str(rank.rank), rank.host, number, str(len(rank.visible)), rank.identity or "-", others or "-")
    return table


def _add(table: Table, *texts: str) -> None:
    # As texts: rich takes strings for markup, and swallows what stands in brackets.
    table.add_row(*map(Text, texts))
