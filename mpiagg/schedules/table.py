"""The table of algorithms: their names, the collectives they serve, and what they need.

Whoever adds an algorithm writes its generators in a module beside this one and adds one entry here; the check,
the price, the simulation, the pictures, the plans, the benchmark and the tests find it through this table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from mpiagg.schedules import (
    bine,
    bruck,
    circulant,
    circulant_blocks,
    direct,
    double_tree,
    halving_doubling,
    hierarchical,
    hierarchical_bruck,
    knomial,
    multi_radix,
    one_shot,
    pairwise,
    parameter_server,
    pat,
    recursive_doubling,
    recursive_multiplying,
    ring,
    swing,
    tree,
)
from mpiagg.schedules.layout import Layout
from mpiagg.schedules.powers import largest_power
from mpiagg.schedules.steps import Collective, Generator, Round, settled

NodeAware = Callable[[int, Layout], Iterator[Round]]
"""A schedule that goes by the layout of the nodes: ``f(rank, layout)`` yields the rounds of one rank, for root 0."""


@dataclass(frozen=True, eq=False)
class Algorithm:
    """A named way to carry out one or more collectives.

    Attributes
    ----------
    name : str
        What ``algorithm=`` takes.
    cut : callable
        How many chunks the ranks of a layout cut the vector into, where the collective does not say it.
    schedules : mapping
        A generator of rounds for every collective it serves.
    needs : str
        What it asks for beyond the buffer, in words.
    owned : callable, optional
        Where ranks of a node can exchange chunks through memory that they share: the chunks that a rank owns, which are
        sent or received only by it. Of the rank and the layout.
    in_step : bool
        Whether all ranks have as many rounds with messages, and none changes in a round what it sends in it. Then ranks
        of one node can exchange chunks through memory that they share, round by round, whoever owns them.
    by_nodes : bool
        Whether it goes by the layout of the nodes. With a rank on each, and on one node, it is a plain algorithm.
    """

    name: str
    cut: Callable[[Layout], int]
    schedules: Mapping[Collective, NodeAware]
    needs: str
    owned: Callable[[int, Layout], range] | None = None
    in_step: bool = False
    by_nodes: bool = False

    @property
    def shares(self) -> bool:
        """Whether there is a way through memory that ranks of a node share."""
        return self.owned is not None or self.in_step

    def chunks(self, collective: Collective, ranks: Layout | int) -> int:
        """Return how many chunks there are among all ranks; a number of ranks is a node of so many."""
        layout = Layout.of_ranks(ranks)
        fixed = collective.chunks(layout.size)
        return self.cut(layout) if fixed is None else fixed

    def pieces(self, collective: Collective, ranks: Layout | int) -> int:
        """Return how many chunks a vector has: of an all-to-all's, those that one rank has before."""
        layout = Layout.of_ranks(ranks)
        return layout.size if collective is Collective.ALLTOALL else self.chunks(collective, layout)

    def generator(self, collective: Collective) -> NodeAware:
        """Return the generator of rounds for a collective.

        Raises
        ------
        ValueError
            If the algorithm does not serve the collective; the message lists those that do.
        """
        if collective not in self.schedules:
            known = ", ".join(algorithms(collective))
            raise ValueError(f"algorithm {self.name!r} does not serve {collective.value}; these do: {known}")
        return self.schedules[collective]

    def schedule(self, collective: Collective, rank: int, ranks: Layout | int, root: int = 0) -> list[Round]:
        """Return the rounds of ``rank``, with true peers and contiguous chunks; a number of ranks is a node of so many.

        Raises
        ------
        ValueError
            If the algorithm does not serve the collective.
        """
        layout = Layout.of_ranks(ranks)
        chunks = self.chunks(collective, layout)
        rounds = self.generator(collective)((rank - root) % layout.size, layout)
        return [
            Round(*(piece for step in steps for piece in settled(step, layout.size, chunks, root)))
            for steps in rounds
            if steps
        ]


def _flat(
    name: str,
    cut: Callable[[int], int],
    generators: Mapping[Collective, Generator],
    needs: str,
    owned: Callable[[int, Layout], range] | None = None,
    *,
    in_step: bool = False,
) -> Algorithm:
    """Return an algorithm to which all ranks are alike, wherever they are."""

    def anywhere(generator: Generator) -> NodeAware:
        return lambda rank, layout: generator(rank, layout.size)

    found = {collective: anywhere(generator) for collective, generator in generators.items()}
    return Algorithm(name, lambda layout: cut(layout.size), found, needs, owned, in_step)


def _one_a_rank(size: int) -> int:
    return size


def _whole(size: int) -> int:
    del size
    return 1


_ALL_REDUCE, _REDUCE, _BROADCAST = Collective.ALLREDUCE, Collective.REDUCE, Collective.BROADCAST
_ALL_GATHER, _REDUCE_SCATTER = Collective.ALLGATHER, Collective.REDUCE_SCATTER
_GATHER, _SCATTER, _ALL_TO_ALL = Collective.GATHER, Collective.SCATTER, Collective.ALLTOALL
_SCAN, _EXSCAN = Collective.SCAN, Collective.EXSCAN


def _knomial(name: str, radix: int) -> Algorithm:
    return _flat(name, _whole, knomial.generators(radix), f"scratch of {radix - 1} vectors on inner ranks")


def _recursive_multiplying(name: str, radix: int) -> Algorithm:
    generators = {_ALL_REDUCE: recursive_multiplying.allreduce(radix)}
    return _flat(name, _whole, generators, f"scratch of {radix - 1} vectors")


def _double_tree(name: str, blocks: int) -> Algorithm:
    return _flat(name, lambda size: 2 * blocks, double_tree.generators(blocks), "scratch of two blocks")  # noqa: ARG005 - as all


def _circulant_blocks(name: str, blocks: int) -> Algorithm:
    return _flat(name, lambda size: blocks, circulant_blocks.generators(blocks), "scratch of one block")  # noqa: ARG005 - as all


def _bruck(name: str, radix: int) -> Algorithm:
    return _flat(name, _one_a_rank, {_ALL_TO_ALL: bruck.alltoall(radix)}, "scratch for the chunks that are forwarded")


def _hierarchical_bruck(name: str, radix: int) -> Algorithm:
    schedules = {_ALL_TO_ALL: hierarchical_bruck.alltoall(radix)}
    needs = "scratch for the chunks that are forwarded"
    return Algorithm(name, lambda layout: layout.size, schedules, needs, by_nodes=True)


def _multi_radix(name: str, *factors: int) -> Algorithm:
    needs = "scratch of less than a vector; none for registered memory on one node, but for a reduce-scatter"
    return _flat(name, _one_a_rank, multi_radix.generators(factors), needs, in_step=True)


class Numbered(NamedTuple):
    """Algorithms with numbers in them, a radix or how many blocks there are: ``name-8`` has 8, ``name`` the usual one.

    ``make`` is given the name and its numbers, each from ``least`` to ``most``. There are at most ``numbers`` of them:
    ``name-4x2`` has two.
    """

    make: Callable[..., Algorithm]
    usual: int
    least: int
    most: int
    numbers: int = 1


NUMBERED: Mapping[str, Numbered] = {
    "knomial": Numbered(_knomial, 4, 2, 64),
    "recursive_multiplying": Numbered(_recursive_multiplying, 4, 2, 64),
    "multi_radix": Numbered(_multi_radix, 4, 2, 1024, numbers=8),
    "double_tree": Numbered(_double_tree, 16, 1, 1024),
    "circulant_blocks": Numbered(_circulant_blocks, 32, 1, 1024),
    "bruck": Numbered(_bruck, 2, 2, 64),
    "hierarchical_bruck": Numbered(_hierarchical_bruck, 2, 2, 64),
}


_DIRECT: Mapping[Collective, Generator] = {
    _ALL_REDUCE: direct.allreduce,
    _REDUCE: direct.reduce,
    _BROADCAST: direct.broadcast,
    _ALL_GATHER: direct.allgather,
    _REDUCE_SCATTER: direct.reduce_scatter,
    _GATHER: direct.gather,
    _SCATTER: direct.scatter,
    _ALL_TO_ALL: direct.alltoall,
}

TABLE: Mapping[str, Algorithm] = {
    entry.name: entry
    for entry in (
        _flat(
            "ring",
            _one_a_rank,
            {
                _ALL_REDUCE: ring.allreduce,
                _REDUCE: ring.reduce,
                _BROADCAST: ring.broadcast,
                _ALL_GATHER: ring.allgather,
                _REDUCE_SCATTER: ring.reduce_scatter,
                _SCAN: ring.scan,
                _EXSCAN: ring.exscan,
            },
            "scratch of one chunk",
        ),
        _flat(
            "tree",
            _whole,
            {_ALL_REDUCE: tree.allreduce, _REDUCE: tree.reduce, _BROADCAST: tree.broadcast},
            "scratch of one vector on inner ranks",
        ),
        _flat(
            "parameter_server",
            _whole,
            {
                _ALL_REDUCE: parameter_server.allreduce,
                _REDUCE: parameter_server.reduce,
                _BROADCAST: parameter_server.broadcast,
            },
            "scratch of one vector on the root",
        ),
        _flat(
            "recursive_doubling",
            _whole,
            {
                _ALL_REDUCE: recursive_doubling.allreduce,
                _SCAN: recursive_doubling.scan,
                _EXSCAN: recursive_doubling.exscan,
            },
            "scratch of one vector, of two in an exclusive scan",
        ),
        _flat(
            "halving_doubling",
            largest_power,
            {_ALL_REDUCE: halving_doubling.allreduce},
            "scratch of half a vector, of one where n is not a power of two",
        ),
        _flat(
            "circulant",
            _one_a_rank,
            {
                _ALL_REDUCE: circulant.allreduce,
                _ALL_GATHER: circulant.allgather,
                _REDUCE_SCATTER: circulant.reduce_scatter,
            },
            "scratch of half a vector",
        ),
        _flat(
            "pat",
            _one_a_rank,
            {_ALL_REDUCE: pat.allreduce, _ALL_GATHER: pat.allgather, _REDUCE_SCATTER: pat.reduce_scatter},
            "scratch of half a vector",
        ),
        _flat(
            "swing",
            _one_a_rank,
            {_ALL_REDUCE: swing.allreduce, _ALL_GATHER: swing.allgather, _REDUCE_SCATTER: swing.reduce_scatter},
            "scratch of half a vector; of n-1 chunks on the last rank where n is odd",
        ),
        _flat(
            "bine",
            _whole,
            {_ALL_REDUCE: bine.allreduce, _REDUCE: bine.reduce, _BROADCAST: bine.broadcast},
            "scratch of one vector on inner ranks",
        ),
        _flat("pairwise", _one_a_rank, {_ALL_TO_ALL: pairwise.alltoall}, "no scratch"),
        *(numbered.make(name, numbered.usual) for name, numbered in NUMBERED.items()),
        _flat("direct", _one_a_rank, _DIRECT, "scratch of n-1 chunks"),
        _flat(
            "one_shot",
            _whole,
            {_ALL_REDUCE: one_shot.allreduce, _REDUCE: one_shot.reduce},
            "scratch of n-1 vectors",
        ),
        _flat(
            "shared",
            _one_a_rank,
            _DIRECT,
            "scratch of two segments, none for registered memory; as direct where ranks cannot share memory",
            lambda rank, layout: range(rank, rank + 1),  # noqa: ARG005 - a chunk a rank, wherever it is
        ),
        Algorithm(
            "hierarchical",
            hierarchical.chunks,
            {_ALL_REDUCE: hierarchical.allreduce, _ALL_TO_ALL: hierarchical.alltoall},
            "scratch of L-1 parts, L ranks being on a node; none within a node in registered memory",
            hierarchical.owned,
            by_nodes=True,
        ),
    )
}


def algorithms(collective: Collective | str | None = None) -> tuple[str, ...]:
    """Return the names of the algorithms in the table, or of those that serve one collective.

    Parameters
    ----------
    collective : str, optional
        Its name, such as ``"allreduce"``.

    Returns
    -------
    tuple of str
        What ``algorithm=`` takes; ``"auto"`` and ``"native"`` go beside them.

    Raises
    ------
    ValueError
        If there is no such collective.

    Examples
    --------
    >>> "ring" in mpiagg.algorithms("allreduce")
    True
    """
    if collective is None:
        return tuple(TABLE)
    wanted = Collective(collective)
    return tuple(name for name, entry in TABLE.items() if wanted in entry.schedules)


def comparable(collective: Collective, layout: Layout) -> tuple[str, ...]:
    """Return the algorithms that differ on a layout: with a rank on each node, some are others."""
    several = 1 < len(layout.nodes) < layout.size
    return tuple(name for name in algorithms(collective) if several or not TABLE[name].by_nodes)


def algorithm(name: str, others: Sequence[str] = ()) -> Algorithm:
    """Return the algorithm of that name.

    Raises
    ------
    ValueError
        If the table has none; the message lists the known names, and ``others`` that the caller takes.
    """
    found = (TABLE.get(name) or _numbered(name)) if isinstance(name, str) else None
    if found is None:
        raise ValueError(f"unknown algorithm {name!r}; known: {', '.join([*others, *TABLE])}")
    return found


_NUMBER: Final = re.compile("0|[1-9][0-9]{0,5}")


@lru_cache(maxsize=64)
def _numbered(name: str) -> Algorithm | None:
    """Return the algorithm that has the number behind its name, if there is such a one."""
    kind, _, digits = name.rpartition("-")
    parts = digits.split("x")
    if kind not in NUMBERED or len(parts) > NUMBERED[kind].numbers or not all(map(_NUMBER.fullmatch, parts)):
        return None
    make, _, least, most, _ = NUMBERED[kind]
    numbers = list(map(int, parts))
    if not all(least <= number <= most for number in numbers):
        raise ValueError(f"the number in {name!r} must be from {least} to {most}")
    return make(name, *numbers)


def schedules(name: str, collective: Collective, ranks: Layout | int, root: int = 0) -> list[list[Round]]:
    """Return the schedules of all ranks; a number of ranks is a node of so many."""
    entry, layout = algorithm(name), Layout.of_ranks(ranks)
    return [entry.schedule(collective, rank, layout, root) for rank in range(layout.size)]
