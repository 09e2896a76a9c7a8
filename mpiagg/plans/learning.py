"""Calls that are tried by different algorithms, where a communicator learns: each is right, and one of them stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np

from mpiagg.arrays import HOST, Array, Device
from mpiagg.plans import calls
from mpiagg.plans.call import Call
from mpiagg.plans.choices import pick
from mpiagg.plans.operation import Operation
from mpiagg.tables import Case, Choice
from mpiagg.transport import DEFAULT_TIMEOUT, NOWHERE, Channel


def choose(channel: Channel, case: Case, device: Device) -> tuple[Choice, Case | None]:
    """Return what blocking calls of a case take, and the case again, if such calls may be tried here."""
    learner = channel.learner
    if learner is None or device is not HOST:
        return pick("auto", None, case, device=device), None
    return learner.chosen(case), case


def resolve(channel: Channel, operation: Operation, x: Array | None, out: Array | None, *, quiet: bool = False) -> Call:
    """Return the call of an operation, as :func:`mpiagg.plans.calls.resolve` does; of one that is tried, all trials."""
    case, learner = operation.tried, channel.learner
    if case is None or learner is None or not learner.learns(case, leased=channel.memory.host.leased):
        return calls.resolve(channel, operation, x, out, quiet=quiet)
    return _Learning(channel, operation, quiet=quiet)


class _Learning(Call):
    """A call that takes another choice each time, until the fastest is known.

    All ranks come together before it, say whether their arrays lie in registered memory, and start at about the same
    moment. What counts is the time of the rank that took longest.
    """

    def __init__(self, channel: Channel, operation: Operation, *, quiet: bool) -> None:
        super().__init__(channel, operation, quiet=quiet)
        self._trials: dict[Choice, Call] = {}
        self._running = False
        # The choice may have been another when another rank resolved this.
        self._words = replace(operation, choice=Choice("auto")).description

    @property
    def nbytes(self) -> int:
        """The memory that belongs to it alone."""
        return sum(call.nbytes for call in self._trials.values())

    def run(self, x: Array | None, out: Array | None, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Carry the operation out; see :meth:`Call.run`."""
        channel, o = self.channel, self.operation
        learner, case = channel.learner, o.tried
        assert learner is not None  # or else it would not have been made
        assert case is not None
        told = channel.gather(bytes([self._are_registered(x, out)]), self._words)
        kind = learner.kind(case, registered=all(map(any, told)))
        choice = learner.choice(kind, case)
        call = self._trials.get(choice)
        if call is None:
            operation = replace(o, choice=choice, tried=None)
            call = self._trials[choice] = calls.resolve(channel, operation, x, out, quiet=self.quiet)
        start = perf_counter()
        self._running = True
        try:
            call.run(x, out, timeout)
        finally:
            self._running = False
        learner.note(kind, perf_counter() - start, self._longest)
        if not learner.learns(case, leased=channel.memory.host.leased):
            calls_like_it = learner.kind(case, registered=False)
            for key, kept in list(channel.calls.items()):
                other = kept.operation.tried if isinstance(kept, _Learning) else None
                if other is not None and learner.kind(other, registered=False) == calls_like_it:
                    channel.calls.forget(key).free()  # the next one like it is resolved by what was learned

    def _are_registered(self, *arrays: Array | None) -> bool:
        memory = self.channel.memory.host
        return memory.leased and all(memory.position(each) != NOWHERE for each in arrays if each is not None)

    def _longest(self, seconds: Sequence[float]) -> list[float]:
        """Return the longest times of all ranks."""
        told = self.channel.gather(np.array(seconds).tobytes(), "agree on what calls took")
        longest: list[float] = np.max([np.frombuffer(each) for each in told], axis=0).tolist()
        return longest

    def free(self) -> None:
        """Free what it has tried, but leave that to who runs it while one of them runs: it may have taken all room."""
        self.once = self.once or self._running
        while self._trials and not self._running:
            self._trials.popitem()[1].free()
