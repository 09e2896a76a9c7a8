"""What the variables of the environment can say, where no other check tells of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from shutil import which
from typing import Final

from mpiagg.launch.launchers import ALONE
from mpiagg.launch.start import MPIEXEC
from mpiagg.watch import KEEPS


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

REFUSED: Final = ("MPIAGG_WARN", "MPIAGG_TIMEOUT", "MPIAGG_RECORD")
"""Those with which mpiagg refuses to communicate, if they say something else."""
