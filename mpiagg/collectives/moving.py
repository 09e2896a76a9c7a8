"""Methods that move data as it is: what their arguments ask for, and which arrays they name."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiagg.arrays import Array
from mpiagg.collectives.asked import BYTES, Arrays, Asked, check_devices, flat, is_rank
from mpiagg.collectives.buffers import BufferMessage, in_place, read, read_blocks
from mpiagg.collectives.datatypes import is_mpis
from mpiagg.schedules import Collective
from mpiagg.transport import Channel

# -- broadcast


def bcast_read(channel: Channel, buf: object, root: int) -> Asked | None:
    """Return what a broadcast asks for, or None if that is for the MPI library alone."""
    if not is_rank(channel, root):
        return None
    at_root = channel.rank == root
    message = read(buf, writable=True) or (read(buf, writable=False) if at_root else None)
    if message is None:
        return None
    return Asked(Collective.BROADCAST, (message.memory.size,), BYTES, int(root), ours=not is_mpis(message.datatype))


def bcast_arrays(channel: Channel, dtype: np.dtype[Any], given: tuple[Any, ...]) -> Arrays:
    """Return the input and the output of a broadcast, as vectors."""
    _, buf, root = given
    at_root = channel.rank == root
    plain = buf.__class__ is np.ndarray and buf.flags.c_contiguous
    if at_root and not (buf.flags.writeable if plain else read(buf, writable=True) is not None):
        return flat(buf, dtype, writable=False), None
    vector = flat(buf, dtype, writable=True)
    return (vector if at_root else None), vector


# -- all-gather


def allgather_read(channel: Channel, sendbuf: object, recvbuf: object) -> Asked | None:
    """Return what an all-gather asks for, or None if that is for the MPI library alone."""
    received = read(recvbuf, writable=True, blocks=channel.size)
    if received is None:
        return None
    length = received.memory.size // channel.size
    if not in_place(sendbuf):
        sent = read(sendbuf, writable=False)
        if sent is None or sent.memory.size != length:
            return None
    counts = (length,) * channel.size
    return Asked(Collective.ALLGATHER, counts, BYTES, ours=not is_mpis(received.datatype))


def allgather_arrays(channel: Channel, dtype: np.dtype[Any], given: tuple[Any, ...]) -> Arrays:
    """Return the input and the output of an all-gather, as vectors."""
    _, sendbuf, recvbuf = given
    out = flat(recvbuf, dtype, writable=True, blocks=channel.size)
    if not in_place(sendbuf):
        return check_devices(flat(sendbuf, dtype, writable=False), out)
    length = out.size // channel.size
    return out[channel.rank * length : (channel.rank + 1) * length], out


# -- all-gather of blocks, gather, scatter


def allgatherv_read(channel: Channel, sendbuf: object, recvbuf: object) -> Asked | None:
    """Return what an all-gather of blocks asks for, or None if that is for the MPI library alone."""
    found = read_blocks(recvbuf, channel.size, writable=True)
    if found is None:
        return None
    received, counts = _in_bytes(*found)
    if not in_place(sendbuf) and not _has(read(sendbuf, writable=False), counts[channel.rank]):
        return None
    return Asked(Collective.ALLGATHER, counts, BYTES, ours=not is_mpis(received.datatype))


def allgatherv_arrays(channel: Channel, dtype: np.dtype[Any], given: tuple[Any, ...]) -> Arrays:
    """Return the input and the output of an all-gather of blocks, as vectors."""
    _, sendbuf, recvbuf = given
    out, block = _blocks(channel, recvbuf, dtype, writable=True)
    x = out[block] if in_place(sendbuf) else flat(sendbuf, dtype, writable=False)
    return check_devices(x, out)


def gather_read(channel: Channel, sendbuf: object, recvbuf: object, root: int) -> Asked | None:
    """Return what a gather asks for, or None if that is for the MPI library alone."""
    return _rooted_read(channel, Collective.GATHER, recvbuf, sendbuf, root)


def scatter_from_read(channel: Channel, sendbuf: object, recvbuf: object, root: int) -> Asked | None:
    """Return what a scatter asks for, or None if that is for the MPI library alone."""
    return _rooted_read(channel, Collective.SCATTER, sendbuf, recvbuf, root)


def _rooted_read(channel: Channel, collective: Collective, whole: object, part: object, root: int) -> Asked | None:
    """Read a gather or a scatter: the whole is the root's, with a block for each rank, and each has a part."""
    if not is_rank(channel, root):
        return None
    scatters, at_root = collective is Collective.SCATTER, channel.rank == root
    blocks = read(whole, writable=not scatters, blocks=channel.size) if at_root else None
    own = None if at_root and in_place(part) else read(part, writable=scatters)
    known = blocks or own
    if known is None or (at_root and blocks is None) or (own is None and not in_place(part)):
        return None
    length = known.memory.size // (channel.size if known is blocks else 1)
    if own is not None and own.memory.size != length:
        return None
    counts = (length,) * channel.size
    return Asked(collective, counts, BYTES, int(root), ours=not is_mpis(known.datatype))


def gather_arrays(channel: Channel, dtype: np.dtype[Any], given: tuple[Any, ...]) -> Arrays:
    """Return the input and the output of a gather, as vectors."""
    _, sendbuf, recvbuf, root = given
    out = flat(recvbuf, dtype, writable=True, blocks=channel.size) if channel.rank == root else None
    if out is None or not in_place(sendbuf):
        return check_devices(flat(sendbuf, dtype, writable=False), out)
    length = out.size // channel.size
    return out[channel.rank * length : (channel.rank + 1) * length], out


def scatter_from_arrays(channel: Channel, dtype: np.dtype[Any], given: tuple[Any, ...]) -> Arrays:
    """Return the input and the output of a scatter, as vectors."""
    _, sendbuf, recvbuf, root = given
    x = flat(sendbuf, dtype, writable=False, blocks=channel.size) if channel.rank == root else None
    # The root's own block may stay where it is, in memory that need not be writable.
    return check_devices(x, None if in_place(recvbuf) else flat(recvbuf, dtype, writable=True))


def gatherv_read(channel: Channel, sendbuf: object, recvbuf: object, root: int) -> Asked | None:
    """Return what a gather of blocks asks for, or None if that is for the MPI library alone."""
    return _rooted_blocks_read(channel, Collective.GATHER, recvbuf, sendbuf, root)


def scatterv_read(channel: Channel, sendbuf: object, recvbuf: object, root: int) -> Asked | None:
    """Return what a scatter of blocks asks for, or None if that is for the MPI library alone."""
    return _rooted_blocks_read(channel, Collective.SCATTER, sendbuf, recvbuf, root)


def _rooted_blocks_read(
    channel: Channel, collective: Collective, whole: object, part: object, root: int
) -> Asked | None:
    """Read a gather or a scatter of blocks whose lengths the root alone knows."""
    if not is_rank(channel, root):
        return None
    scatters, at_root, rank = collective is Collective.SCATTER, channel.rank == root, channel.rank
    own = None if at_root and in_place(part) else read(part, writable=scatters)
    if own is None and not (at_root and in_place(part)):
        return None
    if not at_root:
        assert own is not None
        counts = tuple(own.memory.size if each == rank else 0 for each in range(channel.size))
        return Asked(collective, counts, BYTES, int(root), ours=not is_mpis(own.datatype), ragged=True)
    found = read_blocks(whole, channel.size, writable=not scatters)
    if found is None:
        return None
    blocks, counts = _in_bytes(*found)
    if own is not None and own.memory.size != counts[rank]:
        return None
    return Asked(collective, counts, BYTES, int(root), ours=not is_mpis(blocks.datatype), ragged=True)


def gatherv_arrays(channel: Channel, dtype: np.dtype[Any], given: tuple[Any, ...]) -> Arrays:
    """Return the input and the output of a gather of blocks, as vectors."""
    _, sendbuf, recvbuf, root = given
    if channel.rank != root:
        return flat(sendbuf, dtype, writable=False), None
    out, block = _blocks(channel, recvbuf, dtype, writable=True)
    return check_devices(out[block] if in_place(sendbuf) else flat(sendbuf, dtype, writable=False), out)


def scatterv_arrays(channel: Channel, dtype: np.dtype[Any], given: tuple[Any, ...]) -> Arrays:
    """Return the input and the output of a scatter of blocks, as vectors."""
    _, sendbuf, recvbuf, root = given
    if channel.rank != root:
        return None, flat(recvbuf, dtype, writable=True)
    x, _ = _blocks(channel, sendbuf, dtype, writable=False)
    return check_devices(x, None if in_place(recvbuf) else flat(recvbuf, dtype, writable=True))


# -- all-to-all


def alltoall_read(channel: Channel, sendbuf: object, recvbuf: object) -> Asked | None:
    """Return what an all-to-all asks for, or None if that is for the MPI library alone."""
    received = read(recvbuf, writable=True, blocks=channel.size)
    sent = received if in_place(sendbuf) else read(sendbuf, writable=False, blocks=channel.size)
    if received is None or sent is None or sent.memory.size != received.memory.size:
        return None
    counts = (sent.memory.size // channel.size,) * channel.size
    return Asked(Collective.ALLTOALL, counts, BYTES, ours=not is_mpis(sent.datatype), received=counts)


def alltoall_arrays(channel: Channel, dtype: np.dtype[Any], given: tuple[Any, ...]) -> Arrays:
    """Return the input and the output of an all-to-all, as vectors."""
    _, sendbuf, recvbuf = given
    out = flat(recvbuf, dtype, writable=True, blocks=channel.size)
    if in_place(sendbuf):
        return out, out
    return check_devices(flat(sendbuf, dtype, writable=False, blocks=channel.size), out)


def alltoallv_read(channel: Channel, sendbuf: object, recvbuf: object) -> Asked | None:
    """Return what an all-to-all of blocks asks for, or None if that is for the MPI library alone."""
    found = read_blocks(recvbuf, channel.size, writable=True)
    given = found if in_place(sendbuf) else read_blocks(sendbuf, channel.size, writable=False)
    if found is None or given is None:
        return None
    (_, received), (sent, counts) = _in_bytes(*found), _in_bytes(*given)
    if counts[channel.rank] != received[channel.rank]:
        return None
    return Asked(Collective.ALLTOALL, counts, BYTES, ours=not is_mpis(sent.datatype), received=received, ragged=True)


def alltoallv_arrays(channel: Channel, dtype: np.dtype[Any], given: tuple[Any, ...]) -> Arrays:
    """Return the input and the output of an all-to-all of blocks, as vectors."""
    _, sendbuf, recvbuf = given
    out, _ = _blocks(channel, recvbuf, dtype, writable=True)
    return check_devices(out if in_place(sendbuf) else _blocks(channel, sendbuf, dtype, writable=False)[0], out)


def alltoallw_read(channel: Channel, sendbuf: object, recvbuf: object) -> None:
    """Return None: an all-to-all of blocks that have datatypes of their own is for the MPI library alone."""


def _in_bytes(message: BufferMessage, counts: tuple[int, ...]) -> tuple[BufferMessage, tuple[int, ...]]:
    """Return the lengths of blocks in bytes."""
    extent = message.memory.size // max(1, message.length)
    return message, tuple(count * extent for count in counts)


def _has(message: BufferMessage | None, nbytes: int) -> bool:
    return message is not None and message.memory.size == nbytes


def _blocks(channel: Channel, specification: Any, dtype: np.dtype[Any], *, writable: bool) -> tuple[Array, slice]:
    """Return a buffer specification with blocks that can be read, as a vector, and where this rank's block lies."""
    if specification.__class__ is list and len(specification) == 2 and specification[1].__class__ is list:
        memory, lengths = specification  # as most have it, in a tenth of the time
        if memory.__class__ is np.ndarray and memory.flags.c_contiguous and memory.dtype.itemsize % dtype.itemsize == 0:
            unit, start = memory.dtype.itemsize // dtype.itemsize, sum(lengths[: channel.rank])
            own = slice(start * unit, (start + lengths[channel.rank]) * unit)
            return memory.reshape(-1)[: sum(lengths)].view(dtype), own
    found = read_blocks(specification, channel.size, writable=writable)
    assert found is not None
    message, counts = _in_bytes(*found)
    start = sum(counts[: channel.rank])
    whole = slice(start // dtype.itemsize, (start + counts[channel.rank]) // dtype.itemsize)
    return message.memory.view(dtype), whole
