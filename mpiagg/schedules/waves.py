"""In which order messages pass: the walk through the posts of all ranks, in waves of messages.

It obeys the rule of ``walk``: a message passes when both of its ends are posted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mpiagg.schedules.posts import Irregular, Posts
from mpiagg.schedules.ranks import Numbers


class Wave(NamedTuple):
    """Messages that pass together, and the posts that are done with them.

    ``repeats`` says that the posts are done again and again, ``in_turn`` that the messages follow one another. If posts
    meet others of their sets there are no messages, and ``meets`` says where they are among those that do.
    """

    messages: slice
    posts: Numbers
    repeats: bool = False
    in_turn: bool = False
    meets: Numbers | None = None


class Waves:
    """The messages between posts, in the order in which they pass, and the waves in which they do.

    Attributes
    ----------
    sent, received : numpy.ndarray of int64
        Each message's ends.
    ends : numpy.ndarray of int64
        The posts of each message's ends, those that send and those that receive.
    post : numpy.ndarray of int64
        Each end's post.

    Raises
    ------
    Irregular
        If messages do not match, or some ranks can never go on: where posts stand for many rounds, because these do not
        fit together, and where each stands for itself, because the schedule is wrong.
    """

    def __init__(self, posts: Posts, size: int) -> None:
        self._posts = posts
        self.post = np.repeat(np.arange(len(posts.rank)), np.diff(posts.start))
        own = posts.rank[self.post]
        pairs = np.where(posts.sends, own * size + posts.peer, posts.peer * size + own)
        ends = (np.flatnonzero(posts.sends == side) for side in (1, 0))
        # The first message from one rank to another is the first that this one receives from it, and so on.
        self.sent, self.received = (found[np.argsort(pairs[found], kind="stable")] for found in ends)
        for same in (pairs, posts.chunks, posts.times[self.post]):
            if not np.array_equal(same[self.sent], same[self.received]):
                raise Irregular
        self._message = np.empty(len(self.post), np.int64)
        self._message[self.sent] = self._message[self.received] = np.arange(len(self.sent))
        self.ends = np.stack([self.post[self.sent], self.post[self.received]])
        self._special = (posts.times > 1) | (posts.in_turn > 0)
        self._special[posts.meeting.posts] = True
        self._missing = np.diff(posts.start)
        self._posted = np.zeros(len(posts.rank), np.bool_)
        self._mark, self._seen = np.empty(len(posts.rank), np.int64), np.empty(len(self.sent), np.int64)
        self._done = np.zeros(len(posts.rank), np.bool_)
        self._passed: list[Numbers] = [np.empty(0, np.int64)]
        self._passing = 0
        self.waves = list(self._walk())
        if not self._done.all():
            raise Irregular
        # So what is known of the messages of a wave lies together; it is needed for every length.
        order = np.concatenate(self._passed)
        self.sent, self.received, self.ends = self.sent[order], self.received[order], self.ends[:, order]

    def _walk(self) -> Iterator[Wave]:
        new = np.flatnonzero(np.append(1, self._posts.last)[:-1])
        held = new[:0]
        while True:
            while len(new):
                self._posted[new] = True
                held = np.concatenate([held, new[self._special[new]]])
                messages = self._messages(new)
                ends = self.ends[:, messages]
                passing = self._posted[ends].all(axis=0) & ~self._special[ends].any(axis=0)
                messages = _once(messages[passing], self._seen)
                done = self._pass(messages)
                if len(messages):
                    yield Wave(self._numbered(messages), done)
                new = self._finish(done)
            found = self._meet(held) or self._repeat(held) or self._turns(held)
            if found is None:
                return
            yield found
            new = self._finish(found.posts)
            held = held[~self._done[held]]

    def _numbered(self, messages: Numbers) -> slice:
        """Return where messages will be that pass next."""
        first = self._passing
        self._passing += len(messages)
        self._passed.append(messages)
        return slice(first, self._passing)

    def _messages(self, posts: Numbers) -> Numbers:
        """Return the messages of posts."""
        start = self._posts.start
        widths = start[posts + 1] - start[posts]
        ends = np.arange(widths.sum()) + np.repeat(start[posts] - np.cumsum(widths) + widths, widths)
        messages: Numbers = self._message[ends]
        return messages

    def _pass(self, messages: Numbers) -> Numbers:
        """Let messages pass, and return the posts that are done with them."""
        posts = self.ends[:, messages].ravel()
        np.subtract.at(self._missing, posts, 1)
        return _once(posts[self._missing[posts] == 0], self._mark)

    def _finish(self, posts: Numbers) -> Numbers:
        """Finish posts, and return those that follow."""
        self._done[posts] = True
        following: Numbers = posts[self._posts.last[posts] == 0] + 1
        return following

    def _meet(self, held: Numbers) -> Wave | None:
        """Find sets all of whose ranks have come to meet the others."""
        meeting = self._posts.meeting
        here = np.flatnonzero(np.isin(meeting.posts, held))
        sets = meeting.sets[here]
        here = here[np.bincount(sets)[sets] == meeting.sizes[here]] if len(here) else here
        return Wave(slice(0), meeting.posts[here], meets=here) if len(here) else None

    def _repeat(self, held: Numbers) -> Wave | None:
        """Find posts that are repeated as often as all those that they exchange messages with."""
        posts = held[self._posts.times[held] > 1]
        posts = posts[self._posts.times[posts] == self._posts.times[posts].min(initial=2**62)]
        while len(posts):
            messages = self._messages(posts)
            outside = ~np.isin(self.ends[:, messages], posts)
            if not outside.any():
                return Wave(self._numbered(_once(messages, self._seen)), posts, repeats=True)
            posts = np.setdiff1d(posts, self.ends[:, messages[outside.any(axis=0)]])
        return None

    def _turns(self, held: Numbers) -> Wave | None:
        """Find a rank all of whose peers have come to the round in which its turn with them is."""
        for post in held[self._posts.in_turn[held] > 0]:
            messages = self._message[self._posts.start[post] : self._posts.start[post + 1]]
            ends = self.ends[:, messages]
            peers = ends[ends != post]
            if self._posted[peers].all() and not self._special[peers].any():
                return Wave(self._numbered(messages), self._pass(messages), in_turn=True)
        return None


def _once(numbers: Numbers, mark: Numbers) -> Numbers:
    """Return each number once; ``mark`` has room at each of them."""
    places = np.arange(len(numbers))
    mark[numbers] = places
    once: Numbers = numbers[mark[numbers] == places]
    return once
