"""What all ranks post, round after round, as arrays: generators are run for as many ranks at once as go on alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from itertools import groupby
from typing import Any, NamedTuple, cast

import numpy as np

from mpiagg.schedules.layout import Layout
from mpiagg.schedules.ranks import Numbers, Ranks, Split, formula_of, places, value
from mpiagg.schedules.steps import Action, Collective, Round
from mpiagg.schedules.table import Algorithm

MOST_ENDS = 2**23
"""How many messages may be sent and received where ranks are taken one by one; else twice as many."""


FEW = 64
"""How many rounds stand for others that differ from them in their peers alone, where there are too many."""


_GOLDEN = (5**0.5 - 1) / 2  # its multiples are spread evenly between whole numbers


class Irregular(Exception):  # noqa: N818 - says what is to be done, and is no error
    """Rounds of many ranks cannot be taken together; they are to be taken one by one."""


class Together(Enum):
    """What is taken together."""

    ROUNDS = "ranks that go on alike, and rounds that are repeated"
    RANKS = "ranks that go on alike"
    NOTHING = "nothing"
    SOME = "ranks that go on alike; of many rounds that differ in their peers alone, some stand for the others"


class Post(NamedTuple):
    """A round with messages, of ranks that go on alike; or ``times`` the same, or with ``in_turn`` one a message."""

    messages: list[tuple[bool, Any, Any, Any]]
    """For each message whether it is sent, and as formulas its peer, its chunks, and those of them that are reduced."""
    times: int = 1
    in_turn: bool = False

    @property
    def to_all(self) -> Any:
        """The number of places, if messages go to or come from all others, and else None."""
        return next(filter(None, (places(peer) for _, peer, *_ in self.messages)), None)


class Meeting(NamedTuple):
    """Posts of ranks that exchange messages with all other ranks of their sets.

    Counts of chunks are 0 where a rank does not send (receive), and -1 where its peers say them.
    """

    posts: Numbers
    sets: Numbers
    sizes: Numbers
    sends: Numbers
    receives: Numbers
    reduces: Numbers


class Posts(NamedTuple):
    """The posts of all ranks, those of a rank one after the other, and the ends of their messages."""

    rank: Numbers
    last: Numbers
    number: Numbers
    """Of a post's first round, among those of its rank."""
    times: Numbers
    in_turn: Numbers
    start: Numbers
    """Where the ends of each post start, and behind them the number of all ends."""
    peer: Numbers
    chunks: Numbers
    sends: Numbers
    reduced: Numbers
    meeting: Meeting


def posts_of(
    entry: Algorithm, collective: Collective, layout: Layout, root: int = 0, *, together: Together = Together.ROUNDS
) -> Posts:
    """Return what all ranks post; what is not taken ``together`` stands for itself, be it a round or a rank.

    Raises
    ------
    Irregular
        If messages to all others are in one round with messages of another kind.
    ValueError
        If there are more messages than ``MOST_ENDS`` says, which are not taken together.
    """
    size, first = layout.size, 0
    by_post, by_end, met = [], [], [np.zeros((6, 0), np.int64)]
    most = MOST_ENDS if together is Together.NOTHING else 2 * MOST_ENDS

    def check(ends: int) -> None:
        if ends > most:
            raise ValueError(
                f"{entry.name} on {size:,} ranks has too many messages of too many kinds; "
                f"at most {most // 2:,} can be priced"
            )

    for group, posts in _groups(entry, collective, layout, check, together=together):
        ranks = (group + root) % size
        shape = len(group), len(posts)
        of_sets = [bool(post.to_all) for post in posts]
        ends = [end for post, to_all in zip(posts, of_sets, strict=True) if not to_all for end in post.messages]
        widths = [0 if to_all else len(post.messages) for post, to_all in zip(posts, of_sets, strict=True)]
        lengths = [len(post.messages) if post.in_turn else post.times for post in posts]
        last = np.arange(shape[1]) == shape[1] - 1
        columns = [last, np.cumsum(lengths) - lengths, [post.times for post in posts]]
        columns += [[post.in_turn for post in posts], widths]
        wide = [ranks[:, np.newaxis], *(np.array(column, np.int64) for column in columns)]
        by_post.append([np.broadcast_to(column, shape).ravel() for column in wide])
        columns_of_ends = np.empty((4, len(group), len(ends)), np.int64)
        for index, end in enumerate(ends):
            for column, part in zip(columns_of_ends, end, strict=True):
                column[:, index] = value(part)  # of each rank, or the same for all of them
        sends, peers, counts, reduced = columns_of_ends.reshape(4, -1)
        by_end.append([(peers + root) % size, counts, sends, reduced])
        firsts = first + shape[1] * np.arange(shape[0])
        met += [_meeting(posts[index], group, size, root, firsts + index) for index in np.flatnonzero(of_sets)]
        first += shape[0] * shape[1]
        check(sum(len(peers) for peers, *_ in by_end))
    *columns, width = (np.concatenate(arrays) for arrays in zip(*by_post, strict=True))
    ends_of_all = (np.concatenate(arrays) for arrays in zip(*by_end, strict=True))
    start, meeting = np.append(0, np.cumsum(width)), Meeting(*np.concatenate(met, axis=1))
    return Posts(*cast("Any", (*columns, start, *ends_of_all, meeting)))


def _groups(
    entry: Algorithm, collective: Collective, layout: Layout, check: Callable[[int], None], *, together: Together
) -> Iterator[tuple[Numbers, list[Post]]]:
    """Yield ranks, counted from the root, that go on alike, and their posts; ``check`` how many ends these have."""
    ranks = np.arange(layout.size)
    waiting = [*ranks[:, np.newaxis]] if together is Together.NOTHING else [ranks]
    while waiting:
        group = waiting.pop()
        try:
            if together is Together.NOTHING:
                posts = list(_posts(entry.schedule(collective, int(group[0]), layout)))
            else:
                rounds = entry.generator(collective)(cast("int", Ranks.of(group)), layout)
                named = _Peers(group, layout.size).named_alike
                found: Iterator[Post]
                if together is Together.SOME:
                    found = (
                        post._replace(times=times) for one, times in _some(rounds) for post in _posts([named(one)])
                    )
                else:
                    found = _posts(map(named, rounds))
                found = _repeated(found) if together is Together.ROUNDS else found
                posts, ends = [], 0
                for post in found:  # as they come, since there may be far too many
                    if len(group) > 1 and not post.to_all:
                        check(ends := ends + len(group) * len(post.messages))
                    posts.append(post)
            yield group, _in_turn(posts) if together is Together.ROUNDS and len(group) == 1 else posts
        except Split as split:
            waiting += [group[part] for part in split.parts]


def _posts(rounds: Iterable[Round]) -> Iterator[Post]:
    """Yield the posts of rounds with messages."""
    return (
        Post(
            [
                (
                    steps[0].action is Action.SEND,
                    formula_of(steps[0].peer),
                    formula_of(sum(step.count for step in steps)),
                    formula_of(sum(step.count for step in steps if step.action.reduces)),
                )
                for steps in messages
            ]
        )
        for messages in (a_round.messages for a_round in rounds)
        if messages
    )


def _some(rounds: Iterable[Round]) -> Iterator[tuple[Round, int]]:
    """Yield some of the rounds in a row that differ in their peers alone, and for how many each of them stands.

    That is a power of two, so that ranks with a round more or less than others pick the same ones; which one of so many
    is picked changes from pick to pick, since peers at distances that are multiples of it may be near in a network.
    """

    def kind(a_round: Round) -> Any:
        return [(step.action, formula_of(step.count)) for step in a_round]

    for _, alike in groupby(rounds, kind):
        run = list(alike)
        each = 1 << ((len(run) - 1) // FEW).bit_length()
        for start in range(0, len(run), each):
            times = min(each, len(run) - start)
            yield run[start + int(times * (start // each * _GOLDEN % 1))], times


def _repeated(posts: Iterable[Post]) -> Iterator[Post]:
    """Take posts together that follow one another and have the same messages."""
    for _, same in groupby(posts, lambda post: post.messages):
        first = next(same)
        yield first._replace(times=sum((1 for _ in same), start=1))  # noqa: B031 - the rest of the same


def _in_turn(posts: Sequence[Post]) -> list[Post]:
    """Take posts of one rank together that follow one another and have one message each."""

    def kind(post: Post) -> Any:
        (sends, _, *counts), *more = post.messages
        return None if more or post.times > 1 or post.to_all else (sends, counts)

    merged: list[Post] = []
    for one_message, run in groupby(posts, kind):
        found = list(run)
        turns = one_message is not None and len(found) > 1
        merged += [Post([post.messages[0] for post in found], in_turn=True)] if turns else found
    return merged


class _Peers:
    """The peers of some ranks, by their formulas: those that are the same rank are to have the same one.

    What goes to one rank in a round is one message.
    """

    def __init__(self, group: Numbers, size: int) -> None:
        self._group, self._size = group, size
        self._known: dict[tuple[Any, ...], dict[Any, int]] = {}

    def named_alike(self, a_round: Round) -> Round:
        """Return a round in which a peer has one formula."""
        peers = {formula_of(step.peer): step.peer for step in a_round if not step.action.local}
        formulas = tuple(formula for formula in peers if not places(formula))
        if formulas not in self._known:  # most rounds have the peers of the one before
            self._known[formulas] = {formula: peers[other] for formula, other in self._same(formulas)}
        same = self._known[formulas]
        if not same:
            return a_round
        return Round(*(replace(step, peer=same.get(formula_of(step.peer), step.peer)) for step in a_round))

    def _same(self, formulas: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Return for each formula the first one of the same ranks, if any two are of the same."""
        if len(formulas) < 2:
            return []
        ranks = np.stack([np.broadcast_to(value(formula) % self._size, len(self._group)) for formula in formulas])
        ordered = np.sort(ranks, axis=0)
        if not np.any(ordered[1:] == ordered[:-1]):
            return []
        first = np.argmax(ranks[:, np.newaxis] == ranks, axis=1)
        kinds = np.unique(first, axis=1, return_inverse=True)[1].ravel()
        if kinds.any():
            raise Split(kinds)
        return [(formula, formulas[index]) for formula, index in zip(formulas, first[:, 0], strict=True)]


def _meeting(post: Post, group: Numbers, size: int, root: int, numbers: Numbers) -> Numbers:
    """Return a post in which messages go to or come from all others, as a :class:`Meeting` has it."""
    peers = {peer for _, peer, *_ in post.messages}
    sides = [[counts for sent, _, *counts in post.messages if sent is side] for side in (True, False)]
    alike = all(places(peer) and np.all(value(peer) % size == group) for peer in peers)
    if not alike or post.times > 1 or max(map(len, sides)) > 1:
        raise Irregular
    counts = [[-1 if places(count) else value(count) for count, _ in side] or [0] for side in sides]
    sets = (value(post.messages[0][1], first=True) + root) % size
    reduces = any(bool(reduced) for _, reduced in sides[1])
    rows = numbers, sets, post.to_all, counts[0][0], counts[1][0], reduces
    return np.stack([np.broadcast_to(row, len(group)) for row in rows]).astype(np.int64)
