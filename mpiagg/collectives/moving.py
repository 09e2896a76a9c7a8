"""Methods that move data as it is: what their arguments ask for."""

from __future__ import annotations

from typing import Any

from mpiagg.collectives.asked import BYTES, Asked, rank_of
from mpiagg.collectives.buffers import ArgumentSpan, BufferMessage, in_place, read, read_blocks
from mpiagg.collectives.datatypes import is_mpis
from mpiagg.schedules import Collective
from mpiagg.transport import Channel


def bcast(channel: Channel, given: tuple[Any, ...]) -> Asked | None:
    """Return what a broadcast asks for, or None if that is for the MPI library alone."""
    _, buf, given_root = given
    root = rank_of(channel, given_root)
    if root is None:
        return None
    at_root = channel.rank == root
    written = read(buf, 1, writable=True)
    known = read(buf, 1, writable=False) if written is None and at_root else written
    if known is None:
        return None
    x, out = known.part if at_root else None, None if written is None else written.part
    counts, ours = (known.memory.size,), not is_mpis(known.datatype)
    return Asked(Collective.BROADCAST, counts, BYTES, root, ours=ours, x=x, out=out)


def alltoallw(channel: Channel, given: tuple[Any, ...]) -> None:
    """Return None: an all-to-all of blocks that have datatypes of their own is for the MPI library alone."""


def allgather(channel: Channel, given: tuple[Any, ...], *, counted: bool) -> Asked | None:
    """Return what an all-gather asks for, or None if that is for the MPI library alone; counted blocks have lengths."""
    found = _whole(channel, given, 2, writable=True, counted=counted)
    if found is None:
        return None
    received, counts = found
    if in_place(given[1]):
        x = _own_block(channel, received, counts)
    else:
        sent = read(given[1], 1, writable=False)
        if sent is None or sent.memory.size != counts[channel.rank]:
            return None
        x = sent.part
    ours = not is_mpis(received.datatype)
    return Asked(Collective.ALLGATHER, counts, BYTES, ours=ours, counted=counted, x=x, out=received.part)


def rooted(channel: Channel, given: tuple[Any, ...], *, collective: Collective, counted: bool) -> Asked | None:
    """Return what a gather or a scatter asks for, or None if that is for the MPI library alone.

    One buffer is the root's, with a block for each rank, and each rank has the other. The lengths of counted blocks the
    root alone knows.
    """
    root = rank_of(channel, given[3])
    if root is None:
        return None
    scatters, at_root, rank, size = collective is Collective.SCATTER, channel.rank == root, channel.rank, channel.size
    whole, part = (1, 2) if scatters else (2, 1)
    stays = at_root and in_place(given[part])
    own = None if stays else read(given[part], part, writable=scatters)
    if own is None and not stays:
        return None
    ends: tuple[ArgumentSpan | None, ArgumentSpan | None]
    if at_root:
        found = _whole(channel, given, whole, writable=not scatters, counted=counted)
        if found is None or (own is not None and own.memory.size != found[1][rank]):
            return None
        known, counts = found
        block = None if own is None else own.part
        # The root's own block of a scatter may stay where it is, in memory that need not be writable.
        ends = known.part, block if scatters else block or _own_block(channel, known, counts)
    else:
        assert own is not None
        known, counts = own, tuple(own.memory.size if each == rank or not counted else 0 for each in range(size))
        ends = None, own.part
    x, out = ends if scatters else ends[::-1]
    ours = not is_mpis(known.datatype)
    return Asked(collective, counts, BYTES, root, ours=ours, ragged=counted, x=x, out=out)


def alltoall(channel: Channel, given: tuple[Any, ...], *, counted: bool) -> Asked | None:
    """Return what an all-to-all asks for, or None if that is for the MPI library alone; counted blocks have lengths."""
    found = _whole(channel, given, 2, writable=True, counted=counted)
    told = found if in_place(given[1]) else _whole(channel, given, 1, writable=False, counted=counted)
    if found is None or told is None:
        return None
    (target, received), (source, counts) = found, told
    if counts[channel.rank] != received[channel.rank]:
        return None
    return Asked(
        Collective.ALLTOALL,
        counts,
        BYTES,
        ours=not is_mpis(source.datatype),
        received=received,
        ragged=counted,
        x=source.part,
        out=target.part,
    )


def _whole(
    channel: Channel, given: tuple[Any, ...], place: int, *, writable: bool, counted: bool
) -> tuple[BufferMessage, tuple[int, ...]] | None:
    """Return what a buffer specification with a block for each rank names, and the bytes of each block."""
    size = channel.size
    if counted:
        return read_blocks(given[place], place, size, writable=writable)
    message = read(given[place], place, writable=writable, blocks=size)
    return None if message is None else (message, (message.memory.size // size,) * size)


def _own_block(channel: Channel, message: BufferMessage, counts: tuple[int, ...]) -> ArgumentSpan:
    start = sum(counts[: channel.rank])
    return message.part.within(start, start + counts[channel.rank])
