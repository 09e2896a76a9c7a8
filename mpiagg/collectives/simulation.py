"""All ranks of an all-reduce in one process, without MPI: for tests, for teaching, and to see what the bits will be."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mpiagg.arrays import (
    EXACT,
    Array,
    Codec,
    ExactSum,
    Reduction,
    as_input,
    check_wire_dtype,
    check_wire_op,
    codec_of,
    convert,
    even_ranges,
    reduction,
    scratch,
    to_host,
)
from mpiagg.plans.choices import Case, Choice, pick
from mpiagg.schedules import Action, Collective, Layout, Message, Step, schedules, walk
from mpiagg.schedules import algorithm as find_algorithm


def simulate(
    vectors: Sequence[npt.ArrayLike],
    op: str = "sum",
    algorithm: str = "auto",
    *,
    lanes: int | None = None,
    wire: str | None = None,
    nodes: Sequence[int] | None = None,
) -> list[Array]:
    """All-reduce a list of arrays, one for each rank, exactly as the ranks of an MPI job would.

    Parameters
    ----------
    vectors : sequence of array_like
        Every rank's array, all of one shape and dtype.
    op : {"sum", "avg", "min", "max", "prod"}
        How values are combined.
    algorithm : str
        A name from :func:`mpiagg.algorithms`, or like ``"knomial-8"``; ``"auto"`` is what is taken for vectors in
        registered memory.
    lanes, wire
        As for :func:`mpiagg.allreduce`.
    nodes : sequence of int, optional
        How many ranks each node has, one node after the other; all are on one node without it.

    Returns
    -------
    list of numpy.ndarray
        Every rank's result, with the bits that :func:`mpiagg.allreduce` gives it.

    Raises
    ------
    ValueError
        For an unknown op or algorithm, no lanes, no vectors, vectors of different shapes or dtypes, or nodes with
        another number of ranks.
    TypeError
        For a dtype that the op is not for.

    Examples
    --------
    >>> mpiagg.simulate([[1.0, 2.0], [3.0, 4.0]], op="avg", algorithm="ring")  # of two ranks
    [array([2., 3.]), array([2., 3.])]
    """
    inputs = [to_host(as_input(vector)) for vector in vectors]
    if not inputs:
        raise ValueError("simulate needs the vector of at least one rank")
    first = inputs[0]
    for rank, x in enumerate(inputs):
        if (x.shape, x.dtype) != (first.shape, first.dtype):
            raise ValueError(f"rank {rank} has {x.dtype} {x.shape}, rank 0 has {first.dtype} {first.shape}")
    layout = Layout.of([len(inputs)] if nodes is None else nodes)
    if layout.size != len(inputs):
        raise ValueError(f"there are {len(inputs)} vectors, and {layout.size} ranks on the nodes")
    how = reduction(op, first.dtype, len(inputs))
    nbytes = first.size * how.dtype.itemsize
    choice = pick(algorithm, lanes, Case(Collective.ALLREDUCE, nbytes, layout), wire)
    check_wire_op(wire, op)
    check_wire_dtype(wire, first.dtype)
    buffers = [scratch(x.size, how.dtype) for x in inputs]
    for buffer, x in zip(buffers, inputs, strict=True):
        convert(buffer.reshape(x.shape), x)
    (_run_exactly if choice.wire == EXACT else _run)(buffers, layout, choice, how)
    return [buffer.astype(first.dtype).reshape(first.shape) for buffer in buffers]


def _run_exactly(buffers: Sequence[Array], layout: Layout, choice: Choice, how: Reduction) -> None:
    """Run what the ranks do for a sum whose bits do not depend on the order, in place."""
    sums, choice = [ExactSum(buffer, layout.size) for buffer in buffers], choice._replace(wire=None)
    for each, buffer in zip(sums, buffers, strict=True):
        each.find_exponents(buffer)
    _run([each.exponents for each in sums], layout, choice, reduction("max", sums[0].exponents.dtype, 1))
    for each, buffer in zip(sums, buffers, strict=True):
        each.split(buffer)
    _run([each.words for each in sums], layout, choice, reduction("sum", sums[0].words.dtype, 1))
    for each, buffer in zip(sums, buffers, strict=True):
        each.total(buffer, how.divisor)


def _run(buffers: Sequence[Array], layout: Layout, choice: Choice, how: Reduction) -> None:
    """Run the ranks' schedules on their buffers, in place."""
    for start, stop in even_ranges(0, buffers[0].size, choice.lanes):
        _run_lane([buffer[start:stop] for buffer in buffers], layout, choice, how)


def _run_lane(buffers: Sequence[Array], layout: Layout, choice: Choice, how: Reduction) -> None:
    """Run the ranks' schedules on one lane of their buffers."""
    lane = even_ranges(0, buffers[0].size, find_algorithm(choice.algorithm).chunks(Collective.ALLREDUCE, layout))
    coded = codec_of(choice.wire)
    encoded_buffers = None if coded is None else _EncodedBuffers(coded)
    arrived: dict[tuple[int, int], deque[Array]] = {}

    def part(rank: int, step: Step) -> Array:
        return buffers[rank][lane[step.chunk][0] : lane[step.chunk + step.count - 1][1]]

    for event in walk(schedules(choice.algorithm, Collective.ALLREDUCE, layout)):
        if isinstance(event, Message):
            if encoded_buffers is not None:
                for step in event.sent:
                    encoded_buffers.replace(event.source, step, part(event.source, step))
            arrived[event.target, event.source] = deque(part(event.source, step).copy() for step in event.sent)
        else:
            aside: dict[int, Array] = {}
            for step in event.steps:
                received = arrived[event.rank, step.peer].popleft() if step.action.receives else None
                if received is not None and step.chunk in aside:
                    how.combine(aside.pop(step.chunk), received, received)
                if received is not None and step.action is Action.HOLD:
                    aside[step.chunk] = received
                    continue
                _apply(step, part(event.rank, step), received, how)
                if encoded_buffers is not None:
                    encoded_buffers.follow(event.rank, step, part(event.rank, step))


def _apply(step: Step, own: Array, received: Array | None, how: Reduction) -> None:
    if step.action is Action.FINISH:
        how.finish(own)
    elif received is not None and step.action is Action.RECEIVE:
        np.copyto(own, received)
    elif received is not None:
        pair = (received, own) if step.received_first else (own, received)
        how.combine(*pair, own)


class _EncodedBuffers:
    """Puts what an encoded buffer would be decoded to in the place of values, where the ranks do so."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._encoded_buffers: set[tuple[int, int]] = set()
        """The chunks of ranks that hold what an encoded buffer was decoded to."""

    def replace(self, rank: int, step: Step, own: Array) -> None:
        """Round the values of some chunks, unless they have been."""
        chunks = {(rank, chunk) for chunk in range(step.chunk, step.chunk + step.count)}
        if not chunks <= self._encoded_buffers:
            encoded = scratch(self._codec.nbytes(own.size), np.uint8)
            self._codec.encode(own, encoded)
            self._codec.decode(encoded, own)
            self._encoded_buffers |= chunks

    def follow(self, rank: int, step: Step, own: Array) -> None:
        """Take note of what a step has made of some chunks."""
        chunks = {(rank, chunk) for chunk in range(step.chunk, step.chunk + step.count)}
        if step.action is Action.RECEIVE:
            self._encoded_buffers |= chunks
        elif step.action is not Action.SEND:
            self._encoded_buffers -= chunks
            if step.action is Action.FINISH:
                self.replace(rank, step, own)
