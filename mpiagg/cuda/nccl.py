"""NCCL as CuPy has it, for one GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from mpiagg.arrays.devices import Accelerator, Nccl
from mpiagg.arrays.reductions import Array
from mpiagg.cuda.compiled import address
from mpiagg.errors import DeviceError


def _library() -> Any:
    """Return CuPy's binding of NCCL.

    Raises
    ------
    DeviceError
        If it does not find the library.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns of what we raise
        from cupy.cuda import nccl  # noqa: PLC0415 - looks for the library
    if not nccl.available:
        wheel = f"nvidia-nccl-cu{runtime.runtimeGetVersion() // 1000}"
        raise DeviceError(f"CuPy finds no NCCL (libnccl.so.2): pip install {wheel}, or add NCCL to LD_LIBRARY_PATH")
    return nccl


class CudaNccl(Nccl):
    """NCCL for one GPU."""

    def __init__(self, device: Accelerator, gpu: Any) -> None:
        nccl = self._library = _library()
        self.device, self._gpu = device, gpu
        self._connection: Any = None
        self._dtypes = {
            np.dtype("i1"): nccl.NCCL_INT8,
            np.dtype("i4"): nccl.NCCL_INT32,
            np.dtype("i8"): nccl.NCCL_INT64,
            np.dtype("u1"): nccl.NCCL_UINT8,
            np.dtype("u4"): nccl.NCCL_UINT32,
            np.dtype("u8"): nccl.NCCL_UINT64,
            np.dtype("f4"): nccl.NCCL_FLOAT32,
            np.dtype("f8"): nccl.NCCL_FLOAT64,
        }
        self._ops = {"sum": nccl.NCCL_SUM, "prod": nccl.NCCL_PROD, "min": nccl.NCCL_MIN, "max": nccl.NCCL_MAX}

    @contextmanager
    def _calling(self) -> Iterator[int]:
        """Make the GPU the thread's own, give the present stream's handle, and say whose error it is."""
        with self._gpu:
            try:
                yield cupy.cuda.get_current_stream().ptr
            except self._library.NcclError as error:
                raise DeviceError(f"NCCL has failed on {self.device.name}: {error}") from error

    def unique_id(self) -> bytes:
        """Return by what the ranks of a new connection find one another: the address of this process."""
        with self._calling():
            return bytes(self._library.get_unique_id())

    def connect(self, unique_id: bytes, rank: int, size: int) -> None:
        """Connect with the other ranks."""
        with self._calling():
            self._connection = self._library.NcclCommunicator(size, unique_id, rank)

    def all_reduce(self, vector: Array, op: str) -> None:
        """Reduce vectors in place, everywhere."""
        self._call("allReduce", vector, vector, vector.size, self._ops[op])

    def reduce(self, vector: Array, op: str, root: int) -> None:
        """Reduce vectors, in place on the root."""
        self._call("reduce", vector, vector, vector.size, self._ops[op], root)

    def broadcast(self, vector: Array, root: int) -> None:
        """Write the root's vector to all."""
        self._call("broadcast", vector, vector, vector.size, root)

    def all_gather(self, vector: Array, own: Array) -> None:
        """Write every rank's part to all vectors."""
        self._call("allGather", own, vector, own.size)

    def reduce_scatter(self, vector: Array, own: Array, op: str) -> None:
        """Leave this rank's part of the reduction in its place."""
        self._call("reduceScatter", vector, own, own.size, self._ops[op])

    def _call(self, method: str, x: Array, out: Array, count: int, *what: int) -> None:
        """Call a method of CuPy's, in the stream of the device."""
        with self._calling() as stream:
            getattr(self._connection, method)(address(x), address(out), count, self._dtypes[x.dtype], *what, stream)

    @contextmanager
    def group(self) -> Iterator[None]:
        """Collect collectives, and ask for them together at the end."""
        with self._calling():
            self._library.groupStart()
            try:
                yield
            finally:
                self._library.groupEnd()

    def close(self, *, abort: bool) -> None:
        """Disconnect."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with self._calling():
                connection.abort() if abort else connection.destroy()
