"""Whether the MPI library takes memory of CUDA devices in messages, and how that is known.

MPI has no question for it that every library answers, and a wrong yes crashes. So the answer is looked for in turn: the
user's word, what the library says of its kinds of memory (MPI 4.1), what its own extension says, and the switches in
the environment by which some libraries are told to. Where nothing says yes, the answer is no: messages go by way of the
host.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Final, NamedTuple

from mpi4py import MPI

USER: Final = "MPIAGG_CUDA_AWARE"
"""The environment variable by which the user answers: ``1``, ``yes`` or ``true``; ``0``, ``no`` or ``false``."""

_WORDS: Final = {"1": True, "yes": True, "true": True, "0": False, "no": False, "false": False}

_KINDS: Final = "mpi_memory_alloc_kinds"

_CUDA: Final = 0
"""``MPIX_GPU_SUPPORT_CUDA`` of MPICH."""


class Awareness(NamedTuple):
    """Whether messages reach memory of CUDA devices.

    Attributes
    ----------
    able : bool
        The answer.
    reason : str
        How it is known, as a part of a sentence.
    """

    able: bool
    reason: str


_MPICH: Final = "MPICH Version"


class Switch(NamedTuple):
    """A variable of the environment by which a library is told to take device memory.

    Attributes
    ----------
    library : str
        What stands in the library's version; of several the first counts, as others name MPICH, too.
    variable, on : str
        The variable, and a pattern of the values that mean yes.
    needed : bool
        Whether the library takes no device memory unless it is set so.
    """

    library: str
    variable: str
    on: str
    needed: bool


_SWITCHES: Final = (
    # They are off unless they are set. The extension of MVAPICH2 tells all the same how the library was built.
    Switch("CRAY MPICH", "MPICH_GPU_SUPPORT_ENABLED", "1", needed=True),
    Switch("MVAPICH2", "MV2_USE_CUDA", "1", needed=True),
    Switch("ParaStation", "PSP_CUDA", "1", needed=True),
    # Intel's library takes memory of its own devices unless it is told otherwise; I_MPI_OFFLOAD alone says nothing.
    Switch("Intel(R) MPI", "I_MPI_OFFLOAD_MODE", "cuda", needed=True),
    Switch("Intel(R) MPI", "I_MPI_OFFLOAD", "[1-9]", needed=True),
    # These are on unless they are set: it is the library that knows whether it was built for CUDA. The extension of
    # Open MPI 4 tells only that, so a switch that is off counts.
    Switch("Open MPI", "OMPI_MCA_opal_cuda_support", "1|true|yes|on|enabled", needed=False),
    Switch(_MPICH, "MPIR_CVAR_ENABLE_GPU", "1|true|yes|on|enable", needed=False),
)


@cache
def awareness() -> Awareness:
    """Return whether messages of this rank reach memory of CUDA devices, as was found when that was first asked for.

    MPI must be initialised. It takes a fraction of a millisecond, and does not ask the ranks to agree.

    Raises
    ------
    ValueError
        If the environment variable MPIAGG_CUDA_AWARE is neither a yes nor a no.
    """
    return _users_word(os.environ) or judge(os.environ, MPI.Get_library_version(), _kinds(), _extension)


def judge(
    environment: Mapping[str, str],
    library: str,
    kinds: str | None,
    extension: Callable[[], tuple[str, bool] | None],
) -> Awareness:
    """Return the answer where the user has not given it.

    Parameters
    ----------
    environment : mapping of str to str
        The process's.
    library : str
        What the library says of its version.
    kinds : str or None
        The kinds of memory that it lists, separated by commas.
    extension : callable
        Returns the name of the library's own function for the question and its answer, or None if it has none.
    """
    found = _by_kinds(library, kinds) or _by_extension(extension)
    switches = [switch for switch in _SWITCHES if switch.library == _name(library)]
    set_ = {switch: environment.get(switch.variable, "").strip() for switch in switches}
    on = {switch: re.fullmatch(switch.on, value, re.IGNORECASE) is not None for switch, value in set_.items()}
    if found is None and switches and all(on.values()):
        found = Awareness(able=True, reason=f"{' and '.join(f'{s.variable}={set_[s]}' for s in switches)} says so")
    if found is None:
        return Awareness(able=False, reason=f"nothing says that the MPI library can, and {USER} is not set")
    if not found.able:
        return found
    for switch in switches:
        if not on[switch] and (switch.needed or set_[switch]):
            value = f"={set_[switch]}" if set_[switch] else " is not set"
            return Awareness(able=False, reason=f"{switch.variable}{value}, which keeps the MPI library from it")
    tls = environment.get("UCX_TLS", "").strip()
    if tls and not _brings_cuda(tls):
        return Awareness(able=False, reason=f"UCX_TLS={tls} leaves out cuda_copy, without which UCX cannot")
    return found


def _name(library: str) -> str | None:
    return next((switch.library for switch in _SWITCHES if switch.library in library), None)


def _users_word(environment: Mapping[str, str]) -> Awareness | None:
    word = environment.get(USER)
    if word is None:
        return None
    able = _WORDS.get(word.strip().lower())
    if able is None:
        raise ValueError(f"{USER}={word!r} must be 1, yes or true, or 0, no or false")
    return Awareness(able, f"{USER}={word} says so")


def _by_kinds(library: str, kinds: str | None) -> Awareness | None:
    """Return what follows from the kinds of memory that the library lists.

    MPICH lists all that it takes without being asked, since 4.3; 4.2 never lists a device, whether it takes its memory
    or not. Open MPI (from 6 on) lists only what was asked for when the job was started, so what is missing there says
    nothing. So it is with libraries that are made from MPICH, whose devices are not MPICH's.
    """
    if kinds is None:
        return None
    listed = [kind.strip().lower().split(":") for kind in kinds.split(",")]
    if any(name == "cuda" and (not limits or "device" in limits) for name, *limits in listed):
        return Awareness(able=True, reason=f"cuda is among the kinds of memory that the MPI library lists: {kinds}")
    version = re.search(r"MPICH Version:\s*(\d+)\.(\d+)", library)
    if _name(library) != _MPICH or version is None or tuple(map(int, version.groups())) < (4, 3):
        return None
    return Awareness(able=False, reason=f"cuda is not among the kinds of memory that the MPI library lists: {kinds}")


def _by_extension(extension: Callable[[], tuple[str, bool] | None]) -> Awareness | None:
    told = extension()
    return None if told is None else Awareness(told[1], f"{told[0]} says {'yes' if told[1] else 'no'}")


def _brings_cuda(tls: str) -> bool:
    """Whether a value of UCX_TLS has the transport that all of UCX's dealings with device memory need."""
    names = {name.strip().lstrip("\\").partition(":")[0] for name in tls.removeprefix("^").split(",")}
    named = bool(names & {"cuda", "cuda_copy"})
    return not named if tls.startswith("^") else named or "all" in names


def _kinds() -> str | None:
    """Return the kinds of memory that the MPI library lists, if it does."""
    info = MPI.COMM_WORLD.Get_info()
    kinds = info.Get(_KINDS)
    info.Free()
    return kinds


def _extension() -> tuple[str, bool] | None:
    """Ask the library's own function.

    Searching the module of mpi4py searches the library that it is linked with, too, wherever that lies; the library for
    the standard ABI has no such function. MPICH's newer one comes first: the older one of some versions 4.0 ends the
    process by an assertion that stands the wrong way round.
    """
    try:
        library = ctypes.CDLL(MPI.__file__)
    except OSError:
        return None
    answer = ctypes.c_int()
    with suppress(AttributeError):
        if library.MPIX_GPU_query_support(_CUDA, ctypes.byref(answer)) == MPI.SUCCESS:
            return "MPIX_GPU_query_support", answer.value == 1
    with suppress(AttributeError):
        return "MPIX_Query_cuda_support", library.MPIX_Query_cuda_support() == 1
    return None
