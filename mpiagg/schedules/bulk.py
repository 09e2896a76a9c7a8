"""What all ranks do at once, as arrays: the form in which schedules of very many ranks are priced.

A schedule says what one rank does. A ring of 65,536 ranks sends 8,589,803,520 messages, which are too many to walk
through; so here the schedules of the table are said once more, each in a few arrays. The tests hold every
form to the walk. An algorithm without a form is priced by the walk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mpiagg.schedules.circulant import halvings
from mpiagg.schedules.hierarchical import chunks
from mpiagg.schedules.layout import Layout
from mpiagg.schedules.powers_of_two import largest_power_of_two
from mpiagg.schedules.steps import Collective

Ranks = npt.NDArray[np.int64]

MOST_PAIRS: Final = 2**23
"""The most messages that ranks of unequal nodes can exchange, each with all others of its node."""


class Exchange(NamedTuple):
    """Message m carries ``counts[m]`` chunks from ``sources[m]`` to ``targets[m]``.

    It is one round of each rank that takes part: all messages of that round.
    """

    sources: Ranks
    targets: Ranks
    counts: Ranks
    reduces: bool = False


class Around(NamedTuple):
    """Each rank passes ``chunks`` chunks on to the rank at its place in the next row, in one round less than rows.

    ``ranks`` has two axes; after the last row comes the first.
    """

    ranks: Ranks
    chunks: int
    reduces: bool

    def one_round(self) -> Exchange:
        """Return what each of the rounds is."""
        return exchange(self.ranks.ravel(), np.roll(self.ranks, -1, axis=0).ravel(), self.chunks, reduces=self.reduces)


class InTurn(NamedTuple):
    """One rank, which stands at every place of ``targets``, reduces a chunk from each of the sources, a round each."""

    sources: Ranks
    targets: Ranks


class Everyone(NamedTuple):
    """Every rank sends ``chunks`` chunks to every other: of all ranks, or of its node, nodes being equally full."""

    chunks: int
    reduces: bool
    in_node: bool = False


Bulk = Exchange | Around | InTurn | Everyone


def bulks(name: str, collective: Collective, layout: Layout, root: int = 0) -> list[Bulk]:
    """Return the form of an algorithm in ``FORMS``: bulks, one after the other.

    Raises
    ------
    ValueError
        If more than ``MOST_PAIRS`` messages would be within nodes that are not equally full.
    """
    found = FORMS[name](collective, layout)
    return [_turned(bulk, root, layout.size) for bulk in found] if root else list(found)


def _turned(bulk: Bulk, root: int, size: int) -> Bulk:
    if isinstance(bulk, Everyone):
        return bulk
    if isinstance(bulk, Around):
        return bulk._replace(ranks=(bulk.ranks + root) % size)
    return bulk._replace(sources=(bulk.sources + root) % size, targets=(bulk.targets + root) % size)


# -- the algorithms, by their modules' names


def _ring(collective: Collective, layout: Layout) -> Iterable[Bulk]:
    line = np.arange(layout.size)
    column = line[:, np.newaxis]
    around, back = Around(column, 1, reduces=True), Around(column, 1, reduces=False)
    found: dict[Collective, Sequence[Bulk]] = {
        Collective.ALLREDUCE: (around, back),
        Collective.REDUCE: (around, _to_root(line)),
        Collective.BROADCAST: (_from_root(line), back),
        Collective.ALLGATHER: (back,),
        Collective.REDUCE_SCATTER: (around,),
    }
    return found[collective]


def _tree(collective: Collective, layout: Layout) -> Iterable[Bulk]:
    size = layout.size
    up: list[Bulk] = []
    down: list[Bulk] = []
    for depth in range(size.bit_length()):
        parents = np.arange(2**depth - 1, min(2 ** (depth + 1) - 1, size))
        first, second = parents[2 * parents + 1 < size], parents[2 * parents + 2 < size]
        one_by_one = [exchange(2 * first + 1, first, reduces=True), exchange(2 * second + 2, second, reduces=True)]
        up[:0] = one_by_one
        down.append(exchange(np.r_[first, second], np.r_[2 * first + 1, 2 * second + 2]))
    return {Collective.ALLREDUCE: (*up, *down), Collective.REDUCE: up, Collective.BROADCAST: down}[collective]


def _parameter_server(collective: Collective, layout: Layout) -> Iterable[Bulk]:
    line = np.arange(layout.size)
    up, down = InTurn(line[1:], 0 * line[1:]), _from_root(line)
    return {Collective.ALLREDUCE: (up, down), Collective.REDUCE: (up,), Collective.BROADCAST: (down,)}[collective]


def _recursive_doubling(_: Collective, layout: Layout) -> Iterable[Bulk]:
    def doubling(inner: int) -> Iterable[Exchange]:
        places = np.arange(inner)
        return (exchange(places, places ^ 2**bit, reduces=True) for bit in range(inner.bit_length() - 1))

    return _paired(doubling, layout.size, whole=1)


def _halving_doubling(_: Collective, layout: Layout) -> Iterable[Bulk]:
    def halve_and_double(inner: int) -> Iterable[Exchange]:
        places = np.arange(inner)
        widths = [2**bit for bit in range(inner.bit_length() - 1)]
        yield from (exchange(places, places ^ width, width, reduces=True) for width in reversed(widths))
        yield from (exchange(places, places ^ width, width) for width in widths)

    return _paired(halve_and_double, layout.size, whole=largest_power_of_two(layout.size))


def _paired(algorithm: Callable[[int], Iterable[Exchange]], size: int, whole: int) -> Iterable[Bulk]:
    inner = largest_power_of_two(size)
    odd = np.arange(1, 2 * (size - inner), 2)
    ranks = np.r_[odd, 2 * len(odd) : size]
    yield exchange(odd - 1, odd, whole, reduces=True)
    for bulk in algorithm(inner):
        yield bulk._replace(sources=ranks[bulk.sources], targets=ranks[bulk.targets])
    yield exchange(odd, odd - 1, whole)


def _circulant(collective: Collective, layout: Layout) -> Iterable[Bulk]:
    line = np.arange(layout.size)
    cuts = list(halvings(layout.size))
    away = [exchange(line, np.roll(line, -narrow), wide - narrow, reduces=True) for wide, narrow in cuts]
    back = [exchange(line, np.roll(line, narrow), wide - narrow) for wide, narrow in reversed(cuts)]
    return {
        Collective.ALLREDUCE: (*away, *back),
        Collective.ALLGATHER: back,
        Collective.REDUCE_SCATTER: away,
    }[collective]


def _direct(collective: Collective, layout: Layout) -> Iterable[Bulk]:
    line = np.arange(layout.size)
    away, back = Everyone(1, reduces=True), Everyone(1, reduces=False)
    found: dict[Collective, Sequence[Bulk]] = {
        Collective.ALLREDUCE: (away, back),
        Collective.REDUCE: (away, _to_root(line)),
        # In its second round the root gets nothing; but who sends to it receives as much from it, at the same time.
        Collective.BROADCAST: (_from_root(line), back),
        Collective.ALLGATHER: (back,),
        Collective.REDUCE_SCATTER: (away,),
    }
    return found[collective]


def _one_shot(_: Collective, __: Layout) -> Iterable[Bulk]:
    return (Everyone(1, reduces=True),)


def _hierarchical(_: Collective, layout: Layout) -> Iterable[Bulk]:
    nodes = len(layout.nodes)
    if not layout.even:
        return _by_leaders(layout)
    ranks = np.array(layout.nodes)
    away, back = (Everyone(nodes, reduces=reduces, in_node=True) for reduces in (True, False))
    return (away, Around(ranks, 1, reduces=True), Around(ranks, 1, reduces=False), back)


def _by_leaders(layout: Layout) -> Iterable[Bulk]:
    sizes = np.array([len(node) for node in layout.nodes])
    if np.sum(sizes * (sizes - 1)) > MOST_PAIRS:
        raise ValueError(
            f"nodes of up to {layout.widest} ranks that are not equally full have too many messages within them; "
            f"at most {MOST_PAIRS:,} can be priced, as of one node with {int(MOST_PAIRS**0.5):,} ranks"
        )
    part = np.zeros(layout.size, np.int64)  # how many chunks each rank has of its node's vectors
    for node in layout.nodes:
        part[list(node)] = [end - start for start, end in pairwise(_parts(chunks(layout), len(node)))]
    sources, targets = _pairs(layout.nodes)
    leaders = np.array([node[0] for node in layout.nodes])
    others = np.array([rank for node in layout.nodes for rank in node[1:]], np.int64)
    to_others = np.repeat(leaders, sizes - 1)
    no_leader = ~np.isin(targets, leaders)
    yield Exchange(sources, targets, part[targets], reduces=True)
    yield Exchange(others, to_others, part[others])
    for reduces in (True, False):
        yield Around(leaders[:, np.newaxis], layout.widest, reduces)
    yield Exchange(to_others, others, part[others])
    yield Exchange(sources[no_leader], targets[no_leader], part[sources[no_leader]])


def _parts(chunk_count: int, number: int) -> list[int]:
    return [part * chunk_count // number for part in range(number + 1)]


def _pairs(nodes: Sequence[Sequence[int]]) -> tuple[Ranks, Ranks]:
    """Return the sources and the targets where each rank of a node sends to each other of it."""
    grids = [np.stack(np.meshgrid(node, node), -1).reshape(-1, 2) for node in nodes]
    both = np.concatenate(grids)
    both = both[both[:, 0] != both[:, 1]]
    return both[:, 0], both[:, 1]


# -- what they are made of


def exchange(sources: Ranks, targets: Ranks, count: int = 1, *, reduces: bool = False) -> Exchange:
    """Return an exchange of messages of one length."""
    return Exchange(sources, targets, np.full(len(sources), count), reduces)


def _to_root(line: Ranks) -> Exchange:
    return exchange(line[1:], 0 * line[1:])


def _from_root(line: Ranks) -> Exchange:
    return exchange(0 * line[1:], line[1:])


FORMS: Final[dict[str, Callable[[Collective, Layout], Iterable[Bulk]]]] = {
    "ring": _ring,
    "tree": _tree,
    "parameter_server": _parameter_server,
    "recursive_doubling": _recursive_doubling,
    "halving_doubling": _halving_doubling,
    "circulant": _circulant,
    "direct": _direct,
    "one_shot": _one_shot,
    "shared": _direct,
    "hierarchical": _hierarchical,
}
