"""Who brings together what the ranks of a process set ask for, in whatever order each of them does.

A rank with anything pending takes part in rounds. Each begins with an all-gather of a few numbers: a digest of what is
first in the queue, whether the rank has joined or is to end, and how long the descriptions of all that is pending are.
If the digests are equal, that request is done at once. Otherwise the descriptions are gathered, and what all ranks have
is done, in the order of the first rank that has not joined; ranks that have joined take part in it. Once all have
joined, what any of them has asked for before is done. A rank that has nothing pending has not come yet; the others wait
for it. If nothing is common and nothing new comes for too long, all ranks are told who waits for what.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from hashlib import blake2b
from itertools import chain, zip_longest
from typing import Final

import msgspec
import numpy as np
import torch
from mpi4py import MPI

from mpiagg.collectives import block_functions, moving_functions
from mpiagg.collectives.comm import Comm
from mpiagg.errors import Error, StallError
from mpiagg.horovod.exceptions import HorovodInternalError, InvalidRequestError
from mpiagg.horovod.requests import TensorRequest, Terms
from mpiagg.horovod.running import run
from mpiagg.plans.background import threads_allowed
from mpiagg.transport.process import warning_time
from mpiagg.transport.waiting import time_limit
from mpiagg.watch import say

_JOINED: Final = 1
_ENDS: Final = 2
_GIVES_UP: Final = 4
_RESTARTS: Final = 8

_NAMED: Final = 8
"""How many requests that others lack are named, at most."""

_LONGEST_SLEEP: Final = 5e-3
"""Seconds between two rounds at most, while the ranks have nothing in common."""


class Engine:
    """The requests of the ranks of a communicator; making one is collective.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks; it is duplicated.

    Attributes
    ----------
    numbers : Counter
        How many requests without names there have been, by their kinds.
    failed : BaseException or None
        What has put the ranks out of step.
    gone : list of int
        Once it has ended: the ranks that have not ended it in order to start again.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        # By our own schedules alone: they may be waited for by polling.
        self.comm = Comm(comm, reproducible=True)
        self.rank, self.size = self.comm.rank, self.comm.size
        self._pending: dict[str, TensorRequest] = {}
        self._changed = threading.Condition()
        self._join: TensorRequest | None = None
        self._gpu = 0
        self._joined: set[int] = set()
        self._ends = self._over = False
        self._restarts = False
        self.failed: BaseException | None = None
        self.gone: list[int] = []
        self.numbers: Counter[str] = Counter()
        self._pause = 0.0
        self._limit, self._warning = time_limit(), warning_time()
        self._stuck: tuple[bytes, set[int]] | None = None
        self._since = self._warned = 0.0
        self._thread: threading.Thread | None = None
        if threads_allowed():
            self._thread = threading.Thread(target=self._run, name="mpiagg horovod", daemon=True)
            self._thread.start()

    @property
    def usable(self) -> bool:
        """Whether requests can still be made."""
        return self.failed is None and not self._ends

    def submit(self, request: TensorRequest) -> TensorRequest:
        """Ask for something, which is done when all ranks have asked for it.

        Raises
        ------
        InvalidRequestError
            If a request of the same name is pending.
        HorovodInternalError
            If a rank was waited for in vain before.
        """
        with self._changed:
            self._check()
            if request.terms.name in self._pending:
                raise InvalidRequestError(
                    "Duplicate tensor name: requested to "
                    f"{request.terms.kind} a tensor with the same name as another tensor that is currently being "
                    f"processed, {request.terms.name!r}. If you want to request another tensor, use a different name."
                )
            self._pending[request.terms.name] = request
            self._changed.notify()
        return request

    def join(self, gpu: int = 0) -> TensorRequest:
        """Take part in what others ask for, until all ranks have joined; the result is the last that has."""
        with self._changed:
            self._check()
            self._gpu = gpu
            self._join = self._join or TensorRequest(Terms("join", "join"))
            self._changed.notify()
            return self._join

    def _check(self) -> None:
        if self.failed is not None:
            raise HorovodInternalError(f"the ranks are not together any more: {self.failed}") from self.failed
        if self._ends:
            raise HorovodInternalError("Horovod has been shut down.")

    def wait(self, request: TensorRequest) -> object:
        """Wait until a request is done; return its result, or raise its error."""
        while self._thread is None and not request.over.is_set():
            self._step()
        request.over.wait()
        if request.error is not None:
            raise HorovodInternalError(str(request.error)) from request.error
        return request.result

    def is_over(self, request: TensorRequest) -> bool:
        """Whether a request is done; where threads may not call MPI, this lets it go on."""
        if self._thread is None and not request.over.is_set():
            self._step()
        return request.over.is_set()

    def begin_to_end(self, *, to_restart: bool = False) -> None:
        """Let the other ranks know that this one makes no more requests, and whether it starts again."""
        with self._changed:
            self._ends, self._restarts = True, self._restarts or to_restart
            self._changed.notify()

    def end(self) -> None:
        """Do what all ranks have asked for, end the rest, and give back the communicator; collective."""
        self.begin_to_end()
        while self._thread is None and not self._over:
            self._step()
        if self._thread is not None:
            self._thread.join()
        if self.failed is None and not MPI.Is_finalized():
            self.comm.Free()

    # -- the rounds

    def _run(self) -> None:
        while not self._over:
            with self._changed:
                while not (self._pending or self._join or self._ends):
                    self._changed.wait()
            self._step()

    def _step(self) -> None:
        """Take part in a round."""
        try:
            found = self._round()
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody may wait for ever
            self._fail(error)
            return
        if found:
            self._stuck = None
        self._pause = 0.0 if found else min(self._pause + 1e-4, _LONGEST_SLEEP)
        if self._pause and not self._over:
            time.sleep(self._pause)

    def _round(self) -> bool:
        """Do what all ranks have; return whether that is anything."""
        with self._changed:
            pending = list(self._pending.values())
            late = self._stuck is not None and time.monotonic() - self._since > self._limit
            flags = _JOINED * (self._join is not None) + _ENDS * self._ends
            flags += _GIVES_UP * late + _RESTARTS * self._restarts
        text = msgspec.msgpack.encode([msgspec.Raw(request.encoded) for request in pending])
        first = blake2b(pending[0].encoded if pending else b"", digest_size=16).digest()
        own = np.array([*np.frombuffer(first, np.int64), flags, len(text)])
        told = moving_functions.allgather(own, comm=self.comm)
        if pending and not told[:, 2].any() and (told[:, :2] == own[:2]).all():
            self._do(pending[0])
            return True
        lengths = told[:, 3].tolist()
        whole = block_functions.allgatherv(np.frombuffer(text, np.uint8), lengths, comm=self.comm).tobytes()
        ends = np.cumsum(lengths).tolist()
        lists = [
            msgspec.msgpack.decode(whole[end - length : end], type=list[Terms])
            for end, length in zip(ends, lengths, strict=True)
        ]
        joined = set(np.flatnonzero(told[:, 2] & _JOINED).tolist())
        found = self._do_common([{each.name: each for each in terms} for terms in lists], joined)
        if not found and len(joined) < self.size:
            self._look_for_stall(whole, lists, joined, gives_up=bool((told[:, 2] & _GIVES_UP).any()))
        self._end_of_round(joined, told[:, 2])
        return found

    def _look_for_stall(self, whole: bytes, lists: list[list[Terms]], joined: set[int], *, gives_up: bool) -> None:
        """Raise StallError on all ranks if nothing new has come for as long as a rank waits; warn before."""
        now = time.monotonic()
        if self._stuck != (whole, joined):
            self._stuck, self._since, self._warned = (whole, joined), now, now
        elif gives_up:
            raise StallError(f"waited {self._limit:g} s in vain for {_describe(lists, joined)}")
        elif self.rank == 0 and 0 < self._warning < now - self._warned:
            self._warned = now
            say(f"waiting for {now - self._since:.0f} s for {_describe(lists, joined)}")

    def _do_common(self, lists: list[dict[str, Terms]], joined: set[int]) -> bool:
        """Do what all ranks that have not joined have asked for; once all have joined, what any of them has."""
        active = [lists[rank] for rank in range(self.size) if rank not in joined]
        order = active[0] if active else dict.fromkeys(chain.from_iterable(lists))
        common = [name for name in order if all(name in terms for terms in active)]
        for name in common:
            asked = {rank: lists[rank][name] for rank in range(self.size) if name in lists[rank]}
            first = next((rank for rank, terms in asked.items() if not terms.spare), min(asked))
            reference, difference, refused = asked[first], "", ""
            for rank, terms in asked.items():
                if not difference and (words := reference.difference(terms)):
                    difference = f"ranks {first} and {rank} disagree on {name!r}: {words}"
            absent = [rank for rank in joined if rank not in asked]
            if absent:
                refused = reference.refused_to_joined()
                if reference.kind == "broadcast" and reference.root in absent:
                    refused = f"the root of the broadcast {name!r} has called join()"
            with self._changed:
                request = self._pending.get(name)
            if difference or refused:
                if request is not None:
                    self._finish(request, error=HorovodInternalError(difference or refused))
            else:
                if request is not None and request.terms.kind != reference.kind:
                    request.go_with(reference)
                self._do(request or TensorRequest(reference, reference.stand_ins(self._gpu)))
        return bool(common)

    def _end_of_round(self, joined: set[int], flags: np.ndarray) -> None:
        """Let those go who wait for all to join or to end."""
        if len(joined) == self.size:
            last = max(joined - self._joined or joined)
            with self._changed:
                request, self._join = self._join, None
            self._joined = set()
            if request is not None:
                request.end(last)
        else:
            self._joined = joined
        ending = flags & _ENDS
        if ending.any():
            self._end_all(HorovodInternalError("Horovod has been shut down."))
            self.gone = np.flatnonzero(flags & _RESTARTS == 0).tolist()
            self._over = bool(ending.all())

    def _do(self, request: TensorRequest) -> None:
        try:
            result = run(self.comm, request)
        except (Error, MPI.Exception, MemoryError, torch.cuda.OutOfMemoryError) as error:
            self._finish(request, error=error)
            raise
        except Exception as error:  # noqa: BLE001 - for who waits; it is the same on all ranks
            self._finish(request, error=error)
        else:
            self._finish(request, result)

    def _finish(self, request: TensorRequest, result: object = None, error: BaseException | None = None) -> None:
        with self._changed:
            self._pending.pop(request.terms.name, None)
        request.end(result, error)

    def _fail(self, error: BaseException) -> None:
        """Give up: the ranks are at different places in what they have begun."""
        with self._changed:
            self.failed, self._over = error, True
        self._end_all(error)

    def _end_all(self, error: BaseException) -> None:
        """Fail what has been asked for."""
        with self._changed:
            left = [*self._pending.values(), *([self._join] if self._join else [])]
            self._pending.clear()
            self._join = None
        for request in left:
            request.end(error=error)


def _describe(lists: list[list[Terms]], joined: set[int]) -> str:
    """Return what some ranks have asked for and others have not; what each has asked for first is named first."""
    having: dict[str, list[int]] = {"join()": sorted(joined)} if joined else {}
    for terms_of_ranks in zip_longest(*lists):
        for rank, terms in enumerate(terms_of_ranks):
            if terms is not None:
                having.setdefault(repr(terms.name), []).append(rank)
    who = [
        f"{what} of rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
        for what, ranks in having.items()
    ]
    more = [f"{len(who) - _NAMED} more"] if len(who) > _NAMED else []
    return f"requests that not all ranks have made: {', '.join([*who[:_NAMED], *more])}"
