"""CUDA C++ for the codec ``u8``: the encoded buffers and the bits of :class:`mpiagg.arrays.codecs.MinMaxUInt8`.

The host never learns what the values are: one kernel finds the ends of its blocks' values, and every block of the
next finds the ends of those and the grid between them.
"""

from __future__ import annotations

from functools import cache
from string import Template
from typing import Final

from mpiagg.arrays.codecs import EPSILON, HEADER_BYTES
from mpiagg.cuda.kernels import C_TYPES, LANES, THREADS, Kernel

BYTES_OF_ENDS: Final = 8
"""What the first kernel leaves for every block: a struct ``Ends``."""

PRELUDE: Final = Template(r"""
#ifndef UINT8
#define UINT8
// -- the least and the greatest

// Whole numbers in the order of the floats, -0 below 0. Infinities and NaN have the first and the last.
INLINE u32 key_of(float x) {
    const u32 bits = same_bits<u32>(x);
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

INLINE float value_of(u32 key) { return same_bits<float>(key & 0x80000000 ? key & 0x7FFFFFFF : ~key); }

struct Ends { u32 least, greatest; };
#define NOTHING_FOUND {0xFFFFFFFF, 0}

INLINE Ends joined(Ends own, Ends other) {
    return {own.least < other.least ? own.least : other.least,
            own.greatest > other.greatest ? own.greatest : other.greatest};
}

// What all threads of a block have found.
INLINE Ends ends_of_block(Ends own) {
    __shared__ Ends shared[$threads];
    shared[threadIdx.x] = own;
    for (u32 half = blockDim.x / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) shared[threadIdx.x] = joined(shared[threadIdx.x], shared[threadIdx.x + half]);
    }
    __syncthreads();
    return shared[0];
}

template <class Real> struct Search {
    const Real *values;
    Ends own;

    template <int N> INLINE void at(i64 place) {
        const Pack<Real, N> read = load<Real, N>(values + place);
#pragma unroll
        for (int lane = 0; lane < N; ++lane) {
            float single;
            put(single, read.at[lane]);
            const u32 key = key_of(single);
            own = joined(own, {key, key});
        }
    }
};

// -- the grid between them

template <class T> struct Grid { T scale, lower; };

enum Kind { NOT_FINITE, ONE_VALUE, NARROW, WIDE };

struct Map {
    Kind kind;
    float least, greatest;
    Grid<float> narrow;
    Grid<double> wide;
};

INLINE bool is_finite(float x) { return (same_bits<u32>(x) & 0x7F800000) != 0x7F800000; }
INLINE float whole(float x) { return rintf(x); }
INLINE double whole(double x) { return rint(x); }

template <class T> INLINE Grid<T> grid_between(double span, double greatest) {
    const T scale = (T)255 / ((T)span + (T)(span / 1024 < $epsilon ? span / 1024 : $epsilon));
    return {scale, whole((T)greatest * scale) - (T)255};
}

INLINE Map map_between(float least, float greatest) {
    Map map = {NOT_FINITE, least, greatest, {0, 0}, {0, 0}};
    if (!is_finite(least) || !is_finite(greatest)) return map;
    const double low = least, high = greatest, span = high - low;
    map.kind = ONE_VALUE;
    if (span <= 0) return map;
    const double far = fabs(low) > fabs(high) ? fabs(low) : fabs(high);
    map.kind = 1e-30 < span && far < 1e38 && far / span < 16384 ? NARROW : WIDE;
    map.narrow = grid_between<float>(span, high);
    map.wide = grid_between<double>(span, high);
    return map;
}

// -- codes

// The sum with ``magic`` is rounded as rint does, and its last eight bits are the level's.
template <class T, class Bits> INLINE u8 level_of(float x, Grid<T> grid, T magic) {
    const T level = (T)x * grid.scale + magic, least = grid.lower + magic;
    return (u8)(same_bits<Bits>(level < least ? least : level) - (Bits)(i64)grid.lower);
}

INLINE u8 code_of(const Map &map, float x) {
    if (map.kind == NARROW) return level_of<float, u32>(x, map.narrow, 12582912.0f);
    if (map.kind == WIDE) return level_of<double, u64>(x, map.wide, 6755399441055744.0);
    return map.kind == ONE_VALUE ? 255 : 0;
}

template <class Real> INLINE void put_value(Real &to, const Map &map, u8 code) {
    if (map.kind == NARROW) put(to, ((float)code + map.narrow.lower) / map.narrow.scale);
    else if (map.kind == WIDE) {
        const double value = ((double)code + map.wide.lower) / map.wide.scale, low = map.least, high = map.greatest;
        put(to, value < low ? low : value > high ? high : value);
    } else put(to, map.least);
}

// The header, and the zeros after the codes.
INLINE void write_frame(u8 *encoded, i64 length, const Map &map) {
    u32 *words = (u32 *)encoded;
    const bool finite = map.kind != NOT_FINITE;
    for (int i = threadIdx.x; i < $header / 4; i += blockDim.x) words[i] = 0;
    for (i64 i = length + threadIdx.x; i < (length + 31) / 32 * 32; i += blockDim.x) encoded[$header + i] = 0;
    __syncthreads();
    if (threadIdx.x == 0) {
        words[0] = finite ? same_bits<u32>(map.least) : 0x7FC00000;
        words[1] = finite ? same_bits<u32>(map.greatest) : 0x7FC00000;
    }
}

template <class Real> struct Encoding {
    u8 *codes;
    const Real *values;
    Map map;

    template <int N> INLINE void at(i64 place) {
        const Pack<Real, N> read = load<Real, N>(values + place);
        Pack<u8, N> coded;
#pragma unroll
        for (int lane = 0; lane < N; ++lane) {
            float single;
            put(single, read.at[lane]);
            coded.at[lane] = code_of(map, single);
        }
        store<u8, N>(codes + place, coded);
    }
};

template <class Real> struct Decoding {
    Real *values;
    const u8 *codes;
    const Real *value_of_code;

    template <int N> INLINE void at(i64 place) {
        const Pack<u8, N> read = load<u8, N>(codes + place);
        Pack<Real, N> decoded;
#pragma unroll
        for (int lane = 0; lane < N; ++lane) decoded.at[lane] = value_of_code[read.at[lane]];
        store<Real, N>(values + place, decoded);
    }
};
#endif
""").substitute(threads=THREADS, epsilon=repr(EPSILON), header=HEADER_BYTES)

_ENDS: Final = Template(r"""
extern "C" __global__ void __launch_bounds__($threads)
$name(Ends *found, const $real *values, i64 length, i64 head, i64 groups) {
    Search<$real> work = {values, NOTHING_FOUND};
    share<$lanes>(work, length, head, groups);
    const Ends ends = ends_of_block(work.own);
    if (threadIdx.x == 0) found[blockIdx.x] = ends;
}
""")

_ENCODE: Final = Template(r"""
extern "C" __global__ void __launch_bounds__($threads)
$name(u8 *encoded, const $real *values, i64 length, i64 head, i64 groups, const Ends *found, i64 count) {
    __shared__ Map shared;
    Ends ends = NOTHING_FOUND;
    for (i64 i = threadIdx.x; i < count; i += blockDim.x) ends = joined(ends, found[i]);
    ends = ends_of_block(ends);
    if (threadIdx.x == 0) shared = map_between(value_of(ends.least), value_of(ends.greatest));
    __syncthreads();
    Encoding<$real> work = {encoded + $header, values, shared};
    if (blockIdx.x == 0) write_frame(encoded, length, work.map);
    share<$lanes>(work, length, head, groups);
}
""")

_DECODE: Final = Template(r"""
extern "C" __global__ void __launch_bounds__($threads)
$name($real *values, const u8 *encoded, i64 length, i64 head, i64 groups) {
    __shared__ Map shared;
    __shared__ $real table[256];  // a division for each code, and not for each value
    const float *ends = (const float *)encoded;
    if (threadIdx.x == 0) shared = map_between(ends[0], ends[1]);
    __syncthreads();
    for (int code = threadIdx.x; code < 256; code += blockDim.x) put_value(table[code], shared, (u8)code);
    __syncthreads();
    Decoding<$real> work = {values, encoded + $header, table};
    share<$lanes>(work, length, head, groups);
}
""")


def _kernel(name: str, dtype: str, text: Template) -> Kernel:
    name = f"{name}_{dtype}"
    body = text.substitute(name=name, real=C_TYPES[dtype], threads=THREADS, lanes=LANES, header=HEADER_BYTES)
    return Kernel(name, PRELUDE + body)


@cache
def ends(dtype: str) -> Kernel:
    """Return ``(found, values, length, head, groups)``: every block writes the ends of its values."""
    return _kernel("ends", dtype, _ENDS)


@cache
def encode(dtype: str) -> Kernel:
    """Return ``(encoded, values, length, head, groups, found, count)``: what is encoded, when the ends are found."""
    return _kernel("encode", dtype, _ENCODE)


@cache
def decode(dtype: str) -> Kernel:
    """Return ``(values, encoded, length, head, groups)``: the values of an encoded buffer."""
    return _kernel("decode", dtype, _DECODE)
