"""What a call of torch.distributed returns: work that is done, that a thread does, or that messages are for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from time import monotonic
from typing import Any, Final

import torch
import torch.distributed as dist
from mpi4py import MPI

from mpiagg.common.compiling import methods_not_compiled
from mpiagg.errors import StallError
from mpiagg.plans.background import driver, threads_allowed
from mpiagg.torch.options import NOT_SET
from mpiagg.transport import wait_patiently

WorkFunction = Callable[[], object]

_CALLBACKS: Final = ThreadPoolExecutor(256, "mpiagg futures")
"""Where what comes after work is done: that may wait for other work, which must not be in the same thread."""


_OVER: Final = threading.Event()
"""What work that is done from the first waits for; to make one for each would take a third of a short call's time."""
_OVER.set()

_FUTURES: Final = threading.Lock()
"""Held while a work's future is made or settled."""


class _KeptWorks:
    """The works to which torch's C++ code may refer and nothing in Python: what Python has of these would end at once.

    Kept are those for which nobody has waited or asked for a future yet, and the last that was waited for, as torch may
    ask for its future next. Beyond :data:`MOST_KEPT`, those that are over are let go: perhaps nobody will ever ask.
    """

    def __init__(self) -> None:
        self._works: dict[Work, None] = {}
        self._waited_for: Work | None = None

    def add(self, work: Work) -> None:
        """Keep a new work."""
        self._works[work] = None
        if len(self._works) > MOST_KEPT:
            with suppress(RuntimeError, StopIteration):  # another thread has come between
                oldest = next(iter(self._works))
                if oldest.over:
                    self._works.pop(oldest, None)

    def discard(self, work: Work, *, waited_for: bool = False) -> None:
        """Keep a work no more, or until another one is waited for."""
        self._works.pop(work, None)
        if waited_for:
            self._waited_for = work


_KEPT: Final = _KeptWorks()

MOST_KEPT: Final = 1024


@methods_not_compiled
class Work(dist.Work):  # type: ignore[misc]  # mypy sees no classes of torch's where torch is not installed
    """Work of a process group: done in the caller's thread, or by the group's thread.

    Parameters
    ----------
    tensors : sequence of torch.Tensor
        Where the result is.
    task : callable, optional
        What is to be done; without it nothing is left to be.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], task: WorkFunction | None = None) -> None:
        super().__init__()
        self._tensors, self._task = tensors, task
        self._over = _OVER if task is None else threading.Event()
        _KEPT.add(self)

    _error: BaseException | None = None
    _told: Any = None
    _future: Any = None

    def run(self) -> None:
        """Do the work, and keep its error for those who wait."""
        assert self._task is not None
        try:
            self._task()
        except BaseException as error:  # noqa: BLE001 - for those who wait
            self._error = as_torch_words_it(error)
        self._task = None
        with _FUTURES:
            self._over.set()
            told, self._told = self._told, None
            if told is not None:
                _CALLBACKS.submit(self._tell, told)

    def wait(self, timeout: timedelta = NOT_SET) -> bool:
        """Wait until it is done, and raise its error, if it has one."""
        seconds = timeout.total_seconds()
        if not self._over.wait(None if seconds <= 0 else seconds):
            raise dist.DistBackendError(
                f"mpiagg: Timed out waiting {round(1000 * seconds)}ms for work that is under way"
            )
        _KEPT.discard(self, waited_for=True)
        if self._error is not None:
            raise self._error
        return True

    @property
    def over(self) -> bool:
        """Whether it is known to be done, or to have failed; nothing is asked of MPI."""
        return self._over.is_set()

    def synchronize(self) -> None:
        """Wait until it is done: what a device has to do comes after it."""
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        """Whether it is done, or has failed."""
        return self._over.is_set()

    def is_success(self) -> bool:
        """Whether it is done, and has not failed."""
        return self._over.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """Return its error, if it has failed."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Return the tensors with the result."""
        return list(self._tensors)

    def get_future(self) -> Any:
        """Return a future of the tensors with the result; an error is a RuntimeError of its words there."""
        with _FUTURES:
            if self._future is None:
                told: Any = torch.futures.Future(devices=list({x.device for x in self._tensors if x.is_cuda}))
                self._future = told.then(_outcome)
                if self._over.is_set():
                    self._tell(told)  # whose future nobody has had yet
                else:
                    self._told = told
        _KEPT.discard(self)
        return self._future

    def _tell(self, told: Any) -> None:
        told.set_result(list(self._tensors) if self._error is None else self._error)


def _outcome(told: Any) -> list[torch.Tensor]:
    """Return the tensors that a future was told, or raise the error.

    What raises is a callback, so that the future of it has failed: one that ``set_exception`` was called for has, to
    torch's own DDP and to all else in C++, the error as its value.
    """
    found: list[torch.Tensor] | BaseException = told.value()
    del told  # has the error, whose traceback would have it
    if isinstance(found, BaseException):
        raise found
    return found


@methods_not_compiled
class MessageWork(Work):
    """A message under way: it goes on when somebody asks.

    Parameters
    ----------
    tensor : torch.Tensor
        What is sent, or where the message arrives.
    request : MPI.Request
    label : str
        What is waited for, in words.
    timeout : float
        Seconds that a wait may last.
    then : callable, optional
        What is to be done when it has come.
    under_way : dict of MessageWork
        Those of the group, the oldest first, whose memory MPI may still read or write, and whether they arrive here;
        this one is among them as long as that may be.
    into : bool
        Whether it arrives here.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        request: MPI.Request,
        label: str,
        timeout: float,
        then: WorkFunction | None = None,
        *,
        under_way: dict[MessageWork, bool],
        into: bool,
    ) -> None:
        super().__init__([tensor], then or _nothing)
        self._request, self._label, self._timeout = request, label, timeout
        self._testing = threading.Lock()
        self._source, self._until = -1, 0.0
        self._under_way = under_way
        under_way[self] = into

    def wait(self, timeout: timedelta = NOT_SET) -> bool:
        """Wait until the message has come or gone."""
        seconds = timeout.total_seconds()
        limit = self._timeout if seconds <= 0 else seconds
        if not self.is_completed():
            try:
                wait_patiently(self.is_completed, lambda: self._label, limit)
            except StallError as error:
                raise as_torch_words_it(error) from error
        return super().wait()

    def is_completed(self) -> bool:
        """Whether the message has come or gone."""
        with self._testing:  # a request is one thread's at a time
            if super().is_completed():
                return True
            status = MPI.Status()
            try:
                if not self._request.Test(status):
                    return False
            except MPI.Exception as error:
                self._task = partial(_fail, error)
            self._source = status.Get_source()
            self._under_way.pop(self, None)
            self.run()
        return True

    def get_future(self) -> Any:
        """Return a future of the tensor; who waits for it does not ask here, so a thread does."""
        future = super().get_future()
        if not self.is_completed() and threads_allowed():
            self._until = monotonic() + self._timeout
            driver().add(self)
        return future

    def drive_if_free(self) -> bool:
        """Ask for who waits for the future, who learns of it if that is in vain; return whether to go on asking."""
        if not self.is_completed() and monotonic() < self._until:
            return True
        driver().remove(self)
        with _FUTURES:
            if self._over.is_set():  # the future was told
                return False
            told, self._told, self._future = self._told, None, None
        if told is not None:  # who asks next gets a new future
            in_vain = as_torch_words_it(StallError(f"waited {self._timeout:g} s in vain for {self._label}"))
            _CALLBACKS.submit(told.set_result, in_vain)
        return False

    def source_rank(self) -> int:
        """Return the rank that the message has come from."""
        return self._source

    _source_rank = source_rank


class Line:
    """The work of a group, in the order in which it was asked for.

    What is to be done at once is done by who asks for it, if nothing is under way, also for other threads of the
    caller's; else by a thread of the group's.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Work | None = None
        self._doing, self._asking = threading.Lock(), threading.Lock()

    def do(self, tensors: Sequence[torch.Tensor], task: WorkFunction, *, at_once: bool) -> Work:
        """Do a task after those before it; return the work that it is."""
        if (at_once or not threads_allowed()) and self._doing.acquire(blocking=False):
            try:
                if self._all_done():
                    task()
                    return Work(tensors)
            except (StallError, MPI.Exception) as error:
                raise as_torch_words_it(error) from error
            finally:
                self._doing.release()
        context = copy_context()  # in which a caller says, for one, how warnings of NumPy's are handled
        work = Work(tensors, lambda: context.run(task))
        with self._asking:
            self._last = work
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._queue.put(work)
        return work

    def _all_done(self) -> bool:
        """Whether all that was put into the queue is done."""
        with self._asking:
            if self._last is not None and self._last.is_completed():
                self._last = None  # its tensors are let go
            return self._last is None

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            with self._doing:
                pass  # what was begun at once is done; nothing else begins so before this work is done
            work.run()

    def end(self) -> None:
        """Do what has been asked for, and end the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None


def as_torch_words_it(error: BaseException) -> BaseException:
    """Return an error as torch's own backends raise it."""
    found = error
    if isinstance(error, StallError):
        found = dist.DistBackendError(f"mpiagg: Timed out waiting for other ranks: {error}")
        found.__cause__ = error
    elif isinstance(error, MPI.Exception):
        found = dist.DistBackendError(f"mpiagg: the MPI library has found an error: {error}")
    return found


def _nothing() -> None:
    """Be the task of work that a message does."""


def _fail(error: Exception) -> None:
    """Be that of a message that has failed."""
    raise error
