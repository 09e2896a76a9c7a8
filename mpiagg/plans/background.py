"""A thread that brings what has been started forward while the program computes.

Plans are Python, and MPI knows nothing of their rounds: somebody must test them. The thread sleeps when there is
nothing to do. It needs an MPI library that several threads may call at once.
"""

from __future__ import annotations

import atexit
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from time import monotonic
from typing import Any, Final, Protocol

import numpy as np
from mpi4py import MPI

from mpiagg.common.once import once
from mpiagg.errors import PlanError, RankFailedError
from mpiagg.plans.plan import Plan

RUNNING_PAUSE: Final = 2e-4
"""Seconds that the thread sleeps while something runs."""

IDLE_PAUSE: Final = 1e-2
"""Seconds that it sleeps while what it drives has yet to be started, of which nobody tells it; and how long it goes on
with the short pause when nothing runs. To wake it takes longer than a short collective, and what is started is often
waited for at once."""


@cache
def threads_allowed() -> bool:
    """Whether several threads may call the MPI library at once."""
    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


class Driven(Protocol):
    """Something that the thread can bring forward."""

    def drive_if_free(self) -> bool:
        """Go on without waiting, unless another thread does so; return whether it runs."""


class Driver:
    """The thread, and what it drives."""

    def __init__(self) -> None:
        self._driven: dict[int, Driven] = {}
        self._changed = threading.Condition()
        self._stopped = self._resting = False
        self._called = True
        self._thread = threading.Thread(target=self._run, name="mpiagg", daemon=True)
        self._thread.start()
        # Registered after mpi4py's own, so called before MPI is finalised.
        atexit.register(self.stop)

    def add(self, driven: Driven) -> None:
        """Drive something from now on."""
        self._driven[id(driven)] = driven
        self.wake()

    def remove(self, driven: Driven) -> None:
        """Drive it no longer."""
        self._driven.pop(id(driven), None)

    def wake(self) -> None:
        """Look at everything soon."""
        self._called = True  # first, or it might go to rest unseen
        if self._resting:
            with self._changed:
                self._changed.notify()

    def stop(self) -> None:
        """End the thread; a second call does nothing."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        until = 0.0
        while True:
            with self._changed:
                if self._stopped:
                    return
                self._resting = monotonic() >= until
                if self._called:  # by one who did not see that it is to rest
                    self._resting = False
                idle = IDLE_PAUSE if self._driven else None
                self._changed.wait(idle if self._resting else RUNNING_PAUSE)
                self._resting = False
            if MPI.Is_finalized():
                return
            called, self._called = self._called, False
            running = [self._drive(driven) for driven in list(self._driven.values())]
            if called or any(running):
                until = monotonic() + IDLE_PAUSE

    def _drive(self, driven: Driven) -> bool:
        try:
            return driven.drive_if_free()
        except RankFailedError:  # which the program can survive, when it comes to wait for this
            return False
        except Exception:  # noqa: BLE001 - who is driven keeps it for its own wait; who waits by MPI's must see it too
            traceback.print_exc()
            return False


@once
def driver() -> Driver:
    """Return the process's driver, whose thread starts with the first call."""
    return Driver()


class InBackground:
    """A plan that goes on by itself between ``start`` and ``wait``.

    Where threads may not call MPI, it goes on only in ``wait``, and in ``drive_if_free``.

    Parameters
    ----------
    plan : Plan
        It stays the caller's, to be freed.
    """

    def __init__(self, plan: Plan[Any]) -> None:
        self.plan = plan
        self._lock = threading.RLock()
        self._errors: dict[str, Any] = {}
        self._running = self._queued = False
        self._next: InBackground | None = None
        self._failed: Exception | None = None

    def start(self) -> None:
        """Start the plan; raises what :meth:`Plan.start` does."""
        with self._lock:
            # What the thread computes warns of overflow as it would where the plan was started.
            self._errors = dict(np.geterr())
            self._failed, self._queued = None, False
            try:
                self.plan.start()
            except Exception as error:
                self._failed = error
                raise
            self._running = True
            if threads_allowed():
                driver().add(self)  # while nobody else can end it

    def start_after(self, before: InBackground) -> None:
        """Start the plan when another one is done, if that is under way or to be started; wait for that one first."""
        with before._lock:
            if before._running or before._queued:
                before._next, self._queued = self, True
                return
        self.start()

    def __call__(self) -> object:
        """Run the plan from start to end; raises what :meth:`Plan.__call__` does."""
        with self._lock:
            self._failed = None
            try:
                return self.plan()
            except Exception as error:
                self._failed = error
                raise

    def drive_if_free(self) -> bool:
        """Let the plan go on unless another thread does; return whether it runs. ``wait`` raises what goes wrong."""
        if self._running and self._lock.acquire(blocking=False):
            try:
                with np.errstate(**self._errors):
                    if self._running and self.plan.test():
                        self._end()
            except Exception as error:  # noqa: BLE001 - raised by wait, in the thread that asks
                self._failed = error
                self._end()
            finally:
                self._lock.release()
        return self._running

    def wait(self, meanwhile: Sequence[InBackground] = ()) -> None:
        """Wait until the plan is done, and bring others forward meanwhile; raises what :meth:`Plan.wait` does."""
        with self._lock:
            if self._running:
                self.plan.wait(meanwhile=meanwhile)
                self._end()
            if self._queued:
                raise PlanError(f"{self.plan.label}: what it comes after has failed")
            if self._failed is not None:
                raise self._failed

    def test(self) -> bool:
        """Return whether the plan is done, and let it go on if not."""
        return not self.drive_if_free()

    def forget(self) -> None:
        """Bring the plan forward no more, nor those that come after it."""
        with self._lock:
            self._next, self._queued = None, False
            if self._running:
                self._end()

    def _end(self) -> None:
        self._running = False
        if threads_allowed():
            driver().remove(self)
        following, self._next = self._next, None
        if following is not None and self._failed is None:
            with suppress(Exception):  # which its own wait raises
                following.start()
