"""What a CUDA device computes by kernels of ours: CuPy compiles them once, and launches them in the present stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import cupy
import numpy as np

from mpiagg.arrays.codecs import (
    GROUP,
    HEADER_BYTES,
    BFloat16,
    Float16,
    MinMaxUInt2,
    MinMaxUInt4,
    MinMaxUInt8,
    PackedMinMax,
)
from mpiagg.arrays.reductions import Array, Reduction
from mpiagg.cuda import cubins, digits, kernels, packed
from mpiagg.cuda import uint8 as cuda_uint8
from mpiagg.cuda.kernels import LANES, OPTIONS, THREADS, Kernel, Share, share

BLOCKS: Final = 8
"""At most so many blocks for each multiprocessor; it has no room for more of them at once."""

HALVES: Final = ("float16", "bfloat16")
WIDE: Final = ("float32", "float64")


def words(array: Array) -> Array:
    """Return a bfloat16 array's bits, and other arrays as they are: what CuPy can copy without knowing the dtype."""
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


def address(array: Any) -> int:
    """Return where an array of CuPy's lies."""
    return int(array.data.ptr)


def _place(array: Array) -> tuple[int, int]:
    """Return where an array lies, and how many bytes a value has.

    Raises
    ------
    ValueError
        If a kernel cannot read values there.
    """
    start = address(array)
    if start % array.dtype.alignment:
        raise ValueError(f"a CUDA device cannot reach {array.dtype} at {start:#x}: it must be aligned")
    return start, array.itemsize


class Compiled:
    """A kernel, compiled for a device when it is first launched there.

    Not CuPy's RawKernel: that adds ``-ftz=true`` to all options, and numbers below 2^-126 would be zero.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._loaded: dict[int, tuple[Any, Any]] = {}

    def compile(self) -> Any:
        """Return the function on the thread's present device."""
        ordinal = cupy.cuda.runtime.getDevice()
        if ordinal not in self._loaded:
            versions = cupy.__version__, str(cupy.cuda.nvrtc.getVersion())
            key = (self._kernel.source, *OPTIONS, cupy.cuda.Device(ordinal).compute_capability, *versions)
            self._loaded[ordinal] = cubins.loaded(key, self._binary, self._load)
        return self._loaded[ordinal][1]

    def _binary(self) -> bytes:
        """Compile it for the thread's present device."""
        file = f"{self._kernel.name}.cu"
        binary: bytes = cupy.cuda.compiler.compile_using_nvrtc(self._kernel.source, OPTIONS, filename=file)[0]
        return binary

    def _load(self, binary: bytes) -> tuple[Any, Any]:
        """Return a module on the thread's present device, and its function."""
        module = cupy.cuda.function.Module()
        module.load(binary)
        return module, module.get_function(self._kernel.name)

    def __call__(self, grid: tuple[int], block: tuple[int], arguments: tuple[object, ...]) -> None:
        """Launch it in the present stream of the thread's present device."""
        self.compile()(grid, block, arguments)


@cache
def _compiled(kernel: Kernel) -> Compiled:
    return Compiled(kernel)


@dataclass(frozen=True)
class KernelLaunch:
    """A launch that can be repeated."""

    device: Any
    kernel: Any
    blocks: int
    arguments: tuple[object, ...]
    kept: object
    """Memory that must be there when the kernel runs."""

    def __call__(self) -> None:
        """Ask for it."""
        with self.device:
            self.kernel((self.blocks,), (THREADS,), self.arguments)


class Kernels:
    """The kernels on one device.

    Attributes
    ----------
    device : cupy.cuda.Device
        The device, which is made the thread's for as long as something is asked of it.
    """

    def __init__(self, device: Any) -> None:
        self.device = device
        self._most: int = BLOCKS * device.attributes["MultiProcessorCount"]

    def blocks(self, shared: Share) -> int:
        """Return how many blocks of threads a vector is given."""
        return max(1, min(-(-shared.threads // THREADS), self._most))

    def _launch(self, kernel: Kernel, shared: Share, *arguments: object, after: Sequence[object] = ()) -> None:
        split = (shared.length, shared.head, shared.groups)
        _compiled(kernel)((self.blocks(shared),), (THREADS,), (*arguments, *split, *after))

    # -- conversions

    def convert(self, target: Array, source: Array) -> None:
        """Write an array's values in the dtype of another of the same shape, as ``casting="unsafe"`` does."""
        to, of = target.dtype.name, source.dtype.name
        with self.device:
            if to == of:
                cupy.copyto(words(target), words(source))
            elif (to in HALVES and of in WIDE) or (to in WIDE and of in HALVES):
                self.rewrite(words(target), to, words(source), of)
            elif "bfloat16" in (to, of):
                between = cupy.empty(source.shape, np.float32)
                self.convert(between, source)
                self.convert(target, between)
            else:
                cupy.copyto(target, source, casting="unsafe")

    def rewrite(self, target: Array, to: str, source: Array, of: str) -> None:
        """Write values of half precision as wider ones, or the other way round; bfloat16 as uint16.

        Raises
        ------
        ValueError
            If they are not of one shape.
        """
        if target.shape != source.shape:
            raise ValueError(f"values of shape {source.shape} cannot be written to shape {target.shape}")
        with self.device:
            read = cupy.ascontiguousarray(source)
            written = target if target.flags.c_contiguous else cupy.empty(target.shape, target.dtype)
            if target.size:
                shared = share(target.size, LANES, [_place(written), _place(read)])
                self._launch(kernels.conversion(of, to), shared, address(written), address(read))
            if written is not target:
                cupy.copyto(target, written)

    # -- the codec u8

    def encode_uint8(self, values: Array, encoded: Array) -> None:
        """Encode a vector."""
        if not values.size:
            return
        with self.device:
            read = cupy.ascontiguousarray(values)
            shared, dtype = _shared_with_encoded(read, encoded), values.dtype.name
            count = self.blocks(shared)
            found = cupy.empty(count * cuda_uint8.BYTES_OF_ENDS, np.uint8)
            self._launch(cuda_uint8.ends(dtype), shared, address(found), address(read))
            after = (address(found), count)
            self._launch(cuda_uint8.encode(dtype), shared, address(encoded), address(read), after=after)

    def decode_uint8(self, encoded: Array, values: Array) -> None:
        """Write the values of an encoded buffer."""
        if not values.size:
            return
        with self.device:
            written = values if values.flags.c_contiguous else cupy.empty(values.shape, values.dtype)
            shared = _shared_with_encoded(written, encoded)
            self._launch(cuda_uint8.decode(values.dtype.name), shared, address(written), address(encoded))
            if written is not values:
                cupy.copyto(values, written)

    # -- the codecs u4 and u2

    def encode_packed(self, codec: PackedMinMax, values: Array, encoded: Array) -> None:
        """Encode a vector."""
        if not values.size:
            return
        with self.device:
            read = cupy.ascontiguousarray(values)
            self._check_packed(codec, read, encoded)
            kernel, blocks = packed.encode(values.dtype.name, codec.bits), min(-(-values.size // GROUP), self._most)
            arguments = (address(encoded), address(read), values.size, codec.nbytes(values.size))
            _compiled(kernel)((blocks,), (THREADS,), arguments)

    def decode_packed(self, codec: PackedMinMax, encoded: Array, values: Array) -> None:
        """Write the values of an encoded buffer."""
        if not values.size:
            return
        with self.device:
            written = values if values.flags.c_contiguous else cupy.empty(values.shape, values.dtype)
            self._check_packed(codec, written, encoded)
            kernel, threads = packed.decode(values.dtype.name, codec.bits), -(-values.size // codec.per_byte)
            arguments = (address(written), address(encoded), values.size)
            _compiled(kernel)((min(-(-threads // THREADS), self._most),), (THREADS,), arguments)
            if written is not values:
                cupy.copyto(values, written)

    @staticmethod
    def _check_packed(codec: PackedMinMax, values: Array, encoded: Array) -> None:
        if encoded.size != codec.nbytes(values.size):
            raise ValueError(f"an encoded buffer of {encoded.size} bytes is none of {values.size} values")
        _place(values)
        _place(encoded[: encoded.size // 4 * 4].view(np.float32))

    # -- folds

    def fold(self, vectors: Sequence[Array], how: Reduction) -> Callable[[], None]:
        """Return a call that launches one kernel; see :meth:`mpiagg.arrays.devices.Accelerator.fold`."""
        dtype, length, count = vectors[0].dtype, vectors[0].size, len(vectors)
        assert all(x.dtype == dtype and x.size == length and x.flags.c_contiguous for x in vectors)
        text = kernels.fold(dtype.name, dtype.itemsize, how.name, count, divided=how.divisor is not None)
        if not length:
            return lambda: None
        places = [_place(x) for x in vectors]
        shared = share(length, kernels.lanes_of_fold(dtype.itemsize), places)
        pointers = [start for start, _ in places]
        kernel, table = _compiled(text), None
        with self.device:
            kernel.compile()
            if count > kernels.MOST_VECTORS:
                table = cupy.asarray(np.array(pointers, np.uint64))
                cupy.cuda.get_current_stream().synchronize()  # the kernel may be launched in another one
        first = pointers if table is None else [address(table), count]
        arguments = (*first, length, shared.head, shared.groups, float(how.divisor or 1))
        return KernelLaunch(self.device, kernel, self.blocks(shared), arguments, (vectors, table))

    # -- selection

    def kth_largest(self, magnitudes: Array, k: int) -> Any:
        """Return the k-th largest number; see :meth:`mpiagg.arrays.devices.Accelerator.kth_largest`."""
        dtype, left, prefix, shift = magnitudes.dtype, k, 0, 8 * magnitudes.itemsize
        shared = share(magnitudes.size, digits.LANES, [_place(magnitudes)])
        with self.device:
            while shift:
                width = min(digits.BITS, shift)
                shift -= width
                counts = cupy.zeros(2**digits.BITS, np.uint32)
                places = address(counts), address(magnitudes)
                self._launch(digits.digits(dtype.itemsize), shared, *places, after=(prefix, shift, width))
                at_least = np.cumsum(counts.get()[::-1], dtype=np.int64)  # of each digit and those above it
                above = int(np.searchsorted(at_least, left))
                left -= int(at_least[above - 1]) if above else 0
                prefix = prefix << width | 2**digits.BITS - 1 - above
        return np.array(prefix, f"u{dtype.itemsize}").view(dtype)[()]


def _shared_with_encoded(values: Array, encoded: Array) -> Share:
    """Return how threads share out a vector and its codes.

    Raises
    ------
    ValueError
        If the encoded buffer is not of the vector's length.
    """
    header, codes = encoded[:HEADER_BYTES], encoded[HEADER_BYTES:]
    if codes.size != -(-values.size // 32) * 32:
        raise ValueError(f"an encoded buffer of {encoded.size} bytes is none of {values.size} values")
    _place(header.view(np.float32))
    return share(values.size, LANES, [_place(values), _place(codes)])


# -- codecs


class CudaFloat16(Float16):
    """Half precision."""

    def __init__(self, device_kernels: Kernels) -> None:
        self._kernels = device_kernels

    def encode(self, values: Array, encoded: Array) -> None:
        """Round to float16."""
        self._kernels.rewrite(encoded.view(np.float16), "float16", values, values.dtype.name)

    def decode(self, encoded: Array, values: Array) -> None:
        """Widen."""
        self._kernels.rewrite(values, values.dtype.name, encoded.view(np.float16), "float16")


class CudaBFloat16(BFloat16):
    """The upper half of a float32."""

    def __init__(self, device_kernels: Kernels) -> None:
        self._kernels = device_kernels

    def encode(self, values: Array, encoded: Array) -> None:
        """Round to bfloat16."""
        self._kernels.rewrite(encoded.view(np.uint16), "bfloat16", values, values.dtype.name)

    def decode(self, encoded: Array, values: Array) -> None:
        """Widen."""
        self._kernels.rewrite(values, values.dtype.name, encoded.view(np.uint16), "bfloat16")


class CudaMinMaxUInt8(MinMaxUInt8):
    """Whole numbers from 0 to 255 between the least and the greatest value of a chunk."""

    def __init__(self, device_kernels: Kernels) -> None:
        self._kernels = device_kernels

    def encode(self, values: Array, encoded: Array) -> None:
        """Write the header and the codes."""
        self._kernels.encode_uint8(values, encoded)

    def decode(self, encoded: Array, values: Array) -> None:
        """Read the header and the codes."""
        self._kernels.decode_uint8(encoded, values)


class CudaPackedMinMax(PackedMinMax):
    """Whole numbers of a few bits between the least and the greatest of each 256 values."""

    def __init__(self, device_kernels: Kernels) -> None:
        super().__init__()
        self._kernels = device_kernels

    def encode(self, values: Array, encoded: Array) -> None:
        """Write the ends and the codes."""
        self._kernels.encode_packed(self, values, encoded)

    def decode(self, encoded: Array, values: Array) -> None:
        """Read the ends and the codes."""
        self._kernels.decode_packed(self, encoded, values)


class CudaMinMaxUInt4(CudaPackedMinMax):
    """Whole numbers from 0 to 15."""

    name, bits = MinMaxUInt4.name, MinMaxUInt4.bits


class CudaMinMaxUInt2(CudaPackedMinMax):
    """Whole numbers from 0 to 3."""

    name, bits = MinMaxUInt2.name, MinMaxUInt2.bits
