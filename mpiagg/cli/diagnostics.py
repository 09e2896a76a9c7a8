"""What is wrong with a job, and what would help: judged from what its ranks know of themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, TypeVar

from mpiagg.cli.facts import SHM, Problem, Rank, Severity
from mpiagg.cli.probe import Probed
from mpiagg.cli.variables import REFUSED, VARIABLES, should_say, unknown
from mpiagg.common.arguments import NODES, ranks_of_nodes
from mpiagg.cuda import placement
from mpiagg.launch.launchers import ALONE
from mpiagg.schedules import Layout

T = TypeVar("T")

MIB: Final = 2**20

SMALL: Final = 64 * MIB
"""Bytes of shared memory that containers have where nothing is said."""

_SEE_ALL: Final = "let every rank see all GPUs of its node (Slurm: --gpus-per-node=N --gpu-bind=none)"

_FOREIGN: Final = {
    "the mpiexec of Open MPI": "MPICH",
    "an mpiexec of the MPICH family": "Open MPI",
    "the mpiexec of MVAPICH": "Open MPI",
}
"""Launchers, and the library that each of them is certainly not of."""

_OURS: Final = ("mpiagg", "mpi4py")
"""Versions that ranks must agree on to understand each other."""


@dataclass
class JobReport:
    """What is known of a job.

    Attributes
    ----------
    standard : str
        The version of the MPI standard.
    ranks : list of Rank
        All of them.
    probe : Probed or None
        What a probe said.
    """

    standard: str
    ranks: list[Rank]
    probe: Probed | None = None

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

    @property
    def machines(self) -> list[list[Rank]]:
        """The ranks that share memory, together."""
        return together(self.ranks, lambda rank: rank.machine)

    @property
    def nodes(self) -> list[list[int]]:
        """Which ranks mpiagg takes for those of one node."""
        counts = _counts(self)
        group = Layout.of(counts).node_of if counts else lambda _: 0
        places = range(len(self.ranks))
        return together(places, lambda place: (self.ranks[place].machine, group(place)))


def together(things: Sequence[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Return things with the same key together, in the order in which they come first."""
    found: dict[Hashable, list[T]] = defaultdict(list)
    for thing in things:
        found[key(thing)].append(thing)
    return list(found.values())


def said(ranks: Sequence[Rank] | Sequence[int]) -> str:
    """Return ranks in words, as in ``ranks 0-3, 7``."""
    numbers = sorted(rank.rank if isinstance(rank, Rank) else rank for rank in ranks)
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    words = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return f"rank {words[0]}" if len(numbers) == 1 else f"ranks {', '.join(words)}"


def nbytes_said(nbytes: int) -> str:
    """Return a number of bytes as it is said."""
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes // MIB} MiB"


def problems(report: JobReport) -> list[Problem]:
    """Return what should be otherwise, with what would help; what is worst comes first."""
    found = [problem for check in CHECKS for problem in check(report)]
    return sorted(found, key=lambda problem: ("error", "warning", "note").index(problem.level))


# -- how the job was started


def launch(report: JobReport) -> Iterator[Problem]:
    """Ranks that do not find each other, and launchers of another library."""
    rank = report.ranks[0]
    if rank.stopped:
        yield Problem("error", "cannot-start", rank.stopped, rank.mpiexec)
        return
    if len(report.ranks) > 1:
        return
    if rank.launched is not None and rank.launched > 1 and rank.environment.get(ALONE, "0") in {"", "0"}:
        yield Problem(
            "error",
            "copies",
            f"{rank.launcher} started {rank.launched} processes, but {rank.mpi} sees a job of one rank: each of them "
            "works alone, as rank 0 of 1, and mpiagg refuses to communicate",
            f"{rank.mpiexec}; if each is to work for itself, set {ALONE}=1",
        )
    elif _FOREIGN.get(rank.launcher or "") == rank.vendor:
        yield Problem(
            "warning",
            "wrong-mpiexec",
            f"{rank.launcher} started this rank, and mpi4py loads {rank.mpi}: more ranks would not find each other",
            f"start it with the mpiexec of {rank.vendor}",
        )
    elif rank.launched is None and (rank.tasks or 1) > 1:
        yield Problem(
            "note",
            "not-launched",
            f"Slurm's allocation is for {rank.tasks} tasks, and no launcher started this process: it is alone",
            "start it with srun or mpiexec, if it is to be a job of all of them",
        )


def threads(report: JobReport) -> Iterator[Problem]:
    """Whether several threads may call MPI."""
    low = [rank for rank in report.ranks if rank.threads != "multiple" and not rank.stopped]
    if low:
        yield Problem(
            "warning",
            "thread-level",
            f"{said(low)}: MPI is initialised for thread level {low[0].threads}, so nothing goes on while a rank "
            "computes, and nonblocking calls of mpiagg.Comm are the MPI library's own",
            "unset MPI4PY_RC_THREAD_LEVEL, and leave mpi4py.rc.thread_level as it is; some libraries need a variable "
            "of their own for it",
        )


def addresses(report: JobReport) -> Iterator[Problem]:
    """Whether ranks find those of other nodes, whatever else a program has in its memory."""
    rank = report.ranks[0]
    by_ucx = rank.transport.startswith("ch4:ucx") and rank.environment.get("MPIR_CVAR_CH4_NETMOD", "ucx") == "ucx"
    if by_ucx and rank.environment.get("SLURM_MPI_TYPE") == "pmi2" and len(report.machines) > 1:
        other = "set MPIR_CVAR_CH4_NETMOD=ofi, or " if "ofi" in rank.transport else ""
        what = (
            "ranks tell Slurm their addresses in lines that are at times too long for it, by what else is in a "
            "program's memory: such a program fails in MPI_Init, with 'value not properly terminated'"
        )
        yield Problem("warning", "addresses", what, f"{other}make 'from mpi4py import MPI' the program's first import")


# -- the nodes


def processors(report: JobReport) -> Iterator[Problem]:
    """Whether every rank has a processor."""
    for ranks in report.machines:
        if len(ranks) > ranks[0].processors:
            yield _crowd(ranks)
            continue
        for same in together(ranks, lambda rank: tuple(rank.cpus)):
            if len(same) > len(same[0].cpus):
                many = len(same[0].cpus) > 1
                yield Problem(
                    "warning",
                    "binding",
                    f"{said(same)} on {ranks[0].host} may only run on processor{'s' * many} "
                    f"{said(same[0].cpus).split(' ', 1)[1]}, though there are {ranks[0].processors}",
                    "give every rank its own (Slurm: --cpus-per-task; mpiexec of Open MPI: --bind-to none or "
                    "--map-by core; of MPICH: -bind-to none or core), and ask for as many in the allocation",
                )


def _crowd(ranks: Sequence[Rank]) -> Problem:
    shared = len({cpu for rank in ranks for cpu in rank.cpus})
    what = f"{said(ranks)} on {ranks[0].host} share {shared} processor{'s' * (shared > 1)}"
    if all(rank.yields for rank in ranks):
        return Problem(
            "note",
            "crowded",
            f"{what}; whoever waits yields, so that works, but is no way to measure",
            "start as many ranks as there are processors, except for tests",
        )
    setting = (
        "set OMPI_MCA_mpi_yield_when_idle=1, or tell mpiexec that there are too few: --oversubscribe"
        if ranks[0].vendor == "Open MPI"
        else "look for the library's setting by which it yields"
    )
    return Problem(
        "warning",
        "crowded",
        f"{what}, and the MPI library's own waits do not yield: those who wait keep those who work from it",
        f"start as many ranks as there are processors; else {setting}",
    )


def linear_algebra(report: JobReport) -> Iterator[Problem]:
    """Whether the threads of linear algebra have processors."""
    for ranks in report.machines:
        wanted, there = sum(rank.linear for rank in ranks), ranks[0].processors
        if wanted > there and any(rank.linear > 1 for rank in ranks):
            share = max(there // len(ranks), 1)
            yield Problem(
                "warning",
                "threads",
                f"{said(ranks)} on {ranks[0].host} take {wanted} threads for linear algebra, and there are {there} "
                "processors",
                f"set OMP_NUM_THREADS={share} and OPENBLAS_NUM_THREADS={share} (with MKL: MKL_NUM_THREADS={share})",
            )


def shared_memory(report: JobReport) -> Iterator[Problem]:
    """Whether there is memory for a node's ranks to share."""
    for ranks in report.machines:
        if ranks[0].shm is None:
            continue
        free, total = ranks[0].shm
        wanted = sum(rank.window for rank in ranks)
        enlarge = f"enlarge it (docker run --shm-size=1g or --ipc=host; mount -o remount,size=50% {SHM})"
        if free < wanted:
            yield Problem(
                "warning",
                "shared-memory",
                f"{SHM} of {ranks[0].host} has {nbytes_said(free)} of {nbytes_said(total)} left, and mpiagg takes "
                f"{nbytes_said(wanted)} of it for each communicator: without it everything goes by messages, more "
                "slowly, and mpiagg.empty raises MemoryError",
                f"delete what is left there of jobs that have died, or {enlarge}",
            )
        elif total <= SMALL and len(ranks) > 1:
            yield Problem(
                "note",
                "shared-memory",
                f"{SHM} of {ranks[0].host} has {nbytes_said(total)} in all: larger arrays of mpiagg.empty do not fit",
                enlarge,
            )


def layout(report: JobReport) -> Iterator[Problem]:
    """Whether nodes are those that there are."""
    texts = {rank.environment.get(NODES, "") for rank in report.ranks}
    if len(texts) > 1:
        yield from _differing("error", "nodes", NODES, report.ranks, lambda rank: rank.environment.get(NODES, "unset"))
    elif texts != {""} and not _counts(report):
        yield Problem(
            "error",
            "nodes",
            f"{NODES}={texts.pop()} does not say how many ranks each node has, {len(report.ranks)} in all",
            "set it right, or unset it: mpiagg finds the nodes by itself",
        )
    elif texts != {""}:
        yield Problem(
            "note",
            "nodes",
            f"{NODES}={texts.pop()} says which ranks are on one node, whatever there is",
            "unset it, except for tests",
        )


def _counts(report: JobReport) -> list[int]:
    """Return how many ranks each node has according to MPIAGG_NODES; nothing if it is not set, or not well."""
    texts = {rank.environment.get(NODES, "") for rank in report.ranks}
    try:
        return ranks_of_nodes(texts.pop(), len(report.ranks)) if len(texts) == 1 else []
    except ValueError:
        return []


# -- the software


def versions(report: JobReport) -> Iterator[Problem]:
    """Whether all ranks have the same."""
    yield from _differing("error", "versions", "the MPI library", report.ranks, lambda rank: rank.mpi)
    for name in dict.fromkeys(name for rank in report.ranks for name in rank.versions):

        def of(rank: Rank, name: str = name) -> str:
            return rank.versions.get(name, "none")

        yield from _differing("error" if name in _OURS else "warning", "versions", name, report.ranks, of)
    yield from _differing("error", "tuning", "how algorithms are chosen", report.ranks, lambda rank: rank.tuning)


def _differing(
    level: Severity, name: str, what: str, ranks: Sequence[Rank], of: Callable[[Rank], str]
) -> Iterator[Problem]:
    """Whether ranks say different things."""
    if len({of(rank) for rank in ranks}) > 1:
        yield Problem(
            level,
            name,
            f"{what} is not the same on all ranks: {by_value(ranks, of)}",
            "give all ranks the same environment and the same installation",
        )


def by_value(ranks: Sequence[Rank], of: Callable[[Rank], str]) -> str:
    """Return what ranks say, and of which of them it holds where they differ."""
    groups = together(ranks, of)
    if len(groups) == 1:
        return of(ranks[0])
    return "; ".join(f"{said(group)}: {of(group[0])}" for group in groups)


def settings(report: JobReport) -> Iterator[Problem]:
    """Whether variables of the environment say what they can."""
    for name in VARIABLES:
        wrong = [rank for rank in report.ranks if should_say(name, rank.environment)]
        for ranks in together(wrong, lambda rank: rank.environment[name]):  # noqa: B023 - called here and now
            wants = should_say(name, ranks[0].environment)
            what = f"{name}={ranks[0].environment[name]} on {said(ranks)} is not {wants}"
            level: Severity = "error" if name in REFUSED else "warning"
            yield Problem(level, "settings", what, f"make it {wants}, or unset it")
    for name in sorted({name for rank in report.ranks for name in unknown(rank.environment)}):
        what = (
            f"{name} on {said([rank for rank in report.ranks if name in rank.environment])} is no variable of mpiagg's"
        )
        yield Problem("warning", "settings", what, "unset it, or look at the names in docs/guide.md")


def troubles(report: JobReport) -> Iterator[Problem]:
    """Tell what ranks have found themselves."""
    found: dict[Problem, list[Rank]] = defaultdict(list)
    for rank in report.ranks:
        for trouble in rank.troubles:
            found[trouble].append(rank)
    for trouble, ranks in found.items():
        yield trouble._replace(what=f"{said(ranks)}: {trouble.what}")


# -- devices


def messages(report: JobReport) -> Iterator[Problem]:
    """Whether messages reach device memory."""
    unable = [rank for rank in report.ranks if not rank.able]
    if unable and len(unable) < len(report.ranks):
        yield Problem(
            "warning",
            "cuda-aware",
            f"messages of {said(unable)} do not reach device memory ({report.reason}), and those of the others do: "
            "all go by way of the host",
            "give all ranks the same environment and the same MPI library",
        )
    probe = report.probe
    if probe is None or probe.memory != "cuda" or probe.able in {None, report.able}:
        return
    if probe.able:
        yield Problem(
            "warning",
            "cuda-aware",
            "messages do reach device memory, as the probe shows, and mpiagg does not know it",
            "set MPIAGG_CUDA_AWARE=1; but the probe was of this node alone",
        )
    else:
        what = "messages do not reach device memory, as the probe shows"
        yield Problem("error", "cuda-aware", what, "set MPIAGG_CUDA_AWARE=0")


def devices(report: JobReport) -> Iterator[Problem]:
    """Whether every rank has the device that it could have."""
    for sharing in report.shared:
        if sharing.accident:
            what = f"{said(sharing.ranks)} share a GPU, though they see one that nobody uses"
            yield Problem("warning", "devices", what, _SEE_ALL)
    for node in report.nodes:
        single = [report.ranks[place] for place in node if len(report.ranks[place].visible) == 1]
        if len({rank.identity for rank in single}) > 1:
            what = f"{said(single)} see one GPU each, so they cannot map each other's memory"
            yield Problem("warning", "devices", what, _SEE_ALL)


CHECKS: Final = (
    *(launch, threads, addresses, processors, linear_algebra, shared_memory, layout),
    *(versions, settings, troubles, messages, devices),
)
"""All of them: each takes a report and yields the problems that it finds."""
