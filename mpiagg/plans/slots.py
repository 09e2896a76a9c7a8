"""Arrays of devices that other ranks cannot map, by way of memory that they can: each rank has two slots of it.

A piece of an input is copied into a slot of this rank's. When all have done so, ranks do with the slots what they do
with vectors in reach, as owners; then each copies what its own slot holds to its output. Nothing leaves the devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from mpiagg.arrays import Accelerator, Array, device_of, same_memory
from mpiagg.plans.binding import Lane, Run
from mpiagg.plans.choices import SHARED
from mpiagg.plans.endpoints import Asking
from mpiagg.plans.operation import Operation
from mpiagg.plans.owners import taking
from mpiagg.plans.program import BoundRound, Callback
from mpiagg.plans.sharing import VectorRange, Vectors, barrier_round
from mpiagg.schedules import Collective
from mpiagg.transport import Block, Channel, NodeBarrier, Positions

TURNS: Final = 2
"""How many slots a rank has."""


def by_slots(channel: Channel, operation: Operation) -> bool:
    """Whether arrays of devices that others cannot map go by way of slots, and not of the host.

    That is within one node, where messages do not reach devices: no message is needed then.
    """
    return operation.choice.algorithm == SHARED and len(operation.layout.nodes) == 1 and not channel.aware


def slots_for(
    channel: Channel,
    operation: Operation,
    device: Accelerator | None,
    positions: Sequence[Positions],
    *,
    together: bool,
) -> Block | None:
    """Return slots, if all ranks are to go by them: collective on the node where there are none, and for each plan.

    Parameters
    ----------
    device : Accelerator or None
        Where the arrays of this rank lie.
    positions : sequence of Positions
        What all have said of where theirs lie.
    together : bool
        Whether it is for a plan, which has slots of its own.
    """
    if device is None or not by_slots(channel, operation) or any(told.apart for told in positions):
        return None
    if not together:
        return channel.memory.slots_for_calls(device, operation.nbytes)
    found = channel.memory.slots(device, operation.nbytes)
    channel.memory.warn_of_slots()
    return found


WorkBuilder = Callable[[Vectors, Sequence[Lane]], Callback]
"""Returns the call that does an owner's part of an operation, on vectors in reach, on some lanes of them."""


def slot_rounds(  # noqa: PLR0917 - what there is to be said of them
    operation: Operation,
    vectors: tuple[Array | None, Array | None],
    slots: Mapping[int, Array],
    barrier: NodeBarrier,
    asking: Asking,
    work: WorkBuilder,
) -> list[BoundRound]:
    """Return the rounds that carry an operation out through slots, a piece after the other.

    There is one barrier between two rounds, and at most three pieces are in hand in a round: the result of one leaves
    its slot, owners work on the next, and the input of the one after it goes where the first has been, in that order.
    So a slot is touched either by its own rank or by owners between two barriers, and what they do is done before the
    next.

    Parameters
    ----------
    operation : Operation
        On one node, with an owner for each chunk.
    vectors : pair of arrays or None
        This rank's input and output: contiguous, of one dtype, without any memory in common unless it is the same.
    slots : mapping of int to array
        For each rank the bytes of its slots.
    barrier : NodeBarrier
        Where the ranks meet.
    asking : Asking
        What asks the device; it waits for what was asked for before.
    work : callable
    """
    o, (x, out) = operation, vectors
    made = [vector for vector in vectors if vector is not None]
    dtype, device = made[0].dtype, device_of(made[0])
    assert isinstance(device, Accelerator)
    nbytes = slots[o.rank].nbytes // TURNS
    in_turn = [
        {rank: memory[start : start + nbytes].view(dtype) for rank, memory in slots.items()} for start in (0, nbytes)
    ]
    lanes = o.lanes(o.lanes_within(nbytes // dtype.itemsize))
    pieces = [_piece(o, lane, x, out, in_turn[number % TURNS], device, work) for number, lane in enumerate(lanes)]
    rounds: list[BoundRound] = []
    for number in range(len(pieces) + 2):
        calls = [
            *(pieces[number - 2].stores if number >= 2 else ()),
            *((pieces[number - 1].work,) if 1 <= number <= len(pieces) else ()),
            *(pieces[number].loads if number < len(pieces) else ()),
        ]
        rounds += (asking.done(asking.ask(*calls)), barrier_round(barrier, o.label, number + 1))
    return rounds[:-1]  # nobody reads what is copied out last


class _Piece(NamedTuple):
    """What is asked of a device for one piece, in three rounds."""

    loads: Sequence[Callback]
    work: Callback
    stores: Sequence[Callback]


def _piece(  # noqa: PLR0917 - what there is to be said of it
    o: Operation,
    lane: Lane,
    x: Array | None,
    out: Array | None,
    slots: Mapping[int, Array],
    device: Accelerator,
    work: WorkBuilder,
) -> _Piece:
    """Return what is asked for a piece; its chunks lie one after the other in a slot, whether or not they are used."""
    cuts = [0, *accumulate(stop - start for start, stop in lane)]
    places = list(pairwise(cuts))
    own = slots[o.rank]
    loads: list[Callback] = []
    if x is not None and o.source is not None:
        loads += (
            partial(device.copy, own[slice(*there)], x[slice(*here)])
            for here, there in _runs(lane, places, o.source, range(o.size))
        )
    if o.collective is Collective.ALLTOALL:
        assert out is not None
        found = [slots[rank][slice(*places[o.rank])] for rank in range(o.size)]
        return _Piece(loads, taking([out[slice(*run)] for run in lane], found, o.rank), ())
    stores: list[Callback] = []
    if out is not None and o.target is not None:
        chunks = [chunk for chunk in range(len(lane)) if not _stays(o, x, out, lane[chunk])]
        stores += (
            partial(device.copy, out[slice(*here)], own[slice(*there)])
            for here, there in _runs(lane, places, o.target, chunks)
        )
    parts = {rank: VectorRange(slot) for rank, slot in slots.items()}
    return _Piece(loads, work(Vectors(parts[o.rank], parts[o.rank], o.rank, parts, parts), [places]), stores)


def _runs(lane: Lane, places: Sequence[Run], within: slice, chunks: Sequence[int]) -> list[tuple[Run, Run]]:
    """Return where chunks lie in a vector, which is a part of the whole, and in a slot: what goes together as one."""
    found: list[tuple[Run, Run]] = []
    for chunk in chunks:
        (start, stop), (first, last) = lane[chunk], places[chunk]
        if start == stop or start < within.start or stop > within.stop:
            continue
        here = start - within.start, stop - within.start
        if found and found[-1][0][1] == here[0] and found[-1][1][1] == first:
            (start, _), (first, _) = found.pop()
            here = start, here[1]
        found.append((here, (first, last)))
    return found


def _stays(o: Operation, x: Array | None, out: Array, run: Run) -> bool:
    """Whether a chunk of the result lies in the output already, as it is in the input."""
    if o.collective.reduces or x is None or o.source is None or o.target is None:
        return False
    if run[0] < o.source.start or run[1] > o.source.stop:
        return False
    of_input, of_output = (slice(run[0] - part.start, run[1] - part.start) for part in (o.source, o.target))
    return same_memory(x[of_input], out[of_output])
