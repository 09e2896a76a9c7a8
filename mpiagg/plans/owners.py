"""What the owners of chunks do with vectors that all ranks of a node reach, or read where they lie.

A rank reduces its chunk of everybody's vector and writes the result into everybody's vector, block by block, so that a
block is still in the cache when it is written. Where vectors can only be read, it writes into its own, and the others
read the result there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final

import numpy as np

from mpiagg.arrays import Array, Reduction, cuts_of, device_of, ranges
from mpiagg.plans.binding import Lane
from mpiagg.plans.program import BoundRound, Callback
from mpiagg.plans.sharing import (
    BlockScratch,
    InTurn,
    Operands,
    Vectors,
    barrier_round,
    calls_of,
    copy_of,
    run_of,
    scratch_of,
)
from mpiagg.schedules import Action, Round, Step
from mpiagg.transport import NodeBarrier, OtherMemory

READ_SEGMENT: Final = 256 * 2**10
"""Bytes that are read from another process at a time, where they are reduced: in the cache as they come."""


def owner_work(  # noqa: PLR0917 - what there is to be said of them
    rounds: Sequence[Round],
    owned: range,
    lanes: Sequence[Lane],
    reduction: Reduction,
    vectors: Vectors,
    segment: int,
) -> Callback:
    """Return the call that does an owner's part of some rounds, on vectors that all lie in reach.

    Between a barrier before and a barrier after it nobody else touches the chunks that a rank owns, in any vector:
    whoever sends or receives them in these rounds leaves it to their owner. So there is nothing to wait for in between.

    Parameters
    ----------
    rounds : sequence of Round
        What this rank does; in each message one end owns the chunks.
    owned : range
        The chunks that this rank owns.
    lanes : sequence of Lane
        Where the chunks lie in a vector, in each part of it on which a schedule runs by itself.
    reduction : Reduction
        How values are combined.
    vectors : Vectors
        Where the vectors lie.
    segment : int
        Bytes of a block.
    """
    steps = [step for a_round in rounds for step in a_round if step.chunk in owned]
    if any((step.chunk, step.count) != (owned.start, len(owned)) for step in steps):
        raise AssertionError("an owner's chunks go together")
    own = vectors.source or vectors.target
    assert own is not None
    read = any(isinstance(source.elements, OtherMemory) for source in vectors.sources.values())
    length = max(1, (min(segment, READ_SEGMENT) if read else segment) // reduction.dtype.itemsize)
    scratch = scratch_of(steps, lanes, length, own.elements, read=read)
    calls: list[Callback] = []
    for lane in lanes:
        start, stop = lane[owned.start][0], lane[owned.stop - 1][1]
        for first in range(start, stop, length):
            calls += _block_work(steps, reduction, vectors, (first, min(first + length, stop)), scratch)
    return InTurn(calls, vectors)


def rounds_by_reading(  # noqa: PLR0917 - what there is to be said of them
    rounds: Sequence[Round],
    owned: range,
    lanes: Sequence[Lane],
    reduction: Reduction,
    vectors: Vectors,
    barrier: NodeBarrier,
    label: str,
) -> tuple[BoundRound, ...]:
    """Return the rounds of owners where nobody writes into another's vector.

    In the first, as in :func:`owner_work`, a rank makes its own chunks. In the second it reads those of the others
    where they have made them; and nobody goes on until all have read.
    """
    received = [Round(*(step for step in a_round if step.action is not Action.SEND)) for a_round in rounds]
    others: list[Callback] = []
    if vectors.target is not None:
        # Each begins with another rank's: to read a process's memory, Linux locks what says where its pages are.
        apart = sorted(
            (step for step in chain(*received) if step.chunk not in owned),
            key=lambda step: (step.chunk < owned.start, step.chunk),
        )
        for step in apart:
            made = vectors.targets.get(step.peer) or vectors.sources[step.peer]
            for start, stop in (run_of(lane, step) for lane in lanes):
                if start < stop:
                    others.append(copy_of(np.copyto, vectors.target.block(start, stop), made.block(start, stop)))
    own, read = owner_work(received, owned, lanes, reduction, vectors, READ_SEGMENT), InTurn(others)
    return tuple(barrier_round(barrier, label, number, call) for number, call in enumerate((own, read, None)))


def exchange_work(vectors: Vectors, counts: Sequence[int], rank: int) -> Callback:
    """Return the call that takes what is for this rank from the inputs of all, in an all-to-all."""
    target, own = vectors.target, slice(*ranges(cuts_of(counts))[rank])
    assert target is not None
    blocks = [target.block(*run) for run in ranges(cuts_of(counts))]
    return taking(blocks, [vectors.sources[source].block(own.start, own.stop) for source in range(len(counts))], rank)


def taking(blocks: Sequence[Array], found: Sequence[Any], rank: int) -> Callback:
    """Return the call that copies to some blocks, one from each rank, what is found for them.

    It begins with its own, and goes on with the rank after it, so that the ranks read from different ones.
    """
    convert = device_of(blocks[rank]).convert
    return InTurn(
        [
            copy_of(convert, blocks[source], found[source])
            for source in [*range(rank, len(blocks)), *range(rank)]
            if blocks[source].size
        ]
    )


def _block_work(
    steps: Sequence[Step], reduction: Reduction, vectors: Vectors, block: tuple[int, int], scratch: BlockScratch
) -> list[Callback]:
    """Return the calls that carry out an owner's steps on one block."""
    target: Any = None if vectors.target is None else vectors.target.block(*block)
    value: Any = target if vectors.source is None else vectors.source.block(*block)
    fresh = vectors.apart  # whether nothing has been written to the target yet
    operands: list[Operands] = []
    for step in steps:
        if step.action is Action.SEND:
            if step.peer != vectors.target_of:
                operands.append((step, value, value, vectors.targets[step.peer].block(*block)))
            continue
        other = target if step.action is Action.FINISH else vectors.sources[step.peer].block(*block)
        operands.append((step, value, target, other))
        if step.action is not Action.HOLD:
            value, fresh = target, False
    calls = calls_of(operands, reduction, scratch.aside, scratch.read)
    return [*calls, partial(np.copyto, target, value)] if fresh and target is not None else calls


def stages(
    rounds: Sequence[Round], owned: range, node: Collection[int], *, alone: bool
) -> list[tuple[bool, list[Round]]]:
    """Return the rounds that are about the ranks of a node, and those in which messages are sent, in turn.

    All ranks of a node have as many stages within it. Who has nothing to do between two of them knows the second by
    what it receives of its own chunks: they come from a rank that may have changed them. A round without messages is
    about what was there before; ``alone`` if that can only be about the node, since there is no other.
    """
    found: list[tuple[bool, list[Round]]] = []
    for a_round in rounds:
        peers = [steps[0].peer for steps in a_round.messages]
        here = all(peer in node for peer in peers) if peers else alone
        anew = any(step.action is Action.RECEIVE and step.chunk in owned for step in a_round)
        if not found or found[-1][0] != here or (here and anew):
            found.append((here, []))
        found[-1][1].append(a_round)
    return found
