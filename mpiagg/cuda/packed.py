"""CUDA C++ for the codecs ``u4`` and ``u2``: the bytes and the bits of :class:`mpiagg.arrays.codecs.PackedMinMax`.

A block of threads takes whole groups of values, one after the other: it finds their ends, and packs their codes.
"""

from __future__ import annotations

from functools import cache
from string import Template
from typing import Final

from mpiagg.arrays.codecs import ENDS_BYTES, GROUP
from mpiagg.cuda.kernels import C_TYPES, THREADS, Kernel
from mpiagg.cuda.uint8 import PRELUDE

_ENCODE: Final = Template(r"""
extern "C" __global__ void __launch_bounds__($threads)
$name(u8 *encoded, const $real *values, i64 length, i64 nbytes) {
    const i64 groups = (length + $group - 1) / $group, cut = groups * $ends;
    for (i64 group = blockIdx.x; group < groups; group += gridDim.x) {
        const $real *own = values + group * $group;
        const int count = length - group * $group < $group ? (int)(length - group * $group) : $group;
        Ends found = NOTHING_FOUND;
        for (int i = threadIdx.x; i < count; i += blockDim.x) {
            float single;
            put(single, own[i]);
            const u32 key = key_of(single);
            found = joined(found, {key, key});
        }
        found = ends_of_block(found);
        float least = value_of(found.least) + 0.0f, greatest = value_of(found.greatest) + 0.0f;
        if (!is_finite(least) || !is_finite(greatest)) least = greatest = same_bits<float>((u32)0x7FC00000);
        if (threadIdx.x == 0) {
            u32 *words = (u32 *)(encoded + group * $ends);
            words[0] = same_bits<u32>(least);
            words[1] = same_bits<u32>(greatest);
        }
        const double span = (double)greatest - (double)least, scale = span > 0 ? $most / span : 0;
        const int bytes = (count + $per_byte - 1) / $per_byte;
        for (int i = threadIdx.x; i < bytes; i += blockDim.x) {
            u32 packed = 0;
            for (int lane = 0; lane < $per_byte && i * $per_byte + lane < count && span > 0; ++lane) {
                float single;
                put(single, own[i * $per_byte + lane]);
                packed |= (u32)rint(((double)single - (double)least) * scale) << (lane * $bits);
            }
            encoded[cut + group * ($group / $per_byte) + i] = (u8)packed;
        }
        __syncthreads();  // the ends of the next group take the place of these
    }
    if (blockIdx.x == 0) {
        const i64 end = cut + (length + $per_byte - 1) / $per_byte;
        for (i64 i = end + threadIdx.x; i < nbytes; i += blockDim.x) encoded[i] = 0;
    }
}
""")

_DECODE: Final = Template(r"""
extern "C" __global__ void __launch_bounds__($threads)
$name($real *values, const u8 *encoded, i64 length) {
    const i64 groups = (length + $group - 1) / $group, bytes = (length + $per_byte - 1) / $per_byte;
    const i64 first = (i64)blockIdx.x * blockDim.x + threadIdx.x, stride = (i64)gridDim.x * blockDim.x;
    for (i64 i = first; i < bytes; i += stride) {
        const float *ends = (const float *)(encoded + i / ($group / $per_byte) * $ends);
        const double least = ends[0], step = ((double)ends[1] - least) / $most;
        const u32 packed = encoded[groups * $ends + i];
        for (int lane = 0; lane < $per_byte && i * $per_byte + lane < length; ++lane) {
            put(values[i * $per_byte + lane], least + (double)(packed >> (lane * $bits) & $most) * step);
        }
    }
}
""")


def _kernel(name: str, dtype: str, bits: int, text: Template) -> Kernel:
    name = f"{name}_u{bits}_{dtype}"
    body = text.substitute(
        name=name,
        real=C_TYPES[dtype],
        threads=THREADS,
        group=GROUP,
        ends=ENDS_BYTES,
        bits=bits,
        per_byte=8 // bits,
        most=2**bits - 1,
    )
    return Kernel(name, PRELUDE + body)


@cache
def encode(dtype: str, bits: int) -> Kernel:
    """Return ``(encoded, values, length, nbytes)``: the encoded, of so many bytes, for any number of blocks."""
    return _kernel("encode", dtype, bits, _ENCODE)


@cache
def decode(dtype: str, bits: int) -> Kernel:
    """Return ``(values, encoded, length)``: the values of an encoded buffer, for any number of blocks."""
    return _kernel("decode", dtype, bits, _DECODE)
