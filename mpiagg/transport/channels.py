"""The channel of each communicator.

It hangs on the communicator as an MPI attribute, so it is found again from any handle, is not copied to duplicates, and
goes when the communicator is freed.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from threading import get_ident
from typing import Any

from mpi4py import MPI

from mpiagg.common.once import once
from mpiagg.errors import Error, PlanError
from mpiagg.transport.meetings import end_all, gather, keep_number
from mpiagg.transport.messages import MAKE, Channel
from mpiagg.transport.process import RECORD, ending
from mpiagg.watch import OperationLog, Subject


def channel_of(comm: MPI.Intracomm | None) -> Channel:
    """Return the channel of a communicator, None being the world; the first call on it makes it, and is collective.

    What it makes for a reproducible ``Comm`` keeps to our own schedules.

    Raises
    ------
    TypeError
        If it is not an intracommunicator of mpi4py.
    ValueError
        If it is null or freed.
    PlanError
        If another thread is in the first call on it, or MPI is not initialised.
    """
    comm = MPI.COMM_WORLD if comm is None else comm
    if _KEYVAL and comm.__class__ in _USUAL and comm:
        found: Any = comm.Get_attr(_KEYVAL[0])
        if found is not None:
            return found  # type: ignore[no-any-return]  # the attribute is ours
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"comm must be an mpi4py.MPI.Intracomm, not {type(comm).__name__}")
    if comm == MPI.COMM_NULL:
        raise ValueError("comm is the null communicator, or was freed")
    require_mpi()
    keyval = _keyval()
    channel = comm.Get_attr(keyval)
    if not isinstance(channel, Channel):
        mine = get_ident()
        if _making.setdefault(comm.handle, mine) != mine:
            raise PlanError(
                "another thread is in the first call on this communicator; "
                "give each thread a communicator of its own, by comm.Dup()"
            )
        try:
            channel = comm.Get_attr(keyval)  # which another thread may have made since
            if not isinstance(channel, Channel):
                kept: bool | None = getattr(comm, "_reproducible", None)  # a Comm's
                channel = Channel(comm, reproducible=kept or False, hands_on=kept is not None)
                comm.Set_attr(keyval, channel)
                _channels[id(channel)] = channel
        finally:
            del _making[comm.handle]
        _USUAL.add(comm.__class__)
    return channel


def require_mpi() -> None:
    """Raise PlanError if MPI is not initialised: what it would be asked then ends the process."""
    if not MPI.Is_initialized():
        raise PlanError("MPI is not initialised in this process; one that multiprocessing starts is no rank")


def free_channel_of(comm: MPI.Intracomm) -> None:
    """Free the channel of a communicator that is about to be freed, if it has one; collective.

    If messages were left behind, a later communicator will not get the number of this one.

    Raises
    ------
    StallError
        If a rank does not come within the timeout.
    """
    channel = comm.Get_attr(_keyval())
    if isinstance(channel, Channel):
        channel.free()
        if channel.behind:
            keep_number(comm)


def leave(comm: MPI.Intracomm) -> None:
    """Free what is kept for a communicator on which ranks have agreed; itself at the end of the program. Collective.

    Agreements of Open MPI are named by a communicator's number, which a later one gets when it is freed. Open MPI keeps
    the last agreement of each, and where a rank has not yet begun one of the same name it answers others with the old
    one: then it waits for them for ever. Communicators that are never freed keep it from finalising.
    """
    free_channel_of(comm)
    _left.append(MPI.Intracomm(comm))


def meet(comm: MPI.Intracomm, how: str) -> None:
    """Wait for all ranks of a communicator, on which they are about to make another; with a deadline.

    Parameters
    ----------
    comm : MPI.Intracomm
        The communicator.
    how : str
        By which call they make it; the same on all.

    Raises
    ------
    MismatchError
        On all ranks, if they are about to do different things.
    StallError
        If a rank does not come within the timeout.
    RankFailedError
        If a rank has died.
    """
    channel, purpose = comm.Get_attr(_keyval()), f"{MAKE} by {how}"
    if isinstance(channel, Channel):
        channel.gather(b"", purpose)
    else:
        gather(MPI.Intracomm(comm), b"", purpose)


def communicator_among(comm: MPI.Intracomm, ranks: Sequence[int], tag: int = 0) -> MPI.Intracomm:
    """Return a communicator of some ranks of another one, in the given order; collective among these alone."""
    whole = comm.Get_group()
    part = whole.Incl(ranks)
    made = MPI.Intracomm(comm).Create_group(part, tag)
    part.Free()
    whole.Free()
    return made


_channels: dict[int, Channel] = {}
_left: list[MPI.Intracomm] = []
"""What is freed at the end of the program: see :func:`leave`."""
_making: dict[int, int] = {}
"""The communicators whose channels are being made, and the threads that make them."""
_USUAL: set[type[MPI.Comm]] = {MPI.Intracomm}
"""Classes of communicators whose channels are looked for first; others may turn out to be none."""
_KEYVAL: list[int] = []


@once
def _keyval() -> int:
    _KEYVAL.append(MPI.Comm.Create_keyval(delete_fn=_forget))
    atexit.register(_free_all)
    return _KEYVAL[0]


def _forget(comm: MPI.Comm, keyval: int, channel: Channel) -> None:
    """Free the channel of a communicator that is being freed."""
    del comm, keyval
    _channels.pop(id(channel), None)
    try:
        channel.free()
    except Error as error:
        ending().give_up(f"cannot free a communicator: {error}")  # MPI lets no error of ours through


def _free_all() -> None:
    """Free what is still open, in the order in which it was made, before MPI is finalised."""
    if MPI.Is_finalized():
        return
    ending().leave()
    if (os.environ.get(RECORD) or "off") != "off":  # it was asked for
        ending().dump("its program has ended", beside=True)
    end_all(Subject(OperationLog("", 0, 1), "the end of the program"))
    for channel in list(_channels.values()):
        channel.free(at_exit=True)
    while _left:
        _left.pop().Free()
