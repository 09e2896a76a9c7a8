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
from mpiagg.watch import Peer

CROWD: Final = 300
"""Unauthenticated connections at each port: more than are kept."""

ENOUGH: Final = 100
"""How many there are at least before anything else is done; more come, as fast as a busy machine lets them."""

LITTLE: Final = 2**16
"""Bytes that are left of a file system that is full where communicators have been made; less than a long vector has."""


def own_port() -> int:
    """Return the port at which this rank can be asked what it does."""
    return Peer.unpack(process().peer).port


def crowd(how: str, ports: Sequence[int]) -> None:
    """Have unauthenticated peers take all places at ports, until this process ends; return when they do."""
    command = [sys.executable, str(Path(__file__).with_name("unauthenticated.py")), str(CROWD), how, *map(str, ports)]
    unauthenticated = subprocess.Popen(command, stdout=subprocess.PIPE)  # noqa: S603 - our own Python
    assert unauthenticated.stdout is not None
    while int(next(unauthenticated.stdout)) < ENOUGH:  # StopIteration, if they end
        pass


def fill_shm(left: int) -> None:
    """Fill the file system of shared memory, which is this job's alone, but for so many bytes."""
    full = Path("/dev/shm/full")  # noqa: S108 - of this job alone
    with suppress(OSError), full.open("wb", buffering=0) as file:
        while file.write(bytes(2**16)):
            pass
    os.truncate(full, max(0, full.stat().st_size - left))
