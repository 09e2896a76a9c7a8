"""What the ranks of a communicator choose algorithms by, compared when a channel is made."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from mpi4py import MPI

from mpiagg.common import documents
from mpiagg.common.machine import description, has_fabric
from mpiagg.schedules import Layout
from mpiagg.tables import DIGEST_BYTES, Origin, Settings, settings
from mpiagg.tables.cache import cached, read_cached, write_cached
from mpiagg.tables.files import table_of
from mpiagg.transport.agreement import Agreement
from mpiagg.transport.awareness import awareness
from mpiagg.transport.process import process
from mpiagg.watch import PEER_BYTES, Peer

if TYPE_CHECKING:
    from mpiagg.tables.learned import Learner

NAME_BYTES: Final = 8
"""Bytes of a channel's name."""


class Reach(NamedTuple):
    """What holds for the messages of all ranks.

    Attributes
    ----------
    aware : bool
        Whether they reach memory of CUDA devices.
    by_tcp : bool
        Whether they cross between nodes by TCP: no machine has an adapter of another kind.
    """

    aware: bool
    by_tcp: bool


def compare_settings(ranks: Agreement, layout: Layout, *, reproducible: bool) -> Reach:
    """Raise on all ranks unless all of them choose algorithms by the same table, which is for this job; collective.

    Where they do, as always but for mistakes, that costs an all-gather of some bytes, by which they learn, too, where
    each can be asked what it does.

    Returns
    -------
    Reach
        What holds for the messages of all.
    """
    name = os.urandom(NAME_BYTES)
    try:
        mine, reach, peer = _settings(ranks, layout).digest, Reach(awareness().able, not has_fabric()), process().peer
        mine = mine[:-1] + bytes([mine[-1] ^ reproducible])
    except ValueError:
        mine, reach, peer = bytes(DIGEST_BYTES), Reach(aware=False, by_tcp=False), bytes(PEER_BYTES)
    told = np.empty((ranks.size, DIGEST_BYTES + len(reach) + NAME_BYTES + PEER_BYTES), np.uint8)
    ranks.comm.Allgather(np.frombuffer(mine + bytes(reach) + name + peer, np.uint8), told)
    digests, reaches, names, peers = np.split(told, np.cumsum([DIGEST_BYTES, len(reach), NAME_BYTES]), axis=1)
    ranks.log.name = names[0].tobytes().hex()
    if digests.any(axis=1).all() and (digests == digests[0]).all():
        _watch(ranks, [Peer.unpack(row.tobytes()) for row in peers])
    else:
        kept = ", reproducible" if reproducible else ""
        ranks.agree_on(lambda: f"uses {_settings(ranks, layout)}{kept}")
    return Reach(*(bool(each.all()) for each in reaches.T))


def learner_of(ranks: Agreement, layout: Layout) -> Learner | None:
    """Return what the ranks learn by, if they are to; collective then. They begin with what the user has from before.

    Rank 0 reads that, and writes it.
    """
    if not settings().learns or ranks.size == 1:
        return None
    from mpiagg.tables.learned import Learner  # noqa: PLC0415 - and with it the prices, which few jobs need

    path, origin = cache_of(ranks, layout)
    data, fault = (b"", "") if path is None else read_cached(path, layout)

    def warn() -> str:
        if fault:
            what = "what was learned before cannot be used; this job learns anew, and replaces it"
            warnings.warn(f"{what}: {fault}", RuntimeWarning, stacklevel=2)
        return "begin with what was learned before"

    ranks.agree_on(warn)  # a warning may be an error, of which all are told
    content = ranks.gather(data, "begin with what was learned before")[0]
    before = table_of("what was learned before", documents.parsed(content)) if content else None
    save = None if path is None else partial(write_cached, path)
    return Learner(MPI.get_vendor()[0], origin, before, save)


def cache_of(ranks: Agreement, layout: Layout) -> tuple[Path | None, Origin]:
    """Return the file for this user's table of this cluster, on rank 0, and what cluster that is; collective.

    There is none where the user has no home.
    """
    mpi = MPI.Get_library_version().splitlines()[0].strip("\0 ")
    told = ranks.gather(json.dumps(description(), sort_keys=True).encode(), "tell of what kind their machines are")
    machines = sorted({each.decode(errors="replace") for each in told})
    path = None
    with suppress(RuntimeError):
        path = cached(layout, mpi, machines) if ranks.rank == 0 else None
    return path, Origin(layout, mpi, {"machines": machines})


def _watch(ranks: Agreement, peers: Sequence[Peer]) -> None:
    """Have the recorder know a communicator, and the watchdog whom to ask what is done there."""
    log, watchdog, recorder = ranks.log, process().watchdog, process().recorder
    group, world = ranks.comm.Get_group(), MPI.COMM_WORLD.Get_group()
    found = group.Translate_ranks(None, world)
    group.Free()
    world.Free()
    log.ranks = () if MPI.UNDEFINED in found else tuple(map(int, found))
    recorder.logs[log.name] = log
    if watchdog is not None and all(peer.port for peer in peers):
        watchdog.join(log, peers)


def _settings(ranks: Agreement, layout: Layout) -> Settings:
    """Return what this rank chooses algorithms by, or raise ValueError if that cannot be used in this job."""
    awareness()
    process()
    found = settings()
    # Only where all ranks of the job are together, it shows how they are spread over nodes.
    whole = MPI.Comm.Compare(ranks.comm, MPI.COMM_WORLD) == MPI.CONGRUENT
    found.check(layout if whole else None, MPI.COMM_WORLD.Get_size())
    return found
