"""What a table of choices is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple

from mpiagg.schedules import Collective, Layout

SEGMENT: Final = 2**20
"""Bytes of a block that is still in the cache when it has been reduced and is written, and of a mailbox; a choice may
have shorter blocks."""

ANNOUNCED: Final = 32 * 2**10
"""Bytes from which calls first ask whether all vectors lie in shared memory; shorter ones are copied anyway. Between
nodes, shorter ones go by messages, within the nodes, too: more barriers between the messages took longer."""


class Memory(Enum):
    """Whether an operation can go through memory that ranks share, which they must set up together."""

    TOGETHER = "shared"
    NONE = "messages"


class Spread(Enum):
    """How ranks are spread over nodes."""

    ONE_NODE = "one node"
    ONE_EACH = "one rank a node"
    SEVERAL = "several ranks a node"

    @classmethod
    def of(cls, layout: Layout) -> Spread:
        """Return how the ranks of a layout are spread; ``SEVERAL`` if there are nodes, and any has several."""
        nodes = len(layout.nodes)
        if nodes == 1:
            return cls.ONE_NODE
        return cls.ONE_EACH if nodes == layout.size else cls.SEVERAL


class Case(NamedTuple):
    """What a choice goes by.

    Attributes
    ----------
    collective : Collective
    nbytes : int
        Bytes of the vector.
    layout : Layout
        The ranks, on their nodes.
    memory : Memory
        Whether ranks of a node may share memory.
    library : str or None
        The MPI library, if its own collective may be taken, too.
    learned : Table or None
        What the communicator has learned, which comes before other tables.
    """

    collective: Collective
    nbytes: int
    layout: Layout
    memory: Memory = Memory.TOGETHER
    library: str | None = None
    learned: Table | None = None


NATIVE: Final = "native"
"""The algorithm that is the MPI library's own collective."""


class Choice(NamedTuple):
    """How an operation is carried out.

    Attributes
    ----------
    algorithm : str
    lanes : int
        The parts of the buffer on which it runs, interleaved.
    wire : str or None
        The codec by which values travel.
    segment : int or None
        Bytes of a block, one after the other, of vectors in memory that the ranks share; None for ``SEGMENT``.
    unregistered : str or None
        On one node: what is taken, by messages, where not all vectors lie in memory that the ranks share. None: the
        same algorithm, and vectors are copied through memory. The same algorithm again: vectors
        are read in the others' processes; where they may not be, what there is for ranks that share no memory is taken.
    """

    algorithm: str
    lanes: int = 1
    wire: str | None = None
    segment: int | None = None
    unregistered: str | None = None

    @property
    def native(self) -> bool:
        """Whether the MPI library's own collective is taken, if only for vectors in other memory."""
        return NATIVE in (self.algorithm, self.unregistered)

    @property
    def reads(self) -> bool:
        """Whether vectors that do not lie in memory that the ranks share are read in the others' processes."""
        return self.unregistered == self.algorithm

    @property
    def in_other_memory(self) -> Choice:
        """What is taken where not all vectors lie in memory that the ranks share."""
        by = self.unregistered or self.algorithm
        return self._replace(algorithm=by, segment=None, unregistered=by if self.reads else None)

    def __str__(self) -> str:
        """Say it in words, as in ``ring, 2 lanes``."""
        return f"{self.algorithm}{self.details}"

    @property
    def details(self) -> str:
        """What else is chosen, in words to follow the algorithm and the wire; nothing where it is as usual."""
        lanes = f", {self.lanes} lanes" if self.lanes > 1 else ""
        segment = f", segments of {self.segment} bytes" if self.segment else ""
        taken = "read" if self.reads else self.unregistered
        unregistered = f", in other memory {taken}" if taken else ""
        return f"{lanes}{segment}{unregistered}"


@dataclass(frozen=True)
class Row:
    """What to take in which cases; None stands for any.

    Attributes
    ----------
    collective : Collective
    choice : Choice
        Without a wire: that is the caller's to say.
    nbytes, ranks : int or None
        The longest vector, in bytes, and the most ranks, that the row is for.
    spread : Spread or None
    memory : Memory or None
    times : mapping
        For each length that was measured, the seconds that candidates took, by their names.
    library : str or None
        The MPI library.
    """

    collective: Collective
    choice: Choice
    nbytes: int | None = None
    ranks: int | None = None
    spread: Spread | None = None
    memory: Memory | None = None
    times: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    library: str | None = None

    def is_for(
        self, collective: Collective, ranks: int, spread: Spread, memory: Memory, library: str | None = None
    ) -> bool:
        """Whether the row is for such cases, with vectors of some length."""
        if (self.choice.native and library is None) or self.library not in (None, library):
            return False
        return (
            self.collective is collective
            and (self.ranks is None or ranks <= self.ranks)
            and self.spread in (None, spread)
            and self.memory in (None, memory)
        )

    def __str__(self) -> str:
        """Say it in words, as in ``allreduce up to 16384 bytes, up to 8 ranks: ring, 2 lanes``."""
        conditions = [
            "" if self.nbytes is None else f"up to {self.nbytes:,} bytes",
            "" if self.ranks is None else f"up to {self.ranks:,} ranks",
            "" if self.spread is None else self.spread.value,
            "" if self.memory is None else f"memory: {self.memory.value}",
            "" if self.library is None else self.library,
        ]
        return f"{self.collective.value}, {', '.join(filter(None, conditions)) or 'always'}: {self.choice}"


class Origin(NamedTuple):
    """Where a table was measured.

    Attributes
    ----------
    layout : Layout
        The ranks of the job.
    mpi : str
        The MPI library.
    machine : mapping
        The machine and the versions of the software, as the benchmark saves them.
    """

    layout: Layout
    mpi: str
    machine: Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """Rows, of which the first that fits is taken.

    Attributes
    ----------
    name : str
        What it is called in words: its file.
    rows : tuple of Row
    origin : Origin or None
        Where it was measured; None for the default, which no cluster is asked for.
    piece_cost : int or None
        Bytes that the bus to a device carries in the time that a piece of a staged message costs by itself, where that
        was measured.
    """

    name: str
    rows: tuple[Row, ...]
    origin: Origin | None = None
    piece_cost: int | None = None

    def ladder(
        self, collective: Collective, ranks: int, spread: Spread, memory: Memory, library: str | None = None
    ) -> list[tuple[int, Row]]:
        """Return the rows for cases that differ in the length of the vector alone, with their numbers in the table."""
        return [
            (number, row)
            for number, row in enumerate(self.rows)
            if row.is_for(collective, ranks, spread, memory, library)
        ]
