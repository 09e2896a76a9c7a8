"""Double binary trees: an inner rank of one tree is a leaf of the other, and each tree carries half of the vector.

With n ranks, B bytes, b blocks in each half and L = ceil(log2 n):

==============  ======================  ==========================  ==========================
collective      rounds                  messages of a rank          bytes sent by a rank
==============  ======================  ==========================  ==========================
reduce          L + b at most           2b, the root 0              B, the root 0
broadcast       L + b at most           2b at most                  B at most
allreduce       2L + b at most          4b at most                  2 B at most
==============  ======================  ==========================  ==========================

Block after block goes through both trees, up and down at once: the bytes of a ring, and L blocks more to fill the
trees, in a logarithmic number of rounds. The choice for long vectors on very many ranks. In ``double_tree-64`` a half
has 64 blocks. For a reduction or a broadcast the root stands above both trees of the other ranks. Scratch: two
blocks.

Source: Sanders, Speck and Traeff, Two-tree algorithms for full bandwidth broadcast, reduction and scan, Parallel
Computing 35 (2009).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain
from operator import index
from typing import NamedTuple

from mpiagg.schedules.ranks import Ranks, RankTable
from mpiagg.schedules.steps import Collective, Generator, Round, Step, finish, receive, reduce_from, send

Blocks = Iterator[tuple[int, Callable[[int], Step]]]
"""Steps, and which block each of them is for: there are some for blocks that do not exist."""


class Place(NamedTuple):
    """Where a rank stands in a tree: the ranks next to it, and how far below the top it is."""

    parent: int | None
    left: int | None
    right: int | None
    depth: int


def generators(blocks: int) -> Mapping[Collective, Generator]:
    """Return the collectives with so many blocks in each half."""

    def reduce(rank: int, size: int) -> Iterator[Round]:
        places, height = _two_trees(rank, size, 1), 1 + _height(size - 1)
        for time in range(-height, blocks):
            yield _round(blocks, [_up(place, time) for place in places])

    def broadcast(rank: int, size: int) -> Iterator[Round]:
        places, height = _two_trees(rank, size, 1), 1 + _height(size - 1)
        for time in range(height + blocks):
            yield _round(blocks, [_down(place, time) for place in places])

    def allreduce(rank: int, size: int) -> Iterator[Round]:
        places, height = _two_trees(rank, size), _height(size)
        for time in range(-height - 1, height + blocks):
            yield _round(blocks, [chain(_up(place, time), _down(place, time)) for place in places])

    return {Collective.ALLREDUCE: allreduce, Collective.REDUCE: reduce, Collective.BROADCAST: broadcast}


def _round(blocks: int, halves: Sequence[Blocks]) -> Round:
    """Return the steps for blocks that exist, in both halves."""
    return Round(
        *(
            step(half * blocks + block)
            for half, steps in enumerate(halves)
            for block, step in steps
            if 0 <= block < blocks
        )
    )


def _up(place: Place, time: int) -> Blocks:
    """Add up what the children send of a block, and send the sum of the one before. The top has block 0 at time -1."""
    block = time + place.depth + 1
    if place.left is not None:
        yield block, partial(reduce_from, place.left)
    if place.right is not None:
        yield block, partial(reduce_from, place.right, received_first=False)
    yield (block, finish) if place.parent is None else (block - 1, partial(send, place.parent))


def _down(place: Place, time: int) -> Blocks:
    """Take a block from the parent, and send the children the one before. The top sends block 0 at time 0."""
    block = time - place.depth
    if place.parent is not None:
        yield block + 1, partial(receive, place.parent)
    for child in (place.left, place.right):
        if child is not None:
            yield block, partial(send, child)


def _two_trees(rank: int, size: int, first: int = 0) -> tuple[Place, Place]:
    """Return a rank's place in two trees of the ranks from ``first`` on; ranks before these stand above both of them.

    The second tree is the first one's mirror image, or for an odd number of ranks the first one turned by one.
    """
    if not isinstance(rank, Ranks):
        return _place(rank, size, first, turned=False), _place(rank, size, first, turned=True)
    one, other = (_known(_tables(size, first, turned), rank) for turned in (False, True))
    return one, other


def _known(tables: Sequence[RankTable], rank: int) -> Place:
    """Return the place that tables have of a rank, in which -1 is nobody."""
    parent, left, right = (table[rank] if table[rank] >= 0 else None for table in tables[:3])
    return Place(parent, left, right, index(tables[3][rank]))


@lru_cache(maxsize=8)
def _tables(size: int, first: int, turned: bool) -> list[RankTable]:
    places = (_place(rank, size, first, turned=turned) for rank in range(size))
    return [RankTable([-1 if of is None else of for of in column]) for column in zip(*places, strict=True)]


def _place(rank: int, size: int, first: int, *, turned: bool) -> Place:
    number = size - first
    if rank < first:
        top = first + _other(0, number, -1) if turned and number else first
        return Place(None, None, top if number else None, 0)
    place = rank - first
    found = _in_tree(_other(place, number, 1) if turned else place, number)
    ranks = (None if at is None else first + (_other(at, number, -1) if turned else at) for at in found[:3])
    parent, left, right = ranks
    above = first - 1 if parent is None and first > 0 else parent
    return Place(above, left, right, found.depth + first)


def _other(place: int, number: int, turn: int) -> int:
    """Return where a rank of the one tree stands in the other, or with a turn of -1 the other way round."""
    return number - 1 - place if number % 2 == 0 else (place - turn) % number


def _in_tree(place: int, size: int) -> Place:
    """Return a place of the binary tree whose places follow one another from left to right; place 0 is its top."""
    half, depth, above = 1 << _height(size) >> 1, 0, place
    if place != 0:
        half = _lowest_bit(place) // 2
    while above != 0:
        depth, above = depth + 1, _above(above, size)
    reach = half
    while reach > 0 and place + reach >= size:
        reach //= 2
    return Place(
        parent=_above(place, size) if depth > 0 else None,
        left=place - half if depth > 0 and half > 0 else None,
        right=place + reach if reach > 0 else None,
        depth=depth,
    )


def _above(place: int, size: int) -> int:
    """Return the parent: of the two nearest places that can be halved more often, the one that is halved once more."""
    bit = _lowest_bit(place)
    above = place - bit if place & (2 * bit) else place + bit
    return above if above < size else place - bit


def _lowest_bit(place: int) -> int:
    return place & -place


def _height(size: int) -> int:
    """Return how far below its top the deepest place of a tree is."""
    return max(0, size - 1).bit_length()
