"""Blocks on a circulant graph (Traeff): a broadcast in the fewest rounds that there can be.

With n ranks, B bytes, b blocks and L = ceil(log2 n):

==============  ==========  ============================  ==================================
collective      rounds      messages of a rank            bytes sent by a rank
==============  ==========  ============================  ==================================
reduce          b-1+L       b, the root 0                 B, the root 0
broadcast       b-1+L       b-1+L at most                 (1 + (L-1)/b) B at most
==============  ==========  ============================  ==================================

In each round a rank sends a block to the rank some skip after it, and receives one from as far before it. The skips are
n halved L times, and rounded up: they are taken in turn, the shortest first. In L rounds the root sends L new blocks,
and every other rank receives one of these and L-1 of earlier ones. All ranks are always busy: B bytes, where a scatter
and an all-gather take 2 B. The choice for long vectors with a root. In ``circulant_blocks-64`` there are 64 blocks. A
reduction takes the rounds backwards. Scratch: one block.

Source: Traeff, Optimal broadcast schedules in logarithmic time with applications to broadcast, all-broadcast,
reduction and all-reduction, arXiv:2407.18004.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

from mpiagg.schedules.circulant import halvings
from mpiagg.schedules.ranks import Ranks, RankTable
from mpiagg.schedules.steps import Collective, Generator, Round, finish, receive, reduce_from, send


def generators(blocks: int) -> Mapping[Collective, Generator]:
    """Return the collectives with so many blocks."""

    def reduce(rank: int, size: int) -> Iterator[Round]:
        for skip, taken, handed in reversed(list(_rounds(rank, size, blocks))):
            yield Round(
                *(send(rank - skip, block) for block in [taken] if block >= 0),
                *(reduce_from(rank + skip, block, received_first=False) for block in [handed] if block >= 0),
            )
        if rank == 0:
            yield Round(finish(count=blocks))

    def broadcast(rank: int, size: int) -> Iterator[Round]:
        for skip, taken, handed in _rounds(rank, size, blocks):
            yield Round(
                *(send(rank + skip, block) for block in [handed] if block >= 0),
                *(receive(rank - skip, block) for block in [taken] if block >= 0),
            )

    return {Collective.REDUCE: reduce, Collective.BROADCAST: broadcast}


def _rounds(rank: int, size: int, blocks: int) -> Iterator[tuple[int, int, int]]:
    """Yield for each round of a broadcast its skip, the block that a rank takes, and the one that it hands on."""
    for number, skip in enumerate(_turns(size, blocks)):
        yield skip, _taken(rank, size, blocks, number), _taken((rank + skip) % size, size, blocks, number)


def _turns(size: int, blocks: int) -> list[int]:
    """Return the skip of each round; the longest one comes last."""
    skips = _skips(size)[:-1]
    return [skips[(number - blocks + 1) % len(skips)] for number in range(blocks - 1 + len(skips))] if skips else []


def _skips(size: int) -> list[int]:
    """Return the skips of L rounds, and the number of ranks."""
    return [*(narrow for _, narrow in reversed(list(halvings(size)))), size]


def _taken(rank: int, size: int, blocks: int, number: int) -> int:
    """Return the block that a rank takes in a round, or -1."""
    if isinstance(rank, Ranks):
        return _tables(size, blocks)[number][rank]
    return _blocks_of(rank, size, blocks)[number]


@lru_cache(maxsize=4)
def _tables(size: int, blocks: int) -> list[RankTable]:
    return [RankTable(column) for column in zip(*(_blocks_of(rank, size, blocks) for rank in range(size)), strict=True)]


@lru_cache(maxsize=1024)
def _blocks_of(rank: int, size: int, blocks: int) -> list[int]:
    """Return the block that a rank takes in each round of a broadcast, or -1: each block once.

    Blocks are counted as if there were more of them before the first, so that rounds begin with the shortest skip; what
    comes after the last one stands for the last.
    """
    ways = _ways(rank, size)
    found: list[int] = []
    known: set[int] = set()
    for number in range(blocks - 1 + len(ways)):
        turn = number - blocks + 1
        block = min(ways[turn % len(ways)] + turn // len(ways) * len(ways) + blocks - 1, blocks - 1)
        found.append(-1 if rank == 0 or block in known else max(block, -1))
        known.add(block)
    return found


def _ways(rank: int, size: int) -> list[int]:
    """Return for each of L rounds which block a rank takes: one from 0 to L-1 is new in them, one below 0 is older.

    A block comes by way of the ranks to which some skips lead from the root of L rounds ago, the longest first; it is
    that which the last skip of a way stands for. For the rounds in turn, the farthest way is taken that can still go on
    by the round's skip, and whose block is not taken yet.
    """
    skips = _skips(size)
    rounds, target = len(skips) - 1, size + rank
    own = _first_block(rank, skips)
    free, found = set(range(rounds + 1)) - {own}, list[int]()

    def follow(reached: int, below: int, longest: int) -> int:
        """Go on from a rank by skips no longer than one; return which rank was taken last."""
        for index in range(longest, -1, -1):
            end = reached + skips[index]
            if len(found) == rounds:
                break
            if index not in free or end > target - skips[len(found)] or end >= below:
                continue
            if end <= target - skips[len(found) + 1]:
                below = follow(end, below, index)
            if len(found) == rounds or reached > target - skips[len(found) + 1]:
                break
            if index in free:
                free.remove(index)
                found.append(index)
                below = end
        return below

    follow(0, 2 * size, rounds)
    return [own if index == rounds else index - rounds for index in found]


def _first_block(rank: int, skips: list[int]) -> int:
    """Return the first block that comes to a rank: the index of the last of the skips, the longest first, to it."""
    left, index = rank, len(skips) - 1
    while left > 0:
        index -= 1
        if skips[index] <= left:
            left -= skips[index]
    return index
