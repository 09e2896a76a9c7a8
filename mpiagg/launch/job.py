"""A command that is a job: it starts its own ranks, or is one of them."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

import click
import mpi4py
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from mpiagg.launch import start as launch
from mpiagg.watch import LAST_WORDS

if TYPE_CHECKING:
    from mpi4py import MPI

_PICTURES = (".png", ".pdf", ".svg")

WRONG_LAUNCH = 2
"""The exit status of a rank that the launcher of another MPI library started."""


def run(ranks: int, work: Callable[[MPI.Intracomm], int], options: Sequence[str] = ()) -> NoReturn:
    """Do the work of a command on all ranks of a job, and exit.

    Parameters
    ----------
    ranks : int
        How many ranks to start, where this process is not one already: then it starts the same command line again,
        under mpiexec.
    work : callable
        What a rank does: takes the world and returns the exit status. An exception in one rank ends the job, but for a
        ClickException, which all ranks must raise: the first of them shows it.
    options : sequence of str
        For mpiexec.
    """
    if launch.launched_ranks() is None:
        sys.exit(launch.run(ranks, ["-m", "mpiagg", *sys.argv[1:]], options))
    world = join()
    sys.exit(take_part(world, work))


def take_part(world: MPI.Intracomm, work: Callable[[MPI.Intracomm], int]) -> int:
    """Do the work of a rank and return the exit status, as `run` says."""
    try:
        return work(world)
    except click.ClickException as error:
        if world.rank == 0:
            error.show()
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks would wait for this one for ever
        lost = lost_output() if isinstance(error, OSError) else None
        if lost is None:
            what = (isinstance(error, MemoryError) and str(error)) or traceback.format_exc()
            print(f"rank {world.rank} of {world.size} failed:\n{what}", file=sys.stderr, flush=True)
        else:
            lost.show()
        if lost is None or world.size > 1:
            abort(world)
    return 1


class LostOutput(click.ClickException):
    """The standard output cannot be written. Nothing is told if nobody reads it any more, as after ``| head``."""

    def __init__(self, fault: OSError) -> None:
        super().__init__(f"the output cannot be written: {fault.strerror}")
        self._silent = isinstance(fault, BrokenPipeError)

    def show(self, file: IO[Any] | None = None) -> None:
        """Say so."""
        if not self._silent:
            super().show(file)


def lost_output() -> LostOutput | None:
    """Return the error to raise if the standard output cannot be written, and drop what was still to be written."""
    try:
        if sys.stdout is not None:
            print(flush=True)  # what could not be written before may be gone
    except OSError as fault:
        # The interpreter writes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return LostOutput(fault)
    return None


def abort(world: MPI.Intracomm) -> None:
    """End the job, once its launcher has had the time to read what was printed."""
    time.sleep(LAST_WORDS)
    world.Abort(1)


def join() -> MPI.Intracomm:
    """Initialise MPI and return the world; exit with a message if this rank's launcher is not the MPI library's."""
    fault = initialise()
    if fault is not None:
        print(f"Error: {fault}", file=sys.stderr, flush=True)
        sys.exit(WRONG_LAUNCH)
    from mpi4py import MPI  # noqa: PLC0415 - only a process that is a rank may load MPI

    return MPI.COMM_WORLD


def initialise() -> str | None:
    """Initialise MPI; return what is wrong with how this rank was started, in words, or None.

    MPI is initialised here and not by its import, because with the launcher of another library that may be fatal. Where
    it would be, MPI is not initialised.
    """
    mpi4py.rc.initialize = False
    from mpi4py import MPI  # noqa: PLC0415 - only a process that is a rank may load MPI

    vendor = MPI.get_vendor()[0]
    if not MPI.Is_initialized():
        fault = launch.wrong_launch(vendor, library=MPI.Get_library_version())
        if fault is not None:
            return fault
        with warnings.catch_warnings():
            # mpi4py warns of suspicious launchers too; what it suspects is found out below.
            warnings.simplefilter("ignore", RuntimeWarning)
            # As its import would: mpi4py has read MPI4PY_RC_THREAD_LEVEL.
            MPI.Init_thread(getattr(MPI, f"THREAD_{mpi4py.rc.thread_level.upper()}"))
        atexit.register(MPI.Finalize)
    return launch.wrong_launch(vendor, MPI.COMM_WORLD.size)


def console() -> Console:
    """Return where rank 0 writes: in colour if its output ends in a terminal.

    Only what started the ranks knows that: some launchers give them pipes, and some give them terminals that are none.
    """
    width = os.environ.get(launch.TERMINAL_WIDTH)
    made = Console(force_terminal=width is not None, width=None if width is None else int(width))
    made.width = made.width or shutil.get_terminal_size().columns  # COLUMNS=0 says nothing, as elsewhere
    return made


def show(table: Table) -> None:
    """Print a table; its numbers are whole also where a terminal is narrower, and wraps its lines."""
    for column in table.columns:
        if column.no_wrap:
            column.min_width = max(
                (cell_len(line) for cell in column.cells for line in str(cell).splitlines()), default=0
            )
    printed = console()
    printed.width = max(printed.width, Measurement.get(printed, printed.options.update(width=1000), table).minimum)
    printed.print(table)


def ranks_option(default: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the option ``-n``."""
    return click.option(
        "-n",
        "ranks",
        type=click.IntRange(min=1),
        default=default,
        help="Ranks to start; without effect where mpiexec or srun has started them.",
    )


class OutputFile(click.Path):
    """A file to write at the end: what stands in its way is told at the beginning.

    With ``allow_dash``, ``-`` stands for the standard output.
    """

    def __init__(self, *, allow_dash: bool = False) -> None:
        super().__init__(dir_okay=False, writable=True, allow_dash=allow_dash, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path, if it can be written to its folder."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not value:
            self.fail("the name is empty", param, ctx)
        folder = path.absolute().parent
        if self.allow_dash and str(path) == "-":
            return path
        if not folder.is_dir():
            self.fail(f"folder {str(path.parent)!r} does not exist", param, ctx)
        if not (path.exists() or os.access(folder, os.W_OK)):
            self.fail(f"nothing can be written to the folder {str(folder)!r}", param, ctx)
        return path


def write(path: Path, text: str) -> None:
    """Write a file; a ClickException says why that is not possible."""
    try:
        path.write_text(text)
    except OSError as error:
        raise click.ClickException(f"{str(path)!r} cannot be written: {error.strerror}") from error


class PictureFile(OutputFile):
    """A file to draw into: its name says the format."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path, if its name ends as that of a picture."""
        path = super().convert(value, param, ctx)
        if path.suffix not in _PICTURES:
            self.fail(f"the name must end in {', '.join(_PICTURES[:-1])} or {_PICTURES[-1]}", param, ctx)
        return path


def vendor() -> str:
    """Return the name and version of the MPI library; for a rank."""
    from mpi4py import MPI  # noqa: PLC0415 - only a process that is a rank may load MPI

    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"
