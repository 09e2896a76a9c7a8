"""Means by which ranks bring faults about, in the jobs of ``faults.py`` and of ``random_faults.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from mpiagg.transport import process
from mpiagg.watch import Card

CROWD: Final = 300
"""Connections of strangers at each port: more than are kept."""

ENOUGH: Final = 100
"""How many there are at least before anything else is done; more come, as fast as a busy machine lets them."""

LITTLE: Final = 2**16
"""Bytes that are left of a file system that is full where communicators have been made; less than a long vector has."""


def own_port() -> int:
    """Return the port at which this rank can be asked what it does."""
    return Card.unpack(process().card).port


def crowd(how: str, ports: Sequence[int]) -> None:
    """Have strangers take all places at ports, until this process ends; return when they do."""
    command = [sys.executable, str(Path(__file__).with_name("strangers.py")), str(CROWD), how, *map(str, ports)]
    strangers = subprocess.Popen(command, stdout=subprocess.PIPE)  # noqa: S603 - our own Python
    assert strangers.stdout is not None
    while int(next(strangers.stdout)) < ENOUGH:  # StopIteration, if they end
        pass


def fill_shm(left: int) -> None:
    """Fill the file system of shared memory, which is this job's alone, but for so many bytes."""
    full = Path("/dev/shm/full")  # noqa: S108 - of this job alone
    with suppress(OSError), full.open("wb", buffering=0) as file:
        while file.write(bytes(2**16)):
            pass
    os.truncate(full, max(0, full.stat().st_size - left))
