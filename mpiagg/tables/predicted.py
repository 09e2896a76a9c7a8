"""The default table, derived from the alpha-beta-gamma model of the schedules.

The cluster that it is derived for has nodes whose ranks exchange messages through memory, and between them a network
of 10 us and 10 Gbit/s. What is best depends on alpha / beta, here 12.5 KB, which differs less between networks than
either: it is 6 KB for TCP at 50 us and 1 Gbit/s, and 50 KB for 2 us and 25 GB/s. Prices are also those of the former:
there the bytes that cross the network decide, and not what the ranks of a node exchange.

Calls are alone, as that of a loss, or follow one another, as those of many small tensors do. Between nodes ranks that
are done then begin the next one, and a chain of ranks is busy all the time. So the price there is of both: of a call
alone, and of one among others in a row.

What the model leaves out is put right here, in words:

- ``direct``, ``one_shot``, ``parameter_server``, ``knomial``, ``recursive_multiplying`` and ``multi_radix`` are no
  candidates where they send messages. They start several at once, of the first three n-1. What each of these costs a
  processor differs between networks and machines more than anything else here, so the table does without: it was
  measured to be half of a latency where four ranks have two cores, all of one where eight have, and is a sixth or less
  where messages are handed to an adapter.
- While one lane agrees that its next message may be sent, and reduces, another one's travels. So between nodes there
  are as many as leave messages 128 KiB, and 4 at most: more save little (``bench/lanes.py``). Within a node
  they hide nothing: the processor that reduces is the one that moves the bytes. A chain of ranks (``ring``, in a scan)
  is a pipeline of its lanes.
- Through shared memory, a round is a barrier, and bytes are copied once, where messages copy them in and out.
- Vectors that not all lie there must be copied into it and out of it. Up to 1 MiB that was measured to be faster than
  anything else. Longer vectors are read where they lie, and so is what is only moved, above 64 KiB: it is copied once,
  and what is reduced comes in pieces that stay in the cache. Where the cores of two ranks share a cache, copies would
  still take 0.4 to 0.9 of that time, but where they do not, reading what another core has just written is several
  times slower than reading what lies in memory, and they take up to 4 times as long (``bench/cache_sharing.py``).

A row is for ranges of lengths and ranks. It has the algorithm that is at worst the smallest multiple of the best price,
for the middle of the lengths and for the fewest ranks, three quarters of the most, and the most; within 3 %, the one
with the fewest bytes on the busiest link, and then the first in the table of algorithms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Final, NamedTuple, TypeVar

from mpiagg.schedules import Cluster, Collective, Layout, algorithm, algorithms
from mpiagg.schedules.model import Pricing
from mpiagg.tables.rows import NATIVE, Choice, Memory, Row, Spread, Table

CLUSTER: Final = Cluster(
    alpha=10e-6,
    beta=1 / 1.25e9,
    gamma=1 / 5e9,
    node_alpha=1e-6,
    node_beta=1 / 5e9,
    overhead=0,
    node_overhead=0,
    eager=0,
)
"""The cluster of the default table. A sum of long vectors reads two numbers from memory for each that it writes."""

SLOW: Final = replace(CLUSTER, alpha=50e-6, beta=1 / 1.25e8)
"""The same with 50 us and links of 1 Gbit/s, where little but the bytes that cross them counts."""

BARRIER: Final = 0.5e-6
"""Seconds in which the ranks of a node wait for one another."""

MEMORY: Final = 10e9
"""Bytes that a rank copies in a second, in memory that it shares."""

BY_MAILBOXES: Final = 4 * 2**20
"""Bytes up to which unregistered vectors go through mailboxes."""

MORE_BY_MAILBOXES: Final = 4 * BY_MAILBOXES
"""The same of gathers, but of those to more than two ranks with Open MPI."""

ALLTOALLS_BY_MAILBOXES: Final = 2**20
"""The same of all-to-alls."""

WHOLLY_BY_MAILBOXES: Final = 4
"""Ranks up to which those of all-reduces do, whatever their length: of 8 and 16 ranks, reading long ones is faster."""

MOST: Final = 4
SHORTEST: Final = 128 * 2**10
"""How many lanes there are at most between nodes, but in chains, and how long messages in them are at least."""

NETWORK_NATIVE: Final = 64 * 2**10
"""Bytes up to which the MPI library's own collectives take least time between nodes."""

_KIB: Final = 2**10

_K = TypeVar("_K")


class _Limited(NamedTuple):
    """What to take on a node up to so many bytes and ranks, by an MPI library; None stands for any."""

    choice: Choice
    nbytes: int | None = None
    ranks: int | None = None
    library: str | None = None


_OURS, _NATIVE = Choice("shared"), Choice(NATIVE)
_READ, _BY_MPI = _OURS._replace(unregistered=_OURS.algorithm), _OURS._replace(unregistered=NATIVE)
_AT_ONCE: Final = _Limited(_OURS, 32 * _KIB, 8, "MPICH")
"""Calls by one barrier, of few ranks: each of them takes a step in Python for each of the others."""

_PREFIX: Final = (  # MPICH's take three times as long as a chain, and from 16 MiB on ten times
    _Limited(_NATIVE, 4 * _KIB, library="MPICH"),
    _Limited(Choice("ring"), library="MPICH"),
    _Limited(_NATIVE),
)

ON_A_NODE: Final[dict[Collective, Sequence[_Limited]]] = {
    Collective.ALLREDUCE: (
        _AT_ONCE,
        _Limited(_NATIVE, _KIB // 2),
        _Limited(_OURS, ranks=WHOLLY_BY_MAILBOXES),
        _Limited(_OURS, BY_MAILBOXES),
        _Limited(_READ),
    ),
    Collective.REDUCE: (
        _AT_ONCE,
        _Limited(_NATIVE, 8 * _KIB),
        _Limited(_NATIVE, 128 * _KIB, library="Open MPI"),
        _Limited(_OURS, ranks=2),
        _Limited(_OURS, BY_MAILBOXES),
        _Limited(_READ),
    ),
    Collective.BROADCAST: (
        _Limited(_NATIVE, 8 * _KIB),
        _Limited(_OURS, BY_MAILBOXES, ranks=2),
        _Limited(_NATIVE, 32 * _KIB, library="Open MPI"),
        _Limited(_BY_MPI, 64 * _KIB, library="Open MPI"),
        _Limited(_OURS, BY_MAILBOXES),
        _Limited(_BY_MPI, ranks=2),
        _Limited(_READ),
    ),
    Collective.ALLGATHER: (
        _AT_ONCE,
        _Limited(_NATIVE, 8 * _KIB),
        _Limited(_OURS, BY_MAILBOXES),
        _Limited(_BY_MPI),
    ),
    Collective.REDUCE_SCATTER: (
        _AT_ONCE,
        _Limited(_NATIVE, 8 * _KIB),
        _Limited(_NATIVE, 32 * _KIB, ranks=2),
        _Limited(_NATIVE, 32 * _KIB, library="Open MPI"),
        _Limited(_OURS, BY_MAILBOXES),
        _Limited(_READ),
    ),
    Collective.GATHER: (
        _Limited(_NATIVE, 8 * _KIB),
        _Limited(_NATIVE, 32 * _KIB, library="Open MPI"),
        _Limited(_OURS, MORE_BY_MAILBOXES, ranks=2),
        _Limited(_NATIVE, 32 * _KIB),
        _Limited(_BY_MPI, 256 * _KIB, library="Open MPI"),
        _Limited(_OURS, BY_MAILBOXES),
        _Limited(_BY_MPI, library="Open MPI"),
        _Limited(_OURS, MORE_BY_MAILBOXES),
        _Limited(_BY_MPI, ranks=2),
        _Limited(_READ),
    ),
    Collective.SCATTER: (
        _Limited(_NATIVE, 32 * _KIB),
        _Limited(_OURS, BY_MAILBOXES, ranks=2),
        _Limited(_BY_MPI, 128 * _KIB),
        _Limited(_OURS, BY_MAILBOXES),
        _Limited(_READ),
    ),
    Collective.ALLTOALL: (
        _Limited(_NATIVE, 4 * _KIB),
        _Limited(_OURS, ALLTOALLS_BY_MAILBOXES, ranks=2),
        _Limited(_NATIVE, 64 * _KIB, library="Open MPI"),
        _Limited(_NATIVE, 16 * _KIB),
        _Limited(_OURS, ALLTOALLS_BY_MAILBOXES, ranks=8),
        _Limited(_BY_MPI),
    ),
    Collective.SCAN: _PREFIX,
    Collective.EXSCAN: _PREFIX,
}
"""What takes least time on a node, in memory that its ranks share, by measurements."""

_PAIRWISE: Final = Choice("pairwise", 2)
_EXCHANGES: Final = (  # 0.5 to 1 of the library's time, of as many ranks as were measured, and in two lanes the least
    _Limited(_NATIVE, 512 * _KIB, 8, "Open MPI"),
    _Limited(_PAIRWISE, ranks=8, library="Open MPI"),
    _Limited(_NATIVE, 2 * 2**20),
    *(_Limited(_PAIRWISE, ranks=16, library=library) for library in ("MPICH", "Open MPI")),
)

BETWEEN_NODES: Final[dict[tuple[Collective, Spread], Sequence[_Limited]]] = {
    (Collective.ALLTOALL, Spread.ONE_EACH): (_Limited(_NATIVE, ranks=2), *_EXCHANGES),
    (Collective.ALLTOALL, Spread.SEVERAL): (
        _Limited(_NATIVE, 32 * _KIB, ranks=4),
        _Limited(Choice("hierarchical"), 32 * _KIB),  # 0.7 to 0.9 of the library's time
        *_EXCHANGES,
    ),
    **{
        (collective, spread): (  # 0.2 to 0.6 of MPICH's time, of as many ranks as were measured
            _Limited(Choice("ring"), 16 * _KIB, ranks, "MPICH"),
            _Limited(Choice("ring", 4), NETWORK_NATIVE, ranks, "MPICH"),
        )
        for collective in (Collective.SCAN, Collective.EXSCAN)
        for spread, ranks in ((Spread.ONE_EACH, 4), (Spread.SEVERAL, 8))
    },
}
"""What takes less time between nodes than the MPI library's own does, by measurements."""

TOLERANCE: Final = 1.03
CALLS: Final = 2
"""How many calls are priced in a row."""

LENGTHS: Final = tuple(4**power for power in range(3, 16))
RANKS: Final = (2, 4, 8, 32, 128, 512)
"""The ends of the ranges of lengths and of ranks. The last range of either is open."""

_CROWDING: Final = ("direct", "one_shot", "parameter_server", "knomial", "recursive_multiplying", "multi_radix")
"""Algorithms in which a rank has several messages at once."""

_IN_TURN: Final = (("knomial", Collective.GATHER), ("knomial", Collective.SCATTER))
"""Of those, what takes them as they come: all that reaches the root shares its link anyway."""


def candidates(collective: Collective, spread: Spread, memory: Memory) -> list[Choice]:
    """Return what can be taken, the simplest first."""
    on_node = (spread, memory) == (Spread.ONE_NODE, Memory.TOGETHER) and "shared" in algorithms(collective)
    found = [Choice("shared")] if on_node else []
    crowding = [name for name in _CROWDING if (name, collective) not in _IN_TURN]
    for name in algorithms(collective):
        if name not in (*crowding, "shared") and (spread is Spread.SEVERAL or not algorithm(name).by_nodes):
            chain = spread is not Spread.ONE_NODE and _is_chain(name, collective)
            found += [Choice(name, lanes) for lanes in ((1, 4, 16) if chain else (1,))]
    return found


def _is_chain(name: str, collective: Collective) -> bool:
    """Whether ranks are under way one after the other, but for lanes, which make a pipeline of them."""
    return name == "ring" and collective.prefix


class Prices:
    """The prices of candidates on a layout, for vectors of several lengths."""

    def __init__(self, collective: Collective, layout: Layout, memory: Memory, cluster: Cluster = CLUSTER) -> None:
        lanes: dict[str, list[int]] = {}
        for choice in candidates(collective, Spread.of(layout), memory):
            lanes.setdefault(choice.algorithm, []).append(choice.lanes)
        shared = replace(cluster, node_alpha=BARRIER, node_beta=1 / MEMORY)
        self._pricings = [
            (Pricing(name, collective, layout, shared if name == "shared" else cluster), numbers)
            for name, numbers in lanes.items()
        ]
        self._names, self._collective, self._cluster = tuple(lanes), collective, cluster
        self._between = len(layout.nodes) > 1
        self._known: dict[int, dict[Choice, float]] = {}

    def seconds(self, nbytes: int) -> dict[Choice, float]:
        """Return the price of every candidate for vectors of ``nbytes``, the simplest first."""
        if nbytes not in self._known:
            self._known[nbytes] = {
                Choice(name, lanes): seconds
                for name, (pricing, numbers) in zip(self._names, self._pricings, strict=True)
                for lanes, seconds in _with_lanes(pricing, nbytes, numbers)
            }
        return self._known[nbytes]

    def with_others(self, nbytes: int) -> dict[str, float]:
        """Return the price of every algorithm, the simplest first: of a call alone, and between nodes one in a row."""
        alone = self.seconds(nbytes)
        return {
            name: min(alone[Choice(name, lanes)] for lanes in numbers)
            + (pricing.in_a_row(nbytes, CALLS, buffered=True) if self._between else 0.0)
            for name, (pricing, numbers) in zip(self._names, self._pricings, strict=True)
        }

    def busiest(self, name: str, nbytes: int) -> float:
        """Return how many bytes an algorithm sends by the busiest link."""
        return self._pricings[self._names.index(name)][0].busiest(nbytes)

    def in_lanes(self, choice: Choice, nbytes: int) -> Choice:
        """Return the same in as many lanes as leave its messages ``SHORTEST``, on average; a chain's are priced."""
        if not self._between or _is_chain(choice.algorithm, self._collective):
            return choice
        found = self._pricings[self._names.index(choice.algorithm)][0].predict(nbytes)
        message = round(found.bandwidth / self._cluster.beta / max(1, found.rounds))
        return choice._replace(lanes=min(MOST, 2 ** max(0, (message // SHORTEST).bit_length() - 1)))


def _with_lanes(pricing: Pricing, nbytes: int, numbers: Sequence[int]) -> Iterator[tuple[int, float]]:
    """Yield the price with so many lanes, for each of the numbers: several are those of a chain."""
    if list(numbers) == [1]:  # the formula gives the same, three times as slowly
        yield 1, pricing.seconds(nbytes)
        return
    found = pricing.predict(nbytes)
    for lanes in numbers:
        stages = (found.rounds + lanes - 1) / max(1, found.rounds)
        yield lanes, stages * (found.latency + (found.bandwidth + found.reduction) / lanes)


def derived() -> Table:
    """Return the default table: complete, for every collective, length, number of ranks, spread and memory."""
    # Across nodes it hardly matters how the ranks of a node exchange.
    places = [(Spread.ONE_NODE, memory) for memory in Memory] + [(Spread.ONE_EACH, None), (Spread.SEVERAL, None)]
    rows = [
        row for collective in Collective for spread, memory in places for row in _merged(collective, spread, memory)
    ]
    return Table("the default table", (*measured(), *rows))


def measured() -> Iterator[Row]:
    """Yield the rows in which the MPI library's own collective takes part, by measurements and not by the model.

    They are for cases in which it may be taken; for others there are the rows that follow. On a node they stand in
    ``ON_A_NODE``, of two ranks, and of four on two processors, with MPICH 5.0 and Open MPI 5.0 (``bench/calls.py``,
    also with ``--all-algorithms`` and ``--changing``). There, of several ranks that share processors, those who wait
    for one another at a barrier take up to twice as long as Open MPI's broadcasts, gathers and scatters of some KiB.
    Longer vectors take about half of the library's time through memory that the ranks share; of those in other memory,
    long ones that are moved, and those of many ranks, take less where they are read, or by the library's own.
    Scans of MPICH's take two to ten times as long as a ring, also between nodes. There (``bench/network.py``) longer
    vectors take a third to all of its time, but for gathers and scatters, which take as long.
    """
    for collective in Collective:
        for spread, memory in ((Spread.ONE_EACH, None), (Spread.SEVERAL, None), (Spread.ONE_NODE, Memory.NONE)):
            for choice, most, ranks, library in BETWEEN_NODES.get((collective, spread), ()):
                yield Row(collective, choice, most, ranks, spread, library=library)
            most = NETWORK_NATIVE if memory is None and not collective.moves else None
            yield Row(collective, _NATIVE, most, spread=spread, memory=memory)
        for choice, most, ranks, library in ON_A_NODE[collective]:
            yield Row(collective, choice, most, ranks, Spread.ONE_NODE, Memory.TOGETHER, library=library)


def _merged(collective: Collective, spread: Spread, memory: Memory | None) -> Iterator[Row]:
    """Yield the rows for a collective, a spread and a memory, without those that the next ones make superfluous."""
    ladders = []
    # An all-to-all has a message for every two ranks: prices for the most ranks would take minutes.
    most_ranks = RANKS[:-1] if collective is Collective.ALLTOALL else RANKS
    for fewer, ranks in pairwise((0, *most_ranks)):
        numbers = sorted({fewer + 1, ranks - ranks // 4, ranks})
        # Nodes mostly have even numbers of ranks. Where there is an algorithm that goes by nodes, others count, too.
        if spread is Spread.SEVERAL and any(algorithm(name).by_nodes for name in algorithms(collective)):
            numbers += [3 * odd for odd in [(ranks // 3 - 1) | 1] if 3 * odd > fewer]
        layouts = [layout for number in numbers for layout in _layouts(number, spread)]
        if layouts:
            ladders.append((ranks, _ladder(collective, layouts, memory or Memory.NONE)))
    for ladder, group in groupby(ladders, lambda entry: entry[1]):
        most = list(group)[-1][0]
        for nbytes, choice in ladder:
            yield Row(collective, choice, nbytes, None if most == most_ranks[-1] else most, spread, memory)


def _layouts(ranks: int, spread: Spread) -> list[Layout]:
    """Return layouts that stand for all of so many ranks."""
    if ranks == 1:
        return []  # alone there is nothing to choose
    if spread is Spread.ONE_NODE:
        return [Layout.of([ranks])]
    if spread is Spread.ONE_EACH:
        return [Layout.by_name(range(ranks))]
    # Two nodes, nodes of two ranks, and something between; all of them equally full.
    fits = [
        nodes
        for nodes in sorted({2, 3, ranks // 8, ranks // 3, ranks // 2})
        if 1 < nodes < ranks and ranks % nodes == 0
    ]
    return [Layout.by_name([rank * nodes // ranks for rank in range(ranks)]) for nodes in fits]


def _ladder(collective: Collective, layouts: Sequence[Layout], memory: Memory) -> list[tuple[int | None, Choice]]:
    """Return the choices for lengths that grow, each with the length up to which it is taken."""
    taken = [
        Prices(collective, layout, memory, cluster)
        for layout in layouts
        for cluster in ((CLUSTER,) if Spread.of(layouts[0]) is Spread.ONE_NODE else (CLUSTER, SLOW))
    ]
    steps = []
    by_mailboxes = ALLTOALLS_BY_MAILBOXES if collective is Collective.ALLTOALL else BY_MAILBOXES
    for shorter, longest in pairwise(LENGTHS):
        nbytes = math.isqrt(shorter * longest)
        best = _best(taken, nbytes)
        choice = best._replace(lanes=min(table.in_lanes(best, nbytes).lanes for table in taken))
        if choice.algorithm == "shared" and longest > by_mailboxes:
            choice = _READ
        steps.append((longest, choice))
    grouped = [(choice, list(group)[-1][0]) for choice, group in groupby(steps, lambda step: step[1])]
    return [(None if longest == LENGTHS[-1] else longest, choice) for choice, longest in grouped]


def _best(tables: Sequence[Prices], nbytes: int) -> Choice:
    """Return what to take for vectors of ``nbytes``: the algorithm with others in mind, its lanes for a call alone."""
    good = _safest([table.with_others(nbytes) for table in tables])
    algorithm = min(good, key=lambda name: max(table.busiest(name, nbytes) for table in tables))
    alone = [table.seconds(nbytes) for table in tables]
    return _safest([{choice: s for choice, s in each.items() if choice.algorithm == algorithm} for each in alone])[0]


def _safest(prices: Sequence[dict[_K, float]]) -> list[_K]:
    """Return what is at worst the smallest multiple of the best price, and what is about as good, in their order."""
    worst = {key: max(table[key] / min(table.values()) for table in prices) for key in prices[0]}
    return [key for key in worst if worst[key] <= TOLERANCE * min(worst.values())]
