"""Conversions of half precision by torch or ml_dtypes, where the program has imported them: they take less time.

They give the bits of :mod:`mpiagg.arrays.conversions`, but for NaN and for NumPy's warnings. So vectors with NaN or
infinity among their halves are left to it, and it makes no difference on which ranks these libraries are imported.
``bench/codecs.py`` measures all of them.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import numpy as np

from mpiagg.arrays.reductions import Array

SHORT: Final = 2**12
"""Vectors shorter than this are left to NumPy: torch takes some microseconds to see them as its own."""

PIECE: Final = 2**14
"""How many values torch converts in one thread, whatever number it may use."""

_EXPONENTS: Final = {"float16": 0x7C00, "bfloat16": 0x7F80}
"""The least bits, without the sign, that stand for infinity or NaN."""


def converted(source: Array, target: Array, half: str) -> bool:
    """Convert between a vector of float32 and one of half precision, and return whether that was done.

    Parameters
    ----------
    source, target : numpy.ndarray
        Contiguous; the halves of any dtype of 16 bits.
    half : {"float16", "bfloat16"}
        What the 16 bits stand for.
    """
    if len(source) < SHORT or source.itemsize + target.itemsize != 6 or not source.flags.writeable:
        return False
    widens = source.itemsize == 2
    if widens and half == "float16" and _has_special(source, half):
        return False
    # To widen bfloat16 is to copy bits, for which torch is no faster, and takes longer to begin.
    ways = (_by_ml_dtypes, _by_torch) if widens else (_by_torch, _by_ml_dtypes)
    if not any(way(source, target, half) for way in ways):
        return False
    return widens or not _has_special(target, half)


def _by_torch(source: Array, target: Array, half: str) -> bool:
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_num_threads"):  # which comes late, while torch is being imported
        return False
    into, values = (
        torch.from_numpy(each)
        if each.itemsize == 4
        else torch.from_numpy(each.view(np.int16)).view(getattr(torch, half))
        for each in (target, source)
    )
    if torch.get_num_threads() == 1 or len(source) <= PIECE:
        into.copy_(values)
    else:  # threads of torch's would take the cores of other ranks
        for part, piece in zip(into.split(PIECE), values.split(PIECE), strict=True):
            part.copy_(piece)
    return True


def _by_ml_dtypes(source: Array, target: Array, half: str) -> bool:
    ml_dtypes: Any = sys.modules.get("ml_dtypes")
    if half != "bfloat16" or not hasattr(ml_dtypes, "bfloat16"):
        return False
    into, values = (each if each.itemsize == 4 else each.view(ml_dtypes.bfloat16) for each in (target, source))
    with np.errstate(invalid="ignore"):  # which a signaling NaN is
        np.copyto(into, values, casting="unsafe")
    return True


def _has_special(halves: Array, half: str) -> bool:
    """Whether there is an infinity or a NaN among halves."""
    least = _EXPONENTS[half]
    positive = np.maximum.reduce(halves.view(np.int16)) >= least
    return bool(positive or np.maximum.reduce(halves.view(np.uint16)) >= least + 0x8000)
