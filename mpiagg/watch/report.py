"""Who is where: what the ranks of a communicator tell of themselves, put together, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Final, NamedTuple

from mpiagg.errors import Error, MismatchError, StallError

RECENT: Final = 64
"""How many of its last operations on a communicator a rank tells of."""

LONGEST: Final = 2000
"""Characters of a text at most."""

MOST_SHOWN: Final = 64
"""How many ranks a table shows at most; those that matter most come first."""


class ReportedOperation(NamedTuple):
    """An operation that a rank has entered.

    Attributes
    ----------
    order : int
        Its number on the communicator.
    what : str
        In words.
    running : bool
        Whether it has not ended.
    waiting : bool
        Whether somebody waits for its end.
    """

    order: int
    what: str
    running: bool
    waiting: bool


class RankState(NamedTuple):
    """The state of a rank, as it reports it.

    Attributes
    ----------
    status : str
        ``"runs"``; or what has ended it, as in ``"raised ValueError: ..."``.
    entered : int
        How many operations it has entered on the communicator.
    recent : tuple of ReportedOperation
        The last of them, as far as they are still known.
    waits : str
        What it waits for, and when it has entered the operation; nothing, if it waits for nothing.
    beside : str
        The operation that it is in beside those of the communicator, if any.
    stack : tuple of str
        Where its main thread is, innermost first.
    in_order : bool
        Whether every rank enters the operations of the communicator in the same order, as far as it knows.
    """

    status: str
    entered: int
    recent: tuple[ReportedOperation, ...]
    waits: str
    beside: str
    stack: tuple[str, ...]
    in_order: bool

    @property
    def waits_in(self) -> ReportedOperation | None:
        """The first operation that somebody waits in."""
        return next((operation for operation in self.recent if operation.running and operation.waiting), None)

    def of(self, order: int) -> ReportedOperation | None:
        """Return the operation of a number, if it is still known."""
        return next((operation for operation in self.recent if operation.order == order), None)


ON_ANOTHER: Final = " on another communicator"
"""What follows the operation of another communicator that a rank waits in."""

GONE: Final = "is gone: its process does not exist any more"
CLOSED: Final = "does not listen any more: it is gone, or something between the hosts does not let questions through"
SILENT: Final = (
    "does not answer: it is stopped, or at the end of its program, or busy in a call that keeps Python's lock, "
    "or its node cannot be reached"
)

Answer = RankState | str
"""What is known of a rank: its state, or one of the words above. Only ``GONE`` is certain."""


class Report(NamedTuple):
    """What the states of all ranks come to.

    Attributes
    ----------
    table : str
        A line for each rank.
    fault : Error or None
        Why the operation that somebody is stuck in can never end, if that is certain.
    """

    table: str
    fault: Error | None


def report(answers: Sequence[Answer], differ_in: int = 0) -> Report:
    """Put together what is known of all ranks of a communicator, in the order of the ranks.

    Parameters
    ----------
    answers : sequence of Answer
    differ_in : int
        The number of an operation that ranks are known to disagree in; 0 for none.
    """
    states = [(rank, answer) for rank, answer in enumerate(answers) if isinstance(answer, RankState)]
    fault = (_disagreement(states, differ_in) if differ_in else None) or _lost(answers) or _mismatch(states)
    stuck = _stuck_in(answers)
    what = next((state.of(stuck) for _, state in states if _waits_in(state, stuck)), None)
    beside = "" if what else next((it.beside for _, it in states if _is_beside(it)), "")
    first = f"operation {stuck} of {len(answers)} ranks, {what.what}:" if what else f"{beside} of {len(answers)} ranks:"
    met = bool(what or beside)
    lines = [f"  rank {rank}: {_described(answer, what, met=met)}" for rank, answer in enumerate(answers)]
    if len(lines) > MOST_SHOWN:
        # Those that are in the operation, as they should be, are the least interesting.
        order = sorted(range(len(lines)), key=lambda rank: _waits_in(answers[rank], stuck))[:MOST_SHOWN]
        lines = [lines[rank] for rank in sorted(order)] + [f"  and {len(lines) - MOST_SHOWN} more ranks"]
    return Report("\n".join([first.lstrip(), *lines]), fault)


def _stuck_in(answers: Sequence[Answer]) -> int:
    """Return the number of the first operation that some rank waits in, or else is in; 0 if none is."""
    running = [each for state in answers if isinstance(state, RankState) for each in state.recent if each.running]
    # What was started, and is waited for no more, as after a timeout, keeps nobody.
    waited_for = [each for each in running if each.waiting]
    return min((each.order for each in waited_for or running), default=0)


def _waits_in(answer: Answer, order: int) -> bool:
    operation = answer.of(order) if isinstance(answer, RankState) else None
    return operation is not None and operation.running


def _is_beside(state: RankState) -> bool:
    """Whether a rank waits in something that ranks of this communicator do, beside its operations."""
    return bool(state.beside) and not state.beside.endswith(ON_ANOTHER)


def _described(answer: Answer, what: ReportedOperation | None, *, met: bool) -> str:
    """Return in words what a rank does, where others are in an operation, or ``met`` beside the operations."""
    if isinstance(answer, str):
        return answer
    where = f" at {' < '.join(answer.stack)}" if answer.stack else ""
    if answer.status != "runs":
        return f"{answer.status}; it has entered {answer.entered} operations"
    here = None if what is None else answer.of(what.order)
    if here is not None and here.running:
        name = "it" if what is not None and here.what == what.what else here.what
        return f"in {name}{f', waits for {answer.waits},' if answer.waits else ''}{where}"
    if what is not None and answer.entered >= what.order:
        past = "has done it" if here is None or here.what == what.what else f"has done {here.what}"
        now = answer.recent[-1] if answer.recent else None
        ahead = f", and is in operation {now.order}, {now.what}" if now is not None and now.running else ""
        return f"{past}{ahead}{where}"
    doing = f"is in {answer.beside}" if answer.beside else "computes"
    missing = "has not come: " if what is not None or (met and not answer.beside) else ""
    return f"{missing}it has entered {answer.entered} operations, and {doing}{where}"


def _mismatch(states: Sequence[tuple[int, RankState]]) -> MismatchError | None:
    """Return the operation of which it is certain that some ranks wait in another for each other.

    Ranks may start plans in different orders, as long as all of them start all of them. So two ranks disagree if each
    waits in an operation that the other has not entered: as often, as far back as both tell. Where there are no plans
    they disagree, too, if one waits in an operation that has the number of another one there.
    """
    waiting: dict[tuple[str, int], list[tuple[int, RankState, ReportedOperation]]] = {}
    for rank, state in states:
        if (operation := state.waits_in) is not None:
            number = operation.order if state.in_order else 0
            waiting.setdefault((operation.what, number), []).append((rank, state, operation))
    # A few of those who wait in the same operation stand for all of them.
    for one, other in combinations([ranks[:4] for ranks in waiting.values()], 2):
        for (rank, state, mine), (peer, theirs, its) in product(one, other):
            alone = _is_alone_in(mine, state, theirs) and _is_alone_in(its, theirs, state)
            last = min(mine.order, its.order)
            if alone or (state.in_order and theirs.in_order and _differ_in(last, state, theirs)):
                said = {operation.what: [which] for which, operation in ((rank, mine), (peer, its))}
                return _disagreement(states, last) or MismatchError(_who_disagrees(last, said))
    return None


def _is_alone_in(operation: ReportedOperation, one: RankState, other: RankState) -> bool:
    """Whether a rank waits in an operation that the other has not entered, as far back as both tell."""
    first = max(state.recent[0].order for state in (one, other))

    def entered(state: RankState) -> list[int]:
        return [each.order for each in state.recent if each.order >= first and _is_same(each.what, operation.what)]

    return sum(order <= operation.order for order in entered(one)) > len(entered(other))


def _differ_in(order: int, one: RankState, other: RankState) -> bool:
    """Whether two ranks have entered different operations by the same number."""
    mine, its = one.of(order), other.of(order)
    return mine is not None and its is not None and not _is_same(mine.what, its.what)


def _is_same(one: str, other: str) -> bool:
    """Whether two ranks mean one operation: what the MPI library is to read by itself has nothing behind its name."""
    return one == other or one.startswith(f"{other} of ") or other.startswith(f"{one} of ")


def _disagreement(states: Sequence[tuple[int, RankState]], order: int) -> MismatchError | None:
    """Return who says what of an operation, and where the first who says so is, if that differs as far as is known."""
    said: dict[str, list[int]] = {}
    places: dict[str, str] = {}
    for rank, state in states:
        operation = state.of(order)
        if operation is not None:
            said.setdefault(operation.what, []).append(rank)
            if operation.waiting and state.stack:
                places.setdefault(operation.what, f", rank {rank} at {state.stack[0]}")
    if len(said) < 2:
        return None
    return MismatchError(_who_disagrees(order, {what + places.get(what, ""): ranks for what, ranks in said.items()}))


def _who_disagrees(order: int, said: Mapping[str, Sequence[int]]) -> str:
    return f"ranks disagree in operation {order}: {who_says_what(said)}"


def _lost(answers: Sequence[Answer]) -> StallError | None:
    """Return who cannot come any more."""
    lost = [
        f"rank {rank} {answer if isinstance(answer, str) else answer.status}"
        for rank, answer in enumerate(answers)
        if answer == GONE or (isinstance(answer, RankState) and answer.status != "runs")
    ]
    return StallError(f"waited in vain: {'; '.join(lost)}") if lost else None


def who_says_what(said: Mapping[str, Sequence[int]]) -> str:
    """Return in words which ranks say what."""
    return "; ".join(f"{describe_ranks(ranks)}: {text}" for text, ranks in said.items())


def describe_ranks(ranks: Sequence[int]) -> str:
    """Return in words which ranks these are."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
