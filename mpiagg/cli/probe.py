"""Whether messages reach device memory: tried out by a job of its own, which may crash or hang in our place."""

from __future__ import annotations

import faulthandler
import json
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
import numpy as np
import numpy.typing as npt

from mpiagg.cli.quantities import format_size
from mpiagg.cuda import placement
from mpiagg.errors import DeviceError
from mpiagg.launch import job
from mpiagg.launch import start as launch

if TYPE_CHECKING:
    from mpi4py import MPI

SIZES: Final = (8, 2**16, 2**23)
"""Bytes of the messages: libraries take other ways for short, middling and long ones."""

SECONDS: Final = 60.0
"""What the job may take; then its ranks end themselves."""

GRACE: Final = 10.0
"""How much later we end it, if they do not."""

_MARK: Final = "mpiagg-probe "
"""How the lines begin that the ranks say to us."""

Bytes = npt.NDArray[np.uint8]


class ProbedMemory(NamedTuple):
    """Where messages come from and go to.

    Attributes
    ----------
    put : callable
        Takes bytes and returns an array there with these bytes, ready to be sent.
    get : callable
        Takes such an array and returns its bytes.
    """

    put: Callable[[Bytes], Any]
    get: Callable[[Any], Bytes]


class Probed(NamedTuple):
    """What came out.

    Attributes
    ----------
    able : bool or None
        Whether messages reach the memory; None if that could not be tried.
    reason : str
        What happened.
    memory : str
        Of which kind it is.
    """

    able: bool | None
    reason: str
    memory: str = "cuda"


def host() -> ProbedMemory:
    """Return the host's memory, which every library reaches."""
    return ProbedMemory(np.array, np.asarray)


def cuda() -> ProbedMemory:
    """Return the memory of this rank's CUDA device.

    Raises
    ------
    DeviceError
        If there is none that can be used.
    """
    if placement.bind_device() is None:
        raise DeviceError("there is no CUDA device")
    cupy: Any = import_module("cupy")

    def put(values: Bytes) -> Any:
        array = cupy.asarray(values)
        cupy.cuda.get_current_stream().synchronize()
        return array

    return ProbedMemory(put, cupy.asnumpy)


MEMORIES: Final = {"cuda": cuda, "host": host}


def probe(memory: str, seconds: float = SECONDS) -> Probed:
    """Let two ranks send each other memory of a kind, and return what came of it."""
    script = f"from mpiagg.cli import probe; probe.take_part(probe.MEMORIES[{memory!r}], {seconds})"
    return ask(["-c", script], seconds)._replace(memory=memory)


# -- the process that asks


def ask(arguments: Sequence[str], seconds: float) -> Probed:
    """Run ``python arguments`` on two ranks, which `take_part`, and return what came of it."""
    try:
        ended = launch.run_within(seconds + GRACE, 2, arguments, launch.environment())
    except click.ClickException as error:
        return Probed(None, error.message)
    return verdict(ended.status, ended.printed, seconds)


def verdict(status: int | None, printed: str, seconds: float) -> Probed:
    """Return what follows from a job's exit status, None if it was ended, and from what it printed."""
    said: dict[str, Any] = {}
    for line in printed.splitlines():
        if line.startswith(_MARK):
            with suppress(ValueError):
                said |= json.loads(line.removeprefix(_MARK))
    if "unable" in said:
        return Probed(None, said["unable"])
    if "wrong" in said:
        wrong = f"{said['wrong']} bytes of a message of {format_size(said['size'])}"
        return Probed(able=False, reason=f"{wrong} came out wrong")
    if status == 0 and "done" in said:
        return Probed(able=True, reason=f"messages of {', '.join(map(format_size, SIZES))} came through")
    how = _how(status, printed, seconds, said.get("failed"))
    if "size" in said:
        return Probed(able=False, reason=f"{how}, in a message of {format_size(said['size'])}")
    return Probed(None, f"{how}, before its first message")


def _how(status: int | None, printed: str, seconds: float, failed: str | None) -> str:
    """Return how a job ended that did not do what it should, in words."""
    if failed is not None:
        return f"the probe failed ({failed})"
    if status is None or "Timeout (" in printed:
        return f"the probe did not end within {seconds:g} s"
    # Launchers have different exit statuses for it, but all of them tell the signal.
    killed = re.search(r"\bsignal:? (\d+)", printed)
    if killed is not None:
        return f"the probe ended with signal {killed[1]}"
    return f"the probe ended with status {status}"


# -- the ranks of its job


def take_part(make: Callable[[], ProbedMemory], seconds: float) -> None:
    """Be one of the two ranks: exchange messages, compare what came, and say how it went.

    Parameters
    ----------
    make : callable
        Returns the memory; may raise DeviceError.
    seconds : float
        When this process ends itself, whatever it hangs in.
    """
    faulthandler.dump_traceback_later(seconds, exit=True)
    memory: ProbedMemory | None = None
    try:
        memory = make()
    except DeviceError as error:
        _say(unable=str(error))
    world = job.join()
    try:
        _exchange_all(world, memory)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other rank would wait for this one
        traceback.print_exc()
        _say(failed=" ".join(f"{type(error).__name__}: {error}".split()))
        job.abort(world)
    faulthandler.cancel_dump_traceback_later()


def _exchange_all(world: MPI.Intracomm, memory: ProbedMemory | None) -> None:
    if _together(world, memory is None) or memory is None:
        return
    for nbytes in SIZES:
        if world.rank == 0:
            _say(size=nbytes)
        wrong = _together(world, _exchange(world, memory, nbytes))
        if wrong:
            _say(wrong=wrong)
            return
    _say(done=True)


def _together(world: MPI.Intracomm, number: int) -> int:
    """Return the sum over the ranks."""
    total = np.array(number, np.int64)
    world.Allreduce(total.copy(), total)
    return int(total)


def _exchange(world: MPI.Intracomm, memory: ProbedMemory, nbytes: int) -> int:
    """Send bytes to the other rank while it sends us others, and return how many came out wrong."""
    from mpi4py import MPI  # noqa: PLC0415 - only a rank may load MPI

    other = 1 - world.rank
    incoming, outgoing = memory.put(np.zeros(nbytes, np.uint8)), memory.put(_pattern(world.rank, nbytes))
    requests = [world.Irecv([incoming, nbytes, MPI.BYTE], other), world.Isend([outgoing, nbytes, MPI.BYTE], other)]
    MPI.Request.Waitall(requests)
    return int(np.count_nonzero(memory.get(incoming) != _pattern(other, nbytes)))


def _pattern(rank: int, nbytes: int) -> Bytes:
    """Return bytes of which none is 0, and the two ranks' differ everywhere."""
    return (np.arange(nbytes) % 127 * 2 + 1 + rank).astype(np.uint8)


def _say(**words: object) -> None:
    # In one piece: lines of two ranks may come out mixed otherwise.
    sys.stdout.write(f"{_MARK}{json.dumps(words)}\n")
    sys.stdout.flush()
