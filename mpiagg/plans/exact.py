"""Sums whose bits do not depend on the order: two all-reductions for each piece of a vector."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
from mpi4py import MPI

from mpiagg.arrays import HOST, Array, ExactSum, Reduction, accelerator_of, device_of, reduction
from mpiagg.plans.choices import Memory
from mpiagg.plans.operation import Operation
from mpiagg.plans.program import Interleaved, Program, in_turn
from mpiagg.transport import SHARED_TAG, Channel

PIECE: Final = 2**20
"""Bytes of a vector that are worked on at a time on one node, so that their words stay in the cache."""

PIECE_OF_NODES: Final = 2**24
"""The same where there are several nodes, and rounds take time: so that long vectors need no more memory."""


def bind_exact(  # noqa: PLR0917 - what bind_operation is given
    channel: Channel,
    operation: Operation,
    buffer: Array,
    tag: int,
    memory: Memory,
    bind_operation: Callable[..., Program],
) -> Program:
    """Return the program of a sum with wire ``"exact"``, in place on a buffer.

    For each piece, the ranks take the maximum of their exponents and add their words: two operations as any other, for
    which there is ``bind_operation``. See :mod:`mpiagg.arrays.exact`.
    """
    o, host = operation, channel.memory.host
    length = (PIECE if len(o.layout.nodes) == 1 else PIECE_OF_NODES) // buffer.itemsize
    pieces = [buffer[start : start + length] for start in range(0, buffer.size, length)]
    belongs: list[Program] = []

    def reduced(vector: Array, how: Reduction, op: MPI.Op) -> Program:
        plain = o.choice._replace(wire=None)
        part = replace(o, counts=(vector.size,), reduction=how, choice=plain, op=op, form=None)
        program = bind_operation(channel, part, vector, tag, memory=memory)
        belongs.append(Program((), program.releases, program.nbytes))
        return replace(program, releases=(), nbytes=0)

    def room(piece: Array) -> ExactSum:
        words = None
        if memory is Memory.TOGETHER and tag != SHARED_TAG and device_of(piece) is HOST and channel.node.size > 1:
            nbytes = 8 * ExactSum.words_of(piece)
            with suppress(MemoryError):
                block = host.take(nbytes, busy=channel.busy)
                words = block.parts[channel.node.place][:nbytes].view(np.float64)
                belongs.append(Program((), (partial(host.give_back, block),), 0))
        belongs.append(Program((), (), (found := ExactSum(piece, o.size, words)).nbytes))
        return found

    def made(exact: ExactSum) -> tuple[ExactSum, Program, Program]:
        largest, total = reduction("max", exact.exponents.dtype, 1), reduction("sum", exact.words.dtype, 1)
        return exact, reduced(exact.exponents, largest, MPI.MAX), reduced(exact.words, total, MPI.SUM)

    # All are of one length, but for the last one.
    exact = room(buffer[:length])
    by_length = {length: made(exact.of(piece)) for length, piece in {piece.size: piece for piece in pieces}.items()}
    parts: list[Program | Callable[[], object]] = []
    for piece in pieces:
        part, exponents, words = by_length[piece.size]
        parts += [partial(part.find_exponents, piece), exponents, partial(part.split, piece), words]
        parts.append(partial(part.total, piece, o.reduction.divisor))
    program = in_turn(*parts, *belongs)
    return replace(program, rounds=(Interleaved([program.rounds]).as_round(),), device=accelerator_of(buffer))
