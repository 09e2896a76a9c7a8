"""CUDA C++ that counts digits, by which the k-th largest of many magnitudes is found without sorting them.

The bits of floating-point numbers that are not negative are in the numbers' order. So the largest digit (some of the
first bits) is found of which, with all above it, there are k; then the next digit of those that begin so; and so on: a
radix select, of as many passes over the vector as there are digits. See D. E. Knuth, The Art of Computer Programming,
volume 3, section 5.2.5, for sorting by digits.
"""

from __future__ import annotations

from functools import cache
from string import Template
from typing import Final

from mpiagg.cuda.kernels import THREADS, Kernel

BITS: Final = 11
"""Of a digit: its counts lie in the memory of a block, and three digits are a float32."""

LANES: Final = 4
"""How many words a thread looks at together."""

_DIGITS: Final = Template(r"""
#ifndef DIGITS
#define DIGITS
template <class Word> struct Digits {
    u32 *counts;
    const Word *words;
    u64 prefix;
    i64 shift, width;

    template <int N> INLINE void at(i64 place) {
        const Pack<Word, N> read = load<Word, N>(words + place);
#pragma unroll
        for (int lane = 0; lane < N; ++lane) {
            const u64 word = (u64)read.at[lane] >> shift;
            if (word >> width == prefix) atomicAdd(counts + (word & ((1 << width) - 1)), 1u);
        }
    }
};
#endif

extern "C" __global__ void __launch_bounds__($threads)
$name(u32 *counts, const $word *words, i64 length, i64 head, i64 groups, u64 prefix, i64 shift, i64 width) {
    __shared__ u32 own[$count];
    for (int i = threadIdx.x; i < $count; i += blockDim.x) own[i] = 0;
    __syncthreads();
    Digits<$word> work = {own, words, prefix, shift, width};
    share<$lanes>(work, length, head, groups);
    __syncthreads();
    for (int i = threadIdx.x; i < $count; i += blockDim.x) {
        if (own[i]) atomicAdd(counts + i, own[i]);
    }
}
""")


@cache
def digits(itemsize: int) -> Kernel:
    """Return ``(counts, words, length, head, groups, prefix, shift, width)``.

    Of the words that are ``prefix`` without their last ``shift + width`` bits, it counts those whose next ``width``
    bits are each digit, and adds that to ``counts``.
    """
    word = f"u{8 * itemsize}"
    name = f"digits_{word}"
    body = _DIGITS.substitute(name=name, word=word, threads=THREADS, count=2**BITS, lanes=LANES)
    return Kernel(name, body)
