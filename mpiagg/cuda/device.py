"""CUDA devices: CuPy's arrays, and the driver's streams and memory.

Every call makes its device the thread's own for as long as it takes, since helper threads ask for work, too.
"""

from __future__ import annotations

import ctypes
import sys
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from threading import Lock
from typing import Any, Final, TypeVar

import cupy
import numpy as np
import numpy.typing as npt
from cupy.cuda import runtime

from mpiagg.arrays.codecs import Codec, codec
from mpiagg.arrays.devices import Accelerator, Nccl, Stream
from mpiagg.arrays.host import HOST
from mpiagg.arrays.reductions import Array, Reduction
from mpiagg.cuda.compiled import (
    CudaBFloat16,
    CudaFloat16,
    CudaMinMaxUInt2,
    CudaMinMaxUInt4,
    CudaMinMaxUInt8,
    Kernels,
    address,
    words,
)
from mpiagg.cuda.present import Present
from mpiagg.errors import DeviceError

GRAIN: Final = 2**21
"""Memory to share is allocated in multiples of this: the driver cuts smaller pieces from a block, and shares that."""

Taken = TypeVar("Taken")

_OUT_OF_MEMORY: Final = 2
_NOT_READY: Final = 600


class CudaStream(Stream):
    """A stream of CUDA's that does not wait for the default stream.

    Attributes
    ----------
    ptr : int
        The driver's handle.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        with device:
            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._event = cupy.cuda.Event(disable_timing=True)
        self.ptr: int = self._stream.ptr

    def __enter__(self) -> object:
        self._device.__enter__()
        try:
            # Also where the device is the thread's already, for with this call the driver's context is, too: CuPy
            # does not need that, but a CUDA-aware MPI library does.
            self._device.use()
            self._stream.__enter__()
        except BaseException:
            self._device.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._stream.__exit__(*error)
        finally:
            self._device.__exit__(*error)

    def follow(self) -> None:
        """Let what comes next wait for all that has been asked for so far in this thread's present stream."""
        with self._device:
            self._event.record(cupy.cuda.get_current_stream())
            self._stream.wait_event(self._event)

    def done(self) -> bool:
        """Whether all that was asked for here is done.

        Raises
        ------
        DeviceError
            If some of it has failed.
        """
        status = runtime.streamQuery(self.ptr)  # not the stream's ``done``, which takes an error for not yet
        if status not in (0, _NOT_READY):
            raise DeviceError(f"what was asked of {self._device} has failed: {runtime.CUDARuntimeError(status)}")
        return bool(status == 0)


class Cuda(Accelerator):
    """A GPU.

    Attributes
    ----------
    ordinal : int
        The number by which this process knows it.
    """

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.name = f"cuda:{ordinal}"
        self._device = Present(ordinal)
        self._identity = _identity(ordinal)
        kernels = self._kernels = Kernels(self._device)
        codecs = CudaFloat16, CudaBFloat16, CudaMinMaxUInt8, CudaMinMaxUInt4, CudaMinMaxUInt2
        self._codecs: dict[str, Codec] = {each.name: each(kernels) for each in codecs}

    def __repr__(self) -> str:
        return f"<{self.name}>"

    @property
    def identity(self) -> str:
        """The GPU's UUID, as ``nvidia-smi -L`` prints it."""
        return self._identity

    @property
    def visible(self) -> Sequence[str]:
        """The UUIDs of all GPUs that this process sees."""
        return tuple(_identity(ordinal) for ordinal in range(runtime.getDeviceCount()))

    # -- arrays

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return a new array of CuPy's, uninitialised."""
        with self._device:
            return _or_again(lambda: cupy.empty(shape, dtype))

    def borrow(self, start: int, length: int, dtype: npt.DTypeLike, owner: object = None) -> Array:
        """Return an array over memory that somebody else owns: ``owner``, or who keeps it alive while it is used."""
        wanted = np.dtype(dtype)
        if length == 0:
            return self.empty(0, wanted)
        memory = cupy.cuda.UnownedMemory(start, length * wanted.itemsize, owner, self.ordinal)
        return self._array(memory, length, wanted)

    def _array(self, memory: Any, length: int, dtype: npt.DTypeLike) -> Array:
        pointer = cupy.cuda.MemoryPointer(memory, 0)
        return cupy.ndarray((length,), dtype, pointer)  # type: ignore[no-any-return]  # CuPy has no types

    def address(self, array: Array) -> int:
        """Return where the first element lies."""
        return _address(array)

    def convert(self, target: Array, source: Array) -> None:
        """Write an array's values in the dtype of another of the same shape, as ``casting="unsafe"`` does."""
        self._kernels.convert(target, source)

    def codec(self, name: str) -> Codec:
        """Return the codec of that name: it encodes as the host's does, bit for bit."""
        return self._codecs[codec(name).name]

    def from_host(self, array: Array) -> Array:
        """Return a copy of a NumPy array, which can be changed at once."""
        with self._device:
            # CuPy returns before memory is read that the device reaches by itself.
            pinned = array.size and runtime.pointerGetAttributes(_address(array)).type == runtime.memoryTypeHost
            source = np.array(array) if pinned else array
            return cupy.array(words(source)).view(array.dtype)  # type: ignore[no-any-return]  # likewise

    def to_host(self, array: Array) -> Array:
        """Return a copy of an array as a NumPy array, when all that it waits for is done."""
        with self._device:
            return words(array).get(order="A").view(array.dtype)  # type: ignore[attr-defined, no-any-return]  # likewise

    # -- streams

    def present(self) -> AbstractContextManager[object]:
        """Return a block in which this is the thread's present device."""
        return Present(self.ordinal)

    def stream(self) -> CudaStream:
        """Return a new stream, which waits for no other unless it is told to."""
        return CudaStream(self._device)

    def synchronise(self) -> None:
        """Wait until all that was asked for in this thread's present stream is done."""
        with self._device:
            cupy.cuda.get_current_stream().synchronize()

    def finish(self) -> None:
        """Wait until all that this process has asked for, in any stream, is done."""
        self._device.synchronize()

    def pinned(self, nbytes: int) -> Array:
        """Return bytes of the host's, as a NumPy array, that the device copies from and to by itself."""
        if nbytes == 0:
            return np.empty(0, np.uint8)
        with self._device:
            # Not from CuPy's pool, which takes the next power of two and gives nothing back.
            memory = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(nbytes), 0)
        return np.frombuffer(memory, np.uint8, nbytes)

    def copy(self, target: Array, source: Array) -> None:
        """Ask for a copy of bytes between contiguous arrays of equal length: one is here, the other here or pinned."""
        nbytes = target.nbytes
        assert source.nbytes == nbytes
        if nbytes == 0:
            return
        with self._device:
            stream = cupy.cuda.get_current_stream().ptr
            runtime.memcpyAsync(_address(target), _address(source), nbytes, runtime.memcpyDefault, stream)

    def fold(self, vectors: Sequence[Array], how: Reduction) -> Callable[[], None]:
        """Return a call that asks for one kernel: it combines vectors, in their order, and writes the result to all.

        Raises
        ------
        TypeError
            If CUDA has no such dtype.
        ValueError
            If a vector is not aligned.
        """
        return self._kernels.fold(vectors, how)

    def kth_largest(self, magnitudes: Array, k: int) -> Any:
        """Return the k-th largest of a contiguous vector of numbers, none of them negative or NaN, when it is found."""
        return self._kernels.kth_largest(magnitudes, k)

    # -- memory that processes share

    def allocate(self, nbytes: int) -> Array:
        """Return bytes that other processes can map: of the driver's own, since memory of a pool cannot always be.

        Raises
        ------
        MemoryError
            If the device has not as many.
        """
        size = max(1, -(-nbytes // GRAIN)) * GRAIN
        with self._device:
            try:
                memory = _or_again(lambda: cupy.cuda.Memory(size))
            except runtime.CUDARuntimeError as error:
                if error.status != _OUT_OF_MEMORY:
                    raise
                free, _ = self._device.mem_info
                raise MemoryError(f"{self.name} has not got {size} bytes to share; {free} are free") from error
            return self._array(memory, nbytes, np.uint8)

    def export(self, memory: Array) -> bytes:
        """Return a handle by which other processes map what :meth:`allocate` returned.

        Raises
        ------
        ValueError
            If it is other memory.
        DeviceError
            If the driver cannot share memory here.
        """
        pointer: Any = memory.data
        if type(pointer.mem) is not cupy.cuda.Memory or pointer.ptr != pointer.mem.ptr:
            raise ValueError("only whole memory that allocate() has returned can be shared")
        with self._device:
            try:
                return bytes(runtime.ipcGetMemHandle(pointer.ptr))
            except runtime.CUDARuntimeError as error:
                raise DeviceError(f"memory of {self.name} cannot be shared with other processes: {error}") from error

    def open(self, handle: bytes, nbytes: int) -> Array:
        """Map the bytes of another process's handle.

        Raises
        ------
        DeviceError
            If the driver cannot map them here.
        """
        with self._device:
            try:
                start = runtime.ipcOpenMemHandle(handle)
            except runtime.CUDARuntimeError as error:
                raise DeviceError(
                    f"{self.name} cannot map memory of another process ({error}); "
                    "processes that share must run in one container and see each other's GPUs"
                ) from error
        # Not by borrow(), since the memory must be found again when it is closed, also where there are no bytes.
        return self._array(cupy.cuda.UnownedMemory(start, max(1, nbytes), None, self.ordinal), nbytes, np.uint8)

    def close(self, memory: Array) -> None:
        """Give back what :meth:`open` returned; nobody uses it any more."""
        with self._device:
            runtime.ipcCloseMemHandle(_address(memory))

    # -- collectives

    def nccl(self) -> Nccl:
        """Return NVIDIA's own collectives, not connected yet.

        Raises
        ------
        DeviceError
            If CuPy does not find NCCL.
        """
        from mpiagg.cuda.nccl import CudaNccl  # noqa: PLC0415 - NCCL is never required

        return CudaNccl(self, self._device)


def _identity(ordinal: int) -> str:
    """Return the UUID: by the driver itself, since CuPy ends it at its first zero."""
    driver, handle, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), (ctypes.c_char * 16)()
    status = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(handle), ordinal)
    status = status or driver.cuDeviceGetUuid_v2(found, handle)
    if status:
        raise DeviceError(
            f"the driver does not tell the UUID of cuda:{ordinal} (error {status}); is it older than 11.4?"
        )
    return f"GPU-{uuid.UUID(bytes=found.raw)}"


def _or_again(take: Callable[[], Taken]) -> Taken:
    """Take memory of the present device; if none is left, free what CuPy and torch keep for later, and try again."""
    try:
        return take()
    except MemoryError:
        pass
    except runtime.CUDARuntimeError as error:
        if error.status != _OUT_OF_MEMORY:
            raise
    cupy.get_default_memory_pool().free_all_blocks()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return take()


def _address(array: Any) -> int:
    return HOST.address(array) if isinstance(array, np.ndarray) else address(array)


_DEVICES: Final[dict[int, Cuda]] = {}
_LOCK: Final = Lock()


def _known(ordinal: int) -> Cuda:
    found = _DEVICES.get(ordinal)
    if found is None:
        with _LOCK:
            found = _DEVICES.get(ordinal) or Cuda(ordinal)
            _DEVICES[ordinal] = found
    return found


def device(ordinal: int | None = None) -> Cuda:
    """Return the device of a number, or the one in use at present.

    Raises
    ------
    DeviceError
        If no device can be used.
    ValueError
        If this process sees no device of that number.
    """
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise DeviceError(
            f"no CUDA device can be used here: {error}. Does nvidia-smi list a GPU, and a driver for CUDA "
            f"{runtime.runtimeGetVersion() // 1000} or newer? Does CUDA_VISIBLE_DEVICES hide it?"
        ) from error
    if ordinal is None:
        return _known(runtime.getDevice())
    if not 0 <= ordinal < count:
        raise ValueError(f"there is no device 'cuda:{ordinal}': this process sees {count}, numbered from 0")
    return _known(ordinal)


def device_of_array(x: Any) -> Cuda:
    """Return the device on which an array of CuPy's lies."""
    return _known(x.data.device_id)
