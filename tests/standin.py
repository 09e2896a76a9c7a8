"""A stand-in for a GPU: its memory is the host's, which must not touch it, and its work is done as late as it may be.

    with standin.installed() as device, standin.watch(device_messages=False):
        x = device.from_host(np.arange(3.0))
        ...
        assert standin.LOG.counts()["out"] == 1

It finds what a real device would let pass, now and then: the errors in ``standin_streams`` say what. The arrays are in
``standin_arrays``, and ``standin_messages`` watches what MPI is given.
"""

import mmap
import os
import struct
import weakref
from contextlib import contextmanager
from itertools import count

import numpy as np
from standin_arrays import Block, DeviceArray, fetch
from standin_messages import Watched, watch
from standin_streams import (
    LOCK,
    LOG,
    PENDING,
    PINNED,
    POISON,
    Entry,
    InFlight,
    Misaligned,
    NotPinned,
    NotReady,
    Race,
    StandInStream,
    TouchedByHost,
    check_flights,
    check_ready,
    clashes,
    is_pinned,
    present,
    reset,
)

from mpiagg.arrays import HOST, Accelerator, Codec, codec, reduction, where, working_dtype
from mpiagg.errors import DeviceError

__all__ = [
    "LOG",
    "DeviceArray",
    "Entry",
    "InFlight",
    "Misaligned",
    "NotPinned",
    "NotReady",
    "Race",
    "StandIn",
    "TouchedByHost",
    "Watched",
    "device",
    "install",
    "installed",
    "is_pinned",
    "peek",
    "uninstall",
    "watch",
]

COUNT = 2
"""How many devices there are."""

HANDLE = struct.Struct("<qqQ40x")
"""What other processes open memory by, as long as CUDA's: a process, its file descriptor, and the file's own number."""


class StandIn(Accelerator):
    """A device; its number is that of all processes that use it."""

    polls = 1
    """How often a stream says that it is not done, after new work."""

    def __init__(self, number):
        self.name = f"standin:{number}"
        self.default = StandInStream(self, 0)
        self._streams = count(1)
        self._blocks = weakref.WeakSet()

    def __repr__(self):
        return f"<{self.name}>"

    @property
    def identity(self):
        return f"STANDIN-{self.name}"

    # -- memory

    def _block(self, memory):
        block = Block(self, memory)
        self._blocks.add(block)
        return block

    def _pooled(self, nbytes):
        stream = present(self)
        block = self._block(stream.allocate(nbytes))
        weakref.finalize(block, stream.free, block.memory).atexit = False
        return block

    def empty(self, shape, dtype):
        wanted = np.dtype(dtype)
        length = int(np.prod(shape, dtype=np.int64)) * wanted.itemsize
        return self._pooled(length).array(0, shape, wanted)

    def like(self, x):
        """Return a new array of the shape, the dtype and the order of a NumPy array."""
        model = np.empty_like(x)
        return self._pooled(model.nbytes).array(0, model.shape, model.dtype, model.strides)

    def borrow(self, start, length, dtype, owner=None):
        wanted = np.dtype(dtype)
        if length == 0:
            return self.empty(0, wanted)
        for block in list(self._blocks):
            offset = start - _address(block.memory)
            if 0 <= offset <= block.memory.nbytes - length * wanted.itemsize:
                return block.kept_with(owner).array(offset, length, wanted)
        raise AssertionError(f"there is no memory of {self.name} at {start:#x}")

    def address(self, array):
        return _address(array._array)

    def from_host(self, array):
        """Copy by way of memory of the driver's own, as real devices do: the array is free when this returns."""
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{type(array).__name__} is no NumPy array")
        with LOCK:
            check_ready("from_host", (array,), ())
            check_flights("from_host", (array,), ())
        values, result = np.array(array), self.like(array)
        present(self).ask("in", "from_host", lambda: np.copyto(result._array, values), writes=[result._array])
        return result

    def to_host(self, array):
        return fetch(array, "to_host")

    # -- streams

    def stream(self):
        return StandInStream(self, next(self._streams))

    def synchronise(self):
        stream = present(self)
        stream.finish()
        LOG.append(Entry("synchronise", "", 0, stream.number))

    def finish(self):
        for stream in {work.stream for work in list(PENDING)}:
            stream.finish()
        LOG.append(Entry("synchronise", "all", 0, None))

    def pinned(self, nbytes):
        memory = np.full(nbytes, POISON, np.uint8)
        PINNED[_address(memory)] = nbytes
        weakref.finalize(memory, PINNED.pop, _address(memory), None).atexit = False
        return memory

    def copy(self, target, source):
        whats = {(False, True): "out", (True, False): "in", (True, True): "on"}
        what = whats.get((isinstance(target, DeviceArray), isinstance(source, DeviceArray)))
        if what is None:
            raise TypeError("a copy from the host to the host")
        if not (target.flags.c_contiguous and source.flags.c_contiguous and target.nbytes == source.nbytes):
            raise ValueError(f"a copy of {source.nbytes} bytes to {target.nbytes}, of which all must be contiguous")
        to, from_ = self._reached(target), self._reached(source)
        with LOCK:
            present(self).ask(what, "copy", lambda: np.copyto(to, from_), reads=[from_], writes=[to])
            if what == "out" and not any(clashes((), (to,), PENDING[:-1])):
                to.fill(POISON)  # whoever reads it too early shall see that

    def _reached(self, array):
        """Return the bytes of an array that the device copies from or to."""
        if isinstance(array, DeviceArray):
            return self._here(array).reshape(-1).view(np.uint8)
        if not is_pinned(array):
            raise NotPinned(f"{array.nbytes} bytes at {_address(array):#x} are not pinned")
        return array.reshape(-1).view(np.uint8)

    def _here(self, x):
        """Return the NumPy array of an array that lies here."""
        if not isinstance(x, DeviceArray) or x.device is not self:
            raise ValueError(f"{x!r} is not on {self.name}")
        assert not x._block.whole.closed, f"{x!r} lies in memory that was closed"
        return x._array

    # -- kernels

    def convert(self, target, source):
        to, from_ = self._here(target), self._here(source)
        if to.shape != from_.shape:
            raise ValueError(f"shapes {from_.shape} and {to.shape} differ")

        def kernel():
            np.copyto(to, from_, casting="unsafe")

        present(self).ask("kernel", "convert", kernel, reads=[from_], writes=[to])

    def codec(self, name):
        return DeviceCodec(self, codec(name))

    def fold(self, vectors, how):
        arrays = [self._here(x) for x in vectors]
        if any(x.shape != arrays[0].shape or x.dtype != arrays[0].dtype or not x.flags.c_contiguous for x in arrays):
            raise ValueError("vectors of a fold are contiguous, of one length and dtype")
        # A kernel knows an operator by its name.
        assert how.combine is reduction(how.name, how.dtype, 1).combine, f"{how.name} is another operator"
        if how.dtype not in (arrays[0].dtype, working_dtype(arrays[0].dtype)):
            raise ValueError(f"{arrays[0].dtype} is not combined in {how.dtype}")

        def kernel():
            total = arrays[0].astype(how.dtype)
            for x in arrays[1:]:
                how.combine(total, x.astype(how.dtype), total)
            how.finish(total)
            for x in arrays:
                np.copyto(x, total, casting="unsafe")

        def call():
            assert all(x.device is self for x in vectors)  # which the call keeps
            present(self).ask("fold", how.name, kernel, reads=arrays, writes=arrays)

        return call

    def kth_largest(self, magnitudes, k):
        array, found = self._here(magnitudes), []
        if not (array.flags.c_contiguous and array.ndim == 1 and 0 < k <= len(array)):
            raise ValueError(f"there is no number {k} of a vector of shape {array.shape}")

        def kernel():
            assert not (array < 0).any()
            assert not np.isnan(array).any()
            found.append(np.sort(array)[len(array) - k])

        present(self).ask("kernel", "digits", kernel, reads=[array], writes=[])
        self.synchronise()
        return found[0]

    # -- memory that processes share: of a file without a name, which is gone when nobody has it open

    def allocate(self, nbytes):
        descriptor = os.memfd_create(self.name)
        os.ftruncate(descriptor, max(nbytes, 1))
        block = self._block(np.frombuffer(mmap.mmap(descriptor, max(nbytes, 1)), np.uint8))
        block.memory.fill(POISON)
        block.descriptor = descriptor
        weakref.finalize(block, os.close, descriptor)
        return block.array(0, nbytes, np.uint8)

    def export(self, memory):
        block = memory._block
        if block.descriptor is None or memory.base is not None:
            raise ValueError(f"{memory!r} is not what allocate() returned")
        return HANDLE.pack(os.getpid(), block.descriptor, os.fstat(block.descriptor).st_ino)

    def open(self, handle, nbytes):
        process, number, file = HANDLE.unpack(handle)
        if process == os.getpid():
            raise ValueError("a process cannot open its own handle")  # as CUDA says
        descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
        try:
            found = os.fstat(descriptor)
            assert (found.st_ino, found.st_size) == (file, max(nbytes, 1)), "the handle is not of memory of that length"
            block = self._block(np.frombuffer(mmap.mmap(descriptor, max(nbytes, 1)), np.uint8))
        finally:
            os.close(descriptor)
        block.opened = True
        return block.array(0, nbytes, np.uint8)

    def close(self, memory):
        block = memory._block
        if not block.opened or block.closed:
            raise ValueError(f"{memory!r} is not what open() returned, or was closed")
        with LOCK:
            for work in clashes((), (block.memory,), PENDING):
                raise Race(f"memory is closed while {work} is pending")
        block.closed = True

    # -- collectives

    def nccl(self):
        from standin_nccl import StandInNccl  # which needs MPI

        return StandInNccl(self)


class DeviceCodec(Codec):
    """The host's codec, as one kernel each way."""

    name = elementwise = None  # of the instance

    def __init__(self, device, of_host):
        self._device, self._codec = device, of_host
        self.name, self.elementwise = of_host.name, of_host.elementwise

    def nbytes(self, length):
        return self._codec.nbytes(length)

    def encode(self, values, encoded):
        self._ask("encode", self._codec.encode, values, encoded)

    def decode(self, encoded, values):
        self._ask("decode", self._codec.decode, encoded, values)

    def _ask(self, word, call, source, target):
        from_, to = self._device._here(source), self._device._here(target)
        values, encoded = (from_, to) if word == "encode" else (to, from_)
        if values.ndim != 1 or encoded.shape != (self.nbytes(len(values)),) or encoded.dtype != np.uint8:
            raise ValueError(f"an encoded buffer of {encoded.shape} {encoded.dtype} for {values.shape} values")
        present(self._device).ask("kernel", f"{word} {self.name}", lambda: call(from_, to), reads=[from_], writes=[to])


def _address(array):
    return array.__array_interface__["data"][0]


def peek(x):
    """Return a copy of an array for a test to look at: all that is pending is done first, and nothing is logged."""
    with LOCK:
        while PENDING:
            work = PENDING.pop(0)
            with np.errstate(all="ignore"):
                work.call()
        return np.array(x._array)


# -- how mpiagg finds it

_devices = {}


def device(number=None):
    """Return a device; None is the first."""
    number = number or 0
    if number >= COUNT:
        raise DeviceError(f"there is no stand-in {number}; there are {COUNT}")
    with LOCK:
        if number not in _devices:
            _devices[number] = StandIn(number)
        return _devices[number]


def _device_of(x):
    return x.device if isinstance(x, DeviceArray) else HOST


def install():
    """Let mpiagg know the stand-ins."""
    where.ACCELERATED["standin"] = _device_of
    where.KINDS["standin"] = device


def uninstall():
    """Let mpiagg forget them, and all that they were asked for."""
    where.ACCELERATED.pop("standin", None)
    where.KINDS.pop("standin", None)
    _devices.clear()
    reset()


@contextmanager
def installed():
    """Install the stand-ins, return the first, and uninstall them."""
    install()
    try:
        yield device()
    finally:
        uninstall()
