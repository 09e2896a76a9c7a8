"""What Horovod says of how it was built, and its timeline."""

from __future__ import annotations

from mpiagg.horovod.process_sets import state

_TIMELINE = "mpiagg has no timeline to start: set MPIAGG_RECORD=rounds, and look at docs/trace.md for 'mpiagg trace'"


def mpi_built() -> bool:
    """Whether there is MPI: yes."""
    return True


def mpi_enabled() -> bool:
    """Whether MPI carries the collectives: yes."""
    state()
    return True


def gloo_built() -> bool:
    """Whether there is Gloo: no."""
    return False


def gloo_enabled() -> bool:
    """Whether Gloo carries the collectives: no."""
    state()
    return False


def nccl_built() -> int:
    """Return the version of NCCL that Horovod was built with: 0, for none."""
    return 0


def ddl_built() -> bool:
    """Whether there is IBM's DDL: no."""
    return False


def ccl_built() -> bool:
    """Whether there is oneCCL: no."""
    return False


def cuda_built() -> bool:
    """Whether there is code for CUDA that had to be built: no."""
    return False


def rocm_built() -> bool:
    """Whether there is code for ROCm that had to be built: no."""
    return False


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Raise NotImplementedError, which says what there is in place of it."""
    del file_path, mark_cycles
    raise NotImplementedError(_TIMELINE)


def stop_timeline() -> None:
    """Raise NotImplementedError, which says what there is in place of it."""
    raise NotImplementedError(_TIMELINE)
