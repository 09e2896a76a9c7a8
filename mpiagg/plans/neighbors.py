"""Exchanges with the neighbors of a rank on a directed graph: who they are, and what goes to them and comes from them.

An edge leads from a source to a destination. A graph may have an edge several times, and edges from a rank to itself.
Edges between the same two ranks are told apart by their order: the first that leads there is the first that comes from
there. On a grid it is the direction that tells them apart (MPI-4.1, section 8.6): what a rank sends to its neighbor
below in a dimension is what that one receives from above, also where both are the same rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Final, NamedTuple

import numpy as np
from mpi4py import MPI

from mpiagg.arrays import Array, device_of
from mpiagg.common.arguments import check_integer
from mpiagg.errors import MismatchError
from mpiagg.plans.binding import Run
from mpiagg.plans.endpoints import Draft, Tag, endpoint_of
from mpiagg.plans.moves import vectors_of
from mpiagg.plans.program import BoundRound, Callback, Program, in_turn
from mpiagg.schedules import receive, send
from mpiagg.transport import Channel

MOST_TOLD: Final = 5
"""How many differences between ranks are told at most."""

TOPOLOGIES: Final = {MPI.CART: MPI.Cartcomm, MPI.GRAPH: MPI.Graphcomm, MPI.DIST_GRAPH: MPI.Distgraphcomm}


class Neighbors(NamedTuple):
    """The neighbors of a rank; PROC_NULL is none, beyond the border of a grid.

    Attributes
    ----------
    sources, destinations : tuple of int
        From whom it receives, and to whom it sends.
    grid : bool
        Whether both are the neighbors below and above in each dimension of a grid.
    """

    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    grid: bool = False

    @property
    def matched(self) -> list[int]:
        """The places of the sources, in the order in which each one sends."""
        places = (place ^ self.grid for place in range(len(self.sources)))  # above and below, on a grid
        return [place for place in places if self.sources[place] != MPI.PROC_NULL]


def neighbors_of(
    comm: MPI.Intracomm,
    neighbors: Iterable[int] | None = None,
    sources: Iterable[int] | None = None,
    destinations: Iterable[int] | None = None,
) -> Neighbors:
    """Return the neighbors of this rank: as they are given, or by the topology of a communicator.

    Raises
    ------
    ValueError
        For what is no rank; if they are given in two ways, or in none and the communicator has no topology.
    TypeError
        If they are not iterable.
    """
    if neighbors is not None:
        if sources is not None or destinations is not None:
            raise ValueError("neighbors are both sources and destinations, which cannot be given beside them")
        sources = destinations = list(neighbors)
    if sources is None and destinations is None:
        if (kind := TOPOLOGIES.get(comm.Get_topology())) is None:
            raise ValueError("neighbors must be given: a list of ranks, which may be empty; comm has no topology")
        # Also of a communicator whose class does not say that it has a topology.
        inward, outward = kind(comm).inoutedges
        return Neighbors(tuple(inward), tuple(outward), grid=kind is MPI.Cartcomm)
    if sources is None or destinations is None:
        raise ValueError("sources and destinations must be given together")
    most = comm.Get_size() - 1
    return Neighbors(
        tuple(check_integer("neighbor", peer, 0, most) for peer in sources),
        tuple(check_integer("neighbor", peer, 0, most) for peer in destinations),
    )


# -- what the ranks say of their edges

Edges = Sequence[tuple[int, int]]
"""Edges between a rank and others: the other rank, and how many rows go along; -1 where that is not known."""


def differences(sent: Sequence[Edges], received: Sequence[Edges]) -> Iterator[str]:
    """Yield in words which edges are not the same at both of their ends; of all ranks what they send and receive."""
    ends: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for rank, edges in enumerate(sent):
        for peer, rows in edges:
            ends.setdefault((rank, peer), ([], []))[0].append(rows)
    for rank, edges in enumerate(received):
        for peer, rows in edges:
            ends.setdefault((peer, rank), ([], []))[1].append(rows)
    for (source, target), (there, here) in sorted(ends.items()):
        if len(there) != len(here):
            yield (
                f"rank {source} names rank {target} as a destination {_times(there)}, "
                f"and rank {target} names rank {source} as a source {_times(here)}"
            )
        elif any(expected not in (-1, rows) for rows, expected in zip(there, here, strict=True)):
            yield f"rank {source} sends rank {target} {_rows(there)}, which expects {_rows(here)}"


def _times(edges: Sequence[int]) -> str:
    return ("never", "once")[len(edges)] if len(edges) < 2 else f"{len(edges)} times"


def _rows(numbers: Sequence[int]) -> str:
    return f"{' and '.join(map(str, numbers))} rows"


def compare(channel: Channel, sent: Edges, received: Edges) -> list[int]:
    """Compare the graph of all ranks; return how many rows come along the edges that this rank receives; collective.

    Raises
    ------
    MismatchError
        On all ranks, if an edge is not the same at both of its ends.
    """
    numbers = [len(sent), *(number for edge in (*sent, *received) for number in edge)]
    told = channel.gather(np.array(numbers, np.int64).tobytes(), "compare their neighbors")
    ends: tuple[list[Edges], list[Edges]] = ([], [])
    for data in told:
        count, *flat = np.frombuffer(data, np.int64).tolist()
        edges = list(zip(flat[::2], flat[1::2], strict=True))
        ends[0].append(edges[:count])
        ends[1].append(edges[count:])
    found = differences(*ends)
    if words := list(islice(found, MOST_TOLD)):
        more = sum(1 for _ in found)
        raise MismatchError("; ".join(words) + (f"; and {more} more" if more else ""))
    coming = {
        source: iter([rows for peer, rows in ends[0][source] if peer == channel.rank])
        for source in {s for s, _ in received}
    }
    return [next(coming[source]) for source, _ in received]


# -- messages


class NeighborExchange(NamedTuple):
    """What a rank receives from others and sends to them in one round.

    Attributes
    ----------
    received, sent : sequence of (int, numpy.ndarray)
        The other rank, and the vector that comes from there, or goes there.
    reduction : callable or None
        What is done when all of it has come and gone.
    """

    received: Sequence[tuple[int, Array]]
    sent: Sequence[tuple[int, Array]]
    reduction: Callback | None = None


def bind_exchanges(
    channel: Channel, exchanges: Sequence[NeighborExchange], memory: Array, *, label: str, tag: Tag
) -> Program:
    """Return the program of exchanges, one after the other, of vectors that lie where ``memory`` does."""
    endpoint = endpoint_of(channel, tag, memory, label, cut=False)  # some may only send, and be ahead of who receives
    rounds: list[BoundRound] = []
    for number, exchange in enumerate(exchanges):
        draft = Draft()
        for peer, vector in exchange.received:
            draft.add(receive(peer, number), vector)
        for peer, vector in exchange.sent:
            draft.add(send(peer, number), vector)
        if exchange.reduction is not None:
            draft.reductions.append(exchange.reduction)
        rounds += endpoint.rounds(draft, number)
    return Program(endpoint.whole(rounds), endpoint.releases, endpoint.nbytes, endpoint.sent_bytes, endpoint.device)


def bind_neighbors(  # noqa: PLR0917 - two arrays and what goes where
    channel: Channel,
    neighbors: Neighbors,
    x: Array,
    out: Array,
    sent: Sequence[Run],
    received: Sequence[Run],
    *,
    label: str,
    tag: Tag,
) -> Program:
    """Return the program that sends ranges of ``x`` to the destinations, and receives ranges of ``out``.

    Parameters
    ----------
    channel : Channel
    neighbors : Neighbors
    x, out : numpy.ndarray
        The input and the output, of any layout. What no neighbor sends stays as it is in the output.
    sent, received : sequence of (int, int)
        For each destination and each source a range of elements, in C order.
    label : str
        What it is for, for messages to people.
    tag : int or callable
        Of the messages; see :class:`mpiagg.plans.endpoints.Endpoint`.
    """
    made = vectors_of(None, x, out)
    source, target = made.x, made.out
    assert source is not None
    assert target is not None
    ways = zip(neighbors.destinations, sent, strict=True)
    departures = [(peer, source[slice(*part)]) for peer, part in ways if peer != MPI.PROC_NULL]
    arrivals = [(neighbors.sources[place], target[slice(*received[place])]) for place in neighbors.matched]
    program = bind_exchanges(channel, [NeighborExchange(arrivals, departures)], target, label=label, tag=tag)
    keep = None
    if made.store is not None and len(arrivals) < len(neighbors.sources):
        keep = partial(device_of(out).convert, target.reshape(out.shape), out)
    return in_turn(keep, made.around(program))
