"""The check that schedules are a correct collective, for one number of ranks at a time.

For every chunk on every rank the walk carries the *expression* that the chunk holds: which
contributions have been combined, in which order and on which side. Equal expressions mean equal bits, but for those of
NaN. From the expressions it follows that no contribution is counted twice, none is missing, and all ranks end alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mpiagg.errors import ScheduleError
from mpiagg.schedules.layout import Layout
from mpiagg.schedules.steps import Action, Collective, Round, Step
from mpiagg.schedules.table import algorithm, schedules
from mpiagg.schedules.walk import Message, RoundDone, describe_chunks, walk


@dataclass(frozen=True)
class Count:
    """What one rank does in a schedule, counted in chunks.

    Attributes
    ----------
    rounds, messages : int
        Rounds with at least one message; messages sent.
    sent, received, reduced : int
        Chunks sent, chunks received, and chunks combined with one of its own.
    scratch : int
        The most chunks that one round receives aside, and those that are kept: what a plan needs beside the buffer.
    """

    rounds: int
    messages: int
    sent: int
    received: int
    reduced: int
    scratch: int


def count(rounds: Sequence[Round]) -> Count:
    """Count what the schedule of one rank does."""
    steps = [step for a_round in rounds for step in a_round]

    def chunks(counted: Callable[[Action], bool]) -> int:
        return sum(step.count for step in steps if counted(step.action))

    return Count(
        rounds=sum(bool(a_round.messages) for a_round in rounds),
        messages=sum(sent[0].action is Action.SEND for a_round in rounds for sent in a_round.messages),
        sent=chunks(lambda action: action is Action.SEND),
        received=chunks(lambda action: action.receives),
        reduced=chunks(lambda action: action.reduces),
        scratch=scratch_of(rounds, lambda step: step.count),
    )


def scratch_of(rounds: Sequence[Round], length: Callable[[Step], int]) -> int:
    """Return how much must not land in the buffer at once, if a step moves so much.

    That is what one round receives to be reduced, but for what lands where it is kept.
    """
    kept: dict[int, int] = {}
    most = 0
    for a_round in rounds:
        aside = 0
        for step in a_round:
            if step.action is Action.KEEP and step.chunk not in kept:
                kept[step.chunk] = length(step)
            elif step.action.reduces:
                aside += length(step)
        most = max(most, aside)
    return most + sum(kept.values())


def check(
    name: str, collective: Collective | str, ranks: Layout | int, root: int = 0, *, rounded: bool = False
) -> list[Count]:
    """Check an algorithm of the table for a layout, or a number, of ranks; ``rounded`` as for :func:`prove`.

    Returns
    -------
    list of Count
        What every rank does, in rank order.

    Raises
    ------
    ScheduleError
        If it is not right; the message and the attributes name rank, round and chunk.
    ValueError
        If the name is unknown or the algorithm does not serve the collective.
    """
    goal = Collective(collective)
    programs = schedules(name, goal, ranks, root)
    prove(programs, goal, algorithm(name).chunks(goal, ranks), root, rounded=rounded)
    return [count(program) for program in programs]


def prove(
    programs: Sequence[Sequence[Round]], collective: Collective, chunks: int, root: int = 0, *, rounded: bool = False
) -> None:
    """Check that the schedules of all ranks together carry out a collective.

    Parameters
    ----------
    programs : sequence of sequences of Round
        The schedule of every rank.
    collective : Collective
        What they are to carry out.
    chunks : int
        Into how many chunks the buffer is cut.
    root : int
        The root of a rooted collective.
    rounded : bool
        Whether values are rounded when they are sent, and when they are finished, and the sender goes on with what it
        has sent; as they are where they travel by a codec.

    Raises
    ------
    ScheduleError
        On a deadlock, an unmatched or mismatched message, a chunk out of range, a receive into a chunk that is being
        sent or received, a contribution counted twice or missing, an average divided too early or twice,
        or ranks that end with different expressions.
    """
    for rank, program in enumerate(programs):
        for index, a_round in enumerate(program):
            _check_round(a_round, rank, index, chunks)
    state = _Expressions(len(programs), chunks, collective, root, rounded=rounded)
    for event in walk(programs):
        if isinstance(event, Message):
            state.carry(event)
        else:
            state.apply(event)
    state.conclude()


def _check_round(a_round: Round, rank: int, index: int, chunks: int) -> None:
    """Refuse a round whose outcome would depend on which of its messages comes first."""
    uses: dict[int, Action] = {}
    for step in a_round:
        where = {"rank": rank, "round": index, "chunk": step.chunk}
        if not (step.chunk >= 0 and step.count >= 1 and step.chunk + step.count <= chunks):
            raise ScheduleError(f"rank {rank} in round {index} names {describe_chunks(step)} of {chunks}", **where)
        if step.action in (Action.KEEP, Action.TAKE) and step.count > 1:
            raise ScheduleError(f"rank {rank} in round {index} keeps or takes several chunks in one step", **where)
        for chunk in range(step.chunk, step.chunk + step.count):
            other = uses.get(chunk)
            if other is not None and Action.RECEIVE in (other, step.action):
                use = _USES[other if step.action is Action.RECEIVE else step.action]
                where["chunk"] = chunk
                raise ScheduleError(
                    f"rank {rank} in round {index} receives into chunk {chunk}, which is {use}", **where
                )
            uses[chunk] = step.action


_USES = {
    Action.SEND: "being sent",
    Action.RECEIVE: "being received already",
    Action.REDUCE: "being reduced",
    Action.HOLD: "being reduced",
    Action.KEEP: "being reduced",
    Action.TAKE: "being taken from what was kept",
    Action.FINISH: "being finished",
}


class _Expressions:
    """Which expression every chunk of every rank holds.

    Expressions are numbered: equal numbers are equal expressions. 0 is "nothing yet", 1 + r is what rank r brings.
    """

    def __init__(self, size: int, chunks: int, collective: Collective, root: int, *, rounded: bool) -> None:
        self.size, self.chunks, self.collective, self.root, self.rounded = size, chunks, collective, root, rounded
        self.is_rounded: set[int] = set()
        self.members = [0] + [1 << rank for rank in range(size)]
        self.finished = [False] * (size + 1)
        self.numbers: dict[tuple[int, int], int] = {}
        self.held = [dict.fromkeys(collective.before(rank, size, chunks, root), 1 + rank) for rank in range(size)]
        self.kept: list[dict[int, int]] = [{} for _ in range(size)]
        self.arrived: dict[tuple[int, int], deque[list[int]]] = {}
        """By target and source what each step of a message has brought."""

    def carry(self, message: Message) -> None:
        """Take what a message carries: the state of its sender before the round."""
        brought = deque(self._carried(message, step) for step in message.sent)
        self.arrived[message.target, message.source] = brought

    def _carried(self, message: Message, step: Step) -> list[int]:
        held, chunks = self.held[message.source], range(step.chunk, step.chunk + step.count)
        content = [held.get(chunk, 0) for chunk in chunks]
        if 0 in content:
            chunk = step.chunk + content.index(0)
            raise ScheduleError(
                f"rank {message.source} in round {message.source_round} sends chunk {chunk}, which it does not have",
                rank=message.source,
                round=message.source_round,
                chunk=chunk,
            )
        if self.rounded:
            content = [self._round(value) for value in content]
            held.update(zip(chunks, content, strict=True))
        return content

    def apply(self, done: RoundDone) -> None:
        """Receive, reduce, take and finish, in the order in which the steps stand."""
        held = self.held[done.rank]
        aside: dict[int, int] = {}
        for step in done.steps:
            chunks = range(step.chunk, step.chunk + step.count)
            if step.action is Action.FINISH:
                for chunk in chunks:
                    finished = self._finish(held.get(chunk, 0), done, chunk)
                    held[chunk] = self._round(finished) if self.rounded else finished
            elif step.action is Action.TAKE:
                held[step.chunk] = self._kept_of(done, step.chunk)
            elif step.action.receives:
                content = self.arrived[done.rank, step.peer].popleft()
                for chunk, value in zip(chunks, content, strict=True):
                    if step.action is Action.RECEIVE:
                        held[chunk] = value
                        continue
                    received = self._reduce((aside.pop(chunk), value), done, chunk) if chunk in aside else value
                    if step.action is Action.HOLD:
                        aside[chunk] = received
                    else:
                        self._combine(step, received, done, chunk)
        if aside:
            chunk = min(aside)
            raise ScheduleError(
                f"rank {done.rank} in round {done.round} holds chunk {chunk} aside and does not reduce it",
                rank=done.rank,
                round=done.round,
                chunk=chunk,
            )

    def _combine(self, step: Step, received: int, done: RoundDone, chunk: int) -> None:
        """Reduce what has come into what is there, and into what was kept."""
        own, kept = self.held[done.rank].get(chunk, 0), self.kept[done.rank]
        pair = (received, own) if step.received_first else (own, received)
        self.held[done.rank][chunk] = self._reduce(pair, done, chunk)
        if step.action is Action.KEEP:
            kept[chunk] = self._reduce((received, kept[chunk]), done, chunk) if chunk in kept else received

    def _kept_of(self, done: RoundDone, chunk: int) -> int:
        """Return what was kept of a chunk; it stays kept."""
        kept = self.kept[done.rank]
        if chunk not in kept:
            where = {"rank": done.rank, "round": done.round, "chunk": chunk}
            place = f"rank {done.rank} in round {done.round}"
            raise ScheduleError(f"{place} takes chunk {chunk}, which it has not kept", **where)
        return kept[chunk]

    def _reduce(self, pair: tuple[int, int], done: RoundDone, chunk: int) -> int:
        number = self.numbers.get(pair)
        if number is not None:
            return number
        where = {"rank": done.rank, "round": done.round, "chunk": chunk}
        place = f"rank {done.rank} in round {done.round}, chunk {chunk}"
        left, right = pair
        if 0 in pair:
            raise ScheduleError(f"{place}: reduces into a chunk that it does not have", **where)
        if self.finished[left] or self.finished[right]:
            raise ScheduleError(f"{place}: reduces what was finished already", **where)
        twice = self.members[left] & self.members[right]
        if twice:
            raise ScheduleError(f"{place}: counts rank {twice.bit_length() - 1} twice", **where)
        return self._new(pair, self.members[left] | self.members[right], finished=False)

    def _finish(self, own: int, done: RoundDone, chunk: int) -> int:
        pair = (own, -1)
        number = self.numbers.get(pair)
        if number is not None:
            return number
        where = {"rank": done.rank, "round": done.round, "chunk": chunk}
        place = f"rank {done.rank} in round {done.round}, chunk {chunk}"
        if self.finished[own]:
            raise ScheduleError(f"{place}: finished twice", **where)
        missing = ((1 << self.size) - 1) & ~self.members[own]
        if missing:
            raise ScheduleError(f"{place}: finished without rank {missing.bit_length() - 1}", **where)
        return self._new(pair, self.members[own], finished=True)

    def _round(self, own: int) -> int:
        """Return the expression rounded; what has been rounded is the same when it is rounded again."""
        if own in self.is_rounded:
            return own
        pair = (own, -2)
        number = self.numbers.get(pair)
        if number is None:
            number = self._new(pair, self.members[own], finished=self.finished[own])
            self.is_rounded.add(number)
        return number

    def _new(self, pair: tuple[int, int], members: int, *, finished: bool) -> int:
        number = self.numbers[pair] = len(self.members)
        self.members.append(members)
        self.finished.append(finished)
        return number

    def conclude(self) -> None:
        """Compare the end with what the collective promises."""
        ends: dict[tuple[int, range], int] = {}
        for rank, held in enumerate(self.held):
            for chunk in self.collective.after(rank, self.size, self.chunks, self.root):
                value = held.get(chunk, 0)
                contributors = self.collective.contributors(rank, chunk, self.size, self.root)
                self._check_end(value, rank, chunk, contributors)
                if ends.setdefault((chunk, contributors), value) != value:
                    raise ScheduleError(
                        f"rank {rank} ends with another expression in chunk {chunk} than the ranks below it",
                        rank=rank,
                        chunk=chunk,
                    )

    def _check_end(self, value: int, rank: int, chunk: int, contributors: range) -> None:
        wanted = (1 << contributors.stop) - (1 << contributors.start)
        missing, surplus = wanted & ~self.members[value], self.members[value] & ~wanted
        for ranks, verb in ((missing, "without"), (surplus, "with")):
            if ranks:
                raise ScheduleError(
                    f"rank {rank} ends {verb} the contribution of rank {ranks.bit_length() - 1} in chunk {chunk}",
                    rank=rank,
                    chunk=chunk,
                )
        if self.finished[value] != self.collective.finishes:
            how = "not finished" if self.collective.finishes else "finished"
            raise ScheduleError(f"rank {rank} ends with chunk {chunk} {how}", rank=rank, chunk=chunk)


@lru_cache(maxsize=64)
def forwards(name: str, collective: Collective) -> bool:
    """Return whether ranks pass chunks on that they neither have before nor must have after."""
    layout = Layout.of([22, 22, 22])  # more ranks than any radix, beyond which chunks go straight
    chunks = algorithm(name).chunks(collective, layout)
    return any(
        chunk not in collective.before(rank, layout.size, chunks)
        and chunk not in collective.after(rank, layout.size, chunks)
        for rank, program in enumerate(schedules(name, collective, layout))
        for a_round in program
        for step in a_round
        for chunk in range(step.chunk, step.chunk + step.count)
    )
