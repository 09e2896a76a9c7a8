"""All ranks' schedules, walked through in one process, under zero buffering.

A message passes only when its sender and its receiver have both come to the round that names it, so a
schedule that needs any buffering at all is found to be stuck. Schedules have no wildcard receives
and no branches on data; then one synchronous execution stands for all of them (Siegel and Avrunin, LNCS 4757),
provided that whoever runs them posts a whole round before it waits, on a communicator of its own, as plans do.

The check and the simulation follow this walk and keep only their own account of it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mpiagg.errors import ScheduleError
from mpiagg.schedules.steps import Action, Round, Step


class Message(NamedTuple):
    """A message that passes: who sends it in which round, who receives it in which round."""

    source: int
    source_round: int
    target: int
    target_round: int
    sent: tuple[Step, ...]
    received: tuple[Step, ...]


class RoundDone(NamedTuple):
    """All messages of a rank's round have passed; its reductions can be applied."""

    rank: int
    round: int
    steps: Round


class _Posted(NamedTuple):
    rank: int
    round: int
    steps: tuple[Step, ...]


def walk(programs: Sequence[Sequence[Round]]) -> Iterator[Message | RoundDone]:
    """Walk through the schedules of all ranks, and yield what happens in an order in which it can happen.

    Parameters
    ----------
    programs : sequence of sequences of Round
        The schedule of every rank, in rank order.

    Raises
    ------
    ScheduleError
        If a message's two ends differ in their chunks, or if some ranks can never go on.
    """
    posts = _Posts()
    position = [-1] * len(programs)
    outstanding = [0] * len(programs)
    ready = deque(range(len(programs)))
    while ready:
        rank = ready.popleft()
        if position[rank] >= 0:
            yield RoundDone(rank, position[rank], programs[rank][position[rank]])
        position[rank] += 1
        if position[rank] == len(programs[rank]):
            continue
        steps = programs[rank][position[rank]]
        messages = steps.messages
        outstanding[rank] = len(messages)
        if not outstanding[rank]:
            ready.append(rank)
        for message in posts.post(rank, position[rank], messages):
            yield message
            for end in (message.source, message.target):
                outstanding[end] -= 1
                if not outstanding[end]:
                    ready.append(end)
    stuck = [rank for rank, program in enumerate(programs) if position[rank] < len(program)]
    if stuck:
        raise _deadlock(stuck, position, programs, posts.waiting())


class _Posts:
    """What has been posted and has not met its other end: for each pair of ranks, in order."""

    def __init__(self) -> None:
        self.sends: dict[tuple[int, int], deque[_Posted]] = defaultdict(deque)
        self.receives: dict[tuple[int, int], deque[_Posted]] = defaultdict(deque)

    def post(self, rank: int, index: int, messages: Sequence[tuple[Step, ...]]) -> Iterator[Message]:
        """Post the messages of a round, and yield those that can pass now."""
        for steps in messages:
            sending, peer = steps[0].action is Action.SEND, steps[0].peer
            pair = (rank, peer) if sending else (peer, rank)
            (self.sends if sending else self.receives)[pair].append(_Posted(rank, index, steps))
            if self.sends[pair] and self.receives[pair]:
                yield _match(self.sends[pair].popleft(), self.receives[pair].popleft())

    def waiting(self) -> list[_Posted]:
        """Return what is still posted, by rank."""
        queues = [*self.sends.values(), *self.receives.values()]
        return sorted((posted for queue in queues for posted in queue), key=lambda posted: posted.rank)


def _match(sent: _Posted, received: _Posted) -> Message:
    if [(step.chunk, step.count) for step in sent.steps] != [(step.chunk, step.count) for step in received.steps]:
        raise ScheduleError(
            f"mismatched message: rank {sent.rank} in round {sent.round} sends {_described(sent.steps)}, "
            f"but rank {received.rank} in round {received.round} expects {_described(received.steps)}",
            rank=received.rank,
            round=received.round,
            chunk=received.steps[0].chunk,
        )
    return Message(sent.rank, sent.round, received.rank, received.round, sent.steps, received.steps)


def _deadlock(
    stuck: Sequence[int], position: Sequence[int], programs: Sequence[Sequence[Round]], waits: Sequence[_Posted]
) -> ScheduleError:
    """Say which ranks can never go on, and what each of them waits for."""
    lines = []
    for posted in waits[:8]:
        verb = "send" if posted.steps[0].action is Action.SEND else "receive"
        peer = posted.steps[0].peer
        if not 0 <= peer < len(programs):
            where = "which does not exist"
        elif position[peer] == len(programs[peer]):
            where = "which has finished: the message is unmatched"
        else:
            where = f"which is in round {position[peer]}"
        lines.append(
            f"rank {posted.rank} in round {posted.round} waits to {verb} {_described(posted.steps)} "
            f"{'to' if verb == 'send' else 'from'} rank {peer}, {where}"
        )
    more = f"; and {len(waits) - 8} more" if len(waits) > 8 else ""
    first = waits[0]
    return ScheduleError(
        f"deadlock: {len(stuck)} of {len(programs)} ranks can never go on: {'; '.join(lines)}{more}",
        rank=first.rank,
        round=first.round,
        chunk=first.steps[0].chunk,
    )


def _described(steps: Sequence[Step]) -> str:
    return ", ".join(map(describe_chunks, steps))


def describe_chunks(step: Step) -> str:
    """Return ``chunk 3`` or ``chunks 3 to 5``."""
    return f"chunk {step.chunk}" if step.count == 1 else f"chunks {step.chunk} to {step.chunk + step.count - 1}"
