"""What this process has been told of choices, by its environment; the ranks of a job compare it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Final, NamedTuple

from mpiagg.schedules import Collective, Layout, algorithm
from mpiagg.tables.files import read_table, text_of
from mpiagg.tables.rows import Case, Choice, Memory, Row, Spread, Table

TUNING: Final = "MPIAGG_TUNING"
"""The environment variable that names a file with a table, written by ``mpiagg tune``; or says ``LEARN``."""

LEARN: Final = "learn"
"""By which calls are tried, and what is fastest for them is kept for the user's next job."""

FORCED: Final = "MPIAGG_ALGORITHM"
"""The environment variable that names the algorithm to take wherever it serves and the caller leaves the choice."""

DEFAULT_FILE: Final = Path(__file__).with_name("default.json")
DIGEST_BYTES: Final = 16


class Found(NamedTuple):
    """A choice, and where it comes from: the row of a table, or neither where the algorithm is forced."""

    choice: Choice
    table: Table | None = None
    number: int = 0
    row: Row | None = None


@dataclass(frozen=True)
class Settings:
    """What choices are made by.

    Attributes
    ----------
    table : Table or None
        The user's; the default has what it has no row for.
    forced : str or None
        The algorithm to take wherever it serves.
    learns : bool
        Whether calls are tried.
    """

    table: Table | None = None
    forced: str | None = None
    learns: bool = False
    _ladders: dict[tuple[Collective, int, Spread, Memory, str | None], list[Found]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @classmethod
    def of_environment(cls) -> Settings:
        """Return what the environment says.

        Raises
        ------
        ValueError
            If it names a table that cannot be used, or an unknown algorithm.
        """
        forced = os.environ.get(FORCED) or None
        if forced is not None:
            try:
                algorithm(forced)
            except ValueError as error:
                raise ValueError(f"{FORCED}: {error}") from None
        path = os.environ.get(TUNING)
        if path == LEARN:
            return cls(None, forced, learns=forced is None)
        return cls(read_table(Path(path)) if path else None, forced)

    @property
    def tables(self) -> list[Table]:
        """The tables whose rows are taken, the first that has one for a case."""
        return [table for table in (self.table, default_table()) if table is not None]

    def found(self, case: Case) -> Found:
        """Return what is taken in a case, and why."""
        layout = case.layout
        if case.learned is not None and self.forced is None:
            for number, row in case.learned.ladder(
                case.collective, layout.size, Spread.of(layout), case.memory, case.library
            ):
                if row.nbytes is None or case.nbytes <= row.nbytes:
                    return Found(row.choice, case.learned, number, row)
        key = (case.collective, layout.size, Spread.of(layout), case.memory, case.library)
        ladder = self._ladders.get(key)
        if ladder is None:
            ladder = self._ladders[key] = self._ladder(*key)
        for step in ladder:
            limit = None if step.row is None else step.row.nbytes
            if limit is None or case.nbytes <= limit:
                return step
        raise AssertionError("the default table is complete")

    @contextmanager
    def trying(self, case: Case, choice: Choice) -> Iterator[None]:
        """Take a choice in cases that differ from this one in length alone, until the end of the block."""
        key = (case.collective, case.layout.size, Spread.of(case.layout), case.memory)
        before = dict(self._ladders)
        for library in {None, case.library}:
            self._ladders[key[0], key[1], key[2], key[3], library] = [Found(choice)]
        try:
            yield
        finally:
            self._ladders.clear()
            self._ladders.update(before)

    def _ladder(
        self, collective: Collective, ranks: int, spread: Spread, memory: Memory, library: str | None
    ) -> list[Found]:
        """Return what is taken for lengths that grow; the last step is for any length."""
        if self.forced is not None and collective in algorithm(self.forced).schedules:
            return [Found(Choice(self.forced))]
        return [
            Found(row.choice, table, number, row)
            for table in self.tables
            for number, row in table.ladder(collective, ranks, spread, memory, library)
        ]

    def check(self, layout: Layout | None, ranks: int) -> None:
        """Raise ValueError if the table was measured on another layout than that of this job.

        Parameters
        ----------
        layout : Layout or None
            The layout of the job, where it is known.
        ranks : int
            How many ranks the job has.
        """
        wrong = self.misfit(layout, ranks)
        if wrong is not None:
            raise ValueError(f"{wrong}; measure one for it with mpiagg tune, or unset {TUNING}")

    def misfit(self, layout: Layout | None, ranks: int) -> str | None:
        """Say on which other layout than such a job's the table was measured, or return None."""
        if self.table is None or self.table.origin is None:
            return None
        measured = self.table.origin.layout
        if measured.size == ranks and layout in (None, measured):
            return None
        here = f"{ranks} ranks" if layout is None else str(layout)
        placed = ("", "") if layout is None or here != str(measured) else (_placed(measured), _placed(layout))
        return (
            f"tuning table {self.table.name!r} was measured on another layout: {measured}{placed[0]}, and this job "
            f"is {here}{placed[1]}"
        )

    @cached_property
    def digest(self) -> bytes:
        """What is the same exactly where the same choices are made."""
        text = "\0".join([self.forced or "", LEARN * self.learns, *map(text_of, self.tables)])
        return blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()

    def __str__(self) -> str:
        """Say it in words, with the beginning of the digest: what has one name on two ranks may differ."""
        table = "the default table" if self.table is None else f"tuning table {self.table.name!r}"
        forced = "" if self.forced is None else f", algorithm {self.forced!r} where it serves"
        learns = ", and learns" if self.learns else ""
        return f"{table}{forced}{learns} ({self.digest.hex()[:8]})"


def _placed(layout: Layout) -> str:
    """Return which ranks are on which nodes."""
    text = " ".join(",".join(map(str, node)) for node in layout.nodes)
    return f" ({text if len(text) <= 60 else text[:57] + '...'})"


@cache
def default_table() -> Table:
    """Return the table for any cluster."""
    return replace(read_table(DEFAULT_FILE), name="the default table")


@cache
def settings() -> Settings:
    """Return what this process goes by, as its environment said when that was first asked for.

    Raises
    ------
    ValueError
        If the environment names a table that cannot be used, or an unknown algorithm.
    """
    return Settings.of_environment()
