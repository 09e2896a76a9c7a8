"""Who started this process, as one of how many: what launchers say in the environment.

A launcher that does not belong to the MPI library starts n processes, each of which is rank 0 of a job of one. Nothing
fails then: n models are trained, each for itself. So it is looked for, and refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from mpiagg.cuda.placement import local_size
from mpiagg.errors import Error

ALONE: Final = "MPIAGG_ALONE"
"""The environment variable by which the user says (``1``) that a launcher's processes are to work each for itself."""


class _Launcher(NamedTuple):
    """A launcher's name, and the environment variables in which a process finds its size and its rank."""

    name: str
    size: str
    rank: str


_SLURM: Final = _Launcher("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")

_LAUNCHERS: Final = (
    _Launcher("the mpiexec of Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    _Launcher("an mpiexec of the MPICH family", "PMI_SIZE", "PMI_RANK"),
    _Launcher("the mpiexec of MVAPICH", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    _Launcher("the mpiexec of PALS", "PALS_SIZE", "PALS_RANKID"),
    _Launcher("torchrun", "ROLE_WORLD_SIZE", "RANK"),
    # Slurm is last: other launchers use it to start their own ranks, which then have Slurm's variables, too.
    _SLURM,
)

VARIABLES: Final = tuple(launcher.size for launcher in _LAUNCHERS)
"""Where launchers tell the number of ranks of the job that a process was started in."""

_FIRST_SPECIAL_STEP: Final = 0xFFFFFFF0
"""From here on the numbers of Slurm's steps are of batch scripts and shells, which are no ranks."""

_PMIX: Final = "PMIX_NAMESPACE"
"""What a process has that is to find the others by PMIx."""

_SRUN: Final = {"MPICH": "srun --mpi=pmi2", "Open MPI": "srun --mpi=pmix"}


class Launch(NamedTuple):
    """How this process was started.

    Attributes
    ----------
    name : str
        A description of the launcher.
    variable : str
        Where it told how many ranks there are.
    size : int
        How many.
    rank : int or None
        Which of them this process is, if it told that, too.
    told : frozenset of bytes
        The variables by which it told these two, as they stand in the environment.
    """

    name: str
    variable: str
    size: int
    rank: int | None
    told: frozenset[bytes] = frozenset()


def launch(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """Return who started this process as a rank; None if no launcher did.

    A child of a batch script is none, though Slurm tells it how many tasks the job may have: no step started it.
    """
    for launcher in _LAUNCHERS:
        size, rank = environment.get(launcher.size, ""), environment.get(launcher.rank, "")
        if not size.isdecimal() or (launcher is _SLURM and _is_shell(environment)):
            continue
        name = _SLURM.name if launcher.size == "PMI_SIZE" and _is_srun(environment) else launcher.name
        told = frozenset({f"{launcher.size}={size}".encode(), f"{launcher.rank}={rank}".encode()})
        return Launch(name, launcher.size, int(size), int(rank) if rank.isdecimal() else None, told)
    return None


def on_one_node(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher has told that all processes of the job are on this node."""
    found = launch(environment)
    if found is None:
        return False
    alone = found.name == _SLURM.name and environment.get("SLURM_STEP_NUM_NODES") == "1"
    return alone or local_size(environment) == found.size


def started_by() -> int:
    """Return the id of the process that started this one as a rank; 0 if that cannot be found out.

    It is the nearest one above this process that was not told the same rank: between the two there may be shells.
    """
    found, above = launch(), os.getpid()
    with suppress(OSError, IndexError, ValueError):  # no /proc, or the launcher is outside of this container
        while found is not None and (above := _parent(above)) > 1:
            if not found.told <= _environment(above):
                return above
    return 0


def _parent(process: int) -> int:
    # The name of the program stands in brackets, and may have spaces and brackets itself.
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def _environment(process: int) -> frozenset[bytes]:
    try:
        return frozenset(Path(f"/proc/{process}/environ").read_bytes().split(b"\0"))
    except PermissionError:  # another user's, as the daemons of a batch system are
        return frozenset()


def _is_shell(environment: Mapping[str, str]) -> bool:
    """Whether the step of Slurm that this process is in is a batch script or a shell of salloc."""
    step = environment.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) >= _FIRST_SPECIAL_STEP


def _is_srun(environment: Mapping[str, str]) -> bool:
    """Whether PMI's variables are those of srun --mpi=pmi2: mpiexec tells the ranks of the node, too."""
    return "MPI_LOCALNRANKS" not in environment and environment.get(_SLURM.size) == environment.get("PMI_SIZE")


def copies(world_size: int, environment: Mapping[str, str] = os.environ) -> Launch | None:
    """Return who started this process as one of many, if MPI sees a job of one; None if all is well.

    Parameters
    ----------
    world_size : int
        How many ranks MPI sees.
    environment : mapping of str to str
        The process's.
    """
    if world_size > 1 or environment.get(ALONE, "0") not in {"", "0"}:
        return None
    found = launch(environment)
    return None if found is None or found.size < 2 else found


def ends_in_start(vendor: str, library: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether MPI ends the process when it starts: MPICH does, where it is to use PMIx and was built without.

    Parameters
    ----------
    vendor, library : str
        The MPI library, and what it says of its version.
    environment : mapping of str to str
        The process's.
    """
    return vendor == "MPICH" and _PMIX in environment and "pmix" not in library.lower()


def describe_copies(found: Launch, vendor: str) -> str:
    """Return what is wrong where `copies` found something."""
    return (
        f"this process is one of {found.size} that {found.name} started ({found.variable}), but mpi4py loads "
        f"{vendor}, which sees a job of one rank: each of them would work alone"
    )


def describe_end(found: Launch | None, vendor: str) -> str:
    """Return what is wrong where MPI cannot start."""
    started = "" if found is None else f", which {found.name} started as one of {found.size},"
    return (
        f"this process{started} is to find the other ranks by PMIx ({_PMIX}), but mpi4py loads {vendor}, which was "
        "built without it"
    )


def remedy(vendor: str, mpiexec: str = "", environment: Mapping[str, str] = os.environ) -> str:
    """Return how to start ranks of a library: with its own mpiexec, whose path may be given, or with srun."""
    mpiexec = mpiexec or f"the mpiexec of {vendor}"
    srun = _SRUN.get(vendor, "the type of srun --mpi that your cluster's documentation names (srun --mpi=list)")
    if "SLURM_JOB_ID" in environment:
        return f"start it with {srun}, or with {mpiexec}"
    return f"start it with {mpiexec}; under Slurm, with {srun}"


def refuse_copies(world_size: int, vendor: str) -> None:
    """Raise Error if this process is one of many that a launcher started, and MPI sees a job of one.

    Parameters
    ----------
    world_size : int
        How many ranks MPI sees.
    vendor : str
        The MPI library.

    Raises
    ------
    Error
        Then, unless MPIAGG_ALONE is set.
    """
    found = copies(world_size)
    if found is not None:
        raise Error(
            f'{describe_copies(found, vendor)}. What would help: {remedy(vendor)}. "mpiagg info" under the same '
            f"launcher tells more. If each is to work for itself, set {ALONE}=1."
        )
