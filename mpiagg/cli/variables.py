"""What the variables of the environment can say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from shutil import which
from typing import TYPE_CHECKING, Final

import click

from mpiagg.common.arguments import NODES
from mpiagg.launch.launchers import ALONE
from mpiagg.launch.start import MPIEXEC, TERMINAL_WIDTH
from mpiagg.watch import KEEPS

if TYPE_CHECKING:
    from mpi4py import MPI


def unknown(environment: Mapping[str, str]) -> list[str]:
    """Return the variables that are named as if they were mpiagg's, and are not: they may be misspelt."""
    return sorted(name for name in environment if name.startswith("MPIAGG_") and name not in {*VARIABLES, *_OTHERS})


def should_say(name: str, environment: Mapping[str, str]) -> str:
    """Return what a variable must say, if it says something else; else nothing."""
    text = environment.get(name, "")
    accepts, words = VARIABLES[name]
    return words if text and not accepts(text) else ""


def _is_seconds(text: str) -> bool:
    try:
        return float(text) >= 0
    except ValueError:
        return False


VARIABLES: Final[dict[str, tuple[Callable[[str], bool], str]]] = {
    "MPIAGG_WARN": (_is_seconds, "a number of seconds"),
    "MPIAGG_TIMEOUT": (lambda text: _is_seconds(text) and float(text) > 0, "a number of seconds above 0"),
    "MPIAGG_RECORD": (KEEPS.__contains__, f"one of {', '.join(KEEPS)}"),
    MPIEXEC: (lambda text: which(text) is not None, "a program that can be run"),
    **dict.fromkeys(
        ("MPIAGG_ABORT", "MPIAGG_CHECK", "MPIAGG_DEBUG", "MPIAGG_REPRODUCIBLE", "MPIAGG_WATCH", ALONE),
        (("0", "1").__contains__, "0 or 1"),
    ),
}
"""For each of them: whether it accepts a text, and what it wants."""

_OTHERS: Final = (
    *(NODES, TERMINAL_WIDTH),
    *("MPIAGG_ALGORITHM", "MPIAGG_CUDA_AWARE", "MPIAGG_RECORD_DIR", "MPIAGG_TUNING"),
)
"""Those that are checked where they are read, or can say anything."""

REFUSED: Final = ("MPIAGG_WARN", "MPIAGG_TIMEOUT", "MPIAGG_RECORD", "MPIAGG_CHECK", "MPIAGG_REPRODUCIBLE")
"""Those with which mpiagg refuses to communicate, if they say something else."""


def checked(work: Callable[[MPI.Intracomm], int]) -> Callable[[MPI.Intracomm], int]:
    """Return the work of a rank with what raises ClickException on all before it, if a variable of one is wrong."""

    def work_if_right(world: MPI.Intracomm) -> int:
        from mpiagg.errors import MismatchError  # noqa: PLC0415 - the package imports MPI
        from mpiagg.transport import channel_of  # noqa: PLC0415 - as above

        try:
            channel_of(world)
        except (ValueError, MismatchError) as error:
            raise click.ClickException(str(error)) from error
        return work(world)

    return work_if_right
