"""What Horovod says of how it was built, and its timeline."""

from __future__ import annotations

from mpiagg.horovod.process_sets import state

_TIMELINE = "mpiagg has no timeline to start: set MPIAGG_RECORD=rounds, and look at docs/trace.md for 'mpiagg trace'"


def mpi_built() -> bool:
    """Whether there is MPI: yes.

    Returns
    -------
    bool
        True.

    Examples
    --------
    >>> hvd.mpi_built()
    True
    """
    return True


def mpi_enabled() -> bool:
    """Whether MPI carries the collectives: yes.

    Returns
    -------
    bool
        True.

    Raises
    ------
    ValueError
        Before :func:`init`.

    Examples
    --------
    >>> hvd.mpi_enabled()
    True
    """
    state()
    return True


def gloo_built() -> bool:
    """Whether there is Gloo: no.

    Returns
    -------
    bool
        False.

    Examples
    --------
    >>> hvd.gloo_built()
    False
    """
    return False


def gloo_enabled() -> bool:
    """Whether Gloo carries the collectives: no.

    Returns
    -------
    bool
        False.

    Raises
    ------
    ValueError
        Before :func:`init`.

    Examples
    --------
    >>> hvd.gloo_enabled()
    False
    """
    state()
    return False


def nccl_built() -> int:
    """Return the version of NCCL that Horovod was built with: 0, for none.

    Returns
    -------
    int
        0.

    Examples
    --------
    >>> hvd.nccl_built()
    0
    """
    return 0


def ddl_built() -> bool:
    """Whether there is IBM's DDL: no.

    Returns
    -------
    bool
        False.

    Examples
    --------
    >>> hvd.ddl_built()
    False
    """
    return False


def ccl_built() -> bool:
    """Whether there is oneCCL: no.

    Returns
    -------
    bool
        False.

    Examples
    --------
    >>> hvd.ccl_built()
    False
    """
    return False


def cuda_built() -> bool:
    """Whether there is code for CUDA that had to be built: no.

    Returns
    -------
    bool
        False.

    Examples
    --------
    >>> hvd.cuda_built()
    False
    """
    return False


def rocm_built() -> bool:
    """Whether there is code for ROCm that had to be built: no.

    Returns
    -------
    bool
        False.

    Examples
    --------
    >>> hvd.rocm_built()
    False
    """
    return False


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Raise NotImplementedError, which says what there is in place of it.

    Parameters
    ----------
    file_path, mark_cycles
        Ignored.

    Raises
    ------
    NotImplementedError
        Always.

    Examples
    --------
    >>> hvd.start_timeline("timeline.json")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    NotImplementedError: mpiagg has no timeline to start...
    """
    del file_path, mark_cycles
    raise NotImplementedError(_TIMELINE)


def stop_timeline() -> None:
    """Raise NotImplementedError, which says what there is in place of it.

    Raises
    ------
    NotImplementedError
        Always.

    Examples
    --------
    >>> hvd.stop_timeline()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    NotImplementedError: mpiagg has no timeline to start...
    """
    raise NotImplementedError(_TIMELINE)
