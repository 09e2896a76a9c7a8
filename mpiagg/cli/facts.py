"""What a rank knows of itself: how it was started, on what, with which software and settings."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import mpi4py
import numpy as np

import mpiagg
from mpiagg.common import documents
from mpiagg.cuda import placement
from mpiagg.errors import DeviceError
from mpiagg.launch import job, launchers
from mpiagg.launch import start as launch

if TYPE_CHECKING:
    from mpi4py import MPI

SHM: Final = "/dev/shm"  # noqa: S108 - where MPI libraries put what ranks share on Linux

REFUSED_TUNING: Final = (
    "mpiagg refuses to communicate until it is right: name another table or algorithm, or unset MPIAGG_TUNING and "
    "MPIAGG_ALGORITHM; mpiagg tune measures a table"
)
"""What to do about a choice of algorithms that cannot be used."""

_THREADS: Final = ("single", "funneled", "serialized", "multiple")

_TELLING: Final = (
    *("MPIAGG_", "MPI4PY_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"),
    *("SLURM_MPI_TYPE", "UCX_", "FI_", "NCCL_", "OMPI_MCA_", "MPIR_CVAR_", "MPICH_", "I_MPI_", "MV2_"),
)
"""How the variables of the environment begin that are told."""

_SILENT: Final = re.compile(
    r"OMPI_MCA_(PREFIXES|cpu_type|initial_wdir|num_procs)|MV2_COMM_WORLD_.*|" + launch.TERMINAL_WIDTH
)
"""Those among them that launchers set for themselves."""

Severity = Literal["error", "warning", "note"]


class Problem(NamedTuple):
    """Something that should be otherwise.

    Attributes
    ----------
    level : "error", "warning" or "note"
        An error keeps the job from working, or from being one; a warning makes it slow; a note should be known.
    name : str
        What kind of problem it is, for programs.
    what, remedy : str
        In words, without a full stop.
    """

    level: Severity
    name: str
    what: str
    remedy: str


@dataclass
class Rank:
    """What a rank knows of itself.

    Attributes
    ----------
    rank : int
        In the world.
    host : str
        The name of its node.
    size : int
        How many ranks MPI sees; 0 if it cannot start.
    machine : int
        The first of the ranks with which it shares memory.
    launcher : str or None
        What started it, in words.
    launched : int or None
        How many that says it started.
    mpiexec : str
        How ranks of its MPI library are started; empty where nothing is wrong with how it was.
    stopped : str
        Why MPI cannot start; empty if it can.
    vendor, mpi, transport : str
        The MPI library; with its version; and what that says of how it communicates.
    threads : str
        The level of thread support.
    yields : bool or None
        Whether the library's own waits yield the processor, where it is known.
    cpus : list of int
        The processors that it may run on.
    processors : int
        How many the node has.
    linear : int
        Threads that linear algebra takes here.
    shm : list of int or None
        Bytes of shared memory that are free on its node, and all; None where it lies elsewhere.
    window : int
        Bytes of it that mpiagg takes for this rank.
    reads : bool or None
        Whether the ranks of its machine may read each other's other memory; None where there is no other rank.
    versions : dict of str to str
        Of the software.
    environment : dict of str to str
        Settings.
    tasks : int or None
        How many tasks Slurm's allocation has.
    tuning : str
        By what mpiagg chooses algorithms.
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
    troubles : list of Problem
        What should be otherwise here.
    """

    rank: int = 0
    host: str = ""
    size: int = 1
    machine: int = 0
    launcher: str | None = None
    launched: int | None = None
    mpiexec: str = ""
    stopped: str = ""
    vendor: str = ""
    mpi: str = ""
    transport: str = ""
    threads: str = "multiple"
    yields: bool | None = None
    cpus: list[int] = field(default_factory=lambda: [0])
    processors: int = 1
    linear: int = 1
    shm: list[int] | None = None
    window: int = 0
    reads: bool | None = None
    versions: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    tasks: int | None = None
    tuning: str = ""
    able: bool = False
    reason: str = ""
    cupy: str = ""
    visible: list[str] = field(default_factory=list)
    device: int | None = None
    troubles: list[Problem] = field(default_factory=list)

    @property
    def identity(self) -> str:
        """The UUID of its device, or nothing."""
        return "" if self.device is None else self.visible[self.device]

    def as_text(self) -> str:
        """Return all of it as a text, for other ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str) -> Rank:
        """Return what another rank has told."""
        return documents.made(json.loads(text), cls)


def take_device(mine: Rank) -> None:
    """Take this rank's device, and write down what comes of it; before MPI starts."""
    try:
        cuda = placement.runtime()
        mine.cupy = sys.modules["cupy"].__version__
        mine.visible = [cuda.identity(ordinal) for ordinal in range(cuda.count())]
        mine.device = placement.bind(cuda)
    except DeviceError as error:
        mine.cupy = mine.cupy or f"cannot be imported: {error.__cause__}"
        # Without CuPy where there is no device to use it on, nothing is amiss.
        if not isinstance(error.__cause__, ModuleNotFoundError) or placement.devices_of_node() is not None:
            remedy = "install CuPy (the extra cuda12 or cuda13), or go on without arrays on GPUs"
            mine.troubles.append(Problem("warning", "device", str(error), remedy))


def of_process(mine: Rank) -> None:
    """Write down what can be known without MPI."""
    started = launchers.launch()
    if started is not None:
        mine.launcher, mine.launched, mine.rank = started.name, started.size, started.rank or 0
    tasks = os.environ.get("SLURM_NTASKS", "")
    mine.tasks = int(tasks) if tasks.isdecimal() else None
    mine.host = platform.node()
    mine.cpus = sorted(os.sched_getaffinity(0))
    mine.processors = os.cpu_count() or 1
    with suppress(OSError):
        found = os.statvfs(SHM)
        mine.shm = [found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize]
    torch = _version("torch")
    mine.versions = {
        "mpiagg": mpiagg.__version__,
        "Python": platform.python_version(),
        "NumPy": np.__version__,
        "mpi4py": mpi4py.__version__,
        "torch": torch or "none",
    }
    mine.environment = settings_of(os.environ)
    mine.linear = threads_of(os.environ, len(mine.cpus), torch=torch is not None)


def of_mpi(mine: Rank, fault: str | None) -> None:
    """Write down what the MPI library says; collective, where it has started.

    Parameters
    ----------
    mine : Rank
        What this rank knows of itself.
    fault : str or None
        What is wrong with how this rank was started.
    """
    from mpi4py import MPI  # noqa: PLC0415 - only a process that is a rank may load MPI

    mine.vendor, mine.mpi = MPI.get_vendor()[0], job.vendor()
    mine.transport = transport_of(MPI.Get_library_version())
    if fault is not None:
        mine.mpiexec = launch.remedy_of_launch(mine.vendor)
    if not MPI.Is_initialized():
        mine.stopped, mine.size, mine.threads = launchers.describe_end(launchers.launch(), mine.vendor), 0, "none"
        mine.reason = mine.tuning = "MPI cannot start"
        return
    world = MPI.COMM_WORLD
    # Ranks of jobs of one are told apart by their launcher.
    mine.rank = mine.rank if fault is not None else world.rank
    mine.size, mine.host = world.size, MPI.Get_processor_name()
    _of_machine(mine, world)
    levels = {getattr(MPI, f"THREAD_{level.upper()}"): level for level in _THREADS}
    mine.threads = levels[MPI.Query_thread()]
    mine.yields = _yields(mine.vendor)
    _of_mpiagg(mine)


def _of_mpiagg(mine: Rank) -> None:
    """Write down what mpiagg makes of it."""
    from mpiagg.tables import settings  # noqa: PLC0415 - only here
    from mpiagg.transport.awareness import awareness  # noqa: PLC0415 - needs MPI
    from mpiagg.transport.memory import WINDOW  # noqa: PLC0415 - needs MPI

    mine.window = WINDOW
    try:
        mine.able, mine.reason = awareness()
    except ValueError as error:
        mine.reason = str(error)
        remedy = "mpiagg refuses to communicate until it is set so, or unset"
        mine.troubles.append(Problem("error", "cuda-aware", mine.reason, remedy))
    try:
        mine.tuning = str(settings())
        settings().check(None, mine.size)
    except ValueError as error:
        mine.tuning = mine.tuning or "cannot be used"
        mine.troubles.append(Problem("error", "tuning", str(error), REFUSED_TUNING))


def _of_machine(mine: Rank, world: MPI.Intracomm) -> None:
    """Write down what there is to be said of the ranks that share memory with this one; collective."""
    from mpi4py import MPI  # noqa: PLC0415 - only a process that is a rank may load MPI

    from mpiagg.transport.reading import readers  # noqa: PLC0415 - as the others

    sharing = world.Split_type(MPI.COMM_TYPE_SHARED, world.rank)

    def tell(words: tuple[int, ...], purpose: str) -> list[tuple[int, ...]]:
        del purpose
        told = np.empty((sharing.size, len(words)), np.int64)
        sharing.Allgather(np.array(words, np.int64), told)
        return [tuple(each) for each in told.tolist()]

    mine.machine = tell((world.rank,), "")[0][0]  # the first of them
    if sharing.size > 1:
        mine.reads = readers(tell) is not None
    sharing.Free()


def _yields(vendor: str) -> bool | None:
    """Return whether the MPI library's waits yield the processor; None if that is not known.

    MPICH's do at short intervals (the system calls of its wheel were counted). Open MPI's do if they are told to, or if
    its launcher knows that there are too few processors; a variable of the library has the result.
    """
    from mpi4py import MPI  # noqa: PLC0415 - only a process that is a rank may load MPI

    if vendor == "MPICH":
        return True
    with suppress(OSError, ValueError):
        return bool(ctypes.c_bool.in_dll(ctypes.CDLL(MPI.__file__), "ompi_mpi_yield_when_idle").value)
    return None


def transport_of(library: str) -> str:
    """Return what the words of an MPI library on its version say of how it communicates."""
    found = re.search(r"^MPICH Device:\s*(.+)$", library, re.MULTILINE)
    if found is not None:
        return found[1].strip()
    return "chosen when the job starts (pml and btl)" if "Open MPI" in library else "not known"


def settings_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that set how MPI, mpiagg and linear algebra work."""
    return {
        variable: value
        for variable, value in sorted(environment.items())
        if variable.startswith(_TELLING) and _SILENT.fullmatch(variable) is None
    }


def threads_of(environment: Mapping[str, str], cpus: int, *, torch: bool) -> int:
    """Return how many threads linear algebra takes in this process: NumPy's or torch's, whichever are more.

    Parameters
    ----------
    environment : mapping of str to str
        The process's.
    cpus : int
        How many processors it may run on: where nothing is said, a thread for each.
    torch : bool
        Whether torch is installed.
    """

    def first(*variables: str) -> int:
        said = (environment.get(variable, "").partition(",")[0].strip() for variable in variables)
        return next((int(word) for word in said if word.isdecimal() and int(word)), cpus)

    numpy = first("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
    return max(numpy, first("OMP_NUM_THREADS", "MKL_NUM_THREADS")) if torch else numpy


def _version(package: str) -> str | None:
    """Return the version of a package that may be installed, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def gather(world: MPI.Intracomm, mine: Rank) -> list[Rank]:
    """Return what all ranks know of themselves, on all ranks; collective."""
    from mpiagg.transport.meetings import gather as gather_texts  # noqa: PLC0415 - needs MPI

    told = gather_texts(world, mine.as_text().encode(), "say what they know of themselves")
    return [Rank.of_text(text.decode()) for text in told]
