"""Plans: a schedule bound to a buffer and a communicator, ready to run again and again.

Binding has sliced the buffer, initialised a persistent request for every message and allocated scratch. Running
costs a start and a test a message and a ufunc call a reduction, and allocates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Final, Generic, Protocol, TypeVar

from mpi4py import MPI

from mpiagg.arrays import Stream
from mpiagg.errors import Error, PlanError
from mpiagg.plans.compiled import TRIES, Waiting, compile_rounds
from mpiagg.plans.program import Arrival, BoundRound, Computing, Interleaved, Program, Wait, run, run_in
from mpiagg.transport import CORE, DEFAULT_TIMEOUT, Channel, keep_for_good, process, wait_patiently
from mpiagg.watch import END, STAMPS, Entry, Subject, clock, done, failed

SPINS: Final = 500
"""How often a call tries a barrier before it starts to yield a core that nobody else wants: as long as a segment
takes. For messages it yields at once: that costs nothing where nobody else wants the core, and whoever carries the
messages may want it."""

Result = TypeVar("Result")


class Testable(Protocol):
    """Something under way that goes on when it is tested."""

    def test(self) -> bool:
        """Go as far as possible without waiting, and return whether it is done."""


class Plan(Generic[Result]):
    """A collective that is bound to its arrays, to be run any number of times.

    Plans are made by the ``..._init`` functions, such as :func:`mpiagg.allreduce_init`, and by
    :meth:`mpiagg.Aggregation.aggregate_init`, all of which are collective; a program does not call this class itself.
    Running a plan is collective too: it carries the operation out on the values that the input has then, and returns
    the output, which is the same array each time. A plan is called, or started, tested and waited for. It is freed
    explicitly, or by leaving its ``with`` block.

    Parameters
    ----------
    channel : Channel
        Where its messages travel.
    program : Program
        What it runs; from :func:`mpiagg.plans.binding.bind`.
    result : object
        What running the plan returns.
    label : str
        What the plan is, for messages to people.
    subject : Subject, optional
        What it is, for those who watch over it.
    in_order : bool
        Whether all ranks start it in one order with what else they start so.

    Attributes
    ----------
    timeout : float
        Seconds that a wait may last without any message completing.

    Examples
    --------
    >>> x = np.zeros(3)
    >>> plan = mpiagg.allreduce_init(x, op="max")
    >>> x[:] = rank
    >>> plan().tolist() == [size - 1] * 3
    True

    Some computing, while it runs:

    >>> plan.start()
    >>> squares = np.arange(5) ** 2
    >>> plan.wait().tolist() == [size - 1] * 3
    True
    >>> plan.free()
    """

    subject: Subject
    """What it is, for those who watch over it; who lets it do several things says before a run which it does."""

    lasts = False
    """Whether it can be used when its communicator is freed, as MPI's requests can."""

    by_messages = False
    """Whether it is known to need none of the memory that the ranks of a node share."""

    def __init__(
        self,
        channel: Channel,
        program: Program,
        *,
        result: Result,
        label: str,
        subject: Subject | None = None,
        in_order: bool = False,
    ) -> None:
        self.label = label
        self.result = result
        self.nbytes = program.nbytes
        self.sent_bytes = program.sent_bytes
        self.timeout = DEFAULT_TIMEOUT
        self._channel = channel
        self._releases = program.releases
        self._rounds = program.rounds
        # What a plan asks of a device goes to a stream of its own, whichever thread brings the plan forward.
        self._stream = None if program.device is None else program.device.stream()
        if self._stream is not None:
            self._stream.follow()  # what has been done so far to memory of the program's own
            self._rounds += (BoundRound((), (self._stream.done,), (), (Computing(label),)),)
        self.subject = Subject(channel.log, label) if subject is None else subject
        self._is_called = in_order
        channel.log.in_order &= in_order
        self._begin = process().recorder.begin
        self._entry: Entry = []
        if process().recorder.rounds:
            self._rounds = tuple(self._marked(self._rounds))
        # Where others want the core, whoever tries again and again only keeps them from coming.
        crowded = channel.node.crowded
        self._spins = 0 if crowded else SPINS
        self._run = compile_rounds(self._rounds, tries=1 if crowded else TRIES)
        if self._stream is not None:
            self._run = partial(_run_in, self._stream, self._run)
        # Whether it can be started: not while it runs, nor after an error in the middle, nor when it is freed.
        self._idle = True
        self._running: Iterator[Wait] | None = None
        self._awaited: Wait | Interleaved | None = None
        self._freed = False
        channel.open[id(self)] = self

    # -- running

    def __call__(self) -> Result:
        """Run the plan from start to end.

        Returns
        -------
        object
            The plan's result; for the ``..._init`` functions of arrays, the output array.

        Raises
        ------
        PlanError
            If the plan is freed, or runs already, or another thread is in a blocking operation of the communicator.
        StallError
            If a message does not complete within the timeout.
        """
        if not self._idle:
            raise self._refused()
        entry = self._entry = self._begin(self.subject, True)
        self._idle = False
        try:
            self._run(self)
        except BaseException as error:
            self._fail(error)
            raise
        entry[END] = clock()
        self._idle = True
        return self.result

    def start(self) -> None:
        """Bring the data in and post the first messages; ``test`` or ``wait`` for the rest.

        Raises
        ------
        PlanError
            If the plan is freed, or runs already.
        """
        if not self._idle:
            raise self._refused()
        self._idle = False
        self._entry = self._begin(self.subject, False)
        self._running = run(self._rounds) if self._stream is None else run_in(self._stream, self._rounds)
        self.test()

    def test(self) -> bool:
        """Go as far as possible without waiting, and return whether the plan is done.

        Returns
        -------
        bool
            True if its result is there.

        Raises
        ------
        PlanError
            If the plan is freed, or an error has left it in the middle.
        """
        if self._idle:
            return True
        if self._running is None:
            raise self._unusable()
        try:
            self._awaited = next(self._running, None)
        except BaseException as error:
            self._fail(error)
            raise
        if self._awaited is not None:
            return False
        self._running = None
        done(self._entry)
        self._idle = True
        return True

    def wait(self, meanwhile: Sequence[Testable] = ()) -> Result:
        """Wait until the plan is done and return its result.

        Parameters
        ----------
        meanwhile : sequence of Plan
            Other started plans, or what has ``test()`` as they do, which are brought forward while this one waits.

        Returns
        -------
        object
            The plan's result; for the ``..._init`` functions of arrays, the output array.

        Raises
        ------
        PlanError
            If the plan is freed, or an error has left it in the middle.
        StallError
            If a message does not complete within the timeout. The plan runs on: ``wait()`` can be called again.
        """

        def test() -> bool:
            for plan in meanwhile:
                plan.test()
            return self.test()

        if not test():
            self._wait_progressing(test)
        return self.result

    def wait_for(self, test: Callable[[], bool], awaited: Wait | Interleaved) -> None:
        """Wait within a run, as rounds do, until a test succeeds.

        Parameters
        ----------
        test : callable
            Returns whether it is over.
        awaited : Wait
            What that is for.
        """
        self._awaited = awaited
        if not isinstance(awaited.now, Arrival):
            self._wait(test)
            return
        for _ in range(0 if CORE.shared else self._spins):
            if test():
                return
        self._wait_progressing(test)

    def _wait_progressing(self, test: Callable[[], bool]) -> None:
        """Wait, and let the MPI library bring forward what the program has started, as it does in its own waits.

        Tests of messages do so. Those of ranks that come in shared memory do not, while the one that is to come may
        wait for what this rank has sent.
        """
        probe = (self._channel.comm or MPI.COMM_SELF).Iprobe  # a persistent request outlives its communicator

        def progressing() -> bool:
            if test():
                return True
            if isinstance(self._awaited_now(), Arrival):
                probe()
            return False

        self._wait(progressing)

    def _wait(self, test: Callable[[], bool]) -> None:
        wait_patiently(test, self._awaited_now, self.timeout, subject=self.subject)

    def _fail(self, error: BaseException) -> None:
        """Be unusable from now on: messages may be under way. Without any, it can simply run again.

        An error that comes of the death of a rank is raised as what it is.
        """
        self._running = None
        failed(self._entry)
        self._idle = not any(a_round.tests for a_round in self._rounds)
        self._channel.failures.raise_for(error)

    def _marked(self, rounds: Sequence[BoundRound]) -> Iterator[BoundRound]:
        """Yield the rounds with the clock read when they begin, have started, have come to reducing, and have ended."""

        def mark() -> None:
            stamps.append(clock())

        stamps: list[int] = []

        def begin() -> None:
            nonlocal stamps
            stamps = self._entry[STAMPS] = []

        yield BoundRound((begin,), (), (), ())
        names = []
        for place, (starts, tests, reductions, awaited) in enumerate(rounds):
            if tests:
                names.append(_name_of(awaited[0]))
            else:
                names.append("packing" if place in (0, len(rounds) - 1) else "round without messages")
            yield BoundRound((mark, *starts, mark), tests, (mark, *reductions, mark), awaited)
        self.subject.rounds = tuple(names)

    def _awaited_now(self) -> Wait | None:
        return self._awaited.now if self._awaited is not None else None

    def _refused(self) -> Error:
        """Return why the plan cannot run; on other ranks it may, so that it counts as an operation all the same.

        Raises
        ------
        PlanError
            If another thread is in an operation of the communicator, which may be this plan.
        """
        self._channel.log.check_thread()
        failed(self._begin(self.subject, False))
        return self._unusable()

    def _unusable(self) -> Error:
        """Return why the plan cannot run."""
        broken = self._channel.failures.broken and not self._freed
        return self._channel.failures.give_up() if broken else self._in_use()

    def _in_use(self) -> PlanError:
        if self._freed:
            return PlanError(f"{self.label}: the plan is freed")
        if self._running is None:
            what = "an earlier call on this communicator" if self._is_called else "the plan"
            return PlanError(f"{self.label}: an error has left {what} in the middle of its run")
        return PlanError(f"{self.label}: the plan is running; wait for it first")

    # -- giving back

    @property
    def running(self) -> bool:
        """Whether the plan is running, or an error has left it in the middle."""
        return not self._idle and not self._freed

    @property
    def freed(self) -> bool:
        """Whether the plan is freed."""
        return self._freed

    def free(self) -> None:
        """Give back the plan's requests, and its part of shared memory; a second call does nothing.

        Raises
        ------
        PlanError
            If the plan is running.
        """
        if self._freed:
            return
        if not self._idle:
            if not self._channel.failures.broken:
                raise self._in_use()
            keep_for_good(self._rounds)  # messages to the dead, which may never end
            self._releases, self._running = (), None
        self._freed = True
        self._idle, self._rounds, self._run = False, (), _nothing
        releases, self._releases = self._releases, ()
        for release in releases:
            release()
        self._channel.open.pop(id(self), None)

    def __enter__(self) -> Plan[Result]:
        """Return the plan."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Free the plan, unless an error left it running."""
        if self._idle or error is None:
            self.free()


def _run_in(stream: Stream, line: Callable[[Waiting], None], waiting: Waiting) -> None:
    """Run a compiled program; what it asks of a device goes to a stream, after all that came before."""
    stream.follow()
    with stream:
        line(waiting)


def _name_of(awaited: Wait | Interleaved) -> str:
    if isinstance(awaited, Computing):
        return awaited.who
    return f"round {'of several lanes' if isinstance(awaited, Interleaved) else awaited.round}"


def _nothing(waiting: Waiting) -> None:
    """Take the place of what a freed plan ran, and let go of its memory."""
