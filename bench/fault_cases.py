"""The faults that bench/faults.py brings about: how each is made, and what is expected of the ranks then.

Nothing here starts a job or knows MPI; bench/fault_rank.py does on each rank what a case says.
"""

from __future__ import annotations

from collections.abc import Iterator
from signal import SIGCONT, SIGINT, SIGKILL, SIGSTOP, SIGTERM
from typing import Final, Literal, NamedTuple

ODD: Final = 1
"""The rank that does what the others do not."""

By = Literal["at once", "warning", "return", "deadline"]
"""When it must be over: at once; once ranks have looked for why they wait; soon after a late rank has come; when no
wait may last on."""

Speakers = Literal["all", "others", "odd", "some"]
"""Which ranks say what is wrong."""

RIGHT, WRONG = "right", "wrong"


class Expected(NamedTuple):
    """What must come of a fault.

    Attributes
    ----------
    how : {"error", "end", "go on"}
        The speakers have an error of one of the kinds; the job ends before that with a word from the speakers; or all
        ranks go on, with right results.
    by : str
        When it must be over.
    words : str
        A regular expression: what the error, the last words or the warning must say.
    kinds : tuple of str
        The classes of the error.
    speakers : {"all", "others", "odd", "some"}
        Who has to say it.
    """

    how: Literal["error", "end", "go on"]
    by: By
    words: str = ""
    kinds: tuple[str, ...] = ()
    speakers: Speakers = "all"

    def description(self) -> str:
        """Return what is expected, for those who read the table."""
        who = {"all": "all ranks", "others": "the others", "odd": f"rank {ODD}", "some": "a rank"}[self.speakers]
        when = {
            "at once": "at once",
            "warning": "at the warning",
            "return": "when it has come",
            "deadline": "by the deadline",
        }[self.by]
        if self.how == "error":
            return f"{' or '.join(self.kinds)} on {who}, {when}"
        if self.how == "end":
            return f"the job ends {when}{f'; {who} says why' if self.words else ''}"
        return f"goes on {when}, with right results{'; warned of' if self.words else ''}"


class Case(NamedTuple):
    """A fault, and a way in which it comes.

    Attributes
    ----------
    fault, way : str
        What goes wrong, and in which call or state.
    expected : Expected
    signals : tuple
        What is sent to the odd rank: by how many warnings' times after it has said that it is there, and what.
    launch : {"mpiexec", "alone", "other"}
        Started by the library's mpiexec, as so many processes that srun seems to have started, or by the mpiexec of
        another library.
    little_shm : bool
        Whether the job has a /dev/shm of its own that can be filled.
    """

    fault: str
    way: str
    expected: Expected
    signals: tuple[tuple[float, int], ...] = ()
    launch: Literal["mpiexec", "alone", "other"] = "mpiexec"
    little_shm: bool = False

    @property
    def name(self) -> str:
        """The name by which it is chosen."""
        return f"{self.fault}: {self.way}"


_ODD: Final = rf"\branks? [\d, ]*\b{ODD}\b"
"""Words that name the odd rank, alone or with others."""

BEFORE_THE_FIRST: Final = "the first call"
AFTER_THE_FIRST: Final = "after the first call"
"""The way in which a fault comes before the ranks have had to do with each other."""

MAKING: Final = "the making of a Comm"
"""The way in which a fault comes while ranks that know each other make another communicator."""

FREEING: Final = "the freeing of a Comm"
"""The way in which a fault comes while ranks free a communicator, and the memory that they share on it."""

RUN, ALIKE, SYNC = "the run of a plan", "runs of plans alike", "DDP.sync_gradients"
"""Ways in which plans are there already, one of 100 numbers, one of 200 and another such, or a DDP."""

CALLS: Final = ("short", "long", "nonblocking", "Comm", "check=True", "plan")
"""Short arrays meet at barriers, and long ones go by messages; ``nonblocking`` and ``Comm`` are as in mpi4py."""

PURPOSES: Final = ("Split, check=True", "Dup, a plan", "Free, check=True")
"""What the odd rank does, and what the others do."""

MISMATCHES: Final = ("shape", "dtype", "op", "root", "algorithm", "collective", "order")

_IN_MPI: Final[dict[str, Speakers]] = {"dtype": "others", "collective": "others", "root": "some"}
"""Who says what is wrong with a call that ranks may make by the MPI library: not those that cannot leave it."""

_COMPARED: Final = ("check=True", "plan")
"""Where ranks compare what they are about to do before they do it."""

_SIGNALS: Final = {"SIGINT": SIGINT, "SIGTERM": SIGTERM, "SIGKILL": SIGKILL}
_STATES: Final = ("computing", "waiting", "in MPI_Allreduce")

CROWDS: Final = ("idle", "talk")
"""What unauthenticated peers do who take all places at the ranks' ports, while one rank never comes."""

IN_CALLS: Final = "in short calls"
"""The way in which a fault comes while ranks make one call after the other, in shared memory."""


def cases() -> Iterator[Case]:
    """Yield all cases."""
    yield from _stalls()
    yield from _mismatches()
    yield from _errors()
    yield from _signals()
    yield from _bad_data()
    yield from _surroundings()
    # Whoever is refused may call when the other thread is done.
    for way in ("short", "long", "Comm", "check=True", RUN):
        yield Case("second thread", way, Expected("go on", "at once", "PlanError: .*thread"))


def _stalls() -> Iterator[Case]:
    late = rf"rank {ODD}: has not come"
    for way in (*CALLS, RUN, SYNC, MAKING, FREEING):
        yield Case("missing", way, Expected("error", "deadline", late, ("StallError",), "others"))
    # Before that, the ranks do not know where to ask each other.
    yield Case("missing", BEFORE_THE_FIRST, Expected("error", "deadline", "in vain", ("StallError",), "others"))
    yield Case("missing", "native", Expected("end", "deadline", r"waited .* in vain", speakers="some"))
    for way in ("check=True", BEFORE_THE_FIRST):
        yield Case("given up", way, Expected("go on", "at once", r"StallError: waited [\d.]+ s in vain"))
    for way in (*CALLS, RUN, SYNC, MAKING, FREEING, "native"):
        yield Case("late", way, Expected("go on", "return", late))
    yield Case("late", BEFORE_THE_FIRST, Expected("go on", "return", "has waited"))
    # Who is asked among all those connections says all the same where it is.
    for way in CROWDS:
        yield Case("unauthenticated connections", way, Expected("error", "deadline", late, ("StallError",), "others"))


def _mismatches() -> Iterator[Case]:
    for fault in MISMATCHES:
        for way in CALLS:
            if fault == "algorithm" and way in {"nonblocking", "Comm"}:
                continue  # MPI has no name for it
            by: By = "at once" if way in _COMPARED else "warning"
            speakers: Speakers = "all"
            if way in {"short", "Comm"}:
                speakers = _IN_MPI.get(fault, "all")
                by = "deadline" if speakers == "some" else by
            yield Case(fault, way, Expected("error", by, _ODD, ("MismatchError",), speakers))
    yield Case("algorithm", "MPIAGG_ALGORITHM", Expected("error", "at once", _ODD, ("MismatchError",)))
    yield Case("shape", "DDP", Expected("error", "at once", _ODD, ("MismatchError",)))
    yield Case("order", "DDP", Expected("error", "at once", _ODD, ("MismatchError",)))
    yield Case("shape", "aggregate", Expected("error", "at once", _ODD, ("MismatchError",)))
    yield Case("order", RUN, Expected("error", "warning", _ODD, ("MismatchError",)))
    # In words they are the same; so all that can be said is that nobody makes progress.
    yield Case("order", ALIKE, Expected("error", "deadline", "", ("StallError", "MismatchError")))

    # What the ranks come together for, before anything else, is not the same.
    for way in PURPOSES:
        yield Case("purpose", way, Expected("error", "at once", _ODD, ("MismatchError",)))


def _errors() -> Iterator[Case]:
    said = rf"rank {ODD} of \d+, on \S+, raised "
    raised = Expected("end", "at once", said + "RuntimeError: on purpose", speakers="odd")
    yield Case("exception", f"before {BEFORE_THE_FIRST}", Expected("end", "at once", "RuntimeError", speakers="odd"))
    yield Case("exception", "before a call", raised)
    yield Case(
        "exception",
        "in a call, by NumPy",
        Expected("end", "at once", said + "FloatingPointError", speakers="odd"),
    )
    # mpi4py prints it and aborts: MPI has called it, and cannot take an exception.
    in_operator = Expected("end", "at once", "RuntimeError: on purpose", speakers="odd")
    yield Case("exception", "in a call, in an operator of the user's", in_operator)
    yield Case("exception", "while a nonblocking call is under way", raised)
    yield Case("exception", "after a call", raised)
    in_thread = rf"rank {ODD} of \d+, on \S+, raised.* Thread-\d"
    yield Case("exception", "in a thread", Expected("end", "at once", in_thread, speakers="odd"))
    yield Case("out of memory", "np.ones", Expected("end", "at once", said + r"\w*MemoryError", speakers="odd"))
    left = rf"rank {ODD} (has left|is gone)"
    yield Case("sys.exit(0)", "before a call", Expected("error", "warning", left, ("StallError",), "others"))
    yield Case("sys.exit(3)", "before a call", Expected("error", "warning", left, ("StallError",), "others"))


def _signals() -> Iterator[Case]:
    words = {
        "SIGINT": rf"rank {ODD} of \d+, on \S+, raised KeyboardInterrupt",
        "SIGTERM": rf"rank {ODD} of \d+, on \S+, received SIGTERM",
        "SIGKILL": "",
    }
    for name, number in _SIGNALS.items():
        for state in _STATES:
            expected = Expected("end", "at once", words[name], speakers="odd")
            if name == "SIGINT" and state == _STATES[-1]:
                # Python hears of it when the MPI library returns.
                expected = Expected("end", "deadline", r"KeyboardInterrupt|waited .* in vain", speakers="odd")
            yield Case(name, state, expected, signals=((0.3, number),))
    lost = r"rank \d+ of \d+, on \S+, lost its launcher"
    for way in (IN_CALLS, *_STATES[1:]):
        yield Case("SIGKILL of the launcher", way, Expected("end", "at once", lost))
    silent = rf"rank {ODD}:? does not answer"
    stall = Expected("error", "deadline", silent, ("StallError",), "others")
    yield Case("SIGSTOP", "for ever", stall, signals=((0.3, SIGSTOP),))
    # Who asks waits 3 s for an answer.
    resumed = Expected("go on", "deadline", silent)
    yield Case("SIGSTOP", "SIGCONT before the deadline", resumed, signals=((0.3, SIGSTOP), (4.7, SIGCONT)))


def _bad_data() -> Iterator[Case]:
    yield Case("NaN", "DDP(check_finite=True)", Expected("error", "at once", _ODD, ("NonFiniteError",)))
    checkpoint = Expected("error", "at once", rf"checkpoint|rank {ODD} raised", ("ValueError", "MismatchError"))
    yield Case("truncated checkpoint", "the file of a rank", checkpoint)
    yield Case("truncated checkpoint", "the manifest", Expected("error", "at once", "checkpoint", ("ValueError",)))
    table = Expected("error", "at once", "tuning table .* not JSON", ("ValueError",))
    yield Case("truncated tuning table", "on all ranks", table)
    one = Expected("error", "at once", rf"tuning table|rank {ODD} raised", ("ValueError", "MismatchError"))
    yield Case("truncated tuning table", "on one rank", one)


def _surroundings() -> Iterator[Case]:
    shared = Expected("error", "at once", "bytes of shared memory", ("MemoryError",))
    yield Case("full /dev/shm", "mpiagg.empty", shared, little_shm=True)
    for way in ("short", "long", "plan", AFTER_THE_FIRST):
        yield Case("full /dev/shm", way, Expected("go on", "at once"), little_shm=True)
    alone = Expected("error", "at once", r"one of \d+ that .* started .*What would help", ("Error",))
    yield Case("wrong launcher", "srun for another MPI", alone, launch="alone")
    # One library's ranks see jobs of one, and the other's are ended by the library when MPI starts.
    yield Case("wrong launcher", "another library's mpiexec", Expected("end", "at once"), launch="other")
