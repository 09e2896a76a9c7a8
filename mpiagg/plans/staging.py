"""Data of a device by way of the host: how long the pieces of messages are, and vectors that go there as a whole.

Such a vector is copied there, worked on by a program of the host's, and copied back. So it goes with short ones, whose
messages cost less from the host's memory than the device's being waited for in every round, and with the MPI library's
own collectives.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from mpiagg.arrays import Accelerator, Array, convert, flat
from mpiagg.plans.endpoints import ask
from mpiagg.plans.program import BoundRound, Call, Computing, Program, in_turn

LEAST_PIECE: Final = 2**20
MOST_PIECE: Final = 2**23
WORTH: Final = 2**22
"""Bytes that the bus carries while a piece is asked for and waited for: 4 MiB at 50 GB/s, in 80 us of Python."""


def piece_bytes(chunk: int) -> int:
    """Return how many bytes of a chunk of so many should cross together.

    While one piece travels, the next is copied; so p pieces take the time of p + 1 copies of a pth, and p times what a
    piece costs by itself. That is least where p is the square root of ``chunk / WORTH``. There are two at least where
    there is enough for them.
    """
    count = max(2, round(math.sqrt(chunk / WORTH)))
    return max(LEAST_PIECE, min(MOST_PIECE, -(-chunk // count)))


def by_way_of_host(device: Accelerator, load: Call | None, program: Program, store: Call | None, label: str) -> Program:
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
    stream, computing = device.stream(), Computing(label)

    def asked(call: Call | None) -> Program:
        if call is None:
            return Program((), (), 0)
        starts = (stream.follow, partial(ask, stream, (call,)))
        return Program((BoundRound(starts, (stream.done,), (), (computing,)),), (), 0)

    return replace(in_turn(asked(load), program, asked(store)), device=device)


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
