"""Data of a device by way of the host: how long the pieces of messages are, and vectors that go there as a whole.

Such a vector is copied there, worked on by a program of the host's, and copied back. So it goes with short ones, whose
messages cost less from the host's memory than the device's being waited for in every round, and with the MPI library's
own collectives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from mpiagg.arrays import Accelerator, Array, convert, flat
from mpiagg.plans.endpoints import Asking
from mpiagg.plans.program import Callback, Program

LEAST_PIECE: Final = 2**20
MOST_PIECE: Final = 2**23
PIECE_COST: Final = 2**22
"""Bytes that the bus carries while a piece is asked for and waited for: 4 MiB at 50 GB/s, in 80 us of Python."""

LEAST_COST: Final = 2**12
"""The least that a piece is taken to cost, whatever its times say."""


def piece_bytes(chunk: int, cost: int | None = None) -> int:
    """Return how many bytes of a chunk of so many should cross together.

    While one piece travels, the next is copied; so p pieces take the time of p + 1 copies of a pth, and p times what a
    piece costs by itself. That is least where p is the square root of ``chunk / cost``. There are two at least where
    there is enough for them.

    Parameters
    ----------
    chunk : int
    cost : int, optional
        What a piece costs by itself, in bytes that the bus carries meanwhile.
    """
    count = max(2, round(math.sqrt(chunk / (cost or PIECE_COST))))
    return max(LEAST_PIECE, min(MOST_PIECE, -(-chunk // count)))


def piece_cost(chunk: int, times: Mapping[int, float]) -> int:
    """Return what a piece costs by itself, in bytes that the bus carries meanwhile.

    In p pieces a chunk takes ``a (1 + 1 / p) + b p``: all of it crosses, and while the first piece does, nothing else
    is done; each of them costs b. What is looked for is ``chunk * b / a``.

    Parameters
    ----------
    chunk : int
        Bytes.
    times : mapping of int to float
        The seconds that it takes, by the number of pieces; of two numbers at least.
    """
    pieces = np.array(list(times), float)
    model, measured = np.stack([1 + 1 / pieces, pieces], 1), np.array(list(times.values()))
    (whole, each), *_ = np.linalg.lstsq(model, measured, rcond=None)
    return round(min(max(chunk * each / whole, LEAST_COST), chunk)) if whole > 0 else chunk


def by_way_of_host(
    device: Accelerator, load: Callback | None, program: Program, store: Callback | None, label: str
) -> Program:
    """Return the program that asks for copies to the host, runs a program there, and asks for copies back.

    Parameters
    ----------
    device : Accelerator
        Which copies.
    load, store : callable or None
        Ask for the copies, if there are any.
    program : Program
        What works on the host's memory in between.
    label : str
        What it is, for messages to people.
    """
    asking = Asking(device, label)
    follow = asking.stream.follow
    first, last = ((asking.done(follow, asking.ask(call)),) if call else () for call in (load, store))
    return replace(program, rounds=(*first, *program.rounds, *last), device=device)


def to_host(device: Accelerator, twin: Array, x: Array) -> None:
    """Ask for a copy of an array of the device's, of any layout and dtype, to pinned memory of the same length."""
    vector = flat(x) if x.dtype == twin.dtype else None
    if vector is None:
        vector = device.empty(x.size, twin.dtype)
        convert(vector.reshape(x.shape), x)
    device.copy(twin.view(np.uint8), vector.view(np.uint8))


def from_host(device: Accelerator, out: Array, twin: Array) -> None:
    """Ask for a copy of pinned memory to an array of the device's, of any layout and dtype."""
    vector = flat(out) if out.dtype == twin.dtype else None
    received = device.empty(out.size, twin.dtype) if vector is None else vector
    device.copy(received.view(np.uint8), twin.view(np.uint8))
    if vector is None:
        convert(out, received.reshape(out.shape))
