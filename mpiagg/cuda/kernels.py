"""CUDA C++ for what NumPy's functions on a device's arrays do not offer: folds of many vectors, half precision, codecs.

The texts need no header and no library, so they compile as plain C++, too, and are tested on the host's processor. They
round as NumPy and the host's codecs do, bit for bit; for that they must be compiled with ``OPTIONS``.

A thread takes several neighbouring values at once where they can be read and written 16 bytes at a time. Of a vector's
``length`` values, ``groups`` times as many are taken so, from the one at ``head`` on; the others one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from string import Template
from typing import Final, NamedTuple

OPTIONS: Final = ("--fmad=false", "-std=c++17")
"""A product and a sum are rounded one after the other, as on the host."""

THREADS: Final = 256
"""At most so many threads are in a block; a power of two."""

LANES: Final = 8
"""How many values a thread converts at once."""

MOST_VECTORS: Final = 64
"""A kernel is given at most so many vectors one by one; if there are more, a table of them."""


class Kernel(NamedTuple):
    """A function's name, and the text that it is defined by, after ``PRELUDE``."""

    name: str
    body: str

    @property
    def source(self) -> str:
        """The whole text."""
        return PRELUDE + self.body


class Share(NamedTuple):
    """How threads share out vectors."""

    length: int
    head: int
    groups: int
    threads: int
    """How many can have something to do."""


def share(length: int, lanes: int, places: Sequence[tuple[int, int]]) -> Share:
    """Return how threads take ``lanes`` neighbours of every vector at once.

    Parameters
    ----------
    places : sequence of (int, int)
        For every vector, its address and how many bytes a value has.
    """
    for head in range(min(lanes, length + 1)):
        if all((address + head * itemsize) % min(16, lanes * itemsize) == 0 for address, itemsize in places):
            groups = (length - head) // lanes
            return Share(length, head, groups, max(groups, length - groups * lanes))
    return Share(length, 0, 0, length)


C_TYPES: Final = {
    "bool": "u8",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "uint64": "u64",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "float32": "float",
    "float64": "double",
    "complex64": "Complex<float>",
    "complex128": "Complex<double>",
}
"""How the texts call values of a dtype."""

PRELUDE: Final = r"""
#define INLINE __device__ __forceinline__

typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

struct Half { u16 bits; };
struct BFloat16 { u16 bits; };

template <class T> struct Complex { T real, imag; };

template <class T> INLINE Complex<T> operator+(Complex<T> left, Complex<T> right) {
    return {left.real + right.real, left.imag + right.imag};
}

template <class T> INLINE Complex<T> operator*(Complex<T> left, Complex<T> right) {
    return {left.real * right.real - left.imag * right.imag, left.real * right.imag + left.imag * right.real};
}

// Values that lie one after the other, and are read and written 16 bytes at a time.
template <class T, int N> struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Pack { T at[N]; };
template <class T> struct Pack<T, 1> { T at[1]; };

template <class T, int N> INLINE Pack<T, N> load(const T *place) { return *(const Pack<T, N> *)place; }
template <class T, int N> INLINE void store(T *place, Pack<T, N> values) { *(Pack<T, N> *)place = values; }

// All threads share out a vector: work.at<N>(place) does N values from a place on.
template <int LANES, class Work> INLINE void share(Work &work, i64 length, i64 head, i64 groups) {
    const i64 first = (i64)blockIdx.x * blockDim.x + threadIdx.x, step = (i64)gridDim.x * blockDim.x;
    for (i64 i = first; i < groups; i += step) work.template at<LANES>(head + i * LANES);
    for (i64 i = first; i < length - groups * LANES; i += step) work.template at<1>(i < head ? i : i + groups * LANES);
}

// -- conversions, by the rounding of sums and by whole numbers alone

template <class To, class From> INLINE To same_bits(From x) {
    union { From from; To to; } both;
    both.from = x;
    return both.to;
}

template <class To, class From> INLINE void put(To &to, From from) { to = (To)from; }

// A NaN keeps its sign and what there is room for of its payload, and is quiet, as by x86 and Arm.
INLINE void put(float &to, double from) {
    const u64 bits = same_bits<u64>(from);
    to = (float)from;
    if (bits << 1 > 0xFFE0000000000000) {
        to = same_bits<float>((u32)(bits >> 32) & 0x80000000 | 0x7FC00000 | (u32)(bits >> 29) & 0x7FFFFF);
    }
}

INLINE void put(double &to, float from) {
    const u64 bits = same_bits<u32>(from);
    to = (double)from;
    if ((bits & 0x7FFFFFFF) > 0x7F800000) {
        to = same_bits<double>((bits & 0x80000000) << 32 | 0x7FF8000000000000 | (bits & 0x7FFFFF) << 29);
    }
}

// With its bits in a float's places, a half is too small by 2^112, be it subnormal or not.
INLINE void put(float &to, Half from) {
    const u32 moved = (u32)(from.bits & 0x7FFF) << 13;
    u32 bits = same_bits<u32>(same_bits<float>(moved) * 0x1p112f);
    if (moved >= 0x0F800000) bits = moved | 0x7F800000;
    to = same_bits<float>((u32)(from.bits & 0x8000) << 16 | bits);
}

INLINE void put(double &to, Half from) {
    float single;
    put(single, from);
    put(to, single);
}

// To nearest and even, by adding to the bits half of what is cut off, less one where that makes a tie even; values
// below 2^-14 by adding a number whose last bit is that of the subnormal halves.
template <class Bits, int DIGITS, int BIAS, class Real> INLINE u16 half_of(Real from) {
    const Bits bits = same_bits<Bits>(from), magnitude = bits & (Bits)-1 >> 1, cut = DIGITS - 10;
    const Bits unit = (Bits)(BIAS + DIGITS - 24) << DIGITS;
    Bits half = magnitude - ((Bits)(BIAS - 15) << DIGITS);
    half = (half + (((Bits)1 << (cut - 1)) - 1) + (half >> cut & 1)) >> cut;
    if (magnitude < (Bits)(BIAS - 14) << DIGITS) {
        half = same_bits<Bits>(same_bits<Real>(magnitude) + same_bits<Real>(unit)) - unit;
    }
    if (magnitude >= (Bits)(BIAS + 16) << DIGITS) half = 0x7C00;
    if (magnitude > (Bits)(2 * BIAS + 1) << DIGITS) {
        const Bits payload = magnitude >> cut & 0x3FF;
        half = 0x7C00 | (payload ? payload : 1);
    }
    return (u16)(bits >> (8 * sizeof(Bits) - 16) & 0x8000 | half);
}

INLINE void put(Half &to, float from) { to.bits = half_of<u32, 23, 127>(from); }
INLINE void put(Half &to, double from) { to.bits = half_of<u64, 52, 1023>(from); }

INLINE void put(float &to, BFloat16 from) { to = same_bits<float>((u32)from.bits << 16); }

INLINE void put(double &to, BFloat16 from) {
    float single;
    put(single, from);
    put(to, single);
}

INLINE void put(BFloat16 &to, float from) {
    const u32 bits = same_bits<u32>(from);
    const bool nan = (bits & 0x7FFFFFFF) > 0x7F800000;
    to.bits = (u16)(nan ? bits >> 16 | 0x40 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

INLINE void put(BFloat16 &to, double from) {
    float single;
    put(single, from);
    put(to, single);
}

template <class To, class From> struct Conversion {
    To *target;
    const From *source;

    template <int N> INLINE void at(i64 place) {
        const Pack<From, N> read = load<From, N>(source + place);
        Pack<To, N> converted;
#pragma unroll
        for (int lane = 0; lane < N; ++lane) put(converted.at[lane], read.at[lane]);
        store<To, N>(target + place, converted);
    }
};
"""

_CONVERT: Final = Template(r"""
extern "C" __global__ void __launch_bounds__($threads)
$name($target *target, const $source *source, i64 length, i64 head, i64 groups) {
    Conversion<$target, $source> work = {target, source};
    share<$lanes>(work, length, head, groups);
}
""")


@cache
def conversion(source: str, target: str) -> Kernel:
    """Return ``(target, source, length, head, groups)``: values of one dtype are written in another."""
    name = f"convert_{source}_to_{target}"
    types = {"source": C_TYPES[source], "target": C_TYPES[target]}
    return Kernel(name, _CONVERT.substitute(types, name=name, threads=THREADS, lanes=LANES))


# -- folds

_FOLD_PRELUDE: Final = r"""
#ifndef FOLD
#define FOLD
template <class T> INLINE T divided(T x, double divisor) { return x / (T)divisor; }

// By the reciprocal, and with the product by a zero imaginary part, as NumPy does.
template <class T> INLINE Complex<T> divided(Complex<T> x, double divisor) {
    const T ratio = (T)0 / (T)divisor, scale = (T)1 / (T)divisor;
    return {(x.real + x.imag * ratio) * scale, (x.imag - x.real * ratio) * scale};
}

// COUNT is the number of vectors; where that is 0, ``counted`` is.
template <class How, int COUNT> struct Fold {
    typedef typename How::Stored Stored;
    typedef typename How::Working Working;

    Stored *const *vectors;
    i64 counted;
    double divisor;

    template <int N> INLINE void at(i64 place) {
        const int count = COUNT ? COUNT : (int)counted;
        Pack<Stored, N> read = load<Stored, N>(vectors[0] + place);
        Working total[N];
#pragma unroll
        for (int lane = 0; lane < N; ++lane) put(total[lane], read.at[lane]);
#pragma unroll
        for (int vector = 1; vector < count; ++vector) {
            read = load<Stored, N>(vectors[vector] + place);
#pragma unroll
            for (int lane = 0; lane < N; ++lane) {
                Working next;
                put(next, read.at[lane]);
                total[lane] = How::combine(total[lane], next);
            }
        }
#pragma unroll
        for (int lane = 0; lane < N; ++lane) put(read.at[lane], How::finish(total[lane], divisor));
#pragma unroll
        for (int vector = 0; vector < count; ++vector) store<Stored, N>(vectors[vector] + place, read);
    }
};
#endif
"""

_FOLD: Final = Template(r"""
struct How_$name {
    typedef $stored Stored;
    typedef $working Working;
    static INLINE Working combine(Working left, Working right) { return $combined; }
    static INLINE Working finish(Working x, double divisor) { return $finished; }
};

extern "C" __global__ void __launch_bounds__($threads)
$name($parameters, i64 length, i64 head, i64 groups, double divisor) {
    $vectors
    Fold<How_$name, $count> work = {vectors, $counted, divisor};
    share<$lanes>(work, length, head, groups);
}
""")

_BITWISE: Final = {"band": "left & right", "bor": "left | right", "bxor": "left ^ right"}
_LOGICAL: Final = {"land": "left && right", "lor": "left || right", "lxor": "!left != !right"}
_COMBINED: Final = {"sum": "left + right", "avg": "left + right", "prod": "left * right", **_BITWISE, **_LOGICAL}
_CHOSEN: Final = {"min": "left < right", "max": "left > right"}


def lanes_of_fold(itemsize: int) -> int:
    """Return how many values a thread combines at once."""
    return max(2, 16 // itemsize)


@cache
def fold(dtype: str, itemsize: int, op: str, count: int, *, divided: bool) -> Kernel:
    """Return ``(vectors..., length, head, groups, divisor)``: vectors are combined in order; all become the result.

    Above ``MOST_VECTORS``, ``vectors...`` are a table of their places and their number, and ``count`` does not matter.

    Raises
    ------
    TypeError
        If CUDA has no such dtype.
    """
    if dtype not in C_TYPES:
        raise TypeError(f"arrays of dtype {dtype} cannot be combined on a CUDA device")
    stored, several = C_TYPES[dtype], count <= MOST_VECTORS
    working, combined = _work(dtype, stored, op)
    name = f"fold_{dtype}_{op}_{count if several else 'table'}{'_divided' * divided}"
    places = [f"x{number}" for number in range(count)] if several else []
    body = _FOLD.substitute(
        name=name,
        stored=stored,
        working=working,
        combined=f"(Working)({combined})",
        finished="divided(x, divisor)" if divided else "x",
        parameters=", ".join(f"{stored} *{place}" for place in places) or f"{stored} *const *vectors, i64 count",
        vectors=f"{stored} *const vectors[] = {{{', '.join(places)}}};" if several else "",
        count=count if several else 0,
        counted=count if several else "count",
        threads=THREADS,
        lanes=lanes_of_fold(itemsize),
    )
    return Kernel(name, _FOLD_PRELUDE + body)


def _work(dtype: str, stored: str, op: str) -> tuple[str, str]:
    """Return in which type values are combined, and how."""
    if dtype in ("float16", "bfloat16"):
        stored = "float"
    if op in _CHOSEN and dtype == "bool":
        return "u32", _LOGICAL["land" if op == "min" else "lor"]
    if op in _CHOSEN:
        nan = " || left != left" if stored in ("float", "double") else ""
        return stored, f"{_CHOSEN[op]}{nan} ? left : right"
    if "int" in dtype or dtype == "bool":  # without a sign, since a sum that overflows must wrap around
        stored = "u64" if "64" in dtype else "u32"
    return stored, _COMBINED[op]
