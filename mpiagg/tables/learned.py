"""What a job learns from its own calls: times of choices, and the rows that they make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from statistics import median
from typing import Final, NamedTuple

from mpiagg.schedules import Collective, Layout, algorithm
from mpiagg.tables.predicted import Prices
from mpiagg.tables.rows import ANNOUNCED, NATIVE, Case, Choice, Memory, Origin, Row, Spread, Table
from mpiagg.tables.settings import Settings

CHEAPEST: Final = 3
"""How many algorithms are tried beside the usual one, the MPI library's own and shared memory: by the model's price."""

REPEATS: Final = 5
"""How often each is timed, after a first call in which it is set up."""

PATIENCE: Final = 100
"""How many calls are watched, which have been learned, for others that lie in the other kind of memory."""

BETTER: Final = 1.03
"""By how much another must be faster than the usual one to be taken: less is noise."""

PRICED_RANKS: Final = 512
"""For more ranks than these, prices for so many are taken: those of more would keep a job waiting."""

REGISTERED: Final = ", registered memory"
"""What follows the name of a choice whose time is of vectors in registered memory."""


_USUAL: Final = Settings()
"""By which it is chosen what is usual: who learns has no table of a file, and no algorithm is forced."""


class Kind(NamedTuple):
    """Calls that are carried out alike.

    Attributes
    ----------
    collective : Collective
    step : int
        Vectors have up to ``4**step`` bytes, and more than the step below.
    library : str or None
        The MPI library, where its own collective may be taken.
    registered : bool
        Whether all vectors lie in memory that the ranks of the one node share.
    """

    collective: Collective
    step: int
    library: str | None
    registered: bool


def step_of(nbytes: int) -> int:
    """Return the least power of 4 that is not less."""
    return (max(nbytes - 1, 0).bit_length() + 1) // 2


class _Trial:
    """The calls of one kind, of which each takes the next choice."""

    def __init__(self, nbytes: int, choices: Sequence[Choice]) -> None:
        self.nbytes, self.choices = nbytes, choices
        self.seconds: list[float] = []

    @property
    def turn(self) -> Choice:
        """The choice for the next call."""
        return self.choices[len(self.seconds) % len(self.choices)]

    @property
    def done(self) -> bool:
        """Whether all have been timed often enough."""
        return len(self.seconds) >= len(self.choices) * (1 + REPEATS)

    def medians(self, seconds: Sequence[float]) -> dict[Choice, float]:
        """Return the median time of each choice, without that of its first call."""
        number = len(self.choices)
        return {choice: median(seconds[place + number :: number]) for place, choice in enumerate(self.choices)}


class Learner:
    """What the ranks of a communicator have learned; the same on all of them, after the same calls.

    Parameters
    ----------
    library : str
        The MPI library.
    origin : Origin
        Where this is, as tables say it.
    before : Table or None
        What was learned before.
    save : callable or None
        Is given the table whenever something was learned.

    Attributes
    ----------
    before : Table or None
        What was learned before: what cannot be tried goes by that, before other tables.
    table : Table or None
        The same, with what was learned since: for the next job.
    """

    def __init__(
        self, library: str, origin: Origin, before: Table | None, save: Callable[[Table], object] | None
    ) -> None:
        self.layout, self.library, self.before, self.table = origin.layout, library, before, before
        self._origin, self._save = origin, save
        self._trials: dict[Kind, _Trial] = {}
        self._learned: dict[Kind, Choice] = {}
        self._times: dict[tuple[Collective, str | None], dict[int, dict[str, float]]] = {}
        self._known: set[Kind] = set()
        self._open: dict[Kind, bool] = {}
        self._watched: dict[Kind, int] = {}
        for row in () if before is None else before.rows:
            for nbytes, times in row.times.items():
                self._times.setdefault((row.collective, row.library), {}).setdefault(nbytes, {}).update(times)
                where = {name.endswith(REGISTERED) for name in times}
                self._known |= {Kind(row.collective, step_of(nbytes), row.library, each) for each in where}

    def learns(self, case: Case, *, leased: bool) -> bool:
        """Whether calls of a case are tried; once they are not, they never are again. It asks for good, with a call.

        All ranks are in the same call then. What they have kept of calls may differ later; so nothing that comes then,
        as the first array in registered memory, changes the answer.

        Parameters
        ----------
        case : Case
        leased : bool
            Whether any array is in registered memory, so that these calls may be of two kinds.
        """
        calls = self.kind(case, registered=False)
        if self._open.get(calls, True):
            missing = {self.kind(case, registered=each) for each in (False, leased)} - self._known
            self._open[calls] = bool(missing) and self._watched.get(calls, 0) < PATIENCE
        return self._open[calls]

    def kind(self, case: Case, *, registered: bool) -> Kind:
        """Return the kind of calls that a case is of."""
        step = step_of(case.nbytes)
        # As calls of one step are learned together, this is another kind for all of them, or for none.
        apart = len(self.layout.nodes) == 1 and 4**step > ANNOUNCED
        return Kind(case.collective, step, case.library, registered and apart)

    def choice(self, kind: Kind, case: Case) -> Choice:
        """Return what the next call of a kind takes."""
        if kind in self._known:
            return _of_kind(self.chosen(case), kind)
        if kind not in self._trials:
            self._trials[kind] = _Trial(case.nbytes, self._choices(kind, case))
        return self._trials[kind].turn

    def note(self, kind: Kind, seconds: float, agree: Callable[[Sequence[float]], Sequence[float]]) -> None:
        """Note what a call took; after the last of its kind, choose.

        Parameters
        ----------
        kind : Kind
        seconds : float
            On this rank.
        agree : callable
            Returns the longest times of all ranks, the same on all.
        """
        trial = self._trials.get(kind)
        if trial is None:
            calls = kind._replace(registered=False)
            self._watched[calls] = self._watched.get(calls, 0) + 1
        else:
            trial.seconds.append(seconds)
            if trial.done:
                self._decide(kind, trial.nbytes, trial.choices[0], trial.medians(agree(trial.seconds)))

    def _decide(self, kind: Kind, nbytes: int, usual: Choice, found: Mapping[Choice, float]) -> None:
        """Keep the fastest choice of a kind."""
        del self._trials[kind]
        best = min(found, key=found.__getitem__)
        self._learned[kind] = usual if found[usual] <= BETTER * found[best] else best
        self._known.add(kind)
        told = self._times.setdefault((kind.collective, kind.library), {}).setdefault(nbytes, {})
        told.update({f"{choice}{REGISTERED if kind.registered else ''}": taken for choice, taken in found.items()})
        piece_cost = None if self.before is None else self.before.piece_cost
        self.table = Table("what this job has learned", tuple(self._rows()), self._origin, piece_cost)
        if self._save is not None:
            self._save(self.table)

    def chosen(self, case: Case) -> Choice:
        """Return what calls of a case take that are not tried: what was learned of their kinds, or what is usual."""
        usual = _USUAL.found(case._replace(learned=self.before)).choice
        kinds = [self.kind(case, registered=each) for each in (False, True)]
        if not any(kind in self._learned for kind in kinds):
            return usual
        messages, registered = (self._learned.get(kind, _of_kind(usual, kind)) for kind in kinds)
        # A row says by its algorithm what is taken in registered memory, if ranks reach one another's there.
        together = registered.algorithm != NATIVE and algorithm(registered.algorithm).shares
        if not together or registered == messages or (messages.reads and registered.algorithm != messages.algorithm):
            return messages
        return registered._replace(unregistered=messages.algorithm)

    # -- what is tried

    def _choices(self, kind: Kind, case: Case) -> list[Choice]:
        """Return what is tried: first what is usual."""
        layout = self.layout
        if layout.size > PRICED_RANKS:
            widest = -(-layout.size // len(layout.nodes))
            layout = Layout.of([min(widest, PRICED_RANKS)] * max(1, PRICED_RANKS // widest))
        found = [_of_kind(self.chosen(case), kind)]
        if kind.library is not None:
            found.append(Choice(NATIVE))
        prices = Prices(kind.collective, layout, Memory.TOGETHER)
        seconds = prices.seconds(case.nbytes)
        shared = [choice for choice in seconds if choice.algorithm == "shared"]
        found += shared
        if not kind.registered and len(self.layout.nodes) == 1 and case.nbytes > ANNOUNCED:
            found += [choice._replace(unregistered=choice.algorithm) for choice in shared]
        messages = sorted((choice for choice in seconds if choice.algorithm != "shared"), key=seconds.__getitem__)
        found += [prices.in_lanes(choice, case.nbytes) for choice in messages[:CHEAPEST]]
        return list(dict.fromkeys(found))

    # -- what is chosen

    def _rows(self) -> Iterator[Row]:
        """Yield the rows: for each length up to the longest that was tried, and then what there was before."""
        for collective in {kind.collective: None for kind in self._learned}:
            top = max(kind.step for kind in self._learned if kind.collective is collective)
            for library in (self.library, None):
                yield from self._ladder(collective, library, top)
        for row in () if self.before is None else self.before.rows:
            tops = [kind.step for kind in self._learned if kind.collective is row.collective]
            longer = not tops or row.nbytes is None or row.nbytes > 4 ** max(tops)
            if longer or (row.memory is Memory.NONE and self._memory is Memory.TOGETHER):
                yield row

    @property
    def _memory(self) -> Memory | None:
        """That of the calls that are tried; None where no two ranks share a node, so that it makes no difference."""
        return None if Spread.of(self.layout) is Spread.ONE_EACH else Memory.TOGETHER

    def _ladder(self, collective: Collective, library: str | None, top: int) -> Iterator[Row]:
        spread = Spread.of(self.layout)
        times = self._times.get((collective, library), {})
        cases = [Case(collective, 4**step, self.layout, library=library) for step in range(top + 1)]
        steps = [(self.chosen(case), step) for step, case in enumerate(cases)]
        for choice, group in groupby(steps, lambda entry: entry[0]):
            same = {step for _, step in group}
            told = {nbytes: times[nbytes] for nbytes in sorted(times) if step_of(nbytes) in same}
            yield Row(collective, choice, 4 ** max(same), self.layout.size, spread, self._memory, told, library)


def _of_kind(choice: Choice, kind: Kind) -> Choice:
    """Return what a choice means for calls of a kind."""
    return choice._replace(unregistered=None) if kind.registered else choice.in_other_memory
