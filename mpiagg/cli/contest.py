"""How a benchmark measures: competitors take turns, so that whatever disturbs the machine disturbs all of them.

At a turn, all ranks leave a barrier and make several calls, one right after the other. The time of such a block is
that of the slowest rank, divided by the calls in it. So calls may overlap where the collective lets ranks run ahead
(a broadcast's root need not wait for the others).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

Times = npt.NDArray[np.float64]

BLOCKS: Final = 20
"""How many turns each competitor takes, at most: enough for a median."""

FEWEST_BLOCKS: Final = 3
"""How many it takes at least, however long they last."""


class Pace(NamedTuple):
    """How long to measure: calls of each competitor, calls before them, and seconds for all together."""

    iterations: int
    warmup: int
    seconds: float


def hold(comm: MPI.Intracomm, calls: Sequence[Callable[[], object]], pace: Pace) -> tuple[Times, int]:
    """Time collective calls against each other; collective.

    Returns
    -------
    seconds : numpy.ndarray
        Of shape ``(blocks, len(calls))``: seconds a call, on the slowest rank.
    repeats : int
        How many calls a block has.
    """
    blocks = min(BLOCKS, pace.iterations)
    turn = _warm_up(comm, calls, pace)
    repeats = min(pace.iterations // blocks, max(1, int(pace.seconds / (blocks * turn))))
    seconds: list[list[float]] = []
    start = time.perf_counter()
    while len(seconds) < blocks:
        seconds.append([_block(comm, call, repeats) for call in calls])
        if _of_rank_0(comm, time.perf_counter() - start) > pace.seconds and len(seconds) >= FEWEST_BLOCKS:
            break
    everyone = np.empty((comm.size, len(seconds), len(calls)))
    comm.Allgather(np.array(seconds), everyone)
    return everyone.max(axis=0), repeats


def _warm_up(comm: MPI.Intracomm, calls: Sequence[Callable[[], object]], pace: Pace) -> float:
    """Make the warm-up calls, as far as a quarter of the time allows; return the seconds of one call of each."""
    start = time.perf_counter()
    done, elapsed = 0, 0.0
    while done < max(1, pace.warmup) and elapsed < pace.seconds / 4:
        for call in calls:
            call()
        done += 1
        elapsed = _of_rank_0(comm, time.perf_counter() - start)
    return elapsed / done


def _block(comm: MPI.Intracomm, call: Callable[[], object], repeats: int) -> float:
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def _of_rank_0(comm: MPI.Intracomm, value: float) -> float:
    """Return rank 0's value, so that all ranks decide alike."""
    shared = np.array([value])
    comm.Bcast(shared)
    return float(shared[0])
