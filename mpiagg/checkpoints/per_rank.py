"""What each rank had of its own, for a job with another number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any


def _as_it_is(value: Any) -> Any:
    return value


class PerRank:
    """A value that was not the same on the ranks that saved it: a sequence of what each of them had.

    :func:`mpiagg.load_checkpoint` returns it where the number of ranks is another than when the checkpoint was saved,
    for then nobody but the user can say what a rank goes on from. Aggregations take it in their states.

    Parameters
    ----------
    values : sequence
        For each of the ranks what it had, or what ``read`` makes that of.
    read : callable, optional
        Called with what is asked for, each time anew: arrays of many ranks need not be in memory together.

    Examples
    --------
    What three ranks had, for those of another job to choose from:

    >>> from mpiagg.checkpoints import PerRank
    >>> seeds = PerRank([10, 11, 12])
    >>> seeds
    <PerRank: what 3 ranks had>
    >>> seed = seeds[rank % len(seeds)]
    >>> sum(seeds)
    33
    """

    def __init__(self, values: Sequence[Any], read: Callable[[Any], Any] = _as_it_is) -> None:
        self._values, self._read = tuple(values), read

    def __len__(self) -> int:
        """Return how many ranks there were."""
        return len(self._values)

    def __getitem__(self, rank: int | slice) -> Any:
        """Return what a rank had; for a slice, a sequence of what some had."""
        if isinstance(rank, slice):
            return PerRank(self._values[rank], self._read)
        return self._read(self._values[rank])

    def __iter__(self) -> Iterator[Any]:
        """Yield what each rank had, one after the other."""
        return map(self._read, self._values)

    def __repr__(self) -> str:
        return f"<PerRank: what {len(self)} ranks had>"
