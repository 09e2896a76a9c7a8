"""Programs: what a plan runs, round by round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from mpiagg.arrays import Accelerator, Array, Stream
from mpiagg.schedules import Action, Step
from mpiagg.transport import NodeBarrier, Some
from mpiagg.watch import describe_ranks

Callback = Callable[[], object]


class Awaited(NamedTuple):
    """What a wait is for: one message of a round."""

    label: str
    round: int
    step: Step
    nbytes: int

    def __str__(self) -> str:
        """Say it in words."""
        way = "be sent to" if self.step.action is Action.SEND else "arrive from"
        return f"{self.label}, round {self.round}: {self.nbytes} bytes to {way} rank {self.step.peer}"

    @property
    def now(self) -> Awaited:
        """What is waited for at present."""
        return self


class Arrival(NamedTuple):
    """What a wait is for: the other ranks of the node at a barrier."""

    label: str
    round: int
    barrier: NodeBarrier | Some

    def __str__(self) -> str:
        """Say it in words."""
        missing = self.barrier.missing()
        return f"{self.label}, round {self.round}: {describe_ranks(missing) if missing else 'nobody'} to come"

    @property
    def now(self) -> Arrival:
        """What is waited for at present."""
        return self


class Computing(NamedTuple):
    """What a wait is for: a device, or the MPI library's own collective."""

    label: str
    who: str = "the device"

    def __str__(self) -> str:
        """Say it in words."""
        return f"{self.label}: {self.who}"

    @property
    def now(self) -> Computing:
        """What is waited for at present."""
        return self


Wait = Awaited | Arrival | Computing
"""What a wait is for at present; as a string it says what that is."""

_BETWEEN: Final = Computing("between messages", "this rank")


class BoundRound(NamedTuple):
    """A round as it runs: what to start, what to test until it is done, what to compute then.

    ``awaited`` says of each of the ``tests`` what it waits for.
    """

    starts: tuple[Callback, ...]
    tests: tuple[Callable[[], bool], ...]
    reductions: tuple[Callback, ...]
    awaited: tuple[Wait | Interleaved, ...]


def run(rounds: Sequence[BoundRound]) -> Iterator[Wait]:
    """Run rounds one after the other; yield what is waited for whenever it has not come."""
    for starts, tests, reductions, awaited in rounds:
        for start in starts:
            start()
        for test, message in zip(tests, awaited, strict=True):
            while not test():
                yield message.now
        for reduction in reductions:
            reduction()


def run_in(stream: Stream, rounds: Sequence[BoundRound]) -> Iterator[Wait]:
    """Run rounds as :func:`run` does; what they ask of a device goes to a stream, after all that came before."""
    stream.follow()
    running = run(rounds)
    while True:
        with stream:
            awaited = next(running, None)
        if awaited is None:
            return
        yield awaited


class Interleaved:
    """Several lanes as one round: whenever one would wait, the next goes on."""

    def __init__(self, lanes: Sequence[Sequence[BoundRound]]) -> None:
        self._lanes = lanes
        self._running: list[tuple[Iterator[Wait], Wait | None]] = []

    def start(self) -> None:
        """Start all lanes."""
        self._running = [(run(lane), None) for lane in self._lanes]

    def test(self) -> bool:
        """Let all lanes go on, and return whether they are done."""
        waits = [(lane, next(lane, None)) for lane, _ in self._running]
        self._running = [(lane, awaited) for lane, awaited in waits if awaited is not None]
        return not self._running

    @property
    def now(self) -> Wait:
        """What the first unfinished lane waits for at present; another thread may ask while that changes."""
        return next((awaited for _, awaited in self._running if awaited is not None), _BETWEEN)

    def as_round(self) -> BoundRound:
        """Return the round that runs all lanes."""
        return BoundRound((self.start,), (self.test,), (), (self,))


class Deferred(Interleaved):
    """A program that is chosen, or made, when its turn has come.

    Parameters
    ----------
    choose : callable
        Returns the program, also to who runs it at once; who passes it keeps what the program must release.
    """

    def __init__(self, choose: Callable[[], Program]) -> None:
        super().__init__(())
        self.choose = choose

    def start(self) -> None:
        """Choose, and start what is chosen."""
        self._lanes = (self.choose().rounds,)
        super().start()


@dataclass(frozen=True)
class Program:
    """What a plan runs, and what belongs to it.

    Attributes
    ----------
    rounds : tuple of BoundRound
        What is run.
    releases : tuple of callables
        What frees the persistent requests in them, and whatever else goes with the plan.
    nbytes : int
        The memory that belongs to the program alone.
    sent_bytes : int
        What one run sends; 0 where the MPI library's own collective does it, which does not tell.
    device : Accelerator or None
        Where what it works on lies, if not on the host.
    """

    rounds: tuple[BoundRound, ...]
    releases: tuple[Callback, ...]
    nbytes: int
    sent_bytes: int = 0
    device: Accelerator | None = None


class Once(Deferred):
    """A program that is made when its turn has come, and given back when it is done."""

    def __init__(self, make: Callable[[], Program]) -> None:
        super().__init__(self._made)
        self._make = make
        self._releases: tuple[Callback, ...] = ()

    def _made(self) -> Program:
        program = self._make()
        self._releases = program.releases
        return program

    def test(self) -> bool:
        """Let it go on, and return whether it is done."""
        if not super().test():
            return False
        for release in self._releases:
            release()
        self._releases = self._lanes = ()
        return True


def in_turn(*parts: Program | Callable[[], object] | None) -> Program:
    """Return the program that runs programs one after the other, with calls between them; None is nothing."""
    rounds: list[BoundRound] = []
    releases: list[Callback] = []
    nbytes = sent_bytes = 0
    device: Accelerator | None = None
    for part in parts:
        if isinstance(part, Program):
            device = device or part.device
            rounds += part.rounds
            releases += part.releases
            nbytes += part.nbytes
            sent_bytes += part.sent_bytes
        elif part is not None:
            rounds.append(BoundRound((part,), (), (), ()))
    return Program(tuple(rounds), tuple(releases), nbytes, sent_bytes, device)


class Copying(NamedTuple):
    """The vector that a program works on, with what copies the input to it and the result out of it, if anything."""

    buffer: Array
    load: Callback | None
    store: Callback | None
    nbytes: int = 0
    """Those of the vector, if it belongs to the program alone."""

    def around(self, program: Program) -> Program:
        """Return a program on the vector with the copies before and after it."""
        if self.load is None and self.store is None and not self.nbytes:
            return program
        whole = in_turn(self.load, program, self.store)
        return replace(whole, nbytes=whole.nbytes + self.nbytes)
