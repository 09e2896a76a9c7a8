"""Which rank is on which node: what node-aware schedules go by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise

from mpiagg.schedules.ranks import RankTable


@dataclass(frozen=True)
class Layout:
    """The ranks of every node, each rank on one of them.

    Attributes
    ----------
    nodes : tuple of tuples of int
        For each node its ranks, ascending; the nodes by their first ranks.
    """

    nodes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, sizes: Sequence[int]) -> Layout:
        """Return the layout of nodes with so many ranks each, numbered one node after the other."""
        cuts = pairwise([0, *accumulate(sizes)])
        return cls(tuple(tuple(range(start, stop)) for start, stop in cuts if start < stop))

    @classmethod
    def of_ranks(cls, ranks: Layout | int) -> Layout:
        """Return a layout as it is, and for a number of ranks one node of so many."""
        return ranks if isinstance(ranks, Layout) else cls.of([ranks])

    @classmethod
    def by_name(cls, names: Sequence[object]) -> Layout:
        """Return the layout where ranks are on one node if ``names`` has the same for them."""
        found: dict[object, list[int]] = {}
        for rank, name in enumerate(names):
            found.setdefault(name, []).append(rank)
        return cls(tuple(map(tuple, found.values())))

    @cached_property
    def size(self) -> int:
        """How many ranks there are."""
        return sum(map(len, self.nodes))

    @cached_property
    def _tables(self) -> tuple[RankTable, RankTable, RankTable, RankTable, RankTable]:
        """The node and the place of each rank; the first of each node's, and how many; the ranks, node by node."""
        sizes = [len(ranks) for ranks in self.nodes]
        found = {rank: (node, place) for node, ranks in enumerate(self.nodes) for place, rank in enumerate(ranks)}
        nodes, places = zip(*(found[rank] for rank in range(self.size)), strict=True)
        firsts = list(accumulate(sizes, initial=0))
        return (
            RankTable(nodes),
            RankTable(places),
            RankTable(firsts),
            RankTable(sizes),
            RankTable([*chain(*self.nodes)]),
        )

    def node_of(self, rank: int) -> int:
        """Return the number of a rank's node."""
        return self._tables[0][rank]

    def place_of(self, rank: int) -> int:
        """Return which rank of its node a rank is, counted from 0."""
        return self._tables[1][rank]

    def width(self, node: int) -> int:
        """Return how many ranks a node has."""
        return self._tables[3][node]

    def rank_at(self, node: int, place: int) -> int:
        """Return the rank at a place of a node."""
        return self._tables[4][self._tables[2][node] + place]

    @cached_property
    def in_order(self) -> bool:
        """Whether ranks are numbered one node after the other."""
        return list(chain(*self.nodes)) == list(range(self.size))

    @cached_property
    def even(self) -> bool:
        """Whether every node has as many ranks as the others."""
        return len({len(ranks) for ranks in self.nodes}) == 1

    @cached_property
    def widest(self) -> int:
        """How many ranks the fullest node has."""
        return max(map(len, self.nodes))

    @cached_property
    def narrowest(self) -> int:
        """How many ranks the emptiest node has."""
        return min(map(len, self.nodes))

    def __str__(self) -> str:
        """Say it in words: ``4 x 2`` is four nodes of two ranks, ``3 + 1`` a node of three and one of one."""
        sizes = [len(ranks) for ranks in self.nodes]
        return f"{len(sizes)} x {sizes[0]}" if self.even else " + ".join(map(str, sizes))
