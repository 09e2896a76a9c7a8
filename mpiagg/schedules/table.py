"""The table of algorithms: their names, the collectives they serve, and what they need.

Whoever adds an algorithm writes its generators in a module beside this one and adds one entry here; the check,
the price, the simulation, the pictures, the plans, the benchmark and the tests find it through this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from mpiagg.schedules import (
    circulant,
    direct,
    halving_doubling,
    parameter_server,
    recursive_doubling,
    ring,
    tree,
)
from mpiagg.schedules.powers_of_two import largest_power_of_two
from mpiagg.schedules.steps import Action, Collective, Generator, Round, Step


@dataclass(frozen=True)
class Algorithm:
    """A named way to carry out one or more collectives.

    Attributes
    ----------
    name : str
        What ``algorithm=`` takes.
    chunks : callable
        How many chunks ``n`` ranks cut the buffer into.
    schedules : mapping
        A generator of rounds for every collective it serves.
    needs : str
        What it asks for beyond the buffer, in words.
    """

    name: str
    chunks: Callable[[int], int]
    schedules: Mapping[Collective, Generator]
    needs: str

    def generator(self, collective: Collective) -> Generator:
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

    def schedule(self, collective: Collective, rank: int, size: int, root: int = 0) -> list[Round]:
        """Return the rounds of ``rank`` of ``size``, with true peers and contiguous chunks.

        Raises
        ------
        ValueError
            If the algorithm does not serve the collective.
        """
        chunks = self.chunks(size)
        rounds = self.generator(collective)((rank - root) % size, size)
        return [
            Round(*(piece for step in steps for piece in _settle(step, size, chunks, root)))
            for steps in rounds
            if steps
        ]


def _settle(step: Step, size: int, chunks: int, root: int) -> list[Step]:
    """Take a step's peer and chunks modulo their numbers, in two pieces where its chunks wrap around.

    Schedules are written for root 0. The ranks are turned for another root, and the chunks with them, so that a
    rank's own chunk keeps its number.
    """
    peer = -1 if step.action is Action.FINISH else (step.peer + root) % size
    first = (step.chunk + root) % chunks
    until_end = min(step.count, chunks - first)
    pieces = [replace(step, peer=peer, chunk=first, count=until_end)]
    if until_end < step.count:
        pieces.append(replace(step, peer=peer, chunk=0, count=step.count - until_end))
    return pieces


def _one_a_rank(size: int) -> int:
    return size


def _whole(size: int) -> int:
    del size
    return 1


_ALL_REDUCE, _REDUCE, _BROADCAST = Collective.ALLREDUCE, Collective.REDUCE, Collective.BROADCAST
_ALL_GATHER, _REDUCE_SCATTER = Collective.ALLGATHER, Collective.REDUCE_SCATTER

TABLE: Mapping[str, Algorithm] = {
    entry.name: entry
    for entry in (
        Algorithm(
            "ring",
            _one_a_rank,
            {
                _ALL_REDUCE: ring.allreduce,
                _REDUCE: ring.reduce,
                _BROADCAST: ring.broadcast,
                _ALL_GATHER: ring.allgather,
                _REDUCE_SCATTER: ring.reduce_scatter,
            },
            "scratch of one chunk",
        ),
        Algorithm(
            "tree",
            _whole,
            {_ALL_REDUCE: tree.allreduce, _REDUCE: tree.reduce, _BROADCAST: tree.broadcast},
            "scratch of one vector on inner ranks",
        ),
        Algorithm(
            "parameter_server",
            _whole,
            {
                _ALL_REDUCE: parameter_server.allreduce,
                _REDUCE: parameter_server.reduce,
                _BROADCAST: parameter_server.broadcast,
            },
            "scratch of one vector on the root",
        ),
        Algorithm(
            "recursive_doubling",
            _whole,
            {_ALL_REDUCE: recursive_doubling.allreduce},
            "scratch of one vector",
        ),
        Algorithm(
            "halving_doubling",
            largest_power_of_two,
            {_ALL_REDUCE: halving_doubling.allreduce},
            "scratch of half a vector, of one where n is not a power of two",
        ),
        Algorithm(
            "circulant",
            _one_a_rank,
            {
                _ALL_REDUCE: circulant.allreduce,
                _ALL_GATHER: circulant.allgather,
                _REDUCE_SCATTER: circulant.reduce_scatter,
            },
            "scratch of half a vector",
        ),
        Algorithm(
            "direct",
            _one_a_rank,
            {
                _ALL_REDUCE: direct.allreduce,
                _ALL_GATHER: direct.allgather,
                _REDUCE_SCATTER: direct.reduce_scatter,
            },
            "scratch of n-1 chunks",
        ),
    )
}


def algorithms(collective: Collective | str | None = None) -> tuple[str, ...]:
    """Return the names of the algorithms in the table, or of those that serve one collective."""
    if collective is None:
        return tuple(TABLE)
    wanted = Collective(collective)
    return tuple(name for name, entry in TABLE.items() if wanted in entry.schedules)


def algorithm(name: str) -> Algorithm:
    """Return the algorithm of that name.

    Raises
    ------
    ValueError
        If the table has none; the message lists the known names.
    """
    if not isinstance(name, str) or name not in TABLE:
        raise ValueError(f"unknown algorithm {name!r}; known: {', '.join(TABLE)}")
    return TABLE[name]


def schedules(name: str, collective: Collective, size: int, root: int = 0) -> list[list[Round]]:
    """Return the schedules of all ranks."""
    entry = algorithm(name)
    return [entry.schedule(collective, rank, size, root) for rank in range(size)]
