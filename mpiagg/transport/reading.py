"""Memory of other processes of this machine, read where it lies.

Linux copies from one process to another by ``process_vm_readv``: once, and without the other's help (its manual page;
MPI libraries call it cross-memory attach). It is allowed where this process might trace the other: they belong to one
user, and neither Yama's ``ptrace_scope`` nor a container's filter of system calls forbids it. Nothing is done here to
be allowed more. Whether ranks may is tried before anything relies on it, with numbers that nobody else can know: a
process may have another number for others than for itself.

Nothing is ever written to another process.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from mpiagg.arrays import Array, address


class ProcessGoneError(ProcessLookupError):
    """A process whose memory was to be read is no more."""


class _Bytes(ctypes.Structure):
    """Where bytes lie in a process: ``struct iovec``."""

    _fields_ = (("start", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_LIBRARY: Final = ctypes.CDLL(None, use_errno=True)
_SYSTEM_CALL: Final[Any] = getattr(_LIBRARY, "process_vm_readv", None)
if _SYSTEM_CALL is not None:
    _SYSTEM_CALL.restype = ctypes.c_ssize_t
    _RANGES = (ctypes.POINTER(_Bytes), ctypes.c_ulong)
    _SYSTEM_CALL.argtypes = (ctypes.c_int, *_RANGES, *_RANGES, ctypes.c_ulong)


@dataclass(frozen=True)
class OtherMemory:
    """A vector in the memory of another process, which is cut like an array, and read.

    Attributes
    ----------
    process : int
        The number of the process.
    start : int
        Its address there.
    size : int
        Its elements.
    dtype : numpy.dtype
    """

    process: int
    start: int
    size: int
    dtype: np.dtype[Any]

    def view(self, dtype: np.dtype[Any]) -> OtherMemory:
        """Return the same bytes as elements of another dtype."""
        return replace(self, size=self.size * self.dtype.itemsize // dtype.itemsize, dtype=dtype)

    def __getitem__(self, part: slice) -> OtherMemory:
        """Return a part of its elements, which follow one another."""
        start, stop, step = part.indices(self.size)
        if step != 1:
            raise AssertionError("what is read lies together")
        return replace(self, start=self.start + start * self.dtype.itemsize, size=max(0, stop - start))

    def reading(self, out: Array) -> Callable[[], None]:
        """Return the call that reads it into a contiguous vector of the same dtype and length.

        The call raises OSError if it cannot be read: ProcessGoneError if the process is no more.
        """
        if (out.dtype, out.size) != (self.dtype, self.size) or not out.flags.c_contiguous:
            raise AssertionError("what is read must have room where it goes")
        return _Reading(self, out)


class _Reading:
    """A call that reads memory of another process."""

    def __init__(self, memory: OtherMemory, out: Array) -> None:
        self._out = out  # which must stay where it is
        self._process, self._nbytes = memory.process, out.nbytes
        self._here, self._there = _Bytes(address(out), out.nbytes), _Bytes(memory.start, out.nbytes)

    def __call__(self) -> None:
        """Read."""
        here, there, done = self._here, self._there, 0
        while True:
            now: int = _SYSTEM_CALL(self._process, here, 1, there, 1, 0)
            done += now
            if done == self._nbytes:
                return
            if now <= 0:
                number = ctypes.get_errno()
                kind = ProcessGoneError if number == errno.ESRCH else OSError
                raise kind(number, f"cannot read memory of process {self._process}: {os.strerror(number)}")
            # The system may stop in the middle: at most 2 GiB are read at once.
            here, there = (_Bytes(end.start + done, end.nbytes - done) for end in (self._here, self._there))


def can_be_read(vector: Array) -> bool:
    """Whether another process could read a vector of this one, which some memory of devices does not allow.

    Its first and last bytes are tried.
    """
    if _SYSTEM_CALL is None:
        return False
    try:
        for byte in (vector.view(np.uint8)[:1], vector.view(np.uint8)[-1:]):
            OtherMemory(os.getpid(), address(byte), byte.size, byte.dtype).reading(np.empty_like(byte))()
    except OSError:
        return False
    return True


def readers(tell: Callable[[tuple[int, ...], str], Sequence[tuple[int, ...]]]) -> tuple[int, ...] | None:
    """Return the numbers of the processes of a node's ranks, if every rank may read all the others' memory.

    Parameters
    ----------
    tell : callable
        Returns what every rank of the node tells the others: integers, and what they are for; collective.
    """
    secret = np.frombuffer(os.urandom(16), np.int64).copy()
    told = tell((os.getpid(), address(secret), *secret.tolist()), "tell where memory can be read")
    mine = _SYSTEM_CALL is not None
    for process, start, *expected in told if mine else ():
        found = np.zeros_like(secret)
        try:
            OtherMemory(process, start, found.size, found.dtype).reading(found)()
        except OSError:
            mine = False
        mine = mine and found.tolist() == expected
    # Until all have read, nobody's number may go away.
    if not all(can for (can,) in tell((mine,), "try to read memory")):
        return None
    return tuple(process for process, *_ in told)
