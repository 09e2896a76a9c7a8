"""Collectives that hand chunks from an input to an output: each is sent and received where it lies.

Chunks that this rank only forwards lie in scratch; one that it has before and after is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpiagg.arrays import (
    Array,
    Reduction,
    accelerator_of,
    cuts_of,
    device_of,
    even_ranges,
    flat,
    overlap,
    ranges,
    same_memory,
)
from mpiagg.errors import MismatchError
from mpiagg.plans.binding import Run, Segments, bind
from mpiagg.plans.choices import Choice
from mpiagg.plans.endpoints import Tag, by_length
from mpiagg.plans.operation import Operation
from mpiagg.plans.program import Callback, Once, Program, in_turn
from mpiagg.schedules import Collective, Round, forwards
from mpiagg.transport import Channel


class MovedVectors(NamedTuple):
    """The input and the output as vectors that have nothing in common, but for a chunk that lies where it stays.

    Attributes
    ----------
    x, out : numpy.ndarray or None
        The arrays that were given, or others in their places.
    load, store : callable or None
        What copies between these and those.
    nbytes : int
        The memory that was taken for them.
    """

    x: Array | None
    out: Array | None
    load: Callback | None
    store: Callback | None
    nbytes: int

    def around(self, program: Program) -> Program:
        """Return a program between the vectors with the copies before and after it."""
        whole = in_turn(self.load, program, self.store)
        return replace(whole, nbytes=whole.nbytes + self.nbytes)


def vectors_of(operation: Operation | None, x: Array | None, out: Array | None) -> MovedVectors:
    """Return the arrays of an operation, of any layout, as vectors; without one, no chunk lies where it stays."""
    source, target = (None if part is None else flat(part) for part in (x, out))
    load = store = None
    nbytes = 0
    if out is not None and target is None:
        device = device_of(out)
        target = device.empty(out.size, out.dtype)
        store = partial(device.convert, out, target.reshape(out.shape))
        nbytes += out.nbytes
    in_the_way = source is not None and target is not None and overlap(source, target)
    if x is not None and (source is None or (in_the_way and not _stays(operation, source, target))):
        device = device_of(x)
        source = device.empty(x.size, x.dtype)
        load = partial(device.convert, source.reshape(x.shape), x)
        nbytes += x.nbytes
    return MovedVectors(source, target, load, store, nbytes)


def _stays(o: Operation | None, source: Any, target: Any) -> bool:
    """Whether an input that overlaps the output is one chunk that lies where it stays, or the output is."""
    if o is None or o.collective is Collective.ALLTOALL:
        return False
    gathers = o.collective is Collective.GATHER
    return same_memory(source, target[o.own_chunk]) if gathers else same_memory(source[o.own_chunk], target)


def _kept(
    source: Array | None, target: Array | None, before: Mapping[int, Run], after: Mapping[int, Run]
) -> Callback | None:
    """Return the call that copies what this rank has before and after from the input to the output."""
    if source is None or target is None:  # of a scatter the root's chunk may stay where it is
        return None
    for chunk in before.keys() & after.keys():  # one, or none
        sent, received = source[slice(*before[chunk])], target[slice(*after[chunk])]
        if sent.size and not same_memory(sent, received):
            return partial(device_of(target).convert, received, sent)
    return None


def tag_of_calls(channel: Channel, operation: Operation) -> Tag:
    """Return the tag of blocking calls; see :class:`mpiagg.plans.endpoints.Endpoint` on what has several."""
    return by_length(channel, operation.description) if operation.ragged else channel.tags.shared(operation.signature)


def bind_moves(channel: Channel, operation: Operation, source: Array | None, target: Array | None, tag: Tag) -> Program:
    """Return the program of a gather, a scatter or an all-to-all by messages.

    Where ranks forward chunks whose lengths they do not know, each chunk's length takes its way first, by the same
    schedule: twice the rounds (Fan et al., "Configurable non-uniform all-to-all algorithms", arXiv:2411.02581).

    Parameters
    ----------
    channel : Channel
    operation : Operation
    source, target : numpy.ndarray or None
        The input and the output, as :func:`vectors_of` returns them; None where this rank has none.
    tag : int or callable
        Of the messages.
    """
    o, schedule = operation, operation.schedule()
    chunks = sorted(_named(schedule) - set(o.had) - set(o.promised))  # that this rank passes on
    bound = partial(_bind, channel, schedule=schedule, tag=tag)
    if not (o.ragged and forwards(o.choice.algorithm, o.collective)):
        return bound(o, source, target, forwarded=dict(zip(chunks, o.counts_of(chunks), strict=True)))
    had, promised, between = (np.zeros(len(part), np.int64) for part in (o.had, o.promised, chunks))
    one = (1,) * o.size
    how, choice = Reduction(np.bitwise_or, had.dtype, "bor"), Choice(o.choice.algorithm)
    lengths = replace(o, counts=one, received=o.received and one, reduction=how, choice=choice, ragged=False)

    def tell() -> None:
        had[:] = o.counts_of(o.had)

    def moved() -> Program:
        wanted, told = o.counts_of(o.promised), promised.tolist()
        kept = [chunk in o.had for chunk in o.promised]
        if any(not kept[i] and told[i] != wanted[i] for i in range(len(told))) or (between < 0).any():
            raise MismatchError(f"{o.label}: other ranks send {told} elements, and this rank takes {wanted}")
        return bound(o, source, target, forwarded=dict(zip(chunks, between.tolist(), strict=True)))

    first = bound(lengths, had, promised, forwarded=dict.fromkeys(chunks, 1), scratch=between)
    device = accelerator_of(source if target is None else target)
    whole = in_turn(tell, first, Program((Once(moved).as_round(),), (), 0, device=device))
    return replace(whole, sent_bytes=0)  # which is another at each run


def _named(schedule: Sequence[Round]) -> set[int]:
    """Return the chunks that this rank sends or receives."""
    return {c for a_round in schedule for step in a_round for c in range(step.chunk, step.chunk + step.count)}


def _bind(
    channel: Channel,
    operation: Operation,
    source: Array | None,
    target: Array | None,
    *,
    schedule: Sequence[Round],
    tag: Tag,
    forwarded: Mapping[int, int],
    scratch: Array | None = None,
) -> Program:
    """Return the program of a move where this rank knows the lengths of the chunks that it forwards.

    Parameters
    ----------
    forwarded : mapping of int to int
        How many elements these chunks have.
    scratch : numpy.ndarray, optional
        Where they lie on their way.
    """
    o, lanes = operation, operation.choice.lanes
    before, after = (_runs(chunks, o.counts_of(chunks)) for chunks in (o.had, o.promised))
    if scratch is None:
        device = device_of(source if target is None else target)
        scratch = device.empty(sum(forwarded.values()), o.reduction.dtype)
    # The last one counts: what a rank has before and after is in no message.
    parts = [
        (part, runs)
        for part, runs in ((target, after), (source, before), (scratch, _runs(forwarded, forwarded.values())))
        if part is not None
    ]
    vector = Segments.of([part for part, _ in parts])
    places = {
        chunk: (start + first, start + last)
        for start, (_, runs) in zip(vector.starts, parts, strict=True)
        for chunk, (first, last) in runs.items()
    }
    in_lanes = {chunk: even_ranges(*places[chunk], lanes) for chunk in sorted(_named(schedule))}
    by_lane = [{chunk: ranges[lane] for chunk, ranges in in_lanes.items()} for lane in range(lanes)]
    program = bind(channel, schedule, vector, by_lane, o.reduction, label=o.label, tag=tag, cut=o.cut)
    whole = in_turn(_kept(source, target, before, after), program)
    return replace(whole, nbytes=whole.nbytes + scratch.nbytes)


def _runs(chunks: Iterable[int], lengths: Iterable[int]) -> Mapping[int, Run]:
    """Return the range of each chunk, where they lie one after the other."""
    return dict(zip(chunks, ranges(cuts_of(tuple(lengths))), strict=True))
