"""What the user of ``mpiagg bench`` can choose, and how sizes and dtypes are written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Final, NamedTuple

import click
import numpy as np

from mpiagg.arrays import HOST
from mpiagg.arrays.where import KINDS

SMALLEST: Final = 64
LARGEST: Final = 64 * 2**20
DTYPES: Final = (
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
BUFFERS: Final = ("any", "registered")
PEERS: Final = ("gloo", "mpi")
"""torch's Gloo on the host; on a device the MPI library's own collective of the device's arrays themselves, which
crashes with libraries that reach such memory in messages alone."""
CUDA: Final = "cuda"
"""The device of each rank by its place on the node."""

PROTOCOLS: Final = ("powers", "mlbench")
MLBENCH_CALLS: Final = 100
"""How many calls mlbench makes at a size, each with new random values and timed alone."""

_UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


class SizeRange(NamedTuple):
    """The lengths to measure, in bytes."""

    smallest: int
    largest: int

    def sizes(self, factor: int) -> Iterator[int]:
        """Yield the lengths, each ``factor`` times the one before."""
        size = self.smallest
        while size <= self.largest:
            yield size
            size *= factor


def parse_size(text: str) -> int:
    """Return a number of bytes, written like 64, 4K, 1M or 2G.

    Raises
    ------
    ValueError
        If it is not written so, or not positive.
    """
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise ValueError(f"{text!r} is not a size; write 64, 4K, 1M or 2G")
    return int(match[1]) * _UNITS[match[2].upper()]


def mlbench_counts() -> list[int]:
    """Return the lengths of mlbench's all-reduce benchmark (its task 0a), in elements."""
    return sorted({int(count) for count in np.logspace(0, 8, num=80)})


def parse_device(text: str) -> str:
    """Return the name of a device: ``cpu``, ``cuda``, or ``cuda:1``; whether it is there, its rank finds out.

    Raises
    ------
    ValueError
        If there are no such devices.
    """
    kind, colon, number = text.partition(":")
    if text != HOST.name and (kind not in KINDS or (colon and not number.isdecimal())):
        raise ValueError(f"{text!r} is no device; write {', '.join((HOST.name, *KINDS))}, or {next(iter(KINDS))}:1")
    return text


def parse_range(text: str) -> SizeRange:
    """Return the range that ``MAX``, ``MIN:`` or ``MIN:MAX`` means.

    Raises
    ------
    ValueError
        If a size is not one, or the range is empty.
    """
    first, colon, last = text.rpartition(":")
    smallest = parse_size(first) if first else SMALLEST
    largest = parse_size(last) if last or not colon else LARGEST
    if not first:
        smallest = min(smallest, largest)
    if smallest > largest:
        raise ValueError(f"{text!r} is an empty range of sizes")
    return SizeRange(smallest, largest)


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype of a name.

    Raises
    ------
    click.UsageError
        For bfloat16 without ml_dtypes, from which NumPy knows it.
    """
    if name != "bfloat16":
        return np.dtype(name)
    try:
        bfloat16: np.dtype[Any] = np.dtype(import_module("ml_dtypes").bfloat16)
    except ImportError:
        raise click.UsageError("bfloat16 needs ml_dtypes: pip install ml_dtypes") from None
    return bfloat16


class BenchFlags(NamedTuple):
    """What the user can choose, beside the number of ranks."""

    collective: str
    algorithm: tuple[str, ...]
    sizes: SizeRange
    factor: int
    iterations: int
    warmup: int
    time_limit: float
    full: bool
    dtype: str
    op: str
    root: int
    lanes: int | None
    planned: bool
    buffer: str = "any"
    wires: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    link_rate: float | None = None
    protocol: str = "powers"
    device: str = HOST.name

    def lengths(self) -> list[int]:
        """Return the lengths of the vector to measure, in bytes; of mlbench's those up to the largest size."""
        if self.protocol == "powers":
            return list(self.sizes.sizes(self.factor))
        itemsize = dtype_of(self.dtype).itemsize
        return [count * itemsize for count in mlbench_counts() if count * itemsize <= self.sizes.largest]
