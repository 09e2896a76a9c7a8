"""A rank in a job of bench/faults.py: it works, and notes what it sees."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from bench.fault_cases import ALIKE, FREEING, ODD, RIGHT, RUN, SYNC, WRONG

SHORT: Final = 100
PACE: Final = 0.01
"""Seconds between two looks at what others do."""


class Asked(NamedTuple):
    """A collective call; of plans there may be another for the same."""

    collective: str = "allreduce"
    length: int = SHORT
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0
    algorithm: str = "auto"
    another: bool = False


class Rank:
    """What this process works with, and its notes.

    Parameters
    ----------
    folder : Path
        Where the ranks' notes are.
    way : str
        In which call or state the fault comes.
    """

    def __init__(self, folder: Path, way: str) -> None:
        self.folder, self.way = folder, way
        self._file = (folder / f"{os.getpid()}.said").open("w", buffering=1)

    def note(self, event: str, **more: object) -> None:
        """Write down what happens."""
        self._file.write(json.dumps({"time": time.monotonic(), "event": event, **more}) + "\n")

    def start(self) -> None:
        """Start MPI."""
        from mpi4py import MPI  # noqa: PLC0415 - nothing may be printed before that goes where it should

        import mpiagg  # noqa: PLC0415 - so too

        self.mpi, self.mpiagg, self.world = MPI, mpiagg, MPI.COMM_WORLD
        for name in mpiagg.__all__:
            getattr(mpiagg, name)  # imported now, and not while others wait
        self.rank, self.size = self.world.Get_rank(), self.world.Get_size()
        self.odd = self.rank == ODD
        self.note("rank", rank=self.rank)

    def get_acquainted(self) -> None:
        """Make the communicators, so that a later fault meets ranks that know each other."""
        self.check(self.call(Asked()), Asked())
        self.comm = self.mpiagg.Comm(self.world)
        if self.way in {RUN, ALIKE}:
            asked = [Asked(), Asked(length=2 * SHORT), Asked(length=2 * SHORT, another=True)]
            self.plans = {each: self.mpiagg.allreduce_init(self.array(each)) for each in asked}
        elif self.way == FREEING:
            self.comm.Barrier()  # which makes what is to be freed
        elif self.way == SYNC:
            self.ddp = self.mpiagg.DDP([self.array(Asked())])

    def check(self, result: np.ndarray[Any, Any], asked: Asked) -> None:
        """Note whether a result is right."""
        total, root = self.size * (self.size + 1) // 2, asked.root + 1
        right = root if asked.collective == "broadcast" else {"sum": total, "max": self.size}[asked.op]
        self.note("result", result=RIGHT if (result == right).all() else WRONG)

    def array(self, asked: Asked) -> np.ndarray[Any, Any]:
        """Return what this rank passes."""
        return np.full(asked.length, self.rank + 1, asked.dtype)

    def call(self, asked: Asked, **more: object) -> np.ndarray[Any, Any]:
        """Make a call by the array functions."""
        return getattr(self.mpiagg, asked.collective)(self.array(asked), **self._keywords(asked), **more)  # type: ignore[no-any-return]  # an array, by any of its functions

    @staticmethod
    def _keywords(asked: Asked) -> dict[str, object]:
        kind: dict[str, object] = {"root": asked.root} if asked.collective == "broadcast" else {"op": asked.op}
        return {**kind, "algorithm": asked.algorithm}

    def begin(self, asked: Asked) -> Callable[[], np.ndarray[Any, Any]]:
        """Begin a call in this case's way, and return what ends it and returns the result."""
        x = self.array(asked)
        if self.way == "nonblocking":
            request = self._by_mpi(asked, x, "I")
            return lambda: request.Wait() and x
        if self.way == "Comm":
            self._by_mpi(asked, x, "")
            return lambda: x
        if self.way == "plan":
            make = getattr(self.mpiagg, f"{asked.collective}_init")
            return make(x, **self._keywords(asked))  # type: ignore[no-any-return]  # a plan, by any of its functions
        if self.way in {RUN, ALIKE}:
            return self.plans[asked]
        if self.way == SYNC:
            self.ddp.sync_gradients([x])  # the average
            return lambda: x * self.size
        result = self.call(asked, check=True) if self.way == "check=True" else self.call(asked)
        return lambda: result

    def _by_mpi(self, asked: Asked, x: np.ndarray[Any, Any], prefix: str) -> Any:
        """Call the communicator, or begin to."""
        if asked.collective == "broadcast":
            return getattr(self.comm, f"{prefix}bcast" if prefix else "Bcast")(x, root=asked.root)
        op = {"sum": self.mpi.SUM, "max": self.mpi.MAX}[asked.op]
        return getattr(self.comm, f"{prefix}allreduce" if prefix else "Allreduce")(self.mpi.IN_PLACE, x, op)

    def perform(self, *calls: Asked) -> None:
        """Make calls in this case's way, all begun before the first is waited for where that can be; note results."""
        for asked, end in [(asked, self.begin(asked)) for asked in calls]:
            self.check(end(), asked)

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Note an error in this block, and raise it again when those who have something to say have said it."""
        try:
            yield
        except Exception as error:
            self.note("error", kind=type(error).__name__, text=str(error))
            (self.folder / f"{os.getpid()}.finished").touch()
            self._wait_for_others()
            raise

    def _wait_for_others(self) -> None:
        """Wait until all ranks that can are at an end: who raises ends the job, and would cut the others short."""
        speakers = int(os.environ["FAULTS_SPEAKERS"])
        deadline = time.monotonic() + float(os.environ["FAULTS_PATIENCE"])
        while len(list(self.folder.glob("*.finished"))) < speakers and time.monotonic() < deadline:
            time.sleep(PACE)

    def go_on(self) -> None:
        """Work on as if nothing had happened, on the same communicator."""
        for _ in range(2):
            self.check(self.begin(Asked())() if self.way == "Comm" else self.call(Asked()), Asked())
        self.note("done")
        (self.folder / f"{os.getpid()}.finished").touch()
