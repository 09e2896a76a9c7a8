"""How a rank that fails ends the job, so that nobody waits for it.

An error that nobody has caught, in whichever thread, prints the rank and the traceback, and ends all processes of the
job. So does SIGTERM, unless the program has a handler of its own. So does the end of the launcher.
``MPIAGG_ABORT=0`` leaves all that to the program. On SIGUSR2 a process writes down what it has done, and goes on.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType, TracebackType
from typing import Final

from mpiagg.errors import Error
from mpiagg.watch.dumps import write
from mpiagg.watch.forks import forget_in_children
from mpiagg.watch.recorder import SUBJECT, Recorder
from mpiagg.watch.stacks import is_ours, stack

ABORT: Final = "MPIAGG_ABORT"
"""The environment variable that is 0 where the program handles its errors itself."""

LAST_WORDS: Final = 0.2
"""Seconds that the launcher is given to read what a process has said at its end: what it has not read, it drops."""

LOOK: Final = 0.5
"""Seconds between two looks at whether others have taken handlers of signals away."""

_LOOKED: Final = b"\0"
"""What the thread that hears of signals is sent by this process itself; no signal has this number."""

LAST_RESORT: Final = 5.0
"""Seconds after which a process ends without the MPI library's help."""


_TRACEBACK: Final = "Traceback (most recent call last):\n"


class Ending:
    """What a rank does when it ends before its time.

    Parameters
    ----------
    recorder : Recorder
        What it has done.
    rank, size : int
        This process, of all of the job.
    abort : callable
        Ends all processes of the job; called with an exit status.
    launcher : int
        The id of the process that has started it, if that is known, and else 0.
    """

    def __init__(
        self, recorder: Recorder, rank: int, size: int, abort: Callable[[int], object], launcher: int = 0
    ) -> None:
        self.recorder, self.rank, self.size, self._abort, self._launcher = recorder, rank, size, abort, launcher
        self._begun = threading.Lock()
        self._ends = 0
        self._handlers: dict[int, Callable[[int, FrameType | None], None]] = {
            signal.SIGTERM: self._terminated,
            signal.SIGUSR2: self._asked,
        }
        self._hooks = sys.excepthook, threading.excepthook
        self._sockets: tuple[socket.socket, ...] = ()
        self._restore = _CALLED_BY_PYTHON(lambda _: self._take_signals())
        self._taken = threading.Event()
        self._taken.set()
        self._looked = threading.Event()

    def install(self) -> None:
        """Be there for errors that nobody catches, and for signals."""
        if os.environ.get(ABORT) == "0" or hasattr(sys, "ps1") or sys.flags.interactive:
            return
        self._hooks = sys.excepthook, threading.excepthook
        sys.excepthook, threading.excepthook = self._uncaught, self._uncaught_in_thread
        forget_in_children(self._forget)
        self._outlive_no_launcher()
        if threading.current_thread() is not threading.main_thread():
            return
        self._handlers = {number: each for number, each in self._handlers.items() if _is_free(number)}
        self._take_signals()
        self._listen_to_signals()

    def _forget(self) -> None:
        """Reset after a fork: this process is no rank, and shares the sockets of the one it was forked from."""
        sys.excepthook, threading.excepthook = self._hooks
        if self._sockets:
            signal.set_wakeup_fd(-1)
        for number in self._handlers:
            if self._is_ours(number):
                signal.signal(number, signal.SIG_DFL)
        for each in self._sockets:
            each.close()
        self._sockets = ()

    def leave(self) -> None:
        """Say to who asks that the program is at its end."""
        self.recorder.status = "has left: its program is at its end"

    def dump(self, reason: str, *, beside: bool = False) -> str:
        """Write down what this process has done, ``beside`` what it has written before; return in words where."""
        path = write(self.recorder, self.rank, self.size, reason, beside=beside)
        return f"; its last operations are in {path}" if path else ""

    def give_up(self, reason: str) -> None:
        """End the job, because of what another has found out about this process."""
        self._end(reason, 1, f"  at {' < '.join(stack(outside=True))}\n")

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        hook = self._hooks[0]
        printed = None if hook is sys.__excepthook__ else partial(hook, kind, error, trace)
        lines = "" if printed else _traced(kind, error, trace)
        self._end(f"raised {_described(error)}", 1, lines, printed)

    def _uncaught_in_thread(self, args: threading.ExceptHookArgs) -> None:
        if args.exc_type is SystemExit:
            return
        name = args.thread.name if args.thread else "a thread"
        lines = _traced(args.exc_type, args.exc_value, args.exc_traceback)
        self._end(f"raised, in {name}, {_described(args.exc_value)}", 1, lines)

    # -- signals

    def look(self) -> None:
        """Return when the thread has looked at all signals that have come, and at who has them.

        It may be late. Whoever has had signals of ours, and gives them back, is to call this before: else those that
        have come, and were handled, would be taken for new ones.
        """
        if self._sockets:
            self._looked.clear()
            with suppress(OSError):
                self._sockets[1].send(_LOOKED)
                self._looked.wait(LAST_RESORT)

    def _take_signals(self) -> int:
        """Have handlers for signals that nobody handles, and be told of them, in the main thread."""
        for number, handler in self._handlers.items():
            if _is_free(number):
                signal.signal(number, handler)
        if self._sockets and not _loop_runs():
            before = signal.set_wakeup_fd(self._sockets[1].fileno(), warn_on_full_buffer=False)
            if before not in {-1, self._sockets[1].fileno()}:  # somebody else is told, who may not be robbed of it
                signal.set_wakeup_fd(before)
        self._taken.set()
        return 0

    def _ask_main_thread(self) -> None:
        """Have the main thread take signals, when it has acted upon those that have come."""
        self._taken.clear()
        ctypes.pythonapi.Py_AddPendingCall(self._restore, None)

    def _listen_to_signals(self) -> None:
        """Have a thread hear of signals at once, even while the main thread is in a call of the MPI library's.

        Every so often the thread has the main thread take the signals that nobody handles: asyncio leaves some so, at
        the end of a loop that had handlers. So it does when a signal has come: a main thread that can do that has acted
        upon it by itself, as whoever had it then wanted.
        """
        ours, theirs = self._sockets = socket.socketpair()
        theirs.setblocking(False)
        ours.settimeout(LOOK)
        self._take_signals()

        def listen() -> None:
            while True:
                try:
                    (number,) = ours.recv(1)
                except TimeoutError:
                    if self._taken.is_set():  # the main thread may be in C for long
                        self._ask_main_thread()
                    continue
                except (OSError, ValueError):  # it is closed
                    return
                if number == _LOOKED[0]:
                    self._looked.set()
                elif number in self._handlers and self._is_ours(number):
                    self._ask_main_thread()
                    if not self._taken.wait(LOOK):
                        self._handlers[number](number, None)

        threading.Thread(target=listen, name="mpiagg signals", daemon=True).start()

    def _is_ours(self, number: int) -> bool:
        current: object = signal.getsignal(number)
        return current == self._handlers[number]

    def _asked(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.dump("signal SIGUSR2")

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        # A thread says so, without a frame, where the main thread is in a call of the MPI library.
        calls = frame is not None or any(entry[SUBJECT].unleavable for entry in self.recorder.running)
        where = stack(outside=calls) or stack()
        self._end("received SIGTERM", 128 + number, f"  at {' < '.join(where)}\n")

    # -- the launcher

    def _outlive_no_launcher(self) -> None:
        """Have a thread wait for the launcher's end: the ranks of Open MPI's go on for ever without it."""
        try:
            there = os.pidfd_open(self._launcher) if self._launcher else -1
        except (AttributeError, OSError):  # not Linux, or an old one
            return
        if there < 0:
            return

        def wait() -> None:
            over = select.poll()
            over.register(there, select.POLLIN)
            over.poll()
            self._abort = os._exit  # nobody is left to end the others, who find out by themselves
            self._end(f"lost its launcher: process {self._launcher} has ended", 1, f"  at {' < '.join(stack())}\n")

        threading.Thread(target=wait, name="mpiagg launcher", daemon=True).start()

    # -- the end

    def _end(self, reason: str, status: int, trace: str, more: Callable[[], object] | None = None) -> None:
        """Say why, once, and end the job; ``more`` is called when that is said."""
        if not self._begun.acquire(blocking=False):
            if self._ends != threading.get_ident():
                time.sleep(2 * LAST_RESORT)  # another thread is at it
            return
        self._ends = threading.get_ident()
        with suppress(Exception):
            # A thread that needs neither Python nor MPI, should one of them hang.
            faulthandler.dump_traceback_later(LAST_RESORT, exit=True)
        try:
            self.recorder.status = reason
            kept = ""
            with suppress(Exception):
                kept = self.dump(reason)
            told = f"mpiagg: rank {self.rank} of {self.size}, on {socket.gethostname()}, {reason}{kept}"
            for act in (lambda: _write(f"{told}\n{trace}"), more or _nothing, _write_kept, sys.stdout.flush):
                with suppress(Exception):
                    act()
            time.sleep(LAST_WORDS)
        finally:
            self._abort(status)


_CALLED_BY_PYTHON: Final = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
"""A function that Python calls in the main thread, where alone handlers of signals can be set."""


def _loop_runs() -> bool:
    """Whether a loop of asyncio's runs in this thread, which may be told of signals."""
    running = getattr(sys.modules.get("asyncio"), "_get_running_loop", None)  # None while it is being imported, too
    return running is not None and running() is not None


def _is_free(number: int) -> bool:
    return signal.getsignal(number) is signal.SIG_DFL


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _write_kept() -> None:
    """Write what was written to memory: the hook of torch.distributed, which calls ours, prints that after us only."""
    kept = getattr(sys.stderr, "getvalue", None)
    if kept is not None and sys.__stderr__ is not None:
        sys.__stderr__.write(kept())
        sys.__stderr__.flush()


def _nothing() -> None:
    pass


def _traced(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> str:
    """Return a traceback; of an error of ours, whose words were printed before, only the lines of the program."""
    told = traceback.TracebackException(kind, error, trace)  # type: ignore[arg-type]  # None prints, too
    if not isinstance(error, Error) or told.__cause__ or (told.__context__ and not error.__suppress_context__):
        return "".join(told.format())
    outside = [place for place in told.stack if not is_ours(place.filename)]
    return "".join([_TRACEBACK, *traceback.StackSummary.from_list(outside or told.stack).format()])


def _described(error: BaseException | None) -> str:
    """Return the kind of an error, and what it says, if it says anything."""
    said = ""
    with suppress(Exception):  # it may be the error that cannot say what it is
        said = str(error or "")
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
